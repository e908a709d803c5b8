"""Matmuls: oneDNN over weights that were packed once for the narrow dtypes, torch's own for FP32 and FP64.

Both accumulate in FP32 or wider and round once. The packing does not depend on the number of rows, so prefill and
decode share it. FP32 is not packed: oneDNN's blocked FP32 matmul is no faster here and its error is 1.4 times that of
torch's (docs/decisions/cpu-matmuls.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from atbx.core.abstract import Abstract
from atbx.core.backend import Kernel, Preparation
from atbx.core.program import Equation

ROWS_HINT = 16
"""Rows for which oneDNN chooses the packed layout; it serves every other number as well."""

Linear = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def packs_dtype(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are packed for oneDNN on this machine."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def _pack(weight: torch.Tensor, abstract: Abstract) -> torch.Tensor:
    if packs_dtype(abstract.dtype):
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
    return weight.contiguous()


WEIGHT = Preparation("matmul_weight", _pack)
"""A [out, in] weight as this machine's matmul of its dtype wants it: oneDNN's blocked layout, or dense rows."""


def _packed_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def linear_for(dtype: torch.dtype) -> Linear:
    """`linear(x [..., in], weight, bias or None)` to [..., out], over weights prepared by `WEIGHT`."""
    return _packed_linear if packs_dtype(dtype) else F.linear


def refuses_matmul(dtype: torch.dtype) -> str | None:
    """Why there is no matmul of this dtype, or None."""
    return None if dtype.is_floating_point and dtype.itemsize >= 2 else f"no matmul for {dtype}"


def _refuses_packed(equation: Equation) -> str | None:
    x = equation.operands[0]
    if x.numel == 0:
        return "no rows"
    return None if packs_dtype(x.dtype) else f"{x.dtype} weights are not packed for oneDNN on this machine"


def _refuses_plain(equation: Equation) -> str | None:
    return refuses_matmul(equation.operands[0].dtype)


def _gather_rows(equation: Equation) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    dtype = equation.results[0].dtype

    def run(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, table).to(dtype)

    return run


ROWS = Preparation("rows", lambda table, abstract: table, from_source=True)
"""An embedding table as it was bound: only the rows that are looked up are read and cast."""

KERNELS = (
    Kernel(
        "onednn.linear",
        "linear",
        lambda equation: _packed_linear,
        refuses=_refuses_packed,
        packs=lambda equation: {1: WEIGHT},
        tier="fused",
    ),
    Kernel("torch.linear", "linear", lambda equation: F.linear, refuses=_refuses_plain),
    Kernel("torch.matmul", "matmul", lambda equation: torch.matmul, refuses=_refuses_plain),
    Kernel("torch.embedding_rows", "embedding", _gather_rows, packs=lambda equation: {0: ROWS}, tier="fused"),
    Kernel("torch.embedding", "embedding", lambda equation: lambda table, ids: F.embedding(ids, table)),
)
