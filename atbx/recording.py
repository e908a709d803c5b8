"""A call's program on a backend beside the program as it was written, and the values of both by reference rules.

Fusion gives programs that differ in structure. While the backend's rules are applied, each new value that stands for
one of the program as written is noted, so the values that both keep are known by construction, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atbx.core.backend import Backend
from atbx.core.call import read_arguments
from atbx.core.call_signature import Signature
from atbx.core.errors import StagingError
from atbx.core.executable import Lowered
from atbx.core.jit import Jit
from atbx.core.op import COPY
from atbx.core.program import Atom, Equation, Literal, Program, Var
from atbx.core.rewrite import Builder, FusionRule, Match, drop_dead, share_common
from atbx.tolerance import as_tuple


@dataclass(frozen=True)
class Recorded:
    """A call, staged and lowered for a backend.

    written: the program as the function states it, without dead and repeated equations. lowered: the backend's.
    origin:  for each value of the lowered program that stands for one of `written`, that one.
    inputs:  the value of every input and constant of both programs. fed: values that only parameters feed.
    """

    backend: Backend
    written: Program
    lowered: Lowered
    origin: Mapping[Var, Var]
    inputs: Mapping[Var, torch.Tensor]
    fed: frozenset[Var]

    def origin_of(self, var: Var) -> Var | None:
        """The value of the program as written that a value stands for."""
        return self.origin.get(var)


def record(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    backend: Backend,
    *,
    static: Sequence[str] = (),
    donate: Sequence[str] = (),
    fallback: str = "report",
) -> Recorded:
    """Stage and lower a call; nothing is run.

    Raises:
        StagingError: an argument is an Abstract. Those of `atbx.jit`.
    """
    replaced: dict[Var, Var] = {}
    watched = replace(backend, rules=[_watched(rule, replaced) for rule in backend.rules])
    compiled = Jit(function, watched, static=static, donate=donate, fallback=fallback)
    variant = compiled.explain(*args, **kwargs).variant
    signature = Signature.of(function, tuple(static), tuple(donate), {}, ())
    call = read_arguments(signature, args, dict(kwargs))
    if call.abstract_path is not None:
        raise StagingError("a comparison needs values", where=call.abstract_path, found="an Abstract")
    written = drop_dead(share_common(variant.program))
    leaves = [*call.values, *(call.binding.leaves if call.binding is not None else ())]
    inputs = {
        var: leaf.detach().to("cpu", var.abstract.dtype)
        for var, leaf in zip(written.inputs, leaves, strict=True)
    }
    lowered = variant.lowered
    inputs.update((*written.constants, *lowered.program.constants))
    origin = {v: v for v in _values(written)}
    origin.update((new, origin[_first(old, replaced)]) for new, old in replaced.items())
    for equation in lowered.program.equations:
        if equation.op is COPY and equation.outputs[0] not in origin:
            source = equation.inputs[0]
            if isinstance(source, Var) and source in origin:
                origin[equation.outputs[0]] = origin[source]
    fed = frozenset([*lowered.bound, *(v for e in lowered.prepared for v in e.outputs)])
    return Recorded(backend, written, lowered, origin, inputs, fed)


def _values(program: Program) -> list[Var]:
    made = [v for e in program.equations for v in e.outputs]
    return [*program.inputs, *(v for v, _ in program.constants), *made]


def _first(var: Var, replaced: Mapping[Var, Var]) -> Var:
    while var in replaced:
        var = replaced[var]
    return var


def _watched(rule: FusionRule, replaced: dict[Var, Var]) -> FusionRule:
    """The same rule, which notes what each of its results stands for."""

    def build(match: Match, builder: Builder) -> None:
        rule.build(match, builder)
        replaced.update((new, old) for old, new in builder.replaced.items() if new is not old)

    return replace(rule, build=build)


def operands_of(equation: Equation, values: Mapping[Var, Any]) -> tuple[Any, ...]:
    """The operands of an equation as values."""
    return tuple(value_of(atom, values) for atom in equation.inputs)


def value_of(atom: Atom, values: Mapping[Var, Any]) -> Any:
    """What an atom stands for."""
    return atom.value if isinstance(atom, Literal) else values[atom]


def reference_values(program: Program, inputs: Mapping[Var, torch.Tensor]) -> dict[Var, torch.Tensor]:
    """Every value of a program by the reference rules of its ops."""
    values = dict(inputs)
    for equation in program.equations:
        results = as_tuple(equation.op.reference(*operands_of(equation, values), **equation.params))
        values.update(zip(equation.outputs, results, strict=True))
    return values


def exact_values(program: Program, inputs: Mapping[Var, torch.Tensor]) -> dict[Var, torch.Tensor]:
    """Every value of a program by its reference rules in FP64, from inputs as they are in the program's dtypes."""
    values = {var: _wide(value) for var, value in inputs.items()}
    for equation in program.equations:
        params = dict(equation.params)
        dtype = params.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            # A cast to another floating dtype is a rounding, and this run has none.
            params["dtype"] = torch.float64
        results = as_tuple(equation.op.reference(*operands_of(equation, values), **params))
        values.update((var, _wide(r)) for var, r in zip(equation.outputs, results, strict=True))
    return values


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value
