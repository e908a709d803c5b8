"""Rotary position embedding as two ops: angles once a step, and the rotation of queries and keys in each layer.

The tables of cos and sin are explicit values in FP32, never hidden state, so two models with other frequencies cannot
meet, and positions beyond 256 are not rounded as they would be in BF16.
"""

from __future__ import annotations

from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import DTypeError, OptionError, ShapeError
from atbx.core.op import Cost, Op, register_op, traffic
from atbx.ops.operands import (
    common_size,
    need_float,
    need_index,
    need_ndim,
    need_same_dtype,
    need_sizes,
    need_tensor,
)
from atbx.ops.rope import STYLES, Rope, attention_factor, inverse_frequencies


def _angles_shape(positions: Any, limits: Any = None, *, rope: Rope) -> tuple[Abstract, Abstract]:
    places = need_index("rotary_angles", "positions", positions)
    if places.ndim != 2:
        raise ShapeError("rotary_angles: positions must have two axes", expected="[B,T]", found=places)
    batch, tokens = places.shape
    if limits is not None:
        rows = need_index("rotary_angles", "limits", limits)
        need_sizes("rotary_angles", "limits", rows, (batch,))
        batch = common_size("rotary_angles", batch, rows.shape[0], 0, broadcast=False)
    elif rope.depends_on_length:
        raise OptionError(
            f"rotary_angles: scaling {rope.scaling!r} depends on the length, so it needs limits",
            where="limits",
            expected="[B] integers, the tokens that each row will hold at most",
            found=None,
        )
    table = Abstract((batch, tokens, rope.dims // 2), torch.float32)
    return table, table


def _angles_reference(
    positions: torch.Tensor, limits: torch.Tensor | None = None, *, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = inverse_frequencies(rope, limits if rope.depends_on_length else None).to(positions.device)
    if frequencies.ndim == 2:
        frequencies = frequencies.unsqueeze(1)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    factor = attention_factor(rope)
    return angles.cos() * factor, angles.sin() * factor


def _angles_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return Cost(10.0 * results[0].numel, traffic(operands, results))


ROTARY_ANGLES = register_op(Op("rotary_angles", _angles_shape, _angles_reference, _angles_cost))


def rotary_angles(positions: Any, rope: Rope, limits: Any = None) -> tuple[Any, Any]:
    """cos and sin of each position's angles, in FP32, times the attention factor: positions [B,T] to [B,T,dims/2].

    limits: [B] tokens that each row will hold at most; needed where the scaling depends on the length.

    Raises:
        OptionError: such a scaling has no limits.
    """
    return ROTARY_ANGLES(positions, limits if rope.depends_on_length else None, rope=rope)


def _rotary_shape(q: Any, k: Any, cos: Any, sin: Any, *, style: str) -> tuple[Abstract, Abstract]:
    if style not in STYLES:
        raise OptionError("rotary: unknown style", expected=f"one of {STYLES}", found=repr(style))
    tables = need_tensor("rotary", "cos", cos), need_tensor("rotary", "sin", sin)
    if tables[0].dtype not in (torch.float32, torch.float64):
        raise DTypeError("rotary: cos must be f32 or f64", found=tables[0])
    need_same_dtype("rotary", cos=tables[0], sin=tables[1])
    if tables[0].ndim != 3:
        raise ShapeError("rotary: cos must have three axes", expected="[B,T,dims/2]", found=tables[0])
    need_sizes("rotary", "sin", tables[1], tables[0].shape)
    values = {"q": need_float("rotary", "q", q), "k": need_float("rotary", "k", k)}
    need_same_dtype("rotary", **values)
    results = []
    for name, value in values.items():
        if need_ndim("rotary", name, value, 4).ndim != 4:
            raise ShapeError(f"rotary: {name} must have four axes", expected="[B,T,heads,D]", found=value)
        lead = [
            common_size(f"rotary: {name}", m, n, a, broadcast=False)
            for a, (m, n) in enumerate(zip(value.shape[:2], tables[0].shape[:2], strict=True))
        ]
        dims = 2 * int(tables[0].shape[2])
        if value.shape[3] < dims:
            raise ShapeError(
                f"rotary: {name} has fewer channels than rotate", expected=f"at least {dims}", found=value
            )
        results.append(Abstract((*lead, *value.shape[2:]), value.dtype))
    return results[0], results[1]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> torch.Tensor:
    """x [B,T,N,D] with its first channels rotated by cos, sin [B,T,dims/2], in the wider dtype, rounded once."""
    wide = torch.float64 if torch.float64 in (x.dtype, cos.dtype) else torch.float32
    c, s = cos.to(wide).unsqueeze(2), sin.to(wide).unsqueeze(2)
    dims = 2 * cos.shape[-1]
    turned = x[..., :dims].to(wide)
    if style == "half":
        a, b = turned[..., : dims // 2], turned[..., dims // 2 :]
        rotated = torch.cat([a * c - b * s, b * c + a * s], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        rotated = torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), x[..., dims:]], dim=-1)


def _rotary_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, style: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotate(q, cos, sin, style), rotate(k, cos, sin, style)


def _rotary_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    q, k, cos, _ = operands
    turned = 2.0 * int(cos.shape[2]) * sum(x.numel / max(1, int(x.shape[3])) for x in (q, k))
    return Cost(3.0 * turned, traffic(operands, results))


ROTARY = register_op(Op("rotary", _rotary_shape, _rotary_reference, _rotary_cost))


def rotary(q: Any, k: Any, positions: Any, rope: Rope, limits: Any = None) -> tuple[Any, Any]:
    """q and k rotated by their positions: q [B,T,H,D], k [B,T,K,D], positions [B,T]; channels past rope.dims pass.

    limits: [B] tokens that each row will hold at most. It chooses the frequencies of scalings that depend on the
    length ("dynamic", "longrope") once and for all; transformers instead goes by the batch's longest sequence so far.

    The order of channels is kept for both styles. Angles are computed in FP32, the result is rounded once.

    Raises:
        ShapeError: heads with fewer channels than rope.dims, or sizes that differ.
        OptionError: a scaling that depends on the length without limits.
    """
    cos, sin = rotary_angles(positions, rope, limits)
    return ROTARY(q, k, cos, sin, style=rope.style)
