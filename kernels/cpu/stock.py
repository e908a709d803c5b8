"""Ops that torch serves as they are: their reference rules are torch's own kernels, so nothing better exists here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from atbx.core.backend import Kernel
from atbx.core.op import registered_ops
from atbx.core.program import Equation
from atbx.ops import philox  # noqa: F401  registers its op
from atbx.ops.logits import COUNT_TOKENS

NAMES = (
    "copy",
    "reshape",
    "transpose",
    "expand_dims",
    "squeeze",
    "broadcast_to",
    "cast",
    "concat",
    "split",
    "arange",
    "getitem",
    "take",
    "take_along",
    "add",
    "subtract",
    "multiply",
    "divide",
    "maximum",
    "minimum",
    "power",
    "negative",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "erf",
    "sin",
    "cos",
    "where",
    "clip",
    "less",
    "less_equal",
    "equal",
    "not_equal",
    "logical_and",
    "logical_or",
    "logical_not",
    "sum",
    "mean",
    "max",
    "min",
    "logsumexp",
    "softmax",
    "cumsum",
    "argmax",
    "top_k",
    "layer_norm",
    "rotary_angles",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "uniform",
    "penalize",
    "bias_logits",
    "suppress",
    "filter_logits",
    "draw",
    "is_unusable",
    "token_logprobs",
    "top_logprobs",
)


def _stock(name: str) -> Kernel:
    op = registered_ops()[name]

    def make(equation: Equation) -> Callable[..., Any]:
        return partial(op.reference, **equation.params) if equation.params else op.reference

    return Kernel(f"torch.{name}", name, make)


def _count(equation: Equation) -> Callable[..., Any]:
    def run(counts: torch.Tensor, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        return counts.scatter_add_(1, tokens.unsqueeze(1), active.to(torch.int32).unsqueeze(1))

    return run


KERNELS = (*(_stock(name) for name in NAMES), Kernel("torch.count_tokens", COUNT_TOKENS.name, _count))
