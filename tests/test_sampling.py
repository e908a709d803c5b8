"""The sampler: its stages and values, one draw a (seed, sequence, position), and rows that no neighbour changes.

The model is a table of logits by last token: a row has the same bits in any batch, and what differs is the sampler's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from op_checks import run

import atbx
from atbx import ops
from atbx.core.errors import AtbxError, OptionError
from atbx.core.trees import flatten
from atbx.generate import Generator
from atbx.ops import kv_cache
from atbx.ops.kv_cache import CacheSpec, LayerCache
from atbx.ops.logits import draw, filter_logits
from atbx.ops.philox import uniform
from atbx.options import Options
from atbx.sampler import SamplerRun
from atbx.sampling import (
    RANGES,
    TABLE_WIDTHS,
    TOP_WIDTHS,
    SamplerStep,
    SamplerValues,
    Sampling,
    Stages,
    sample_step,
)
from atbx.schedule import Request

VOCAB = 24
INF = math.inf


@dataclass(frozen=True)
class Table:
    """A model whose logits hang on the last token alone."""

    vocab: int = VOCAB
    context: int = 64

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec((LayerCache(1, 2),))


def look_up(params: Any, step: Any, cache: Any, config: Table) -> tuple[Any, Any]:
    kv = ops.reshape(ops.embedding(params["kv"], step.ids), (*step.ids.shape, 1, 2))
    cache = kv_cache.append(cache, kv, kv, layer=0, counts=step.counts)
    return ops.embedding(params["table"], ops.take(step.ids, step.want)), cache.advance(step.counts)


def params_of(table: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"table": table, "kv": torch.zeros(len(table), 2)}


def random_table(vocab: int = VOCAB) -> torch.Tensor:
    return 2 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(8))


def same_everywhere(*logits: float) -> dict[str, torch.Tensor]:
    """Parameters of a model that gives these logits after any token."""
    return params_of(torch.tensor([logits] * len(logits)))


def make(vocab: int = VOCAB, **options: Any) -> Generator:
    return atbx.generator(look_up, Table(vocab), **options)


PARAMS = params_of(random_table())
GENERATE = make()
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 1.5,
    "top_k": 20,
    "top_p": 0.97,
    "min_p": 0.001,
}
PROMPT = [3, 1, 4]


def plain_draws(prompt: Sequence[int], seed: int, sequence: int, new: int) -> list[int]:
    """What a row must draw under OPTIONS: a uniform of (seed, sequence, position of the token), op by op."""
    tokens = list(prompt)
    for _ in range(new):
        one = (torch.tensor([OPTIONS["temperature"]]), torch.tensor([OPTIONS["top_k"]]),
               torch.tensor([OPTIONS["top_p"]]), torch.tensor([OPTIONS["min_p"]]))  # fmt: skip
        logits = run(filter_logits, PARAMS["table"][tokens[-1:]], *one)
        u = run(uniform, *(torch.tensor([x]) for x in (seed, sequence, len(tokens))))
        tokens.append(int(run(draw, logits, u)))
    return tokens[len(prompt) :]


# --- options, stages and values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RANGES, "seed"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_values_as_rows_whether_the_option_is_used_or_not(name: str, count: int) -> None:
    for value, others in ((1, {}), (1, {"temperature": 1.0, "presence_penalty": 0.1})):
        with pytest.raises(OptionError, match=rf"^{name}: one value a row; expected 2, found {count}$"):
            GENERATE(PARAMS, [[1], [2]], max_new_tokens=1, **{**others, name: [value] * count})


@pytest.mark.parametrize("value", [-1e39, -(10**400)], ids=["float", "int"])
def test_a_finite_bias_below_fp32_is_refused_and_never_becomes_a_ban(value: float) -> None:
    with pytest.raises(OptionError, match=r"^logit_bias\[3\]: is no bias; expected a number or -inf"):
        Sampling(logit_bias={3: value})
    assert Sampling(logit_bias={3: -INF, 4: -torch.finfo(torch.float32).max}).logit_bias[3] == -INF


def test_an_unknown_sampling_option_names_the_nearest() -> None:
    with pytest.raises(
        OptionError, match=r"^temprature: unknown sampling option; .* Did you mean temperature\?"
    ):
        Sampling.from_options(temprature=1.0)
    with pytest.raises(
        OptionError, match=r"^zzz: unknown sampling option; expected one of \['frequency_penalty'"
    ):
        Sampling.from_options(zzz=1.0)


def test_each_row_keeps_its_own_value() -> None:
    sampling = Sampling(temperature=[0.0, 0.5], top_k=(3, 0), min_p=0.1)
    columns = [sampling.column(name, 2) for name in ("temperature", "top_k", "min_p")]
    assert columns == [[0.0, 0.5], [3, 0], [0.1, 0.1]]
    assert sampling.is_on("temperature")
    assert not Sampling(temperature=[0.0, 0.0]).is_on("temperature", "top_p", "repetition_penalty")


def test_seeds_and_sequences_of_rows() -> None:
    assert Sampling(seed=5).seeds(3) == (5, [5] * 3, [0, 1, 2])
    assert Sampling(seed=[5, -6]).seeds(2) == ((5, -6), [5, -6], [0, 0])
    fresh = [Sampling().seeds(2) for _ in range(8)]
    assert len({seed for seed, _, _ in fresh}) == 8
    assert all(seeds == [seed, seed] and sequences == [0, 1] for seed, seeds, sequences in fresh)
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed, _, _ in fresh)


PLAIN = st.fixed_dictionaries({}, optional={
    "temperature": st.floats(0, 10), "top_k": st.integers(0, 100), "top_p": st.floats(0, 1), "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 5), "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 1000), st.floats(-9, 9), max_size=70), "seed": st.integers(-9, 2**40),
})  # fmt: skip


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(PLAIN, st.integers(0, 300), st.none() | st.integers(0, 100), st.booleans())
def test_stages_form_a_small_closed_set(
    given: dict[str, Any], eos: int, logprobs: int | None, processed: bool
) -> None:
    sampling = Sampling.from_options(**given)
    stages = Stages.of(sampling, eos=eos, logprobs=logprobs, processed=processed)
    assert stages.filters == (given.get("temperature", 0) > 0)
    off = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    assert stages.penalties == any(given.get(name, value) != value for name, value in off.items())
    for width, size in ((stages.bias, len(sampling.logit_bias)), (stages.eos, eos)):
        assert width in TABLE_WIDTHS
        assert size <= width <= max(4, 4 * size)
        assert (width == 0) == (size == 0)
    assert stages.logprobs is None if logprobs is None else stages.logprobs in TOP_WIDTHS
    assert stages.processed == (processed and logprobs is not None)
    assert hash(stages) == hash(Stages(**vars(stages)))


def test_a_table_of_more_entries_than_the_widest_is_refused() -> None:
    assert Stages.of(Sampling(logit_bias=dict.fromkeys(range(4096), 1.0))).bias == 4096
    with pytest.raises(
        OptionError, match=r"^logit_bias: too many entries; expected at most 4096, found 4097$"
    ):
        Stages.of(Sampling(logit_bias=dict.fromkeys(range(4097), 1.0)))


def test_values_exist_only_for_their_stages() -> None:
    def names(stages: Stages, **given: Any) -> set[str]:
        values, _ = SamplerValues.of(Sampling(**given), stages, [[1], [2]], VOCAB, [5, 99])
        return {name for name, value in vars(values).items() if value is not None}

    filters = {"temperature", "top_k", "top_p", "min_p", "seed", "sequence"}
    assert names(Stages()) == set()
    assert names(Stages(filters=True), temperature=1.0) == filters
    assert names(Stages(penalties=True)) == {"seen", "repetition", "presence", "frequency"}
    assert names(Stages(bias=4, eos=4), logit_bias={1: 2.0}) == {"bias_ids", "bias_values", "eos_ids"}


def test_values_hold_what_the_prompts_held_and_no_id_past_the_vocabulary() -> None:
    stages = Stages(penalties=True, bias=4, eos=4)
    sampling = Sampling(logit_bias={3: -INF, 0: 2.0})
    values, seed = SamplerValues.of(sampling, stages, [[1, 1, 7], [30, 2]], VOCAB, [5, 24, 99])
    assert seed is None
    assert [row.nonzero().squeeze(1).tolist() for row in values.seen] == [[1, 7], [2]]
    assert values.bias_ids.tolist() == [[3, 0, -1, -1]] * 2
    assert values.bias_values.tolist() == [[-INF, 2.0, 0.0, 0.0]] * 2
    assert values.eos_ids.tolist() == [[5, -1, -1, -1]] * 2
    with pytest.raises(OptionError, match=r"^logit_bias\[24\]: .*expected under 24, found 24"):
        SamplerValues.of(Sampling(logit_bias={24: 1.0}), stages, [[1]], VOCAB, [])


# --- one step ------------------------------------------------------------------------------------------------------


def one_step(
    logits: torch.Tensor, *, vocab: int | None = None, eos: Sequence[int] = (), unfinished: bool = False,
    logprobs: int | None = None, processed: bool = False, **given: Any,
) -> Any:  # fmt: skip
    """`sample_step` by reference rules, at position 9 of every row."""
    batch, vocab = len(logits), vocab or logits.shape[1]
    sampling = Sampling(**given)
    stages = Stages.of(sampling, eos=len(eos), logprobs=logprobs, processed=processed)
    values, _ = SamplerValues.of(sampling, stages, [[0]] * batch, vocab, eos)
    counts = torch.zeros(batch, vocab, dtype=torch.int32) if stages.penalties else None
    every = torch.ones(batch, dtype=torch.bool)
    step = SamplerStep(torch.full((batch,), 9), every, every & unfinished)
    return run(lambda: sample_step(logits, values, counts, step, stages, vocab))


def test_ids_past_the_vocabulary_are_never_drawn_nor_reported() -> None:
    logits = torch.zeros(500, 20)
    logits[:, 17:] = 50.0
    for given in ({"temperature": 5.0, "seed": 1}, {"temperature": 0.0}, {"presence_penalty": 0.5}):
        found = one_step(logits, vocab=17, logprobs=20, **given)
        assert int(found.tokens.max()) < 17
        assert int(found.top_ids.max()) < 17
        torch.testing.assert_close(found.logprob, torch.full((500,), -math.log(17)))
    assert len(set(one_step(logits, vocab=17, temperature=5.0, seed=1).tokens.tolist())) == 17
    poisoned = logits.clone()
    poisoned[:, 17:] = math.nan
    assert not bool(one_step(poisoned, vocab=17, temperature=5.0, seed=1).unusable.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_temperature_are_greedy_beside_rows_with(dtype: torch.dtype) -> None:
    logits = random_table()[:6].to(dtype)
    mixed = one_step(logits, temperature=[0.0, 2.0] * 3, seed=list(range(6)))
    hot = one_step(logits, temperature=2.0, seed=list(range(6)))
    assert (
        mixed.tokens[::2].tolist() == logits.argmax(1)[::2].tolist() == one_step(logits).tokens[::2].tolist()
    )
    assert mixed.tokens[1::2].tolist() == hot.tokens[1::2].tolist()


def test_end_tokens_are_suppressed_only_before_the_minimum() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]])
    for given in ({}, {"temperature": 1e-3, "seed": 0}):
        assert one_step(logits, eos=[0, 1], unfinished=True, **given).tokens.tolist() == [2]
        assert one_step(logits, eos=[0, 1], unfinished=False, **given).tokens.tolist() == [0]


def test_penalties_then_bias_then_suppression_then_filters() -> None:
    # Token 0 was in the prompt: 4 / 2 + 3 = 5, not (4 + 3) / 2.
    logits = torch.tensor([[4.0, 4.5, 5.5, 0.0]])
    given: dict[str, Any] = {"repetition_penalty": 2.0, "logit_bias": {0: 3.0}}
    found = one_step(logits, logprobs=4, processed=True, **given)
    exact = torch.tensor([5.0, 4.5, 5.5, 0.0]).log_softmax(0)
    assert found.top_ids.tolist() == [[2, 0, 1, 3]]
    torch.testing.assert_close(found.top_values[0], exact[[2, 0, 1, 3]])
    # Suppression wins over any bias, and top-k counts among what is left.
    given["logit_bias"] = {0: 3.0, 2: 100.0}
    found = one_step(
        logits,
        eos=[2],
        unfinished=True,
        temperature=1.0,
        top_k=2,
        seed=0,
        logprobs=4,
        processed=True,
        **given,
    )
    assert found.top_ids[0, :2].tolist() == [0, 1]
    assert found.top_values[0, 2:].tolist() == [-INF, -INF]


def test_raw_log_probabilities_are_the_models_and_processed_those_sampled_from() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    given: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "seed": 0, "logprobs": 5}
    raw = one_step(logits, **given)
    assert raw.tokens.tolist() == [0]
    assert raw.logprob.tolist() == pytest.approx([math.log(0.5)])
    assert raw.top_values[0].tolist() == pytest.approx([math.log(p) for p in (0.5, 0.3, 0.2)])
    processed = one_step(logits, processed=True, **given)
    assert processed.logprob.tolist() == pytest.approx([0.0])
    assert processed.top_values[0].tolist() == [0.0, -INF, -INF]
    # At temperature .5 probabilities are squared: .25, .09, .04 of .38.
    whole = one_step(logits, processed=True, **{**given, "top_p": 1.0})
    assert whole.top_values[0].tolist() == pytest.approx([math.log(p / 0.38) for p in (0.25, 0.09, 0.04)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [{}, {"logit_bias": {3: 1.5}}, {"presence_penalty": 0.5}], ids=str)
def test_a_greedy_row_reports_the_same_processed_log_probability_beside_sampled_rows(
    dtype: torch.dtype, extra: dict[str, Any]
) -> None:
    logits = random_table()[:3].to(dtype)
    given: dict[str, Any] = {"logprobs": 5, "processed": True, **extra}
    alone = one_step(logits[:1], **given)
    beside = one_step(logits, temperature=[0.0, 1.0, 0.7], top_k=[2, 0, 4], seed=1, **given)
    assert alone.logprob[0] < -0.01
    for name in ("tokens", "logprob", "top_values", "top_ids"):
        assert torch.equal(getattr(beside, name)[:1], getattr(alone, name))
    # The sampled row still reports what its filters left.
    assert beside.top_values[2, 4:].tolist() == [-INF]


# --- through the generator -----------------------------------------------------------------------------------------


def test_a_seed_is_every_draw_by_the_formula() -> None:
    result = GENERATE(PARAMS, [PROMPT, [7], PROMPT], seed=11, **OPTIONS)
    prompts = (PROMPT, [7], PROMPT)
    assert result.tokens == [plain_draws(prompt, 11, row, 12) for row, prompt in enumerate(prompts)]
    assert result.tokens[0] != result.tokens[2]
    assert result.seed == 11
    each = GENERATE(PARAMS, [PROMPT, [7], PROMPT], seed=[11, -5, 11], **OPTIONS)
    assert each.tokens == [plain_draws(p, s, 0, 12) for p, s in zip(prompts, (11, -5, 11), strict=True)]
    assert each.tokens[0] == each.tokens[2]
    assert each.seed == (11, -5, 11)


def test_the_seed_that_comes_back_gives_the_tokens_again() -> None:
    generate = make()
    first, second = (generate(PARAMS, [PROMPT, [7]], **OPTIONS) for _ in range(2))
    assert first.seed != second.seed
    assert first.tokens != second.tokens
    for result in (first, second):
        assert make()(PARAMS, [PROMPT, [7]], seed=result.seed, **OPTIONS).tokens == result.tokens


def test_a_draw_hangs_on_the_absolute_position_not_on_the_step() -> None:
    whole = GENERATE(PARAMS, PROMPT, seed=[4], **OPTIONS).tokens[0]
    rest = GENERATE(PARAMS, PROMPT + whole[:5], seed=[4], **{**OPTIONS, "max_new_tokens": 7}).tokens[0]
    assert rest == whole[5:]


@pytest.mark.parametrize("neighbours", [1, 3, 7, 8, 10])
def test_a_row_draws_alike_alone_and_with_neighbours(neighbours: int) -> None:
    extra: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "logit_bias": {2: 1.0},
        "logprobs": 3,
    }
    alone = GENERATE(PARAMS, PROMPT, seed=[77], **OPTIONS, **extra)
    others = [[(5 * i) % VOCAB] * (1 + i % 4) for i in range(neighbours)]
    for place in (0, neighbours):
        batch = [*others[:place], PROMPT, *others[place:]]
        seeds = [100 + i for i in range(neighbours + 1)]
        seeds[place] = 77
        together = GENERATE(PARAMS, batch, seed=seeds, **OPTIONS, **extra)
        assert together.tokens[place] == alone.tokens[0]
        assert (together.logprobs or [])[place] == (alone.logprobs or [])[0]


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 9, 11])
def test_a_compiled_step_gives_a_row_the_same_bits_in_every_batch(batch: int) -> None:
    owner, logits = GENERATE, random_table()[:1].expand(batch, VOCAB).contiguous()
    options = Options.read({**OPTIONS, "seed": [5] * batch, "presence_penalty": 0.3, "logprobs": 5})
    sampler = SamplerRun(owner, options, [PROMPT] * batch, ())
    first, second = (sampler.step(logits, [True] * batch) for _ in range(2))
    single = SamplerRun(
        owner, Options.read({**OPTIONS, "seed": [5], "presence_penalty": 0.3, "logprobs": 5}), [PROMPT], ()
    )
    for tokens in (first, second):
        assert tokens.tolist() == single.step(logits[:1], [True]).tolist() * batch
    assert [sampler.logprobs(row, 0) for row in range(batch)] == [single.logprobs(0, 0)] * batch


def test_values_never_make_a_variant() -> None:
    generate = make()
    values: dict[str, list[Any]] = {
        "temperature": [0.5, 2.0, [0.0, 1.0]], "top_k": [0, 5, [1, 2]], "top_p": [1.0, 0.5], "min_p": [0.0, 0.2],
        "seed": [None, 3, [4, 5]], "repetition_penalty": [1.0, 1.5], "presence_penalty": [0.1, -2.0],
        "frequency_penalty": [0.0, 1.0], "logit_bias": [{1: 2.0}, {3: -INF, 4: 0.5}], "eos": [[1], [2, 3]],
    }  # fmt: skip
    base = {name: options[0] for name, options in values.items()}
    changes = [{}, *({name: value} for name, options in values.items() for value in options[1:])]
    for change in changes:
        generate(
            PARAMS,
            [PROMPT, [7]],
            max_new_tokens=3,
            min_new_tokens=2,
            **{**base, "presence_penalty": 0.1, **change},
        )
    info = generate.cache_info().sampler
    assert (info.variants, info.misses) == (1, 1)
    assert info.hits >= len(changes)


def test_greedy_pays_for_greedy() -> None:
    stages = Stages.of(Options.read({"max_new_tokens": 5, "seed": 3, "top_k": 4, "top_p": 0.5}).sampling)
    assert stages == Stages()
    generate = make()
    assert generate(PARAMS, PROMPT, max_new_tokens=3, seed=3).seed is None
    run_ = SamplerRun(generate, Options.read({}), [PROMPT], ())
    assert run_.counts is None
    assert all(leaf is None for leaf in flatten(run_.values)[0])


@pytest.mark.parametrize("eos", [(3, 3, 3, 3, 3), (1, 2, 3, 4, 5), 3])
def test_planned_stages_are_those_of_the_run(eos: Any) -> None:
    generate = make()
    options = {
        "temperature": 1.0,
        "min_new_tokens": 2,
        "eos": eos,
        "logprobs": 3,
        "logprobs_mode": "processed",
    }
    generate.warm(PARAMS, [Request((3,), 4, options)])
    generate.freeze()
    assert len(generate(PARAMS, PROMPT, max_new_tokens=4, **options).tokens[0]) >= 2


def test_no_end_token_is_drawn_before_the_minimum() -> None:
    generate = make(eos=[5, 9])
    strong = {"temperature": 3.0, "logit_bias": {5: 30.0, 9: 30.0}, "seed": 1, "max_new_tokens": 8}
    result = generate(PARAMS, [PROMPT, [7]], min_new_tokens=4, **strong)
    for row, reason in zip(result.tokens, result.finish, strict=True):
        assert not {5, 9} & set(row[:4])
        assert (len(row), reason) == (5, "eos")
        assert row[4] in (5, 9)
    ends = [
        row[-1] for s in range(12) for row in generate(PARAMS, [PROMPT, [7]], **{**strong, "seed": s}).tokens
    ]
    assert set(ends) == {5, 9}


def test_a_repetition_penalty_sees_the_prompt_and_the_others_do_not() -> None:
    params = same_everywhere(3.0, 2.9, 2.8, 2.7)
    generate = make(4)
    assert generate(params, [0, 2], max_new_tokens=3).tokens == [[0, 0, 0]]
    assert generate(params, [0, 2], max_new_tokens=3, repetition_penalty=2.0).tokens == [[1, 3, 0]]
    assert generate(params, [0, 2], max_new_tokens=4, presence_penalty=1.0).tokens == [[0, 1, 2, 3]]
    # Frequency adds up: 3.0 and 2.9 with .15 less for each time take turns.
    assert generate(params, [1, 1, 1], max_new_tokens=4, frequency_penalty=0.15).tokens == [[0, 1, 0, 2]]
    assert generate(params, [0], max_new_tokens=3, frequency_penalty=-1.0, logit_bias={1: 0.2}).tokens == [
        [1, 1, 1]
    ]


def test_penalties_hold_for_their_row_alone() -> None:
    params = same_everywhere(3.0, 2.9, 2.8, 2.7)
    result = make(4)(params, [[0], [0], [0]], max_new_tokens=3, presence_penalty=[0.0, 1.0, 0.0])
    assert result.tokens == [[0, 0, 0], [0, 1, 2], [0, 0, 0]]


def test_a_bias_forces_and_bans() -> None:
    assert GENERATE(PARAMS, PROMPT, logit_bias={9: 1000.0}, seed=2, **OPTIONS).tokens == [[9] * 12]
    banned = {i: -INF for i in range(VOCAB) if i % 2}
    result = GENERATE(PARAMS, [PROMPT] * 3, logit_bias=banned, seed=2, **{**OPTIONS, "temperature": 9.0})
    assert all(token % 2 == 0 for row in result.tokens for token in row)
    assert len({token for row in result.tokens for token in row}) > 4


def test_a_run_without_any_token_left_names_row_and_token() -> None:
    everything = dict.fromkeys(range(VOCAB), -INF)
    for given in ({}, {"temperature": 1.0}):
        with pytest.raises(AtbxError, match=r"^row 0, new token 0: .*every token is banned"):
            GENERATE(PARAMS, [PROMPT, [7]], max_new_tokens=3, logit_bias=everything, **given)


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_bad_row_of_logits_is_reported_where_it_is_met_and_not_after_the_rows_end(bad: float) -> None:
    table = torch.zeros(4, 4)
    table[0, 1] = table[1, 2] = 1.0
    table[2] = bad
    generate = make(4)
    for given in ({}, {"temperature": 1e-3, "seed": 1}):
        with pytest.raises(AtbxError, match=r"^row 1, new token 2: .*NaN or infinity"):
            generate(params_of(table), [[3], [0]], max_new_tokens=5, logit_bias={3: 0.5}, **given)
        # The row ends at token 2, so what the model would say after it is nobody's.
        result = generate(
            params_of(table), [[3], [0]], max_new_tokens=5, eos=[2], logit_bias={3: 0.5}, **given
        )
        assert result.tokens == [[3] * 5, [1, 2]]


@dataclass(frozen=True)
class StubText:
    """The little that a generator asks of a tokenizer."""

    vocab_size: int = 17
    eos: tuple[int, ...] = (4, 6)
    special_ids: frozenset[int] = frozenset({4, 6})
    start_spaces: int = 0

    def token_bytes(self, token: int) -> bytes:
        return b"%d " % token


def test_ids_that_the_tokenizer_lacks_are_neither_drawn_biased_nor_reported() -> None:
    table = torch.zeros(20, 20)
    table[:, 17:] = 50.0
    generate = make(20, text=StubText())
    result = generate(
        params_of(table), [[1], [16]], max_new_tokens=40, eos=(), temperature=5.0, seed=1, logprobs=20
    )
    assert {token for row in result.tokens for token in row} == set(range(17))
    assert all(len(entry.top) == 17 for row in result.logprobs or [] for entry in row)
    with pytest.raises(OptionError, match=r"^logit_bias\[17\]: is outside the vocabulary; expected under 17"):
        generate(params_of(table), [1], max_new_tokens=1, logit_bias={17: 1.0})
    with pytest.raises(
        OptionError, match=r"^tokens\[0\]: is outside the vocabulary; expected 0 to 16, found 19"
    ):
        generate(params_of(table), [19], max_new_tokens=1)


def test_ids_that_the_tokenizer_lacks_take_no_share_of_a_score() -> None:
    table = torch.zeros(20, 20)
    table[:, 17:] = 50.0
    score = make(20, text=StubText()).score(params_of(table), [1, 2, 3])
    assert score.logprobs[0] == pytest.approx([-math.log(17)] * 2)


def test_both_end_tokens_of_a_tokenizer_end_a_row_and_show_no_text() -> None:
    table = torch.full((20, 20), -20.0)
    table[1, 2] = table[2, 4] = table[3, 6] = 20.0
    result = make(20, text=StubText())(
        params_of(table), [[1], [3]], max_new_tokens=8, temperature=1.0, seed=0
    )
    assert (result.tokens, result.finish, result.text) == ([[2, 4], [6]], ["eos", "eos"], ["2 ", ""])


@pytest.mark.parametrize("asked", [0, 1, 3, 20])
def test_as_many_alternatives_come_back_as_were_asked_for(asked: int) -> None:
    result = GENERATE(PARAMS, [PROMPT, [7]], seed=1, logprobs=asked, **OPTIONS)
    for row, prompt, entries in zip(result.tokens, (PROMPT, [7]), result.logprobs or [], strict=True):
        for token, before, entry in zip(row, [prompt[-1], *row], entries, strict=False):
            exact = PARAMS["table"][before].log_softmax(0)
            assert entry.token == token
            assert entry.logprob == pytest.approx(float(exact[token]), abs=1e-5)
            assert [i for i, _ in entry.top] == exact.argsort(descending=True)[:asked].tolist()


def test_a_greedy_rows_processed_log_probabilities_do_not_hang_on_a_sampled_neighbour() -> None:
    given: dict[str, Any] = {"max_new_tokens": 6, "logprobs": 3, "logprobs_mode": "processed", "seed": 1}
    alone = GENERATE(PARAMS, [PROMPT], **given)
    beside = GENERATE(PARAMS, [PROMPT, [7]], temperature=[0.0, 1.0], **given)
    assert beside.tokens[0] == alone.tokens[0]
    assert alone.logprobs is not None
    assert beside.logprobs is not None
    assert beside.logprobs[0] == alone.logprobs[0]
