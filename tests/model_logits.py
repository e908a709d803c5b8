"""Logits of a model at every position, by every path a token can take: prompts, chunks, ragged batches, decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from atbx.engine import Engine
from atbx.schedule import Policy, prefill


def engine_of(
    forward: Callable[..., Any],
    config: Any,
    *,
    dtype: torch.dtype | None,
    chunk: int = 512,
    device: Any = "cpu",
) -> Engine:
    """An engine with this prefill chunk."""
    policy = Policy(config.context, chunk=chunk, score_chunk=chunk)
    return Engine(
        forward, config, policy, dtype=dtype, device=device, numerics="fast", fallback=None, variants=256
    )


def all_logits(
    engine: Engine,
    params: Any,
    prompts: Sequence[list[int]],
    *,
    decode: int = 0,
    unused: float = float("nan"),
) -> list[torch.Tensor]:
    """Logits [T, V] of every token of each prompt; the last `decode` tokens are fed one at a time.

    unused: what every slot of the arena holds beforehand.
    """
    binding = engine.bind(params)
    policy = engine.policy
    heads = [p[: len(p) - decode] for p in prompts]
    longest = max(map(len, prompts))
    shape = (policy.batch(len(prompts)), policy.capacity(longest), policy.chunk)
    arena = engine.pool(binding).take(*shape)
    for leaf in arena.tensors:
        leaf.fill_(unused)
    cache = engine.open_cache(arena, len(prompts), shape[1])
    limits = torch.tensor([len(p) for p in prompts])
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for chunk in prefill([len(p) for p in heads], policy):
        logits, cache = engine.prefill_chunk(binding, heads, limits, chunk, cache, True)
        for index, (row, count) in enumerate(zip(chunk.rows, chunk.counts, strict=True)):
            found[row].append(logits[index, :count])
    cache = replace(cache, lengths=torch.tensor([len(p) for p in heads]))
    everyone = torch.ones(len(prompts), dtype=torch.int64)
    for step in range(decode):
        tokens = torch.tensor([p[len(h) + step] for p, h in zip(prompts, heads, strict=True)])
        filled = max(map(len, heads)) + step
        logits, cache = engine.decode(binding, tokens, everyone, limits, cache, filled, len(prompts))
        for row in range(len(prompts)):
            found[row].append(logits[row].unsqueeze(0))
    return [torch.cat(parts) for parts in found]


def greedy(engine: Engine, params: Any, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    """`new` greedy tokens for each prompt, EOS not stopping, as one batch."""
    from atbx.generate import Generator

    generate = Generator(lambda: None, engine.config)
    generate.engine = engine
    return generate(params, prompts, max_new_tokens=new, eos=()).tokens
