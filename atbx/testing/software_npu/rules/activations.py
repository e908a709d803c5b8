"""Gated and plain activations: which half is activated, and in what order the halves lie.

npu_swiglu activates the first half (gate, then up); npu_geglu activates the second half unless told otherwise;
npu_clipped_swiglu takes alternating elements by default. Computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as fun

from atbx.testing.software_npu.rules.registry import rule


@rule("npu::npu_swiglu", source="op-plugin page and test_npu_swi_glu.py", status="upstream golden ran")
def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half along dim."""
    gate, up = input.float().chunk(2, dim=dim)
    return (fun.silu(gate) * up).to(input.dtype)
