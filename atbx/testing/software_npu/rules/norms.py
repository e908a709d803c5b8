"""Norms: root-mean-square norms alone, after a residual add, quantised; layer norms.

All reduce in float32. The residual sum is rounded to the data type first and the norm is taken of the rounded sum
(the operators return that sum as the new residual). Quantising forms differ in their sense: npu_rms_norm_quant
multiplies by its scale, npu_add_rms_norm_quant divides by it unless div_mode is off, ATB's form divides.
"""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.chips import INFERENCE_310P, family
from atbx.testing.software_npu.rules.registry import (
    PARAMETER,
    TILING,
    Call,
    NotModelledError,
    dtype_refusal,
    limit,
    refuse_parameter,
    refuse_tiling,
    rule,
)

_TESTS = "op-plugin test_npu_rms_norm.py, test_npu_add_rms_norm.py (fact sheet 1.4)"


def _rms(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, plus_one: bool = False):
    """Norm of x over the axes of gamma, times gamma, in float32; and 1/rms with those axes kept as 1."""
    wide = x.float()
    axes = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(wide.square().mean(dim=axes, keepdim=True) + epsilon)
    weight = gamma.float() + 1.0 if plus_one else gamma.float()
    return wide * rstd * weight, rstd


@rule("npu::npu_rms_norm", source=_TESTS, status="upstream golden ran")
def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6):
    """(y, 1/rms): y in the dtype of the input, or of gamma if that is float32."""
    normed, rstd = _rms(input, gamma, epsilon)
    return normed.to(input.dtype), rstd


@rule(
    "npu::npu_gemma_rms_norm", source="op-plugin test_npu_gemma_rms_norm.py", status="golden skipped upstream"
)
def gemma_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6):
    """(y, 1/rms) with the weight taken as 1 + gamma."""
    normed, rstd = _rms(input, gamma, epsilon, plus_one=True)
    return normed.to(input.dtype), rstd


@rule("npu::npu_add_rms_norm", source=_TESTS, status="upstream golden ran")
def add_rms_norm(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6):
    """(y, 1/rms, x1 + x2): the sum in the data type is what is normed and returned."""
    total = x1 + x2
    normed, rstd = _rms(total, gamma, epsilon)
    return normed.to(x1.dtype), rstd, total


@rule(
    "npu::npu_add_rms_norm_v2", source="op-plugin test_npu_add_rms_norm_v2.py", status="upstream golden ran"
)
def add_rms_norm_v2(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6):
    """1/rms; x1 becomes the norm and x2 becomes the sum, in place."""
    normed, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(normed)
    x2.copy_(total)
    return rstd


@rule(
    "npu::npu_add_rms_norm_cast",
    source="op-plugin test_npu_add_rms_norm_cast.py",
    status="upstream golden ran",
)
def add_rms_norm_cast(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6):
    """(y in float32, y in the data type, 1/rms, x1 + x2)."""
    total = x1 + x2
    normed, rstd = _rms(total, gamma, epsilon)
    narrow = normed.to(x1.dtype)
    return narrow.float(), narrow, rstd, total
