"""Paged KV caches: blocks taken, shared, copied and given back, and what each function refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import atbx
from atbx import ops
from atbx.checkpoints import read_tree, write_tree
from atbx.core.arena import Arena
from atbx.core.errors import (
    CacheStateError,
    CapacityError,
    DonationError,
    DTypeError,
    OptionError,
    ShapeError,
    TreeError,
)
from atbx.ops import kv_cache
from atbx.ops.kv_cache import CacheSpec, KVCache, LayerCache, PagedCache, PagedSpec

SPEC = CacheSpec((LayerCache(1, 4), LayerCache(2, 4, window=3)))


def extend(k: Any, cache: Any, counts: Any) -> Any:
    """Append the same keys and values to both layers and advance: written for any kind of cache."""
    for layer, spec in enumerate(cache.spec.layers):
        heads = ops.concat([k] * spec.kv_heads, axis=2)
        cache = kv_cache.append(cache, heads, heads, layer=layer, counts=counts)
    return cache.advance(counts)


step = atbx.jit(extend, donate=("cache",))


def grow(cache: Any, k: torch.Tensor, counts: list[int]) -> Any:
    return step(k, kv_cache.reserve(cache, counts), torch.tensor(counts))


def marks(values: list[float]) -> torch.Tensor:
    """One token a row, [B,1,1,4]."""
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 1, 1, 4).contiguous()


def empty(batch: int, *, size: int = 2, blocks: int | None = None, capacity: int = 12) -> PagedCache:
    cache = kv_cache.init_paged(
        SPEC, batch=batch, capacity=capacity, dtype=torch.float32, block_size=size, blocks=blocks
    )
    for leaf in cache.arena.arena.tensors:
        leaf.fill_(float("nan"))
    return cache


def filled(batch: int, tokens: int, **sizes: Any) -> PagedCache:
    """A cache of `tokens` tokens a row; position t of row b holds 100 b + t."""
    cache = empty(batch, **sizes)
    for t in range(tokens):
        cache = grow(cache, marks([100.0 * b + t for b in range(batch)]), [1] * batch)
    return cache


def held(cache: PagedCache, layer: int = 0, name: str = "k") -> list[list[float]]:
    """What each row holds, by position, read by nothing but its table."""
    leaf = cache.arena.tree[name][layer]
    size = leaf.shape[1]
    return [
        [float(leaf[table[p // size], p % size, 0, 0]) for p in range(length)]
        for table, length in zip(cache.tables.tolist(), cache.lengths.tolist(), strict=True)
    ]


def consistent(cache: PagedCache) -> None:
    """Counts are those of the tables, and every position held has a block."""
    named = [0] * len(cache.uses)
    for table, length in zip(cache.tables.tolist(), cache.lengths.tolist(), strict=True):
        used = -(-length // cache.block_size)
        assert min(table[:used], default=0) >= 0
        for block in table:
            assert -1 <= block < len(named)
            if block >= 0:
                named[block] += 1
    assert cache.uses.tolist() == named
    assert cache.free == tuple(i for i, n in enumerate(named) if n == 0)


# --- growing -------------------------------------------------------------------------------------------------------


def test_a_new_cache_is_free_altogether() -> None:
    cache = empty(3, size=4, blocks=7)
    assert cache.free == (0, 1, 2, 3, 4, 5, 6)
    assert cache.tables.tolist() == [[-1] * 3] * 3
    # One block more than there are: the trash.
    assert [tuple(t.shape) for t in cache.arena.tree["k"]] == [(8, 4, 1, 4), (8, 4, 2, 4)]
    assert cache.nbytes == 4 * 2 * 8 * 4 * (1 + 2) * 4


def test_a_cache_has_blocks_for_every_row_unless_it_is_told_otherwise() -> None:
    assert len(kv_cache.init_paged(SPEC, batch=3, capacity=257, dtype=torch.float32).uses) == 3 * 3


def test_blocks_are_taken_as_rows_grow_and_hold_what_was_written() -> None:
    cache = filled(2, 3)
    assert held(cache) == [[0, 1, 2], [100, 101, 102]]
    assert held(cache, layer=1) == held(cache, layer=1, name="v") == held(cache)
    assert (cache.tables >= 0).sum(dim=1).tolist() == [2, 2]
    consistent(cache)


def test_a_row_gets_blocks_side_by_side_where_they_are_free() -> None:
    cache = kv_cache.reserve(empty(2, size=2), [9, 5])
    assert cache.tables.tolist() == [[0, 1, 2, 3, 4, -1], [5, 6, 7, -1, -1, -1]]


def test_reserving_twice_takes_nothing_more() -> None:
    cache = kv_cache.reserve(empty(1), [3])
    tables = cache.tables.tolist()
    again = kv_cache.reserve(cache, [3])
    assert again.tables.tolist() == tables
    consistent(again)


def test_padding_tokens_write_no_slot_not_even_of_the_trash() -> None:
    cache = kv_cache.reserve(filled(2, 1), [0, 2])
    before = [t.clone() for t in cache.arena.arena.tensors]
    cache = step(torch.full((2, 4, 1, 4), 7.0), cache, torch.tensor([0, 2]))
    assert held(cache) == [[0], [100, 7, 7]]
    block, second = cache.tables[1, :2].tolist()
    for old, new in zip(before, cache.arena.arena.tensors, strict=True):
        changed = ~torch.isclose(new, old, rtol=0, atol=0, equal_nan=True)
        places = {(int(b), int(s)) for b, s, *_ in changed.nonzero()}
        assert places == {(block, 1), (second, 0)}


def test_running_out_of_blocks_is_told_before_anything_changes() -> None:
    cache = filled(2, 2, size=2, blocks=3)
    before = cache.tables.tolist(), cache.uses.tolist(), held(cache)
    with pytest.raises(
        CapacityError, match=r"free blocks of 2 tokens.*at most the 1 free blocks of 3.*found 3 needed"
    ):
        kv_cache.reserve(cache, [1, 3])
    # The refused call used nothing up.
    assert (cache.tables.tolist(), cache.uses.tolist(), held(cache)) == before
    cache = grow(cache, marks([2.0, 0.0]), [1, 0])
    assert held(cache) == [[0, 1, 2], [100, 101]]
    assert cache.free == ()


@pytest.mark.parametrize(
    ("counts", "text"),
    [([0, 11], "row 1.*0 to 10 tokens.*found 11"), ([-1, 0], "row 0"), ([1], "counts.*expected 2, found 1")],
)
def test_reserving_more_than_a_row_can_hold_is_refused(counts: list[int], text: str) -> None:
    with pytest.raises(CapacityError, match=text):
        kv_cache.reserve(filled(2, 2), counts)


def test_a_dense_cache_is_reserved_by_the_same_call() -> None:
    old = kv_cache.init(SPEC, batch=2, capacity=4, dtype=torch.float32)
    new = kv_cache.reserve(old, [4, 0])
    new = step(torch.ones(2, 4, 1, 4), new, torch.tensor([4, 0]))
    assert new.lengths.tolist() == [4, 0]
    with pytest.raises(CapacityError, match=r"row 0.*0 to 0 tokens.*found 1"):
        kv_cache.reserve(new, [1, 1])


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_reserving_uses_up_the_old_value_of_every_kind(kind: str) -> None:
    old: Any = empty(1) if kind == "paged" else kv_cache.init(SPEC, batch=1, capacity=4, dtype=torch.float32)
    new = kv_cache.reserve(old, [1])
    for use in (
        kv_cache.fork,
        kv_cache.save,
        lambda c: kv_cache.reserve(c, [1]),
        lambda c: kv_cache.select(c, [0]),
    ):
        with pytest.raises(DonationError, match="donated to a later step"):
            use(old)
    assert step(marks([5.0]), new, torch.tensor([1])).lengths.tolist() == [1]


# --- what a step refuses -------------------------------------------------------------------------------------------


def test_a_step_without_a_reservation_names_the_row_and_the_entry() -> None:
    cache = filled(2, 2, size=2)
    with pytest.raises(
        CapacityError,
        match=r"^batch row 1, table entry 1: a block outside the arena; expected 0 to 11, found -1",
    ):
        step(marks([0.0, 1.0]), cache, torch.tensor([0, 1]))
    # Nothing was donated: the cache is still good.
    assert held(cache) == [[0, 1], [100, 101]]


@pytest.mark.parametrize("block", [4, 5, 99, -2])
def test_a_block_that_is_not_there_is_refused_the_trash_block_too(block: int) -> None:
    cache = kv_cache.reserve(empty(1, size=2, blocks=4), [4])
    tables = cache.tables.clone()
    tables[0, 1] = block
    cache = replace(cache, tables=tables)
    before = [t.clone() for t in cache.arena.arena.tensors]
    with pytest.raises(CapacityError, match=rf"batch row 0, table entry 1.*0 to 3, found {block}"):
        step(torch.ones(1, 3, 1, 4), cache, torch.tensor([3]))
    for old, new in zip(before, cache.arena.arena.tensors, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    # A table may hold anything where nothing is read or written.
    assert step(torch.ones(1, 2, 1, 4), cache, torch.tensor([2])).lengths.tolist() == [2]


@pytest.mark.parametrize(
    ("tables", "lengths", "counts", "text"),
    [
        # Two rows write to one block.
        ([[0, 1], [1, 2]], [2, 0], [1, 1], "batch row 1, table entry 0.*block 1, which batch row 0"),
        # A row writes to a block that another one reads.
        ([[0, 1], [0, 2]], [1, 2], [1, 1], "batch row 0, table entry 0.*block 0, which batch row 1"),
        # A row that stands still holds the block.
        ([[0, 1], [0, -1]], [1, 2], [1, 0], "batch row 0, table entry 0.*block 0, which batch row 1"),
        # It holds only the front of it, which is what is written.
        ([[0, -1], [0, -1]], [0, 1], [1, 0], "batch row 0, table entry 0.*block 0, which batch row 1"),
        # One block at two places of a row.
        ([[3, 3], [1, -1]], [3, 0], [1, 1], "table entry 1.*stands in its row already.*found 3"),
    ],
)
def test_no_slot_is_written_that_another_position_holds(
    tables: list[list[int]], lengths: list[int], counts: list[int], text: str
) -> None:
    cache = empty(2, size=2, capacity=4)
    cache = replace(cache, tables=torch.tensor(tables), lengths=torch.tensor(lengths))
    with pytest.raises(CacheStateError, match=text):
        step(torch.ones(2, 1, 1, 4), cache, torch.tensor(counts))


def test_rows_may_read_one_block_and_a_shorter_row_may_keep_its_front() -> None:
    cache = empty(3, size=2, capacity=4)
    tables, lengths = torch.tensor([[0, 1], [0, 2], [0, -1]]), torch.tensor([2, 2, 2])
    cache = step(
        torch.ones(3, 1, 1, 4), replace(cache, tables=tables, lengths=lengths), torch.tensor([1, 1, 0])
    )
    assert cache.lengths.tolist() == [3, 3, 2]
    # Row 1 holds only the slot before the one that row 0 writes.
    cache = replace(cache, tables=torch.tensor([[0, 1], [0, -1], [-1, -1]]), lengths=torch.tensor([1, 1, 0]))
    assert step(torch.ones(3, 1, 1, 4), cache, torch.tensor([1, 0, 0])).lengths.tolist() == [2, 1, 0]


def test_an_extent_past_the_blocks_of_a_row_is_refused_when_staged() -> None:
    cache = kv_cache.reserve(empty(1, size=2, capacity=3), [1])
    assert cache.with_extent(3).extent == 3
    with pytest.raises(CapacityError, match="1 to 3, found 4"):
        cache.with_extent(4)
    with pytest.raises(ShapeError, match="extent exceeds the 2 blocks of a row; expected at most 4, found 5"):
        step(torch.ones(1, 1, 1, 4), replace(cache, extent=5), torch.tensor([1]))


def test_tables_of_another_batch_or_dtype_are_refused() -> None:
    cache = kv_cache.reserve(empty(2), [1, 1])
    for tables in (cache.tables[:1], cache.tables.int(), cache.tables[:, :0], cache.tables.view(2, -1, 1)):
        with pytest.raises(ShapeError, match=r"rows does not fit; expected i64\[2\] or i64\[2,N\]"):
            step(torch.ones(2, 1, 1, 4), replace(cache, tables=tables.clone()), torch.tensor([1, 1]))


# --- truncate, select, fork ----------------------------------------------------------------------------------------


def test_truncating_gives_blocks_back_reserved_ones_too() -> None:
    cache = kv_cache.reserve(filled(2, 5, size=2), [4, 0])
    assert (cache.tables >= 0).sum(dim=1).tolist() == [5, 3]
    cache = kv_cache.truncate(cache, [5, 2])
    assert (cache.tables >= 0).sum(dim=1).tolist() == [3, 1]
    consistent(cache)
    cache = kv_cache.truncate(cache, [0, 0])
    assert len(cache.free) == len(cache.uses)
    # A second time changes nothing: a block cannot be given back twice.
    again = kv_cache.truncate(kv_cache.truncate(cache, [0, 0]), [0, 0])
    assert again.uses.tolist() == [0] * 12


def test_a_truncated_row_goes_on_from_where_it_was_cut() -> None:
    cache = kv_cache.truncate(filled(2, 5, size=2), [3, 5])
    cache = grow(cache, marks([50.0, 51.0]), [1, 1])
    assert held(cache) == [[0, 1, 2, 50], [100, 101, 102, 103, 104, 51]]
    consistent(cache)


def test_a_window_can_be_truncated_to_any_length_because_pages_are_kept() -> None:
    cache = kv_cache.truncate(filled(1, 9), [4])
    assert held(cache, layer=1) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("lengths", "text"), [([2, 6], "row 1.*0 to 5, found 6"), ([-1, 2], "row 0"), ([1], "one length a row")]
)
def test_truncate_refuses_lengths_a_row_does_not_have(lengths: list[int], text: str) -> None:
    with pytest.raises(CapacityError, match=text):
        kv_cache.truncate(filled(2, 5), lengths)


def test_select_reorders_and_drops_without_a_copy() -> None:
    cache = filled(3, 3)
    arena = cache.arena.arena
    chosen = kv_cache.select(cache, [2, 0])
    assert chosen.arena.arena is arena
    assert held(chosen) == [[200, 201, 202], [0, 1, 2]]
    assert len(chosen.free) == len(cache.free) + 2
    consistent(chosen)
    # The old value says what it said before.
    consistent(cache)
    assert held(cache)[1] == [100, 101, 102]


def test_select_refuses_a_row_that_is_not_there() -> None:
    for indices, found in (([0, 2], 2), ([0, -1], -1)):
        with pytest.raises(CapacityError, match=rf"indices\[1\].*0 to 1, found {found}"):
            kv_cache.select(filled(2, 1), indices)


def test_repeated_rows_share_blocks_and_copy_the_partial_one_before_they_write() -> None:
    cache = filled(1, 5, size=2)  # two full blocks and a partial one
    many = kv_cache.select(cache, [0, 0, 0])
    assert many.arena.arena is cache.arena.arena
    assert many.uses.tolist()[:3] == [3, 3, 3]
    assert len(many.free) == 6 - 3
    many = grow(many, marks([10.0, 20.0, 30.0]), [1, 1, 1])
    assert held(many) == [[0, 1, 2, 3, 4, 10], [0, 1, 2, 3, 4, 20], [0, 1, 2, 3, 4, 30]]
    assert held(many, layer=1, name="v") == held(many)
    # The last to write keeps the block itself; full blocks stay shared.
    assert many.uses.tolist() == [3, 3, 1, 1, 1, 0]
    consistent(many)
    alone = kv_cache.select(many, [1])
    assert alone.uses.sum() == 3
    assert held(alone) == [[0, 1, 2, 3, 4, 20]]


def test_copying_a_shared_block_is_part_of_what_must_be_free() -> None:
    pair = kv_cache.select(filled(1, 3, size=2, blocks=2), [0, 0])
    with pytest.raises(CapacityError, match="the 0 free blocks of 2, found 1 needed"):
        kv_cache.reserve(pair, [1, 1])
    assert held(pair) == [[0, 1, 2]] * 2
    alone = kv_cache.select(pair, [1])
    assert held(grow(alone, marks([9.0]), [1])) == [[0, 1, 2, 9]]


def test_a_row_cut_into_a_shared_block_copies_it_before_it_writes() -> None:
    pair = kv_cache.truncate(kv_cache.select(filled(1, 4, size=4), [0, 0]), [1, 4])
    pair = grow(pair, marks([70.0, 71.0]), [1, 1])
    assert held(pair) == [[0, 70], [0, 1, 2, 3, 71]]
    consistent(pair)


def test_a_row_cut_to_nothing_before_a_shared_block_takes_a_fresh_one() -> None:
    pair = kv_cache.select(kv_cache.reserve(filled(1, 2, size=2), [2]), [0, 0])
    pair = grow(pair, marks([70.0, 71.0]), [1, 1])
    assert held(pair) == [[0, 1, 70], [0, 1, 71]]
    consistent(pair)


def test_two_futures_of_one_state_cannot_both_be_followed() -> None:
    cache = filled(2, 3)
    first, second = kv_cache.select(cache, [0, 0]), kv_cache.select(cache, [1, 1])
    first = kv_cache.reserve(first, [1, 1])
    # Both would take the same free block.
    with pytest.raises(DonationError, match=r"reserve\(cache\): this cache value was donated"):
        kv_cache.reserve(second, [1, 1])
    assert held(first) == [[0, 1, 2]] * 2


def test_an_interrupted_copy_leaves_a_cache_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = kv_cache.select(filled(1, 3), [0, 0])

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__setitem__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            kv_cache.reserve(pair, [1, 1])
    with pytest.raises(CacheStateError, match="interrupted"):
        kv_cache.truncate(pair, [0, 0])


def test_a_fork_and_its_origin_never_see_each_other() -> None:
    origin = kv_cache.select(filled(2, 3), [0, 1, 1])
    branch = kv_cache.fork(origin)
    assert held(branch) == held(origin)
    for turn in range(4):
        before = held(origin)
        branch = grow(branch, marks([70.0 + turn] * 3), [1, 1, 1])
        assert held(origin) == before
        before = held(branch)
        origin = grow(origin, marks([50.0 + turn] * 3), [1, 1, 1])
        assert held(branch) == before
    assert held(branch)[2] == [100, 101, 102, 70, 71, 72, 73]
    assert held(origin)[2] == [100, 101, 102, 50, 51, 52, 53]
    consistent(origin)
    consistent(branch)


def test_blocks_of_a_row_that_ended_serve_another() -> None:
    cache = filled(2, 4, size=2, blocks=4)
    with pytest.raises(CapacityError, match="free blocks"):
        kv_cache.reserve(cache, [0, 2])
    cache = grow(kv_cache.truncate(cache, [0, 4]), torch.full((2, 2, 1, 4), 9.0), [0, 2])
    assert held(cache) == [[], [100, 101, 102, 103, 9, 9]]
    consistent(cache)


def test_a_part_steps_and_the_whole_takes_its_arena() -> None:
    whole = kv_cache.reserve(filled(3, 2), [0, 1, 0])
    part = whole.part([1], torch.tensor([2]))
    part = step(marks([7.0]), part, torch.tensor([1]))
    whole = replace(whole, arena=part.arena, lengths=torch.tensor([2, 3, 2]))
    assert held(whole) == [[0, 1], [100, 101, 7], [200, 201]]
    consistent(whole)
    dense = kv_cache.init(SPEC, batch=2, capacity=4, dtype=torch.float32)
    stepped = step(marks([7.0]), dense.part([1], torch.tensor([0])), torch.tensor([1]))
    dense = replace(dense, arena=stepped.arena, lengths=torch.tensor([0, 1]))
    assert float(dense.arena.tree["k"][0][1, 0, 0, 0]) == 7.0


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_a_planned_part_is_the_variant_of_a_real_one(kind: str) -> None:
    whole: Any = kv_cache.init(SPEC, batch=3, capacity=12, dtype=torch.float32)
    whole = kv_cache.reserve(empty(3) if kind == "paged" else whole, [1, 1, 1])
    program = atbx.jit(extend, donate=("cache",))
    k, counts = atbx.Abstract((2, 1, 1, 4), torch.float32), atbx.Abstract((2,), torch.int64)
    program.warm([(k, whole.abstract_part(2), counts)])
    assert len(program.variants) == 1
    program(marks([1.0, 2.0]), whole.part([2, 0], torch.tensor([0, 0])), torch.tensor([1, 1]))
    assert len(program.variants) == 1


def test_a_spec_sizes_and_opens_its_arena() -> None:
    spec = PagedSpec(SPEC.layers, 4)
    described = spec.abstract(2, 10, torch.float16, 5)
    # Two rows of three blocks, and the trash; a window saves nothing.
    assert [a.shape for a in described["k"]] == [(7, 4, 1, 4), (7, 4, 2, 4)]
    assert spec.nbytes(2, 10, torch.float16) == 2 * 2 * 7 * 4 * (1 + 2) * 4
    cache = kv_cache.open_arena(Arena(described), spec, 2, capacity=10, chunk=5)
    assert isinstance(cache, PagedCache)
    assert (cache.tables.shape, len(cache.uses), cache.block_size) == ((2, 3), 6, 4)
    arena = Arena(SPEC.abstract(2, 10, torch.float16, 5))
    assert isinstance(kv_cache.open_arena(arena, SPEC, 2, capacity=10, chunk=5), KVCache)


# --- room behind, save and load ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trash", "blocks"), [(0, 1), (1, 1), (4, 1), (5, 2), (9, 3)])
def test_the_trash_has_a_slot_for_every_padding_token(trash: int, blocks: int) -> None:
    cache = kv_cache.init_paged(
        SPEC, batch=1, capacity=8, dtype=torch.float32, block_size=4, blocks=2, trash=trash
    )
    for holder in (cache, kv_cache.fork(cache)):
        for leaf in holder.arena.arena.tensors:
            slots = leaf.untyped_storage().nbytes() // (4 * leaf[0, 0].numel())
            assert leaf.shape[:2] == (3, 4)
            assert slots == (2 + blocks) * 4


def test_a_saved_cache_comes_back_with_contents_and_sharing(tmp_path: Path) -> None:
    cache = kv_cache.select(kv_cache.truncate(filled(3, 5, size=2), [5, 2, 0]), [1, 0, 0, 2])
    cache = kv_cache.reserve(kv_cache.truncate(cache, [2, 5, 4, 0]), [0, 0, 0, 1])
    write_tree(tmp_path / "cache.msgpack", kv_cache.save(cache))
    restored = kv_cache.load(read_tree(tmp_path / "cache.msgpack").tree, SPEC)
    assert isinstance(restored, PagedCache)
    assert held(restored) == held(cache) == [[100, 101], [0, 1, 2, 3, 4], [0, 1, 2, 3], []]
    assert (restored.capacity, restored.block_size, len(restored.uses)) == (12, 2, 18)
    # Four blocks are used, two of them by two rows; what was only reserved is free again.
    assert sorted(restored.uses.tolist(), reverse=True)[:5] == [2, 2, 1, 1, 0]
    consistent(restored)
    restored = grow(restored, marks([1.0, 2.0, 3.0, 4.0]), [1, 1, 1, 1])
    assert held(restored)[1:3] == [[0, 1, 2, 3, 4, 2], [0, 1, 2, 3, 3]]


def test_a_saved_cache_tells_nothing_of_unused_slots() -> None:
    tree = kv_cache.save(kv_cache.truncate(filled(2, 3, size=4), [3, 1]))
    assert [tuple(t.shape) for t in tree["k"]] == [(2, 4, 1, 4), (2, 4, 2, 4)]
    assert tree["k"][0][:, :, 0, 0].tolist() == [[0, 1, 2, 0], [100, 0, 0, 0]]


def test_an_empty_cache_can_be_saved() -> None:
    restored = kv_cache.load(kv_cache.save(empty(2)), SPEC)
    assert restored.lengths.tolist() == [0, 0]
    assert held(grow(restored, marks([1.0, 2.0]), [1, 1])) == [[1], [2]]


@pytest.mark.parametrize(
    ("part", "change", "text"),
    [
        ("tables", lambda t: t.clamp(min=0), r"tables/0/2: expected -1, found 0"),
        ("tables", lambda t: t + 4, r"tables/0/0: expected 0 to 3, found 4"),
        ("tables", lambda t: t[:1], r"tables: expected \(2, 6\), found \(1, 6\)"),
        ("tables", lambda t: t.masked_fill(t >= 0, 1), "tables/0: a block stands twice in one row"),
        ("lengths", lambda t: t + 10, r"lengths/0: expected 0 to 12, found 13"),
        ("lengths", lambda t: t + 2, r"tables/0/2: expected 0 to 3, found -1"),
        ("sizes", lambda t: t[:2], r"sizes: expected capacity, block size and blocks, found \[12, 2\]"),
        ("sizes", lambda t: t * 0, "sizes: "),
        ("k", lambda leaves: [t.half() for t in leaves], "v/0: expected .*float16, found .*float32"),
        ("v", lambda leaves: [t[:2] for t in leaves], r"v/1: expected at most 12 blocks.*found \(2, 2"),
        ("v", lambda leaves: leaves[:1], "v: expected 2 layers, found 1"),
    ],
)
def test_a_saved_cache_that_does_not_fit_is_refused_by_place(part: str, change: Any, text: str) -> None:
    tree = kv_cache.save(filled(2, 3))
    with pytest.raises(TreeError, match=text):
        kv_cache.load({**tree, part: change(tree[part])}, SPEC)


def test_a_saved_cache_of_another_model_is_refused_with_every_mismatch() -> None:
    with pytest.raises(TreeError, match=r"k/0: expected .* found .*\n.*v/0"):
        kv_cache.load(kv_cache.save(filled(1, 1)), CacheSpec((LayerCache(3, 4), LayerCache(2, 4))))


@pytest.mark.parametrize("name", ["batch", "capacity", "block_size", "blocks"])
def test_sizes_must_be_positive(name: str) -> None:
    sizes: dict[str, Any] = {"batch": 1, "capacity": 4, "block_size": 2, "blocks": 3}
    with pytest.raises(OptionError, match=f"^{name}: .*1 or more, found 0"):
        kv_cache.init_paged(SPEC, dtype=torch.float32, **{**sizes, name: 0})


def test_keys_and_values_are_floating_point() -> None:
    with pytest.raises(DTypeError, match=r"^dtype: "):
        kv_cache.init_paged(SPEC, batch=1, capacity=4, dtype=torch.int8)
    with pytest.raises(OptionError, match=r"^spec.layers: "):
        kv_cache.init_paged(CacheSpec(()), batch=1, capacity=4, dtype=torch.float32)
