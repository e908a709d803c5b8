"""Running ops at once on NPU tensors, outside any compiled function: the kernels of the table, a launch at a time."""

from __future__ import annotations

from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.backend import Backend
from atbx.core.op import Op, abstract_operands
from atbx.core.program import Equation, Literal, Var
from atbx.kernels.ascend.plan import StepPlan
from atbx.kernels.ascend.runtime import open_device


class AscendInterpreter:
    """Applies each op with the kernel that the table gives for it. Values stay pure: an op that updates an operand runs
    on a copy."""

    def __init__(self, backend: Backend, index: int) -> None:
        self.backend = backend
        self._device = open_device(index)

    def apply(self, op: Op, operands: tuple[Any, ...], params: dict[str, Any]) -> Any:
        """The result of one op; operands may lie on the host or on this device."""
        abstracts = abstract_operands(op, operands)
        results = op.results(*abstracts, **params)
        inputs = tuple(Var(a) if isinstance(a, Abstract) else Literal(a) for a in abstracts)
        equation = Equation(op, inputs, tuple(Var(a) for a in results), params)
        kernel = self.backend.choose(equation, frozenset()).kernel
        device = self._device
        with device.npu.device(device.device), device.launching(), torch.no_grad():
            reads = [x.to(device.device) if isinstance(x, torch.Tensor) else x for x in operands]
            for index, _ in op.updates:
                reads[index] = _with_room(reads[index], operands)
            if kernel.plan is not None:
                # Lengths and rows are wanted on the host: reading them waits for the device.
                planned = [operands[i] for i in kernel.plan.operands]
                host = [x.cpu() if isinstance(x, torch.Tensor) else x for x in planned]
                plan = kernel.plan.make(kernel.plan.key(equation), *host)
                arrays = {name: device.place(a) for name, a in plan.arrays.items()}
                reads.append(StepPlan(arrays, plan.lists))
            return kernel.make(equation)(*reads)


def _with_room(arena: torch.Tensor, operands: tuple[Any, ...]) -> torch.Tensor:
    """A copy of an operand that is updated; an arena's has room behind it for the padding tokens of the write."""
    new = operands[0]
    room = int(new.shape[0] * new.shape[1]) if arena.ndim == 4 and isinstance(new, torch.Tensor) else 0
    slots = int(arena.shape[1]) if arena.ndim == 4 else 1
    rows = -(-room // slots)
    padded = torch.cat([arena, torch.zeros(rows, *arena.shape[1:], dtype=arena.dtype, device=arena.device)])
    return padded[: arena.shape[0]]
