"""Matmuls: oneDNN over weights that were packed once, torch's own where a weight is no bound parameter.

oneDNN accumulates in FP32 and rounds once. The packing does not depend on the number of rows, so prefill and decode
share it.
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
"""Rows for which oneDNN chooses the packed layout; it serves every other number as well (measured, docs/decisions)."""

Linear = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def packs_dtype(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed matmuls of this dtype on this machine."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def _pack(weight: torch.Tensor, abstract: Abstract) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)


PACKED = Preparation("onednn", _pack)
"""A [out, in] weight in oneDNN's own blocked layout."""


def packed_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] by a packed weight [out, in]: [..., out]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def refuses_packing(dtype: torch.dtype) -> str | None:
    """Why oneDNN cannot pack weights of this dtype here, or None."""
    return None if packs_dtype(dtype) else f"oneDNN has no packed matmul for {dtype} on this machine"


def _refuses_packed(equation: Equation) -> str | None:
    x = equation.operands[0]
    return "no rows" if x.numel == 0 else refuses_packing(x.dtype)


def _refuses_plain(equation: Equation) -> str | None:
    dtype = equation.operands[0].dtype
    return None if dtype.is_floating_point and dtype.itemsize >= 2 else f"no matmul for {dtype}"


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
        lambda equation: packed_linear,
        refuses=_refuses_packed,
        packs=lambda equation: {1: PACKED},
        tier="fused",
    ),
    Kernel("torch.linear", "linear", lambda equation: F.linear, refuses=_refuses_plain),
    Kernel("torch.matmul", "matmul", lambda equation: torch.matmul, refuses=_refuses_plain),
    Kernel("torch.embedding_rows", "embedding", _gather_rows, packs=lambda equation: {0: ROWS}, tier="fused"),
    Kernel("torch.embedding", "embedding", lambda equation: lambda table, ids: F.embedding(ids, table)),
)
