"""Abstract values: the shape and dtype of a tensor that need not exist, and, for a parameter, what its axes mean.

One `Abstract` per leaf is the single description from which checks, memory sizes, staging and random
initial values derive. An axis may carry a bucket tag (`Dim`): its size is padded and only a count of it is real.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from atbx.core import trees

SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


class Dim(int):
    """The size of an axis that is padded to a bucket; `tag` names the bucket.

    It is an int in every respect, so shape rules that copy sizes carry the tag along without knowing it.
    """

    tag: str

    def __new__(cls, size: int, tag: str) -> Dim:
        dim = super().__new__(cls, size)
        dim.tag = tag
        return dim


def tag_of(size: int) -> str | None:
    """The bucket tag of an axis size, or None for an axis whose every entry is real."""
    return size.tag if isinstance(size, Dim) else None


@dataclass(frozen=True, slots=True)
class Abstract:
    """Shape and dtype of a tensor; for parameters also what the axes mean.

    shape:  sizes, one an axis.
    dtype:  the torch dtype.
    axes:   logical names of the axes, e.g. ("heads", "model"); None where nobody named them.
    layout: how a weight is stored: "out_in" for linear weights [out, in]; "in_out" for their transposes
            (Flax kernels); None for anything else. Checkpoint metadata carries it, because a square matrix
            hides a transposition from every shape check.
    init:   how random initial values are drawn: "normal" (std 0.02), "ones" or "zeros".
    device: kind of device that the tensor it stands for is on; says nothing of the values of a program.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...] | None = None
    layout: str | None = None
    init: str = "normal"
    device: str = field(default="cpu", compare=False, repr=False)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = ",".join(f"{tag_of(n)}={int(n)}" if tag_of(n) else str(int(n)) for n in self.shape)
        return f"{SHORT_DTYPES.get(self.dtype, str(self.dtype))}[{sizes}]"


def abstract_of(value: Any) -> Abstract:
    """The `Abstract` of a tensor, or of anything that has `shape` and `dtype`."""
    if isinstance(value, Abstract):
        return value
    kind = value.device.type if isinstance(value, torch.Tensor) else "cpu"
    return Abstract(tuple(value.shape), value.dtype, device="cpu" if kind == "meta" else kind)


def tree_bytes(tree: Any) -> int:
    """Bytes of all tensors or abstract values in a tree."""
    return sum(abstract_of(leaf).nbytes for leaf in trees.leaves(tree))
