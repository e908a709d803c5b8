"""KV caches as values: an arena of keys and values, the rows a batch uses of it, and how many slots of each are filled.

Every function takes a cache and returns another. The arena's tensors never move; `attend` stages a write and then
attention over the filled slots, and a compiled step updates the arena in place because the cache is donated to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atbx.core.abstract import Abstract, tree_bytes
from atbx.core.arena import Arena, ArenaValue
from atbx.core.errors import CacheStateError, CapacityError, DTypeError, OptionError, TreeError
from atbx.core.trees import node, static_field
from atbx.ops.attention import ATTENTION, KV_WRITE
from atbx.ops.elementwise import add


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


@node
class KVCache:
    """The state of a batch: `rows` [B] of the arena, `lengths` [B] filled slots; both int64.

    arena:    keys and values, {"k": [L of [R,S,K,D]], "v": [...]}.
    extent:   slots that a step may read and write, a bucket at or below `capacity`.
    capacity: tokens that a row can hold.
    chunk:    most tokens that a windowed arena takes at once.
    reach:    None, or (after a truncation of a ring that had wrapped) the most tokens that each row ever held [B]: the
              ring lost what these tokens overwrote, however short the row is now.
    """

    arena: ArenaValue
    rows: Any
    lengths: Any
    spec: CacheSpec = static_field()
    extent: int = static_field()
    capacity: int = static_field()
    chunk: int = static_field()
    reach: Any = None

    def advance(self, counts: Any) -> KVCache:
        """The cache after `counts` [B] tokens were written."""
        return replace(self, lengths=add(self.lengths, counts))

    def with_extent(self, extent: int) -> KVCache:
        """The same state, read through another extent."""
        if not 1 <= extent <= self.capacity:
            raise CapacityError("extent outside the arena", expected=f"1 to {self.capacity}", found=extent)
        return replace(self, extent=extent)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.arena.arena.nbytes


def init(
    spec: CacheSpec,
    *,
    batch: int,
    capacity: int,
    dtype: torch.dtype,
    chunk: int | None = None,
    device: torch.device | None = None,
) -> KVCache:
    """An empty cache for `batch` rows of at most `capacity` tokens.

    chunk is the most tokens written at once (default: capacity); it sizes the rings of windowed layers.

    Raises:
        OptionError: a size is not positive, or `spec` has no layer. DTypeError: dtype is not floating point.
    """
    chunk = capacity if chunk is None else chunk
    if not spec.layers:
        raise OptionError("a cache needs a layer", where="spec.layers", expected="1 or more", found=0)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise DTypeError("keys and values are floating point", where="dtype", found=repr(dtype))
    for name, value in (("batch", batch), ("capacity", capacity), ("chunk", chunk)):
        if value < 1:
            raise OptionError("a cache needs a positive size", where=name, expected="1 or more", found=value)
    described = spec.abstract(batch, capacity, dtype, chunk)
    tree = {
        name: [torch.empty(a.shape, dtype=a.dtype, device=device) for a in leaves]
        for name, leaves in described.items()
    }
    return over_arena(Arena(tree), spec, range(batch), capacity=capacity, chunk=chunk)


def over_arena(arena: Arena, spec: CacheSpec, rows: Sequence[int], *, capacity: int, chunk: int) -> KVCache:
    """An empty cache over rows of an arena that exists."""
    index = torch.tensor(list(rows), dtype=torch.int64)
    return KVCache(arena.value(), index, torch.zeros_like(index), spec, capacity, capacity, chunk)


def append(cache: KVCache, k: Any, v: Any, *, layer: int, counts: Any) -> KVCache:
    """Write the first counts[b] tokens of k, v [B,T,K,D] behind what row b holds; lengths stay (see `advance`).

    Raises:
        CapacityError: a row would exceed the extent, or a chunk its ring. OptionError: no such layer.
    """
    layers = len(cache.spec.layers)
    if not 0 <= layer < layers:
        # A negative index would write to one layer and read another.
        raise OptionError("no such layer", where="layer", expected=f"0 to {layers - 1}", found=layer)
    tree = cache.arena.tree
    keys, values = KV_WRITE(
        k,
        v,
        tree["k"][layer],
        tree["v"][layer],
        cache.rows,
        cache.lengths,
        counts,
        window=cache.spec.layers[layer].window,
        extent=cache.extent,
    )
    updated = {"k": _with(tree["k"], layer, keys), "v": _with(tree["v"], layer, values)}
    return replace(cache, arena=cache.arena.replaced(updated))


def _with(items: list[Any], index: int, item: Any) -> list[Any]:
    return [*items[:index], item, *items[index + 1 :]]


def attend(
    q: Any,
    k: Any,
    v: Any,
    cache: KVCache,
    *,
    layer: int,
    counts: Any,
    scale: float,
    causal: bool = True,
    soft_cap: float | None = None,
    slopes: Any = None,
    sinks: Any = None,
) -> tuple[Any, KVCache]:
    """Write k and v to the cache, then attend over what each row holds, the new tokens included.

    q:      [B, T, H, D]; k, v: [B, T, K, D], H a multiple of K (MHA, GQA, MQA).
    counts: [B] real tokens of each row; token t of row b stands at position lengths[b] + t, and tokens past the
            count write nothing and give zeros.
    scale:  factor on scores; there is no default, because a forgotten one is a silent error.
    causal: a token sees itself and earlier ones only. The layer's window W (from the cache's spec) keeps the last
            W of those, the token itself included.
    soft_cap: scores become cap * tanh(score / cap). slopes [H]: ALiBi, slope * (key - query position) is added.
    sinks [H]: one extra logit a head in the softmax's denominator.

    Returns the result [B, T, H, D] and the cache with the tokens written; call `cache.advance(counts)` once after the
    last layer.

    Raises:
        CapacityError: a row would exceed the extent, or a chunk its ring.
    """
    cache = append(cache, k, v, layer=layer, counts=counts)
    tree = cache.arena.tree
    out = ATTENTION(
        q,
        tree["k"][layer],
        tree["v"][layer],
        cache.rows,
        cache.lengths,
        counts,
        slopes,
        sinks,
        scale=scale,
        extent=cache.extent,
        window=cache.spec.layers[layer].window,
        soft_cap=soft_cap,
        causal=causal,
    )
    return out, cache


def truncate(cache: KVCache, lengths: Sequence[int] | torch.Tensor) -> KVCache:
    """The cache with rows cut back to `lengths` [B] tokens (a rejected draft, say).

    Raises:
        CapacityError: a length is negative or above what the row holds.
        CacheStateError: a windowed layer no longer holds the keys that the shortened row would need.
    """
    cache.arena.check("truncate(cache)")
    wanted = torch.as_tensor(lengths, dtype=torch.int64)
    if wanted.shape != cache.lengths.shape:
        raise CapacityError(
            "one length a row", expected=tuple(cache.lengths.shape), found=tuple(wanted.shape)
        )
    reach = cache.lengths if cache.reach is None else torch.maximum(cache.lengths, cache.reach)
    # A row cut to nothing starts anew.
    reach = torch.where(wanted == 0, 0, reach)
    slots = [cache.spec.slots(i, cache.capacity, cache.chunk) for i in range(len(cache.spec.layers))]
    rings = [
        (i, layer.window, slots[i]) for i, layer in enumerate(cache.spec.layers) if layer.window is not None
    ]
    host = wanted.tolist(), cache.lengths.tolist(), reach.tolist()
    for row, (new, old, most) in enumerate(zip(*host, strict=True)):
        if not 0 <= new <= old:
            raise CapacityError(
                "cannot truncate to this length", where=f"row {row}", expected=f"0 to {old}", found=new
            )
        for layer, window, size in rings:
            if new not in (0, old) and max(0, new - window + 1) < most - size:
                raise CacheStateError(
                    f"layer {layer} keeps a window of {window} tokens in {size} slots, and the keys that "
                    f"length {new} needs were overwritten",
                    where=f"row {row}",
                    expected=f"a length of at least {most - size + window - 1}",
                    found=new,
                )
    has_wrapped = any(most > size for most in host[2] for _, _, size in rings)
    return replace(cache, lengths=wanted, reach=reach if has_wrapped else None)


def fork(cache: KVCache) -> KVCache:
    """An independent copy: neither cache ever sees what is written to the other."""
    return _gathered(cache, cache.rows.tolist(), cache.lengths, cache.reach)


def select(cache: KVCache, indices: Sequence[int]) -> KVCache:
    """The cache whose row i is this one's row indices[i]: dropped, reordered, or (copied) repeated rows.

    Without repetition nothing is copied: rows of an arena are only named anew.

    Raises:
        CapacityError: an index is out of range.
    """
    cache.arena.check("select(cache)")
    batch = cache.rows.shape[0]
    for position, index in enumerate(indices):
        if not 0 <= index < batch:
            raise CapacityError(
                "no such row", where=f"indices[{position}]", expected=f"0 to {batch - 1}", found=index
            )
    chosen = torch.tensor(list(indices), dtype=torch.int64)
    rows, lengths = cache.rows[chosen], cache.lengths[chosen]
    reach = None if cache.reach is None else cache.reach[chosen]
    if len(set(rows.tolist())) == len(rows):
        return replace(cache, rows=rows, lengths=lengths, reach=reach)
    return _gathered(cache, rows.tolist(), lengths, reach)


def _gathered(cache: KVCache, rows: list[int], lengths: torch.Tensor, reach: torch.Tensor | None) -> KVCache:
    tree = cache.arena.tree
    copied = {name: [leaf[rows].clone() for leaf in leaves] for name, leaves in tree.items()}
    fresh = torch.arange(len(rows), dtype=torch.int64)
    reach = None if reach is None else reach.clone()
    arena = cache.arena.replaced(copied)
    return replace(cache, arena=arena, rows=fresh, lengths=lengths.clone(), reach=reach)


def save(cache: KVCache) -> dict[str, Any]:
    """The cache as a plain tree of tensors (live rows only), to be written with `checkpoints.write_tree`."""
    copy = fork(cache)
    tree = copy.arena.tree
    longest = max(1, int(copy.lengths.max()))
    keep = {
        name: [leaf[:, : min(longest, leaf.shape[1])].contiguous() for leaf in tree[name]]
        for name in ("k", "v")
    }
    sizes = torch.tensor([cache.capacity, cache.chunk], dtype=torch.int64)
    reach = {} if copy.reach is None else {"reach": copy.reach}
    return {"lengths": copy.lengths, "sizes": sizes, **reach, **keep}


def load(tree: dict[str, Any], spec: CacheSpec) -> KVCache:
    """The cache that `save` made a tree of.

    Raises:
        TreeError: the tree does not fit `spec`.
    """
    missing = [name for name in ("k", "v", "lengths", "sizes") if name not in tree]
    if missing:
        raise TreeError("this is no saved KV cache", mismatches=tuple(f"{name}: missing" for name in missing))
    problems = [
        f"{name}: expected {len(spec.layers)} layers, found {len(tree[name])}"
        for name in ("k", "v")
        if len(tree[name]) != len(spec.layers)
    ]
    if problems:
        raise TreeError("a saved KV cache does not fit the model", mismatches=tuple(problems))
    capacity, chunk = (int(n) for n in tree["sizes"].tolist())
    lengths = tree["lengths"].clone()
    dtype = tree["k"][0].dtype
    cache = init(spec, batch=lengths.shape[0], capacity=capacity, dtype=dtype, chunk=chunk)
    problems += [
        f"lengths/{row}: expected 0 to {capacity}, found {length}"
        for row, length in enumerate(lengths.tolist())
        if not 0 <= length <= capacity
    ]
    for name in ("k", "v"):
        for layer, (saved, target) in enumerate(zip(tree[name], cache.arena.tree[name], strict=True)):
            fits = saved.shape[0] == target.shape[0] and saved.shape[2:] == target.shape[2:]
            if not fits or saved.shape[1] > target.shape[1] or saved.dtype != target.dtype:
                expected, found = (f"{tuple(t.shape)} {t.dtype}" for t in (target, saved))
                problems.append(f"{name}/{layer}: expected {expected}, found {found}")
            else:
                target[:, : saved.shape[1]] = saved
    if problems:
        raise TreeError("a saved KV cache does not fit the model", mismatches=tuple(problems))
    reach = tree.get("reach")
    return replace(cache, lengths=lengths, reach=None if reach is None else reach.clone())
