"""Structural ops: they move, join, cut and relabel entries and compute nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from atbx.core.abstract import Abstract, tag_of
from atbx.core.errors import DTypeError, ShapeError
from atbx.core.op import Cost, Op, register_op
from atbx.ops.operands import (
    common_size,
    dtype_name,
    need_ndim,
    need_same_dtype,
    need_tensor,
    normal_axis,
    shape_text,
)


def view_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    """Cost rule of ops whose results are views: nothing."""
    return Cost()


def copy_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    """Cost rule of ops that read and write each entry of their results once."""
    return Cost(0.0, 2.0 * sum(r.nbytes for r in results))


def _transpose_shape(x: Any, *, axes: tuple[int, ...]) -> Abstract:
    tensor = need_tensor("transpose", "x", x)
    found = [normal_axis("transpose", a, tensor.ndim, "axes entry") for a in axes]
    if sorted(found) != list(range(tensor.ndim)):
        raise ShapeError(
            "transpose: axes must name each axis once",
            expected=f"a permutation of {tuple(range(tensor.ndim))}",
            found=tuple(axes),
        )
    return Abstract(tuple(tensor.shape[a] for a in found), tensor.dtype)


TRANSPOSE = register_op(
    Op("transpose", _transpose_shape, lambda x, *, axes: x.permute(axes), view_cost, views=True)
)


def transpose(x: Any, axes: Sequence[int]) -> Any:
    """x with its axes in the order `axes`: axis i of the result is axis axes[i] of x."""
    return TRANSPOSE(x, axes=tuple(axes))


def _expand_shape(x: Any, *, axis: int) -> Abstract:
    tensor = need_tensor("expand_dims", "x", x)
    place = normal_axis("expand_dims", axis, tensor.ndim + 1)
    return Abstract((*tensor.shape[:place], 1, *tensor.shape[place:]), tensor.dtype)


EXPAND_DIMS = register_op(
    Op("expand_dims", _expand_shape, lambda x, *, axis: x.unsqueeze(axis), view_cost, views=True)
)


def expand_dims(x: Any, axis: int) -> Any:
    """x with a new axis of size 1 at place `axis` of the result."""
    return EXPAND_DIMS(x, axis=axis)


def _squeeze_shape(x: Any, *, axis: int) -> Abstract:
    tensor = need_tensor("squeeze", "x", x)
    place = normal_axis("squeeze", axis, tensor.ndim)
    size = tensor.shape[place]
    if size != 1 or tag_of(size):
        raise ShapeError(
            f"squeeze: axis {place} must have size 1 and no bucket", expected=1, found=shape_text((size,))
        )
    return Abstract((*tensor.shape[:place], *tensor.shape[place + 1 :]), tensor.dtype)


SQUEEZE = register_op(
    Op("squeeze", _squeeze_shape, lambda x, *, axis: x.squeeze(axis), view_cost, views=True)
)


def squeeze(x: Any, axis: int) -> Any:
    """x without `axis`, whose size must be 1."""
    return SQUEEZE(x, axis=axis)


def _broadcast_shape(x: Any, *, shape: tuple[int, ...]) -> Abstract:
    tensor = need_tensor("broadcast_to", "x", x)
    lead = len(shape) - tensor.ndim
    if lead < 0:
        raise ShapeError(
            "broadcast_to: x has more axes than the shape", expected=shape_text(shape), found=tensor
        )
    sizes = list(shape[:lead])
    for i, (own, wanted) in enumerate(zip(tensor.shape, shape[lead:], strict=True)):
        size = common_size("broadcast_to", wanted, own, lead + i)
        if size != wanted:
            raise ShapeError(
                f"broadcast_to: axis {lead + i} does not fit", expected=int(wanted), found=int(own)
            )
        sizes.append(size)
    return Abstract(tuple(sizes), tensor.dtype)


def _broadcast_reference(x: torch.Tensor, *, shape: tuple[int, ...]) -> torch.Tensor:
    # A fresh tensor: entries that share memory would break a later update in place.
    return x.expand(shape).clone(memory_format=torch.contiguous_format)


BROADCAST_TO = register_op(Op("broadcast_to", _broadcast_shape, _broadcast_reference))


def broadcast_to(x: Any, shape: Sequence[int]) -> Any:
    """x repeated to `shape`, by numpy's rule."""
    return BROADCAST_TO(x, shape=tuple(shape))


def _cast_shape(x: Any, *, dtype: torch.dtype) -> Abstract:
    tensor = need_tensor("cast", "x", x)
    if not isinstance(dtype, torch.dtype):
        raise DTypeError("cast: dtype must be a torch dtype", found=repr(dtype))
    if tensor.dtype.is_complex or dtype.is_complex:
        raise DTypeError("cast: complex numbers are not supported", found=dtype_name(dtype))
    return Abstract(tensor.shape, dtype)


def _cast_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], *, dtype: torch.dtype) -> Cost:
    x = operands[0]
    return Cost() if x.dtype == dtype else Cost(0.0, float(x.nbytes + results[0].nbytes))


