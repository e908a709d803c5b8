"""Ops on logits: literals worked out by hand, transformers' processors, FP64 formulas, and rows apart from others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from op_checks import check_op, run, shapes

import atbx
from atbx.core.abstract import abstract_of
from atbx.core.errors import ShapeError
from atbx.ops.logits import (
    bias_logits,
    count_tokens,
    draw,
    filter_logits,
    is_unusable,
    penalize,
    suppress,
    token_logprobs,
    top_logprobs,
)
from atbx.ops.philox import uniform

INF = math.inf
LAST_UNIFORM = 1 - 2**-24
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def column(value: Any, batch: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[B] of one value, or of the values given."""
    return torch.tensor(list(value) if isinstance(value, Sequence) else [value] * batch, dtype=dtype)


def options(
    batch: int, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0
) -> tuple[torch.Tensor, ...]:
    """The filters' four operands."""
    return (
        column(temperature, batch), column(top_k, batch, torch.int64), column(top_p, batch), column(min_p, batch),
    )  # fmt: skip


def filtered(logits: torch.Tensor, **values: Any) -> torch.Tensor:
    return run(filter_logits, logits, *options(len(logits), **values))


def kept(logits: torch.Tensor, **values: Any) -> list[list[int]]:
    """Ids that the filters leave, of every row."""
    return [row.isfinite().nonzero().squeeze(1).tolist() for row in filtered(logits, **values)]


