"""Reductions along one axis, each with an optional count of real entries.

With `counts`, entries past the count never contribute, whatever they hold: they are replaced by a selection, never by
a product, so a NaN in padding changes nothing, while a NaN in a real entry comes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import ShapeError
from atbx.core.op import Cost, Op, register_op, traffic
from atbx.ops.operands import (
    common_size,
    need_float,
    need_index,
    need_ndim,
    need_number,
    normal_axis,
    shape_text,
    wide_dtype,
)


def _checked(
    op: str, x: Any, counts: Any, axis: int, *, floats: bool, filled: bool = False
) -> tuple[Abstract, int]:
    """x with sizes agreed with counts, and its axis from the front; `filled` refuses an axis of size 0."""
    number = need_float(op, "x", x) if floats else need_number(op, "x", x)
    value = need_ndim(op, "x", number, 1)
    place = normal_axis(op, axis, value.ndim)
    if filled and value.shape[place] == 0:
        raise ShapeError(f"{op}: axis {place} is empty, so it has no result", found=value)
    if counts is None:
        return value, place
    lead = need_index(op, "counts", counts).shape
    if len(lead) > place:
        raise ShapeError(
            f"{op}: counts must fit the axes before axis {place}",
            expected=f"at most the sizes {shape_text(value.shape[:place])}",
            found=counts,
        )
    sizes = list(value.shape)
    for a, size in enumerate(lead):
        if size != 1:
            sizes[a] = common_size(f"{op}: counts", sizes[a], size, a, broadcast=False)
    return Abstract(tuple(sizes), value.dtype), place


def real_entries(x: torch.Tensor, counts: torch.Tensor | None, axis: int) -> torch.Tensor | None:
    """Which entries along `axis` are real, broadcastable to x; None where all are. counts fits x's leading axes."""
    if counts is None:
        return None
    place = axis % x.ndim
    places = torch.arange(x.shape[place], device=x.device).view(-1, *[1] * (x.ndim - place - 1))
    return places < counts.view(*counts.shape, *[1] * (x.ndim - counts.ndim))


def _only_real(x: torch.Tensor, real: torch.Tensor | None, fill: float | int) -> torch.Tensor:
    return x if real is None else torch.where(real, x, torch.full((), fill, dtype=x.dtype, device=x.device))


def _lowest(dtype: torch.dtype) -> float | int:
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | int:
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _mixes(x: Abstract, counts: Any = None, *, axis: int, **params: Any) -> Iterable[tuple[int, int]]:
    return ((0, axis),) if counts is None else ()


def _cost(flops: float) -> Callable[..., Cost]:
    def cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
        return Cost(flops * operands[0].numel, traffic(operands, results))

    return cost


def _reduced(value: Abstract, place: int, keepdims: bool, dtype: torch.dtype) -> Abstract:
    before, after = value.shape[:place], value.shape[place + 1 :]
    return Abstract((*before, 1, *after) if keepdims else (*before, *after), dtype)


def _reduction(
    name: str,
    reduce: Callable[[torch.Tensor, torch.Tensor | None, int, bool], torch.Tensor],
    *,
    floats: bool = False,
    filled: bool = False,
    result: torch.dtype | None = None,
    flops: float = 1,
) -> Op:
    def shape(x: Any, counts: Any = None, *, axis: int, keepdims: bool) -> Abstract:
        value, place = _checked(name, x, counts, axis, floats=floats, filled=filled)
        return _reduced(value, place, keepdims, result or value.dtype)

    def reference(
        x: torch.Tensor, counts: torch.Tensor | None = None, *, axis: int, keepdims: bool
    ) -> torch.Tensor:
        return reduce(x, real_entries(x, counts, axis), axis, keepdims)

    return register_op(Op(name, shape, reference, _cost(flops), mixes=_mixes))