CAST = register_op(Op("cast", _cast_shape, lambda x, *, dtype: x.to(dtype), _cast_cost, views=True))


def cast(x: Any, dtype: torch.dtype) -> Any:
    """x in another dtype: floats round to nearest even, floats to integers cut towards zero."""
    return CAST(x, dtype=dtype)


def _concat_shape(*xs: Any, axis: int) -> Abstract:
    if not xs:
        raise ShapeError("concat: nothing to join", expected="at least one tensor")
    tensors = [need_ndim("concat", f"operand {i}", x, 1) for i, x in enumerate(xs)]
    first = tensors[0]
    place = normal_axis("concat", axis, first.ndim)
    dtype = need_same_dtype("concat", **{f"operand {i}": t for i, t in enumerate(tensors)})
    sizes = list(first.shape)
    for index, tensor in enumerate(tensors[1:], start=1):
        if tensor.ndim != first.ndim:
            raise ShapeError(
                f"concat: operand {index} has another number of axes", expected=first, found=tensor
            )
        for a, size in enumerate(tensor.shape):
            if a != place:
                sizes[a] = common_size(f"concat: operand {index}", sizes[a], size, a, broadcast=False)
    if len(tensors) > 1:
        sizes[place] = sum(int(t.shape[place]) for t in tensors)
    return Abstract(tuple(sizes), dtype)


def _concat_mixes(*xs: Abstract, axis: int) -> Iterable[tuple[int, int]]:
    return [(i, axis) for i in range(len(xs))]


CONCAT = register_op(
    Op(
        "concat",
        _concat_shape,
        lambda *xs, axis: torch.cat(xs, dim=axis),
        copy_cost,
        mixes=_concat_mixes,
    )
)


def concat(xs: Sequence[Any], axis: int = 0) -> Any:
    """The tensors `xs` one behind the other along `axis`; all other sizes and the dtype agree."""
    return CONCAT(*xs, axis=axis)


def _split_sizes(tensor: Abstract, sizes: tuple[int, ...] | int, axis: int) -> tuple[int, tuple[int, ...]]:
    place = normal_axis("split", axis, tensor.ndim)
    total = tensor.shape[place]
    if isinstance(sizes, int):
        if sizes < 1 or total % sizes:
            raise ShapeError(
                f"split: axis {place} does not divide into {int(sizes)} equal parts", found=tensor
            )
        return place, (int(total) // int(sizes),) * int(sizes)
    if not sizes or sum(sizes) != total or min(sizes) < 0:
        raise ShapeError(
            f"split: sizes must be positive and add up to axis {place}",
            expected=int(total),
            found=shape_text(sizes),
        )
    return place, tuple(sizes)


def _split_shape(x: Any, *, sizes: tuple[int, ...] | int, axis: int) -> tuple[Abstract, ...]:
    tensor = need_ndim("split", "x", x, 1)
    place, parts = _split_sizes(tensor, sizes, axis)
    before, after = tensor.shape[:place], tensor.shape[place + 1 :]
    return tuple(Abstract((*before, n, *after), tensor.dtype) for n in parts)


def _split_reference(x: torch.Tensor, *, sizes: tuple[int, ...] | int, axis: int) -> tuple[torch.Tensor, ...]:
    place, parts = _split_sizes(Abstract(tuple(x.shape), x.dtype), sizes, axis)
    return tuple(x.split([int(n) for n in parts], dim=place))


SPLIT = register_op(
    Op(
        "split",
        _split_shape,
        _split_reference,
        view_cost,
        views=True,
        mixes=lambda x, *, sizes, axis: ((0, axis),),
    )
)


def split(x: Any, sizes_or_sections: Sequence[int] | int, axis: int = -1) -> tuple[Any, ...]:
    """x cut along `axis` into parts of the given sizes, or into so many equal parts.

    Example: q, k, v = split(qkv, (H * D, K * D, K * D)).

    Raises:
        ShapeError: the sizes do not add up, or the axis does not divide.
    """
    sizes = sizes_or_sections if isinstance(sizes_or_sections, int) else tuple(sizes_or_sections)
    return SPLIT(x, sizes=sizes, axis=axis)


def _arange_shape(*, size: int, dtype: torch.dtype) -> Abstract:
    if size < 0:
        raise ShapeError("arange: size must not be negative", found=int(size))
    if dtype == torch.bool:
        raise DTypeError("arange: dtype must be a number", found=dtype_name(dtype))
    return Abstract((size,), dtype)


ARANGE = register_op(
    Op("arange", _arange_shape, lambda *, size, dtype: torch.arange(int(size), dtype=torch.int64).to(dtype))
)


def arange(size: int, dtype: torch.dtype = torch.int64) -> Any:
    """0, 1, ... size - 1 as [size]; `size` is static, and may be the padded size of a bucketed axis."""
    return ARANGE(size=size, dtype=dtype)
