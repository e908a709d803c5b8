"""Elementwise ops: arithmetic, comparisons, logic and selection, with broadcasting and weak Python scalars.

Every op computes in FP32 (FP64 for FP64, integers as they are) and rounds once to the tensors' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import DTypeError
from atbx.core.op import Cost, Op, register_op, traffic
from atbx.core.staging import operators
from atbx.ops.operands import (
    as_tensors,
    broadcast_shapes,
    elementwise_shape,
    is_scalar,
    need_bool,
    need_float,
    need_number,
    weaken,
    wide_dtype,
)


def elementwise_cost(flops: float) -> Callable[..., Cost]:
    """Cost rule of so many operations an element of the result."""

    def cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
        return Cost(flops * results[0].numel, traffic(operands, results))

    return cost


def _rounded_once(
    function: Callable[..., torch.Tensor], comparison: bool = False
) -> Callable[..., torch.Tensor]:
    def reference(*operands: Any) -> torch.Tensor:
        tensors = as_tensors(*operands)
        dtype = tensors[0].dtype
        if dtype.is_floating_point:
            tensors = tuple(t.to(wide_dtype(dtype)) for t in tensors)
        result = function(*tensors)
        return result if comparison else result.to(dtype)

    return reference


def _arithmetic(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # torch's own arithmetic on 16-bit floats works in FP32 and rounds once, without wide copies of the operands.
    return lambda x, y: function(*as_tensors(x, y))


def _binary(
    name: str, function: Callable[..., torch.Tensor], *, floats: bool = False, reference: Any = _arithmetic
) -> Op:
    def shape(x: Any, y: Any) -> Abstract:
        result = elementwise_shape(name, x=x, y=y)
        return need_float(name, "x", result) if floats else need_number(name, "x", result)

    return register_op(Op(name, shape, reference(function), elementwise_cost(1)))


def _comparison(name: str, function: Callable[..., torch.Tensor], *, ordered: bool) -> Op:
    def shape(x: Any, y: Any) -> Abstract:
        result = elementwise_shape(name, x=x, y=y)
        if ordered:
            need_number(name, "x", result)
        return Abstract(result.shape, torch.bool)

    return register_op(Op(name, shape, _rounded_once(function, comparison=True), elementwise_cost(1)))


def _logical(name: str, function: Callable[..., torch.Tensor], *names: str) -> Op:
    def shape(*operands: Any) -> Abstract:
        tensors = [need_bool(name, label, x) for label, x in zip(names, operands, strict=True)]
        return Abstract(broadcast_shapes(name, (t.shape for t in tensors)), torch.bool)

    return register_op(Op(name, shape, function, elementwise_cost(1)))


def _unary(
    name: str, function: Callable[[torch.Tensor], torch.Tensor], flops: float, floats: bool = True
) -> Op:
    def shape(x: Any) -> Abstract:
        tensor = need_float(name, "x", x) if floats else need_number(name, "x", x)
        return Abstract(tensor.shape, tensor.dtype)

    return register_op(Op(name, shape, _rounded_once(function), elementwise_cost(flops)))


ADD = _binary("add", torch.add)
SUBTRACT = _binary("subtract", torch.subtract)
MULTIPLY = _binary("multiply", torch.multiply)
DIVIDE = _binary("divide", torch.divide, floats=True)
MAXIMUM = _binary("maximum", torch.maximum)
MINIMUM = _binary("minimum", torch.minimum)
POWER = _binary("power", torch.pow, floats=True, reference=_rounded_once)

LESS = _comparison("less", torch.lt, ordered=True)
LESS_EQUAL = _comparison("less_equal", torch.le, ordered=True)
EQUAL = _comparison("equal", torch.eq, ordered=False)
NOT_EQUAL = _comparison("not_equal", torch.ne, ordered=False)

LOGICAL_AND = _logical("logical_and", torch.logical_and, "x", "y")
LOGICAL_OR = _logical("logical_or", torch.logical_or, "x", "y")
LOGICAL_NOT = _logical("logical_not", torch.logical_not, "x")

NEGATIVE = _unary("negative", torch.neg, 1, floats=False)
# Transcendental functions count as four operations: polynomials of about that many steps.
EXP = _unary("exp", torch.exp, 4)
LOG = _unary("log", torch.log, 4)
SQRT = _unary("sqrt", torch.sqrt, 1)
RSQRT = _unary("rsqrt", torch.rsqrt, 2)
TANH = _unary("tanh", torch.tanh, 4)
SIGMOID = _unary("sigmoid", torch.sigmoid, 5)
ERF = _unary("erf", torch.erf, 4)
SIN = _unary("sin", torch.sin, 4)
COS = _unary("cos", torch.cos, 4)


def _where_shape(condition: Any, x: Any, y: Any) -> Abstract:
    chosen = elementwise_shape("where", x=x, y=y)
    test = need_bool("where", "condition", condition)
    return Abstract(broadcast_shapes("where", (test.shape, chosen.shape)), chosen.dtype)


def _where_reference(condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
    chosen, other = as_tensors(x, y)
    return torch.where(condition, chosen, other)


WHERE = register_op(Op("where", _where_shape, _where_reference, elementwise_cost(0)))


def _clip_shape(x: Any, low: Any, high: Any) -> Abstract:
    given = {name: v for name, v in (("x", x), ("low", low), ("high", high)) if v is not None}
    return need_number("clip", "x", elementwise_shape("clip", **given))


def _clip_reference(x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    if low is not None:
        x = torch.maximum(*as_tensors(x, low))
    return x.clone() if high is None else torch.minimum(*as_tensors(x, high))


CLIP = register_op(Op("clip", _clip_shape, _clip_reference, elementwise_cost(2)))


def add(x: Any, y: Any) -> Any:
    """x + y, broadcast; numbers, one of the two may be a Python scalar."""
    return ADD(*weaken("add", x, y))


def subtract(x: Any, y: Any) -> Any:
    """x - y, broadcast; numbers, one of the two may be a Python scalar."""
    return SUBTRACT(*weaken("subtract", x, y))


def multiply(x: Any, y: Any) -> Any:
    """x * y, broadcast; numbers, one of the two may be a Python scalar."""
    return MULTIPLY(*weaken("multiply", x, y))


def divide(x: Any, y: Any) -> Any:
    """x / y, broadcast; floats only, because integers would have to be promoted."""
    return DIVIDE(*weaken("divide", x, y))


def maximum(x: Any, y: Any) -> Any:
    """The larger of x and y, broadcast; NaN if either is NaN."""
    return MAXIMUM(*weaken("maximum", x, y))


def minimum(x: Any, y: Any) -> Any:
    """The smaller of x and y, broadcast; NaN if either is NaN."""
    return MINIMUM(*weaken("minimum", x, y))


def power(x: Any, y: Any) -> Any:
    """x to the power y, broadcast; floats only."""
    return POWER(*weaken("power", x, y))


def less(x: Any, y: Any) -> Any:
    """x < y, broadcast, as bool."""
    return LESS(*weaken("less", x, y))


def less_equal(x: Any, y: Any) -> Any:
    """x <= y, broadcast, as bool."""
    return LESS_EQUAL(*weaken("less_equal", x, y))


def equal(x: Any, y: Any) -> Any:
    """x == y, broadcast, as bool; NaN equals nothing."""
    return EQUAL(*weaken("equal", x, y))


def not_equal(x: Any, y: Any) -> Any:
    """x != y, broadcast, as bool."""
    return NOT_EQUAL(*weaken("not_equal", x, y))


def logical_and(x: Any, y: Any) -> Any:
    """x and y, bool tensors, broadcast."""
    return LOGICAL_AND(x, y)


def logical_or(x: Any, y: Any) -> Any:
    """x or y, bool tensors, broadcast."""
    return LOGICAL_OR(x, y)


def logical_not(x: Any) -> Any:
    """Not x, a bool tensor."""
    return LOGICAL_NOT(x)


def negative(x: Any) -> Any:
    """-x, numbers."""
    return NEGATIVE(x)


def exp(x: Any) -> Any:
    """e to the power x, floats."""
    return EXP(x)


def log(x: Any) -> Any:
    """Natural logarithm, floats."""
    return LOG(x)


def sqrt(x: Any) -> Any:
    """Square root, floats."""
    return SQRT(x)


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x), floats."""
    return RSQRT(x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent, floats."""
    return TANH(x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x), floats."""
    return SIGMOID(x)


def erf(x: Any) -> Any:
    """Gauss error function, floats."""
    return ERF(x)


def sin(x: Any) -> Any:
    """Sine of x in radians, floats."""
    return SIN(x)


def cos(x: Any) -> Any:
    """Cosine of x in radians, floats."""
    return COS(x)


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where `condition` (bool) holds, else y, broadcast; what is not chosen cannot matter, NaN included."""
    return WHERE(condition, *weaken("where", x, y))


def clip(x: Any, low: Any = None, high: Any = None) -> Any:
    """min(max(x, low), high); a bound left out does not bind.

    Raises:
        DTypeError: x is no tensor, or a bound does not fit its dtype.
    """
    if is_scalar(x):
        raise DTypeError("clip: x must be a tensor", found=repr(x))
    return CLIP(*weaken("clip", x, low, high))


operators.update(
    add=add,
    subtract=subtract,
    multiply=multiply,
    divide=divide,
    less=less,
    less_equal=less_equal,
    equal=equal,
    not_equal=not_equal,
)