def _accumulate(x: torch.Tensor, real: torch.Tensor | None, axis: int, keepdims: bool) -> torch.Tensor:
    wide = wide_dtype(x.dtype) if x.dtype.is_floating_point else torch.int64
    return _only_real(x.to(wide), real, 0).sum(axis, keepdim=keepdims)


def _sum(x: torch.Tensor, real: torch.Tensor | None, axis: int, keepdims: bool) -> torch.Tensor:
    return _accumulate(x, real, axis, keepdims).to(x.dtype)


def _mean(x: torch.Tensor, real: torch.Tensor | None, axis: int, keepdims: bool) -> torch.Tensor:
    total = _accumulate(x, real, axis, keepdims)
    if real is None:
        return (total / x.shape[axis]).to(x.dtype)
    number = real.sum(axis, keepdim=True)
    return (total / (number if keepdims else number.squeeze(axis))).to(x.dtype)


def _max(x: torch.Tensor, real: torch.Tensor | None, axis: int, keepdims: bool) -> torch.Tensor:
    return _only_real(x, real, _lowest(x.dtype)).amax(axis, keepdim=keepdims)


def _min(x: torch.Tensor, real: torch.Tensor | None, axis: int, keepdims: bool) -> torch.Tensor:
    return _only_real(x, real, _highest(x.dtype)).amin(axis, keepdim=keepdims)


def _logsumexp(x: torch.Tensor, real: torch.Tensor | None, axis: int, keepdims: bool) -> torch.Tensor:
    wide = _only_real(x.to(wide_dtype(x.dtype)), real, -torch.inf)
    return torch.logsumexp(wide, axis, keepdim=keepdims).to(x.dtype)


def _argmax(x: torch.Tensor, real: torch.Tensor | None, axis: int, keepdims: bool) -> torch.Tensor:
    values = _only_real(x, real, _lowest(x.dtype))
    # torch leaves open which of several equal entries it returns; NaN counts as the largest, as it does there.
    hit = (values == values.amax(axis, keepdim=True)) | (values != values)
    size = x.shape[axis]
    places = torch.arange(size, device=x.device).view(-1, *[1] * (x.ndim - axis % x.ndim - 1))
    return torch.where(hit, places, size).amin(axis, keepdim=keepdims)


SUM = _reduction("sum", _sum)
MEAN = _reduction("mean", _mean, floats=True)
MAX = _reduction("max", _max, filled=True)
MIN = _reduction("min", _min, filled=True)
LOGSUMEXP = _reduction("logsumexp", _logsumexp, floats=True, flops=6)
ARGMAX = _reduction("argmax", _argmax, filled=True, result=torch.int64)


def _softmax_shape(x: Any, counts: Any = None, *, axis: int) -> Abstract:
    value, _ = _checked("softmax", x, counts, axis, floats=True)
    return Abstract(value.shape, value.dtype)


def _softmax_reference(x: torch.Tensor, counts: torch.Tensor | None = None, *, axis: int) -> torch.Tensor:
    real = real_entries(x, counts, axis)
    weights = torch.softmax(_only_real(x.to(wide_dtype(x.dtype)), real, -torch.inf), axis)
    # A row without any real entry would be 0/0.
    return _only_real(weights, real, 0).to(x.dtype)


SOFTMAX = register_op(Op("softmax", _softmax_shape, _softmax_reference, _cost(7), mixes=_mixes))


def _cumsum_shape(x: Any, counts: Any = None, *, axis: int) -> Abstract:
    value, _ = _checked("cumsum", x, counts, axis, floats=False)
    return Abstract(value.shape, value.dtype)


def _cumsum_reference(x: torch.Tensor, counts: torch.Tensor | None = None, *, axis: int) -> torch.Tensor:
    wide = wide_dtype(x.dtype) if x.dtype.is_floating_point else torch.int64
    return _only_real(x.to(wide), real_entries(x, counts, axis), 0).cumsum(axis).to(x.dtype)


CUMSUM = register_op(Op("cumsum", _cumsum_shape, _cumsum_reference, _cost(1), mixes=_mixes))


