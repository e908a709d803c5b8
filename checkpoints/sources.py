"""Opens a model in any form that is read and describes it in one way: family, configuration, and one lazy leaf for
each parameter of our tree. Loading and conversion differ only in what they do with the leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atbx.checkpoints import generation as gen
from atbx.checkpoints import huggingface
from atbx.checkpoints.check import check
from atbx.checkpoints.config_metadata import config_from_metadata
from atbx.checkpoints.generation import Generation
from atbx.checkpoints.gguf_reader import MAGIC, GgufFile
from atbx.checkpoints.leaves import Lazy, release
from atbx.checkpoints.msgpack_reader import read_tree
from atbx.checkpoints.recognise import hint_for, recognise
from atbx.checkpoints.tokenizer import Text
from atbx.core import trees
from atbx.core.abstract import Abstract
from atbx.core.errors import CheckpointError, TreeError, UnsupportedError
from atbx.models.name_map import Foreign, Naming
from atbx.models.registry import Family, family_named, family_of_gguf, family_of_hf


@dataclass(frozen=True)
class Source:
    """A model that has been opened, with nothing of its weights read.

    form:       "atbx", "gguf", "safetensors" or "flax".
    leaves:     tree path to the parameter in our layout; its dtype is the source's.
    text:       makes the tokenizer; None where the source has none.
    generation: gathers the generation defaults and the end tokens.
    """

    path: Path
    form: str
    family: Family
    config: Any
    leaves: Mapping[str, Lazy]
    text: Callable[[], Text | None]
    generation: Callable[[], Generation]

    def tree(self, leaf: Callable[[str, Lazy], Any]) -> Any:
        """The parameter tree with `leaf(path, lazy)` at each place."""
        return trees.map_with_paths(
            lambda path, _: leaf(path, self.leaves[path]), self.family.abstract(self.config)
        )


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a converted file, a GGUF file or a Hugging Face folder, and check it as a whole.

    Raises:
        CheckpointError: it is none of these, or is damaged; names file, offset or key.
        UnsupportedError: a family, type or option that is not supported; names it.
        TreeError: parameters are missing, unexpected or of another shape; lists every one.
    """
    path = Path(path)
    if path.is_dir():
        if (path / huggingface.CONFIG).exists():
            return _open_folder(path)
        return _open_converted(path)
    if not path.exists():
        return _open_converted(path)  # a sharded tree is named by a path that is no file
    try:
        with open(path, "rb") as file:
            head = file.read(1024)
    except OSError as error:
        raise CheckpointError(f"the file cannot be opened: {error.strerror or error}", path=path) from error
    if head.startswith(MAGIC):
        return _open_gguf(path)
    name = recognise(head, path.stat().st_size)
    if name == "a safetensors file":
        raise CheckpointError(
            "a safetensors file alone does not describe a model",
            path=path,
            hint="Give the folder that holds it and its config.json",
        )
    if name is not None and name != "a JSON text":
        raise CheckpointError(
            "this is no model", path=path, offset=0, expected="a converted file, a GGUF file or a folder", found=name,
            hint=hint_for(name),
        )  # fmt: skip
    return _open_converted(path)


def _open_gguf(path: Path) -> Source:
    file = GgufFile(path)
    metadata, where = file.metadata, str(path)
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedError(
            "split.count: a GGUF file in several parts is not supported",
            where=where,
            expected=1,
            found=metadata["split.count"],
            hint="Join the parts with llama.cpp's gguf-split --merge",
        )
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedError(
            "general.type is not supported",
            where=where,
            expected="model",
            found=repr(metadata["general.type"])[:80],
        )
    family = family_of_gguf(metadata, where)
    config = family.config_from_gguf(metadata, file.tensors, file.tensor, where)
    tensors = {
        name: Lazy(Abstract(info.shape, info.dtype), functools.partial(file.tensor, name))
        for name, info in file.tensors.items()
    }
    leaves = gather(tensors, family, family.gguf, config, where)
    file.check_supported([foreign.name for foreign in family.gguf.names(config).values()])
    text = functools.cache(
        lambda: Text.from_gguf_metadata(metadata) if "tokenizer.ggml.model" in metadata else None
    )

    def generation() -> Generation:
        found, tokenizer = gen.from_gguf(metadata, where), text()
        return found.with_eos(tokenizer.eos) if tokenizer else found

    return Source(path, "gguf", family, config, leaves, text, generation)


def _open_folder(path: Path) -> Source:
    folder = huggingface.read_folder(path)
    where = str(path / huggingface.CONFIG)
    family = family_of_hf(folder.config, where)
    config = family.config_from_hf(folder.config, where)
    naming = family.hf if folder.form == "safetensors" else family.flax
    leaves = gather(folder.tensors, family, naming, config, str(path))
    has_text = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    text = functools.cache(lambda: Text.from_hf_folder(path) if has_text else None)

    def generation() -> Generation:
        found, tokenizer = gen.from_hf(folder.config, folder.generation, str(path)), text()
        return found.with_eos(tokenizer.eos) if tokenizer else found

    return Source(path, folder.form, family, config, leaves, text, generation)


