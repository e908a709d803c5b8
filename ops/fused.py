"""Fused ops: whole stretches of a transformer block as one op each, so that a backend can serve them by one kernel.

Their reference rules are the compositions they stand for, rounding between the parts included; models never call them,
fusion rules put them in place.
"""

from __future__ import annotations

from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import ShapeError
from atbx.core.op import Cost, Op, register_op, traffic
from atbx.ops.activations import GATED
from atbx.ops.attention import ATTENTION, KV_WRITE, attention_cost
from atbx.ops.linear import LINEAR
from atbx.ops.norms import RMS_NORM
from atbx.ops.rotary import ROTARY


def _norm_qkv_shape(
    x: Abstract,
    norm: Abstract,
    weight: Abstract,
    bias: Abstract | None,
    *,
    eps: float,
    offset: float,
    heads: tuple[int, int, int],
    head_size: int,
) -> tuple[Abstract, ...]:
    out = sum(heads) * head_size
    if weight.shape != (out, x.shape[-1]) or (bias is not None and bias.shape != (out,)):
        raise ShapeError("norm_qkv: weight does not fit", expected=f"[{out},{x.shape[-1]}]", found=weight)
    return tuple(Abstract((*x.shape[:-1], h, head_size), x.dtype) for h in heads)


def _norm_qkv_reference(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    offset: float,
    heads: tuple[int, int, int],
    head_size: int,
) -> tuple[torch.Tensor, ...]:
    normed = RMS_NORM.reference(x, norm, eps=eps, offset=offset)
    together = LINEAR.reference(normed, weight, bias)
    parts = together.split([h * head_size for h in heads], dim=-1)
    return tuple(p.unflatten(-1, (h, head_size)).contiguous() for p, h in zip(parts, heads, strict=True))


def _matmul_cost(rows: int, *weights: Abstract) -> float:
    return sum(2.0 * rows * w.numel for w in weights)


def _rows(x: Abstract) -> int:
    return x.numel // x.shape[-1]


def _norm_qkv_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    x, _, weight, _ = operands
    return Cost(_matmul_cost(_rows(x), weight) + 4.0 * x.numel, traffic(operands, results))


NORM_QKV = register_op(Op("norm_qkv", _norm_qkv_shape, _norm_qkv_reference, _norm_qkv_cost))
"""(x [B,T,M], norm [M], weight [(H+2K)*D, M], bias or None) to q [B,T,H,D], k and v [B,T,K,D]:
rms_norm, then the three projections as one matmul over their concatenated weights."""


def _rotary_write_shape(
    q: Abstract,
    k: Abstract,
    v: Abstract,
    cos: Abstract,
    sin: Abstract,
    k_arena: Abstract,
    v_arena: Abstract,
    rows: Abstract,
    lengths: Abstract,
    counts: Abstract,
    *,
    style: str,
    window: int | None,
    extent: int,
) -> tuple[Abstract, ...]:
    q_out, k_out = ROTARY.results(q, k, cos, sin, style=style)
    keys, values = KV_WRITE.results(
        k_out, v, k_arena, v_arena, rows, lengths, counts, window=window, extent=extent
    )
    return q_out, keys, values


def _rotary_write_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    *,
    style: str,
    window: int | None,
    extent: int,
) -> tuple[torch.Tensor, ...]:
    rotated, keys = ROTARY.reference(q, k, cos, sin, style=style)
    written = KV_WRITE.reference(
        keys, v, k_arena, v_arena, rows, lengths, counts, window=window, extent=extent
    )
    return (rotated, *written)


def _rotary_write_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    q, k, v, cos, sin, *_ = operands
    return Cost(6.0 * (q.numel + k.numel), 2.0 * (q.nbytes + k.nbytes + v.nbytes) + cos.nbytes + sin.nbytes)


ROTARY_WRITE = register_op(
    Op(
        "rotary_write",
        _rotary_write_shape,
        _rotary_write_reference,
        _rotary_write_cost,
        updates=((5, 1), (6, 2)),
    )
)
"""(q, k, v, cos, sin, k_arena, v_arena, rows, lengths, counts) to rotated q and the updated arenas:
rotary of q and k, then kv_write of k and v."""


def _attend_project_shape(
    q: Abstract,
    k_arena: Abstract,
    v_arena: Abstract,
    rows: Abstract,
    lengths: Abstract,
    counts: Abstract,
    slopes: Abstract | None,
    sinks: Abstract | None,
    weight: Abstract,
    bias: Abstract | None,
    residual: Abstract,
    **params: Any,
) -> Abstract:
    attended = ATTENTION.results(q, k_arena, v_arena, rows, lengths, counts, slopes, sinks, **params)[0]
    width = attended.shape[2] * attended.shape[3]
    if weight.shape != (residual.shape[-1], width):
        raise ShapeError(
            "attend_project: weight does not fit", expected=f"[{residual.shape[-1]},{width}]", found=weight
        )
    return Abstract(residual.shape, residual.dtype)


def _attend_project_reference(
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    **params: Any,
) -> torch.Tensor:
    attended = ATTENTION.reference(q, k_arena, v_arena, rows, lengths, counts, slopes, sinks, **params)
    return residual + LINEAR.reference(attended.flatten(2), weight, bias)


def _attend_project_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    q, k_arena, weight, residual = operands[0], operands[1], operands[8], operands[10]
    attended = attention_cost(q, k_arena, params["extent"], params["window"])
    moved = traffic((weight, operands[9], residual), results)
    return attended + Cost(_matmul_cost(_rows(residual), weight) + residual.numel, moved)


ATTEND_PROJECT = register_op(
    Op("attend_project", _attend_project_shape, _attend_project_reference, _attend_project_cost)
)
"""(attention's operands, weight [M, H*D], bias or None, residual [B,T,M]) to residual + linear(attention)."""


def _norm_gated_mlp_shape(
    x: Abstract,
    norm: Abstract,
    gate_up: Abstract,
    gate_up_bias: Abstract | None,
    down: Abstract,
    down_bias: Abstract | None,
    *,
    eps: float,
    offset: float,
    activation: str,
) -> Abstract:
    width, hidden = x.shape[-1], down.shape[-1]
    if gate_up.shape != (2 * hidden, width) or down.shape != (width, hidden):
        raise ShapeError(
            "norm_gated_mlp: weights do not fit",
            expected=f"[{2 * hidden},{width}] and [{width},{hidden}]",
            found=gate_up,
        )
    return Abstract(x.shape, x.dtype)


def _norm_gated_mlp_reference(
    x: torch.Tensor,
    norm: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    *,
    eps: float,
    offset: float,
    activation: str,
) -> torch.Tensor:
    normed = RMS_NORM.reference(x, norm, eps=eps, offset=offset)
    gate, up = LINEAR.reference(normed, gate_up, gate_up_bias).chunk(2, dim=-1)
    return x + LINEAR.reference(GATED.reference(gate, up, activation=activation), down, down_bias)


def _norm_gated_mlp_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    x, _, gate_up, _, down, _ = operands
    rows = _rows(x)
    flops = _matmul_cost(rows, gate_up, down) + 5.0 * x.numel + 6.0 * rows * down.shape[-1]
    return Cost(flops, traffic(operands, results))


NORM_GATED_MLP = register_op(
    Op("norm_gated_mlp", _norm_gated_mlp_shape, _norm_gated_mlp_reference, _norm_gated_mlp_cost)
)
"""(x [B,T,M], norm [M], gate_up [2F, M] with the gate's rows first, bias or None, down [M, F], bias or None) to
x + down(activation(gate) * up) of the normed x."""