def _top_k_shape(x: Any, counts: Any = None, *, k: int, axis: int) -> tuple[Abstract, Abstract]:
    value, place = _checked("top_k", x, counts, axis, floats=False)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= value.shape[place]:
        raise ShapeError(
            "top_k: k does not fit the axis", expected=f"1 to {int(value.shape[place])}", found=repr(k)
        )
    sizes = (*value.shape[:place], k, *value.shape[place + 1 :])
    return Abstract(sizes, value.dtype), Abstract(sizes, torch.int64)


def _top_k_reference(
    x: torch.Tensor, counts: torch.Tensor | None = None, *, k: int, axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    values = _only_real(x, real_entries(x, counts, axis), _lowest(x.dtype))
    # Stable, so that of equal entries the lowest index comes first, and padding comes after real entries of -inf.
    ordered, indices = values.sort(dim=axis, descending=True, stable=True)
    return ordered.narrow(axis, 0, int(k)).clone(), indices.narrow(axis, 0, int(k)).clone()


TOP_K = register_op(Op("top_k", _top_k_shape, _top_k_reference, _cost(4), mixes=_mixes))


def sum(x: Any, axis: int, *, keepdims: bool = False, counts: Any = None) -> Any:
    """Sum along `axis`, accumulated in FP32 (integers in int64), in x's dtype; 0 where nothing is real.

    counts: real entries along the axis, over x's leading axes ([B] for x [B,T,...] along axis 1, or [] for all).
    """
    return SUM(x, counts, axis=axis, keepdims=keepdims)


def mean(x: Any, axis: int, *, keepdims: bool = False, counts: Any = None) -> Any:
    """Mean along `axis` of the real entries, accumulated in FP32; NaN where nothing is real. `counts` as in `sum`."""
    return MEAN(x, counts, axis=axis, keepdims=keepdims)


def max(x: Any, axis: int, *, keepdims: bool = False, counts: Any = None) -> Any:
    """Largest real entry along `axis`, NaN if one is; the dtype's lowest value where nothing is real."""
    return MAX(x, counts, axis=axis, keepdims=keepdims)


def min(x: Any, axis: int, *, keepdims: bool = False, counts: Any = None) -> Any:
    """Smallest real entry along `axis`, NaN if one is; the dtype's highest value where nothing is real."""
    return MIN(x, counts, axis=axis, keepdims=keepdims)


def logsumexp(x: Any, axis: int = -1, *, keepdims: bool = False, counts: Any = None) -> Any:
    """log(sum(exp(x))) along `axis`, in FP32 and rounded once; -inf where nothing is real."""
    return LOGSUMEXP(x, counts, axis=axis, keepdims=keepdims)


def argmax(x: Any, axis: int = -1, *, keepdims: bool = False, counts: Any = None) -> Any:
    """int64 index of the largest real entry along `axis`: the first of several, the first NaN if there is one."""
    return ARGMAX(x, counts, axis=axis, keepdims=keepdims)


def softmax(x: Any, axis: int = -1, *, counts: Any = None) -> Any:
    """exp(x) / sum(exp(x)) along `axis`, in FP32 and rounded once; 0 past the count."""
    return SOFTMAX(x, counts, axis=axis)


def cumsum(x: Any, axis: int, *, counts: Any = None) -> Any:
    """Running sum along `axis`, accumulated in FP32 (integers in int64); past the count the total stays."""
    return CUMSUM(x, counts, axis=axis)


def top_k(x: Any, k: int, axis: int = -1, *, counts: Any = None) -> tuple[Any, Any]:
    """The k largest entries along `axis`, descending, and their int64 indices; of equal ones the lowest index first.

    Where fewer than k are real, the dtype's lowest value stands for the rest.

    Raises:
        ShapeError: k is not within 1 and the axis' size.
    """
    return TOP_K(x, counts, k=k, axis=axis)
