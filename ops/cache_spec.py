"""What a model's layers keep in a KV cache, and arenas that keep their room behind when they are copied.

Nothing here knows how slots are laid out: dense rows and pages are both sized by a `CacheSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atbx.core.abstract import Abstract, tree_bytes
from atbx.core.errors import CapacityError, DTypeError, OptionError


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps: K KV heads of D channels, and the sliding window it attends through (None = all)."""

    kv_heads: int
    head_size: int
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_size", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(
                    "a layer keeps a positive number",
                    where=f"LayerCache.{name}",
                    expected="1 or more",
                    found=value,
                )


@dataclass(frozen=True)
class CacheSpec:
    """What every layer of a model keeps."""

    layers: tuple[LayerCache, ...]

    def slots(self, layer: int, capacity: int, chunk: int) -> int:
        """KV slots of a layer: the capacity, or window + chunk - 1 where a window needs fewer.

        Fewer than window + chunk - 1 would let the last token of a chunk overwrite a key that the first still needs.
        """
        window = self.layers[layer].window
        return capacity if window is None else min(capacity, window + chunk - 1)

    def abstract(self, rows: int, capacity: int, dtype: torch.dtype, chunk: int) -> dict[str, list[Abstract]]:
        """Keys and values of every layer as [R, S, K, D]."""

        def leaf(layer: int) -> Abstract:
            spec = self.layers[layer]
            return Abstract((rows, self.slots(layer, capacity, chunk), spec.kv_heads, spec.head_size), dtype)

        return {name: [leaf(i) for i in range(len(self.layers))] for name in ("k", "v")}

    def nbytes(self, rows: int, capacity: int, dtype: torch.dtype, chunk: int = 1) -> int:
        """Bytes of an arena."""
        return tree_bytes(self.abstract(rows, capacity, dtype, chunk))

    def abstract_blocks(self, blocks: int, block_size: int, dtype: torch.dtype) -> dict[str, list[Abstract]]:
        """Keys and values of every layer as [blocks + 1, block_size, K, D]; the last block is the trash."""

        def leaf(layer: LayerCache) -> Abstract:
            return Abstract((blocks + 1, block_size, layer.kv_heads, layer.head_size), dtype)

        return {name: [leaf(layer) for layer in self.layers] for name in ("k", "v")}

    def check(self, dtype: torch.dtype, **sizes: int) -> None:
        """Raise unless a cache of this dtype and these sizes can be made.

        Raises:
            OptionError: a size is not positive, or there is no layer. DTypeError: dtype is not floating point.
        """
        if not self.layers:
            raise OptionError("a cache needs a layer", where="spec.layers", expected="1 or more", found=0)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise DTypeError("keys and values are floating point", where="dtype", found=repr(dtype))
        for name, value in sizes.items():
            if value < 1:
                raise OptionError(
                    "a cache needs a positive size", where=name, expected="1 or more", found=value
                )


@dataclass(frozen=True)
class PagedSpec(CacheSpec):
    """A `CacheSpec` whose arenas are blocks of `block_size` tokens, enough for every row to be full."""

    block_size: int = 128

    def abstract(self, rows: int, capacity: int, dtype: torch.dtype, chunk: int) -> dict[str, list[Abstract]]:
        """Keys and values of every layer as [blocks + 1, block_size, K, D]; windows save nothing."""
        return self.abstract_blocks(rows * -(-capacity // self.block_size), self.block_size, dtype)


def check_extent(extent: int, capacity: int) -> None:
    """Raise CapacityError unless a step of a cache of `capacity` tokens a row may read and write `extent` slots."""
    if not 1 <= extent <= capacity:
        raise CapacityError("extent outside the arena", expected=f"1 to {capacity}", found=extent)


def check_rows(indices: list[int], batch: int) -> None:
    """Raise CapacityError unless every index names one of `batch` rows."""
    for position, index in enumerate(indices):
        if not 0 <= index < batch:
            raise CapacityError(
                "no such row", where=f"indices[{position}]", expected=f"0 to {batch - 1}", found=index
            )


def check_shorter(lengths: torch.Tensor, held: torch.Tensor) -> None:
    """Raise CapacityError unless `lengths` are one length a row, none above what the row holds."""
    if lengths.shape != held.shape:
        raise CapacityError("one length a row", expected=tuple(held.shape), found=tuple(lengths.shape))
    for row, (new, old) in enumerate(zip(lengths.tolist(), held.tolist(), strict=True)):
        if not 0 <= new <= old:
            raise CapacityError(
                "cannot truncate to this length", where=f"row {row}", expected=f"0 to {old}", found=new
            )


def check_counts(counts: list[int], lengths: list[int], capacity: int) -> None:
    """Raise CapacityError unless every row can hold counts[b] tokens behind lengths[b]."""
    if len(counts) != len(lengths):
        raise CapacityError("one count a row", where="counts", expected=len(lengths), found=len(counts))
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if count < 0 or length + count > capacity:
            raise CapacityError(
                "a row of the KV cache cannot hold this many more tokens",
                where=f"row {row}",
                expected=f"0 to {capacity - length} tokens",
                found=count,
            )


def arena_like(leaf: torch.Tensor, rows: int) -> torch.Tensor:
    """An uninitialised arena [rows, S, K, D] like `leaf`, with as much room behind it in the same memory.

    Some devices write the padding of a step behind an arena, so a copy without that room would not serve them.
    """
    inner = leaf[0].numel()
    whole = leaf.untyped_storage().nbytes() // leaf.element_size() - leaf.storage_offset()
    behind = (whole - leaf.numel()) // inner * inner if leaf.is_contiguous() else 0
    flat = torch.empty(rows * inner + max(0, behind), dtype=leaf.dtype, device=leaf.device)
    if leaf.device.type != "cpu":
        # Kernels that take a mask read unused slots too, and zero times zero is no NaN.
        flat.zero_()
    return flat[: rows * inner].view(rows, *leaf.shape[1:])
