"""RMS norms: one launch each, FP32 inside; the sum of `add_rms_norm` is the new residual and is rounded first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from atbx.core.backend import Preparation
from atbx.core.program import Equation
from atbx.kernels.ascend.capability import FLOATS, Capability, Limit
from atbx.kernels.ascend.runtime import building_for, device_mark


def _norm_weight(equation: Equation, operand: int, dtype: torch.dtype | None) -> Preparation:
    """The weight on the device, with the offset of Gemma-like norms added in FP32 and the dtype that the kernel takes.

    npu_rms_norm multiplies by gamma alone, so (weight + offset) has to be formed before.
    """
    offset = float(equation.params["offset"])
    to = dtype or equation.operands[operand].dtype

    def pack(tensor: torch.Tensor, abstract: Any) -> torch.Tensor:
        return building_for().place((tensor.float() + offset).to(to) if offset else tensor.to(to))

    return Preparation(f"ascend.gamma+{offset}:{to}{device_mark()}", pack)


def _rms_norm(equation: Equation) -> Callable[..., torch.Tensor]:
    eps = float(equation.params["eps"])

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.npu.npu_rms_norm(x, weight, eps)[0]
        return out

    return run


def _add_rms_norm(equation: Equation) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    eps = float(equation.params["eps"])

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # (y, rstd, sum): the order differs from that of runtimes which give (out, residual).
        normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    return run


def _add_then_norm(equation: Equation) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    norm = _rms_norm(equation)

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return norm(total, weight), total

    return run


def _refuses_rounded_offset(equation: Equation) -> str | None:
    """A weight that had to be rounded with its offset would differ from the reference by an ulp of 1 + weight."""
    if float(equation.params["offset"]) and equation.operands[0].dtype != torch.float32:
        return "gamma has the dtype of x here, and 1 + weight would be rounded to it"
    return None


def _refuses_small_axis(equation: Equation) -> str | None:
    x = equation.operands[0]
    size = int(x.shape[-1]) * x.dtype.itemsize
    return f"the last axis is {size} bytes, under 32" if size < 32 else None


SMALL = Limit("last_axis_32_bytes", _refuses_small_axis, "facts 1.4, rms_norm on 310P")
OFFSET = Limit("no_rounded_offset", _refuses_rounded_offset, "our own: accuracy of 1 + weight")

ROWS = (
    Capability(
        "rms_norm",
        "npu.rms_norm",
        ("npu::npu_rms_norm",),
        _rms_norm,
        dtypes=FLOATS,
        limits=(SMALL,),
        evidence=("schema", "document", "upstream golden"),
        packs=lambda equation: {
            1: _norm_weight(equation, 1, torch.float32 if equation.params["offset"] else None)
        },
        calls={"npu::npu_rms_norm": ("input", "gamma", "epsilon")},
    ),
    Capability(
        "add_rms_norm",
        "npu.add_rms_norm",
        ("npu::npu_add_rms_norm",),
        _add_rms_norm,
        families=("A2", "A3", "310P"),
        dtypes=FLOATS,
        limits=(SMALL, OFFSET),
        evidence=("schema", "document", "upstream golden"),
        packs=lambda equation: {2: _norm_weight(equation, 2, equation.operands[0].dtype)},
        calls={"npu::npu_add_rms_norm": ("x1", "x2", "gamma", "epsilon")},
    ),
    Capability(
        "add_rms_norm",
        "npu.add+rms_norm",
        ("aten::add", "npu::npu_rms_norm"),
        _add_then_norm,
        dtypes=FLOATS,
        limits=(SMALL,),
        evidence=("schema", "document", "upstream golden"),
        tier="composed",
        launches=2,
        packs=lambda equation: {
            2: _norm_weight(equation, 2, torch.float32 if equation.params["offset"] else None)
        },
        calls={"npu::npu_rms_norm": ("input", "gamma", "epsilon")},
    ),
)