def of(*probabilities: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits [1,V] of probabilities."""
    return torch.tensor([probabilities], dtype=torch.float64).log().to(dtype)


def random_logits(batch: int = 3, vocab: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(batch, vocab)).to(dtype)


# --- penalties -----------------------------------------------------------------------------------------------------


def penalized(
    logits: torch.Tensor, prompt: Sequence[int], generated: Sequence[int], **values: float
) -> torch.Tensor:
    """One row [1,V] with penalties for these tokens."""
    seen, counts = torch.zeros(logits.shape, dtype=torch.bool), torch.zeros(logits.shape, dtype=torch.int32)
    for token in prompt:
        seen[0, token] = True
    for token in generated:
        counts[0, token] += 1
    of_each = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, **values}
    return run(penalize, logits, seen, counts, *(column(x, 1) for x in of_each.values()))


@DTYPES
@pytest.mark.parametrize(
    ("prompt", "generated"), [([0, 1], []), ([], [0, 1]), ([0, 1, 0, 1], [0, 0, 1]), ([0], [1, 1, 1])]
)
def test_repetition_penalises_by_sign_once_a_distinct_token(
    prompt: list[int], generated: list[int], dtype: torch.dtype
) -> None:
    found = penalized(torch.tensor([[2.0, -2.0, 1.0]], dtype=dtype), prompt, generated, repetition=1.5)
    torch.testing.assert_close(found, torch.tensor([[2 / 1.5, -3.0, 1.0]]))


def test_presence_counts_once_and_frequency_each_time_and_neither_sees_the_prompt() -> None:
    logits = torch.zeros(1, 4)
    assert penalized(logits, [0, 1], [1, 2, 2], presence=0.5).tolist() == [[0.0, -0.5, -0.5, 0.0]]
    assert penalized(logits, [0, 1], [1, 2, 2], frequency=0.25).tolist() == [[0.0, -0.25, -0.5, 0.0]]
    assert penalized(logits, [0], [2], presence=-1.0, frequency=-1.0).tolist() == [[0.0, 0.0, 2.0, 0.0]]


def test_repetition_comes_before_presence_and_frequency() -> None:
    found = penalized(torch.tensor([[6.0, -6.0]]), [], [0, 0, 1], repetition=2.0, presence=1.0, frequency=0.5)
    assert found.tolist() == [[6 / 2 - 1 - 2 * 0.5, -6 * 2 - 1 - 0.5]]


@DTYPES
def test_penalties_agree_with_their_formula(dtype: torch.dtype) -> None:
    logits = random_logits(dtype=dtype)
    seen, counts = torch.rand(3, 40) < 0.3, torch.randint(0, 3, (3, 40), dtype=torch.int32)
    strengths = (column([1.5, 1.0, 0.7], 3), column([0.0, 1.0, -0.5], 3), column([0.3, 0.0, 0.1], 3))

    def formula(x: Any, seen: Any, counts: Any, r: Any, p: Any, f: Any) -> torch.Tensor:
        out = x.clone()
        for b in range(3):
            for v in range(40):
                if seen[b, v] or counts[b, v]:
                    out[b, v] = x[b, v] / r[b] if x[b, v] > 0 else x[b, v] * r[b]
                out[b, v] -= p[b] * min(int(counts[b, v]), 1) + f[b] * int(counts[b, v])
        return out

    found = check_op(penalize, logits, seen, counts, *strengths, oracle=formula)
    assert found.dtype == torch.float32


# --- bias and bans -------------------------------------------------------------------------------------------------


@DTYPES
def test_biases_add_up_and_unused_places_add_nothing(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 2, 2, -1], [1, -1, -1, -1]])
    values = torch.tensor([[1.5, 2.0, 0.25, 99.0], [-INF, 99.0, 99.0, 99.0]])

    def formula(x: Any, ids: Any, values: Any) -> torch.Tensor:
        out = x.clone()
        for b, n in ((b, n) for b in range(2) for n in range(4) if ids[b, n] >= 0):
            out[b, ids[b, n]] += values[b, n]
        return out

    check_op(bias_logits, random_logits(2, 3, dtype), ids, values, oracle=formula)
    assert run(bias_logits, torch.ones(2, 3), ids, values).tolist() == [[2.5, 1.0, 3.25], [1.0, -INF, 1.0]]


@DTYPES
def test_suppressed_ids_go_only_where_active(dtype: torch.dtype) -> None:
    ids, active = torch.tensor([[0, 2, 2, -1]] * 2), torch.tensor([True, False])

    def formula(x: Any, ids: Any, active: Any) -> torch.Tensor:
        out = x.clone()
        out[0, 0] = out[0, 2] = -INF
        return out

    check_op(suppress, random_logits(2, 3, dtype), ids, active, oracle=formula)


def test_an_unused_place_neither_biases_nor_suppresses_id_zero_or_the_last() -> None:
    logits, unused = torch.ones(1, 3), torch.full((1, 4), -1)
    assert run(bias_logits, logits, unused, torch.full((1, 4), -INF)).tolist() == [[1.0, 1.0, 1.0]]
    assert run(suppress, logits, unused, torch.tensor([True])).tolist() == [[1.0, 1.0, 1.0]]


def test_suppression_does_not_hang_on_torch_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = run(
            suppress, torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[1]]), torch.tensor([True])
        )
        hot = filtered(torch.ones(1, 2, dtype=torch.float32), top_p=0.5)
    finally:
        torch.set_default_dtype(before)
    assert (found.dtype, found.tolist()) == (torch.float32, [[1.0, -INF]])
    assert (hot.dtype, hot.tolist()) == (torch.float32, [[1.0, -INF]])


# --- filters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.5, [0]), (0.8, [0, 1]), (0.79, [0, 1]), (1.0, [0, 1, 2]), (0.0, [0])]
)
def test_top_p_edges(top_p: float, expected: list[int]) -> None:
    assert kept(of(0.5, 0.3, 0.2), top_p=top_p) == [expected]
    if top_p not in (0.5, 0.8):  # BF16 rounds the logarithms, and moves the edges by up to 0.2 %.
        assert kept(of(0.5, 0.3, 0.2, dtype=torch.bfloat16), top_p=top_p) == [expected]


def test_top_p_counts_in_order_of_probability_not_of_id() -> None:
    assert kept(of(0.2, 0.3, 0.5), top_p=0.5) == [[2]]
    assert kept(of(0.2, 0.3, 0.5), top_p=0.8) == [[1, 2]]


def test_ties_go_to_the_lowest_ids() -> None:
    equal = torch.zeros(1, 8)
    assert kept(equal, top_k=3) == [[0, 1, 2]]
    assert kept(equal, top_p=0.25) == [[0, 1]]
    assert kept(equal, temperature=0.0) == [[0]]
    assert kept(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), top_k=3) == [[0, 1, 3]]


@pytest.mark.parametrize(("min_p", "expected"), [(0.0, 4), (0.15, 3), (0.45, 2), (0.75, 1), (1.0, 1)])
def test_min_p_drops_what_is_below_its_share_of_the_best(min_p: float, expected: int) -> None:
    assert kept(of(0.5, 0.3, 0.15, 0.05), min_p=min_p) == [list(range(expected))]


def test_min_p_of_one_keeps_every_best_token() -> None:
    assert kept(torch.tensor([[2.0, 1.0, 2.0]]), min_p=1.0) == [[0, 2]]


def test_filters_are_applied_after_temperature_and_one_after_the_other() -> None:
    # At temperature 2 the probabilities .64, .32, .04 become those of .8 : .566 : .2, that is .511, .361, .128.
    logits = of(0.64, 0.32, 0.04)
    assert kept(logits, top_p=0.6) == [[0]]
    assert kept(logits, top_p=0.6, temperature=2.0) == [[0, 1]]
    # Top-p counts in what top-k left: of .5, .3 the first is .625, which reaches .6.
    assert kept(of(0.5, 0.3, 0.2), top_k=2, top_p=0.6) == [[0]]
    assert kept(of(0.5, 0.3, 0.2), top_p=0.6) == [[0, 1]]


@DTYPES
def test_top_k_of_one_is_argmax_whatever_else_is_given(dtype: torch.dtype) -> None:
    logits = random_logits(20, 50, dtype)
    best = [[int(i)] for i in logits.argmax(1)]
    assert kept(logits, top_k=1, temperature=9.0) == best
    assert kept(logits, top_k=1, top_p=0.01, min_p=0.99) == best


def test_top_k_wider_than_the_vocabulary_keeps_all() -> None:
    assert kept(torch.zeros(1, 3), top_k=2**40) == [[0, 1, 2]]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-38, 1e-45])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e30, 3e38])
def test_a_tiny_temperature_is_greedy_and_never_nan(temperature: float, size: float) -> None:
    x = filtered(torch.tensor([[0.2, 0.9, -0.7, 0.5]]) * size, temperature=temperature)
    assert x.softmax(1).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert [run(draw, x, column(u, 1)).tolist() for u in (0.0, LAST_UNIFORM)] == [[1], [1]]


def test_a_huge_temperature_levels_what_is_not_banned() -> None:
    x = filtered(torch.tensor([[5.0, -INF, -9.0]]), temperature=3e38)
    torch.testing.assert_close(x.softmax(1), torch.tensor([[0.5, 0.0, 0.5]]))


def test_banned_tokens_stay_banned_under_every_filter() -> None:
    logits = torch.tensor([[1.0, -INF, 2.0, -INF]])
    for values in (
        {},
        {"top_k": 3},
        {"top_p": 0.999},
        {"min_p": 1e-9},
        {"temperature": 1e-30},
        {"temperature": 50.0},
    ):
        assert set(kept(logits, **values)[0]) <= {0, 2}


def test_rows_keep_their_own_options_in_a_mixed_batch() -> None:
    logits = random_logits(6)
    mixed = {
        "temperature": [0.0, 0.5, 1.0, 2.0, 1e-30, 1.0],
        "top_k": [5, 0, 3, 0, 2, 1],
        "top_p": [0.3, 1.0, 0.9, 0.5, 0.0, 1.0],
        "min_p": [0.2, 0.0, 0.0, 0.3, 1.0, 0.0],
    }
    together = filtered(logits, **mixed)
    for row in range(6):
        alone = filtered(logits[row : row + 1], **{name: values[row] for name, values in mixed.items()})
        assert torch.equal(together[row], alone[0])
    assert together[0].isfinite().nonzero().tolist() == [[int(logits[0].argmax())]]


@DTYPES
def test_all_filters_off_is_the_division_by_temperature(dtype: torch.dtype) -> None:
    operands = (random_logits(dtype=dtype), *options(3, temperature=[0.5, 1.0, 3.0]))
    check_op(filter_logits, *operands, oracle=lambda x, t, *_: x / t.unsqueeze(1))


@pytest.mark.oracle
@DTYPES
@pytest.mark.parametrize("seed", range(6))
def test_the_chain_is_that_of_transformers(seed: int, dtype: torch.dtype) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    draws = torch.Generator().manual_seed(seed)
    # Distinct in BF16 too: on ties transformers keeps every one for top-k, and whichever was sorted last for top-p.
    logits = torch.stack([torch.randperm(60, generator=draws) for _ in range(2)]) / 8 - 3.0
    prompt = torch.randint(0, 60, (2, 9), generator=draws)
    penalty, temperature, top_k, top_p, min_p = (
        [1.3, 0.7, 12, 0.8, 0.1], [0.8, 1.5, 40, 0.95, 0.02], [1.0, 0.3, 5, 0.5, 0.3],
        [1.9, 4.0, 59, 0.9, 0.05], [1.1, 1.0, 3, 0.999, 0.0], [1.5, 0.9, 60, 0.3, 0.5],
    )[seed]  # fmt: skip
    chain = [
        process.RepetitionPenaltyLogitsProcessor(penalty),
        process.TemperatureLogitsWarper(float(temperature)),
        process.TopKLogitsWarper(int(top_k)),
        process.TopPLogitsWarper(top_p),
        process.MinPLogitsWarper(min_p),
    ]
    expected = logits
    for step in chain:
        expected = step(prompt, expected)
    seen = torch.zeros(2, 60, dtype=torch.bool).scatter(1, prompt, True)
    none = column(0.0, 2)
    x = run(
        penalize,
        logits.to(dtype),
        seen,
        torch.zeros(2, 60, dtype=torch.int32),
        column(penalty, 2),
        none,
        none,
    )
    torch.testing.assert_close(
        filtered(x, temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p), expected
    )


@pytest.mark.oracle
def test_transformers_applies_its_warpers_in_this_order() -> None:
    transformers = pytest.importorskip("transformers")

    class Order(transformers.GenerationMixin):
        """The mixin's choice of processors, without a model."""

        config = transformers.LlamaConfig()

    wanted = transformers.GenerationConfig(
        do_sample=True, repetition_penalty=1.3, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, num_beams=1
    )
    ids = torch.tensor([[1, 2]])
    found = Order()._get_logits_processor(
        generation_config=wanted, input_ids_seq_length=2, encoder_input_ids=ids, logits_processor=[]
    )
    names = [
        type(step).__name__.removesuffix("LogitsProcessor").removesuffix("LogitsWarper") for step in found
    ]
    assert names == ["RepetitionPenalty", "Temperature", "TopK", "TopP", "MinP"]


# --- draws ---------------------------------------------------------------------------------------------------------


def test_a_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    logits = of(0.25, 0.5, 0.25).expand(6, 3)
    u = column([0.0, 0.249, 0.251, 0.749, 0.751, LAST_UNIFORM], 6)
    assert run(draw, logits, u).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("u", [0.0, 2**-24, 0.5, LAST_UNIFORM])
def test_a_draw_never_takes_what_has_no_probability(u: float) -> None:
    rows = torch.tensor([
        [-INF, -INF, 1.0, -INF], [1.0, -INF, -INF, -INF], [-INF, 0.0, 0.0, -INF], [-INF, 3.0, -INF, 3.0],
    ])  # fmt: skip
    found = run(draw, rows, column(u, 4))
    assert bool(rows.gather(1, found.unsqueeze(1)).isfinite().all())
    assert math.nextafter(1.0, 0.0) > LAST_UNIFORM  # FP32's number below one is the largest uniform.
    assert float(torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))) == LAST_UNIFORM


