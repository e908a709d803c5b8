"""Executables: a variant lowered to a flat list of calls over numbered slots.

Each call names the slots it reads, the slots it writes and those it reads last; running a step is one walk over the
list, and no model function or op is entered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from atbx.core.backend import Backend, Choice
from atbx.core.binding import Preparer
from atbx.core.memory import MemoryPlan, copies_needed, plan_memory, storage_roots
from atbx.core.op import COPY
from atbx.core.program import Atom, Equation, Literal, Program, Var
from atbx.core.rewrite import split_prepared

Run = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """One kernel call: `outs = run(*reads)`; `drops` are slots that nothing later reads.

    choice: the equation and its kernel; None for a call that serves several, such as a host plan.
    """

    run: Run
    reads: tuple[int, ...]
    outs: tuple[int, ...]
    drops: tuple[int, ...]
    label: str
    choice: Choice | None = None


class Observer(Protocol):
    """What watches calls in this context: it is asked to make each of them."""

    def walk(self, calls: Sequence[Call], device: Any) -> AbstractContextManager[None]:
        """Around the calls of one list, in order. device: what tells their time; None where they run on the CPU."""

    def run(self, call: Call, operands: Sequence[Any]) -> Any:
        """Make the call; gives its result."""


_observer: ContextVar[Observer | None] = ContextVar("atbx_observer", default=None)


def current_observer() -> Observer | None:
    """The observer of this context, None if nobody watches: read once a step."""
    return _observer.get()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Let `observer` make every call of executables that this context runs inside the block."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@dataclass(frozen=True)
class Lowered:
    """A program with its kernels chosen, independent of any one binding.

    host:  inputs that lie in host memory while the kernels run on a device: the executable uploads them.
    fixed: inputs that belong to arenas: their addresses stay, so they may be built into an executable.
    host_results: results are wanted in host memory.
    """

    program: Program
    bound: tuple[Var, ...]
    prepared: tuple[Equation, ...]
    choices: tuple[Choice, ...]
    memory: MemoryPlan
    copies: tuple[str, ...]
    host: frozenset[Var] = frozenset()
    fixed: frozenset[Var] = frozenset()
    host_results: bool = False


def with_copies(
    program: Program, owned: Sequence[Var], prepared: Iterable[Var] = ()
) -> tuple[Program, tuple[str, ...]]:
    """`program` with a visible copy before each update that may not be done in place, and after each output that
    would otherwise share memory with an input, with a `prepared` value or with another output.

    The second value says what was copied and why. Equations that need no copy stay the same objects.
    """
    notes: list[str] = []
    needed = copies_needed(program, owned, prepared)
    equations: list[Equation] = []
    for index, equation in enumerate(program.equations):
        inputs = list(equation.inputs)
        for operand, _ in equation.op.updates:
            var = needed.get((index, operand))
            if var is not None:
                copy = Var(var.abstract)
                equations.append(Equation(COPY, (var,), (copy,), {}, equation.scope, equation.source))
                inputs[operand] = copy
                notes.append(f"{equation.op.name} operand {operand} is read later, or was not donated")
        changed = tuple(inputs) != equation.inputs
        equations.append(replace(equation, inputs=tuple(inputs)) if changed else equation)
    program = program.with_equations(equations)
    roots = storage_roots(program)
    foreign = {*program.inputs, *(v for v, _ in program.constants), *prepared} - set(owned)
    leaving: set[Var] = set()
    outputs: list[Atom] = []
    for atom in program.outputs:
        if isinstance(atom, Var):
            root = roots.get(atom, atom)
            if root in foreign or root in leaving:
                copy = Var(atom.abstract)
                equations.append(Equation(COPY, (atom,), (copy,)))
                other = "an argument or a constant" if root in foreign else "another output"
                notes.append(f"an output would share memory with {other}")
                atom = copy
            leaving.add(root)
        outputs.append(atom)
    return replace(program, equations=tuple(equations), outputs=tuple(outputs)), tuple(notes)


class Executable:
    """A lowered program over one binding: ready to run."""

    def __init__(self, lowered: Lowered, preparer: Preparer | None, device: torch.device) -> None:
        self.lowered = lowered
        self._device = device
        self._slots: dict[Any, int] = {}
        self._template: list[Any] = []
        self._lock = threading.Lock()
        program = lowered.program
        self._build(program, preparer)

    def _slot(self, owner: Any, value: Any = None) -> int:
        if owner not in self._slots:
            self._slots[owner] = len(self._template)
            self._template.append(value)
        return self._slots[owner]

    def _build(self, program: Program, preparer: Preparer | None) -> None:
        lowered = self.lowered
        bound = set(lowered.bound)
        fed = bound.union(*(e.outputs for e in lowered.prepared)) if preparer is not None else set()
        prepared = set() if preparer is None else set(map(id, lowered.prepared))
        self.input_slots = tuple(self._slot(v) for v in program.inputs if v not in bound or preparer is None)
        for var, value in program.constants:
            self._template[self._slot(var)] = value.to(self._device)
        if preparer is not None:
            self._pack_largest_first(preparer, fed)
        workspace = self._workspace()
        front: list[Call] = []
        calls: list[Call] = []
        planned: dict[Hashable, int] = {}
        known = {*program.inputs, *(v for v, _ in program.constants), *fed}
        choices = iter(lowered.choices)
        for equation in program.equations:
            if id(equation) in prepared:
                continue
            choice = next(choices)
            kernel = choice.kernel
            packs = kernel.packs(equation) if preparer is not None else {}
            reads: list[int] = []
            for position, atom in enumerate(equation.inputs):
                if isinstance(atom, Literal):
                    reads.append(self._slot(("literal", atom), atom.value))
                elif atom in fed:
                    assert preparer is not None
                    if position in packs:
                        preparation = packs[position]
                        value = preparer.packed(atom, preparation)
                        reads.append(self._slot(("packed", preparation.name, atom), value))
                    else:
                        reads.append(self._slot(("kept", atom), preparer.value(atom)))
                else:
                    reads.append(self._slot(atom))
            if kernel.plan is not None:
                operands = tuple(reads[i] for i in kernel.plan.operands)
                key = kernel.plan.key(equation)
                identity = (kernel.plan, key, operands)
                if identity not in planned:
                    planned[identity] = self._slot(identity)
                    atoms = [equation.inputs[i] for i in kernel.plan.operands]
                    early = all(isinstance(x, Literal) or x in known for x in atoms)
                    plan_call = Call(
                        _PlanMaker(kernel.plan.make, key), operands, (planned[identity],), (), "plan"
                    )
                    (front if early else calls).append(plan_call)
                reads.append(planned[identity])
            if kernel.writes_out:
                for var in equation.outputs:
                    reads.append(self._slot(("out", var), workspace[var]))
            outs = tuple(self._slot(v) for v in equation.outputs)
            label = f"{equation.scope}:{equation.op.name}" if equation.scope else equation.op.name
            calls.append(Call(kernel.make(equation), tuple(reads), outs, (), label, choice))
        self._outputs: tuple[Any, ...] = tuple(
            atom.value if isinstance(atom, Literal) else self._slot(atom) for atom in program.outputs
        )
        self.output_is_slot = tuple(isinstance(atom, Var) for atom in program.outputs)
        self.front = tuple(front)
        keep = {s for s, is_slot in zip(self._outputs, self.output_is_slot, strict=True) if is_slot}
        keep |= {s for s, v in enumerate(self._template) if v is not None} | set(self.input_slots)
        for call in self.front:
            keep.update(call.outs)
        self.calls = with_drops(calls, keep)

    def _pack_largest_first(self, preparer: Preparer, fed: set[Var]) -> None:
        """Pack every parameter, large ones first: a parameter and its packed copy are both in memory for a while, so
        the peak is lowest when the largest is packed before the others have their copies."""
        wanted = [
            (atom, preparation)
            for choice in self.lowered.choices
            for position, preparation in choice.kernel.packs(choice.equation).items()
            if isinstance(atom := choice.equation.inputs[position], Var) and atom in fed
        ]
        for atom, preparation in sorted(wanted, key=lambda item: -item[0].abstract.nbytes):
            preparer.packed(atom, preparation)

    def _workspace(self) -> dict[Var, torch.Tensor]:
        """Views of one preallocated buffer for the results that kernels write into."""
        memory = self.lowered.memory
        buffer = torch.empty(memory.size, dtype=torch.uint8, device=self._device)
        return {
            var: buffer[offset : offset + var.abstract.nbytes]
            .view(var.abstract.dtype)
            .view(var.abstract.shape)
            for var, offset in memory.offsets.items()
        }

    def begin(self, inputs: Sequence[Any]) -> list[Any]:
        """The slots of one step, its host plans made and its bounds checked; nothing is launched yet."""
        slots = self._template.copy()
        # Inputs stand first: their slots are given before any other.
        slots[: len(self.input_slots)] = inputs
        run_calls(self.front, slots)
        return slots

    def finish(self, slots: list[Any]) -> list[Any]:
        """Run the step; results never share memory with the executable's own buffers."""
        with self._lock, torch.no_grad():
            run_calls(self.calls, slots)
        return [
            slots[o] if is_slot else o for o, is_slot in zip(self._outputs, self.output_is_slot, strict=True)
        ]


