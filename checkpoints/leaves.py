"""Leaves of weight trees: dtype names as numpy and Flax write them, zero-copy tensors over mapped files, lazy leaves.

A file is mapped once, private and copy-on-write, and every tensor is a view of that mapping. The mappings are
remembered weakly by address, so that the pages behind a tensor can be handed back once it has been packed.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import CheckpointError

if sys.byteorder != "little":  # every format read here stores little-endian numbers, and views do not convert
    raise ImportError("atbx.checkpoints maps little-endian files and cannot run on a big-endian machine")

DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
"""Dtype names in files to torch dtypes: those that numpy (with ml_dtypes) and torch both know."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""Torch dtypes to their names in files."""

PAGE = mmap.PAGESIZE

# Without it, Linux refuses a private writable mapping of a file larger than memory; Python names it since 3.13.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True, slots=True)
class Lazy:
    """A leaf whose tensor is loaded when it is written, and released right after.

    abstract: shape and dtype that `load` must return.
    load:     returns the tensor.
    """

    abstract: Abstract
    load: Callable[[], torch.Tensor]


# Address of a mapping's first byte to the mapping; weakly, so that tensors alone keep a mapping alive.
_mappings: dict[int, tuple[int, weakref.ref[mmap.mmap]]] = {}


def map_file(path: str | os.PathLike[str]) -> mmap.mmap:
    """Map a file, private and copy-on-write: writing into a tensor of it never reaches the file.

    The file must not be cut short while it is mapped; replacing it by rename is fine.

    Raises:
        CheckpointError: the file cannot be opened, is no regular file, or is empty.
    """
    try:
        size, mode = os.stat(path).st_size, os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for a writer
            raise CheckpointError(
                "this is no regular file",
                path=path,
                found="a folder" if stat.S_ISDIR(mode) else "a device or pipe",
            )
        with open(path, "rb") as file:
            if size == 0:
                raise CheckpointError(
                    "the file is empty",
                    path=path,
                    offset=0,
                    hint="The download or the write before did not finish",
                )
            mapped = mmap.mmap(
                file.fileno(),
                size,
                flags=mmap.MAP_PRIVATE | _NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
    except OSError as error:
        raise CheckpointError(f"the file cannot be opened: {error.strerror or error}", path=path) from error
    base = torch.frombuffer(mapped, dtype=torch.uint8, count=1).data_ptr()
    _mappings[base] = (len(mapped), weakref.ref(mapped, partial(_forget, base)))
    return mapped


def _forget(base: int, gone: weakref.ref[mmap.mmap]) -> None:
    # A new mapping may have taken the address before this callback ran.
    if base in _mappings and _mappings[base][1] is gone:
        del _mappings[base]


def view(mapped: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """The tensor `shape` of `dtype` whose bytes start at `offset` of a mapping: a view, nothing is read."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).reshape(shape)


def mapping_of(tensor: torch.Tensor) -> tuple[mmap.mmap, int] | None:
    """The mapping behind a tensor and the tensor's byte offset in it; None for a tensor that owns its memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    address = tensor.data_ptr()
    bases = sorted(_mappings)
    index = bisect.bisect_right(bases, address) - 1
    if index < 0:
        return None
    length, reference = _mappings.get(bases[index], (0, None))
    mapped = reference() if reference is not None else None
    if mapped is None or address >= bases[index] + length:
        return None
    return mapped, address - bases[index]


def release(tensor: torch.Tensor) -> bool:
    """Hand back the resident pages behind a tensor made by the reader; True if the tensor is such a view.

    The tensor stays valid: a later access reads the file again. Values written into it in place are lost. Pages
    shared with a neighbour stay, so at most two pages a tensor remain resident.
    """
    found = mapping_of(tensor)
    if found is None:
        return False
    mapped, offset = found
    span = 1 + sum(
        (size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    stop = offset + span * tensor.element_size()
    start = -(-offset // PAGE) * PAGE
    end = stop if stop == len(mapped) else stop // PAGE * PAGE  # the last page is shared with nobody
    if end > start:
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)
    return True


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of a mapped weight file."""
    return mapping_of(tensor) is not None


def file_name_of(dtype: np.dtype | torch.dtype) -> str | None:
    """The name a dtype has in files, or None for one that numpy or torch lacks (strings, records, int4, ...)."""
    if isinstance(dtype, torch.dtype):
        return NAMES.get(dtype)
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        return None
    return dtype.name if dtype.name in DTYPES else None


def raw_bytes(leaf: torch.Tensor | np.ndarray) -> memoryview:
    """The elements of a tensor or array as little-endian bytes in C order; copies only where it must."""
    if isinstance(leaf, torch.Tensor):
        tensor = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
    array = np.ascontiguousarray(leaf)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
