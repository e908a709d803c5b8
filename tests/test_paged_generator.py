"""Generation over a paged cache: the tokens of the dense one, whatever the block size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import random_params, small_llama

import atbx
from atbx.models import llama
from atbx.schedule import Policy, Request


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(61, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("block", [1, 16, 128])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "drawn"])
def test_paged_and_dense_caches_give_the_same_tokens(
    block: int, window: int | None, options: dict[str, Any]
) -> None:
    config = small_llama(window=window)
    params = random_params(config)
    policy = Policy(config.context, chunk=16)
    dense = atbx.generator(llama.forward, config, policy=policy)
    paged = atbx.generator(llama.forward, config, policy=policy, block_size=block)
    rows = prompts(3, 40, 17, 1, 9)
    for _ in range(2):  # the second time over arenas that were used before
        expected = dense(params, rows, max_new_tokens=20, **options)
        assert paged(params, rows, max_new_tokens=20, **options).tokens == expected.tokens
    assert paged.score(params, rows).total == pytest.approx(dense.score(params, rows).total, rel=1e-5)


def test_variants_of_a_paged_cache_are_planned_and_frozen() -> None:
    config = small_llama()
    params = random_params(config)
    paged = atbx.generator(llama.forward, config, block_size=16)
    paged.warm(params, [Request((3, 40, 5), 20)])
    paged.freeze()
    assert len(paged(params, prompts(3, 40, 5), max_new_tokens=20).tokens) == 3
