"""Ops over packed projections: what a backend makes of q, k, v (or gate and up) when one matmul gives them together.

A packed projection stays one tensor until the kernel that splits it, so that splitting costs no launch. Their reference
rules are the compositions they stand for; models never call them, fusion rules put them in place.
"""

from __future__ import annotations

from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import ShapeError
from atbx.core.op import Cost, Op, register_op, traffic
from atbx.ops.activations import GATED
from atbx.ops.attention import KV_WRITE
from atbx.ops.norms import RMS_NORM
from atbx.ops.rotary import ROTARY


def _parts(packed: Abstract, heads: tuple[int, int, int], head_size: int) -> tuple[Abstract, ...]:
    if packed.ndim != 3 or packed.shape[2] != sum(heads) * head_size:
        raise ShapeError(
            "qkv_rotary_write: packed projections do not fit the heads",
            expected=f"[B,T,{sum(heads) * head_size}]",
            found=packed,
        )
    return tuple(Abstract((*packed.shape[:2], n, head_size), packed.dtype) for n in heads)


def _write_shape(
    packed: Abstract,
    q_norm: Abstract | None,
    k_norm: Abstract | None,
    cos: Abstract,
    sin: Abstract,
    k_arena: Abstract,
    v_arena: Abstract,
    rows: Abstract,
    lengths: Abstract,
    counts: Abstract,
    *,
    heads: tuple[int, int, int],
    head_size: int,
    eps: float,
    style: str,
    window: int | None,
    extent: int,
) -> tuple[Abstract, ...]:
    q, k, v = _parts(packed, heads, head_size)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (head_size,):
            raise ShapeError(
                f"qkv_rotary_write: {name} does not fit", expected=f"[{head_size}]", found=weight
            )
    q_out, k_out = ROTARY.results(q, k, cos, sin, style=style)
    written = KV_WRITE.results(
        k_out, v, k_arena, v_arena, rows, lengths, counts, window=window, extent=extent
    )
    return q_out, *written


def _write_reference(
    packed: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    *,
    heads: tuple[int, int, int],
    head_size: int,
    eps: float,
    style: str,
    window: int | None,
    extent: int,
) -> tuple[torch.Tensor, ...]:
    pieces = packed.split([n * head_size for n in heads], dim=-1)
    q, k, v = (p.unflatten(-1, (n, head_size)) for p, n in zip(pieces, heads, strict=True))
    if q_norm is not None:
        q = RMS_NORM.reference(q, q_norm, eps=eps, offset=0.0)
    if k_norm is not None:
        k = RMS_NORM.reference(k, k_norm, eps=eps, offset=0.0)
    rotated, keys = ROTARY.reference(q, k, cos, sin, style=style)
    written = KV_WRITE.reference(
        keys, v, k_arena, v_arena, rows, lengths, counts, window=window, extent=extent
    )
    return rotated, *written


def _write_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    packed, q_norm, k_norm, cos, sin, *_ = operands
    normed = 4.0 * packed.numel if q_norm is not None or k_norm is not None else 0.0
    return Cost(6.0 * packed.numel + normed, 2.0 * packed.nbytes + cos.nbytes + sin.nbytes)


QKV_ROTARY_WRITE = register_op(
    Op("qkv_rotary_write", _write_shape, _write_reference, _write_cost, updates=((5, 1), (6, 2)))
)
"""(packed [B,T,(H+2K)*D], q_norm [D] or None, k_norm [D] or None, cos, sin [B,T,dims/2], k_arena, v_arena, rows,
lengths, counts) to rotated q [B,T,H,D] and the updated arenas: split, per-head RMS norm where given, rotary of q and k,
then kv_write of k and v."""


def _gated_packed_shape(both: Abstract, *, activation: str) -> Abstract:
    if both.shape[-1] % 2:
        raise ShapeError("gated_packed: gate and up have one width", expected="an even last axis", found=both)
    half = Abstract((*both.shape[:-1], both.shape[-1] // 2), both.dtype)
    return GATED.results(half, half, activation=activation)[0]


def _gated_packed_reference(both: torch.Tensor, *, activation: str) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return GATED.reference(gate, up, activation=activation)


def _gated_packed_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return Cost(7.0 * results[0].numel, traffic(operands, results))


GATED_PACKED = register_op(
    Op("gated_packed", _gated_packed_shape, _gated_packed_reference, _gated_packed_cost)
)
"""both [..., 2F], the gate's half first, to activation(gate) * up [..., F]."""
