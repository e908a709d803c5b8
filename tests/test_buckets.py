"""Buckets: ladders, the choice of a size, and what a bucket may be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from core_ops import SCALE, compiled
from hypothesis import given
from hypothesis import strategies as st

from atbx.core.buckets import Bucket, choose, ladder
from atbx.core.errors import BucketError


@st.composite
def ladders(draw: Any) -> tuple[tuple[int, ...], dict[str, int]]:
    capacity = draw(st.integers(1, 20_000))
    options = {
        "smallest": draw(st.integers(1, capacity)),
        "doubling_until": draw(st.integers(1, 64)),
        "steps": draw(st.integers(1, 8)),
    }
    return ladder(capacity, **options), {"capacity": capacity, **options}


@given(ladders())
def test_a_ladder_ascends_from_the_smallest_to_the_capacity_itself(case: Any) -> None:
    sizes, options = case
    assert sizes[0] == min(options["smallest"], options["capacity"])
    assert sizes[-1] == options["capacity"]
    assert list(sizes) == sorted(set(sizes))


@given(ladders())
def test_a_ladder_grows_by_a_bounded_share_and_stays_short(case: Any) -> None:
    sizes, options = case
    for small, large in itertools.pairwise(sizes):
        if small < options["doubling_until"]:
            assert large <= max(2 * small, small + 1)
        else:
            assert large <= small + max(1, small // options["steps"])
    octaves = options["capacity"].bit_length() + 1
    # Below 2 * steps every size is a step of one; above, at most 2 * steps fit into an octave.
    assert len(sizes) <= 2 * options["steps"] * octaves + options["doubling_until"].bit_length() + 2


@given(ladders(), st.data())
def test_the_smallest_bucket_that_holds_a_size_is_chosen_and_never_decreases(case: Any, data: Any) -> None:
    sizes, options = case
    one, other = sorted(data.draw(st.tuples(*[st.integers(0, options["capacity"])] * 2)))
    chosen = choose(sizes, one, "T")
    assert chosen in sizes
    assert chosen >= one
    assert not any(one <= size < chosen for size in sizes)
    assert chosen <= choose(sizes, other, "T")


@given(st.integers(1, 10_000), st.integers(1, 1000))
def test_a_size_past_the_capacity_is_refused_by_name(capacity: int, more: int) -> None:
    with pytest.raises(BucketError, match=rf"'tokens'.*at most {capacity}, found {capacity + more}"):
        choose(ladder(capacity), capacity + more, "tokens")


def test_the_example_of_the_docstring() -> None:
    assert ladder(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def test_a_capacity_between_powers_of_two_is_the_last_bucket() -> None:
    # 300 tokens of a context of 317 must not be padded to 512, which no buffer holds.
    assert ladder(317)[-2:] == (256, 317)
    assert choose(ladder(317), 300, "T") == 317


def test_no_ladder_has_a_hole_and_300_wastes_little() -> None:
    sizes = ladder(49_152)
    assert all(large <= 2 * small for small, large in itertools.pairwise(sizes))
    assert all(large <= 1.5 * small for small, large in itertools.pairwise(sizes) if small >= 8)
    assert choose(ladder(512), 300, "T") == 384
    mean = sum(choose(ladder(512), n, "T") / n for n in range(1, 513)) / 512
    assert mean < 1.25


@pytest.mark.parametrize(("capacity", "smallest"), [(0, 1), (-1, 1), (4, 0), (4, 5)])
def test_a_ladder_that_cannot_be_is_refused(capacity: int, smallest: int) -> None:
    with pytest.raises(BucketError, match=f"smallest={smallest}, capacity={capacity}"):
        ladder(capacity, smallest=smallest)


@pytest.mark.parametrize("options", [{"steps": 0}, {"doubling_until": 0}, {"steps": -1}])
def test_a_ladder_of_no_steps_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(BucketError, match=str(next(iter(options)))):
        ladder(64, **options)


@pytest.mark.parametrize("sizes", [(), (0, 4), (4, 2), (2, 2), (-1,)])
def test_bucket_sizes_must_be_positive_and_ascending(sizes: tuple[int, ...]) -> None:
    with pytest.raises(BucketError, match="positive and ascending"):
        Bucket((("x", 0),), sizes)


def test_a_bucket_must_name_an_axis_and_count_axes_from_the_front() -> None:
    with pytest.raises(BucketError, match="names no"):
        Bucket((), (4,))
    with pytest.raises(BucketError, match=r"x.*-1"):
        Bucket((("x", -1),), (4,))


def test_a_holed_ladder_of_ones_own_shows_its_waste() -> None:
    jit = compiled(lambda x: SCALE(x, by=2.0), buckets={"T": Bucket((("x", 0),), (8, 64))})
    assert jit(torch.ones(9)).tolist() == [2.0] * 9
    (planned,) = jit.plan([(torch.ones(9),)])
    assert planned.name == "x:f32[64]"
