"""Rewriting programs: dead equations, common ones, fusion by pattern, and splitting off what only parameters feed.

Fusion rules are data: a pattern of equations over named values, a condition, and a builder of the replacement.
A rule applies only where no intermediate of the pattern has another use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atbx.core.errors import AtbxError
from atbx.core.exact import exact_params
from atbx.core.memory import storage_roots
from atbx.core.op import Op
from atbx.core.program import Atom, Equation, Literal, Program, Var


def drop_dead(program: Program) -> Program:
    """`program` without equations whose results nobody reads."""
    live = {atom for atom in program.outputs if isinstance(atom, Var)}
    kept: list[Equation] = []
    for equation in reversed(program.equations):
        if any(v in live for v in equation.outputs):
            kept.append(equation)
            live.update(equation.input_vars())
    constants = tuple((var, value) for var, value in program.constants if var in live)
    return replace(program, equations=tuple(reversed(kept)), constants=constants)


def share_common(program: Program) -> Program:
    """`program` with each computation done once (rotary angles, say, which every layer asks for).

    Ops that update an operand are never shared: each stands for a write of its own.
    """
    same: dict[Var, Atom] = {}
    seen: dict[Any, tuple[Var, ...]] = {}
    kept: list[Equation] = []
    for equation in program.equations:
        inputs = tuple(same.get(x, x) if isinstance(x, Var) else x for x in equation.inputs)
        equation = replace(equation, inputs=inputs)
        key = (equation.op, inputs, exact_params(equation.params))
        if not equation.op.updates and key in seen:
            same.update(zip(equation.outputs, seen[key], strict=True))
            continue
        seen[key] = equation.outputs
        kept.append(equation)
    outputs = tuple(same.get(x, x) if isinstance(x, Var) else x for x in program.outputs)
    return replace(program, equations=tuple(kept), outputs=outputs)


@dataclass(frozen=True)
class Pattern:
    """One equation of a pattern: the op's name, names of its operands and of its results.

    A name that occurs twice must be the same value. An operand name that starts with "?" may be None.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """Where a pattern was found: the equations in pattern order, the value of each name, and which are parameters."""

    equations: tuple[Equation, ...]
    atoms: dict[str, Atom]
    bound: frozenset[Var] = frozenset()

    def is_bound(self, *names: str) -> bool:
        """Whether these values are bound parameters (or left out), so that packing them is done once."""
        return all(isinstance(a, Literal) or a in self.bound for a in (self.atoms[n] for n in names))

    def params(self, index: int) -> dict[str, Any]:
        """Params of the pattern's equation number `index`."""
        return self.equations[index].params

    def abstract(self, name: str) -> Any:
        """Shape and dtype of a named value (None or a number where it is a literal)."""
        atom = self.atoms[name]
        return atom.abstract if isinstance(atom, Var) else atom.value


class Builder:
    """Collects the replacement's equations; `bind` makes a result take the place of a pattern's output."""

    def __init__(self, match: Match) -> None:
        self.match = match
        self.equations: list[Equation] = []
        self.replaced: dict[Var, Var] = {}

    def apply(self, op: Op, inputs: Sequence[Atom], params: dict[str, Any] | None = None) -> tuple[Var, ...]:
        """Append one equation; returns its results."""
        first = self.match.equations[0]
        operands = tuple(x.abstract if isinstance(x, Var) else x.value for x in inputs)
        params = params or {}
        outputs = tuple(Var(a) for a in op.results(*operands, **params))
        self.equations.append(Equation(op, tuple(inputs), outputs, params, first.scope, first.source))
        return outputs

    def bind(self, name: str, var: Var) -> None:
        """Let `var` stand for the pattern's output `name`."""
        old = self.match.atoms[name]
        assert isinstance(old, Var)
        self.replaced[old] = var


