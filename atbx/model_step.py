"""Steps of a model to compare or to test with: a prompt of one row, then tokens fed one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atbx.compile import reference
from atbx.core.backend import Backend
from atbx.core.binding import Binding
from atbx.core.trees import unflatten
from atbx.engine import place_cache
from atbx.models.step import Step
from atbx.ops.kv_cache import init

SEED = 20261201
"""Of the random prompt that stands in for one that was not given."""


@dataclass(frozen=True)
class ModelStep:
    """Arguments of one step: `forward(params, step, cache, config)`. name: "prefill of 16 tokens", "decode at 16"."""

    name: str
    arguments: tuple[Any, ...]


def random_ids(count: int, vocab: int) -> list[int]:
    """Token ids of a fixed seed."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocab, (count,), generator=generator).tolist()


def teacher_forced(
    forward: Callable[..., Any],
    params: Any,
    config: Any,
    ids: Sequence[int],
    chosen: Backend,
    dtype: torch.dtype,
    decode: int = 1,
) -> Iterator[ModelStep]:
    """A prefill of all but the last `decode` of `ids`, then a step for each of these, by the cache that the reference
    rules leave behind.

    params: as the function takes them. dtype: of keys and values.
    """
    spec = place_cache(config.cache_spec, chosen, None)
    total = len(ids)
    cache: Any = init(spec, batch=1, capacity=total, dtype=dtype)
    for leaf in cache.arena.arena.tensors:
        leaf.zero_()
    prompt = total - decode
    start = 0
    for tokens in (list(ids[:prompt]), *([t] for t in ids[prompt:])):
        step = _step(tokens, start, total)
        name = f"prefill of {len(tokens)} tokens" if start == 0 else f"decode at {start}"
        yield ModelStep(name, (params, step, cache, config))
        start += len(tokens)
        if start < total:
            plain = _tree_of(params, dtype)
            _, cache = reference(forward, plain, step, cache, config)
            cache = replace(cache, lengths=torch.tensor([start]))


def _tree_of(params: Any, dtype: torch.dtype) -> Any:
    if not isinstance(params, Binding):
        return params
    leaves = [leaf.to(abstract.dtype) for leaf, abstract in zip(params.leaves, params.abstracts, strict=True)]
    return unflatten(params.treedef, leaves)


def _step(tokens: Sequence[int], start: int, limit: int) -> Step:
    count = len(tokens)
    places = torch.arange(count).view(1, count)
    return Step(
        torch.tensor([list(tokens)], dtype=torch.int64),
        torch.tensor([count]),
        places + start,
        places.clone(),
        torch.tensor([limit]),
    )
