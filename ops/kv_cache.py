"""KV caches as values: an arena of keys and values, the rows a batch uses of it, and how many slots of each are filled.

Every function takes a cache and returns another. The arena's tensors never move; `attend` stages a write and then
attention over the filled slots, and a compiled step updates the arena in place because the cache is donated to it.
The functions are the same for dense rows (`KVCache`) and for pages (`PagedCache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from atbx.core.abstract import Abstract
from atbx.core.arena import Arena, ArenaValue
from atbx.core.donation import taking
from atbx.core.errors import CacheStateError, OptionError, TreeError
from atbx.core.trees import node, static_field
from atbx.ops import paged_cache
from atbx.ops.attention import ATTENTION, KV_WRITE
from atbx.ops.cache_spec import (
    CacheSpec,
    LayerCache,
    PagedSpec,
    arena_like,
    check_counts,
    check_extent,
    check_rows,
    check_shorter,
)
from atbx.ops.elementwise import add
from atbx.ops.paged_cache import PagedCache

__all__ = [
    "CacheSpec",
    "KVCache",
    "LayerCache",
    "PagedCache",
    "PagedSpec",
    "append",
    "attend",
    "fork",
    "init",
    "init_paged",
    "load",
    "open_arena",
    "over_arena",
    "reserve",
    "save",
    "select",
    "truncate",
]


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

    @property
    def places(self) -> Any:
        """Where rows lie in the arena, as the ops take it: [B] rows."""
        return self.rows

    def advance(self, counts: Any) -> KVCache:
        """The cache after `counts` [B] tokens were written."""
        return replace(self, lengths=add(self.lengths, counts))

    def with_extent(self, extent: int) -> KVCache:
        """The same state, read through another extent."""
        check_extent(extent, self.capacity)
        return replace(self, extent=extent)

    def part(self, rows: Sequence[int], lengths: torch.Tensor) -> KVCache:
        """Some rows for one step, holding `lengths`; put the arena that the step returns into the whole cache."""
        return replace(self, rows=self.rows[list(rows)], lengths=lengths)

    def abstract_part(self, rows: int) -> KVCache:
        """What `part` gives for any `rows` rows, as far as planning needs to know it."""
        places, lengths = (Abstract(shape, torch.int64) for shape in ((rows,), (rows,)))
        return replace(self, rows=places, lengths=lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.arena.arena.nbytes


AnyCache = TypeVar("AnyCache", KVCache, PagedCache)

init_paged = paged_cache.init


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
    spec.check(dtype, batch=batch, capacity=capacity, chunk=chunk)
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


def open_arena(
    arena: Arena, spec: CacheSpec, rows: int, *, capacity: int, chunk: int
) -> KVCache | PagedCache:
    """An empty cache of `rows` rows over an arena that `spec` described, of the kind that it asks for."""
    if isinstance(spec, PagedSpec):
        return paged_cache.over_blocks(arena, spec, rows, capacity=capacity)
    return over_arena(arena, spec, range(rows), capacity=capacity, chunk=chunk)


def append(cache: AnyCache, k: Any, v: Any, *, layer: int, counts: Any) -> AnyCache:
    """Write the first counts[b] tokens of k, v [B,T,K,D] behind what row b holds; lengths stay (see `advance`).

    Raises:
        CapacityError: a row would exceed the extent, a chunk its ring, or a block that it needs was not reserved.
        CacheStateError: a token would be written to a slot that another row holds. OptionError: no such layer.
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
        cache.places,
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
    cache: AnyCache,
    *,
    layer: int,
    counts: Any,
    scale: float,
    causal: bool = True,
    soft_cap: float | None = None,
    slopes: Any = None,
    sinks: Any = None,
) -> tuple[Any, AnyCache]:
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
        CapacityError, CacheStateError: as `append`.
    """
    cache = append(cache, k, v, layer=layer, counts=counts)
    tree = cache.arena.tree
    out = ATTENTION(
        q,
        tree["k"][layer],
        tree["v"][layer],
        cache.places,
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


def reserve(cache: AnyCache, counts: Sequence[int] | torch.Tensor) -> AnyCache:
    """The cache with room for counts[b] more tokens of row b, to be called on the host before a step.

    Dense rows always have their room; a paged cache takes blocks for it, and copies a shared block that a row is
    about to write to. The old value is used up either way, as by a compiled step.

    Raises:
        CapacityError: a row would exceed its capacity, or more blocks are needed than are free; nothing changed then.
    """
    if isinstance(cache, PagedCache):
        return paged_cache.reserve(cache, counts)
    cache.arena.check("reserve(cache)")
    check_counts(torch.as_tensor(counts).tolist(), cache.lengths.tolist(), cache.capacity)
    with taking:
        cache.arena.check("reserve(cache)")
        cache.arena.arena.generation += 1
    return replace(cache, arena=cache.arena.arena.value())


def truncate(cache: AnyCache, lengths: Sequence[int] | torch.Tensor) -> AnyCache:
    """The cache with rows cut back to `lengths` [B] tokens (a rejected draft, say).

    Raises:
        CapacityError: a length is negative or above what the row holds.
        CacheStateError: a windowed layer of a dense cache no longer holds the keys that the shortened row would need.
    """
    if isinstance(cache, PagedCache):
        return paged_cache.truncate(cache, lengths)
    cache.arena.check("truncate(cache)")
    wanted = torch.as_tensor(lengths, dtype=torch.int64)
    check_shorter(wanted, cache.lengths)
    reach = cache.lengths if cache.reach is None else torch.maximum(cache.lengths, cache.reach)
    # A row cut to nothing starts anew.
    reach = torch.where(wanted == 0, 0, reach)
    slots = [cache.spec.slots(i, cache.capacity, cache.chunk) for i in range(len(cache.spec.layers))]
    rings = [
        (i, layer.window, slots[i]) for i, layer in enumerate(cache.spec.layers) if layer.window is not None
    ]
    host = wanted.tolist(), cache.lengths.tolist(), reach.tolist()
    for row, (new, old, most) in enumerate(zip(*host, strict=True)):
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


def fork(cache: AnyCache) -> AnyCache:
    """An independent copy: neither cache ever sees what is written to the other."""
    if isinstance(cache, PagedCache):
        return paged_cache.fork(cache)
    return _gathered(cache, cache.rows.tolist(), cache.lengths, cache.reach)


def select(cache: AnyCache, indices: Sequence[int]) -> AnyCache:
    """The cache whose row i is this one's row indices[i]: dropped, reordered or repeated rows.

    Without repetition nothing is copied: rows of an arena are only named anew. Repeated rows are copied in a dense
    cache; in a paged one they share their blocks until one of them writes.

    Raises:
        CapacityError: an index is out of range.
    """
    if isinstance(cache, PagedCache):
        return paged_cache.select(cache, indices)
    cache.arena.check("select(cache)")
    check_rows(list(indices), cache.rows.shape[0])
    chosen = torch.tensor(list(indices), dtype=torch.int64)
    rows, lengths = cache.rows[chosen], cache.lengths[chosen]
    reach = None if cache.reach is None else cache.reach[chosen]
    if len(set(rows.tolist())) == len(rows):
        return replace(cache, rows=rows, lengths=lengths, reach=reach)
    return _gathered(cache, rows.tolist(), lengths, reach)


def _gathered(cache: KVCache, rows: list[int], lengths: torch.Tensor, reach: torch.Tensor | None) -> KVCache:
    tree = cache.arena.tree
    copied = {
        name: [arena_like(leaf, len(rows)).copy_(leaf[rows]) for leaf in leaves]
        for name, leaves in tree.items()
    }
    fresh = torch.arange(len(rows), dtype=torch.int64)
    reach = None if reach is None else reach.clone()
    arena = cache.arena.replaced(copied)
    return replace(cache, arena=arena, rows=fresh, lengths=lengths.clone(), reach=reach)


def save(cache: AnyCache) -> dict[str, Any]:
    """The cache as a plain tree of tensors (live rows only), to be written with `checkpoints.write_tree`."""
    if isinstance(cache, PagedCache):
        return paged_cache.save(cache)
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


def load(tree: dict[str, Any], spec: CacheSpec) -> KVCache | PagedCache:
    """The cache that `save` made a tree of, dense or paged as it was.

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
    if "tables" in tree:
        return paged_cache.load(tree, spec)
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