@dataclass(frozen=True)
class _PlanMaker:
    make: Callable[..., Any]
    key: Hashable

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.make(self.key, *tensors)


def with_drops(calls: Sequence[Call], keep: set[int]) -> tuple[Call, ...]:
    """The calls with each slot that is not in `keep` marked where it is read last, so that its memory goes back."""
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        for slot in (*call.reads, *call.outs):
            last[slot] = index
    drops: dict[int, list[int]] = {}
    for slot, index in last.items():
        if slot not in keep:
            drops.setdefault(index, []).append(slot)
    return tuple(replace(call, drops=tuple(drops.get(i, ()))) for i, call in enumerate(calls))


def run_calls(calls: Sequence[Call], slots: list[Any]) -> None:
    """Run a call list over its slots."""
    observer = current_observer()
    if observer is not None:
        _run_observed(calls, slots, observer)
        return
    for call in calls:
        outs = call.outs
        if len(outs) == 1:
            slots[outs[0]] = call.run(*[slots[i] for i in call.reads])
        else:
            for slot, value in zip(outs, call.run(*[slots[i] for i in call.reads]), strict=True):
                slots[slot] = value
        for slot in call.drops:
            slots[slot] = None


def _run_observed(calls: Sequence[Call], slots: list[Any], observer: Observer) -> None:
    """The same, each call made by an observer."""
    with observer.walk(calls, None):
        for call in calls:
            result = observer.run(call, [slots[i] for i in call.reads])
            if len(call.outs) == 1:
                slots[call.outs[0]] = result
            else:
                for slot, value in zip(call.outs, result, strict=True):
                    slots[slot] = value
            for slot in call.drops:
                slots[slot] = None


