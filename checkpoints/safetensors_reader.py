"""Read safetensors files, single or sharded, as lazy tensors that are views of the mapped files.

The safetensors library checks each header (bounds, overlaps, gaps) before an offset in it is used; the views are made
here, so that pages which were read can be handed back (`leaves.release`).
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from atbx.checkpoints.leaves import Lazy, map_file, view
from atbx.checkpoints.recognise import hint_for, recognise
from atbx.checkpoints.shards import read_index
from atbx.core.abstract import Abstract
from atbx.core.errors import CheckpointError, MissingExtraError, UnsupportedError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Lazy]:
    """The tensors of a file, of a shard index, or of a folder with either; nothing of them is read yet.

    Raises:
        CheckpointError: a file is missing, cut short or no safetensors file; names it.
        UnsupportedError: a dtype that torch does not have; names the tensor.
        MissingExtraError: the safetensors library is not installed.
    """
    path = Path(path)
    if path.is_dir():
        # As transformers: the single file comes first where both are there.
        found = [path / name for name in (SINGLE, INDEX) if (path / name).is_file()]
        if not found:
            raise CheckpointError(
                "the folder has no safetensors weights", path=path, expected=f"{SINGLE} or {INDEX}"
            )
        path = found[0]
    return _read_shards(path) if path.name.endswith(".index.json") else _read_file(path)


def _read_shards(path: Path) -> dict[str, Lazy]:
    index = read_index(path)
    tensors: dict[str, Lazy] = {}
    for name in index.files:
        file = path.parent / name
        held = _read_file(file)
        missing = sorted(key for key, where in index.weight_map.items() if where == name and key not in held)
        if missing:
            raise CheckpointError(
                f"the shard does not hold {', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}",
                path=file,
                expected=f"the tensors that {path.name} lists",
                hint="Files of different downloads are mixed",
            )
        twice = sorted(tensors.keys() & held.keys())
        if twice:
            raise CheckpointError(f"{twice[0]} is in two shards", path=file)
        tensors |= held
    return tensors


def _read_file(path: Path) -> dict[str, Lazy]:
    mapped = map_file(path)
    try:
        import safetensors
    except ImportError as error:
        raise MissingExtraError("safetensors", "convert", "reading safetensors") from error
    try:
        with safetensors.safe_open(str(path), framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise _explained(path, mapped, str(error)) from error
    length = int.from_bytes(mapped[:8], "little")
    header: dict[str, Any] = json.loads(mapped[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {name: _lazy(path, mapped, start, name, entry) for name, entry in header.items()}


def _lazy(path: Path, mapped: mmap.mmap, start: int, name: str, entry: dict[str, Any]) -> Lazy:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise UnsupportedError(
            f"the dtype of {name} is not supported",
            where=str(path),
            expected=f"one of {', '.join(DTYPES)}",
            found=entry["dtype"],
        )
    shape = tuple(entry["shape"])
    load = functools.partial(view, mapped, dtype, shape, start + entry["data_offsets"][0])
    return Lazy(Abstract(shape, dtype), load)


def _explained(path: Path, mapped: mmap.mmap, reason: str) -> CheckpointError:
    """The error for a file that the library refuses: what it is instead, or where it is cut short."""
    size = len(mapped)
    name = recognise(mapped[: min(size, 1024)], size)
    if name is not None and name != "a safetensors file":
        return CheckpointError(
            "this is not a safetensors file", path=path, offset=0, found=name, hint=hint_for(name)
        )
    length = int.from_bytes(mapped[:8], "little")
    if size < 8 or length > size - 8:
        return CheckpointError(
            "the file ends inside the header, or is no safetensors file",
            path=path,
            offset=min(8, size),
            expected=f"{length} bytes of JSON" if size >= 8 else "8 bytes of length",
            found=max(0, size - 8) if size >= 8 else size,
            hint="It is cut short (an unfinished download or copy)",
        )
    needed = _bytes_needed(mapped, length)
    if needed is not None and needed > size:
        return CheckpointError(
            "the file is cut short",
            path=path,
            offset=size,
            expected=f"{needed} bytes",
            found=size,
            hint="The download or copy did not finish",
        )
    return CheckpointError(f"the header is malformed: {reason}", path=path, offset=8)


def _bytes_needed(mapped: mmap.mmap, length: int) -> int | None:
    """The size that the header states for the file, or None where the header says nothing of the kind."""
    try:
        header = json.loads(mapped[8 : 8 + length])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return int(8 + length + max(ends, default=0))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
