"""Ops that torch serves as they are: their reference rules are torch's own kernels, so nothing better exists here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from atbx.core.backend import Kernel
from atbx.core.op import registered_ops
from atbx.core.program import Equation

NAMES = (
    "copy reshape transpose expand_dims squeeze broadcast_to cast concat split arange getitem take take_along "
    "add subtract multiply divide maximum minimum power negative exp log sqrt rsqrt tanh sigmoid erf sin cos "
    "where clip less less_equal equal not_equal logical_and logical_or logical_not "
    "sum mean max min logsumexp softmax cumsum argmax top_k layer_norm rotary_angles silu gelu gelu_tanh relu"
).split()


def _stock(name: str) -> Kernel:
    op = registered_ops()[name]

    def make(equation: Equation) -> Callable[..., Any]:
        return partial(op.reference, **equation.params) if equation.params else op.reference

    return Kernel(f"torch.{name}", name, make)


KERNELS = tuple(_stock(name) for name in NAMES)
