"""Reads the tokenizer of a Hugging Face model folder: `tokenizer.json` and the files that complete it.

`tokenizer.json` is the tokenizer itself. What it does not say, stands in `tokenizer_config.json`,
`special_tokens_map.json` and the chat template files: which tokens begin and end a sequence, whether they are
added, and how messages become text. Here they are brought together in one checked description.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atbx.core.errors import AtbxError, CheckpointError, UnsupportedError

NAMED = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True)
class HfTokenizer:
    """A folder's tokenizer: its JSON, the spelling of its named tokens, and its chat templates by name."""

    tokenizer_json: str
    vocab_size: int
    ids: Mapping[str, int]
    special: Mapping[str, int]
    spellings: Mapping[str, str]
    add_bos: bool
    add_eos: bool
    chat_templates: Mapping[str, str]


def read_folder(folder: str | Path) -> HfTokenizer:
    """Read and check a folder's tokenizer files.

    Raises CheckpointError naming the file that is missing or malformed.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [
            name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (folder / name).is_file()
        ]
        raise CheckpointError(
            "the folder has no tokenizer.json",
            path=folder,
            found=", ".join(others) or None,
            hint="Load the tokenizer with transformers' AutoTokenizer and save it with save_pretrained(folder): "
            "that writes a tokenizer.json",
        )
    document = _read_json(path)
    if not isinstance(document.get("model"), dict) or "vocab" not in document["model"]:
        raise CheckpointError(
            "not a tokenizer: no model with a vocabulary", path=path, expected="model.vocab"
        )
    try:
        return _gather(folder, path, document)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, AtbxError):
            raise
        # Parts that are there but not of the shape that the format gives them.
        raise CheckpointError(
            f"the tokenizer files are malformed: {type(error).__name__}: {error}", path=folder
        ) from error


def _gather(folder: Path, path: Path, document: dict[str, Any]) -> HfTokenizer:
    config_path = folder / "tokenizer_config.json"
    config = _read_json(config_path) if config_path.is_file() else {}
    map_path = folder / "special_tokens_map.json"
    named = {**(_read_json(map_path) if map_path.is_file() else {}), **config}
    spellings = {
        f"{name}_token": _spelling(named[f"{name}_token"], config_path, f"{name}_token")
        for name in NAMED
        if named.get(f"{name}_token") is not None
    }
    completed = _complete_added_tokens(document, config, spellings, config_path)
    ids, special = _vocabulary(document)
    prefix, suffix = _template_tokens(document.get("post_processor"))
    return HfTokenizer(
        tokenizer_json=json.dumps(document, ensure_ascii=False) if completed else path.read_text("utf-8"),
        vocab_size=max(ids.values(), default=-1) + 1,
        ids=ids,
        special=special,
        spellings=spellings,
        add_bos=_is_added("bos", config, spellings, prefix, path),
        add_eos=_is_added("eos", config, spellings, suffix, path),
        chat_templates=_chat_templates(folder, config, config_path),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        offset = error.start if isinstance(error, UnicodeDecodeError) else error.pos
        raise CheckpointError(f"not JSON: {error}", path=path, offset=offset) from error
    if not isinstance(document, dict):
        raise CheckpointError("wrong JSON", path=path, expected="an object", found=type(document).__name__)
    return document


def _spelling(token: Any, path: Path, key: str) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise CheckpointError(
            f"{key} is malformed", path=path, expected="a string or an object with content", found=repr(token)
        )
    return text


def _complete_added_tokens(
    document: dict[str, Any], config: Mapping[str, Any], spellings: Mapping[str, str], path: Path
) -> bool:
    """Add to the document what only the configuration knows: its added tokens, and named tokens as special."""
    added: list[dict[str, Any]] = document.setdefault("added_tokens", [])
    known = {token["content"] for token in added}
    vocabulary = _vocabulary({**document, "added_tokens": []})[0]
    wanted: dict[str, tuple[int, bool]] = {}
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        content = _spelling(token, path, f"added_tokens_decoder[{number!r}]")
        wanted[content] = (int(number), bool(token.get("special", False)))
    for content in spellings.values():
        if content in vocabulary:
            wanted.setdefault(content, (vocabulary[content], True))
    missing = {content: entry for content, entry in wanted.items() if content not in known}
    for content, (number, is_special) in missing.items():
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added.append({"id": number, "content": content, "special": is_special, **flags})
    added.sort(key=lambda token: int(token["id"]))
    return bool(missing)


def _vocabulary(document: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """All tokens with their ids, and those of them that are special."""
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, dict):
        ids = {str(token): int(i) for token, i in vocabulary.items()}
    else:  # a Unigram model lists [token, score]
        ids = {str(entry[0]): i for i, entry in enumerate(vocabulary)}
    special: dict[str, int] = {}
    for token in document.get("added_tokens") or []:
        ids[token["content"]] = int(token["id"])
        if token.get("special"):
            special[token["content"]] = int(token["id"])
    return ids, special


def _template_tokens(processor: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """The tokens that the post-processor puts before and after a single text."""
    if processor is None:
        return [], []
    if processor["type"] == "Sequence":
        found = [_template_tokens(part) for part in processor["processors"]]
        return [t for before, _ in found for t in before], [t for _, after in found for t in after]
    if processor["type"] != "TemplateProcessing":
        return [], []
    before: list[str] = []
    after: list[str] = []
    side = before
    for piece in processor["single"]:
        if "Sequence" in piece:
            side = after
        else:
            side.append(piece["SpecialToken"]["id"])
    return before, after


def _is_added(
    name: str, config: Mapping[str, Any], spellings: Mapping[str, str], found: list[str], path: Path
) -> bool:
    own = spellings.get(f"{name}_token")
    strangers = [token for token in found if token != own]
    if strangers:
        raise UnsupportedError(
            f"the tokenizer adds {', '.join(strangers)} to every text",
            where=str(path),
            expected=f"{name}_token {own!r} only",
            found=found,
        )
    flag = config.get(f"add_{name}_token")
    return bool(found if flag is None else flag) and own is not None


def _chat_templates(folder: Path, config: Mapping[str, Any], config_path: Path) -> dict[str, str]:
    """Templates by name; a file of its own wins over the configuration's key, as transformers reads them."""
    templates: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        templates["default"] = stated
    elif isinstance(stated, list):
        for i, entry in enumerate(stated):
            if not isinstance(entry, dict) or not {"name", "template"} <= set(entry):
                raise CheckpointError(
                    f"chat_template[{i}] is malformed",
                    path=config_path,
                    expected="an object with name and template",
                )
            templates[entry["name"]] = entry["template"]
    elif stated is not None:
        raise CheckpointError(
            "chat_template is malformed",
            path=config_path,
            expected="a string or a list of named templates",
            found=type(stated).__name__,
        )
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text("utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text("utf-8")
    return templates
