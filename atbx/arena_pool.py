"""Arenas that the generator owns: handed to one run at a time, kept for the next run of the same shape."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from atbx.core.abstract import Abstract
from atbx.core.arena import Arena
from atbx.kernels.ascend.cache import empty_arena
from atbx.ops.kv_cache import CacheSpec


class ArenaPool:
    """Free arenas by (rows, capacity, chunk); the least recently used are dropped past `keep`.

    trash: slots behind each arena, which kernels that write every token of a step need for its padding.
    """

    def __init__(
        self, spec: CacheSpec, dtype: torch.dtype, *, device: torch.device, trash: int = 0, keep: int = 4
    ) -> None:
        self.spec, self.dtype, self.keep = spec, dtype, keep
        self.device, self.trash = device, trash
        self._free: OrderedDict[int, tuple[tuple[int, int, int], Arena]] = OrderedDict()
        self._lock = threading.Lock()

    def nbytes(self, rows: int, capacity: int, chunk: int) -> int:
        """Bytes that `take` would allocate: 0 where a free arena of the shape is kept."""
        with self._lock:
            if any(shape == (rows, capacity, chunk) for shape, _ in self._free.values()):
                return 0
        behind = (
            sum(2 * c.kv_heads * c.head_size for c in self.spec.layers) * self.trash * self.dtype.itemsize
        )
        return self.spec.nbytes(rows, capacity, self.dtype, chunk) + behind

    def take(self, rows: int, capacity: int, chunk: int) -> Arena:
        """A free arena of this shape, or a new one; its slots hold anything."""
        with self._lock:
            for key, (shape, arena) in self._free.items():
                if shape == (rows, capacity, chunk):
                    del self._free[key]
                    return arena
        described = self.spec.abstract(rows, capacity, self.dtype, chunk)
        return Arena({name: [self._empty(a) for a in leaves] for name, leaves in described.items()})

    def _empty(self, described: Abstract) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.empty(described.shape, dtype=described.dtype)
        return empty_arena(described.shape, described.dtype, self.device, self.trash)

    def give_back(self, arena: Arena, rows: int, capacity: int, chunk: int) -> None:
        """Keep an arena for the next run, unless a step on it was interrupted."""
        if arena.interrupted:
            return
        with self._lock:
            self._free[id(arena)] = ((rows, capacity, chunk), arena)
            while len(self._free) > self.keep:
                self._free.popitem(last=False)
