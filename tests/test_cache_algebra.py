"""KV caches under any sequence of their functions hold what plain lists of every row would hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import atbx
from atbx.core.errors import CacheStateError, CapacityError
from atbx.ops import kv_cache
from atbx.ops.kv_cache import CacheSpec, KVCache, LayerCache, PagedCache

CAPACITY, CHUNK = 11, 3


def write(x: Any, cache: Any, counts: Any) -> Any:
    """The same keys and values into every layer."""
    for layer in range(len(cache.spec.layers)):
        cache = kv_cache.append(cache, x, x, layer=layer, counts=counts)
    return cache.advance(counts)


step = atbx.jit(write, donate=("cache",))


def holds(cache: KVCache, rows: list[list[float]]) -> None:
    """Every layer holds the rows, as far back as the next token sees."""
    assert cache.lengths.tolist() == [len(row) for row in rows]
    for layer, spec in enumerate(cache.spec.layers):
        for name in ("k", "v"):
            leaf = cache.arena.tree[name][layer]
            slots = leaf.shape[1]
            for index, (row, arena_row) in enumerate(zip(rows, cache.rows.tolist(), strict=True)):
                # What the next token of the row would see.
                first = 0 if spec.window is None else max(0, len(row) - spec.window + 1)
                found = [float(leaf[arena_row, p % slots, 0, 0]) for p in range(first, len(row))]
                assert found == row[first:], (layer, name, index)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sequence_of_functions_agrees_with_lists(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from([None, 1, 2, 4]))
    spec = CacheSpec((LayerCache(1, 1), LayerCache(1, 1, window)))
    batch = data.draw(st.integers(1, 3))
    cache = kv_cache.init(spec, batch=batch, capacity=CAPACITY, dtype=torch.float32, chunk=CHUNK)
    for leaf in cache.arena.arena.tensors:
        leaf.fill_(float("nan"))
    rows: list[list[float]] = [[] for _ in range(batch)]
    most = [0] * batch
    value = 0.0
    for _ in range(data.draw(st.integers(1, 16))):
        batch = len(rows)
        action = data.draw(
            st.sampled_from(["write", "write", "truncate", "truncate", "select", "fork", "save"])
        )
        if action == "write":
            counts = data.draw(
                st.lists(st.sampled_from([CHUNK, CHUNK, 1, 0]), min_size=batch, max_size=batch)
            )
            x = (value + torch.arange(batch * CHUNK).float()).view(batch, CHUNK, 1, 1)
            value += batch * CHUNK
            if any(len(row) + count > CAPACITY for row, count in zip(rows, counts, strict=True)):
                with pytest.raises(CapacityError, match="too few slots"):
                    step(x, cache, torch.tensor(counts))
            else:
                cache = step(x, cache, torch.tensor(counts))
                rows = [[*row, *x[b, : counts[b], 0, 0].tolist()] for b, row in enumerate(rows)]
        elif action == "truncate":
            lengths = [max(0, len(row) - data.draw(st.sampled_from([0, 1, 1, 2, 11]))) for row in rows]
            # A ring keeps the last of what it ever held; a shortened row needs its own window of that.
            lost = [0 if window is None else max(0, n - (window + CHUNK - 1)) for n in most]
            needs = [0 if window is None else max(0, n - window + 1) for n in lengths]
            if any(
                n not in (0, len(row)) and need < gone
                for n, row, need, gone in zip(lengths, rows, needs, lost, strict=True)
            ):
                with pytest.raises(CacheStateError, match="overwritten"):
                    kv_cache.truncate(cache, lengths)
            else:
                cache = kv_cache.truncate(cache, lengths)
                rows = [row[:n] for row, n in zip(rows, lengths, strict=True)]
                most = [m if n else 0 for m, n in zip(most, lengths, strict=True)]
        elif action == "select":
            indices = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
            cache = kv_cache.select(cache, indices)
            rows, most = [list(rows[i]) for i in indices], [most[i] for i in indices]
        elif action == "fork":
            branch = kv_cache.fork(cache)
            if all(len(row) < CAPACITY for row in rows):
                ones = torch.ones(batch, dtype=torch.int64)
                step(torch.full((batch, 1, 1, 1), -1.0), branch, ones)
        else:
            cache = kv_cache.load(kv_cache.save(cache), spec)
        most = [max(m, len(row)) for m, row in zip(most, rows, strict=True)]
        holds(cache, rows)


def pages_hold(cache: PagedCache, rows: list[list[float]]) -> None:
    """Every layer holds the rows, read by tables alone, and uses are what the tables say; nothing is lost or twice."""
    assert cache.lengths.tolist() == [len(row) for row in rows]
    size, tables = cache.block_size, cache.tables.tolist()
    for leaf in cache.arena.arena.tensors:
        for table, row in zip(tables, rows, strict=True):
            assert [float(leaf[table[p // size], p % size, 0, 0]) for p in range(len(row))] == row
        # The trash is for kernels that write padding; this backend writes none.
        assert torch.isnan(leaf[-1]).all()
    named = [block for table in tables for block in table if block >= 0]
    assert cache.uses.tolist() == [named.count(block) for block in range(len(cache.uses))]
    assert set(cache.free).isdisjoint(named)
    assert len(cache.free) + len(set(named)) == len(cache.uses)


def poisoned(cache: PagedCache) -> PagedCache:
    """The cache with NaN in the trash and in every block that no row uses."""
    for leaf in cache.arena.arena.tensors:
        leaf[[*cache.free, -1]] = float("nan")
    return cache


def needed(cache: PagedCache, counts: list[int]) -> int:
    """Blocks that a reservation takes, by the definition: missing ones, and all owners but one of a shared one."""
    size, missing = cache.block_size, 0
    writers: dict[int, int] = {}
    for table, length, count in zip(cache.tables.tolist(), cache.lengths.tolist(), counts, strict=True):
        for p in {(length + t) // size for t in range(count)}:
            if table[p] < 0:
                missing += 1
            else:
                writers[table[p]] = writers.get(table[p], 0) + 1
    owners = cache.uses.tolist()
    return missing + sum(min(n, owners[block] - 1) for block, n in writers.items())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sequence_of_functions_on_pages_agrees_with_lists(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 3, 4, 16]))
    batch = data.draw(st.integers(1, 3))
    spec = CacheSpec((LayerCache(1, 1), LayerCache(1, 1, window=2)))
    enough = batch * -(-CAPACITY // size)
    blocks = data.draw(st.integers(max(1, enough // 2), enough))
    cache = kv_cache.init_paged(
        spec, batch=batch, capacity=CAPACITY, dtype=torch.float32, block_size=size, blocks=blocks
    )
    poisoned(cache)
    rows: list[list[float]] = [[] for _ in range(batch)]
    others: list[tuple[PagedCache, list[list[float]]]] = []
    value = 0.0
    for _ in range(data.draw(st.integers(1, 16))):
        batch = len(rows)
        action = data.draw(
            st.sampled_from(
                ["write", "write", "write", "reserve", "truncate", "select", "select", "fork", "save"]
            )
        )
        if action in ("write", "reserve"):
            counts = data.draw(
                st.lists(st.sampled_from([CHUNK, CHUNK, 1, 0]), min_size=batch, max_size=batch)
            )
            if any(len(row) + count > CAPACITY for row, count in zip(rows, counts, strict=True)):
                with pytest.raises(CapacityError, match="cannot hold this many more tokens"):
                    kv_cache.reserve(cache, counts)
                continue
            free, wanted = len(cache.free), needed(cache, counts)
            if wanted > free:
                with pytest.raises(CapacityError, match=f"{free} free blocks .*{wanted} needed"):
                    kv_cache.reserve(cache, counts)
                continue
            cache = kv_cache.reserve(cache, counts)
            assert len(cache.free) == free - wanted
            if action == "write":
                x = (value + torch.arange(batch * CHUNK).float()).view(batch, CHUNK, 1, 1)
                value += batch * CHUNK
                cache = step(x, cache, torch.tensor(counts))
                rows = [[*row, *x[b, : counts[b], 0, 0].tolist()] for b, row in enumerate(rows)]
        elif action == "truncate":
            rows = [row[: max(0, len(row) - data.draw(st.sampled_from([0, 1, 1, 2, 11])))] for row in rows]
            cache = kv_cache.truncate(cache, [len(row) for row in rows])
        elif action == "select":
            indices = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
            cache = kv_cache.select(cache, indices)
            rows = [list(rows[i]) for i in indices]
        elif action == "fork":
            # From here on both go their ways; which of them goes on is drawn.
            pair = [(poisoned(kv_cache.fork(cache)), [list(row) for row in rows]), (cache, rows)]
            cache, rows = pair.pop(data.draw(st.integers(0, 1)))
            others += pair
        else:
            saved = kv_cache.save(cache)
            assert not any(torch.isnan(leaf).any() for name in ("k", "v") for leaf in saved[name])
            cache = poisoned(kv_cache.load(saved, spec))
        pages_hold(cache, rows)
    for other, held in others:
        pages_hold(other, held)
