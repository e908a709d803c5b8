"""Running one equation of a program by a backend, over given values, on the path that whole programs take.

The equation is lowered as a program of its own: the backend's table chooses the kernel, parameters are packed, the host
plan is made, arenas get the room behind them that a device wants, and the backend's own executable runs it, eagerly or
by a captured graph. So what is judged here is what runs in a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from atbx.core.backend import Backend, Choice
from atbx.core.binding import Binding
from atbx.core.executable import Executable, Lowered, lower
from atbx.core.program import Equation, Program, Var
from atbx.kernels.ascend.cache import empty_arena
from atbx.kernels.ascend.lowering import split
from atbx.kernels.ascend.runtime import open_device

Values = Mapping[Var, torch.Tensor]


@dataclass(frozen=True)
class Ran:
    """What a backend made of an equation: results in host memory, and the choice of the kernel."""

    results: tuple[torch.Tensor, ...]
    choice: Choice

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return self.choice.kernel.name


class OneEquation:
    """An equation lowered alone, ready to run over values of its operands.

    bound: operands that are parameters, given with `values` once. host: operands that a device step gets from host
    memory (rows, lengths, positions).
    """

    def __init__(
        self,
        equation: Equation,
        backend: Backend,
        values: Values,
        bound: frozenset[Var] = frozenset(),
        host: frozenset[Var] = frozenset(),
        fallback: str = "report",
    ) -> None:
        self.backend = backend
        inputs = tuple(dict.fromkeys(equation.input_vars()))
        parameters = tuple(v for v in inputs if v in bound)
        if len(parameters) == len(inputs):
            # Nothing else feeds it, so it would be evaluated once by its reference rule instead of run.
            parameters = ()
        self.free = tuple(v for v in inputs if v not in parameters)
        self.updated = {equation.inputs[i] for i, _ in equation.op.updates}
        program = Program((*self.free, *parameters), (equation,), equation.outputs)
        owned = [v for v in self.free if v in self.updated]
        lowered = lower(program, backend, parameters, owned, fallback, bool(parameters))
        self.lowered: Lowered = replace(
            lowered,
            host=frozenset(v for v in self.free if v in host and v not in self.updated),
            fixed=frozenset(owned),
            host_results=backend.executable is not None,
        )
        self.choice = next(c for c in lowered.choices if c.equation.op is equation.op)
        self._tokens = _new_tokens(equation)
        preparer = None
        if parameters:
            preparer = Binding([values[v] for v in parameters]).preparer(parameters, ())
        self._executable: Any = (
            backend.executable(self.lowered, preparer)
            if backend.executable is not None
            else Executable(self.lowered, preparer, backend.device)
        )

    def run(self, values: Values) -> Ran:
        """Results for these values of the operands; none of them is written to."""
        given = [self._placed(var, values[var]) for var in self.free]
        # The device's copies are ours: its graph may go on reading them until the results are here.
        results = self._executable.finish(self._executable.begin(given))
        return Ran(tuple(r.cpu().clone() if r.device.type != "cpu" else r for r in results), self.choice)

    def _placed(self, var: Var, value: torch.Tensor) -> torch.Tensor:
        if self.backend.executable is None:
            return value.clone() if var in self.updated else value
        if var in self.lowered.host:
            return value
        device = open_device(self.backend.device.index or 0)
        if var in self.updated and value.ndim == 4:
            arena = empty_arena(tuple(value.shape), value.dtype, device.device, self._tokens)
            return arena.copy_(value)
        return value.contiguous().to(device.device, copy=True)


def _new_tokens(equation: Equation) -> int:
    """Tokens of a step that an equation writes at most, padding included."""
    first = next((a for a in equation.operands if hasattr(a, "shape") and len(a.shape) > 1), None)
    return 0 if first is None else int(first.shape[0] * first.shape[1])


def run_equation(
    equation: Equation,
    backend: Backend,
    values: Values,
    bound: frozenset[Var] = frozenset(),
    host: frozenset[Var] = frozenset(),
) -> Ran:
    """Run an equation once; see `OneEquation`."""
    return OneEquation(equation, backend, values, bound, host).run(values)


def host_values(lowered: Lowered, backend: Backend) -> tuple[frozenset[Var], frozenset[int]]:
    """Values of a lowered program that are computed in host memory, and the ids of the equations that run there."""
    if backend.executable is None:
        return frozenset(), frozenset()
    parts = split(lowered)
    return parts.values, frozenset(map(id, parts.host))