def test_the_last_uniform_stays_inside_a_wide_vocabulary() -> None:
    logits = torch.full((1, 100_003), -INF)
    logits[0, :100_000] = 0.0
    assert run(draw, logits, column(LAST_UNIFORM, 1)).tolist() == [99_999]
    assert run(draw, logits, column(0.0, 1)).tolist() == [0]


@DTYPES
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_many_draws_follow_the_softmax(dtype: torch.dtype, temperature: float) -> None:
    count = 20_000
    logits = torch.tensor([[1.0, -0.5, 0.25, 2.0, -INF, 0.0, 1.0, -2.0, 0.5, 1.5]], dtype=dtype)
    ones = torch.ones(count, dtype=torch.int64)
    u = run(uniform, 31 * ones, 0 * ones, torch.arange(count))
    x = filtered(logits, temperature=temperature)
    found = torch.bincount(run(draw, x.expand(count, 10), u), minlength=10).double()
    expected = torch.softmax(logits.double()[0] / temperature, 0) * count
    assert found[4] == 0
    here = expected > 0
    # The 99.99th percentile of chi-square with 8 degrees of freedom is 31.8.
    assert float(((found - expected)[here] ** 2 / expected[here]).sum()) < 31.8


def test_equal_logits_are_not_always_token_zero() -> None:
    count = 1000
    ones = torch.ones(count, dtype=torch.int64)
    found = run(draw, filtered(torch.zeros(count, 4)), run(uniform, ones, torch.arange(count), ones))
    assert torch.bincount(found, minlength=4).min() > 180


