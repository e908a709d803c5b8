"""Attention and KV writes over block tables: against an FP64 oracle, the dense cache, and a model without any cache."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from functools import partial
from typing import Any

import ascend_equations
import attention_oracle
import numpy as np
import plain_model
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import random_params, small_llama

import atbx
from atbx import ops
from atbx.core.jit import Jit
from atbx.kernels import cpu
from atbx.kernels.ascend.attention import ROWS
from atbx.kernels.ascend.cache_write import slots_view
from atbx.kernels.ascend.plan import CacheFacts, slots_of
from atbx.kernels.cpu.attention import plan_spans
from atbx.models import llama
from atbx.models.step import Step
from atbx.ops import kv_cache
from atbx.ops.attention import ATTENTION, KV_WRITE, alibi_slopes
from atbx.ops.kv_cache import CacheSpec, LayerCache, PagedCache

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

COMPOSED = next(row for row in ROWS if row.kernel == "composed.attention")

ALL = cpu.backend()
BACKENDS = {"fused": ALL, "unfused": dataclasses.replace(ALL, rules=[]), "reference": None}
"""The CPU backend with and without fusion, and the reference rules, which run at once and write to nothing."""


def runs(function: Any, backend: str, static: tuple[str, ...]) -> Any:
    """The function compiled on a backend, or run by its reference rules."""
    chosen = BACKENDS[backend]
    if chosen is None:
        return partial(atbx.reference, function)
    return Jit(function, chosen, static=static, donate=("cache",))


def attend(q: Any, k: Any, v: Any, cache: Any, counts: Any, extras: Any, options: Any) -> tuple[Any, Any]:
    """One attention layer as a function of any kind of cache."""
    out, cache = ops.attend(q, k, v, cache, layer=0, counts=counts, **extras, **dict(options))
    return out, cache.advance(counts)


compiled = {name: runs(attend, name, ("options",)) for name in BACKENDS}


def poisoned(cache: Any) -> Any:
    """The cache with NaN in every slot, the trash included."""
    for leaf in cache.arena.arena.tensors:
        leaf.fill_(float("nan"))
    return cache


def shuffled(cache: PagedCache, seed: int) -> PagedCache:
    """A new cache whose rows have all their blocks already, in an order that is anything but sorted."""
    blocks = list(range(len(cache.uses)))
    random.Random(seed).shuffle(blocks)
    B, N = cache.tables.shape
    tables = torch.tensor(blocks[: B * N]).view(B, N)
    return replace(cache, tables=tables, uses=torch.bincount(tables.flatten(), minlength=len(blocks)))


class Rows:
    """A paged cache beside plain arrays of every row's keys and values."""

    def __init__(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        size: int,
        dtype: torch.dtype = torch.float32,
        *,
        block: int = 4,
        window: int | None = None,
        capacity: int = 40,
        backend: str = "fused",
        order: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.size, self.dtype, self.window = heads, kv_heads, size, dtype, window
        spec = CacheSpec((LayerCache(kv_heads, size, window),))
        cache = poisoned(
            kv_cache.init_paged(spec, batch=batch, capacity=capacity, dtype=dtype, block_size=block)
        )
        self.cache = cache if order is None else shuffled(cache, order)
        self.run = compiled[backend]
        self.options = {"scale": size**-0.5, **(options or {})}
        self.keys = [np.zeros((0, kv_heads, size)) for _ in range(batch)]
        self.values = [np.zeros((0, kv_heads, size)) for _ in range(batch)]
        self.generator = torch.Generator().manual_seed(1)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def step(self, tokens: int, counts: list[int]) -> None:
        """One step, checked row by row against the oracle; padding is NaN going in and zero coming out."""
        B = len(counts)
        q = self.random(B, tokens, self.heads, self.size)
        k = self.random(B, tokens, self.kv_heads, self.size)
        v = self.random(B, tokens, self.kv_heads, self.size)
        for tensor in (q, k, v):
            for b, count in enumerate(counts):
                tensor[b, count:] = float("nan")
        arrays = {n: np.asarray(x) for n, x in self.options.items() if n in ("slopes", "sinks")}
        plain = {n: x for n, x in self.options.items() if n not in arrays}
        tensors = {n: torch.tensor(x, dtype=torch.float32) for n, x in arrays.items()}
        self.cache = kv_cache.reserve(self.cache, counts)
        out, self.cache = self.run(
            q, k, v, self.cache, torch.tensor(counts), tensors, tuple(sorted(plain.items()))
        )
        for b, count in enumerate(counts):
            start = len(self.keys[b])
            self.keys[b] = np.concatenate([self.keys[b], k[b, :count].double().numpy()])
            self.values[b] = np.concatenate([self.values[b], v[b, :count].double().numpy()])
            expected = attention_oracle.attention(
                q[b, :count].double().numpy(),
                self.keys[b],
                self.values[b],
                start,
                window=self.window,
                **plain,
                **arrays,
            )
            bound = TOLERANCE[self.dtype]
            np.testing.assert_allclose(out[b, :count].double().numpy(), expected, atol=bound, rtol=bound)
            assert (out[b, count:] == 0).all()


RAGGED = ((5, [5, 2, 0]), (1, [1, 1, 1]), (4, [0, 4, 3]), (1, [1, 0, 1]), (9, [9, 9, 1]), (1, [1, 1, 1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [1, 3, 16, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_ragged_steps_agree_with_the_oracle_and_nan_in_unused_slots_reaches_nothing(
    backend: str, block: int, heads: int, kv_heads: int
) -> None:
    rows = Rows(3, heads, kv_heads, 16, block=block, backend=backend)
    for tokens, counts in RAGGED:
        rows.step(tokens, counts)
    assert rows.cache.lengths.tolist() == [17, 17, 7]
    # The trash block is as it was: padding is written nowhere.
    assert all(torch.isnan(leaf[-1]).all() for leaf in rows.cache.arena.arena.tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("window", [None, 1, 2, 7])
def test_any_order_of_blocks_means_the_same(backend: str, order: int, window: int | None) -> None:
    rows = Rows(3, 4, 2, 8, block=3, order=order, window=window, backend=backend)
    tables = rows.cache.tables.tolist()
    assert all(row != sorted(row) for row in tables)
    for tokens, counts in RAGGED:
        rows.step(tokens, counts)
    assert rows.cache.tables.tolist() == tables


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_agrees_with_the_oracle(dtype: torch.dtype) -> None:
    rows = Rows(3, 4, 2, 16, dtype, block=4, order=1)
    for tokens, counts in RAGGED:
        rows.step(tokens, counts)


@pytest.mark.parametrize("size", [8, 24, 64, 80, 96, 128, 256])
def test_every_head_size_agrees_with_the_oracle(size: int) -> None:
    rows = Rows(2, 2, 1, size, order=2)
    for tokens, counts in ((6, [6, 2]), (1, [1, 1])):
        rows.step(tokens, counts)


@pytest.mark.parametrize("window", [1, 2, 4, 7])
@pytest.mark.parametrize("chunk", [1, 3, 5])
@pytest.mark.parametrize("block", [1, 4])
def test_a_window_limits_what_is_read_and_every_page_stays(window: int, chunk: int, block: int) -> None:
    rows = Rows(2, 2, 1, 8, window=window, block=block, capacity=64)
    for number in range(9):
        rows.step(chunk, [chunk, max(1, chunk - number % 2)])
    assert int((rows.cache.tables[0] >= 0).sum()) == -(-9 * chunk // block)


def test_what_a_window_no_longer_sees_is_not_read() -> None:
    rows = Rows(1, 2, 1, 8, window=4, block=2)
    rows.step(9, [9])
    table = rows.cache.tables[0].tolist()
    # The next token stands at 9 and sees 6 to 9: blocks 3 and 4.
    for leaf in rows.cache.arena.arena.tensors:
        leaf[table[:3]] = float("nan")
    rows.step(1, [1])


@pytest.mark.parametrize(
    "options",
    [
        {"soft_cap": 5.0},
        {"causal": False},
        {"soft_cap": 2.0, "causal": False},
        {"slopes": alibi_slopes(4).tolist()},
        {"sinks": [0.5, -1.0, 2.0, 0.0]},
    ],
)
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_every_option_agrees_with_the_oracle(options: dict[str, Any], backend: str) -> None:
    rows = Rows(2, 4, 2, 8, block=2, order=3, options=options, backend=backend)
    for tokens, counts in ((3, [3, 2]), (1, [1, 1]), (4, [2, 4])):
        rows.step(tokens, counts)


def test_slots_that_follow_no_order_are_written_one_by_one() -> None:
    # Positions 0, 1 and 2 in slots 7, 3 and 12 of 13: blocks of one slot.
    cache = kv_cache.init_paged(
        CacheSpec((LayerCache(1, 1),)), batch=1, capacity=3, dtype=torch.float32, block_size=1, blocks=13
    )
    cache = replace(poisoned(cache), tables=torch.tensor([[7, 3, 12]]))
    k = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    q = torch.zeros(1, 3, 1, 1)
    out, cache = compiled["fused"](q, k, k, cache, torch.tensor([3]), {}, (("scale", 1.0),))
    found = cache.arena.tree["k"][0].flatten()
    assert {i: float(x) for i, x in enumerate(found) if not torch.isnan(x)} == {7: 1.0, 3: 2.0, 12: 3.0}
    # Equal scores: each token sees the mean of the values up to its own.
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 1.5, 2.0]))


def test_neighbouring_blocks_are_read_as_one_piece_without_a_copy() -> None:
    facts = (4, 9, 2, None, 10, True, torch.float32)
    tables = torch.tensor([[3, 4, 5, 1, -1], [7, 6, -1, -1, -1]])
    first, second = plan_spans(facts, tables, torch.tensor([5, 0]), torch.tensor([2, 3]))
    # Row 0 holds positions 0 to 6: blocks 3 to 5 in one run, then one slot of block 1.
    assert first.reads == ((6, 6), (2, 1))
    assert first.writes == ((0, 11, 1), (1, 2, 1))
    assert (second.reads, second.writes) == (((14, 2), (12, 1)), ((0, 14, 2), (2, 12, 1)))
    windowed = plan_spans(
        (4, 9, 2, 3, 10, True, torch.float32), tables[:1], torch.tensor([5]), torch.tensor([1])
    )
    assert (windowed[0].first, windowed[0].reads) == (3, ((9, 3),))


def test_nan_in_a_live_slot_reaches_its_row_and_no_other() -> None:
    rows = Rows(2, 2, 1, 8, block=2)
    rows.step(3, [3, 3])
    block = int(rows.cache.tables[1, 0])
    rows.cache.arena.tree["v"][0][block, 1] = float("nan")
    rows.cache = kv_cache.reserve(rows.cache, [1, 1])
    one = torch.ones(2, 1, 1, 8)
    out, _ = rows.run(
        one.expand(2, 1, 2, 8).contiguous(), one, one, rows.cache, torch.tensor([1, 1]), {}, (("scale", 0.3),)
    )
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1]).all()


def _dense_and_paged(draw: st.DrawFn) -> tuple[Any, ...]:
    block = draw(st.sampled_from([1, 2, 3, 5]))
    window = draw(st.sampled_from([None, 1, 3, 6]))
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 8), min_size=batch, max_size=batch))
    counts = draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
    return block, window, tokens, lengths, counts, draw(st.integers(0, 99))


