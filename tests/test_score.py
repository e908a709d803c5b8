"""Log-probabilities and scores: of chosen tokens, of prompts, raw and processed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from model_logits import all_logits, engine_of
from small_models import random_params, small_llama

import atbx
from atbx.models import llama
from atbx.results import Score
from atbx.schedule import Policy

CONFIG = small_llama()
PARAMS = random_params(CONFIG)
PROMPTS = [[5, 9, 33], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [60]]


def expected(prompt: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] by FP64 log-softmax of the logits of the whole prompt."""
    (logits,) = all_logits(engine_of(llama.forward, CONFIG, dtype=None), PARAMS, [prompt])
    return torch.log_softmax(logits.double(), dim=-1)


@pytest.mark.parametrize("chunk", [2, 128])
def test_scores_are_the_log_likelihoods_of_each_next_token(chunk: int) -> None:
    generate = atbx.generator(llama.forward, CONFIG, policy=Policy(CONFIG.context, score_chunk=chunk))
    score = generate.score(PARAMS, PROMPTS)
    assert score.tokens == [2, 10, 0]
    for row, prompt in enumerate(PROMPTS):
        table = expected(prompt)
        wanted = [float(table[t, prompt[t + 1]]) for t in range(len(prompt) - 1)]
        assert score.logprobs[row] == pytest.approx(wanted, abs=2e-5)
        assert score.total[row] == pytest.approx(sum(wanted), abs=2e-4)
    assert score.perplexity[0] == pytest.approx(math.exp(-score.total[0] / 2))
    assert math.isnan(score.perplexity[2])


def test_chosen_and_top_logprobs_are_those_of_the_raw_distribution() -> None:
    generate = atbx.generator(llama.forward, CONFIG)
    result = generate(PARAMS, PROMPTS[0], max_new_tokens=4, logprobs=3, temperature=0.5, top_p=0.5, seed=1)
    assert result.logprobs is not None
    tokens = list(PROMPTS[0])
    for entry, token in zip(result.logprobs[0], result.tokens[0], strict=True):
        table = expected(tokens)[-1]
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(table[token]), abs=2e-5)
        values, ids = table.topk(3)
        assert [i for i, _ in entry.top] == ids.tolist()
        assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=2e-5)
        tokens.append(token)


def test_processed_logprobs_are_those_of_what_was_sampled_from() -> None:
    generate = atbx.generator(llama.forward, CONFIG)
    result = generate(
        PARAMS,
        PROMPTS[0],
        max_new_tokens=3,
        logprobs=2,
        temperature=0.5,
        top_k=2,
        seed=4,
        logprobs_mode="processed",
    )
    assert result.logprobs is not None
    for entry in result.logprobs[0]:
        total = sum(math.exp(v) for _, v in entry.top)
        assert total == pytest.approx(1.0, abs=1e-5)
        assert entry.logprob in [v for _, v in entry.top]


def test_prompt_logprobs_come_with_their_alternatives() -> None:
    result = atbx.generator(llama.forward, CONFIG)(PARAMS, PROMPTS, max_new_tokens=1, prompt_logprobs=2)
    rows: Any = result.prompt_logprobs
    assert [len(row) for row in rows] == [2, 10, 0]
    table = expected(PROMPTS[1])
    for t, entry in enumerate(rows[1]):
        assert entry.token == PROMPTS[1][t + 1]
        assert [i for i, _ in entry.top] == table[t].topk(2).indices.tolist()


def test_prompt_logprobs_change_no_generated_token() -> None:
    generate = atbx.generator(llama.forward, CONFIG)
    plain = generate(PARAMS, PROMPTS, max_new_tokens=6).tokens
    assert generate(PARAMS, PROMPTS, max_new_tokens=6, prompt_logprobs=0).tokens == plain


def test_a_perplexity_past_the_largest_float_is_infinite() -> None:
    assert Score([[-800.0], [-1.0]], [-800.0, -1.0], [1, 1]).perplexity == [math.inf, math.e]
