"""The variant cache: planned is compiled is cached; bounded, frozen, cleared, and safe in threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_ops import ADD, NEG, SCALE, VIEW, compiled, f32, in_threads, make_backend

from atbx.core.binding import bind
from atbx.core.buckets import Bucket, ladder
from atbx.core.errors import (
    FrozenCacheError,
)


def counted(**options: Any) -> tuple[Any, list[int]]:
    traced: list[int] = []

    def function(x: Any) -> Any:
        traced.append(int(x.shape[0]))
        return NEG(x)

    return compiled(function, **options), traced


def test_what_is_planned_is_what_is_compiled_is_what_is_cached() -> None:
    jit, traced = counted(buckets={"T": Bucket((("x", 0),), ladder(64))})
    workload = [(f32(n),) for n in (3, 4, 5, 17, 33, 50, 64, 4)]
    planned = jit.plan(workload)
    assert (len(planned), traced, jit.cache_info().variants) == (5, [], 0)
    assert jit.warm(workload) == 5
    assert {p.name for p in planned} == set(jit.cache_info().names)
    assert all(p.compiled for p in jit.plan(workload))
    jit.freeze()
    for (x,) in workload:
        assert jit(torch.ones(x.shape)).shape == x.shape
    assert len(traced) == 5
    assert jit.warm(workload) == 0
    info = jit.cache_info()
    assert (info.variants, info.misses, info.hits, info.frozen) == (5, 5, 8, True)


def test_warming_packs_parameters_so_that_the_first_call_makes_nothing() -> None:
    backend, counts = make_backend()
    jit = compiled(lambda p, x: SCALE(ADD(x, p["w"]), by=2.0), backend=backend)
    bound = bind({"w": torch.ones(2)})
    assert jit.warm([(bound, f32(2))]) == 1
    jit.freeze()
    assert counts.launched == []
    assert jit(bound, torch.zeros(2)).tolist() == [2.0, 2.0]


def test_a_frozen_cache_refuses_a_miss_by_shape_and_names_the_nearest_variant() -> None:
    jit, traced = counted()
    jit(torch.ones(3))
    jit.freeze()
    with pytest.raises(
        FrozenCacheError, match=r"x:f32\[4\].*nearest variant x:f32\[3\].*shape of x: \(4,\).*\(3,\)"
    ):
        jit(torch.ones(4))
    with pytest.raises(FrozenCacheError):
        jit.warm([(f32(4),)])
    assert jit(torch.ones(3)).tolist() == [-1.0] * 3
    jit.unfreeze()
    assert jit(torch.ones(4)).tolist() == [-1.0] * 4
    assert traced == [3, 4]


def test_the_least_recently_used_variant_goes_first() -> None:
    jit, traced = counted(capacity=2)
    for size in (1, 2, 1, 3, 1, 2):
        jit(torch.ones(size))
    assert traced == [1, 2, 3, 2]
    assert jit.cache_info().evictions == 2


def test_a_thousand_shapes_and_structures_stay_bounded() -> None:
    jit, _ = counted(capacity=8)
    for size in range(1, 1001):
        assert jit(torch.ones(size)).shape == (size,)
    info = jit.cache_info()
    assert (info.variants, info.misses, info.evictions) == (8, 1000, 992)
    trees_too = compiled(lambda x: NEG(next(iter(x.values()))), capacity=8)
    for index in range(1500):
        assert trees_too({f"k{index}": torch.ones(1)}).item() == -1.0
    assert trees_too.cache_info().variants == 8
    assert len(trees_too._signature.layouts) <= 1024
    assert trees_too({"k1499": torch.ones(1)}).item() == -1.0
    assert trees_too.cache_info().misses == 1500


def test_clearing_forgets_every_variant_and_counters_stay() -> None:
    jit, traced = counted()
    jit(torch.ones(1))
    jit.clear()
    info = jit.cache_info()
    assert (info.variants, info.misses) == (0, 1)
    jit(torch.ones(1))
    assert traced == [1, 1]


def test_a_function_that_fails_to_stage_enters_nothing_and_can_be_called_again() -> None:
    fail = [True]

    def function(x: Any) -> Any:
        if fail:
            raise ValueError("not yet")
        return NEG(x)

    jit = compiled(function)
    with pytest.raises(ValueError, match="not yet"):
        jit(torch.ones(1))
    assert jit.cache_info().variants == 0
    fail.clear()
    assert jit(torch.ones(1)).item() == -1.0


def test_a_warm_call_enters_no_op_and_no_function() -> None:
    jit, traced = counted()
    jit(torch.ones(2))
    before = len(traced)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an op was entered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(NEG), "__call__", refuse)
        for _ in range(3):
            assert jit(torch.ones(2)).tolist() == [-1.0, -1.0]
    assert len(traced) == before


def test_layout_is_part_of_the_key_and_results_are_right_for_both() -> None:
    jit = compiled(lambda x: ADD(VIEW(NEG(x), shape=(6,)), 0.0))
    x = torch.arange(6.0).reshape(2, 3)
    assert jit(x).tolist() == [-0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert not jit.explain(x.T.contiguous().T).hit


# --- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_same_shape", [True, False])
def test_threads_give_the_results_of_solo_runs(is_same_shape: bool) -> None:
    def function(params: Any, x: Any) -> Any:
        for i in range(6):
            x = ADD(ADD(x, 1.0), params["w"]) if i % 2 else NEG(x)
        return x

    jit, traced = compiled(function), []
    bound = bind({"w": torch.tensor(0.5)})
    inputs = [torch.full((200 if is_same_shape else 200 + i,), float(i)) for i in range(4)]
    wanted = [compiled(function)(bound, x) for x in inputs]

    def work(index: int) -> None:
        for _ in range(100):
            traced.append(torch.equal(jit(bound, inputs[index]), wanted[index]))

    in_threads(4, work)
    assert traced == [True] * 400
    assert jit.cache_info().variants == (1 if is_same_shape else 4)
    assert jit.cache_info().misses == jit.cache_info().variants
