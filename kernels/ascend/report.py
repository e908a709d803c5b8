"""What a lowered step costs on an NPU, told from the plan alone: kernels, launches, copies, bytes and a floor in time.

Nothing is run and no device is needed. The floor is what the chip cannot go below: the kernels of a step run one after
the other on one stream, so it is the sum over them of the longer of moving the bytes and doing the arithmetic. Launch
times and whatever a kernel moves beyond its op's cost rule come on top; data that stays in a cache comes off.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from atbx.core.backend import Choice
from atbx.core.executable import Lowered
from atbx.core.memory import storage_roots
from atbx.core.op import Cost
from atbx.core.program import Equation, Literal, Var
from atbx.kernels.ascend import AscendBackend
from atbx.kernels.ascend.budget import count_updates
from atbx.kernels.ascend.capability import Capability, Environment, floating_dtype
from atbx.kernels.ascend.chips import Chip
from atbx.kernels.ascend.lowering import ALIGNMENT, Split, make_plans, run_host, split
from atbx.kernels.ascend.versions import version_key

_LAYER = re.compile(r"(.*?/\d+)(?:/|$)")
_COPY = "aten::copy_"


@dataclass(frozen=True)
class Refused:
    """A kernel that does not serve an equation: the rule of its row that refuses, and the reason in words."""

    kernel: str
    rule: str
    reason: str


@dataclass(frozen=True)
class Placed:
    """One equation of a step and what serves it.

    runs:      "device", or "host" for what the step's plan computes from host integers (no launch).
    refused:   kernels that are preferred to the chosen one and refuse.
    behind:    kernels of lower preference, with why each would refuse (None: it would serve).
    evidence:  what the row of the table rests on; empty for a kernel that the table lacks.
    launched:  operators launched, in order; None where only their number is known.
    updated:   in a captured graph, its lengths are updated before every replay.
    """

    equation: Equation
    runs: str
    kernel: str
    tier: str
    why: str
    refused: tuple[Refused, ...]
    behind: tuple[tuple[str, str | None], ...]
    evidence: tuple[str, ...]
    launches: int
    launched: tuple[str, ...] | None
    updated: bool
    cost: Cost

    @property
    def layer(self) -> str:
        """The layer it belongs to, such as layers/3; "" outside the layers."""
        found = _LAYER.match(self.equation.scope)
        return found[1] if found else ""


@dataclass(frozen=True)
class StepReport:
    """One step on one chip.

    equations:     every equation of the step in order, those of the host included.
    device_copies: copies inside device memory around the kernels: inputs to fixed addresses, results away from them.
    uploads:       arrays that go up in the one copy; upload_bytes: its size.
    readbacks:     results copied to the host, all awaited together.
    """

    chip: Chip
    execution: str
    equations: tuple[Placed, ...]
    device_copies: int
    uploads: int
    upload_bytes: int
    readbacks: int

    @property
    def on_device(self) -> tuple[Placed, ...]:
        """The equations that the device computes."""
        return tuple(p for p in self.equations if p.runs == "device")

    @property
    def launches(self) -> int:
        """Kernels and copies inside device memory: executions at the ACL boundary, up- and downloads aside."""
        return sum(p.launches for p in self.equations) + self.device_copies

    @property
    def launches_by_layer(self) -> dict[str, int]:
        """Kernel launches of each layer."""
        found: Counter[str] = Counter()
        for placed in self.equations:
            if placed.layer:
                found[placed.layer] += placed.launches
        return dict(found)

    @property
    def launches_per_layer(self) -> int:
        """Kernel launches of a layer, as most layers have them; 0 for a step without layers."""
        counts = Counter(self.launches_by_layer.values()).most_common(1)
        return counts[0][0] if counts else 0

    @property
    def graph_replays(self) -> int:
        """Graphs replayed in a step."""
        return int(self.execution == "graph")

    @property
    def graph_updates(self) -> int:
        """Launches whose lengths are updated before the replay."""
        return sum(p.updated for p in self.equations) if self.execution == "graph" else 0

    @property
    def host_syncs(self) -> int:
        """Times that the host waits for the device to get results."""
        return int(self.readbacks > 0)

    @property
    def h2d_copies(self) -> int:
        """Copies from the host: everything that a step uploads goes in one."""
        return int(self.uploads > 0)

    @cached_property
    def cost(self) -> Cost:
        """FLOPs and bytes of what the device computes, by the ops' cost rules."""
        return sum((p.cost for p in self.on_device), Cost())

    @property
    def memory_ms(self) -> float:
        """Milliseconds to move the bytes at the chip's bandwidth."""
        return memory_ms(self.cost, self.chip)

    @property
    def compute_ms(self) -> float:
        """Milliseconds to do the arithmetic at the chip's peak."""
        return compute_ms(self.cost, self.chip)

    @property
    def floor_ms(self) -> float:
        """Milliseconds that the step cannot go below: see the module's text."""
        return sum(floor_ms(p.cost, self.chip) for p in self.on_device)