@pytest.mark.parametrize("neighbours", [0, 1, 3, 7, 10])
def test_a_row_is_drawn_alike_with_any_neighbours(neighbours: int) -> None:
    row, u = random_logits(1, 300), column(0.37, 1)
    values = {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    alone = filtered(row, **values)
    others = torch.cat([random_logits(neighbours, 300), row])
    together = filtered(others, **values)
    assert torch.equal(together[-1:], alone)
    assert run(draw, together, u.expand(neighbours + 1))[-1] == run(draw, alone, u)[0]


# --- rows that nothing can be taken from ---------------------------------------------------------------------------


@DTYPES
def test_rows_with_nan_infinity_or_nothing_left_are_flagged(dtype: torch.dtype) -> None:
    nan = math.nan
    rows = torch.tensor(
        [[0.0, 1.0], [nan, 1.0], [1.0, nan], [nan, -INF], [-INF, -INF], [INF, 0.0], [-INF, 0.0], [nan, INF]],
        dtype=dtype,
    )
    assert run(is_unusable, rows).tolist() == [False, True, True, True, True, True, False, True]
    check_op(
        is_unusable,
        rows,
        oracle=lambda x: x.isnan().any(1) | (x == INF).any(1) | (x == -INF).all(1),
    )


def test_an_unusable_row_neither_fails_nor_changes_its_neighbours() -> None:
    good = random_logits(1, 20)
    rows = torch.cat(
        [good, torch.full((1, 20), math.nan), torch.full((1, 20), -INF), torch.full((1, 20), INF), good]
    )
    values = {"temperature": 0.7, "top_k": 7, "top_p": 0.8, "min_p": 0.05}
    found, alone = filtered(rows, **values), filtered(good, **values)
    assert torch.equal(found[[0, 4]], alone.expand(2, 20))
    tokens = run(draw, found, column(0.9, 5))
    assert bool(((tokens >= 0) & (tokens < 20)).all())
    assert tokens[0] == tokens[4] == run(draw, alone, column(0.9, 1))[0]
    logprobs, ids = run(top_logprobs, rows, 3)
    assert bool(((ids >= 0) & (ids < 20)).all())
    assert torch.equal(logprobs[0], logprobs[4])


# --- log-probabilities and counts ----------------------------------------------------------------------------------


@DTYPES
def test_log_probabilities_are_those_of_the_softmax(dtype: torch.dtype) -> None:
    logits, tokens = random_logits(4, 30, dtype), torch.tensor([0, 29, 7, 7])
    check_op(
        token_logprobs, logits, tokens, oracle=lambda x, t: x.log_softmax(1).gather(1, t.unsqueeze(1))[:, 0]
    )
    assert run(token_logprobs, of(0.5, 0.25, 0.25), torch.tensor([1])).tolist() == pytest.approx(
        [math.log(0.25)]
    )


@DTYPES
@pytest.mark.parametrize("n", [1, 5, 30])
def test_the_best_alternatives_come_first_and_the_lowest_id_on_ties(dtype: torch.dtype, n: int) -> None:
    logits = torch.randint(-3, 4, (4, 30)).to(dtype)

    def formula(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = [sorted(range(30), key=lambda i: (-float(row[i]), i))[:n] for row in x]
        ids = torch.tensor(order)
        return x.log_softmax(1).gather(1, ids), ids

    check_op(lambda x: top_logprobs(x, n), logits, oracle=formula)


def test_the_first_alternative_is_the_greedy_token_on_ties() -> None:
    for width in (1, 3, 100):
        assert run(top_logprobs, torch.zeros(2, 1000), width)[1].tolist() == [list(range(width))] * 2
    banned = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]])
    assert run(top_logprobs, banned, 4)[1].tolist() == [[1, 3, 0, 2]]


def test_more_alternatives_than_tokens_are_refused() -> None:
    for n in (0, 4):
        with pytest.raises(ShapeError, match=rf"top_logprobs: n does not fit; expected 1 to 3, found {n}"):
            shapes(lambda x, n=n: top_logprobs(x, n), abstract_of(torch.zeros(1, 3)))


def test_counts_grow_for_active_rows_only() -> None:
    counts = torch.tensor([[0, 1, 0], [2, 0, 0]], dtype=torch.int32)
    tokens, active = torch.tensor([1, 2]), torch.tensor([True, False])

    def formula(counts: Any, tokens: Any, active: Any) -> torch.Tensor:
        return torch.tensor([[0, 2, 0], [2, 0, 0]], dtype=torch.int32)

    check_op(count_tokens, counts, tokens, active, oracle=formula)
    # Compiled, a counts table that was donated is written in place, and another is not touched.
    assert torch.equal(atbx.jit(count_tokens)(counts, tokens, active), formula(0, 0, 0))
    assert counts.tolist() == [[0, 1, 0], [2, 0, 0]]
