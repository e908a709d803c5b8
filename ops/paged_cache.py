"""A KV cache in pages: blocks of one arena that the rows of a batch take as they grow, named by block tables.

Position p of row b lies in block tables[b, p // S] at offset p % S (S the block size). `uses` counts how many table
entries name each block: 0 is free, more than 1 is shared. Every function takes a cache and returns another, and all
but `reserve` only make new tables: rows that are repeated share their blocks until one of them is about to write.
`reserve` is called on the host before a step; it takes free blocks and copies a shared one that a row would write to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.arena import Arena, ArenaValue
from atbx.core.donation import taking
from atbx.core.errors import CapacityError, TreeError
from atbx.core.trees import node, static_field
from atbx.ops.cache_spec import (
    CacheSpec,
    arena_like,
    check_counts,
    check_extent,
    check_rows,
    check_shorter,
)
from atbx.ops.elementwise import add

BLOCK_SIZE = 128
"""Tokens of a block: what Ascend's attention kernels take for one query token and for many alike."""


@node
class PagedCache:
    """The state of a batch: `tables` [B, N] of blocks (-1: none), `lengths` [B] filled slots; both int64.

    arena:    keys and values, {"k": [L of [blocks + 1, S, K, D]], "v": [...]}; the last block is the trash, where
              kernels that write every token of a step put its padding, each token to a slot of its own.
    uses:     [blocks] int64, how many entries of tables name each block; the free blocks are those with 0.
    extent:   positions that a step may read and write, a bucket at or below `capacity`.
    capacity: tokens that a row can hold, at most N * S.
    """

    arena: ArenaValue
    tables: Any
    lengths: Any
    uses: Any
    spec: CacheSpec = static_field()
    extent: int = static_field()
    capacity: int = static_field()
    block_size: int = static_field()

    @property
    def places(self) -> Any:
        """Where rows lie in the arena, as the ops take it: [B, N] blocks."""
        return self.tables

    @property
    def free(self) -> tuple[int, ...]:
        """The blocks that no row uses."""
        return tuple((self.uses == 0).nonzero().flatten().tolist())

    def advance(self, counts: Any) -> PagedCache:
        """The cache after `counts` [B] tokens were written."""
        return replace(self, lengths=add(self.lengths, counts))

    def with_extent(self, extent: int) -> PagedCache:
        """The same state, read through another extent."""
        check_extent(extent, self.capacity)
        return replace(self, extent=extent)

    def part(self, rows: Sequence[int], lengths: torch.Tensor) -> PagedCache:
        """Some rows for one step, holding `lengths`; tensors are its own, so that the step may take them.

        Blocks are neither taken nor given back: put the arena that the step returns into the whole cache.
        """
        return replace(self, tables=self.tables[list(rows)], lengths=lengths, uses=self.uses.clone())

    def abstract_part(self, rows: int) -> PagedCache:
        """What `part` gives for any `rows` rows, as far as planning needs to know it."""
        places, lengths = (Abstract(shape, torch.int64) for shape in ((rows, self.tables.shape[1]), (rows,)))
        return replace(self, tables=places, lengths=lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.arena.arena.nbytes


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens of a row."""
    return -(-tokens // block_size)


def init(
    spec: CacheSpec,
    *,
    batch: int,
    capacity: int,
    dtype: torch.dtype,
    block_size: int = BLOCK_SIZE,
    blocks: int | None = None,
    trash: int = 0,
    device: torch.device | None = None,
) -> PagedCache:
    """An empty cache for `batch` rows of at most `capacity` tokens, in blocks of `block_size` tokens.

    blocks: how many there are (default: enough for every row to be full).
    trash:  slots for the padding of a step; more than a block has lie behind the arena.

    Raises:
        OptionError: a size is not positive, or `spec` has no layer. DTypeError: dtype is not floating point.
    """
    spec.check(dtype, batch=batch, capacity=capacity, block_size=block_size)
    blocks = batch * blocks_for(capacity, block_size) if blocks is None else blocks
    spec.check(dtype, blocks=blocks)
    described = spec.abstract_blocks(blocks, block_size, dtype)
    behind = max(0, blocks_for(trash, block_size) - 1)

    def leaf(a: Abstract) -> torch.Tensor:
        whole = torch.empty((a.shape[0] + behind, *a.shape[1:]), dtype=dtype, device=device)
        # Kernels that take a mask read unused slots too, and zero times zero is no NaN.
        return (whole if whole.device.type == "cpu" else whole.zero_())[: a.shape[0]]

    tree = {name: [leaf(a) for a in leaves] for name, leaves in described.items()}
    return over_blocks(Arena(tree), spec, batch, capacity=capacity)


def over_blocks(arena: Arena, spec: CacheSpec, batch: int, *, capacity: int) -> PagedCache:
    """An empty cache of `batch` rows over an arena of blocks that exists."""
    blocks, block_size = (int(n) for n in arena.tensors[0].shape[:2])
    tables = torch.full((batch, blocks_for(capacity, block_size)), -1, dtype=torch.int64)
    lengths = torch.zeros(batch, dtype=torch.int64)
    uses = torch.zeros(blocks - 1, dtype=torch.int64)
    return PagedCache(arena.value(), tables, lengths, uses, spec, capacity, capacity, block_size)


def _named(tables: torch.Tensor, blocks: int) -> torch.Tensor:
    """How many entries of tables name each block [blocks]."""
    return torch.bincount(tables[tables >= 0], minlength=blocks)


def _with_tables(cache: PagedCache, tables: torch.Tensor, lengths: torch.Tensor) -> PagedCache:
    """The cache with other tables; what they name more or less often is counted here and nowhere else."""
    blocks = cache.uses.shape[0]
    uses = cache.uses + _named(tables, blocks) - _named(cache.tables, blocks)
    return replace(cache, tables=tables, lengths=lengths, uses=uses)


@dataclass
class _Taking:
    """Blocks being taken from a cache: how often each is used by now, and what was decided."""

    uses: list[int]
    next_free: int = 0
    needed: int = 0

    def take(self, after: int) -> int:
        """A free block, if there is one the one behind `after`, so that a row is read in one piece; else -1."""
        self.needed += 1
        found = after + 1
        if not 0 < found < len(self.uses) or self.uses[found]:
            while self.next_free < len(self.uses) and self.uses[self.next_free]:
                self.next_free += 1
            found = self.next_free
        if found == len(self.uses):
            return -1
        self.uses[found] = 1
        return found


def reserve(cache: PagedCache, counts: Sequence[int] | torch.Tensor) -> PagedCache:
    """The cache with room for counts[b] more tokens of row b; the old value is used up, as by a compiled step.

    A block that another row uses too is copied before this row writes to it. Blocks that a row got and does not fill
    stay its own until `truncate` or `select` gives them back.

    Raises:
        CapacityError: a row would exceed its capacity, or more blocks are needed than are free; nothing changed then.
    """
    cache.arena.check("reserve(cache)")
    wanted, lengths, size = torch.as_tensor(counts).tolist(), cache.lengths.tolist(), cache.block_size
    check_counts(wanted, lengths, cache.capacity)
    tables = cache.tables.tolist()
    taking_blocks = _Taking(cache.uses.tolist())
    copies: list[tuple[int, int]] = []
    for table, length, count in zip(tables, lengths, wanted, strict=True):
        for entry in range(length // size, blocks_for(length + count, size) if count else 0):
            old = table[entry]
            is_shared = old >= 0 and taking_blocks.uses[old] > 1
            if old >= 0 and not is_shared:
                continue
            table[entry] = taking_blocks.take(table[entry - 1] if entry else -1)
            if is_shared:
                taking_blocks.uses[old] -= 1
                if entry * size < length:
                    copies.append((old, table[entry]))
    free = int((cache.uses == 0).sum())
    if taking_blocks.needed > free:
        raise CapacityError(
            f"the paged KV cache has too few free blocks of {size} tokens",
            where="reserve(cache)",
            expected=f"at most the {free} free blocks of {len(taking_blocks.uses)}",
            found=f"{taking_blocks.needed} needed",
            hint="Give blocks back with truncate or select, or make the cache with more blocks",
        )
    arena = _copy_blocks(cache.arena, copies)
    return replace(_with_tables(cache, torch.tensor(tables, dtype=torch.int64), cache.lengths), arena=arena)


def _copy_blocks(value: ArenaValue, copies: list[tuple[int, int]]) -> ArenaValue:
    """The arena's next state, with blocks copied in place; the state before is used up.

    It is used up even where nothing is copied: whether an old value may be used must not depend on its contents.
    """
    arena = value.arena
    with taking:
        value.check("reserve(cache)")
        arena.generation += 1
    if copies:
        old, new = (list(side) for side in zip(*copies, strict=True))
        try:
            with torch.no_grad():
                for leaf in arena.tensors:
                    leaf[new] = leaf[old]
        except BaseException:
            arena.interrupted = True
            raise
    return arena.value()


def truncate(cache: PagedCache, lengths: Sequence[int] | torch.Tensor) -> PagedCache:
    """The cache with rows cut back to `lengths` [B] tokens; blocks behind them are given back.

    Raises:
        CapacityError: a length is negative or above what the row holds.
    """
    cache.arena.check("truncate(cache)")
    wanted = torch.as_tensor(lengths, dtype=torch.int64)
    check_shorter(wanted, cache.lengths)
    kept = (wanted + cache.block_size - 1) // cache.block_size
    is_kept = torch.arange(cache.tables.shape[1]) < kept.view(-1, 1)
    return _with_tables(cache, cache.tables.masked_fill(~is_kept, -1), wanted.clone())


def fork(cache: PagedCache) -> PagedCache:
    """An independent copy: neither cache ever sees what is written to the other.

    The blocks in use are copied, because the states of one arena have one future. Rows that are to go on side by side
    in one batch share their blocks through `select` instead.
    """
    used = (cache.uses > 0).nonzero().flatten()

    def copied(leaf: torch.Tensor) -> torch.Tensor:
        fresh = arena_like(leaf, leaf.shape[0])
        fresh[used] = leaf[used]
        return fresh

    tree = {name: [copied(leaf) for leaf in leaves] for name, leaves in cache.arena.tree.items()}
    return replace(
        cache,
        arena=cache.arena.replaced(tree),
        tables=cache.tables.clone(),
        lengths=cache.lengths.clone(),
        uses=cache.uses.clone(),
    )


def select(cache: PagedCache, indices: Sequence[int]) -> PagedCache:
    """The cache whose row i is this one's row indices[i]: dropped rows give their blocks back, repeated ones share.

    Raises:
        CapacityError: an index is out of range.
    """
    cache.arena.check("select(cache)")
    check_rows(list(indices), cache.lengths.shape[0])
    chosen = torch.tensor(list(indices), dtype=torch.int64)
    return _with_tables(cache, cache.tables[chosen], cache.lengths[chosen])


def save(cache: PagedCache) -> dict[str, Any]:
    """The cache as a plain tree of tensors (filled blocks only, shared ones once), for `checkpoints.write_tree`."""
    arena = cache.arena.tree
    lengths, size = cache.lengths.clone(), cache.block_size
    start = torch.arange(cache.tables.shape[1]) * size
    filled = (lengths.view(-1, 1) - start).clamp(0, size)  # [B, N] tokens of each entry
    blocks, index = torch.unique(cache.tables[filled > 0], return_inverse=True)
    tables = torch.full_like(cache.tables, -1)
    tables[filled > 0] = index
    most = torch.zeros(len(blocks), dtype=torch.int64).scatter_reduce(0, index, filled[filled > 0], "amax")
    unused = torch.arange(size) >= most.view(-1, 1)

    def kept(leaf: torch.Tensor) -> torch.Tensor:
        found = leaf[blocks.to(leaf.device)]
        found[unused.to(leaf.device)] = 0
        return found

    keep = {name: [kept(leaf) for leaf in arena[name]] for name in ("k", "v")}
    sizes = torch.tensor([cache.capacity, size, cache.uses.shape[0]], dtype=torch.int64)
    return {"lengths": lengths, "sizes": sizes, "tables": tables, **keep}


def load(tree: dict[str, Any], spec: CacheSpec) -> PagedCache:
    """The cache that `save` made a tree of; `kv_cache.load` has checked that its parts are there.

    Raises:
        TreeError: the tree does not fit `spec`, or contradicts itself.
    """
    sizes = tree["sizes"].tolist()
    if len(sizes) != 3 or min(sizes) < 1:
        raise TreeError(
            "this is no saved paged KV cache",
            mismatches=(f"sizes: expected capacity, block size and blocks, found {sizes}",),
        )
    capacity, size, blocks = sizes
    batch, saved = tree["lengths"].shape[0], tree["k"][0].shape[0]
    cache = init(
        spec, batch=batch, capacity=capacity, dtype=tree["k"][0].dtype, block_size=size, blocks=blocks
    )
    problems = _table_problems(tree, cache, min(saved, blocks))
    for name in ("k", "v"):
        for layer, (found, target) in enumerate(zip(tree[name], cache.arena.tree[name], strict=True)):
            if found.shape != (saved, *target.shape[1:]) or saved > blocks or found.dtype != target.dtype:
                expected = f"at most {blocks} blocks of {tuple(target.shape[1:])} {target.dtype}"
                problems.append(
                    f"{name}/{layer}: expected {expected}, found {tuple(found.shape)} {found.dtype}"
                )
            else:
                target[:saved] = found
    if problems:
        raise TreeError("a saved KV cache does not fit the model", mismatches=tuple(problems))
    return _with_tables(cache, tree["tables"].clone(), tree["lengths"].clone())


def _table_problems(tree: dict[str, Any], cache: PagedCache, blocks: int) -> list[str]:
    """What is wrong with saved lengths and tables, over `blocks` saved blocks."""
    tables, size = tree["tables"], cache.block_size
    if tables.shape != cache.tables.shape:
        return [f"tables: expected {tuple(cache.tables.shape)}, found {tuple(tables.shape)}"]
    problems = []
    for row, (length, table) in enumerate(zip(tree["lengths"].tolist(), tables.tolist(), strict=True)):
        if not 0 <= length <= cache.capacity:
            problems.append(f"lengths/{row}: expected 0 to {cache.capacity}, found {length}")
            continue
        used = blocks_for(length, size)
        for entry, block in enumerate(table):
            if entry < used and not 0 <= block < blocks:
                problems.append(f"tables/{row}/{entry}: expected 0 to {blocks - 1}, found {block}")
            elif entry >= used and block != -1:
                problems.append(f"tables/{row}/{entry}: expected -1, found {block}")
        if len(set(table[:used])) != used:
            problems.append(f"tables/{row}: a block stands twice in one row")
    return problems
