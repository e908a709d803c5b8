"""Equations of single ops over given tensors, as dispatch sees them, and host plans made from their operands."""

from __future__ import annotations

from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.op import Op, abstract_operand
from atbx.core.program import Equation, Literal, Var


def equation(op: Op, operands: tuple[Any, ...], **params: Any) -> Equation:
    """`op` applied to tensors (or None, numbers)."""
    seen = [abstract_operand(x) for x in operands]
    inputs = tuple(Var(a) if isinstance(a, Abstract) else Literal(a) for a in seen)
    return Equation(op, inputs, tuple(Var(a) for a in op.results(*seen, **params)), params)


def run(row: Any, made: Equation, operands: tuple[Any, ...]) -> Any:
    """A row's kernel over tensors of the CPU, its host plan included."""
    reads = list(operands)
    if row.plan is not None:
        planned = [operands[i] for i in row.plan.operands]
        reads.append(row.plan.make(row.plan.key(made), *planned))
    return row.make(made)(*reads)


def arena(rows: int, slots: int, kv_heads: int, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random keys or values [R,S,K,D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, slots, kv_heads, size, generator=generator).to(dtype)
