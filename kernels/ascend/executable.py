"""Executables of the Ascend backend: one captured graph a step, over buffers at fixed addresses.

A step fills one pinned buffer, copies it to the device, updates the lengths that captured launches take, replays, and
(where results are wanted on the host) reads them back with a single wait. Addresses of KV arenas are part of a capture,
so an executable keeps one graph for each set of arenas that it has met; everything else is copied in and out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from atbx.core.binding import Preparer
from atbx.core.executable import Call, Lowered, Observer, current_observer, with_drops
from atbx.core.memory import storage_roots
from atbx.core.program import Equation, Literal, Var
from atbx.kernels.ascend.budget import budget_of, count_updates, streams_of_graph
from atbx.kernels.ascend.failures import told
from atbx.kernels.ascend.lengths import LengthUpdates
from atbx.kernels.ascend.lowering import Upload, make_plans, run_host, split
from atbx.kernels.ascend.plan import StepPlan
from atbx.kernels.ascend.runtime import AscendDevice
from atbx.kernels.ascend.tracing import span

GRAPHS_KEPT = 4
"""Captured graphs that an executable keeps, one a set of arenas; a pool of arenas hands out as many."""


WRITES_NOTHING_WITHOUT_ROWS = frozenset({"kv_write", "qkv_rotary_write"})
"""Ops whose update of an arena writes to its trash alone where no row has a token."""


@dataclass
class Step:
    """One call under way: host values, its plans, and the device tensors that it was given."""

    values: dict[Var, Any]
    plans: list[Any]
    given: dict[Var, torch.Tensor]


@dataclass
class Capture:
    """A captured graph: what it replays, the launches to update, and where its results lie."""

    graph: Any
    lengths: LengthUpdates
    results: list[Any]


class AscendExecutable:
    """A lowered program on one NPU, over one binding.

    is_eager: launch every call in every step instead of replaying a captured graph.
    """

    def __init__(
        self, lowered: Lowered, preparer: Preparer | None, device: AscendDevice, *, is_eager: bool = False
    ) -> None:
        self.lowered, self.device, self.is_eager = lowered, device, is_eager
        self._split = split(lowered)
        self._lock = threading.Lock()
        program = lowered.program
        bound = set(lowered.bound) if preparer is not None else set()
        self.inputs = tuple(v for v in program.inputs if v not in bound)
        self._on_device = tuple(v for v in self.inputs if v not in lowered.host)
        self._slots: dict[Any, int] = {}
        self._template: list[Any] = []
        roots = storage_roots(program)
        self._kept_from_warming = frozenset(
            roots.get(operand, operand)
            for equation in program.equations
            if equation.op.name not in WRITES_NOTHING_WITHOUT_ROWS
            for index, _ in equation.op.updates
            if isinstance(operand := equation.inputs[index], Var)
        )
        self._roots = {v: roots.get(v, v) for v in program.outputs if isinstance(v, Var)}
        with device.building():
            example = self._example()
            self._upload = Upload(self._arrays(example), device.device)
            self._calls = self._build(preparer, example)
        self._budget = budget_of(device.index, device.environment.chip)
        self._streams = streams_of_graph(count_updates(self._split, example.plans))
        self._sent: Any = None
        self._done: Any = None
        self._pinned: dict[int, torch.Tensor] = {}

    def _slot(self, owner: Any, value: Any = None) -> int:
        if owner not in self._slots:
            self._slots[owner] = len(self._template)
            self._template.append(value)
        return self._slots[owner]

    def _example(self) -> Step:
        """A step whose host inputs are all zero: no row has a token, so it is fit to size and to capture by."""
        values: dict[Var, Any] = {
            v: torch.zeros(tuple(map(int, v.abstract.shape)), dtype=v.abstract.dtype)
            for v in self.inputs
            if v in self.lowered.host
        }
        return self._planned(values, {})

    def _planned(self, values: dict[Var, Any], given: dict[Var, torch.Tensor]) -> Step:
        values.update((var, value) for var, value in self.lowered.program.constants)
        run_host(self._split, values)
        return Step(values, make_plans(self._split, values), given)

    def _arrays(self, step: Step) -> list[torch.Tensor]:
        """Everything a step uploads, in the order of the upload buffer."""
        found = [step.values[v] for v in self._split.uploads]
        for plan in step.plans:
            found += plan.arrays.values()
        return found

    def _build(self, preparer: Preparer | None, example: Step) -> tuple[Call, ...]:
        lowered, place = self.lowered, self.device.place
        for var in self._on_device:
            self._slot(var)
        targets = iter(self._upload.targets)
        for var in self._split.uploads:
            self._slot(var, next(targets))
        self._plans = [
            StepPlan({name: next(targets) for name in plan.arrays}, plan.lists) for plan in example.plans
        ]
        for var, value in lowered.program.constants:
            if var not in self._slots:
                self._slot(var, place(value))
        fed = set(lowered.bound).union(*(e.outputs for e in lowered.prepared)) if preparer else set()
        calls = []
        for choice, plan in self._split.device:
            equation, kernel = choice.equation, choice.kernel
            packs = kernel.packs(equation) if preparer is not None else {}
            planned = set(kernel.plan.operands) if kernel.plan is not None and plan is not None else set()
            reads = []
            for position, atom in enumerate(equation.inputs):
                if isinstance(atom, Literal):
                    reads.append(self._slot(("literal", atom), atom.value))
                elif position in planned:
                    # The kernel knows it through its plan.
                    reads.append(self._slot(("planned",), None))
                elif atom in fed:
                    assert preparer is not None
                    if position in packs:
                        name = packs[position].name
                        value = preparer.packed(atom, packs[position])
                        reads.append(self._slot(("packed", name, atom), value))
                    else:
                        reads.append(self._slot(("kept", atom), preparer.placed(atom, self.device.device)))
                else:
                    reads.append(self._slot(atom))
            if plan is not None:
                reads.append(self._slot(("plan", plan), self._plans[plan]))
            elif kernel.plan is not None:
                reads.append(self._slot(("no plan",)))
            outs = tuple(self._slot(v) for v in equation.outputs)
            calls.append(Call(kernel.make(equation), tuple(reads), outs, (), label(equation), choice))
        keep = {s for s, v in enumerate(self._template) if v is not None}
        keep |= {self._slots[v] for v in (*self._on_device, *self._roots) if v in self._slots}
        return with_drops(calls, keep)

    def begin(self, inputs: Sequence[Any]) -> Step:
        """The host's part of a step: its plans are made and its bounds checked; nothing is launched yet."""
        values: dict[Var, Any] = {}
        given: dict[Var, torch.Tensor] = {}
        host = self.lowered.host
        for var, value in zip(self.inputs, inputs, strict=True):
            (values if var in host else given)[var] = value
        return self._planned(values, given)

    def finish(self, step: Step) -> list[Any]:
        """Run the step; results share no memory with the executable's buffers."""
        with self._lock, torch.no_grad(), self.device.npu.device(self.device.device):
            try:
                if self.is_eager:
                    self._send(step)
                    with self.device.launching():
                        results = self._launch(step.given, step.plans, observer=current_observer())
                else:
                    results = self._replay(step)
                return self._read(step, results)
            except RuntimeError as error:
                found = told(error, "a step")
                if found is error:
                    raise
                raise found from error

    def _send(self, step: Step) -> None:
        """Copy the host's values of a step to the device."""
        self._wait(self._sent)
        self._upload.fill(self._arrays(step))
        self._upload.send()
        self._sent = self._mark()

    def _mark(self) -> Any:
        event = self.device.npu.Event()
        event.record()
        return event

    def _wait(self, event: Any) -> None:
        """Wait for an earlier step where it is still under way: its buffers are about to be written."""
        if event is not None and not event.query():
            event.synchronize()

    def _replay(self, step: Step) -> list[Any]:
        fixed = {v: t for v, t in step.given.items() if v in self.lowered.fixed}
        key = tuple(t.data_ptr() for t in fixed.values())
        captured: Capture | None = self._budget.get(self, key)
        if captured is None:
            self._budget.make_room(
                self, self._streams, GRAPHS_KEPT, lambda: self.device.npu.synchronize(self.device.device)
            )
            captured = self._capture(fixed)
            self._budget.put(self, key, captured, self._streams)
        # An update must not overtake the replay before it.
        if len(captured.lengths):
            self._wait(self._done)
        self._send(step)
        for var, value in step.given.items():
            if var not in fixed:
                self._static(var).copy_(value)
        with self.device.launching():
            captured.lengths.update(step.plans)
        captured.lengths.use()
        captured.graph.replay()
        self._done = self._mark()
        return captured.results

    def _static(self, var: Var) -> torch.Tensor:
        """The buffer at a fixed address that an input of the device is copied into."""
        owner = ("static", var)
        if owner not in self._slots:
            shape = tuple(map(int, var.abstract.shape))
            self._slot(owner, torch.zeros(shape, dtype=var.abstract.dtype, device=self.device.device))
        value = self._template[self._slots[owner]]
        assert isinstance(value, torch.Tensor)
        return value

    def _capture(self, fixed: dict[Var, torch.Tensor]) -> Capture:
        """Capture the launches over these arenas, after one run of them without rows that has everything loaded."""
        device = self.device
        given = {v: fixed[v] if v in fixed else self._static(v) for v in self._on_device}
        # The warm-up may change nothing: not by what an earlier step left in a buffer, and not in an arena that is
        # updated by an op whose writes without rows are not known to go to the trash.
        for var in self._on_device:
            if var not in fixed:
                self._static(var).zero_()
        warming = {v: t.clone() if v in self._kept_from_warming else t for v, t in given.items()}
        example = self._example()
        with device.lock, device.launching():
            self._send(example)
            device.capture_stream.wait_stream(device.npu.current_stream())
            try:
                with device.npu.stream(device.capture_stream):
                    self._launch(warming, example.plans)
            finally:
                # Also where a launch was refused: what was launched before it reads buffers that would be freed.
                device.npu.synchronize(device.device)
            graph, lengths = device.npu.NPUGraph(), LengthUpdates(device)
            with device.npu.graph(
                graph, pool=device.pool, stream=device.capture_stream, capture_error_mode="thread_local"
            ):
                results = self._launch(given, example.plans, lengths)
        return Capture(graph, lengths, results)

    def _launch(
        self,
        given: dict[Var, torch.Tensor],
        plans: list[Any],
        lengths: LengthUpdates | None = None,
        observer: Observer | None = None,
    ) -> list[Any]:
        """Launch every call; with `lengths`, record those that take lengths so that they can be updated."""
        slots = self._filled(given, plans)
        with observer.walk(self._calls, self.device) if observer is not None else nullcontext():
            for call in self._calls:
                operands = [slots[i] for i in call.reads]
                try:
                    with span(call.label):
                        if lengths is not None and is_updatable(call.run, operands):
                            result = record(call, operands, lengths, self._plan_number(call))
                        elif observer is not None:
                            result = observer.run(call, operands)
                        else:
                            result = call.run(*operands)
                except RuntimeError as error:
                    found = told(error, call.label, operands)
                    if found is error:
                        raise
                    raise found from error
                _keep(call, result, slots)
        return [slots[self._slots[v]] if v in self._slots else None for v in self._roots]

    def _filled(self, given: dict[Var, torch.Tensor], plans: list[Any]) -> list[Any]:
        """The slots of one run: given tensors, and plans with this run's lists."""
        slots = self._template.copy()
        for var, value in given.items():
            slots[self._slots[var]] = value
        for number, plan in enumerate(self._plans):
            slots[self._slots[("plan", number)]] = StepPlan(plan.arrays, plans[number].lists)
        return slots

    def _plan_number(self, call: Call) -> int:
        slot = call.reads[-1]
        return next(n for n in range(len(self._plans)) if self._slots[("plan", n)] == slot)

    def _read(self, step: Step, results: list[Any]) -> list[Any]:
        """Results as the caller gets them: arenas as they are, host values, copies of everything else."""
        device_results = dict(zip(self._roots, results, strict=True))
        found: list[Any] = []
        pending: list[tuple[int, torch.Tensor]] = []
        for index, atom in enumerate(self.lowered.program.outputs):
            if isinstance(atom, Literal):
                found.append(atom.value)
            elif atom in self._split.values:
                found.append(step.values[atom])
            elif self._roots[atom] in self.lowered.fixed:
                found.append(step.given[self._roots[atom]])
            elif self.lowered.host_results:
                pending.append((index, self._to_pinned(index, device_results[atom])))
                found.append(None)
            else:
                result = device_results[atom]
                found.append(result if self.is_eager else result.clone())
        if pending:
            self.device.npu.current_stream().synchronize()
            for index, buffer in pending:
                found[index] = buffer.clone()
        return found

    def _to_pinned(self, index: int, value: torch.Tensor) -> torch.Tensor:
        if index not in self._pinned:
            self._pinned[index] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return self._pinned[index].copy_(value, non_blocking=True)


def _keep(call: Call, result: Any, slots: list[Any]) -> None:
    """Put a call's results into their slots and let go of what it read last."""
    if len(call.outs) == 1:
        slots[call.outs[0]] = result
    else:
        for slot, value in zip(call.outs, result, strict=True):
            slots[slot] = value
    for slot in call.drops:
        slots[slot] = None


def label(equation: Equation) -> str:
    """What explanations, profiles and errors call an equation."""
    return f"{equation.scope}:{equation.op.name}" if equation.scope else equation.op.name


def is_updatable(run: Callable[..., Any], operands: list[Any]) -> bool:
    """Whether a launch takes lengths from the host, so that a captured one must be updated."""
    return hasattr(run, "prepare") and bool(operands) and bool(getattr(operands[-1], "lists", None))


def record(call: Call, operands: list[Any], lengths: LengthUpdates, plan: int) -> Any:
    """Capture a launch that takes lengths, with its results and workspace allocated beforehand."""
    prepare: Any = call.run
    result, launch = prepare.prepare(*operands)
    lengths.record(call.label, plan, launch, operands[-1].lists)
    return result
