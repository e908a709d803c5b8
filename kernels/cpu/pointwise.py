"""Norms, rotary and gated activations on the CPU: FP32 inside, one rounding at the end, few passes over the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from atbx.core.backend import Kernel
from atbx.core.program import Equation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """x [..., M] over its root mean square, times (weight + offset)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_wide = x.to(wide)
    scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True).add_(eps))
    factor = weight.to(wide)
    if offset:
        factor = factor + offset
    return (x_wide * scale).mul_(factor).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> torch.Tensor:
    """x [B,T,N,D] rotated by cos, sin [B,T,1,dims/2]; channels past dims pass through."""
    wide = cos.dtype if x.dtype != torch.float64 else torch.float64
    dims = 2 * cos.shape[-1]
    head = x[..., :dims].to(wide)
    out = torch.empty(x.shape, dtype=wide)
    if style == "half":
        a, b = head[..., : dims // 2], head[..., dims // 2 :]
        first, second = out[..., : dims // 2], out[..., dims // 2 : dims]
    else:
        a, b = head[..., 0::2], head[..., 1::2]
        first, second = out[..., 0:dims:2], out[..., 1:dims:2]
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    if dims < x.shape[-1]:
        out[..., dims:] = x[..., dims:]
    return out.to(x.dtype)


def rotate_pair(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,T,H,D] and k [B,T,K,D] rotated together, so that each step is one pass over both."""
    together = rotate(torch.cat([q, k], dim=2), cos.unsqueeze(2), sin.unsqueeze(2), style)
    return together[:, :, : q.shape[2]], together[:, :, q.shape[2] :]


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up, both [..., F], in FP32 and rounded once."""
    function = ACTIVATIONS[activation]
    if gate.dtype in (torch.float32, torch.float64):
        return function(gate) * up
    return function(gate.float()).mul_(up).to(gate.dtype)


def _rms_norm(equation: Equation) -> Callable[..., torch.Tensor]:
    eps, offset = equation.params["eps"], equation.params["offset"]
    return lambda x, weight: rms_norm(x, weight, eps, offset)


def _add_rms_norm(equation: Equation) -> Callable[..., Any]:
    eps, offset = equation.params["eps"], equation.params["offset"]

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return rms_norm(total, weight, eps, offset), total

    return run


def _rotary(equation: Equation) -> Callable[..., Any]:
    style = equation.params["style"]
    return lambda q, k, cos, sin: rotate_pair(q, k, cos, sin, style)


def _gated(equation: Equation) -> Callable[..., torch.Tensor]:
    activation = equation.params["activation"]
    return lambda gate, up: gated(gate, up, activation)


KERNELS = (
    Kernel("torch.rms_norm", "rms_norm", _rms_norm, tier="fused"),
    Kernel("torch.add_rms_norm", "add_rms_norm", _add_rms_norm, tier="fused"),
    Kernel("torch.rotary", "rotary", _rotary, tier="fused"),
    Kernel("torch.gated", "gated", _gated, tier="fused"),
)
