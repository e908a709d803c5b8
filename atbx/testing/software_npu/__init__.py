"""The real torch_npu on a software device: no NPU, no CANN.

torch_npu is linked to the CANN libraries; here it finds stand-ins, built once, that keep the device's books: memory,
streams, events, graphs. Its own C++ kernels run down to the call of an aclnn, ATB or aclop function, so its checks,
allocations, hidden copies and kernel names are real. There a documented limit may refuse the call with the real code,
and a rule (or torch's CPU kernel) fills the bytes when the stream runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from atbx.core.errors import AtbxError, UnsupportedError
from atbx.testing.software_npu.boundary import Boundary, prepare_environment
from atbx.testing.software_npu.building import standin_folder, wheel_folder
from atbx.testing.software_npu.device import Counts, SoftwareNpu
from atbx.testing.software_npu.kernels import Kernels

__all__ = ["CHIPS", "Counts", "SoftwareNpu", "current", "software_npu"]

CHIPS = (
    "Ascend910B1",
    "Ascend910B2",
    "Ascend910B3",
    "Ascend910B4",
    "Ascend910_9392",
    "Ascend310P3",
    "Ascend910A",
)
"""Chips that the device plays."""

_MEMORY = {"Ascend310P3": 24 << 30, "Ascend910A": 32 << 30}
_STREAMS = {"Ascend310P3": 1024, "Ascend910A": 1024}

_process: dict[str, Any] = {}


@contextmanager
def software_npu(
    chip: str = "Ascend910B3",
    cann: str = "9.1.0",
    devices: int = 1,
    memory_limit: int | None = None,
    streams: int | None = None,
) -> Iterator[SoftwareNpu]:
    """Run the real torch_npu on a software device.

    chip: one of `CHIPS`. cann: the CANN release that it says it is. memory_limit: bytes a device (default: that of
    the chip, 64 GiB on A2; it is taken only as it is used). streams: how many captured graphs may take together
    (default: 1800 of the 2048 of an A2).

    Enter it before torch_npu is imported for the first time. It may be entered again in the same process; torch_npu
    asks for chip, devices and CANN once, so these must then be the same.

    Raises:
        UnsupportedError: torch_npu or a C++ compiler is missing; torch_npu was imported without this; another chip,
            CANN or number of devices than the first time; an unknown chip.
    """
    if chip not in CHIPS:
        raise UnsupportedError(f"the software NPU does not play {chip!r}", expected=", ".join(CHIPS))
    limit = memory_limit if memory_limit is not None else _MEMORY.get(chip, 64 << 30)
    budget = streams if streams is not None else _STREAMS.get(chip, 1800)
    first = {"chip": chip, "cann": cann, "devices": devices}
    if not _process:
        _start(first, limit, budget)
    elif _process["first"] != first:
        raise UnsupportedError(
            "torch_npu asks its device for chip, CANN and number once, and was given others in this process",
            expected=str(_process["first"]),
            found=str(first),
            hint="Use one process for each chip, such as python -m atbx.testing.software_npu --chip NAME SCRIPT",
        )
    if _process["entered"]:
        raise UnsupportedError("the software NPU is entered already in this process")
    boundary, kernels = _process["boundary"], _process["kernels"]
    boundary.configure(chip, cann, devices, limit, budget)
    boundary.reset()
    kernels.active = True
    _process["entered"] = SoftwareNpu(boundary, kernels, chip, cann, devices, limit, budget)
    try:
        yield _process["entered"]
    finally:
        boundary.run_device(-1)
        _process["entered"] = None


def current() -> SoftwareNpu:
    """The software NPU that this process is on.

    Raises:
        AtbxError: there is none.
    """
    device = _process.get("entered")
    if device is None:
        raise AtbxError(
            "no software NPU is entered in this process", hint="with software_npu() as device: ..."
        )
    return device


def _start(first: dict[str, Any], memory_limit: int, streams: int) -> None:
    if "torch_npu" in sys.modules:
        raise UnsupportedError(
            "torch_npu is imported already, on whatever libraries it found",
            hint="Enter software_npu() before anything imports torch_npu",
        )
    prepare_environment()
    boundary = Boundary(standin_folder())
    boundary.configure(first["chip"], first["cann"], first["devices"], memory_limit, streams)
    import torch_npu  # type: ignore[import-not-found,unused-ignore]

    if not boundary.attach(wheel_folder() / "lib" / "libtorch_npu.so"):
        raise AtbxError(
            "this torch_npu has no task queue that the software NPU knows", found=torch_npu.__version__
        )
    kernels = Kernels(boundary, torch_npu)
    kernels.chip, kernels.cann = first["chip"], first["cann"]
    kernels.install()
    _process.update(boundary=boundary, kernels=kernels, first=first, entered=None)