@dataclass(frozen=True)
class FusionRule:
    """A pattern of ops and the fused op that replaces it.

    name:    what explanations print.
    pattern: equations in program order; the first is the anchor.
    outputs: names of results that may be used outside; every other result must have no other use.
    build:   writes the replacement through a `Builder`.
    when:    a reason why the rule must not apply to a match, or None.
    """

    name: str
    pattern: tuple[Pattern, ...]
    outputs: tuple[str, ...]
    build: Callable[[Match, Builder], None]
    when: Callable[[Match], str | None] = lambda match: None


@dataclass(frozen=True)
class Applied:
    """A fusion that happened, or one that was refused and why."""

    rule: str
    scope: str
    refused: str | None = None


def _unify(pattern: Pattern, equation: Equation, atoms: dict[str, Atom]) -> dict[str, Atom] | None:
    if equation.op.name != pattern.op or len(equation.inputs) != len(pattern.inputs):
        return None
    if len(equation.outputs) != len(pattern.outputs):
        return None
    found = dict(atoms)
    for name, atom in zip(pattern.inputs, equation.inputs, strict=True):
        if isinstance(atom, Literal) and atom.value is None and not name.startswith("?"):
            return None
        if name in found and found[name] != atom:
            return None
        found[name] = atom
    for name, var in zip(pattern.outputs, equation.outputs, strict=True):
        if name in found:
            return None
        found[name] = var
    return found


