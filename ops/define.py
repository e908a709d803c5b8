"""`define_op`: a user's own op beside the built-in ones, staged, explained and costed like them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from atbx.core.abstract import abstract_of
from atbx.core.errors import OptionError, ShapeError
from atbx.core.op import Cost, Op, Shapes, abstract_operand, register_op


def _checked_reference(
    name: str, shape: Callable[..., Shapes], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """`reference`, whose results must be what `shape` says: a program is planned by the shape rule alone."""

    def run(*operands: Any, **params: Any) -> Any:
        results = reference(*operands, **params)
        shapes = shape(*(abstract_operand(x) for x in operands), **params)
        expected = shapes if isinstance(shapes, tuple) else (shapes,)
        actual = results if isinstance(results, tuple) else (results,)
        if isinstance(results, tuple) != isinstance(shapes, tuple) or len(actual) != len(expected):
            raise ShapeError(f"{name}: the reference rule and the shape rule differ in the number of results")
        for index, (rule, result) in enumerate(zip(expected, actual, strict=True)):
            if not isinstance(result, torch.Tensor):
                raise ShapeError(
                    f"{name}: result {index} of the reference rule is no tensor", found=type(result)
                )
            found = abstract_of(result)
            if (tuple(rule.shape), rule.dtype) != (found.shape, found.dtype):
                raise ShapeError(
                    f"{name}: result {index} of the reference rule is not what the shape rule says",
                    expected=rule,
                    found=found,
                )
        return results

    return run


def define_op(
    name: str,
    shape: Callable[..., Shapes],
    reference: Callable[..., Any],
    cost: Callable[..., Cost] | None = None,
    *,
    mixes: Callable[..., Iterable[tuple[int, int]]] | None = None,
) -> Op:
    """Define an op of your own and return it; call it like a function.

    Example:
        >>> SWISH = atbx.define_op("my_swish", lambda x, *, beta: x, lambda x, *, beta: x * torch.sigmoid(beta * x))
        >>> y = SWISH(x, beta=1.5)

    Arguments:
        name:      unique; what programs print, and what a kernel names that serves the op.
        shape:     `shape(*operands, **params)` over `Abstract` operands to the result's `Abstract`, or a tuple.
        reference: the same over torch tensors: what the op means. It must not write to its operands.
        cost:      `cost(operands, results, **params)` to a `Cost`; left out, operands and results are moved once.
        mixes:     `mixes(*operands, **params)` yields (operand, axis) along which entries influence each other; staging
                   refuses a padded axis among them. Leave it out only for ops that work on each entry alone.

    Positional operands are tensors, Python scalars or None; params are static and hashable, given by keyword.

    Raises:
        AtbxError: an op of that name exists.
    """
    if not name.isidentifier():
        raise OptionError("define_op: a name must be an identifier", where="name", found=repr(name))

    op = Op(name, shape, _checked_reference(name, shape, reference))
    if cost is not None:
        op = replace(op, cost=cost)
    return register_op(op if mixes is None else replace(op, mixes=mixes))
