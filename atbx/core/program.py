"""Programs as data: inputs, equations, outputs, each value a shape and a dtype.

A program prints like a jaxpr, is compared by structure, counted, costed, and rewritten by pure functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.exact import exact, exact_params
from atbx.core.op import Cost, Op


@dataclass(frozen=True, eq=False, slots=True)
class Var:
    """A value of a program: compared by identity; `path` names a program input."""

    abstract: Abstract
    path: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Literal:
    """An operand that is no tensor: a weak Python scalar, or None for an operand left out.

    Compared by type and value: 1, True and 1.0 differ, and so do 0.0 and -0.0.
    """

    value: bool | int | float | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and exact(self.value) == exact(other.value)

    def __hash__(self) -> int:
        return hash(exact(self.value))


Atom = Var | Literal


@dataclass(frozen=True, eq=False)
class Equation:
    """`outputs = op(inputs, **params)`; `scope` is where the model was (layers/3), `source` the user's line."""

    op: Op
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    params: dict[str, Any] = field(default_factory=dict)
    scope: str = ""
    source: str = ""

    @property
    def operands(self) -> tuple[Any, ...]:
        """Operands as the rules of an op see them: Abstract, scalar or None."""
        return tuple(x.abstract if isinstance(x, Var) else x.value for x in self.inputs)

    @property
    def results(self) -> tuple[Abstract, ...]:
        """Shapes and dtypes of the outputs."""
        return tuple(v.abstract for v in self.outputs)

    def cost(self) -> Cost:
        """FLOPs and bytes by the op's cost rule."""
        return self.op.cost(self.operands, self.results, **self.params)

    def input_vars(self) -> Iterator[Var]:
        """The inputs that are values, in order."""
        return (x for x in self.inputs if isinstance(x, Var))


@dataclass(frozen=True, eq=False)
class Program:
    """A staged function: `outputs` from `inputs` by `equations` in order; `constants` are small captured tensors."""

    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    constants: tuple[tuple[Var, torch.Tensor], ...] = ()

    def __str__(self) -> str:
        return format_program(self)

    def __len__(self) -> int:
        return len(self.equations)

    def __eq__(self, other: object) -> bool:
        """Same structure: ops, operands, params, shapes, constants; names, scopes and sources do not count."""
        if not isinstance(other, Program):
            return NotImplemented
        if _structure(self) != _structure(other):
            return False
        pairs = zip(self.constants, other.constants, strict=True)
        return all(torch.equal(_bits(a), _bits(b)) for (_, a), (_, b) in pairs)

    def __hash__(self) -> int:
        return hash(_structure(self))

    def cost(self) -> Cost:
        """FLOPs and bytes of all equations."""
        total = Cost()
        for equation in self.equations:
            total = total + equation.cost()
        return total

    def count(self, op: str | None = None, scope: str | None = None) -> int:
        """Number of equations, of one op and in one scope where named."""
        return sum(
            (op is None or e.op.name == op) and (scope is None or e.scope == scope) for e in self.equations
        )

    def uses(self) -> dict[Var, list[int]]:
        """For each value the indices of the equations that read it; len(equations) stands for the outputs."""
        found: dict[Var, list[int]] = {}
        for index, equation in enumerate(self.equations):
            for var in equation.input_vars():
                found.setdefault(var, []).append(index)
        for atom in self.outputs:
            if isinstance(atom, Var):
                found.setdefault(atom, []).append(len(self.equations))
        return found

    def with_equations(self, equations: Iterable[Equation]) -> Program:
        """The same program with other equations."""
        return replace(self, equations=tuple(equations))


def _structure(program: Program) -> Hashable:
    """What makes two programs equal, apart from the constants' entries: values are numbered as they appear."""
    numbers: dict[Var, int] = {}

    def atom(value: Atom) -> Hashable:
        return numbers.setdefault(value, len(numbers)) if isinstance(value, Var) else value

    def made(var: Var) -> Hashable:
        return atom(var), exact(var.abstract.shape), var.abstract.dtype

    inputs = tuple(map(made, (*program.inputs, *(var for var, _ in program.constants))))
    equations = tuple(
        (e.op.name, exact_params(e.params), tuple(map(atom, e.inputs)), tuple(map(made, e.outputs)))
        for e in program.equations
    )
    return len(program.inputs), inputs, equations, tuple(map(atom, program.outputs))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _names() -> Iterator[str]:
    length = 0
    while True:
        number, name = length, ""
        while True:
            name = chr(ord("a") + number % 26) + name
            number = number // 26 - 1
            if number < 0:
                break
        yield name
        length += 1


def _format_param(value: Any) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)


def format_program(program: Program) -> str:
    """`program` as text, one equation a line."""
    fresh = _names()
    names: dict[Var, str] = {}

    def name(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return "_" if atom.value is None else repr(atom.value)
        if atom not in names:
            names[atom] = next(fresh)
        return names[atom]

    def typed(var: Var) -> str:
        return f"{name(var)}:{var.abstract}"

    lines = ["{ program"]
    for var in program.inputs:
        lines.append(f"    in {typed(var)}" + (f"  # {var.path}" if var.path else ""))
    for var, _ in program.constants:
        lines.append(f"    const {typed(var)}")
    for equation in program.equations:
        params = " ".join(f"{k}={_format_param(v)}" for k, v in sorted(equation.params.items()))
        left = " ".join(typed(v) for v in equation.outputs)
        right = " ".join([equation.op.name + (f"[{params}]" if params else ""), *map(name, equation.inputs)])
        comment = f"  # {equation.scope}" if equation.scope else ""
        lines.append(f"    {left} = {right}{comment}")
    lines.append(f"    out {' '.join(name(atom) for atom in program.outputs)}")
    return "\n".join([*lines, "}"])