def lower(
    program: Program,
    backend: Backend,
    bound: Sequence[Var],
    owned: Sequence[Var],
    fallback: str,
    is_bound: bool,
) -> Lowered:
    """Choose a kernel for every equation of the step and plan its memory."""
    from_params = bound if is_bound else ()
    once = split_prepared(program, from_params)[0]
    program, copies = with_copies(program, owned, [v for e in once for v in e.outputs])
    # Not split anew: a copy that protects a prepared value is made in every step.
    is_prepared = set(map(id, once))
    step = tuple(e for e in program.equations if id(e) not in is_prepared)
    fed = frozenset([*from_params, *(v for e in once for v in e.outputs)])
    choices = [backend.choose(e, fed, fallback) for e in step]
    # A result that leaves the step gets memory of its own: outputs never alias an executable's buffers.
    roots = storage_roots(program)
    leaving = {roots.get(a, a) for a in program.outputs if isinstance(a, Var)}
    for index, choice in enumerate(choices):
        if choice.kernel.writes_out and any(v in leaving for v in choice.equation.outputs):
            choices[index] = _returning(choice, backend.device)
    planned = {v for c in choices if c.kernel.writes_out for v in c.equation.outputs}
    skip = [v for e in step for v in e.outputs if v not in planned]
    memory = plan_memory(program.with_equations(step), skip)
    return Lowered(program, tuple(from_params), once, tuple(choices), memory, copies)


def _returning(choice: Choice, device: torch.device) -> Choice:
    """The same kernel, allocating its results: for values that leave the step."""
    kernel = choice.kernel

    def make(equation: Equation) -> Run:
        run = kernel.make(equation)
        results = equation.results

        def call(*operands: Any) -> Any:
            out = [torch.empty(a.shape, dtype=a.dtype, device=device) for a in results]
            return run(*operands, *out)

        return call

    return replace(choice, kernel=replace(kernel, make=make, writes_out=False))
