"""The software device as its user holds it: what was launched, what it cost, what shall fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from atbx.testing.software_npu.boundary import Boundary
from atbx.testing.software_npu.kernels import Kernels

NOT_MODELLED = (
    "time: nothing here says how fast a kernel is",
    "rounding: results are those of torch on a CPU, not of the device's kernels",
    "HCCL: no collective communication",
)


@dataclass(frozen=True)
class Counts:
    """What happened at the ACL boundary since the reset.

    launches: kernel name to number of launches (aclnn, ATB, aclop, copies and fills on the device), eager and
    captured ones alike; replays: graphs started; graph_updates and update_seconds: task groups updated and the host
    time between begin and end; h2d_copies, d2h_copies: by "pinned_async", "pageable_async", "pinned_blocking",
    "pageable_blocking"; host_syncs: waits of the host for a stream, an event or a device; bytes_copied: by direction;
    device_allocations: blocks taken from the device (not those that the caching allocator hands out again).
    """

    launches: dict[str, int] = field(default_factory=dict)
    replays: int = 0
    graph_updates: int = 0
    update_seconds: float = 0.0
    h2d_copies: dict[str, int] = field(default_factory=dict)
    d2h_copies: dict[str, int] = field(default_factory=dict)
    host_syncs: int = 0
    device_allocations: int = 0
    device_frees: int = 0
    bytes_copied: dict[str, int] = field(default_factory=dict)
    bytes_allocated: int = 0
    event_waits: int = 0


class SoftwareNpu:
    """One software NPU (or several): counters, faults on demand, a report."""

    def __init__(
        self,
        boundary: Boundary,
        kernels: Kernels,
        chip: str,
        cann: str,
        devices: int,
        memory_limit: int,
        streams: int,
    ) -> None:
        self._boundary, self._kernels = boundary, kernels
        self.chip, self.cann, self.devices = chip, cann, devices
        self.memory_limit, self.streams = memory_limit, streams

    @property
    def launches(self) -> list[tuple[str, str]]:
        """(kernel, operator) of every launch since the reset, in the order of the ACL boundary."""
        self._settle()
        return self._boundary.launches()

    def counts(self) -> Counts:
        """What happened since the reset."""
        self._settle()
        raw = self._boundary.counters()
        directions = ("h2d", "d2h", "d2d")

        def copies(direction: str) -> dict[str, int]:
            kinds = ("pinned_async", "pageable_async", "pinned_blocking", "pageable_blocking")
            return {kind: raw[f"{direction}_{kind}"] for kind in kinds if f"{direction}_{kind}" in raw}

        return Counts(
            launches=dict(Counter(kernel for kernel, _ in self._boundary.launches())),
            replays=raw.get("replays", 0),
            graph_updates=raw.get("graph_updates", 0),
            update_seconds=(raw.get("update_ended_us", 0) - raw.get("update_began_us", 0)) / 1e6,
            h2d_copies=copies("h2d"),
            d2h_copies=copies("d2h"),
            host_syncs=sum(raw.get(f"{one}_syncs", 0) for one in ("stream", "event", "device")),
            device_allocations=raw.get("device_allocations", 0),
            device_frees=raw.get("device_frees", 0),
            bytes_copied={one: raw[f"{one}_bytes"] for one in directions if f"{one}_bytes" in raw},
            bytes_allocated=raw.get("bytes_allocated", 0),
            event_waits=raw.get("event_waits", 0),
        )

    def reset(self) -> None:
        """Forget launches, counters and injected faults; start torch_npu's queue again if a failure stopped it."""
        self._kernels.restart_queues(self.devices)
        self._boundary.run_device(-1)
        self._boundary.reset()

    def inject(self, kernel: str, code: int, message: str = "", when: str = "launch", times: int = 1) -> None:
        """Fail the next `times` launches of a kernel (-1: all) with an ACL code.

        kernel: as in `launches` ("aclnnRmsNorm", "atb::PagedAttention"). when: "launch" fails the workspace call, at
        once; "execution" fails the stream when it comes to the kernel, which the next wait reports.

        Raises:
            ValueError: another `when`, or a code that is not an error.
        """
        if when not in ("launch", "execution"):
            raise ValueError(f"inject: when={when!r}; expected 'launch' or 'execution'")
        if code == 0:
            raise ValueError("inject: code 0 is success")
        self._boundary.inject(kernel, code, message, when == "execution", times)

    def set_stream_budget(self, streams: int) -> None:
        """Change how many streams captured graphs may take together (one a captured stream, one a task group)."""
        self._boundary.configure(self.chip, self.cann, self.devices, self.memory_limit, streams)

    def set_memory_limit(self, limit: int) -> None:
        """Change how many bytes a device has; what is taken already stays taken."""
        self._boundary.configure(self.chip, self.cann, self.devices, limit, self.streams)

    def memory_used(self, index: int = 0) -> int:
        """Bytes of device memory taken, the caching allocator's reserve included."""
        return self._boundary.used(index)

    def report(self) -> dict[str, Any]:
        """What a report made on this device has to say of it."""
        return {
            "device": "software",
            "chip": self.chip,
            "cann": self.cann,
            "devices": self.devices,
            "memory_limit": self.memory_limit,
            "stream_budget": self.streams,
            "not_modelled": list(NOT_MODELLED),
        }

    def _settle(self) -> None:
        """Let torch_npu's own queue reach the boundary."""
        self._kernels.settle_all(self.devices)
