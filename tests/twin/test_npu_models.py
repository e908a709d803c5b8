"""Models on the NPU backend, on the software device: logits against FP64, tokens, caches, windows, ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_logits import all_logits, engine_of
from npu_models import check_greedy, check_logits, params_of, reference
from small_models import small_llama

import atbx
from atbx.kernels import ascend
from atbx.models import llama
from atbx.schedule import Policy

pytestmark = [pytest.mark.usefixtures("npu"), pytest.mark.every_chip]

PROMPTS = [[5, 9, 3, 22, 41, 7, 8], [1, 2], list(range(1, 40)), [60]]

SHAPES = [
    # heads, kv_heads, head_size
    (4, 4, 64),
    (4, 1, 80),
    (8, 1, 96),
    (4, 2, 128),
    (2, 1, 256),
    (8, 1, 64),
]


def config_of(heads: int = 4, kv_heads: int = 2, head_size: int = 64, **changes: Any) -> llama.LlamaConfig:
    return small_llama(
        width=64,
        ff=96,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        rope=atbx.ops.Rope(changes.pop("dims", head_size)),
        **changes,
    )


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), SHAPES)
@pytest.mark.parametrize("execution", ["graph", "eager"])
def test_logits_of_every_head_shape(
    heads: int, kv_heads: int, head_size: int, execution: str, half: torch.dtype, unused: float
) -> None:
    config = config_of(heads, kv_heads, head_size)
    params = params_of(config, half)
    engine = engine_of(llama.forward, config, dtype=None, device=ascend.backend(execution=execution))
    found = all_logits(engine, params, PROMPTS[:2], decode=1, unused=unused)
    check_logits(found, reference(config, params, PROMPTS[:2]))


@pytest.mark.parametrize("lengths", ["update", "mask"])
@pytest.mark.parametrize("window", [None, 4, 20])
def test_windows_chunks_and_ragged_batches(window: int | None, lengths: str, half: torch.dtype) -> None:
    config = config_of(window=window)
    params = params_of(config, half)
    device = ascend.backend(lengths=lengths)
    engine = engine_of(llama.forward, config, dtype=None, chunk=16, device=device)
    found = all_logits(engine, params, PROMPTS[:3], decode=1, unused=0.0)
    check_logits(found, reference(config, params, PROMPTS[:3]))


def test_lengths_by_update_and_by_mask_agree(half: torch.dtype) -> None:
    config = config_of()
    params = params_of(config, half)
    found = [
        all_logits(
            engine_of(llama.forward, config, dtype=None, device=ascend.backend(lengths=form)),
            params,
            PROMPTS[:3],
            decode=1,
            unused=0.0,
        )
        for form in ("update", "mask")
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2)


@pytest.mark.parametrize("dims", [32, 64])
def test_partial_rotary(dims: int, half: torch.dtype) -> None:
    config = config_of(dims=dims)
    params = params_of(config, half)
    engine = engine_of(llama.forward, config, dtype=None, device="npu")
    check_logits(
        all_logits(engine, params, PROMPTS[:2], decode=1, unused=0.0), reference(config, params, PROMPTS[:2])
    )


def test_biases_and_other_activations(half: torch.dtype) -> None:
    for activation in ("gelu", "gelu_tanh"):
        config = config_of(qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, activation=activation)
        params = params_of(config, half)
        engine = engine_of(llama.forward, config, dtype=None, device="npu")
        check_logits(
            all_logits(engine, params, PROMPTS[:2], unused=0.0), reference(config, params, PROMPTS[:2])
        )


def test_greedy_tokens_alone_and_in_a_ragged_batch(half: torch.dtype) -> None:
    config = config_of()
    params = params_of(config, half)
    generate = atbx.generator(llama.forward, config, device="npu")
    together = generate(params, PROMPTS, max_new_tokens=12, eos=()).tokens
    check_greedy(config, params, PROMPTS, together)
    alone = [generate(params, [p], max_new_tokens=12, eos=()).tokens[0] for p in PROMPTS]
    check_greedy(config, params, PROMPTS, alone)


def test_a_batch_in_a_larger_bucket_and_a_chunked_prompt(half: torch.dtype) -> None:
    config = config_of()
    params = params_of(config, half)
    policy = Policy(config.context, chunk=8)
    generate = atbx.generator(llama.forward, config, device="npu", policy=policy)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[1]] * 3
    check_greedy(config, params, prompts, generate(params, prompts, max_new_tokens=5, eos=()).tokens)


def test_sampling_draws_what_the_cpu_draws_from_the_same_logits(half: torch.dtype) -> None:
    config = config_of()
    params = params_of(config, half)
    options = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 11, "eos": ()}
    generate = atbx.generator(llama.forward, config, device="npu")
    once = generate(params, PROMPTS, **options)
    again = generate(params, PROMPTS, **options)
    assert once.tokens == again.tokens
    assert once.seed == 11
    flat = [t for row in once.tokens for t in row]
    assert len(set(flat)) > 3


def test_log_probabilities_and_penalties(half: torch.dtype) -> None:
    config = config_of()
    params = params_of(config, half)
    npu = atbx.generator(llama.forward, config, device="npu")
    cpu = atbx.generator(llama.forward, config)
    options = {"max_new_tokens": 4, "logprobs": 3, "eos": (), "repetition_penalty": 1.3}
    found, expected = npu(params, PROMPTS[:2], **options), cpu(params, PROMPTS[:2], **options)
    for a, b in zip(found.logprobs[0], expected.logprobs[0], strict=True):
        if a.token != b.token:
            break  # a near tie went the other way; from there on the rows differ
        assert a.logprob == pytest.approx(b.logprob, abs=0.1)
    assert found.tokens[0][0] == expected.tokens[0][0]
    scores = npu.score(params, PROMPTS[:3])
    for a, b in zip(scores.total, cpu.score(params, PROMPTS[:3]).total, strict=True):
        assert a == pytest.approx(b, rel=0.02)


def test_streams_interleave_and_end(half: torch.dtype) -> None:
    config = config_of()
    params = params_of(config, half)
    generate = atbx.generator(llama.forward, config, device="npu")
    solo = [generate(params, [p], max_new_tokens=6, eos=()).tokens[0] for p in PROMPTS[:2]]
    streams = [generate.stream(params, [p], max_new_tokens=6, eos=()) for p in PROMPTS[:2]]
    found: list[list[int]] = [[], []]
    for _ in range(6):
        for index, stream in enumerate(streams):
            found[index].append(next(stream).token)
    assert found == solo
    for stream in streams:
        stream.close()


def test_a_user_function_with_ops_of_its_own(half: torch.dtype) -> None:
    ops = atbx.ops

    def function(x: Any, w: Any, table: Any, ids: Any) -> Any:
        y = ops.linear(ops.embedding(table, ids), w)
        return ops.softmax(ops.layer_norm(y + x, eps=1e-5) * 2.0, axis=-1), ops.argmax(y, axis=-1)

    generator = torch.Generator().manual_seed(0)
    x, w, table = (torch.randn(s, generator=generator).to(half) for s in ((2, 3, 32), (32, 16), (10, 16)))
    ids = torch.tensor([[1, 2, 3], [9, 0, 4]])
    found = atbx.jit(function, device="npu", host_results=True)(x, w, table, ids)
    expected = atbx.reference(function, x.double(), w.double(), table.double(), ids)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0.05, atol=0.01)
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("block", [16, 128])
def test_a_paged_cache_gives_the_tokens_of_the_dense_one(block: int, half: torch.dtype) -> None:
    config = config_of()
    params = params_of(config, half)
    dense = atbx.generator(llama.forward, config, device="npu")
    paged = atbx.generator(llama.forward, config, device="npu", block_size=block)
    found = paged(params, PROMPTS, max_new_tokens=8, eos=()).tokens
    check_greedy(config, params, PROMPTS, found)
    assert [row[0] for row in found] == [
        row[0] for row in dense(params, PROMPTS, max_new_tokens=1, eos=()).tokens
    ]
