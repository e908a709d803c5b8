"""Kernels of the fused ops: whole stretches of a block as one call, over packed weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from atbx.core.backend import HostPlan, Kernel
from atbx.core.program import Equation
from atbx.kernels.cpu.attention import (
    ATTENTION_PLAN,
    attend_function,
    attention_facts,
    plan_spans,
    refuses_flash,
    write_spans,
)
from atbx.kernels.cpu.matmul import WEIGHT, linear_for, refuses_matmul
from atbx.kernels.cpu.pointwise import gated, rms_norm, rotate_pair


def _refuses(equation: Equation) -> str | None:
    return refuses_matmul(equation.results[0].dtype)


def _norm_qkv(equation: Equation) -> Callable[..., Any]:
    params = equation.params
    eps, offset, heads, size = params["eps"], params["offset"], params["heads"], params["head_size"]
    widths = [h * size for h in heads]
    linear = linear_for(equation.results[0].dtype)

    def run(
        x: torch.Tensor, norm: torch.Tensor, weight: Any, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        together = linear(rms_norm(x, norm, eps, offset), weight, bias)
        q, k, v = together.split(widths, dim=-1)
        return (
            q.unflatten(-1, (heads[0], size)),
            k.unflatten(-1, (heads[1], size)),
            v.unflatten(-1, (heads[2], size)),
        )

    return run


def _rotary_write(equation: Equation) -> Callable[..., Any]:
    style = equation.params["style"]

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_arena: torch.Tensor,
        v_arena: torch.Tensor,
        rows: Any,
        lengths: Any,
        counts: Any,
        spans: Any,
    ) -> tuple[torch.Tensor, ...]:
        rotated, keys = rotate_pair(q, k, cos, sin, style)
        return rotated, write_spans(k_arena, keys, spans), write_spans(v_arena, v, spans)

    return run


def _rotary_write_facts(equation: Equation) -> Hashable:
    return attention_facts(equation.operands[0], equation.operands[5], equation.params)


def _attend_project(equation: Equation) -> Callable[..., torch.Tensor]:
    attend = attend_function(equation)
    linear = linear_for(equation.results[0].dtype)

    def run(
        q: torch.Tensor,
        k_arena: torch.Tensor,
        v_arena: torch.Tensor,
        rows: Any,
        lengths: Any,
        counts: Any,
        slopes: Any,
        sinks: Any,
        weight: Any,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        spans: Any,
    ) -> torch.Tensor:
        attended = attend(q, k_arena, v_arena, spans)
        return linear(attended.flatten(2), weight, bias).add_(residual)

    return run


def _refuses_attend_project(equation: Equation) -> str | None:
    return _refuses(equation) or refuses_flash(equation)


def _norm_gated_mlp(equation: Equation) -> Callable[..., torch.Tensor]:
    eps, offset, activation = (equation.params[n] for n in ("eps", "offset", "activation"))
    linear = linear_for(equation.results[0].dtype)

    def run(
        x: torch.Tensor,
        norm: torch.Tensor,
        gate_up: Any,
        gate_up_bias: torch.Tensor | None,
        down: Any,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        both = linear(rms_norm(x, norm, eps, offset), gate_up, gate_up_bias)
        gate, up = both.chunk(2, dim=-1)
        return linear(gated(gate, up, activation), down, down_bias).add_(x)

    return run


KERNELS = (
    Kernel(
        "torch.norm_qkv",
        "norm_qkv",
        _norm_qkv,
        refuses=_refuses,
        packs=lambda equation: {2: WEIGHT},
        tier="fused",
    ),
    Kernel(
        "torch.rotary_write",
        "rotary_write",
        _rotary_write,
        plan=HostPlan((7, 8, 9), _rotary_write_facts, plan_spans),
        tier="fused",
    ),
    Kernel(
        "torch.attend_project",
        "attend_project",
        _attend_project,
        refuses=_refuses_attend_project,
        packs=lambda equation: {8: WEIGHT},
        plan=ATTENTION_PLAN,
        tier="fused",
    ),
    Kernel(
        "torch.norm_gated_mlp",
        "norm_gated_mlp",
        _norm_gated_mlp,
        refuses=_refuses,
        packs=lambda equation: {2: WEIGHT, 4: WEIGHT},
        tier="fused",
    ),
)
