"""Indexing ops: static indices as views (`x[...]`), and gathers by index tensors.

An index that is out of range is an error, never a clamp: it would show a wrong row as a right one (only the end of a
slice may lie past the axis, as in Python). The padded size of a bucketed axis is no place to cut at, except that
`x[:T]` has T entries whatever the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import Any

import torch

from atbx.core.abstract import Abstract, tag_of
from atbx.core.errors import BucketError, ShapeError
from atbx.core.op import Cost, Op, register_op
from atbx.core.staging import operators
from atbx.ops.operands import common_size, need_index, need_ndim, need_tensor, normal_axis
from atbx.ops.structural import view_cost

Entry = int | tuple[int, int, int] | str
"""One entry of a static index: a place, a range (start, stop, step), "all" for a whole axis, "new" for a new one."""


def _range(axis: int, size: int, part: slice) -> Entry:
    for bound in (part.start, part.stop, part.step):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise ShapeError(f"getitem: bounds of a slice must be ints (axis {axis})", found=repr(part))
    step = 1 if part.step is None else part.step
    if step < 1:
        raise ShapeError(f"getitem: the step of a slice must be positive (axis {axis})", found=int(step))
    whole_stop = part.stop is None or (
        tag_of(part.stop) == tag_of(size) and part.stop == size and tag_of(size)
    )
    if part.start in (None, 0) and whole_stop and step == 1:
        return "all"
    if tag_of(part.stop) and part.start in (None, 0) and step == 1 and tag_of(size) is None:
        if part.stop > size:
            raise ShapeError(
                f"getitem: axis {axis} is shorter than the slice", expected=int(part.stop), found=int(size)
            )
        return 0, part.stop, 1
    for bound in (part.start, part.stop, part.step):
        _refuse_padded(axis, bound)
    start, stop, _ = part.indices(int(size))
    return int(start), max(int(start), int(stop)), int(step)


def _refuse_padded(axis: int, place: int | None) -> None:
    if place is not None and tag_of(place):
        raise BucketError(
            f"getitem: axis {axis} is cut at the padded size of {tag_of(place)!r}",
            found=int(place),
            hint="The size depends on the bucket, so the result would too; use ops.take with a count",
        )


def _normal_index(shape: tuple[int, ...], index: Any) -> tuple[Entry, ...]:
    """`index` with one entry for each axis, in a form that compares by value."""
    entries = index if isinstance(index, tuple) else (index,)
    if sum(e is Ellipsis for e in entries) > 1:
        raise ShapeError("getitem: an index has at most one ...", found=repr(index))
    named = sum(e is not None and e is not Ellipsis for e in entries)
    if named > len(shape):
        raise ShapeError("getitem: too many indices", expected=f"at most {len(shape)}", found=named)
    found: list[Entry] = []
    axis = 0
    for entry in (*entries, *(() if any(e is Ellipsis for e in entries) else (Ellipsis,))):
        if entry is None:
            found.append("new")
        elif isinstance(entry, EllipsisType):
            rest = len(shape) - named
            found += ["all"] * rest
            axis += rest
        elif isinstance(entry, slice):
            found.append(_range(axis, shape[axis], entry))
            axis += 1
        elif isinstance(entry, int) and not isinstance(entry, bool):
            _refuse_padded(axis, entry)
            found.append(normal_axis("getitem", entry, int(shape[axis]), f"place on axis {axis}"))
            axis += 1
        else:
            raise ShapeError(
                "getitem: an index is made of ints, slices, None and ...",
                found=type(entry).__name__,
                hint="ops.take gathers rows by an index tensor, ops.where selects by a mask",
            )
    return tuple(found)


def _getitem_shape(x: Any, *, index: tuple[Entry, ...]) -> Abstract:
    tensor = need_tensor("getitem", "x", x)
    sizes: list[int] = []
    axis = 0
    for entry in index:
        if entry == "new":
            sizes.append(1)
            continue
        if entry == "all":
            sizes.append(tensor.shape[axis])
        elif isinstance(entry, tuple):
            sizes.append(entry[1] if tag_of(entry[1]) else len(range(*entry)))
        axis += 1
    if axis != tensor.ndim:
        raise ShapeError("getitem: the index does not fit", expected=f"{tensor.ndim} axes", found=axis)
    return Abstract(tuple(sizes), tensor.dtype)


def _getitem_reference(x: torch.Tensor, *, index: tuple[Entry, ...]) -> torch.Tensor:
    return x[tuple(_torch_entry(e) for e in index)]


def _torch_entry(entry: Entry) -> Any:
    if isinstance(entry, tuple):
        return slice(*(int(n) for n in entry))
    return {"all": slice(None), "new": None}[entry] if isinstance(entry, str) else entry


def _getitem_mixes(x: Abstract, *, index: tuple[Entry, ...]) -> Iterable[tuple[int, int]]:
    # Which entries of a padded axis are real is not known here, so picking some by place mixes real and padding.
    axes = [e for e in index if e != "new"]
    return [(0, axis) for axis, entry in enumerate(axes) if entry != "all"]


GETITEM = register_op(
    Op("getitem", _getitem_shape, _getitem_reference, view_cost, views=True, mixes=_getitem_mixes)
)


def getitem(x: Any, index: Any) -> Any:
    """x[index] for static indices: ints, slices, None and `...`; a view.

    Raises:
        ShapeError: out of range, or an index that is a tensor.
    """
    return GETITEM(x, index=_normal_index(tuple(x.shape), index))


def need_in_range(op: str, indices: torch.Tensor, size: int, what: str) -> None:
    """Raise ShapeError unless all indices are within 0 to size - 1 (for reference rules)."""
    if indices.numel() == 0:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= size:
        raise ShapeError(
            f"{op}: an index is out of range",
            where=what,
            expected=f"0 to {size - 1}",
            found=low if low < 0 else high,
        )


def _take_shape(x: Any, indices: Any) -> Abstract:
    tensor = need_ndim("take", "x", x, 2)
    index = need_index("take", "indices", indices)
    if index.ndim != 2:
        raise ShapeError("take: indices must have two axes", expected="[B,W]", found=index)
    batch = common_size("take", tensor.shape[0], index.shape[0], 0, broadcast=False)
    return Abstract((batch, index.shape[1], *tensor.shape[2:]), tensor.dtype)


def _take_reference(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    need_in_range("take", indices, x.shape[1], "indices into axis 1")
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x[rows, indices.long()]


def _gather_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return Cost(0.0, 2.0 * results[0].nbytes + operands[1].nbytes)


TAKE = register_op(Op("take", _take_shape, _take_reference, _gather_cost))


def take(x: Any, indices: Any) -> Any:
    """Rows of each batch row by index: x [B,T,...], indices [B,W] to [B,W,...].

    Raises:
        ShapeError: an index is outside 0 to T - 1 (found when run).
    """
    return TAKE(x, indices)


def _along_shape(x: Any, indices: Any, *, axis: int) -> Abstract:
    tensor = need_ndim("take_along", "x", x, 1)
    index = need_index("take_along", "indices", indices)
    place = normal_axis("take_along", axis, tensor.ndim)
    if index.ndim != tensor.ndim:
        raise ShapeError(
            "take_along: indices must have as many axes as x", expected=tensor.ndim, found=index.ndim
        )
    sizes = [
        size if a == place else common_size("take_along", tensor.shape[a], size, a, broadcast=False)
        for a, size in enumerate(index.shape)
    ]
    return Abstract(tuple(sizes), tensor.dtype)


def _along_reference(x: torch.Tensor, indices: torch.Tensor, *, axis: int) -> torch.Tensor:
    need_in_range("take_along", indices, x.shape[axis], f"indices into axis {axis}")
    return torch.gather(x, axis, indices.long())


TAKE_ALONG = register_op(Op("take_along", _along_shape, _along_reference, _gather_cost))


def take_along(x: Any, indices: Any, axis: int = -1) -> Any:
    """Entries of x along `axis`, by index: all other sizes of x and indices agree.

    Raises:
        ShapeError: an index is out of range (found when run).
    """
    return TAKE_ALONG(x, indices, axis=axis)


operators["getitem"] = getitem
