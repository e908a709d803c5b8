"""Attention and KV writes: kernels against an FP64 oracle, and what unused slots and padding may never do."""

from __future__ import annotations

from typing import Any

import attention_oracle
import numpy as np
import pytest
import torch

import atbx
from atbx import ops
from atbx.core.errors import CapacityError, ShapeError
from atbx.ops import kv_cache
from atbx.ops.attention import alibi_slopes
from atbx.ops.kv_cache import CacheSpec, KVCache, LayerCache

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def attend(q: Any, k: Any, v: Any, cache: KVCache, counts: Any, options: Any) -> tuple[Any, KVCache]:
    """One attention layer as a function."""
    out, cache = ops.attend(q, k, v, cache, layer=0, counts=counts, **dict(options))
    return out, cache.advance(counts)


compiled = atbx.jit(attend, static=("options",), donate=("cache",))


class Rows:
    """A cache beside plain lists of every row's keys and values."""

    def __init__(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        size: int,
        dtype: torch.dtype,
        *,
        window: int | None = None,
        capacity: int = 64,
        chunk: int = 8,
        options: dict[str, Any] | None = None,
        poison: bool = True,
    ) -> None:
        self.heads, self.kv_heads, self.size, self.dtype, self.window = heads, kv_heads, size, dtype, window
        spec = CacheSpec((LayerCache(kv_heads, size, window),))
        self.cache = kv_cache.init(spec, batch=batch, capacity=capacity, dtype=dtype, chunk=chunk)
        if poison:
            for leaf in self.cache.arena.arena.tensors:
                leaf.fill_(float("nan"))
        self.options = {"scale": size**-0.5, **(options or {})}
        self.keys = [np.zeros((0, kv_heads, size)) for _ in range(batch)]
        self.values = [np.zeros((0, kv_heads, size)) for _ in range(batch)]
        self.generator = torch.Generator().manual_seed(1)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def step(self, tokens: int, counts: list[int]) -> tuple[torch.Tensor, list[np.ndarray]]:
        """One step; the kernel's output and the oracle's, row by row."""
        B = len(counts)
        q = self.random(B, tokens, self.heads, self.size)
        k = self.random(B, tokens, self.kv_heads, self.size)
        v = self.random(B, tokens, self.kv_heads, self.size)
        for tensor in (q, k, v):
            for b, count in enumerate(counts):
                tensor[b, count:] = float("nan")
        expected = []
        for b, count in enumerate(counts):
            start = len(self.keys[b])
            self.keys[b] = np.concatenate([self.keys[b], k[b, :count].double().numpy()])
            self.values[b] = np.concatenate([self.values[b], v[b, :count].double().numpy()])
            extra = {n: np.asarray(x) for n, x in self.options.items() if n in ("slopes", "sinks")}
            rest = {n: x for n, x in self.options.items() if n not in ("slopes", "sinks")}
            expected.append(
                attention_oracle.attention(
                    q[b, :count].double().numpy(),
                    self.keys[b],
                    self.values[b],
                    start,
                    window=self.window,
                    **rest,
                    **extra,
                )
            )
        out, self.cache = self.run(q, k, v, torch.tensor(counts))
        return out, expected

    def run(self, q: Any, k: Any, v: Any, counts: torch.Tensor) -> tuple[torch.Tensor, KVCache]:
        return compiled(q, k, v, self.cache, counts, tuple(sorted(self.options.items())))


class RowsWithTensors(Rows):
    """The same where slopes or sinks are passed: they are values, so the function takes them as arguments."""

    def run(self, q: Any, k: Any, v: Any, counts: torch.Tensor) -> tuple[torch.Tensor, KVCache]:
        def with_extras(
            q: Any, k: Any, v: Any, cache: KVCache, counts: Any, extras: Any
        ) -> tuple[Any, KVCache]:
            out, cache = ops.attend(q, k, v, cache, layer=0, counts=counts, scale=self.size**-0.5, **extras)
            return out, cache.advance(counts)

        extras = {n: torch.tensor(x, dtype=torch.float32) for n, x in self.options.items() if n != "scale"}
        return atbx.jit(with_extras, donate=("cache",))(q, k, v, self.cache, counts, extras)


