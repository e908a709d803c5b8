"""Lengths inside captured graphs: launches that take host lists are recorded as task groups and updated before replay.

A captured launch keeps the lists of capture time, so a replay without an update would attend over stale lengths. Three
things prevent it: the graph waits on an external event that only an update records, a replay that was not preceded by
an update raises, and an update whose names or sizes differ from the record raises before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atbx.core.errors import CacheStateError
from atbx.kernels.ascend.runtime import AscendDevice

Lists = Mapping[str, list[int]]


@dataclass(frozen=True)
class LengthRecord:
    """One recorded launch: `launch(lists)` repeats it with other lengths, on the update stream."""

    label: str
    plan: int
    handle: Any
    launch: Callable[[Lists], None]
    sizes: Mapping[str, int]


class LengthUpdates:
    """The launches of one graph that take lengths from the host."""

    def __init__(self, device: AscendDevice) -> None:
        self._device = device
        self._event: Any = None
        self._records: list[LengthRecord] = []
        self._is_fresh = False

    def __len__(self) -> int:
        return len(self._records)

    def record(self, label: str, plan: int, launch: Callable[[Lists], None], lists: Lists) -> None:
        """Capture one launch as a task group that can be updated; called while the graph is captured."""
        npu = self._device.npu
        stream = npu.current_stream()
        if self._event is None:
            # Once a graph: everything that takes lengths comes after the wait, and updates come before the record.
            self._event = npu.ExternalEvent()
            self._event.wait(stream)
            self._event.reset(stream)
        npu.graph_task_group_begin(stream)
        launch(lists)
        handle = npu.graph_task_group_end(stream)
        sizes = {name: len(values) for name, values in lists.items()}
        self._records.append(LengthRecord(label, plan, handle, launch, sizes))

    def update(self, plans: Sequence[Any]) -> None:
        """Give every recorded launch the lengths of this step's plans.

        Raises:
            CacheStateError: names or sizes of the lists differ from what was recorded; nothing was updated then.
        """
        self._is_fresh = False
        if not self._records:
            return
        for record in self._records:
            found = {name: len(values) for name, values in plans[record.plan].lists.items()}
            if found != record.sizes:
                raise CacheStateError(
                    "a length update does not fit the captured launch",
                    where=record.label,
                    expected=str(dict(record.sizes)),
                    found=str(found),
                )
        npu, stream = self._device.npu, self._device.update_stream
        with npu.stream(stream):
            for record in self._records:
                npu.graph_task_update_begin(stream, record.handle)
                record.launch(plans[record.plan].lists)
                npu.graph_task_update_end(stream)
            self._event.record(stream)
        self._is_fresh = True

    def use(self) -> None:
        """Say that a replay is about to take the lengths of the last update.

        Raises:
            CacheStateError: there was no update since the last replay.
        """
        if self._records and not self._is_fresh:
            raise CacheStateError(
                "a captured graph was about to be replayed with the lengths of an earlier step",
                expected="an update of its lengths before every replay",
                found=f"{len(self._records)} launches not updated",
            )
        self._is_fresh = False
