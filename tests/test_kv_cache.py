"""KV caches as values: what each pure function gives, what it leaves alone, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import atbx
from atbx import ops
from atbx.core.errors import CacheStateError, CapacityError, DonationError, OptionError, TreeError
from atbx.ops import kv_cache
from atbx.ops.kv_cache import CacheSpec, KVCache, LayerCache

SPEC = CacheSpec((LayerCache(1, 4), LayerCache(2, 4)))


def extend(k: Any, cache: KVCache, counts: Any) -> KVCache:
    """Append the same keys and values to both layers and advance."""
    for layer, spec in enumerate(cache.spec.layers):
        heads = ops.concat([k] * spec.kv_heads, axis=2)
        cache = kv_cache.append(cache, heads, heads, layer=layer, counts=counts)
    return cache.advance(counts)


step = atbx.jit(extend, donate=("cache",))


def filled(
    batch: int, tokens: int, *, capacity: int = 16, spec: CacheSpec = SPEC, chunk: int | None = None
) -> KVCache:
    """A cache of `tokens` tokens a row; slot t of row b holds 100 b + t."""
    cache = kv_cache.init(spec, batch=batch, capacity=capacity, dtype=torch.float32, chunk=chunk or capacity)
    for t in range(tokens):
        cache = step(marks(batch, t), cache, torch.ones(batch, dtype=torch.int64))
    return cache


def marks(batch: int, t: int) -> torch.Tensor:
    return (100.0 * torch.arange(batch) + t).view(batch, 1, 1, 1).expand(batch, 1, 1, 4).contiguous()


def held(cache: KVCache, layer: int = 0) -> list[list[float]]:
    """What each row holds, by position."""
    leaf = cache.arena.tree["k"][layer]
    return [
        [float(leaf[row, p % leaf.shape[1], 0, 0]) for p in range(max(0, n - leaf.shape[1]), n)]
        for row, n in zip(cache.rows.tolist(), cache.lengths.tolist(), strict=True)
    ]


def test_append_writes_behind_what_a_row_holds_and_advance_counts_it() -> None:
    cache = filled(2, 3)
    assert held(cache) == [[0, 1, 2], [100, 101, 102]]
    assert held(cache, layer=1) == held(cache, layer=0)
    assert cache.lengths.tolist() == [3, 3]


def test_padding_tokens_write_no_slot() -> None:
    cache = filled(2, 1)
    before = [t.clone() for t in cache.arena.arena.tensors]
    cache = step(torch.full((2, 4, 1, 4), 7.0), cache, torch.tensor([0, 2]))
    assert cache.lengths.tolist() == [1, 3]
    assert held(cache) == [[0], [100, 7, 7]]
    for old, new in zip(before, cache.arena.arena.tensors, strict=True):
        torch.testing.assert_close(new[0], old[0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(new[1, 3:], old[1, 3:], rtol=0, atol=0, equal_nan=True)


def test_arbitrary_rows_of_an_arena_are_written_and_read() -> None:
    cache = kv_cache.select(filled(4, 2), [3, 0])
    cache = step(marks(2, 9), cache, torch.tensor([1, 1]))
    assert held(cache) == [[300, 301, 9], [0, 1, 109]]


def test_truncate_forgets_the_newest_tokens() -> None:
    cache = kv_cache.truncate(filled(2, 5), [2, 5])
    assert held(cache) == [[0, 1], [100, 101, 102, 103, 104]]
    cache = step(marks(2, 50), cache, torch.tensor([1, 1]))
    assert held(cache)[0] == [0, 1, 50]


@pytest.mark.parametrize(("lengths", "place"), [([6, 1], "row 0"), ([1, -1], "row 1")])
def test_truncate_refuses_lengths_a_row_does_not_have(lengths: list[int], place: str) -> None:
    with pytest.raises(CapacityError, match=place):
        kv_cache.truncate(filled(2, 5), lengths)


def test_truncating_a_window_past_its_wrap_raises() -> None:
    spec = CacheSpec((LayerCache(1, 4, window=4),))
    cache = filled(1, 9, spec=spec, chunk=3)
    assert cache.arena.tree["k"][0].shape[1] == 6
    # Six slots hold positions 3..8. Length 6 needs 3..5; length 5 would need position 2, which is gone.
    assert kv_cache.truncate(cache, [6]).lengths.tolist() == [6]
    with pytest.raises(
        CacheStateError, match=r"layer 0 keeps a window of 4 tokens in 6 slots.*at least 6.*found 5"
    ):
        kv_cache.truncate(cache, [5])


def test_truncating_a_window_that_never_wrapped_is_free() -> None:
    spec = CacheSpec((LayerCache(1, 4, window=4),))
    assert kv_cache.truncate(filled(1, 6, spec=spec, chunk=3), [1]).lengths.tolist() == [1]


def test_a_fork_and_its_origin_never_see_each_other() -> None:
    origin = filled(2, 3)
    branch = kv_cache.fork(origin)
    before = held(origin)
    branch = step(marks(2, 77), branch, torch.tensor([1, 1]))
    assert held(origin) == before
    origin = step(marks(2, 55), origin, torch.tensor([1, 1]))
    assert held(branch)[0] == [0, 1, 2, 77]
    assert held(origin)[0] == [0, 1, 2, 55]


def test_select_reorders_without_a_copy_and_copies_repeated_rows() -> None:
    cache = filled(3, 2)
    arena = cache.arena.arena
    reordered = kv_cache.select(cache, [2, 0])
    assert reordered.arena.arena is arena
    assert held(reordered) == [[200, 201], [0, 1]]
    doubled = kv_cache.select(reordered, [0, 0])
    assert doubled.arena.arena is not arena
    doubled = step(marks(2, 40), doubled, torch.tensor([1, 1]))
    assert held(doubled) == [[200, 201, 40], [200, 201, 140]]


def test_select_refuses_a_row_that_is_not_there() -> None:
    with pytest.raises(CapacityError, match=r"indices\[1\].*0 to 1.*found 2"):
        kv_cache.select(filled(2, 1), [0, 2])


def test_a_donated_cache_value_cannot_be_used_again() -> None:
    old = filled(1, 1)
    new = step(marks(1, 1), old, torch.tensor([1]))
    assert held(new) == [[0, 1]]
    for use in (
        lambda: step(marks(1, 1), old, torch.tensor([1])),
        lambda: kv_cache.fork(old),
        lambda: kv_cache.truncate(old, [0]),
        lambda: kv_cache.select(old, [0]),
        lambda: old.arena.tree,
    ):
        with pytest.raises(DonationError, match="donated to a later step"):
            use()


def test_an_interrupted_step_leaves_a_cache_that_says_so() -> None:
    cache = filled(1, 1)

    def explode(x: Any, cache: KVCache, counts: Any) -> KVCache:
        cache = kv_cache.append(cache, x, x, layer=0, counts=counts)
        return cache.advance(EXPLODE(counts))

    with pytest.raises(KeyboardInterrupt):
        atbx.jit(explode, donate=("cache",))(marks(1, 1), cache, torch.tensor([1]))
    with pytest.raises(CacheStateError, match="interrupted"):
        step(marks(1, 1), cache, torch.tensor([1]))


def _interrupt(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


EXPLODE = atbx.define_op(
    "explode_in_test", shape=lambda x: atbx.Abstract(x.shape, x.dtype), reference=_interrupt
)


def test_exactly_full_is_allowed_and_one_more_is_not() -> None:
    cache = filled(1, 8, capacity=8)
    assert cache.lengths.tolist() == [8]
    with pytest.raises(CapacityError, match=r"at most 8, found 8 \+ 1"):
        step(marks(1, 8), cache, torch.tensor([1]))


def test_a_saved_cache_comes_back_with_the_same_contents() -> None:
    cache = kv_cache.truncate(filled(2, 5), [5, 2])
    restored = kv_cache.load(kv_cache.save(cache), SPEC)
    assert held(restored) == held(cache)
    assert (restored.capacity, restored.chunk) == (cache.capacity, cache.chunk)
    assert held(step(marks(2, 60), restored, torch.tensor([1, 1])))[1] == [100, 101, 160]


def test_a_saved_window_comes_back_with_its_ring() -> None:
    spec = CacheSpec((LayerCache(1, 4, window=4),))
    cache = filled(1, 9, spec=spec, chunk=2)
    assert held(kv_cache.load(kv_cache.save(cache), spec)) == [[4, 5, 6, 7, 8]]


def test_a_saved_cache_of_another_model_is_refused_with_every_mismatch() -> None:
    tree = kv_cache.save(filled(1, 1))
    with pytest.raises(TreeError, match=r"k/0: expected .* found .*\n.*v/0"):
        kv_cache.load(tree, CacheSpec((LayerCache(3, 4), LayerCache(2, 4))))


def test_sizes_must_be_positive() -> None:
    with pytest.raises(OptionError, match="capacity"):
        kv_cache.init(SPEC, batch=1, capacity=0, dtype=torch.float32)


def test_bytes_are_told_before_anything_is_allocated() -> None:
    cache = kv_cache.init(SPEC, batch=3, capacity=10, dtype=torch.bfloat16)
    assert SPEC.nbytes(3, 10, torch.bfloat16, 10) == cache.nbytes == 2 * 2 * 3 * 10 * (1 + 2) * 4
