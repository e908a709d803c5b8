"""The budget of captured graphs: how many streams a device spares for them, and which graphs are kept within it.

A captured graph takes streams of its device, and a device that has none left refuses every further capture (207008).
What one graph takes is vllm-ascend's rule, used until it was replaced by catching that error: one stream for the graph
and one for each launch in it whose lengths are updated. Nobody measured it here, so it is a bound to plan by.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from atbx.core.errors import CapacityError
from atbx.kernels.ascend.chips import RESERVED_STREAMS, Chip
from atbx.kernels.ascend.lowering import Split

RULE = "one stream a graph and one for each launch in it whose lengths are updated (vllm-ascend, not measured here)"


def usable_streams(chip: Chip) -> int:
    """Streams of a device that captures may take: all but those that the runtime keeps for itself."""
    return chip.streams - RESERVED_STREAMS


def streams_of_graph(updates: int) -> int:
    """Streams that a captured graph takes with `updates` launches whose lengths are updated."""
    return 1 + updates


def count_updates(split: Split, plans: Sequence[Any]) -> int:
    """Launches of a step that take lengths from the host, each of which a graph records to be updated.

    plans: the step's host plans (see `lowering.make_plans`), for any values.
    """
    return sum(number is not None and bool(plans[number].lists) for _, number in split.device)


@dataclass(frozen=True)
class _Kept:
    graph: Any
    streams: int


class GraphBudget:
    """The captured graphs of one device, of all its executables, within its streams; the least recently used goes.

    usable: streams that all graphs together may take.
    """

    def __init__(self, usable: int) -> None:
        self.usable = usable
        self.dropped = 0
        self._kept: OrderedDict[tuple[int, Hashable], _Kept] = OrderedDict()
        self._owners: set[int] = set()
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def streams(self) -> int:
        """Streams that the kept graphs take."""
        with self._open():
            return self._used()

    @property
    def graphs(self) -> int:
        """Graphs that are kept."""
        with self._open():
            return len(self._kept)

    def _used(self) -> int:
        return sum(kept.streams for kept in self._kept.values())

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            self._drop_gone()
            yield

    def _drop_gone(self) -> None:
        while self._gone:
            owner = self._gone.popleft()
            self._owners.discard(owner)
            for key in [key for key in self._kept if key[0] == owner]:
                del self._kept[key]

    def get(self, owner: object, key: Hashable) -> Any:
        """The graph that `owner` captured for `key`, now the most recently used one; None if it is not kept."""
        with self._open():
            kept = self._kept.get((id(owner), key))
            if kept is None:
                return None
            self._kept.move_to_end((id(owner), key))
            return kept.graph

    def make_room(self, owner: object, streams: int, most: int, wait: Callable[[], None]) -> None:
        """Drop graphs until one of `streams` streams fits, and `owner` has fewer than `most`.

        wait: waits for the device; called once before a graph is dropped, because one may still be replayed.

        Raises:
            CapacityError: the device has too few streams for this one graph; nothing was dropped then.
        """
        if streams > self.usable:
            raise CapacityError(
                "a captured graph needs more streams than the device spares for graphs",
                where="capture",
                expected=f"at most {self.usable} streams",
                found=f"{streams} ({RULE})",
                hint='lengths="mask" needs one stream a graph; execution="eager" needs none',
            )
        with self._open():
            going = self._going(id(owner), streams, most)
            if not going:
                return
            wait()
            for key in going:
                del self._kept[key]
            self.dropped += len(going)

    def _going(self, owner: int, streams: int, most: int) -> list[tuple[int, Hashable]]:
        """The graphs to drop, the least recently used ones: first of this owner past its number, then of anyone."""
        own = [key for key in self._kept if key[0] == owner]
        going = own[: max(0, len(own) - most + 1)]
        left = self._used() - sum(self._kept[key].streams for key in going)
        for key, kept in self._kept.items():
            if left + streams <= self.usable:
                break
            if key not in going:
                going.append(key)
                left -= kept.streams
        return going

    def put(self, owner: object, key: Hashable, graph: Any, streams: int) -> None:
        """Keep a graph that was captured after `make_room`; it goes with its owner at the latest."""
        with self._open():
            if id(owner) not in self._owners:
                self._owners.add(id(owner))
                weakref.finalize(owner, self._forget, id(owner)).atexit = False
            self._kept[(id(owner), key)] = _Kept(graph, streams)

    def _forget(self, owner: int) -> None:
        self._gone.append(owner)
        # A collection can end an owner at any point, in the midst of the methods above too; they clean up next time.
        if self._lock.acquire(blocking=False):
            try:
                self._drop_gone()
            finally:
                self._lock.release()


@functools.cache
def budget_of(index: int, chip: Chip) -> GraphBudget:
    """The budget of NPU number `index`, one for all that this process captures there."""
    return GraphBudget(usable_streams(chip))
