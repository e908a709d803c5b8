"""Read the folder of a Hugging Face model: its configuration, its generation defaults, and its weights.

Weights are safetensors, or Flax msgpack where there are none; the form decides which names they have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atbx.checkpoints import metadata as meta
from atbx.checkpoints import safetensors_reader
from atbx.checkpoints.leaves import Lazy
from atbx.checkpoints.msgpack_reader import read_tree
from atbx.checkpoints.recognise import hint_for, recognise
from atbx.core.abstract import Abstract
from atbx.core.errors import CheckpointError

CONFIG, GENERATION = "config.json", "generation_config.json"
FLAX, FLAX_INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
_LARGEST_JSON = 1 << 26
_ELSEWHERE = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "consolidated.safetensors")


@dataclass(frozen=True)
class HfFolder:
    """A model folder.

    config, generation: the two JSON files ({} where there is no generation_config.json).
    form:    "safetensors" or "flax".
    tensors: by the names they have in the files; for Flax the path joined by slashes.
    """

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    form: str
    tensors: dict[str, Lazy]


def read_folder(path: str | os.PathLike[str]) -> HfFolder:
    """Read a model folder; of the weights only the headers.

    Raises:
        CheckpointError: a file is missing or malformed; names it.
    """
    folder = Path(path)
    config = read_json(folder / CONFIG)
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    form = weight_form(folder)
    if form == "safetensors":
        tensors = safetensors_reader.read_safetensors(folder)
    else:
        tensors = read_flax(folder / FLAX)
    return HfFolder(folder, config, generation, form, tensors)


def weight_form(folder: Path) -> str:
    """Which weights a folder has: "safetensors", else "flax".

    Raises:
        CheckpointError: neither; says what there is.
    """
    forms = {"safetensors": (safetensors_reader.SINGLE, safetensors_reader.INDEX), "flax": (FLAX, FLAX_INDEX)}
    for form, names in forms.items():
        if any((folder / name).is_file() for name in names):
            return form
    others = [name for name in _ELSEWHERE if (folder / name).is_file()]
    others += sorted(file.name for file in folder.glob("*.gguf"))
    hint = None
    if any(name.endswith(".gguf") for name in others):
        hint = "Give the path of the GGUF file itself"
    elif others:
        hint = "Load it with transformers and save it with save_pretrained(folder): that writes safetensors"
    raise CheckpointError(
        "the folder has no weights that can be read",
        path=folder,
        expected=", ".join(name for names in forms.values() for name in names),
        found=", ".join(others) or None,
        hint=hint,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, too large, or holds something else; says what.
    """
    try:
        size = path.stat().st_size
        if size > _LARGEST_JSON:
            raise CheckpointError(
                "the file is too large", path=path, expected=f"at most {_LARGEST_JSON} bytes", found=size
            )
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"the file cannot be opened: {error.strerror or error}", path=path) from error
    name = recognise(raw[:1024], len(raw))
    if name not in (None, "a JSON text"):
        raise CheckpointError("this is not a JSON file", path=path, offset=0, found=name, hint=hint_for(name))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            "this is not a JSON file: it is not UTF-8", path=path, offset=error.start
        ) from error
    return meta.parse(text, path)


def read_flax(path: Path) -> dict[str, Lazy]:
    """The tensors of a Flax msgpack file (or its shards) by slash path, below any level called "params".

    Raises:
        CheckpointError: as `read_tree`, or a leaf is no tensor.
    """
    tree = read_tree(path).tree
    while isinstance(tree, Mapping) and set(tree) == {"params"}:
        tree = tree["params"]
    found: dict[str, Lazy] = {}
    for name, leaf in _flattened(tree, ()):
        if not isinstance(leaf, torch.Tensor):
            raise CheckpointError(f"{name} is no tensor", path=path, found=type(leaf).__name__)
        found[name] = Lazy(Abstract(tuple(leaf.shape), leaf.dtype), lambda leaf=leaf: leaf)  # type: ignore[misc]
    return found


def _flattened(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    children = (
        node.items()
        if isinstance(node, Mapping)
        else enumerate(node)
        if isinstance(node, (list, tuple))
        else None
    )
    if children is None:
        yield "/".join(path) or "(root)", node
        return
    for key, value in children:
        yield from _flattened(value, (*path, str(key)))