def memory_ms(cost: Cost, chip: Chip) -> float:
    """Milliseconds to move the bytes of `cost` at the chip's bandwidth (GB/s)."""
    return cost.bytes / (chip.bandwidth * 1e9) * 1e3


def compute_ms(cost: Cost, chip: Chip) -> float:
    """Milliseconds to do the FLOPs of `cost` at the chip's FP16 cube peak (TFLOP/s), the fastest unit it has."""
    return cost.flops / (chip.tflops * 1e12) * 1e3


def floor_ms(cost: Cost, chip: Chip) -> float:
    """The longer of the two: one kernel can move and compute at the same time."""
    return max(memory_ms(cost, chip), compute_ms(cost, chip))


def report(lowered: Lowered, backend: AscendBackend) -> StepReport:
    """What a lowered step costs on the backend's chip.

    Raises:
        StagingError: a kernel plans by a value that only the device knows.
    """
    parts, values, plans = _planned(lowered)
    numbers = {id(choice): number for choice, number in parts.device}
    equations = []
    for choice in lowered.choices:
        if id(choice) not in numbers:
            equations.append(_on_host(choice))
            continue
        number = numbers[id(choice)]
        equations.append(_placed(choice, backend, number is not None and bool(plans[number].lists)))
    arrays = [values[v] for v in parts.uploads] + [a for plan in plans for a in plan.arrays.values()]
    moved, read = _results(lowered, parts.values)
    is_graph = backend.execution == "graph"
    return StepReport(
        backend.environment.chip,
        backend.execution,
        tuple(equations),
        (_moved_inputs(lowered) + moved) if is_graph else 0,
        len(arrays),
        sum(-(-a.numel() * a.element_size() // ALIGNMENT) * ALIGNMENT for a in arrays),
        read,
    )


def updates_of(lowered: Lowered) -> int:
    """Launches of a step whose lengths a captured graph has updated before every replay."""
    parts, _, plans = _planned(lowered)
    return count_updates(parts, plans)


def _planned(lowered: Lowered) -> tuple[Split, dict[Var, Any], list[Any]]:
    """A step in parts, with the host's values and plans for inputs of zeros: no row has a token then."""
    parts = split(lowered)
    values: dict[Var, Any] = {v: _zeros(v) for v in lowered.program.inputs if v in lowered.host}
    values.update((var, value) for var, value in lowered.program.constants)
    run_host(parts, values)
    return parts, values, make_plans(parts, values)


def _zeros(var: Var) -> torch.Tensor:
    return torch.zeros(tuple(map(int, var.abstract.shape)), dtype=var.abstract.dtype)


def _moved_inputs(lowered: Lowered) -> int:
    """Inputs on the device that a graph wants at a fixed address, so that a step copies them there."""
    placed = {*lowered.bound, *lowered.host, *lowered.fixed}
    return sum(v not in placed for v in lowered.program.inputs)


def _results(lowered: Lowered, on_host: frozenset[Var]) -> tuple[int, int]:
    """How many results are copied inside device memory, and how many to the host."""
    roots = storage_roots(lowered.program)
    leaving = sum(
        isinstance(atom, Var) and atom not in on_host and roots.get(atom, atom) not in lowered.fixed
        for atom in lowered.program.outputs
    )
    return (0, leaving) if lowered.host_results else (leaving, 0)


def _on_host(choice: Choice) -> Placed:
    return Placed(
        choice.equation,
        "host",
        f"host.{choice.equation.op.name}",
        "host",
        "made of host integers alone: computed there by its reference rule, once a step",
        (),
        (),
        ("own",),
        0,
        (),
        False,
        choice.equation.cost(),
    )


def _placed(choice: Choice, backend: AscendBackend, is_updated: bool) -> Placed:
    equation, kernel = choice.equation, choice.kernel
    row = backend.capability(equation.op.name, kernel.name)
    entries = backend.table.get(equation.op.name, [])
    names = [k.name for k in entries]
    place = names.index(kernel.name) if kernel.name in names else len(names)
    return Placed(
        equation,
        "device",
        kernel.name,
        kernel.tier,
        choice.why,
        tuple(
            Refused(r.kernel, _rule(backend, equation, r.kernel, r.reason), r.reason) for r in choice.refused
        ),
        tuple((k.name, k.refuses(equation)) for k in entries[place + 1 :]),
        row.evidence if row is not None else (),
        choice.launches,
        launched(choice, row),
        is_updated,
        equation.cost(),
    )


def _rule(backend: AscendBackend, equation: Equation, kernel: str, reason: str) -> str:
    row = backend.capability(equation.op.name, kernel)
    return "kernel" if row is None else rule_that_refuses(row, equation, backend.environment, reason)


def rule_that_refuses(row: Capability, equation: Equation, environment: Environment, reason: str) -> str:
    """The name of the rule of a row that gave `reason`, in the order in which a row checks its rules."""
    chip = environment.chip
    if chip.family not in row.families:
        return "chip"
    if row.cann and environment.cann and version_key(environment.cann) < version_key(row.cann):
        return "cann"
    if "bound parameter" in reason:
        return "bound_parameter"
    dtype = floating_dtype(equation)
    for limit in row.limits:
        if f"{limit.refuses(equation)} ({limit.source})" == reason:
            return limit.name
    if dtype == torch.bfloat16 and not chip.has_bf16:
        return "chip_dtype"
    if dtype is not None and row.dtypes is not None and dtype not in row.dtypes:
        return "dtype"
    return "schema"


def launched(choice: Choice, row: Capability | None) -> tuple[str, ...] | None:
    """The operators that an equation launches, in order; None where only their number is known."""
    equation, launches = choice.equation, choice.launches
    if launches == 0:
        return ()
    if row is None:
        return (choice.kernel.name,) if launches == 1 else None
    if equation.op.name == "linear" and len(row.operators) == 2:
        plain, biased = row.operators
        return (plain if equation.inputs[2] == Literal(None) else biased,)
    if equation.op.name == "qkv_rotary_write" and len(row.operators) == 2:
        names = _qkv_launched(equation, *row.operators)
    elif len(row.operators) == 1 and row.operators[0] in _ONCE_AN_OPERAND:
        names = row.operators * launches
    else:
        names = row.operators
    return names if len(names) == launches else None


_ONCE_AN_OPERAND = ("npu::npu_rotary_mul", "npu::npu_scatter_nd_update_")


def _qkv_launched(equation: Equation, rotary: str, write: str) -> tuple[str, ...]:
    """Rotary embedding and cache write by stock operators; slices of several rows are copied where it is said."""
    B, T = map(int, equation.operands[0].shape[:2])
    is_strided = B * T > 1
    takes_strides = rotary == "npu::npu_mrope"
    names: list[str] = []
    if is_strided and not takes_strides:
        names += [_COPY, _COPY]
    for norm in equation.inputs[1:3]:
        if norm != Literal(None):
            names += [_COPY] * (is_strided and takes_strides) + ["npu::npu_rms_norm"]
    names += [rotary] * (2 if rotary == "npu::npu_rotary_mul" else 1)
    names += [_COPY] * is_strided
    names += [write] * (2 if write == "npu::npu_scatter_nd_update_" else 1)
    return tuple(names)
