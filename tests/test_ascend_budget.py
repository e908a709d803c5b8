"""The budget of captured graphs: streams of a chip, which graphs go, and that none outlives its executable."""

from __future__ import annotations

import gc

import pytest
import torch

import atbx
from atbx.core.errors import CapacityError
from atbx.kernels import ascend
from atbx.kernels.ascend.budget import GraphBudget, budget_of, streams_of_graph, usable_streams
from atbx.kernels.ascend.chips import chip
from atbx.kernels.ascend.report import updates_of
from atbx.models import llama
from atbx.models.llama import LlamaConfig
from atbx.ops.rope import Rope


class Owner:
    """An executable that captures graphs."""


def waiting() -> tuple[list[str], object]:
    waits: list[str] = []
    return waits, lambda: waits.append("waited")


def test_streams_are_those_of_the_old_rule_of_vllm_ascend() -> None:
    # 1800 of 2048; a graph of a model of 32 layers takes 33, so 54 of them fit.
    assert usable_streams(chip("Ascend910B3")) == 1800
    assert streams_of_graph(32) == 33
    assert usable_streams(chip("Ascend910B3")) // streams_of_graph(32) == 54
    assert usable_streams(chip("Ascend310P3")) == 776


def test_the_least_recently_used_graph_of_anyone_goes() -> None:
    waits, wait = waiting()
    budget, one, two = GraphBudget(10), Owner(), Owner()
    for owner, key in ((one, "a"), (one, "b"), (two, "a")):
        budget.make_room(owner, 3, 4, wait)
        budget.put(owner, key, f"graph {key}", 3)
    assert (budget.graphs, budget.streams, budget.dropped, waits) == (3, 9, 0, [])
    assert budget.get(one, "a") == "graph a"
    budget.make_room(two, 3, 4, wait)
    budget.put(two, "c", "graph c", 3)
    # "b" was used longest ago; "a" was used since.
    assert budget.get(one, "b") is None
    assert [budget.get(one, "a"), budget.get(two, "a"), budget.get(two, "c")] == [
        "graph a",
        "graph a",
        "graph c",
    ]
    assert (budget.streams, budget.dropped, waits) == (9, 1, ["waited"])


def test_as_many_go_as_a_large_graph_needs_after_one_wait() -> None:
    waits, wait = waiting()
    budget, owner = GraphBudget(10), Owner()
    for key in "abcde":
        budget.make_room(owner, 2, 9, wait)
        budget.put(owner, key, key, 2)
    budget.make_room(owner, 7, 9, wait)
    assert [key for key in "abcde" if budget.get(owner, key)] == ["e"]
    assert waits == ["waited"]
    budget.make_room(owner, 8, 9, wait)
    assert budget.graphs == 1


def test_an_owner_keeps_only_so_many() -> None:
    _, wait = waiting()
    budget, owner, other = GraphBudget(100), Owner(), Owner()
    budget.put(other, "x", "x", 1)
    for key in "abc":
        budget.make_room(owner, 1, 2, wait)
        budget.put(owner, key, key, 1)
    assert [budget.get(owner, key) for key in "abc"] == [None, "b", "c"]
    assert budget.get(other, "x") == "x"


def test_a_graph_that_no_device_has_streams_for_is_refused_and_nothing_goes() -> None:
    waits, wait = waiting()
    budget, owner = GraphBudget(10), Owner()
    budget.put(owner, "a", "a", 10)
    with pytest.raises(
        CapacityError, match=r"at most 10 streams, found 11 .*vllm-ascend, not measured here.*mask"
    ):
        budget.make_room(owner, 11, 4, wait)
    assert budget.get(owner, "a") == "a"
    assert waits == []


def test_graphs_go_with_their_executable_even_in_the_midst_of_a_change() -> None:
    _, wait = waiting()
    budget, kept = GraphBudget(10), Owner()
    budget.put(kept, "a", "a", 1)
    gone: Owner | None = Owner()
    budget.put(gone, "b", "b", 2)
    assert budget.streams == 3
    gone = None
    gc.collect()
    assert (budget.graphs, budget.streams) == (1, 1)
    last: Owner | None = Owner()
    budget.put(last, "c", "c", 4)
    with budget._open():
        # A collection while the budget is being changed: it must not wait for itself.
        last = None
        gc.collect()
    assert (budget.graphs, budget.streams) == (1, 1)
    budget.make_room(kept, 9, 4, wait)
    assert budget.get(kept, "a") == "a"


def test_a_device_has_one_budget() -> None:
    b3 = chip("Ascend910B3")
    assert budget_of(63, b3) is budget_of(63, b3)
    assert budget_of(63, b3) is not budget_of(62, b3)
    assert budget_of(63, b3).usable == 1800


@pytest.mark.parametrize(("lengths", "updates"), [("update", 5), ("mask", 0)])
def test_updates_of_a_plan_are_its_attention_launches(lengths: str, updates: int) -> None:
    config = LlamaConfig(
        vocab=64, width=32, layers=5, heads=2, kv_heads=1, head_size=32, ff=32, rope=Rope(dims=32), context=256,
        tied=True,
    )  # fmt: skip
    backend = ascend.backend(chip="Ascend910B3", lengths=lengths)
    generate = atbx.generator(llama.forward, config, device=backend)
    for step in generate.explain(llama.abstract(config, torch.float16), prompt=16):
        assert updates_of(step.variant.lowered) == updates
