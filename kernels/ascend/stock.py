"""Ops that torch_npu's aclnn kernels serve one for one: their reference rules are plain torch and run as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from atbx.core.op import registered_ops
from atbx.core.program import Equation
from atbx.kernels.ascend.capability import Capability
from atbx.ops import philox  # noqa: F401  registers its op

VIEWS = ("reshape", "expand_dims", "squeeze", "getitem", "split", "transpose", "broadcast_to")
"""Ops that give another view of their operand: no launch, as long as strides allow."""

ONE_LAUNCH = (
    "copy",
    "cast",
    "concat",
    "arange",
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
)

SEVERAL = {
    "top_k": 2,
    "layer_norm": 10,
    "penalize": 12,
    "bias_logits": 5,
    "suppress": 8,
    "argmax": 8,
    "is_unusable": 5,
    "token_logprobs": 4,
    "rotary_angles": 7,
    "uniform": 60,
}
"""Ops whose reference rule is a composition, with about as many launches as it makes."""


def _stock(name: str, launches: int, tier: str = "composed") -> Capability:
    op = registered_ops()[name]

    def make(equation: Equation) -> Callable[..., Any]:
        return partial(op.reference, **equation.params) if equation.params else op.reference

    return Capability(
        name,
        f"aclnn.{name}",
        (f"aten::{name}",),
        make,
        dtypes=None,
        evidence=("op-plugin check",),
        tier=tier,
        launches=launches,
    )


ROWS = (
    *(_stock(name, 0) for name in VIEWS),
    *(_stock(name, 1) for name in ONE_LAUNCH),
    *(_stock(name, launches) for name, launches in SEVERAL.items()),
)