def _open_converted(path: Path) -> Source:
    file = read_tree(path)
    where, metadata = str(file.path), file.metadata
    if metadata is None or "config" not in metadata:
        raise CheckpointError(
            "this weight tree does not say which model it belongs to",
            path=file.path,
            expected="the configuration that atbx convert writes",
            hint="Read it with checkpoints.read_tree, and pass the configuration yourself",
        )
    family = family_named(metadata.get("family"), where)
    config = config_from_metadata(family.config_class, metadata["config"], where)
    paths, found, _ = trees.flatten_with_paths(file.tree)
    _refuse_absurd_layers(config, len(found), where)
    try:
        check(file.tree, family.abstract(config), metadata=metadata)
    except TreeError as error:
        raise TreeError(
            "the file does not fit its own configuration:", mismatches=error.mismatches, where=where
        ) from error
    leaves = {
        name: Lazy(Abstract(tuple(t.shape), t.dtype), functools.partial(_itself, t))
        for name, t in zip(paths, found, strict=True)
    }
    written, stored = metadata.get("tokenizer"), metadata.get("generation", {"eos": []})
    text = functools.cache(lambda: None if written is None else Text.from_metadata(written))
    return Source(file.path, "atbx", family, config, leaves, text, lambda: gen.from_metadata(stored, where))


def gather(
    tensors: Mapping[str, Lazy], family: Family, naming: Naming, config: Any, where: str
) -> dict[str, Lazy]:
    """Tree path to leaf in our layout, for the tensors of a public checkpoint.

    Raises:
        TreeError: a parameter is missing, unexpected or of another shape; lists every one with its foreign name.
        CheckpointError: tied embeddings with an output projection of its own values; names both.
    """
    _refuse_absurd_layers(config, len(tensors), where)
    names = naming.names(config)
    used = {foreign.name for foreign in names.values()}
    if config.tied:
        head = naming.names(dataclasses.replace(config, tied=False))["lm_head"]
        if head.name in tensors:
            names["embed"] = _tied(tensors, names["embed"], head, where)
            used |= {head.name}
    leaves = {
        path: _ours(foreign, tensors[foreign.name])
        for path, foreign in names.items()
        if foreign.name in tensors
    }
    unexpected = [name for name in tensors if name not in used and not naming.is_ignored(name)]
    _check(leaves, unexpected, tensors, names, family.abstract(config), where)
    return leaves


def _ours(foreign: Foreign, lazy: Lazy) -> Lazy:
    shape = foreign.shape_of(lazy.abstract.shape)
    return Lazy(Abstract(shape, lazy.abstract.dtype), lambda: foreign.to_ours(lazy.load()))


def _tied(tensors: Mapping[str, Lazy], embed: Foreign, head: Foreign, where: str) -> Foreign:
    """Where the embedding of a tied model stands, given that the checkpoint has an output projection."""
    if embed.name not in tensors:
        return head  # one tensor saved under its other name
    first, second = embed.to_ours(tensors[embed.name].load()), head.to_ours(tensors[head.name].load())
    equal = first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
    release(first)
    release(second)
    if not equal:
        raise CheckpointError(
            f"the configuration ties the output projection to the embedding, but {head.name} differs from {embed.name}",
            where=where,
            expected="equal values, or tie_word_embeddings false",
            hint="If the projection is meant, set tie_word_embeddings to false in config.json",
        )
    return embed


def _check(
    leaves: Mapping[str, Lazy],
    unexpected: list[str],
    tensors: Mapping[str, Lazy],
    names: Mapping[str, Foreign],
    abstract: Any,
    where: str,
) -> None:
    """One report of everything that does not fit, with the names that the checkpoint itself uses."""
    found: dict[str, Any] = {}
    for path in names:
        node: dict[str, Any] = found
        *parents, last = path.split("/")
        for key in parents:
            node = node.setdefault(key, {})
        if path in leaves:
            node[last] = leaves[path].abstract
    lines: list[str] = []
    try:
        check(_listed(found, abstract), abstract)
    except TreeError as error:
        for line in error.mismatches:
            path = line.partition(":")[0]
            lines.append(f"{line} ({names[path].name})" if path in names else line)
    lines += [f"{name}: unexpected, found {tensors[name].abstract}" for name in unexpected]
    if not lines:
        return
    hint = None
    if "lm_head" in names and "lm_head" not in leaves:
        hint = "The configuration does not tie the output projection to the embedding, and there is none"
    raise TreeError(
        f"the weights do not fit the configuration ({len(lines)} mismatch{'es' * (len(lines) > 1)}):",
        mismatches=tuple(lines),
        where=where,
        hint=hint,
    )


def _listed(found: Any, abstract: Any) -> Any:
    """`found` with dicts of indices turned into lists where `abstract` has lists."""
    if isinstance(abstract, list):
        return [_listed(found.get(str(index), {}), entry) for index, entry in enumerate(abstract)]
    if isinstance(abstract, Mapping):
        return {key: _listed(value, abstract[key]) for key, value in found.items()}
    return found


def _refuse_absurd_layers(config: Any, tensors: int, where: str) -> None:
    # The expected tree is built before it is compared; a damaged number must not make it fill the memory.
    if config.layers > tensors:
        raise CheckpointError(
            "the configuration states more layers than there are tensors",
            where=where,
            expected=f"at most {tensors}",
            found=config.layers,
        )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