class _Uses:
    """Where each value is read and whose storage it may share, for one list of equations."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.roots = storage_roots(program)
        self.readers: dict[Var, list[int]] = program.uses()

    def candidates(self, pattern: Pattern, atoms: dict[str, Atom]) -> Iterable[int]:
        """Indices of equations that read a value the pattern already knows."""
        found: set[int] = set()
        for name in pattern.inputs:
            atom = atoms.get(name)
            if isinstance(atom, Var):
                found.update(self.readers.get(atom, ()))
        return sorted(i for i in found if i < len(self.program.equations))


def _find(
    rule: FusionRule, uses: _Uses, anchor: int, taken: set[int], bound: frozenset[Var]
) -> tuple[Match, list[int]] | None:
    """The first match of `rule` that starts at equation `anchor`."""
    equations = uses.program.equations
    first = _unify(rule.pattern[0], equations[anchor], {})
    if first is None:
        return None

    def extend(
        position: int, atoms: dict[str, Atom], chosen: list[int]
    ) -> tuple[dict[str, Atom], list[int]] | None:
        if position == len(rule.pattern):
            return (atoms, chosen) if _is_closed(rule, uses, atoms, chosen) else None
        for index in uses.candidates(rule.pattern[position], atoms):
            if index in chosen or index in taken:
                continue
            unified = _unify(rule.pattern[position], equations[index], atoms)
            if unified is not None:
                found = extend(position + 1, unified, [*chosen, index])
                if found is not None:
                    return found
        return None

    found = extend(1, first, [anchor])
    if found is None:
        return None
    atoms, chosen = found
    return Match(tuple(equations[i] for i in chosen), atoms, bound), chosen


def _is_closed(rule: FusionRule, uses: _Uses, atoms: dict[str, Atom], chosen: list[int]) -> bool:
    """Whether no intermediate is read outside the match, nor by it under the name of an outer operand."""
    inside = set(chosen)
    results = {name for pattern in rule.pattern for name in pattern.outputs}
    made = {atoms[name] for name in results}
    if any(atom in made for name, atom in atoms.items() if name not in results):
        return False
    for pattern in rule.pattern:
        for name in pattern.outputs:
            if name in rule.outputs:
                continue
            var = atoms[name]
            if isinstance(var, Var) and any(reader not in inside for reader in uses.readers.get(var, ())):
                return False
    return True


def _is_movable(uses: _Uses, chosen: list[int]) -> bool:
    """Whether the match can stand where its last equation stands: nothing in between reads its results, and no
    update of a value it reads lies in between."""
    inside, last = set(chosen), max(chosen)
    equations = uses.program.equations
    roots = uses.roots
    produced = {v for i in chosen for v in equations[i].outputs}
    read = {roots.get(v, v) for i in chosen for v in equations[i].input_vars()}
    for index in range(min(chosen), last):
        if index in inside:
            continue
        between = equations[index]
        if any(v in produced for v in between.input_vars()):
            return False
        updated = [between.inputs[operand] for operand, _ in between.op.updates]
        if any(isinstance(x, Var) and roots.get(x, x) in read for x in updated):
            return False
    return True


def fuse(
    program: Program, rules: Sequence[FusionRule], bound: Iterable[Var] = ()
) -> tuple[Program, tuple[Applied, ...]]:
    """Apply each rule wherever it matches, in the order of `rules`; also reports what was refused and why.

    `bound` are the inputs that are bound parameters.
    """
    parameters = frozenset(bound)
    report: list[Applied] = []
    for rule in rules:
        uses = _Uses(program)
        replacements: dict[int, Builder] = {}
        taken: set[int] = set()
        for anchor, equation in enumerate(program.equations):
            if anchor in taken or equation.op.name != rule.pattern[0].op:
                continue
            found = _find(rule, uses, anchor, taken, parameters)
            if found is None:
                continue
            match, chosen = found
            reason = rule.when(match)
            if reason is None and not _is_movable(uses, chosen):
                reason = "a result is read, or an operand updated, before the pattern is complete"
            report.append(Applied(rule.name, equation.scope, reason))
            if reason is not None:
                continue
            builder = Builder(match)
            rule.build(match, builder)
            _check_replacement(rule, match, builder, uses, chosen)
            taken.update(chosen)
            replacements[max(chosen)] = builder
        if taken:
            program = _replace(program, replacements, taken)
    return program, tuple(report)


def _check_replacement(
    rule: FusionRule, match: Match, builder: Builder, uses: _Uses, inside: Sequence[int]
) -> None:
    """Raise AtbxError unless the replacement gives every result that is read, as it was."""
    for name in rule.outputs:
        old = match.atoms[name]
        assert isinstance(old, Var)
        if all(i in inside for i in uses.readers.get(old, ())):
            continue
        new = builder.replaced.get(old)
        if new is None or (new.abstract.shape, new.abstract.dtype) != (
            old.abstract.shape,
            old.abstract.dtype,
        ):
            raise AtbxError(
                f"fusion rule {rule.name!r} does not replace its result {name!r}",
                expected=str(old.abstract),
                found="nothing" if new is None else str(new.abstract),
            )


def _replace(program: Program, replacements: dict[int, Builder], taken: set[int]) -> Program:
    substitute: dict[Var, Var] = {}
    equations: list[Equation] = []

    def renamed(atom: Atom) -> Atom:
        return substitute.get(atom, atom) if isinstance(atom, Var) else atom

    for index, equation in enumerate(program.equations):
        if index in replacements:
            builder = replacements[index]
            equations += [replace(e, inputs=tuple(map(renamed, e.inputs))) for e in builder.equations]
            substitute.update(builder.replaced)
        elif index not in taken:
            equations.append(replace(equation, inputs=tuple(map(renamed, equation.inputs))))
    return replace(program, equations=tuple(equations), outputs=tuple(map(renamed, program.outputs)))


def split_prepared(
    program: Program, bound: Iterable[Var]
) -> tuple[tuple[Equation, ...], tuple[Equation, ...]]:
    """Equations that only bound parameters feed (the prepare program), and the rest (the step)."""
    known: set[Var] = set(bound)
    prepared: list[Equation] = []
    step: list[Equation] = []
    for equation in program.equations:
        values = list(equation.input_vars())
        if values and not equation.op.updates and all(v in known for v in values):
            prepared.append(equation)
            known.update(equation.outputs)
        else:
            step.append(equation)
    return tuple(prepared), tuple(step)
