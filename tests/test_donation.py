"""Donation: updates in place, what is refused afterwards, interrupted steps, two threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_ops import ADD, NEG, WRITE, compiled, in_threads, make_backend

from atbx.core.arena import Arena
from atbx.core.backend import Kernel
from atbx.core.buckets import Bucket
from atbx.core.errors import (
    CacheStateError,
    CapacityError,
    DonationError,
)


def write(cache: Any, x: Any, at: Any) -> Any:
    return WRITE(cache, x, at)


def test_a_donated_tensor_is_updated_in_place_and_refused_afterwards() -> None:
    jit = compiled(write, donate=("cache",))
    cache = torch.zeros(3)
    address = cache.data_ptr()
    after = jit(cache, torch.ones(1), 0)
    assert after.data_ptr() == address
    assert after.tolist() == [1.0, 0.0, 0.0]
    with pytest.raises(DonationError, match=r"^cache: this tensor was donated as cache of write"):
        jit(cache, torch.ones(1), 1)
    with pytest.raises(DonationError, match=r"^x/0: this tensor was donated"):
        compiled(lambda x: NEG(x[0]))([cache])
    assert jit(after, torch.ones(1), 1).tolist() == [1.0, 1.0, 0.0]


def test_a_donated_parameter_object_is_refused_afterwards_too() -> None:
    jit = compiled(write, donate=("cache",))
    cache = torch.nn.Parameter(torch.zeros(3))
    jit(cache, torch.ones(1), 0)
    with pytest.raises(DonationError, match=r"^cache: "):
        jit(cache, torch.ones(1), 1)


def test_a_donated_tensor_that_was_padded_is_refused_like_any_other() -> None:
    jit = compiled(write, donate=("cache",), buckets={"S": Bucket((("cache", 0),), (4, 8))})
    for size in (3, 4):
        cache = torch.zeros(size)
        assert jit(cache, torch.ones(1), 1).tolist() == [0.0, 1.0, 0.0, 0.0][:size]
        with pytest.raises(DonationError, match=r"^cache: "):
            jit(cache, torch.ones(1), 1)


def test_one_buffer_at_two_leaves_is_refused_and_both_are_named() -> None:
    jit = compiled(lambda cache, x, at: WRITE(cache["a"], x, at), donate=("cache",))
    buffer = torch.zeros(4)
    with pytest.raises(DonationError, match=r"^cache/a and cache/b: one buffer"):
        jit({"a": buffer, "b": buffer}, torch.ones(1), 0)
    with pytest.raises(DonationError, match=r"^cache/a and x: one buffer"):
        jit({"a": buffer}, buffer[1:2], 0)
    with pytest.raises(DonationError, match=r"^cache/a and x: one buffer"):
        jit({"a": buffer[::2]}, buffer[2:3], 0)
    # Halves of one allocation share nothing, and a refused call has donated nothing.
    assert jit({"a": buffer[:2]}, buffer[2:3] + 1, 0).tolist() == [1.0, 0.0]


def test_a_buffer_that_nothing_donates_may_be_passed_twice() -> None:
    x = torch.ones(2)
    assert compiled(lambda x, y: ADD(x, y))(x, x).tolist() == [2.0, 2.0]
    jit = compiled(lambda cache, x, y, at: ADD(WRITE(cache, x, at), y), donate=("cache",))
    assert jit(torch.zeros(2), x, x, 0).tolist() == [2.0, 2.0]


def test_a_donated_argument_that_nothing_updates_is_refused() -> None:
    jit = compiled(lambda cache, x: NEG(x), donate=("cache",))
    with pytest.raises(DonationError, match=r"'cache' is donated, but <lambda> updates no leaf"):
        jit(torch.ones(1), torch.ones(1))


def grow(cache: Any, x: Any, at: Any) -> Any:
    tree = cache.tree
    return cache.replaced({"k": WRITE(tree["k"], x, at), "v": WRITE(tree["v"], NEG(x), at)})


def arena() -> Any:
    return Arena({"k": torch.zeros(3), "v": torch.zeros(3)}).value()


def test_an_arena_keeps_its_addresses_and_old_values_are_refused() -> None:
    jit = compiled(grow, donate=("cache",))
    first = arena()
    second = jit(first, torch.ones(1), 0)
    assert second.arena is first.arena
    third = jit(second, torch.ones(1), 2)
    assert third.tree["v"].tolist() == [-1.0, 0.0, -1.0]
    for old in (first, second):
        with pytest.raises(DonationError, match=r"^cache: .*donated to a later step"):
            jit(old, torch.ones(1), 1)
        with pytest.raises(DonationError):
            _ = old.tree
    assert jit.cache_info().variants == 1


def test_an_arena_that_is_not_donated_stays_as_it_was() -> None:
    jit = compiled(grow)
    first = arena()
    second = jit(first, torch.ones(1), 0)
    assert second.arena is not first.arena
    assert first.tree["k"].tolist() == [0.0] * 3
    assert second.tree["k"].tolist() == [1.0, 0.0, 0.0]


def test_the_old_and_the_new_state_of_a_donated_arena_may_both_be_returned() -> None:
    def both(cache: Any, x: Any, at: Any) -> Any:
        return cache, grow(cache, x, at)

    old, new = compiled(both, donate=("cache",))(arena(), torch.ones(1), 1)
    assert old.tree["k"].tolist() == [0.0] * 3
    assert new.tree["k"].tolist() == [0.0, 1.0, 0.0]
    assert old.arena is not new.arena


def test_one_new_state_returned_twice_is_two_arenas() -> None:
    def twice(cache: Any, x: Any, at: Any) -> Any:
        grown = grow(cache, x, at)
        return grown, grown

    one, other = compiled(twice, donate=("cache",))(arena(), torch.ones(1), 1)
    assert one.tree["k"].tolist() == other.tree["k"].tolist() == [0.0, 1.0, 0.0]
    jit = compiled(grow, donate=("cache",))
    jit(one, torch.full((1,), 5.0), 0)
    assert other.tree["k"].tolist() == [0.0, 1.0, 0.0]


def test_one_arena_at_two_leaves_and_a_tensor_of_it_beside_it_are_refused() -> None:
    jit = compiled(
        lambda cache, other, at: grow(cache, other["k"] if isinstance(other, dict) else other, at),
        donate=("cache",),
    )
    value = arena()
    with pytest.raises(DonationError, match=r"^other and cache/k: one buffer"):
        jit(value, value.tree["k"], 0)
    two = compiled(lambda a, b, x, at: grow(a, x, at), donate=("a",))
    with pytest.raises(DonationError, match=r"^a and b: one buffer"):
        two(value, value, torch.ones(1), 0)
    value.check()


def failing_backend() -> tuple[Any, list[BaseException]]:
    backend, _ = make_backend()
    errors: list[BaseException] = []

    def make(equation: Any) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            if errors:
                raise errors.pop()
            return -x

        return run

    backend.add(Kernel("failing", "t_neg", make), preferred=True)
    return backend, errors


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("kernel failed")])
def test_an_interrupted_step_marks_the_cache_it_was_updating(error: BaseException) -> None:
    backend, errors = failing_backend()
    jit = compiled(grow, donate=("cache",), backend=backend)
    value = jit(arena(), torch.ones(1), 0)
    errors.append(error)
    with pytest.raises(type(error)):
        jit(value, torch.ones(1), 1)
    with pytest.raises(CacheStateError, match=r"^cache: a step was interrupted"):
        jit(value, torch.ones(1), 1)
    assert jit(arena(), torch.ones(1), 1).tree["k"].tolist() == [0.0, 1.0, 0.0]


def test_an_interrupted_step_leaves_what_it_did_not_donate() -> None:
    backend, errors = failing_backend()
    jit = compiled(grow, backend=backend)
    value = arena()
    jit(value, torch.ones(1), 0)
    errors.append(RuntimeError("kernel failed"))
    with pytest.raises(RuntimeError, match="kernel failed"):
        jit(value, torch.ones(1), 1)
    assert jit(value, torch.ones(1), 2).tree["k"].tolist() == [0.0, 0.0, 1.0]


def test_a_step_that_its_host_plan_refuses_has_changed_and_donated_nothing() -> None:
    jit = compiled(grow, donate=("cache",))
    value = arena()
    with pytest.raises(CapacityError, match="past the end"):
        jit(value, torch.ones(1), 3)
    value.check()
    assert jit(value, torch.ones(1), 2).tree["k"].tolist() == [0.0, 0.0, 1.0]


def test_of_two_threads_that_donate_one_value_exactly_one_wins() -> None:
    jit = compiled(grow, donate=("cache",))
    jit.warm([(arena(), torch.ones(1), 0)])
    for _ in range(30):
        value, results = arena(), []

        def work(index: int, value: Any = value, results: list[Any] = results) -> None:
            try:
                results.append(jit(value, torch.ones(1), index))
            except DonationError:
                results.append(None)

        in_threads(2, work)
        won = [r for r in results if r is not None]
        assert len(won) == 1
        assert won[0].tree["k"].sum().item() == 1.0
