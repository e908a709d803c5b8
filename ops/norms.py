"""Norms over the last axis: computed in FP32 (FP64 for FP64), weights of any float dtype, one rounding at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import ShapeError
from atbx.core.op import Cost, Op, register_op, traffic
from atbx.ops.operands import common_size, need_float, need_ndim, need_same_dtype, need_sizes, wide_dtype


def _norm_input(op: str, x: Any, eps: float) -> Abstract:
    value = need_ndim(op, "x", need_float(op, "x", x), 1)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
        raise ShapeError(f"{op}: eps must be a number and not negative", found=repr(eps))
    return value


def _norm_vector(op: str, name: str, vector: Any, x: Abstract) -> None:
    need_sizes(op, name, need_float(op, name, vector), (int(x.shape[-1]),))


def _mixes_last(*operands: Any, **params: Any) -> Iterable[tuple[int, int]]:
    return ((0, operands[0].ndim - 1),)


def _rms_shape(x: Any, weight: Any, *, eps: float, offset: float) -> Abstract:
    value = _norm_input("rms_norm", x, eps)
    _norm_vector("rms_norm", "weight", weight, value)
    return Abstract(value.shape, value.dtype)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, wide: torch.dtype) -> torch.Tensor:
    values = x.to(wide)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return values * scale * (weight.to(wide) + offset)


def _rms_reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float) -> torch.Tensor:
    return _rms(x, weight, eps, offset, wide_dtype(x.dtype)).to(x.dtype)


def _norm_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    # Square, sum, scale, weight.
    return Cost(4.0 * operands[0].numel, traffic(operands, results))


RMS_NORM = register_op(Op("rms_norm", _rms_shape, _rms_reference, _norm_cost, mixes=_mixes_last))


def rms_norm(x: Any, weight: Any, *, eps: float, offset: float = 0.0) -> Any:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis: x [..., M], weight [M].

    offset: 1.0 for Gemma, whose weights are stored less one.

    Raises:
        ShapeError: weight does not fit, or eps is negative.
    """
    return RMS_NORM(x, weight, eps=eps, offset=offset)


def _layer_shape(x: Any, weight: Any, bias: Any = None, *, eps: float) -> Abstract:
    value = _norm_input("layer_norm", x, eps)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            _norm_vector("layer_norm", name, vector, value)
    return Abstract(value.shape, value.dtype)


def _layer_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None, *, eps: float
) -> torch.Tensor:
    wide = wide_dtype(x.dtype)
    values = x.to(wide)
    centred = values - values.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(wide)
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(x.dtype)


def _layer_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return Cost(7.0 * operands[0].numel, traffic(operands, results))


LAYER_NORM = register_op(Op("layer_norm", _layer_shape, _layer_reference, _layer_cost, mixes=_mixes_last))


def layer_norm(x: Any, weight: Any = None, bias: Any = None, *, eps: float) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis: x [..., M], weight and bias [M].

    Raises:
        ShapeError: weight or bias does not fit, or eps is negative.
    """
    return LAYER_NORM(x, weight, bias, eps=eps)


def _add_rms_shape(
    x: Any, residual: Any, weight: Any, *, eps: float, offset: float
) -> tuple[Abstract, Abstract]:
    value = _norm_input("add_rms_norm", x, eps)
    other = need_float("add_rms_norm", "residual", residual)
    need_sizes("add_rms_norm", "residual", other, value.shape)
    need_same_dtype("add_rms_norm", x=value, residual=other)
    _norm_vector("add_rms_norm", "weight", weight, value)
    pairs = zip(value.shape, other.shape, strict=True)
    sizes = tuple(common_size("add_rms_norm", m, n, a, broadcast=False) for a, (m, n) in enumerate(pairs))
    return Abstract(sizes, value.dtype), Abstract(sizes, value.dtype)


def _add_rms_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = wide_dtype(x.dtype)
    summed = (x.to(wide) + residual.to(wide)).to(x.dtype)
    return _rms(summed, weight, eps, offset, wide).to(x.dtype), summed


def _add_rms_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return Cost(5.0 * operands[0].numel, traffic(operands, results))


ADD_RMS_NORM = register_op(
    Op("add_rms_norm", _add_rms_shape, _add_rms_reference, _add_rms_cost, mixes=_mixes_last)
)


def add_rms_norm(x: Any, residual: Any, weight: Any, *, eps: float, offset: float = 0.0) -> tuple[Any, Any]:
    """(rms_norm(s), s) of s = x + residual, where s is rounded to x's dtype first: both [..., M].

    Raises:
        ShapeError: residual or weight does not fit, or eps is negative.
        DTypeError: x and residual have different dtypes.
    """
    return ADD_RMS_NORM(x, residual, weight, eps=eps, offset=offset)
