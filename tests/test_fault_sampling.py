"""Kinds of faults in sampling, ends and text that users met, each with the right value.

The rows behind them, and the tests that hold the other rows, are in tests/faults.toml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import plain_model
import pytest
import torch
from op_checks import run
from small_models import random_params, small_llama
from small_tokenizers import byte_level_fields

import atbx
from atbx import ops
from atbx.checkpoints.tokenizer import Text
from atbx.generate import Generator
from atbx.models import llama
from atbx.ops import kv_cache
from atbx.ops.kv_cache import CacheSpec, LayerCache
from atbx.ops.logits import draw, filter_logits, penalize
from atbx.ops.philox import uniform

CONFIG = small_llama()
PARAMS = random_params(CONFIG)
PROMPT = [9, 8, 7]
GREEDY = plain_model.greedy(PARAMS, PROMPT, 8, CONFIG)


def make(**options: Any) -> Generator:
    """A generator over the small model."""
    return atbx.generator(llama.forward, CONFIG, **options)


def filtered(probabilities: list[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
             min_p: float = 0.0) -> list[int]:  # fmt: skip
    """Ids that the filters keep."""
    logits = torch.tensor([probabilities]).log()
    one = [torch.tensor([x]) for x in (temperature, top_k, top_p, min_p)]
    return run(filter_logits, logits, *one)[0].isfinite().nonzero().squeeze(1).tolist()


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.5, [0]), (0.8, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2]), (0.0, [0])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: list[int]) -> None:
    assert filtered([0.5, 0.3, 0.2], top_p=top_p) == kept


def test_top_k_and_top_p_are_not_each_other() -> None:
    assert filtered([0.2, 0.5, 0.3], top_k=1, top_p=1.0) == [1]
    assert filtered([0.2, 0.5, 0.3], top_k=2, top_p=0.1) == [1]
    assert filtered([0.2, 0.5, 0.3], top_k=2, top_p=0.9) == [1, 2]
    assert make()(PARAMS, PROMPT, max_new_tokens=8, temperature=5.0, top_k=1, seed=3).tokens == [GREEDY]


@pytest.mark.parametrize(
    "options", [{"top_p": 0.0}, {"temperature": 1e-30}, {"temperature": 1e-45}, {"min_p": 1.0}]
)
def test_extreme_options_are_greedy_and_finite(options: dict[str, Any]) -> None:
    result = make()(
        PARAMS, PROMPT, max_new_tokens=8, **{"temperature": 1.0, "seed": 1, **options}, logprobs=0
    )
    assert result.tokens == [GREEDY]
    assert all(math.isfinite(entry.logprob) for entry in (result.logprobs or [[]])[0])


def test_a_penalty_divides_positive_and_multiplies_negative_logits_once_a_token() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    seen = torch.tensor([[True, True, False]])
    counts = torch.tensor([[2, 0, 0]], dtype=torch.int32)
    off, factor = torch.tensor([0.0]), torch.tensor([1.5])
    found = run(penalize, logits, seen, counts, factor, off, off)
    torch.testing.assert_close(found, torch.tensor([[2 / 1.5, -3.0, 1.0]]))


def test_a_repetition_penalty_changes_what_is_generated() -> None:
    params = {**PARAMS, "lm_head": PARAMS["embed"]}
    plain = make()(params, PROMPT, max_new_tokens=8).tokens[0]
    assert len(set(plain)) < 8
    assert make()(params, PROMPT, max_new_tokens=8, repetition_penalty=50.0).tokens[0] != plain


def test_uniform_logits_draw_every_token_as_often() -> None:
    count, kinds = 2000, 8
    ones = torch.ones(count, dtype=torch.int64)
    u = run(uniform, 11 * ones, torch.arange(count), 3 * ones)
    found = torch.bincount(run(draw, torch.zeros(count, kinds), u), minlength=kinds).double()
    expected = count / kinds
    # The 99.99th percentile of chi-square with 7 degrees of freedom is 29.9.
    assert float(((found - expected) ** 2 / expected).sum()) < 29.9


def test_draws_of_one_seed_differ_by_position_and_by_row() -> None:
    seeds = torch.tensor([4, 4, 4, 5])
    sequences, positions = torch.tensor([0, 1, 0, 0]), torch.tensor([2, 2, 3, 2])
    u = run(uniform, seeds, sequences, positions)
    assert len(set(u.tolist())) == 4
    assert torch.equal(u, run(uniform, seeds, sequences, positions))
    assert bool(((u >= 0) & (u < 1)).all())


def test_calls_without_a_seed_differ_and_the_seed_used_brings_one_back() -> None:
    generate = make()
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 3.0}
    first, second = generate(PARAMS, PROMPT, **options), generate(PARAMS, PROMPT, **options)
    assert first.seed != second.seed
    assert first.tokens != second.tokens
    assert generate(PARAMS, PROMPT, seed=first.seed, **options).tokens == first.tokens
    assert make()(PARAMS, [[1], PROMPT], max_new_tokens=8).seed is None


def test_a_seeded_row_draws_as_it_would_alone() -> None:
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 2.0}
    alone = make()(PARAMS, PROMPT, seed=[77], **options).tokens[0]
    for batch, place in (([PROMPT, [1, 2]], 0), ([[3]] * 7 + [PROMPT], 7)):
        seeds = [1000 + i for i in range(len(batch))]
        seeds[place] = 77
        assert make()(PARAMS, batch, seed=seeds, **options).tokens[place] == alone


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_temperature_zero_repeats_in_every_batch(rows: int) -> None:
    batch = [PROMPT, *([i + 1] * (i + 1) for i in range(rows - 1))]
    for temperature in (0, 0.0):
        assert make()(PARAMS, batch, max_new_tokens=8, temperature=temperature).tokens[0] == GREEDY


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_a_stream_ends_at_any_id_of_the_eos_set(which: int) -> None:
    ends = (3, 5)
    stream = make(eos=ends).stream(PARAMS, [PROMPT, [9]], max_new_tokens=8, logit_bias={ends[which]: 1000.0})
    events = list(stream)
    assert [(e.row, e.token, e.finish) for e in events] == [(0, ends[which], "eos"), (1, ends[which], "eos")]


def test_rows_end_each_at_its_own_token() -> None:
    end = GREEDY[3]
    rows = [PROMPT, [1, 2], [33]]
    whole = [plain_model.greedy(PARAMS, row, 8, CONFIG) for row in rows]
    result = make(eos=[end])(PARAMS, rows, max_new_tokens=8)
    for found, reason, tokens in zip(result.tokens, result.finish, whole, strict=True):
        cut = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert (found, reason) == (cut, "eos" if end in tokens else "length")


# --- text ----------------------------------------------------------------------------------------------------------

TEXT = Text.from_gguf_metadata(byte_level_fields())


def test_ids_that_the_tokenizer_lacks_are_never_sampled() -> None:
    config = small_llama(vocab=TEXT.vocab_size + 40)
    params = random_params(config)
    # Ids of the padding rows would win every step.
    params["lm_head"][TEXT.vocab_size :] = 10 * params["lm_head"][0]
    generate = atbx.generator(llama.forward, config, text=TEXT, eos=())
    plain = atbx.generator(llama.forward, config)
    assert max(plain(params, [5], max_new_tokens=40, temperature=5.0, seed=2).tokens[0]) >= TEXT.vocab_size
    for options in ({}, {"temperature": 5.0, "seed": 2}):
        result = generate(params, [[5], [6, 7]], max_new_tokens=60, **options)
        assert max(max(row) for row in result.tokens) < TEXT.vocab_size
        top = generate(params, [5], max_new_tokens=4, logprobs=100, **options).logprobs
        assert max(i for entry in (top or [[]])[0] for i, _ in entry.top) < TEXT.vocab_size


@dataclass(frozen=True)
class Script:
    """A "model" that says the same tokens whatever it is told: the token at position t + 1 follows position t."""

    vocab: int = TEXT.vocab_size
    context: int = 32

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec((LayerCache(1, 2),))


def says(params: Any, step: Any, cache: Any, config: Script) -> tuple[Any, Any]:
    x = ops.reshape(ops.embedding(params["kv"], step.positions), (*step.ids.shape, 1, 2))
    cache = kv_cache.append(cache, x, x, layer=0, counts=step.counts)
    return ops.embedding(params["table"], ops.take(step.positions, step.want)), cache.advance(step.counts)


def speak(tokens: list[int], **options: Any) -> list[Any]:
    """Events of a stream that says these tokens."""
    table = torch.zeros(32, TEXT.vocab_size)
    for position, token in enumerate(tokens):
        table[position, token] = 1.0
    generate = atbx.generator(says, Script(), text=TEXT, eos=options.pop("eos", ()))
    params = {"table": table, "kv": torch.zeros(32, 2)}
    return list(generate.stream(params, [7], max_new_tokens=len(tokens), **options))


def test_a_character_split_over_generated_tokens_is_streamed_whole() -> None:
    tokens = [4 + byte for byte in "a😀b".encode()]
    assert [e.token for e in speak(tokens)] == tokens
    assert [e.text for e in speak(tokens)] == ["a", "", "", "", "😀", "b"]
    # What never became a character is flushed at the end, with the last event.
    assert [e.text for e in speak(tokens[:3])] == ["a", "", "\ufffd"]


def test_a_stop_string_over_several_generated_tokens_ends_the_stream() -> None:
    tokens = [4 + byte for byte in b"one STOP two"]
    events = speak(tokens, stop=["STOP"])
    assert "".join(e.text for e in events) == "one "
    assert (events[-1].finish, len(events)) == ("stop", 8)


def test_an_end_token_in_the_script_ends_the_stream_and_shows_nothing() -> None:
    tokens = [4 + ord("h"), 4 + ord("i"), 2, 4 + ord("!")]
    events = speak(tokens, eos=(0, 2))
    assert [(e.token, e.text, e.finish) for e in events] == [
        (tokens[0], "h", None),
        (tokens[1], "i", None),
        (2, "", "eos"),
    ]