def check(out: torch.Tensor, expected: list[np.ndarray], dtype: torch.dtype) -> None:
    """Real tokens equal the oracle; padding tokens are zero."""
    for b, rows in enumerate(expected):
        count = rows.shape[0]
        np.testing.assert_allclose(
            out[b, :count].double().numpy(), rows, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
        assert (out[b, count:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_ragged_steps_agree_with_the_oracle_and_nan_in_unused_slots_reaches_nothing(
    dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    rows = Rows(3, heads, kv_heads, 16, dtype)
    for tokens, counts in ((5, [5, 2, 0]), (1, [1, 1, 1]), (4, [0, 4, 3]), (1, [1, 0, 1]), (1, [1, 1, 1])):
        out, expected = rows.step(tokens, counts)
        check(out, expected, dtype)
    assert rows.cache.lengths.tolist() == [8, 8, 6]


@pytest.mark.parametrize("size", [8, 24, 64, 80, 96, 128, 256])
def test_every_head_size_agrees_with_the_oracle(size: int) -> None:
    rows = Rows(2, 2, 1, size, torch.float32)
    for tokens, counts in ((3, [3, 2]), (1, [1, 1])):
        check(*rows.step(tokens, counts), torch.float32)


@pytest.mark.parametrize("window", [1, 2, 4, 7])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_a_window_sees_itself_and_the_tokens_before_it_across_wraps_and_chunks(
    window: int, chunk: int
) -> None:
    rows = Rows(2, 2, 1, 8, torch.float32, window=window, chunk=chunk)
    assert rows.cache.arena.arena.tensors[0].shape[1] == window + chunk - 1
    for step in range(9):
        check(*rows.step(chunk, [chunk, max(1, chunk - step % 2)]), torch.float32)


def test_the_last_of_two_queries_sees_the_whole_cached_prefix() -> None:
    rows = Rows(1, 1, 1, 8, torch.float32)
    rows.step(4, [4])
    out, expected = rows.step(2, [2])
    check(out, expected, torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"soft_cap": 5.0},
        {"causal": False},
        {"soft_cap": 2.0, "causal": False},
    ],
)
def test_soft_caps_and_full_attention_agree_with_the_oracle(options: dict[str, Any]) -> None:
    rows = Rows(2, 4, 2, 8, torch.float32, options=options)
    for tokens, counts in ((3, [3, 2]), (1, [1, 1]), (2, [2, 1])):
        check(*rows.step(tokens, counts), torch.float32)


@pytest.mark.parametrize("name", ["slopes", "sinks"])
def test_alibi_and_sinks_agree_with_the_oracle(name: str) -> None:
    values = alibi_slopes(4).tolist() if name == "slopes" else [0.5, -1.0, 2.0, 0.0]
    rows = RowsWithTensors(2, 4, 2, 8, torch.float32, options={name: values})
    for tokens, counts in ((3, [3, 2]), (1, [1, 1])):
        check(*rows.step(tokens, counts), torch.float32)


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(3).tolist() == [2.0**-4, 2.0**-8, 2.0**-2]


def test_one_packed_sequence_of_one_hot_values_is_causal() -> None:
    rows = Rows(1, 1, 1, 4, torch.float32)
    one_hot = torch.eye(4).view(1, 4, 1, 4)
    out, _ = rows.run(torch.zeros(1, 4, 1, 4), torch.zeros(1, 4, 1, 4), one_hot, torch.tensor([4]))
    assert torch.equal(out[0, 0, 0], one_hot[0, 0, 0])
    torch.testing.assert_close(out[0, 3, 0], torch.full((4,), 0.25))


def test_bf16_attention_accumulates_in_fp32_over_a_long_context() -> None:
    length = 4096
    rows = Rows(1, 1, 1, 8, torch.bfloat16, capacity=length + 1, chunk=length)
    k = torch.zeros(1, length, 1, 8, dtype=torch.bfloat16)
    v = torch.ones(1, length, 1, 8, dtype=torch.bfloat16)
    v[0, ::2] = 3.0
    rows.run(torch.zeros(1, length, 1, 8, dtype=torch.bfloat16), k, v, torch.tensor([length]))
    rows.cache = kv_cache.over_arena(
        rows.cache.arena.arena, rows.cache.spec, [0], capacity=length + 1, chunk=length
    )
    cache = rows.cache
    rows.cache = KVCache(
        cache.arena, cache.rows, torch.tensor([length]), cache.spec, cache.extent, cache.capacity, cache.chunk
    )
    one = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    out, _ = rows.run(one, one, one + 2, torch.tensor([1]))
    # A sum of 4096 BF16 weights in BF16 would stop growing at 256.
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), 2.0), atol=0.02, rtol=0)


def test_nan_in_a_live_slot_reaches_its_row_and_no_other() -> None:
    rows = Rows(2, 2, 1, 8, torch.float32)
    rows.step(3, [3, 3])
    rows.cache.arena.tree["v"][0][1, 1] = float("nan")
    out, _ = rows.step(1, [1, 1])
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1]).all()


def test_a_write_past_the_capacity_is_refused_before_anything_changes() -> None:
    rows = Rows(1, 1, 1, 8, torch.float32, capacity=4)
    rows.step(4, [4])
    before = [t.clone() for t in rows.cache.arena.arena.tensors]
    one = torch.zeros(1, 1, 1, 8)
    with pytest.raises(CapacityError, match=r"batch row 0.*at most 4.*4 \+ 1"):
        rows.run(one, one, one, torch.tensor([1]))
    assert all(torch.equal(a, b) for a, b in zip(before, rows.cache.arena.arena.tensors, strict=True))
    # The refused step donated nothing: the cache is still good.
    out, _ = rows.run(one, one, one, torch.tensor([0]))
    assert (out == 0).all()


def test_a_row_outside_the_arena_is_refused() -> None:
    rows = Rows(1, 1, 1, 8, torch.float32)
    from dataclasses import replace

    rows.cache = replace(rows.cache, rows=torch.tensor([1]))
    one = torch.zeros(1, 1, 1, 8)
    with pytest.raises(CapacityError, match="outside the arena"):
        rows.run(one, one, one, torch.tensor([1]))


def test_a_chunk_that_would_overwrite_its_own_window_is_refused_at_staging() -> None:
    rows = Rows(1, 1, 1, 8, torch.float32, window=4, chunk=2)
    with pytest.raises(ShapeError, match=r"ring of 5 slots.*window of 4"):
        rows.step(3, [3])


def test_scale_has_no_default() -> None:
    rows = Rows(1, 1, 1, 8, torch.float32)
    one = torch.zeros(1, 1, 1, 8)
    with pytest.raises(TypeError, match="scale"):
        ops.attend(one, one, one, rows.cache, layer=0, counts=torch.tensor([1]))  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_with_the_reference_rules(dtype: torch.dtype) -> None:
    rows = Rows(2, 4, 2, 16, dtype, window=5, chunk=4)
    q, k = rows.random(2, 4, 4, 16), rows.random(2, 4, 2, 16)
    options = tuple(sorted(rows.options.items()))
    counts = torch.tensor([4, 3])
    expected, _ = atbx.reference(attend, q, k, k, kv_cache.fork(rows.cache), counts, options)
    out, _ = rows.run(q, k, k, counts)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
