"""Memory of a program: which values live when, where each lies in one workspace, and the peak of it.

Offsets are given by best fit over lifetimes; the same plan tells the peak before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atbx.core.program import Program, Var

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector register."""


@dataclass(frozen=True)
class MemoryPlan:
    """Byte offset of each planned value in a workspace of `size` bytes."""

    offsets: dict[Var, int]
    size: int


def storage_roots(program: Program) -> dict[Var, Var]:
    """For each value, the value whose storage it may share: the operand a view was taken of, or that was updated."""
    roots: dict[Var, Var] = {}

    def root(var: Var) -> Var:
        return roots.get(var, var)

    for equation in program.equations:
        updated = {result: operand for operand, result in equation.op.updates}
        for index, var in enumerate(equation.outputs):
            operand = updated.get(index, 0 if equation.op.views else None)
            atom = equation.inputs[operand] if operand is not None else None
            roots[var] = root(atom) if isinstance(atom, Var) else var
    return roots


def lifetimes(program: Program) -> dict[Var, tuple[int, int]]:
    """For each storage made by an equation: index of that equation, and of the last that reads it or a view of it."""
    roots = storage_roots(program)
    found: dict[Var, tuple[int, int]] = {}
    for index, equation in enumerate(program.equations):
        for var in equation.outputs:
            root = roots[var]
            if root is var:
                found[var] = (index, index)
        for var in equation.input_vars():
            root = roots.get(var, var)
            if root in found:
                found[root] = (found[root][0], index)
    for atom in program.outputs:
        if isinstance(atom, Var) and roots.get(atom, atom) in found:
            root = roots.get(atom, atom)
            found[root] = (found[root][0], len(program.equations))
    return found


def plan_memory(program: Program, skip: Iterable[Var] = ()) -> MemoryPlan:
    """Offsets for every storage that the program's equations make, except `skip`."""
    skipped = set(skip)
    spans = [(var, *span) for var, span in lifetimes(program).items() if var not in skipped]
    # Largest first: small values then fill the gaps that large ones leave.
    spans.sort(key=lambda item: (-item[0].abstract.nbytes, item[1]))
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[Var, int] = {}
    size = 0
    for var, first, last in spans:
        need = -(-var.abstract.nbytes // ALIGNMENT) * ALIGNMENT
        offset = _first_gap([p for p in placed if p[2] <= last and first <= p[3]], need)
        placed.append((offset, offset + need, first, last))
        offsets[var] = offset
        size = max(size, offset + need)
    return MemoryPlan(offsets, size)


def _first_gap(overlapping: Sequence[tuple[int, int, int, int]], need: int) -> int:
    offset = 0
    for start, end, _, _ in sorted(overlapping):
        if start - offset >= need:
            return offset
        offset = max(offset, end)
    return offset


def copies_needed(
    program: Program, owned: Iterable[Var], prepared: Iterable[Var] = ()
) -> dict[tuple[int, int], Var]:
    """Updates that may not be done in place: (equation index, operand index) to the operand.

    An update in place is safe when its storage is a donated input (`owned`) or made by the step itself (not one of
    the `prepared` values, which every step reads), and when nothing later reads the old value or a view of it.
    """
    ours, kept = set(owned), set(prepared)
    last_read = {var: max(indices) for var, indices in program.uses().items()}
    roots: dict[Var, Var] = {}
    sharing: dict[Var, list[Var]] = {}

    def root(var: Var) -> Var:
        return roots.get(var, var)

    needed: dict[tuple[int, int], Var] = {}
    for index, equation in enumerate(program.equations):
        operand_roots = [root(x) for x in equation.input_vars()]
        updated: dict[int, Var] = {}
        for operand, result in equation.op.updates:
            var = equation.inputs[operand]
            if not isinstance(var, Var):
                continue
            storage = root(var)
            is_read_later = any(last_read.get(v, -1) > index for v in (storage, *sharing.get(storage, ())))
            if storage not in ours or is_read_later or operand_roots.count(storage) > 1:
                needed[index, operand] = var
            else:
                updated[result] = storage
        view = equation.inputs[0] if equation.op.views and equation.inputs else None
        for number, var in enumerate(equation.outputs):
            storage = updated.get(number, root(view) if isinstance(view, Var) else var)
            if storage is not var:
                roots[var] = storage
                sharing.setdefault(storage, []).append(var)
            elif var not in kept:
                ours.add(var)
    return needed
