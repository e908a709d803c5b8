"""The Ascend backend: fused operators of torch_npu by a capability table, inside captured graphs.

Importing it needs no torch_npu: a backend for a named chip plans and explains anywhere; only running opens a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch

from atbx.core.backend import Backend
from atbx.core.errors import OptionError
from atbx.kernels.ascend.capability import Capability, Environment
from atbx.kernels.ascend.chips import chip as chip_named
from atbx.kernels.ascend.executable import AscendExecutable
from atbx.kernels.ascend.rules import RULES
from atbx.kernels.ascend.runtime import installed_version, open_device
from atbx.kernels.ascend.table import FORMS, rows

ENTRY_POINT = "atbx.kernels.ascend"
"""Entry point group by which other packages add kernels: each names a function that takes the `Backend`."""

EXECUTIONS = ("graph", "eager")


@dataclass
class AscendBackend(Backend):
    """The backend with what its choices rest on: chip and versions, the rows of the table, how it runs."""

    environment: Environment = None  # type: ignore[assignment]
    capabilities: tuple[Capability, ...] = ()
    execution: str = "graph"

    def capability(self, op: str, kernel: str) -> Capability | None:
        """The row of a kernel, or None for one that an entry point added."""
        return next((row for row in self.capabilities if (row.op, row.kernel) == (op, kernel)), None)


def backend(
    chip: str | None = None,
    *,
    index: int = 0,
    execution: str = "graph",
    lengths: str = "update",
    torch_npu: str | None = None,
    cann: str | None = None,
) -> Backend:
    """The Ascend backend.

    chip:      plan and explain for this chip, with no device opened; None opens NPU number `index`.
    execution: "graph" captures and replays a graph a variant; "eager" launches every kernel in every step.
    lengths:   how attention is told lengths inside a graph: "update" (host lists, updated before every replay) or
               "mask" (a mask on the device, no update).
    torch_npu, cann: versions to plan for, where a chip is named; None is the installed torch_npu, and any CANN.

    Raises:
        OptionError: an unknown option. UnsupportedError: an unknown chip, no torch_npu, or no such NPU.
    """
    for name, value, allowed in (("execution", execution, EXECUTIONS), ("lengths", lengths, FORMS)):
        if value not in allowed:
            raise OptionError("unknown option", where=name, expected=f"one of {allowed}", found=value)
    device = None if chip is not None else open_device(index)
    if device is not None:
        environment = device.environment
    else:
        assert chip is not None
        environment = Environment(chip_named(chip), torch_npu or installed_version(), cann)

    def executable(lowered: Any, preparer: Any) -> AscendExecutable:
        found = device or open_device(index)
        if found.environment.chip != environment.chip:
            raise OptionError(
                "this backend was planned for another chip",
                where="chip",
                expected=environment.chip.name,
                found=found.environment.chip.name,
            )
        return AscendExecutable(lowered, preparer, found, is_eager=execution == "eager")

    made = AscendBackend(
        "npu",
        # The name 'npu' exists only once torch_npu is loaded; this is the same device.
        torch.device("privateuseone", index),
        rules=list(RULES),
        executable=executable,
        accepts=("cpu",),
        free_bytes=None if device is None else device.free_bytes,
        environment=environment,
        capabilities=rows(lengths),
        execution=execution,
    )
    for row in made.capabilities:
        made.add(row.kernel_for(environment))
    for entry in entry_points(group=ENTRY_POINT):
        entry.load()(made)
    return made
