"""KV arenas as the Ascend kernels want them: rows of whole blocks, with room behind for the padding of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atbx.kernels.ascend.plan import BLOCK
from atbx.ops.kv_cache import CacheSpec


@dataclass(frozen=True)
class BlockedCacheSpec(CacheSpec):
    """A `CacheSpec` whose slots are rounded up to whole blocks, so that a dense arena is served as a paged one."""

    def slots(self, layer: int, capacity: int, chunk: int) -> int:
        """KV slots of a layer, a multiple of the block."""
        return -(-super().slots(layer, capacity, chunk) // BLOCK) * BLOCK


def empty_arena(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, trash: int) -> torch.Tensor:
    """An arena [R,S,K,D] with at least `trash` slots behind it in the same memory.

    It is filled with zeros: kernels that take a mask read unused slots, and zero times zero is no NaN.
    """
    rows, slots, heads, size = shape
    block = slots if slots % BLOCK else BLOCK
    behind = -(-trash // block) * block
    flat = torch.zeros(rows * slots + behind, heads, size, dtype=dtype, device=device)
    return flat[: rows * slots].view(shape)
