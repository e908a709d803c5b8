"""What of a lowered program runs on the host, what is uploaded, and what is launched.

Everything that derives from host integers alone and stays small (rotary angles, slots, uniform numbers, the lengths
after a step) is computed on the host by its reference rule, so it costs no launch and has the same bits as on the CPU.
All that the device needs of it goes up in one copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atbx.core.backend import Choice, HostPlan
from atbx.core.errors import StagingError
from atbx.core.executable import Lowered
from atbx.core.program import Equation, Literal, Var

HOST_BYTES = 2**21
"""Most bytes that an equation may give to run on the host: angles of a chunk of 512 tokens are 256 KiB."""

ALIGNMENT = 64
"""Bytes that every uploaded array starts at a multiple of; device memory is handed out in multiples of 512."""


@dataclass(frozen=True)
class PlanUse:
    """One host plan of a step: equations of equal key over the same operands share it."""

    plan: HostPlan
    key: Hashable
    operands: tuple[Any, ...]


@dataclass(frozen=True)
class Split:
    """A lowered step in parts.

    host:    equations run on the host, in order.
    plans:   host plans, made after them.
    device:  the choices launched on the device, each with the number of its plan or None.
    uploads: host values that a launched kernel reads.
    """

    host: tuple[Equation, ...]
    plans: tuple[PlanUse, ...]
    device: tuple[tuple[Choice, int | None], ...]
    uploads: tuple[Var, ...]
    values: frozenset[Var]


def split(lowered: Lowered) -> Split:
    """Divide a lowered step between host and device.

    Raises:
        StagingError: a kernel plans by a value that only the device knows.
    """
    known = set(lowered.host)
    host: list[Equation] = []
    device: list[tuple[Choice, int | None]] = []
    plans: dict[PlanUse, int] = {}
    wanted: dict[Var, None] = {}
    for choice in lowered.choices:
        equation = choice.equation
        if _runs_on_host(equation, known):
            host.append(equation)
            known.update(equation.outputs)
            continue
        number = None
        planned: set[int] = set()
        plan = choice.kernel.plan
        if plan is not None and not (plan.optional and _is_unknown(equation, plan, known)):
            operands = tuple(_planned(equation, i, known) for i in plan.operands)
            use = PlanUse(plan, plan.key(equation), operands)
            number = plans.setdefault(use, len(plans))
            planned = set(plan.operands)
        device.append((choice, number))
        for index, atom in enumerate(equation.inputs):
            if index not in planned and isinstance(atom, Var) and atom in known:
                wanted[atom] = None
    return Split(tuple(host), tuple(plans), tuple(device), tuple(wanted), frozenset(known))


def _runs_on_host(equation: Equation, known: set[Var]) -> bool:
    """Whether only host values feed an equation, and its results are small."""
    values = list(equation.input_vars())
    return (
        not equation.op.updates
        and all(v in known for v in values)
        and sum(a.nbytes for a in equation.results) <= HOST_BYTES
    )


def _is_unknown(equation: Equation, plan: HostPlan, known: set[Var]) -> bool:
    """Whether an operand that the plan goes by is computed on the device."""
    atoms = (equation.inputs[i] for i in plan.operands)
    return any(isinstance(a, Var) and a not in known for a in atoms)


def _planned(equation: Equation, index: int, known: set[Var]) -> Any:
    atom = equation.inputs[index]
    if isinstance(atom, Var) and atom not in known:
        raise StagingError(
            f"{equation.op.name} plans its launch on the host, so this operand must come from host values",
            where=equation.source or equation.scope or None,
            expected="rows, lengths, counts and positions made from tensors on the CPU",
            found=f"operand {index}, {atom.abstract}, which the device computes",
        )
    return atom


def run_host(split_step: Split, values: dict[Var, Any]) -> None:
    """Run the host's equations over `values`, adding their results."""
    for equation in split_step.host:
        operands = [x.value if isinstance(x, Literal) else values[x] for x in equation.inputs]
        result = equation.op.reference(*operands, **equation.params)
        results = result if isinstance(result, tuple) else (result,)
        values.update(zip(equation.outputs, results, strict=True))


def make_plans(split_step: Split, values: dict[Var, Any]) -> list[Any]:
    """The host plans of a step, bounds checked."""
    made = []
    for use in split_step.plans:
        operands = [x.value if isinstance(x, Literal) else values[x] for x in use.operands]
        made.append(use.plan.make(use.key, *operands))
    return made


class Upload:
    """Where each uploaded array lies in one buffer: pinned on the host, at a fixed address on the device."""

    def __init__(self, arrays: Sequence[torch.Tensor], device: torch.device) -> None:
        offsets, size = [], 0
        for array in arrays:
            offsets.append(size)
            size += -(-array.numel() * array.element_size() // ALIGNMENT) * ALIGNMENT
        self.host = torch.zeros(max(size, ALIGNMENT), dtype=torch.uint8, pin_memory=True)
        self.device = torch.zeros(max(size, ALIGNMENT), dtype=torch.uint8, device=device)
        self.sources = [_view(self.host, o, a) for o, a in zip(offsets, arrays, strict=True)]
        self.targets = [_view(self.device, o, a) for o, a in zip(offsets, arrays, strict=True)]
        self.is_empty = not arrays

    def fill(self, arrays: Sequence[torch.Tensor]) -> None:
        """Put the step's arrays into the pinned buffer."""
        for place, array in zip(self.sources, arrays, strict=True):
            place.copy_(array)

    def send(self) -> None:
        """Start the copy to the device on the current stream."""
        if not self.is_empty:
            self.device.copy_(self.host, non_blocking=True)


def _view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
