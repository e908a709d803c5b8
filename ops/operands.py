"""Checks of operands that shape rules share: kinds, dtypes, axes, broadcasting, and weak Python scalars.

Sizes are always copied from operands, never made anew, because a size may carry the tag of a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch

from atbx.core.abstract import SHORT_DTYPES, Abstract, Dim, tag_of
from atbx.core.errors import BucketError, DTypeError, ShapeError

Scalar = bool | int | float

INDEX_DTYPES = (torch.int64, torch.int32)


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, as programs print it."""
    return SHORT_DTYPES.get(dtype, str(dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an op computes and accumulates: FP64 for FP64, FP32 for every other float."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_scalar(value: Any) -> TypeGuard[Scalar]:
    """Whether `value` is a weak Python scalar."""
    return isinstance(value, (bool, int, float))


def shape_text(shape: Sequence[int]) -> str:
    """A shape as error messages show it, tags included."""
    return "[" + ",".join(f"{tag_of(n)}={int(n)}" if tag_of(n) else str(int(n)) for n in shape) + "]"


def need_tensor(op: str, name: str, value: Any) -> Abstract:
    """`value`, which must be a tensor operand."""
    if not isinstance(value, Abstract):
        raise ShapeError(f"{op}: {name} must be a tensor", found=repr(value))
    return value


def need_ndim(op: str, name: str, value: Any, least: int) -> Abstract:
    """`value`, a tensor operand with at least `least` axes."""
    tensor = need_tensor(op, name, value)
    if tensor.ndim < least:
        raise ShapeError(f"{op}: {name} has too few axes", expected=f"at least {least}", found=tensor)
    return tensor


def need_float(op: str, name: str, value: Any) -> Abstract:
    """`value`, a tensor operand of a floating point dtype of 16 bits or more."""
    tensor = need_tensor(op, name, value)
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise DTypeError(
            f"{op}: {name} must be floating point", expected="f64, f32, f16 or bf16", found=tensor
        )
    return tensor


def need_number(op: str, name: str, value: Any) -> Abstract:
    """`value`, a tensor operand of a floating point or integer dtype."""
    tensor = need_tensor(op, name, value)
    if tensor.dtype == torch.bool:
        raise DTypeError(
            f"{op}: {name} must be a number",
            expected="floats or integers",
            found=tensor,
            hint="Cast it first",
        )
    if tensor.dtype.is_floating_point:
        need_float(op, name, tensor)
    return tensor


def need_bool(op: str, name: str, value: Any) -> Abstract:
    """`value`, a tensor operand of dtype bool."""
    tensor = need_tensor(op, name, value)
    if tensor.dtype != torch.bool:
        raise DTypeError(f"{op}: {name} must be bool", expected="bool", found=tensor)
    return tensor


def need_index(op: str, name: str, value: Any) -> Abstract:
    """`value`, a tensor operand of indices (int64 or int32)."""
    tensor = need_tensor(op, name, value)
    if tensor.dtype not in INDEX_DTYPES:
        raise DTypeError(f"{op}: {name} must be integers", expected="i64 or i32", found=tensor)
    return tensor


def need_same_dtype(op: str, **tensors: Abstract | None) -> torch.dtype:
    """The one dtype of all the tensors given by name; DTypeError where they differ."""
    present = {name: t for name, t in tensors.items() if t is not None}
    first, *rest = present
    for name in rest:
        if present[name].dtype != present[first].dtype:
            raise DTypeError(
                f"{op}: {name} and {first} have different dtypes",
                expected=dtype_name(present[first].dtype),
                found=dtype_name(present[name].dtype),
                hint="Tensors are never promoted; use ops.cast",
            )
    return present[first].dtype


def need_sizes(op: str, name: str, value: Abstract, expected: Sequence[int]) -> None:
    """Raise ShapeError unless `value` has exactly these sizes."""
    if tuple(value.shape) != tuple(expected):
        raise ShapeError(f"{op}: {name} does not fit", expected=shape_text(expected), found=value)


def normal_axis(op: str, axis: Any, ndim: int, name: str = "axis") -> int:
    """`axis` counted from the front; ShapeError if there is no such axis."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ShapeError(f"{op}: {name} must be an int", found=repr(axis))
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{op}: no such {name}", expected=f"-{ndim} to {ndim - 1}", found=int(axis))
    return int(axis) % ndim


def common_size(op: str, a: int, b: int, axis: int, *, broadcast: bool = True) -> int:
    """The size that two operands share along an axis; the tagged one of two equal sizes.

    Raises:
        ShapeError: they differ, and neither is 1 (or broadcasting is not meant).
        BucketError: they agree only by the accident of this bucket.
    """
    tag_a, tag_b = tag_of(a), tag_of(b)
    if a == b:
        if tag_a and tag_b and tag_a != tag_b:
            raise BucketError(
                f"{op}: axis {axis} is bucketed in two ways, {tag_a!r} and {tag_b!r}, which agree only by accident"
            )
        return a if tag_a else b
    if not broadcast or 1 not in (a, b):
        raise ShapeError(f"{op}: sizes differ along axis {axis}", expected=int(a), found=int(b))
    one, other = (a, b) if a == 1 else (b, a)
    if tag_of(one):
        raise BucketError(
            f"{op}: axis {axis} is bucketed ({tag_of(one)!r}) and would be broadcast in its bucket of size 1 only",
            found=f"sizes {int(one)} and {int(other)}",
        )
    return other


def broadcast_shapes(op: str, shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape to which all `shapes` broadcast, numpy's rule, tags kept."""
    result: tuple[int, ...] = ()
    for shape in shapes:
        longer, shorter = (result, tuple(shape)) if len(result) >= len(shape) else (tuple(shape), result)
        lead = len(longer) - len(shorter)
        merged = [
            common_size(op, a, b, lead + i)
            for i, (a, b) in enumerate(zip(longer[lead:], shorter, strict=True))
        ]
        result = (*longer[:lead], *merged)
    return result


def _category(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else 2 if dtype.is_floating_point else 1


def weak(op: str, scalar: Scalar, dtype: torch.dtype) -> Scalar:
    """`scalar` in the dtype of the tensor it meets, so that every kernel sees the same number.

    Raises:
        DTypeError: a float meets an integer tensor, a number meets a bool tensor, or it does not fit.
    """
    kind = 0 if isinstance(scalar, bool) else 2 if isinstance(scalar, float) else 1
    if kind > _category(dtype):
        raise DTypeError(
            f"{op}: the scalar {scalar!r} cannot take the tensor's dtype",
            expected=dtype_name(dtype),
            found=type(scalar).__name__,
            hint="Tensors are never promoted; use ops.cast",
        )
    if isinstance(scalar, Dim):
        # Left as it is: staging refuses padded sizes as numbers, and says why.
        return scalar
    if dtype == torch.bool:
        return bool(scalar)
    if dtype.is_floating_point:
        rounded = float(torch.tensor(float(scalar), dtype=torch.float64).to(dtype))
        if math.isinf(rounded) and not math.isinf(scalar):
            raise DTypeError(
                f"{op}: the scalar {scalar!r} does not fit {dtype_name(dtype)}; it would be infinite"
            )
        return rounded
    limits = torch.iinfo(dtype)
    if not limits.min <= scalar <= limits.max:
        raise DTypeError(
            f"{op}: the scalar does not fit the tensor's dtype",
            expected=f"{limits.min} to {limits.max}",
            found=scalar,
        )
    return int(scalar)


def weaken(op: str, *operands: Any) -> tuple[Any, ...]:
    """The operands, with every Python scalar in the dtype of the tensors among them.

    Raises:
        DTypeError: no operand is a tensor, or a scalar does not fit.
    """
    dtypes = (getattr(operand, "dtype", None) for operand in operands)
    dtype = next((d for d in dtypes if isinstance(d, torch.dtype)), None)
    if dtype is not None:
        return tuple(weak(op, x, dtype) if is_scalar(x) else x for x in operands)
    raise DTypeError(f"{op}: no operand is a tensor", found=", ".join(map(repr, operands)))


def elementwise_shape(op: str, **operands: Any) -> Abstract:
    """Broadcast shape and the one dtype of tensors and weak scalars given by name."""
    tensors = {name: x for name, x in operands.items() if isinstance(x, Abstract)}
    if not tensors:
        raise DTypeError(f"{op}: no operand is a tensor", found=", ".join(map(repr, operands.values())))
    dtype = need_same_dtype(op, **tensors)
    for name, value in operands.items():
        if is_scalar(value):
            weak(op, value, dtype)
        elif value is None or name not in tensors:
            raise ShapeError(f"{op}: {name} must be a tensor or a number", found=repr(value))
    return Abstract(broadcast_shapes(op, (t.shape for t in tensors.values())), dtype)


def as_tensors(*operands: Any) -> tuple[torch.Tensor, ...]:
    """Operands of a reference rule as tensors of one dtype, scalars as tensors without axes.

    They are filled where they lie: a copy from the host could not stand in a captured graph.
    """
    like = next(x for x in operands if isinstance(x, torch.Tensor))
    return tuple(
        x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=like.dtype, device=like.device)
        for x in operands
    )
