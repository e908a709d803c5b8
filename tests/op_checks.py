"""One check for every op: shape rule, staging, reference rule, untouched operands, any strides, and an FP64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from atbx.core.abstract import Abstract, abstract_of
from atbx.core.op import ReferenceInterpreter, ShapeInterpreter, interpreter
from atbx.core.program import Program
from atbx.core.staging import stage_flat

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# One rounding of an exact result errs by half a unit in the last place; what is computed in FP32 adds a little, which
# shows in FP32 results only (and near zero, after a cancellation).
RELATIVE = {
    torch.float64: 1e-12,
    torch.float32: 4e-6,
    torch.bfloat16: 2**-8 * 1.01,
    torch.float16: 2**-11 * 1.01,
}
ABSOLUTE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


def run(call: Callable[..., Any], *operands: Any) -> Any:
    """`call` by reference rules."""
    with interpreter(ReferenceInterpreter()):
        return call(*operands)


def shapes(call: Callable[..., Any], *operands: Any) -> Any:
    """`call` by shape rules, over `Abstract` operands."""
    with interpreter(ShapeInterpreter()):
        return call(*operands)


def stage(call: Callable[..., Any], *abstracts: Abstract) -> Program:
    """`call` as a program."""
    return stage_flat(lambda values: call(*values), abstracts, [f"arg{i}" for i in range(len(abstracts))])[0]


def strided(x: torch.Tensor) -> torch.Tensor:
    """The values of `x` in memory with gaps, and with its axes laid out backwards."""
    if x.ndim == 0:
        return x.clone()
    spaced = torch.zeros([2 * n for n in reversed(x.shape)], dtype=x.dtype)
    view = spaced.permute(*reversed(range(x.ndim)))[tuple(slice(None, None, 2) for _ in x.shape)]
    view.copy_(x)
    assert x.numel() <= 1 or not view.is_contiguous()
    return view


def bits(x: torch.Tensor) -> bytes:
    """The bytes of a tensor's entries in order."""
    return x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x.ndim else bits(x.reshape(1))


def as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def check_op(
    call: Callable[..., Any],
    *operands: torch.Tensor,
    oracle: Callable[..., Any],
    equations: int = 1,
    relative: dict[torch.dtype, float] | None = None,
    absolute: dict[torch.dtype, float] | None = None,
) -> Any:
    """Check `call(*operands)` in every way, and return its results.

    oracle: the same function written with torch alone; it gets the operands, floats in FP64.
    """
    abstracts = [abstract_of(x) for x in operands]
    before = [bits(x) for x in operands]
    results = as_tuple(run(call, *operands))
    assert [bits(x) for x in operands] == before

    found = [(tuple(r.shape), r.dtype) for r in results]
    assert [(a.shape, a.dtype) for a in as_tuple(shapes(call, *abstracts))] == found

    program = stage(call, *abstracts)
    assert len(program) == equations, str(program)
    assert [(v.abstract.shape, v.abstract.dtype) for v in program.outputs] == found  # type: ignore[union-attr]
    cost = program.cost()
    assert 0 <= cost.flops < math.inf
    assert 0 <= cost.bytes < math.inf

    exact = as_tuple(oracle(*(x.double() if x.dtype.is_floating_point else x for x in operands)))
    assert len(exact) == len(results)
    gaps = as_tuple(run(call, *(strided(x) for x in operands)))
    for attempt in (results, gaps):
        for result, expected in zip(attempt, exact, strict=True):
            assert_close(result, expected, relative or RELATIVE, absolute or ABSOLUTE)
    return results if len(results) > 1 else results[0]


def assert_close(
    result: torch.Tensor,
    expected: torch.Tensor,
    relative: dict[torch.dtype, float] = RELATIVE,
    absolute: dict[torch.dtype, float] = ABSOLUTE,
) -> None:
    """`result` is `expected` rounded to its dtype; integers and bools are equal."""
    assert tuple(result.shape) == tuple(expected.shape)
    if not result.dtype.is_floating_point:
        assert torch.equal(result, expected.to(result.dtype))
        return
    rtol, atol = relative[result.dtype], absolute[result.dtype]
    torch.testing.assert_close(result.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)
