"""Matmuls: one launch over weights that were cast to FRACTAL_NZ once, where their sizes are whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from atbx.core.backend import Preparation
from atbx.core.program import Equation
from atbx.kernels.ascend.capability import FLOATS, HALVES, Capability, Limit
from atbx.kernels.ascend.runtime import nz_weight, refuses_nz, rows_of_table

LARGEST_DIM = 65535
"""Largest inner or outer size of an NZ matmul operand (the documents' limit on the last two axes)."""


def _linear(equation: Equation) -> Callable[..., torch.Tensor]:
    width = int(equation.operands[1].shape[1])
    shape = tuple(map(int, equation.results[0].shape))

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, width)
        # A transposed view of [out, in] rows: the matmul takes it as it is, without a copy.
        out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
        return out.view(shape)

    return run


def _weights(equation: Equation) -> Mapping[int, Preparation]:
    return {1: nz_weight(equation, 1)}


def _refuses_nz(equation: Equation) -> str | None:
    return refuses_nz(equation.operands[1])


def _refuses_large(equation: Equation) -> str | None:
    largest = max(int(n) for n in equation.operands[1].shape)
    return f"an axis of {largest} exceeds {LARGEST_DIM}" if largest > LARGEST_DIM else None


def _matmul(equation: Equation) -> Callable[..., torch.Tensor]:
    return torch.matmul


ROWS = (
    Capability(
        "linear",
        "aclnn.mm_nz",
        ("aten::mm", "aten::addmm"),
        _linear,
        dtypes=HALVES,
        layout="weight FRACTAL_NZ",
        limits=(
            Limit("nz_blocks", _refuses_nz, "facts 1.11, NZ of unaligned axes"),
            Limit("nz_size", _refuses_large, "facts 1.7"),
        ),
        evidence=("op-plugin check", "document"),
        packs=_weights,
    ),
    Capability(
        "linear",
        "aclnn.mm",
        ("aten::mm", "aten::addmm"),
        _linear,
        dtypes=FLOATS,
        evidence=("op-plugin check",),
        packs=lambda equation: {1: rows_of_table()},
    ),
    Capability(
        "linear",
        "aclnn.mm_unbound",
        ("aten::mm", "aten::addmm"),
        _linear,
        dtypes=FLOATS,
        evidence=("op-plugin check",),
        tier="composed",
    ),
    Capability("matmul", "aclnn.matmul", ("aten::matmul",), _matmul, evidence=("op-plugin check",)),
)
