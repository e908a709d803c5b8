"""Kinds of faults that users of such runtimes met, each with the right value: attention, caches, whole models.

The rows behind them, and the tests that hold the other rows, are in tests/faults.toml.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import attention_oracle
import numpy as np
import plain_model
import pytest
import torch
from model_logits import all_logits, engine_of
from small_models import random_params, small_llama

import atbx
from atbx import ops
from atbx.core.errors import AtbxError, CacheStateError
from atbx.models import llama
from atbx.models.llama import LlamaConfig
from atbx.models.step import Step
from atbx.ops import kv_cache
from atbx.ops.kv_cache import CacheSpec, KVCache, LayerCache
from atbx.ops.rope import Rope
from atbx.schedule import Policy

CONFIG = small_llama()
PARAMS = random_params(CONFIG)
GENERATOR = torch.Generator().manual_seed(7)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random ids of the small model."""
    return torch.randint(CONFIG.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(found: torch.Tensor, exact: torch.Tensor, bound: float = 2e-6) -> None:
    """Within `bound` of an FP64 result, relative to its norm."""
    assert found.shape == exact.shape
    assert float((found.double() - exact).norm() / exact.norm()) < bound


# --- attention -----------------------------------------------------------------------------------------------------


def attend(q: Any, k: Any, v: Any, cache: KVCache, counts: Any, scale: float) -> tuple[Any, KVCache]:
    """One attention layer."""
    out, cache = ops.attend(q, k, v, cache, layer=0, counts=counts, scale=scale)
    return out, cache.advance(counts)


attention = atbx.jit(attend, static=("scale",), donate=("cache",))


def one_layer(
    batch: int, size: int, *, capacity: int = 32, window: int | None = None, chunk: int = 16
) -> KVCache:
    """An empty cache of one layer with one KV head, its slots NaN."""
    spec = CacheSpec((LayerCache(1, size, window),))
    cache = kv_cache.init(spec, batch=batch, capacity=capacity, dtype=torch.float32, chunk=chunk)
    for leaf in cache.arena.arena.tensors:
        leaf.fill_(float("nan"))
    return cache


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def test_masks_hold_past_512_slots() -> None:
    cache = one_layer(1, 4, capacity=600, chunk=600)
    k, v, q = draw(1, 520, 1, 4), draw(1, 520, 1, 4), draw(1, 520, 1, 4)
    # A key near the end that would win every softmax, so that a query that sees it too early shows.
    k[0, 515] = 40 * torch.ones(1, 4)
    v[0, 515] = 1000.0
    for start, end in ((0, 500), (500, 514), (514, 520)):
        out, cache = attention(
            q[:, start:end], k[:, start:end], v[:, start:end], cache, torch.tensor([end - start]), 0.5
        )
    keys, values, queries = (x[0].double().numpy() for x in (k, v, q))
    exact = attention_oracle.attention(queries[514:], keys, values, 514, scale=0.5)
    np.testing.assert_allclose(out[0].double().numpy(), exact, atol=2e-4, rtol=1e-5)
    assert abs(float(out[0, 0].max())) < 10


def test_a_window_of_two_is_a_token_and_the_one_before_it() -> None:
    cache = one_layer(1, 5, window=2)
    zeros, values = torch.zeros(1, 5, 1, 5), torch.eye(5).view(1, 5, 1, 5)
    out, _ = attention(zeros, zeros, values, cache, torch.tensor([5]), 1.0)
    expected = torch.zeros(5, 5)
    expected[0, 0] = 1.0
    for row in range(1, 5):
        expected[row, row - 1 : row + 1] = 0.5
    assert torch.equal(out[0, :, 0], expected)


def test_the_scale_is_the_one_given() -> None:
    size = 64
    q, k, v = draw(1, 1, 1, size), draw(1, 3, 1, size), torch.eye(3, size).view(1, 3, 1, size)
    for scale in (1.0, 0.125):
        _, cache = attention(draw(1, 3, 1, size), k, v, one_layer(1, size), torch.tensor([3]), scale)
        zero = torch.zeros(1, 1, 1, size)
        out, _ = attention(q, zero, zero, cache, torch.tensor([1]), scale)
        scores = torch.cat([(k[0, :, 0] @ q[0, 0, 0]) * scale, torch.zeros(1)])
        torch.testing.assert_close(out[0, 0, 0, :3], torch.softmax(scores, 0)[:3], atol=1e-6, rtol=1e-5)


def test_rows_of_an_arena_may_stand_in_any_order() -> None:
    cache = kv_cache.select(one_layer(5, 4), [4, 0, 3, 1])
    rows: list[list[torch.Tensor]] = [[], [], [], []]
    for counts in ([2, 1, 3, 2], [1, 1, 1, 1], [1, 0, 1, 1]):
        q, k, v = draw(4, 3, 1, 4), draw(4, 3, 1, 4), draw(4, 3, 1, 4)
        out, cache = attention(q, k, v, cache, torch.tensor(counts), 0.5)
        for b, count in enumerate(counts):
            rows[b].append(torch.stack([k[b, :count, 0], v[b, :count, 0]]))
            held = torch.cat(rows[b], dim=1).double().unsqueeze(2).numpy()
            start = held.shape[1] - count
            exact = attention_oracle.attention(
                q[b, :count].double().numpy(), held[0], held[1], start, scale=0.5
            )
            np.testing.assert_allclose(out[b, :count].double().numpy(), exact, atol=1e-6)


def test_a_row_of_nothing_but_padding_gives_zeros_past_every_bucket() -> None:
    cache = one_layer(2, 4, capacity=300, chunk=300)
    x = draw(2, 270, 1, 4)
    x[1] = float("nan")
    out, _ = attention(x, x, x, cache, torch.tensor([270, 0]), 0.5)
    assert torch.isfinite(out[0]).all()
    assert (out[1] == 0).all()


# --- caches --------------------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_reused_only_where_every_layer_kept_it() -> None:
    spec = CacheSpec((LayerCache(1, 4), LayerCache(1, 4, window=4)))

    def extend(x: Any, cache: KVCache, counts: Any) -> KVCache:
        for layer in range(2):
            cache = kv_cache.append(cache, x, x, layer=layer, counts=counts)
        return cache.advance(counts)

    step = atbx.jit(extend, donate=("cache",))
    cache = kv_cache.init(spec, batch=1, capacity=16, dtype=torch.float32, chunk=2)
    for _ in range(8):
        cache = step(draw(1, 1, 1, 4), cache, torch.tensor([1]))
    # The window's five slots hold positions 3..7: three tokens would need positions 0..2.
    with pytest.raises(CacheStateError, match=r"row 0: layer 1 keeps a window of 4 tokens.*found 3"):
        kv_cache.truncate(cache, [3])
    shorter = kv_cache.truncate(cache, [6])
    assert shorter.lengths.tolist() == [6]
    # Cut once, the ring is no longer than what it lost, and still has lost it: for copies and saved caches too.
    for value in (
        shorter,
        kv_cache.fork(shorter),
        kv_cache.select(shorter, [0]),
        kv_cache.load(kv_cache.save(shorter), spec),
    ):
        with pytest.raises(CacheStateError, match=r"row 0: layer 1.*at least 6.*found 5"):
            kv_cache.truncate(value, [5])
        assert kv_cache.truncate(value, [0]).reach is None
    regrown = step(draw(1, 1, 1, 4), shorter, torch.tensor([1]))
    with pytest.raises(CacheStateError, match=r"at least 6.*found 5"):
        kv_cache.truncate(regrown, [5])


@pytest.mark.parametrize("batch", [1, 3])
def test_lengths_are_one_a_row_for_every_batch_size(batch: int) -> None:
    cache = one_layer(batch, 4)
    x = draw(batch, 2, 1, 4)
    _, cache = attention(x, x, x, cache, torch.full((batch,), 2), 0.5)
    assert (tuple(cache.lengths.shape), cache.lengths.dtype) == ((batch,), torch.int64)
    assert cache.lengths.tolist() == [2] * batch


def test_what_a_call_was_given_may_change_afterwards() -> None:
    counts, x = torch.tensor([2]), draw(1, 2, 1, 4)
    cache = one_layer(1, 4)
    out, cache = attention(x, x, x, cache, counts, 0.5)
    before, kept = out.clone(), cache.arena.tree["k"][0][:, :2].clone()
    counts.fill_(7)
    x.fill_(float("nan"))
    assert torch.equal(out, before)
    assert cache.lengths.tolist() == [2]
    assert torch.equal(cache.arena.tree["k"][0][:, :2], kept)
    y = torch.ones(3)
    returned = atbx.jit(lambda x: {"same": x, "part": x[1:], "sum": x + x})(y)
    y.fill_(7.0)
    assert [t.tolist() for t in returned.values()] == [[1.0] * 3, [1.0] * 2, [2.0] * 3]


# --- models --------------------------------------------------------------------------------------------------------

forward = atbx.jit(llama.forward, static=("config",), donate=("cache",))


def fed(cache: KVCache, ids: list[int], start: int) -> tuple[torch.Tensor, KVCache]:
    """Logits [T, V] of `ids` behind a cache of `start` tokens."""
    T = len(ids)
    index = torch.arange(T).view(1, T)
    step = Step(torch.tensor([ids]), torch.tensor([T]), index + start, index, torch.tensor([100]))
    logits, cache = forward(PARAMS, step, cache, CONFIG)
    return logits[0], cache


def empty() -> KVCache:
    cache = kv_cache.init(CONFIG.cache_spec, batch=1, capacity=64, dtype=torch.float32, chunk=64)
    for leaf in cache.arena.arena.tensors:
        leaf.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("prefix", [1, 7, 13])
def test_a_prefix_in_the_cache_equals_one_computed_anew(prefix: int) -> None:
    shared, endings = tokens(prefix), [tokens(5, 1), tokens(9, 2), tokens(6, 3)]
    _, cache = fed(empty(), shared, 0)
    branches = [kv_cache.fork(cache), kv_cache.fork(cache), cache]
    # The branches grow in turn, so that one that wrote into another's slots would show.
    found: list[list[torch.Tensor]] = [[], [], []]
    for start, end in ((0, 2), (2, 3), (3, 9)):
        for index, ending in enumerate(endings):
            part = ending[start:end]
            logits, branches[index] = fed(branches[index], part, prefix + start)
            found[index].append(logits)
    for parts, ending in zip(found, endings, strict=True):
        close(torch.cat(parts), plain_model.logits(PARAMS, shared + ending, CONFIG)[prefix:])


def test_a_prefix_found_again_by_truncation_equals_one_computed_anew() -> None:
    whole = tokens(12)
    _, cache = fed(empty(), whole, 0)
    cache = kv_cache.truncate(cache, [5])
    found, _ = fed(cache, tokens(6, 3), 5)
    close(found, plain_model.logits(PARAMS, whole[:5] + tokens(6, 3), CONFIG)[5:])


def test_decoding_token_by_token_equals_the_plain_model() -> None:
    whole = tokens(14)
    (found,) = all_logits(engine_of(llama.forward, CONFIG, dtype=None), PARAMS, [whole], decode=13)
    close(found, plain_model.logits(PARAMS, whole, CONFIG))


@pytest.mark.parametrize("length", [33, 64, 65, 70])
def test_a_prompt_past_its_chunk_equals_one_pass(length: int) -> None:
    whole = tokens(length)
    chunked, single = (
        all_logits(engine_of(llama.forward, CONFIG, dtype=None, chunk=c), PARAMS, [whole])[0]
        for c in (32, 512)
    )
    close(chunked, single.double())
    assert chunked.argmax(1).tolist() == plain_model.logits(PARAMS, whole, CONFIG).argmax(1).tolist()


def test_decoding_across_a_bucket_of_the_extent_equals_one_pass() -> None:
    # The first row passes 256 slots, the second ends before, the third never comes near.
    prompts = [tokens(250), tokens(255, 1), tokens(3, 2)]
    whole = all_logits(engine_of(llama.forward, CONFIG, dtype=None), PARAMS, [[*p, 0] for p in prompts])
    ends = int(whole[1][-2].argmax())
    generate = atbx.generator(llama.forward, CONFIG, eos=[ends])
    result = generate(PARAMS, prompts, max_new_tokens=12)
    assert result.tokens[1] == [ends]
    assert {"cache.extent=256", "cache.extent=512"} <= set(
        " ".join(generate.cache_info().model.names).split()
    )
    checked = all_logits(
        engine_of(llama.forward, CONFIG, dtype=None),
        PARAMS,
        [p + t for p, t in zip(prompts, result.tokens, strict=True)],
    )
    for logits, prompt, found in zip(checked, prompts, result.tokens, strict=True):
        assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == found


@dataclass(frozen=True)
class Alternating(LlamaConfig):
    """A Llama whose even layers attend through a window of four."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(None if index % 2 else 4 for index in range(self.layers))

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec(tuple(LayerCache(self.kv_heads, self.head_size, w) for w in self.windows))


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 64])
def test_layers_with_and_without_a_window_agree_with_the_plain_model(chunk: int) -> None:
    config = Alternating(**{f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__})
    whole = [tokens(12), tokens(5, 1), tokens(20, 2)]
    found = all_logits(engine_of(llama.forward, config, dtype=None, chunk=chunk), PARAMS, whole, decode=3)
    for logits, sequence in zip(found, whole, strict=True):
        close(logits, plain_model.logits(PARAMS, sequence, config, windows=config.windows))
    generate = atbx.generator(llama.forward, config, policy=Policy(config.context, chunk=chunk))
    expected = [plain_model.greedy(PARAMS, s, 6, config, windows=config.windows) for s in whole]
    assert generate(PARAMS, whole, max_new_tokens=6).tokens == expected


def forward_qk_norm(params: Any, step: Step, cache: Any, config: LlamaConfig) -> tuple[Any, Any]:
    """A Llama whose queries and keys are normed before they are partly rotated."""
    x = ops.embedding(params["embed"], step.ids)
    B, T, _ = x.shape
    for index, p in enumerate(params["layers"]):
        h = ops.rms_norm(x, p["attn_norm"], eps=config.eps)
        q, k, v = (ops.reshape(ops.linear(h, p[n]), (B, T, -1, config.head_size)) for n in ("q", "k", "v"))
        q, k = ops.rms_norm(q, p["q_norm"], eps=config.eps), ops.rms_norm(k, p["k_norm"], eps=config.eps)
        q, k = ops.rotary(q, k, step.positions, config.rope)
        a, cache = ops.attend(q, k, v, cache, layer=index, counts=step.counts, scale=config.scale)
        x = x + ops.linear(ops.reshape(a, (B, T, -1)), p["o"])
        h = ops.rms_norm(x, p["mlp_norm"], eps=config.eps)
        x = x + ops.linear(
            ops.gated(ops.linear(h, p["gate"]), ops.linear(h, p["up"]), activation="silu"), p["down"]
        )
    x = ops.rms_norm(ops.take(x, step.want), params["norm"], eps=config.eps)
    return ops.linear(x, params["lm_head"]), cache.advance(step.counts)


def test_normed_queries_with_partial_rotation_agree_with_the_plain_model() -> None:
    config = small_llama(rope=Rope(4, theta=100.0))
    params = {**PARAMS, "layers": [dict(p) for p in PARAMS["layers"]]}
    for p in params["layers"]:
        p["q_norm"], p["k_norm"] = 1 + 0.3 * draw(config.head_size), 1 + 0.3 * draw(config.head_size)
    whole = [tokens(9), tokens(4, 1)]
    found = all_logits(engine_of(forward_qk_norm, config, dtype=None, chunk=4), params, whole, decode=2)
    for logits, sequence in zip(found, whole, strict=True):
        close(logits, plain_model.logits(params, sequence, config, qk_norm=True))


def forward_learned(params: Any, step: Step, cache: Any, config: LlamaConfig) -> tuple[Any, Any]:
    """A Llama that adds a learned vector for each absolute position and rotates nothing."""
    x = ops.embedding(params["embed"], step.ids) + ops.embedding(params["positions"], step.positions)
    B, T, _ = x.shape
    for index, p in enumerate(params["layers"]):
        h = ops.rms_norm(x, p["attn_norm"], eps=config.eps)
        q, k, v = (ops.reshape(ops.linear(h, p[n]), (B, T, -1, config.head_size)) for n in ("q", "k", "v"))
        a, cache = ops.attend(q, k, v, cache, layer=index, counts=step.counts, scale=config.scale)
        x = x + ops.linear(ops.reshape(a, (B, T, -1)), p["o"])
        h = ops.rms_norm(x, p["mlp_norm"], eps=config.eps)
        x = x + ops.linear(
            ops.gated(ops.linear(h, p["gate"]), ops.linear(h, p["up"]), activation="silu"), p["down"]
        )
    x = ops.rms_norm(ops.take(x, step.want), params["norm"], eps=config.eps)
    return ops.linear(x, params["lm_head"]), cache.advance(step.counts)


def test_absolute_positions_are_each_rows_own_in_a_ragged_batch() -> None:
    config = small_llama(context=24)
    params = {**PARAMS, "positions": 0.5 * draw(24, config.width)}
    prompts = [tokens(3), tokens(12, 1), tokens(1, 2), tokens(6, 3)]
    expected = [plain_model.greedy(params, p, 5, config, learned_positions=True) for p in prompts]
    generate = atbx.generator(forward_learned, config)
    assert generate(params, prompts, max_new_tokens=5).tokens == expected
    assert [generate(params, p, max_new_tokens=5).tokens[0] for p in prompts] == expected


def test_a_batch_in_a_bucket_used_before_leaves_nothing_behind() -> None:
    prompts = [tokens(1 + 2 * (i % 4), seed=i) for i in range(16)]
    expected = [plain_model.greedy(PARAMS, p, 4, CONFIG) for p in prompts]
    generate = atbx.generator(llama.forward, CONFIG)
    # 9 rows run in a bucket of 10, 5 and 7 in one of 8, 13 in one of 14.
    for size in (16, 9, 10, 5, 8, 7, 13, 1):
        assert generate(PARAMS, prompts[:size], max_new_tokens=4).tokens == expected[:size]
        last = prompts[-size:]
        assert generate(PARAMS, last, max_new_tokens=4).tokens == expected[-size:]


def test_padding_is_never_told_by_a_token_id() -> None:
    eos = 0
    prompts = [[0, 0, 5], [0], [5, 0, 0, 0], [7, 7]]
    expected = [plain_model.greedy(PARAMS, p, 5, CONFIG) for p in prompts]
    ended = [e[: e.index(eos) + 1] if eos in e else e for e in expected]
    assert atbx.generator(llama.forward, CONFIG, eos=[eos])(PARAMS, prompts, max_new_tokens=5).tokens == ended


def test_logprobs_of_a_row_do_not_depend_on_its_neighbours() -> None:
    short, long = tokens(3), tokens(12, 1)
    generate = atbx.generator(llama.forward, CONFIG)
    options = {"max_new_tokens": 5, "logprobs": 2, "prompt_logprobs": 0}
    alone, together = generate(PARAMS, short, **options), generate(PARAMS, [long, short], **options)
    for name in ("logprobs", "prompt_logprobs"):
        one, other = getattr(alone, name)[0], getattr(together, name)[1]
        assert [e.token for e in one] == [e.token for e in other]
        assert [e.logprob for e in one] == pytest.approx([e.logprob for e in other], abs=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_narrow_dtypes_stay_finite_and_near_in_a_padded_batch(dtype: torch.dtype, bound: float) -> None:
    params = random_params(CONFIG, dtype)
    whole = [tokens(3), tokens(12, 1), tokens(7, 2)]
    found = all_logits(engine_of(llama.forward, CONFIG, dtype=None), params, whole, decode=2)
    for logits, sequence in zip(found, whole, strict=True):
        assert torch.isfinite(logits).all()
        close(logits, plain_model.logits(params, sequence, CONFIG), bound)


def test_logits_of_nan_raise_and_never_become_token_zero() -> None:
    params = {**PARAMS, "norm": torch.full((CONFIG.width,), float("nan"))}
    with pytest.raises(AtbxError, match=r"row 0, new token 0: .*NaN"):
        atbx.generator(llama.forward, CONFIG)(params, [5, 6], max_new_tokens=3)


def test_a_step_that_fails_says_why_and_the_cache_stays_good() -> None:
    cache = empty()
    _, cache = fed(cache, tokens(4), 0)
    with pytest.raises(AtbxError, match=r"batch row 0.*at most 64.*4 \+ 61"):
        fed(cache, tokens(61, 1), 4)
    found, _ = fed(replace(cache), tokens(5, 2), 4)
    close(found, plain_model.logits(PARAMS, tokens(4) + tokens(5, 2), CONFIG)[4:])
