"""Activations and feed-forward networks: computed in FP32 (FP64 for FP64) and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from atbx.core.abstract import Abstract
from atbx.core.errors import OptionError, ShapeError
from atbx.core.op import Cost, Op, register_op, traffic
from atbx.ops.elementwise import elementwise_cost
from atbx.ops.linear import linear
from atbx.ops.operands import common_size, need_float, need_same_dtype, wide_dtype

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}

ACTIVATIONS = tuple(_FUNCTIONS)
"""Names of activations: "gelu" is exact (erf), "gelu_tanh" its tanh approximation."""


def _need_activation(op: str, activation: str) -> None:
    if activation not in _FUNCTIONS:
        raise OptionError(
            f"{op}: unknown activation", expected=f"one of {', '.join(ACTIVATIONS)}", found=repr(activation)
        )


def _activation_op(name: str) -> Op:
    def shape(x: Any) -> Abstract:
        value = need_float(name, "x", x)
        return Abstract(value.shape, value.dtype)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return _FUNCTIONS[name](x.to(wide_dtype(x.dtype))).to(x.dtype)

    return register_op(Op(name, shape, reference, elementwise_cost(1 if name == "relu" else 6)))


SILU = _activation_op("silu")
GELU = _activation_op("gelu")
GELU_TANH = _activation_op("gelu_tanh")
RELU = _activation_op("relu")

_OPS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU}


def silu(x: Any) -> Any:
    """x * sigmoid(x)."""
    return SILU(x)


def gelu(x: Any, approximate: str = "none") -> Any:
    """x times the normal distribution function of x, exact ("none", by erf) or by tanh ("tanh").

    Raises:
        OptionError: another `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise OptionError("gelu: unknown approximation", expected="'none' or 'tanh'", found=repr(approximate))
    return GELU(x) if approximate == "none" else GELU_TANH(x)


def relu(x: Any) -> Any:
    """max(x, 0)."""
    return RELU(x)


def activate(x: Any, activation: str) -> Any:
    """The activation of that name (see `ACTIVATIONS`) of x.

    Raises:
        OptionError: an unknown name.
    """
    _need_activation("activate", activation)
    return _OPS[activation](x)


def _gated_shape(gate: Any, up: Any, *, activation: str) -> Abstract:
    _need_activation("gated", activation)
    a, b = need_float("gated", "gate", gate), need_float("gated", "up", up)
    if a.ndim != b.ndim:
        raise ShapeError("gated: gate and up have different shapes", expected=a, found=b)
    sizes = [
        common_size("gated", m, n, i, broadcast=False)
        for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True))
    ]
    return Abstract(tuple(sizes), need_same_dtype("gated", gate=a, up=b))


def _gated_reference(gate: torch.Tensor, up: torch.Tensor, *, activation: str) -> torch.Tensor:
    wide = wide_dtype(gate.dtype)
    return (_FUNCTIONS[activation](gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _gated_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return Cost(7.0 * results[0].numel, traffic(operands, results))


GATED = register_op(Op("gated", _gated_shape, _gated_reference, _gated_cost))


def gated(gate: Any, up: Any, *, activation: str) -> Any:
    """activation(gate) * up, rounded once: both [..., F].

    Raises:
        ShapeError: shapes differ.
        OptionError: an unknown activation.
    """
    return GATED(gate, up, activation=activation)


def mlp(x: Any, up: Any, down: Any, up_bias: Any = None, down_bias: Any = None, *, activation: str) -> Any:
    """A plain feed-forward network, down(activation(up(x))): x [..., M], up [F, M], down [M, F]."""
    return linear(activate(linear(x, up, up_bias), activation), down, down_bias)


def gated_mlp(
    x: Any,
    gate: Any,
    up: Any,
    down: Any,
    gate_bias: Any = None,
    up_bias: Any = None,
    down_bias: Any = None,
    *,
    activation: str,
) -> Any:
    """A gated feed-forward network, down(activation(gate(x)) * up(x)): x [..., M], gate and up [F, M], down [M, F]."""
    hidden = gated(linear(x, gate, gate_bias), linear(x, up, up_bias), activation=activation)
    return linear(hidden, down, down_bias)
