"""Small ops of the core's own tests, a backend with kernels for them, and short ways to compile on it.

They stand apart from the real ops, so that a test of the core can fail for reasons of the core alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.backend import Backend, HostPlan, Kernel, Preparation
from atbx.core.errors import CapacityError, DTypeError, ShapeError
from atbx.core.jit import Jit
from atbx.core.op import Cost, Op, register_op
from atbx.core.program import Equation, Program
from atbx.core.rewrite import FusionRule, Pattern
from atbx.core.staging import stage_flat

# --- ops -----------------------------------------------------------------------------------------------------------


def _same(x: Abstract, *rest: Any, **params: Any) -> Abstract:
    for other in rest:
        if isinstance(other, Abstract) and other.shape not in ((), x.shape):
            raise ShapeError("t: operands differ in shape", expected=x.shape, found=other.shape)
        if isinstance(other, Abstract) and other.dtype != x.dtype:
            raise DTypeError("t: operands differ in dtype", expected=x.dtype, found=other.dtype)
    return Abstract(x.shape, x.dtype)


def _pair(x: Abstract) -> tuple[Abstract, Abstract]:
    return Abstract(x.shape, x.dtype), Abstract(x.shape, x.dtype)


def _sum_shape(x: Abstract, count: Abstract | None = None, *, axis: int) -> Abstract:
    return Abstract((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)


def _sum(x: torch.Tensor, count: torch.Tensor | None = None, *, axis: int) -> torch.Tensor:
    return x.sum(axis) if count is None else x.narrow(axis, 0, int(count)).sum(axis)


def _sum_mixes(x: Abstract, count: Any = None, *, axis: int) -> tuple[tuple[int, int], ...]:
    return ((0, axis),) if count is None else ()


def _view_shape(x: Abstract, *, shape: tuple[int, ...]) -> Abstract:
    return Abstract(shape, x.dtype)


def _write_shape(cache: Abstract, x: Abstract, at: Any = None) -> Abstract:
    return Abstract(cache.shape, cache.dtype)


def _write(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
    start = 0 if at is None else int(at)
    return torch.cat([cache[:start], x, cache[start + len(x) :]])


def _linear_shape(x: Abstract, w: Abstract) -> Abstract:
    if x.shape[-1] != w.shape[-1]:
        raise ShapeError("t_linear: widths differ", expected=w.shape, found=x.shape)
    return Abstract((*x.shape[:-1], w.shape[0]), x.dtype)


def _linear_cost(operands: Any, results: Any) -> Cost:
    x, w = operands
    return Cost(2.0 * x.numel * w.shape[0], float(x.nbytes + w.nbytes + results[0].nbytes))


ADD = register_op(Op("t_add", _same, lambda x, y: x + y))
NEG = register_op(Op("t_neg", _same, lambda x: -x))
SCALE = register_op(Op("t_scale", _same, lambda x, *, by: x * by))
SCALE_ADD = register_op(Op("t_scale_add", _same, lambda x, y, *, by: x * by + y))
PAIR = register_op(Op("t_pair", _pair, lambda x: (x + 1, x - 1)))
SUM = register_op(Op("t_sum", _sum_shape, _sum, mixes=_sum_mixes))
VIEW = register_op(Op("t_view", _view_shape, lambda x, *, shape: x.view(shape), views=True))
WRITE = register_op(Op("t_write", _write_shape, _write, updates=((0, 0),)))
LINEAR = register_op(Op("t_linear", _linear_shape, lambda x, w: x @ w.T, _linear_cost))

# --- kernels -------------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What the kernels of one backend did."""

    packed: list[tuple[int, ...]] = field(default_factory=list)
    plans: list[Any] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)


def make_backend(*, rules: tuple[FusionRule, ...] = (), name: str = "test") -> tuple[Backend, Counts]:
    """A CPU backend: t_add writes into given results, t_write updates in place by a host plan, t_linear packs
    its weight, t_neg fails on request; the rest runs by reference. Also what its kernels did."""
    counts = Counts()
    backend = Backend(name, torch.device("cpu"), rules=list(rules))

    def add(equation: Equation) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, y: Any, out: torch.Tensor) -> torch.Tensor:
            counts.launched.append("t_add")
            return torch.add(x, y, out=out)

        return run

    def plan_write(key: tuple[int, int], *at: torch.Tensor | None) -> slice:
        counts.plans.append(key)
        capacity, rows = key
        start = 0 if at[0] is None else int(at[0])
        if start + rows > capacity:
            raise CapacityError("t_write past the end", expected=f"at most {capacity}", found=start + rows)
        return slice(start, start + rows)

    def write(equation: Equation) -> Callable[..., torch.Tensor]:
        def run(cache: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            counts.launched.append("t_write")
            cache[rest[-1]] = x
            return cache

        return run

    def pack(w: torch.Tensor, abstract: Abstract) -> torch.Tensor:
        counts.packed.append(tuple(w.shape))
        return w.to(abstract.dtype).T.contiguous()

    def linear(equation: Equation) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
            counts.launched.append("t_linear")
            return x @ packed

        return run

    def neg(equation: Equation) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            counts.launched.append("t_neg")
            return -x

        return run

    def capacity_and_rows(equation: Equation) -> tuple[int, int]:
        return int(equation.operands[0].shape[0]), int(equation.operands[1].shape[0])

    backend.add(Kernel("test.add", "t_add", add, writes_out=True))
    backend.add(Kernel("test.neg", "t_neg", neg))
    backend.add(
        Kernel(
            "test.write",
            "t_write",
            write,
            refuses=lambda e: "needs an offset" if len(e.inputs) < 3 else None,
            plan=HostPlan((2,), capacity_and_rows, plan_write),
        )
    )
    backend.add(
        Kernel(
            "test.linear",
            "t_linear",
            linear,
            packs=lambda e: {1: Preparation("transposed", pack)},
            tier="fused",
        )
    )
    return backend, counts


SCALE_THEN_ADD = FusionRule(
    "scale_add",
    (Pattern("t_scale", ("x",), ("scaled",)), Pattern("t_add", ("scaled", "y"), ("out",))),
    ("out",),
    lambda match, build: build.bind(
        "out", build.apply(SCALE_ADD, (match.atoms["x"], match.atoms["y"]), match.params(0))[0]
    ),
)

# --- staging and compiling -----------------------------------------------------------------------------------------


def f32(*shape: int) -> Abstract:
    """An abstract float32 value."""
    return Abstract(shape, torch.float32)


def stage(function: Callable[..., Any], *abstracts: Abstract) -> Program:
    """The program of a function of positional values, inputs named x0, x1, ..."""
    paths = [f"x{i}" for i in range(len(abstracts))]
    return stage_flat(lambda values: function(*values), abstracts, paths)[0]


def compiled(function: Callable[..., Any], **options: Any) -> Jit:
    """`function` compiled on a fresh test backend."""
    backend = options.pop("backend", None) or make_backend(rules=options.pop("rules", ()))[0]
    return Jit(function, backend, **options)


def ops_of(program: Program) -> list[str]:
    """Names of a program's ops in order."""
    return [e.op.name for e in program.equations]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """`work(index)` in threads that start together; the first error of any is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
