"""Device memory as CPU tensors: the same bytes, and what a storage format makes of them.

The memory of the software device is host memory, so a tensor of it can be looked at in place. A tensor in the format
FRACTAL_NZ keeps its last two axes in blocks of 16 by 16 (by 32 for 8-bit integers): such a tensor is read by putting
its rows together and written by taking them apart. A part of one (a slice) is not: it reads the blocks as they
lie, which is what the device does.
"""

from __future__ import annotations

import math

import torch

ND, NZ = 2, 29
ROWS = 16
"""Rows of an NZ block."""

_CPU = torch.device("cpu")
_storage_at = torch._C._construct_storage_from_data_pointer


_bases: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
_BASES = 8192
"""Storages whose flat tensors are kept: an allocator hands the same addresses out again and again."""


def _flat(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """All elements at an address. It owns nothing; memory of the software device is never given back."""
    key = (address, size, dtype)
    base = _bases.get(key)
    if base is None:
        if len(_bases) >= _BASES:
            _bases.clear()
        # A tensor of inference mode could not be written by a step that runs outside of it, such as a replay.
        with torch.inference_mode(False):
            base = torch.empty(0, dtype=dtype, device=_CPU)
            base.set_(_storage_at(address, _CPU, size), 0, (size // base.element_size(),), (1,))
        _bases[key] = base
    return base


def raw_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, whose memory must outlive it, as a CPU tensor of the same size, strides and dtype."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
    base = _flat(storage.data_ptr(), size, tensor.dtype)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def columns_of(dtype: torch.dtype) -> int:
    """Columns of an NZ block."""
    return 32 if dtype in (torch.int8, torch.uint8) else 16


def block_shape(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Axes of the blocks of a [rows, columns] matrix in storage: column blocks, row blocks, rows, columns."""
    width = columns_of(dtype)
    return (-(-columns // width), -(-rows // ROWS), ROWS, width)


def to_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns] taken apart into [..., column blocks, row blocks, 16, width], padded with zeros."""
    rows, columns = matrix.shape[-2:]
    n, m, height, width = block_shape(rows, columns, matrix.dtype)
    padded = torch.zeros((*matrix.shape[:-2], m * height, n * width), dtype=matrix.dtype, device=_CPU)
    padded[..., :rows, :columns] = matrix
    apart = padded.reshape(*matrix.shape[:-2], m, height, n, width)
    lead = matrix.dim() - 2
    return apart.permute(*range(lead), lead + 2, lead, lead + 1, lead + 3).contiguous()


def from_blocks(blocks: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `to_blocks`."""
    lead = blocks.dim() - 4
    n, m, height, width = blocks.shape[-4:]
    together = blocks.permute(*range(lead), lead + 1, lead + 2, lead, lead + 3)
    return together.reshape(*blocks.shape[:lead], m * height, n * width)[..., :rows, :columns].contiguous()


class NzView:
    """A whole tensor in NZ format, possibly with its axes in another order (a transposed weight)."""

    def __init__(self, tensor: torch.Tensor, order: list[int], base: tuple[int, ...]) -> None:
        self._order, self._base, self._dtype = order, base, tensor.dtype
        storage = tensor.untyped_storage()
        blocks = (*base[:-2], *block_shape(base[-2], base[-1], tensor.dtype))
        self._blocks = _flat(storage.data_ptr(), storage.nbytes(), tensor.dtype).view(blocks)

    def read(self) -> torch.Tensor:
        """The tensor's values, in a copy."""
        whole = from_blocks(self._blocks, *self._base[-2:])
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        return whole.permute(back)

    def write(self, values: torch.Tensor) -> None:
        """Replace the tensor's values."""
        self._blocks.copy_(to_blocks(values.to(self._dtype).permute(self._order)))


def nz_view(tensor: torch.Tensor) -> NzView | None:
    """How to read a tensor whose storage is in NZ format; None if it is only a part of that storage."""
    if tensor.dim() < 2 or tensor.storage_offset() != 0:
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -int(strides[axis]))
    base = tuple(tensor.shape[axis] for axis in order)
    if not tensor.permute(order).is_contiguous():
        return None
    padded = math.prod(base[:-2]) * math.prod(block_shape(base[-2], base[-1], tensor.dtype))
    if padded * tensor.element_size() != tensor.untyped_storage().nbytes():
        return None
    return NzView(tensor, order, base)
