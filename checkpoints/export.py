"""Export a model to a folder that transformers loads: safetensors, config.json, generation_config.json, tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from atbx.checkpoints import shards
from atbx.checkpoints.check import check
from atbx.checkpoints.generation import Generation
from atbx.checkpoints.huggingface import CONFIG, GENERATION
from atbx.checkpoints.replace_file import replacing
from atbx.checkpoints.safetensors_reader import DTYPES, INDEX, SINGLE
from atbx.checkpoints.tokenizer import Text
from atbx.core import trees
from atbx.core.errors import CheckpointError, MissingExtraError, OptionError, UnsupportedError
from atbx.models.registry import family_of_config

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export_safetensors(
    params: Any,
    config: Any,
    folder: str | os.PathLike[str],
    *,
    text: Text | None = None,
    generation: Generation | None = None,
    shard_bytes: int = 5 * 10**9,
    progress: bool = True,
) -> None:
    """Write a model as a Hugging Face folder: `AutoModelForCausalLM.from_pretrained(folder)` loads it.

    A tied output projection is not written; transformers ties it again. Files of these names in the folder are
    replaced, each when its successor is complete.

    params:      the parameter tree of `config`'s family; dtypes are kept.
    folder:      made if it is not there.
    text:        writes tokenizer.json and tokenizer_config.json too.
    generation:  writes its end tokens and defaults to generation_config.json; without it the tokenizer's end tokens.
    shard_bytes: weights beyond this size go into several files with an index.
    progress:    show a bar on stderr where that is a terminal.

    Raises:
        TreeError: `params` do not fit `config`; lists every mismatch.
        UnsupportedError: transformers has no model that computes this; names the field.
        CheckpointError: the folder cannot be written.
        MissingExtraError: the safetensors library is not installed.
    """
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise OptionError(
            "not a size", where="shard_bytes", expected="a positive number of bytes", found=shard_bytes
        )
    family = family_of_config(config)
    check(params, family.abstract(config))
    description = family.config_to_hf(config)
    tensors = _named(params, config, description)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"the folder cannot be made: {error.strerror or error}", path=folder) from error
    _write_weights(folder, tensors, shard_bytes, progress)
    found = generation or Generation()
    if text is not None:
        found = found.with_eos(text.eos)
        _write_tokenizer(folder, text)
    special: dict[str, Any] = {"bos_token_id": None if text is None else text.bos, "eos_token_id": None}
    if text is not None and text.pad is not None:
        special["pad_token_id"] = text.pad
    if found.eos:
        special["eos_token_id"] = found.eos[0] if len(found.eos) == 1 else list(found.eos)
    dtype = (
        str(tensors["model.embed_tokens.weight"].dtype) if "model.embed_tokens.weight" in tensors else None
    )
    named = {} if dtype is None else {"torch_dtype": dtype.removeprefix("torch.")}
    _write_json(folder / CONFIG, description | special | named)
    sampling = {k: v for k, v in found.to_metadata().items() if k not in ("eos", "sample")}
    if found.sample is not None:
        sampling["do_sample"] = found.sample
    _write_json(folder / GENERATION, special | sampling)


def _named(params: Any, config: Any, description: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors by their Hugging Face names."""
    family = family_of_config(config)
    # What transformers will read from the description may have biases that this model lacks: zeros are the same.
    theirs = family.config_from_hf(description, CONFIG)
    paths, leaves, _ = trees.flatten_with_paths(params)
    ours = dict(zip(paths, leaves, strict=True))
    wanted, expected, _ = trees.flatten_with_paths(family.abstract(theirs))
    dtype = ours["embed"].dtype
    for path, abstract in zip(wanted, expected, strict=True):
        if path not in ours and path.endswith("_bias"):
            ours[path] = torch.zeros(abstract.shape, dtype=dtype)
    names = family.hf.names(theirs)
    if names.keys() != ours.keys():
        differing = sorted(names.keys() ^ ours.keys())
        raise UnsupportedError(
            "transformers' model has other parameters", where=differing[0], found=len(differing)
        )
    for path, leaf in ours.items():
        if leaf.dtype not in _DTYPE_NAMES:
            raise UnsupportedError("safetensors has no such dtype", where=path, found=leaf.dtype)
    return {names[path].name: leaf for path, leaf in ours.items()}


def _write_weights(
    folder: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int, progress: bool
) -> None:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError("safetensors", "convert", "writing safetensors") from error
    names = list(tensors)
    placed = shards.assign([tensors[name].nbytes for name in names], shard_bytes)
    count = max(placed) + 1
    files = (
        [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    with tqdm(total=sum(t.nbytes for t in tensors.values()), desc=f"Writing {folder.name}", unit="B",
              unit_scale=True, disable=None if progress else True) as bar:  # fmt: skip
        for index, file in enumerate(files):
            # Contiguous, and not one tensor under two names: safetensors refuses both.
            held = {
                name: tensors[name].detach().cpu().contiguous()
                for name, place in zip(names, placed, strict=True)
                if place == index
            }
            with replacing(folder / file) as target:
                target.write(safetensors.torch.save(held, metadata={"format": "pt"}))
            bar.update(sum(t.nbytes for t in held.values()))
    if count > 1:
        weight_map = {name: files[place] for name, place in zip(names, placed, strict=True)}
        total = sum(t.nbytes for t in tensors.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    # transformers takes the single file where both are there: what an earlier export left must not be read instead.
    (folder / (INDEX if count == 1 else SINGLE)).unlink(missing_ok=True)


def _write_tokenizer(folder: Path, text: Text) -> None:
    document = json.loads(text.to_metadata()["tokenizer"])
    if document.get("post_processor") is None:
        document["post_processor"] = _post_processor(text)
    _write_json(folder / "tokenizer.json", document)
    templates = dict(text.chat_templates)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": text.add_bos,
        "add_eos_token": text.add_eos,
        **text.special_spellings,
    }
    if set(templates) == {"default"}:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": body} for name, body in templates.items()]
    _write_json(folder / "tokenizer_config.json", settings)


def _post_processor(text: Text) -> dict[str, Any] | None:
    """What makes the tokenizers library add the begin and end tokens; a GGUF file only says that they are added."""
    named = text.special_spellings
    begin, end = named.get("bos_token"), named.get("eos_token")
    first = begin if text.add_bos and text.bos is not None else None
    last = end if text.add_eos and text.eos else None
    if first is None and last is None:
        return None

    def around(part: str, type_id: int) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = [{"Sequence": {"id": part, "type_id": type_id}}]
        if first is not None:
            pieces.insert(0, {"SpecialToken": {"id": first, "type_id": type_id}})
        if last is not None:
            pieces.append({"SpecialToken": {"id": last, "type_id": type_id}})
        return pieces

    ids = {first: text.bos, last: text.eos[0] if text.eos else None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]}
            for token in (first, last)
            if token is not None
        },
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