@settings(max_examples=60, deadline=None)
@given(st.composite(_dense_and_paged)())
def test_the_rules_say_the_same_of_pages_and_of_dense_rows(case: tuple[Any, ...]) -> None:
    block, window, tokens, lengths, counts, seed = case
    B, S, N = len(lengths), 15, -(-15 // block)
    generator = torch.Generator().manual_seed(seed)
    dense = [torch.randn(B, S, 2, 4, generator=generator) for _ in range(2)]
    order = torch.randperm(B * N, generator=generator)
    tables = order.view(B, N)
    paged = [torch.full((B * N + 1, block, 2, 4), float("nan")) for _ in range(2)]
    for arena, pages in zip(dense, paged, strict=True):
        for b, length in enumerate(lengths):
            for p in range(length):
                pages[tables[b, p // block], p % block] = arena[b, p]
    vectors = torch.tensor(lengths), torch.tensor(counts)
    new = [torch.randn(B, tokens, 2, 4, generator=generator) for _ in range(2)]
    sizes = {"window": window, "extent": S}
    dense_after = KV_WRITE.reference(*new, *dense, torch.arange(B), *vectors, **sizes)
    paged_after = KV_WRITE.reference(*new, *paged, tables, *vectors, **sizes)
    q = torch.randn(B, tokens, 4, 4, generator=generator)
    rest = {"scale": 0.5, "soft_cap": None, "causal": True, **sizes}
    expected = ATTENTION.reference(q, *dense_after, torch.arange(B), *vectors, None, None, **rest)
    found = ATTENTION.reference(q, *paged_after, tables, *vectors, None, None, **rest)
    assert torch.equal(found, expected)
    held = [[(b, p) for p in range(n + c)] for b, (n, c) in enumerate(zip(lengths, counts, strict=True))]
    for before, after, arena in zip(paged, paged_after, dense_after, strict=True):
        live = {(int(tables[b, p // block]), p % block) for row in held for b, p in row}
        for b, p in (place for row in held for place in row):
            assert torch.equal(after[tables[b, p // block], p % block], arena[b, p])
        for place in ((x, y) for x in range(after.shape[0]) for y in range(block)):
            if place not in live:
                assert torch.isnan(after[place]).all()
        assert torch.isnan(before[-1]).all()


def test_the_cost_of_attention_goes_by_the_extent_and_not_by_the_block() -> None:
    q = atbx.Abstract((2, 1, 4, 8), torch.float32)
    rows = {"dense": ((2, 64, 2, 8), (2,)), "paged": ((33, 4, 2, 8), (2, 16))}
    costs = {}
    for name, (arena, places) in rows.items():
        arenas = (atbx.Abstract(arena, torch.float32),) * 2
        index, vector = atbx.Abstract(places, torch.int64), atbx.Abstract((2,), torch.int64)
        operands = (q, *arenas, index, vector, vector, None, None)
        params = {"scale": 0.3, "extent": 48, "window": None, "soft_cap": None, "causal": True}
        costs[name] = ATTENTION.cost(operands, ATTENTION.results(*operands, **params), **params)
    assert costs["paged"] == costs["dense"]
    assert costs["paged"].flops == 4 * 2 * 4 * 8 * 48


# --- what the Ascend kernels are given ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.composite(_dense_and_paged)())
def test_a_scatter_of_every_token_is_the_write_and_padding_has_slots_of_its_own(
    case: tuple[Any, ...],
) -> None:
    block, window, tokens, lengths, counts, seed = case
    spec = CacheSpec((LayerCache(2, 4, window),))
    cache = kv_cache.init_paged(
        spec,
        batch=len(lengths),
        capacity=15,
        dtype=torch.float32,
        block_size=block,
        trash=tokens * len(lengths),
    )
    cache = shuffled(poisoned(cache), seed)
    arenas = [leaf for name in ("k", "v") for leaf in cache.arena.tree[name]]
    generator = torch.Generator().manual_seed(seed)
    new = [torch.randn(len(lengths), tokens, 2, 4, generator=generator) for _ in range(2)]
    vectors = torch.tensor(lengths), torch.tensor(counts)
    expected = KV_WRITE.reference(*new, *arenas, cache.tables, *vectors, window=window, extent=15)
    facts = CacheFacts.of(tokens, arenas[0], cache.tables, window, 15)
    slots = slots_of(facts, cache.tables, *vectors)
    assert len(set(slots.tolist())) == tokens * len(lengths)
    for arena, values, wanted in zip(arenas, new, expected, strict=True):
        flat = slots_view(arena, facts, tokens * len(lengths)).view(-1, 2, 4)
        flat[slots.long()] = values.view(-1, 2, 4)
        # All but the trash is what the rule says.
        assert torch.equal(arena[:-1].nan_to_num(7.0), wanted[:-1].nan_to_num(7.0))


@settings(max_examples=30, deadline=None)
@given(st.composite(_dense_and_paged)())
def test_the_composition_of_the_ascend_backend_is_the_rule_on_pages(case: tuple[Any, ...]) -> None:
    block, window, tokens, lengths, counts, seed = case
    B, N = len(lengths), -(-15 // block)
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randperm(B * N, generator=generator).view(B, N)
    arenas = [torch.randn(B * N + 1, block, 2, 4, generator=generator) for _ in range(2)]
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for p in range(length + count, N * block):
            for arena in arenas:
                arena[tables[b, p // block], p % block] = float("nan")
        # What a row does not need, it need not have.
        tables[b, -(-(length + count) // block) :] = -1
    q = torch.randn(B, tokens, 4, 4, generator=generator)
    operands = (q, *arenas, tables, torch.tensor(lengths), torch.tensor(counts), None, None)
    params = {"scale": 0.5, "extent": 15, "window": window, "soft_cap": None, "causal": True}
    found = ascend_equations.run(COMPOSED, ascend_equations.equation(ATTENTION, operands, **params), operands)
    expected = ATTENTION.reference(*operands, **params)
    for b, count in enumerate(counts):
        torch.testing.assert_close(found[b, :count], expected[b, :count], rtol=1e-5, atol=1e-5)


# --- models --------------------------------------------------------------------------------------------------------


class Model:
    """A small Llama over one cache of any kind."""

    def __init__(
        self, config: Any, cache: Any, dtype: torch.dtype = torch.float32, backend: str = "fused"
    ) -> None:
        self.config, self.cache = config, poisoned(cache)
        tree = random_params(config, dtype)
        self.params = tree if backend == "reference" else atbx.bind(tree)
        # The function as it was written for the dense cache.
        self.forward = runs(llama.forward, backend, ("config",))

    def feed(self, tokens: list[list[int]], width: int | None = None) -> list[torch.Tensor]:
        """Logits [count, V] of each row's tokens, put behind what the rows hold."""
        counts = [len(row) for row in tokens]
        T = width or max(counts)
        ids = torch.tensor([row + [0] * (T - len(row)) for row in tokens])
        index = torch.arange(T).expand(len(tokens), T)
        want = torch.minimum(index, torch.tensor(counts).clamp(min=1).view(-1, 1) - 1)
        positions = self.cache.lengths.view(-1, 1) + index
        limits = torch.full((len(tokens),), 600)
        step = Step(ids, torch.tensor(counts), positions, want.contiguous(), limits)
        self.cache = kv_cache.reserve(self.cache, counts)
        logits, self.cache = self.forward(self.params, step, self.cache, self.config)
        return [logits[b, :n] for b, n in enumerate(counts)]


def dense(config: Any, batch: int, dtype: torch.dtype = torch.float32, capacity: int = 96) -> Any:
    return kv_cache.init(config.cache_spec, batch=batch, capacity=capacity, dtype=dtype, chunk=32)


def paged(
    config: Any, batch: int, block: int, dtype: torch.dtype = torch.float32, order: int | None = None
) -> PagedCache:
    cache = kv_cache.init_paged(config.cache_spec, batch=batch, capacity=96, dtype=dtype, block_size=block)
    return cache if order is None else shuffled(cache, order)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(61, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Model, given: list[list[int]], tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens chosen from prompts on, and all logits."""
    logits = model.feed(given)
    chosen = [[int(x[-1].argmax())] for x in logits]
    seen = list(logits)
    for _ in range(tokens - 1):
        step = model.feed([[row[-1]] for row in chosen])
        seen = [torch.cat(pair) for pair in zip(seen, step, strict=True)]
        for row, x in zip(chosen, step, strict=True):
            row.append(int(x[-1].argmax()))
    return chosen, seen


CONFIGS = {
    "gqa2": {},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "window": {"window": 5},
    "gqa8": {"heads": 8, "kv_heads": 1},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block", [1, 16, 128])
def test_a_model_on_pages_chooses_the_tokens_of_one_on_dense_rows(
    backend: str, name: str, block: int
) -> None:
    config = small_llama(**CONFIGS[name])
    given = prompts(7, 19, 1)
    expected, dense_logits = greedy(Model(config, dense(config, 3), backend=backend), given, 12)
    order = None if block == 128 else 5
    found, logits = greedy(Model(config, paged(config, 3, block, order=order), backend=backend), given, 12)
    assert found == expected
    params = random_params(config)
    for row, a, b in zip(range(3), logits, dense_logits, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
        exact = plain_model.logits(params, given[row] + found[row][:-1], config)
        torch.testing.assert_close(a.double(), exact, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_with_the_dense_cache(dtype: torch.dtype) -> None:
    config = small_llama()
    given = prompts(9, 4)
    _, dense_logits = greedy(Model(config, dense(config, 2, dtype), dtype), given, 1)
    _, logits = greedy(Model(config, paged(config, 2, 4, dtype, order=1), dtype), given, 1)
    for a, b in zip(logits, dense_logits, strict=True):
        assert (a - b).norm() / b.norm() < TOLERANCE[dtype]


def test_the_model_fuses_on_pages_as_on_dense_rows() -> None:
    config = small_llama()
    model = Model(config, kv_cache.reserve(paged(config, 1, 4), [3]))
    ids = torch.ones(1, 3, dtype=torch.int64)
    index = torch.arange(3).view(1, 3)
    step = Step(ids, torch.tensor([3]), index, index, torch.tensor([96]))
    explanation = model.forward.explain(model.params, step, model.cache, config)
    names = [c.equation.op.name for c in explanation.choices if c.equation.scope == "layers/1"]
    assert names == ["norm_qkv", "rotary_write", "attend_project", "norm_gated_mlp"]
    assert not explanation.variant.lowered.copies
    assert all(not c.is_fallback for c in explanation.choices)


@pytest.mark.parametrize("chunk", [1, 3, 8, 13])
@pytest.mark.parametrize("name", ["gqa2", "window"])
def test_a_prompt_in_chunks_equals_one_pass(chunk: int, name: str) -> None:
    config = small_llama(**CONFIGS[name])
    (prompt,) = prompts(33)
    (whole,) = Model(config, paged(config, 1, 8)).feed([prompt])
    model = Model(config, paged(config, 1, 8, order=2))
    parts = [model.feed([prompt[i : i + chunk]])[0] for i in range(0, 33, chunk)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-5, rtol=2e-5)


def test_each_row_of_a_ragged_batch_equals_its_solo_run() -> None:
    config = small_llama()
    given = prompts(3, 17, 8, 1)
    together, _ = greedy(Model(config, paged(config, 4, 4)), given, 8)
    alone = [greedy(Model(config, paged(config, 1, 4)), [row], 8)[0][0] for row in given]
    assert together == alone


def test_growing_a_row_never_compiles_again() -> None:
    config = small_llama()
    model = Model(config, paged(config, 1, 2))
    greedy(model, prompts(3), 20)
    assert len(model.forward.variants) == 2


def test_a_shared_prefix_and_endings_that_part_equal_runs_from_the_start() -> None:
    config = small_llama()
    prefix, *endings = prompts(13, 5, 9, 6)
    model = Model(config, paged(config, 3, 4))
    model.feed([prefix, [], []])
    model.cache = kv_cache.select(model.cache, [0, 0, 0])
    assert sorted(model.cache.uses.tolist(), reverse=True)[:5] == [3, 3, 3, 3, 0]
    parts = [model.feed([e[:2] for e in endings]), model.feed([e[2:] for e in endings])]
    found = [torch.cat(pair) for pair in zip(*parts, strict=True)]
    # 3 full blocks are shared by all rows; each has its own from position 12 on.
    assert sorted(model.cache.uses.tolist(), reverse=True)[:4] == [3, 3, 3, 1]
    params = random_params(config)
    for logits, ending in zip(found, endings, strict=True):
        exact = plain_model.logits(params, prefix + ending, config)[len(prefix) :]
        torch.testing.assert_close(logits.double(), exact, atol=2e-4, rtol=2e-4)


def test_forks_that_part_equal_runs_from_the_start() -> None:
    config = small_llama()
    prefix, *endings = prompts(7, 5, 9)
    model = Model(config, paged(config, 1, 4))
    model.feed([prefix])
    other = Model(config, paged(config, 1, 4))
    other.cache = kv_cache.fork(model.cache)
    found: list[list[torch.Tensor]] = [[], []]
    for start, end in ((0, 2), (2, 9)):
        for parts, branch, ending in zip(found, (model, other), endings, strict=True):
            parts += branch.feed([ending[start:end]])
    params = random_params(config)
    for parts, ending in zip(found, endings, strict=True):
        exact = plain_model.logits(params, prefix + ending, config)[len(prefix) :]
        torch.testing.assert_close(torch.cat(parts).double(), exact, atol=2e-4, rtol=2e-4)


def test_a_rejected_draft_leaves_no_trace() -> None:
    config = small_llama(window=5)
    prompt, draft, truth = prompts(9, 6, 6)
    model = Model(config, paged(config, 1, 4))
    model.feed([prompt])
    model.feed([draft])
    model.cache = kv_cache.truncate(model.cache, [9])
    (found,) = model.feed([truth])
    exact = plain_model.logits(random_params(config), prompt + truth, config)[9:]
    torch.testing.assert_close(found.double(), exact, atol=2e-4, rtol=2e-4)


def test_a_saved_cache_goes_on_where_it_stopped() -> None:
    config = small_llama()
    prompt, rest = prompts(9, 4)
    model = Model(config, paged(config, 1, 4))
    model.feed([prompt])
    model.cache = kv_cache.load(kv_cache.save(model.cache), config.cache_spec)
    (found,) = model.feed([rest])
    exact = plain_model.logits(random_params(config), prompt + rest, config)[9:]
    torch.testing.assert_close(found.double(), exact, atol=2e-4, rtol=2e-4)
