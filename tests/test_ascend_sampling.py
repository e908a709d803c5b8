"""The Ascend sampler kernels, which never branch on a value, against the reference rules that do."""

from __future__ import annotations

import pytest
import torch
from ascend_equations import equation, run

from atbx.kernels.ascend.sampling import ROWS
from atbx.ops.logits import COUNT_TOKENS, DRAW, FILTER_LOGITS, TOP_LOGPROBS

BY_OP = {row.op: row for row in ROWS}


def options(**values: float) -> tuple[torch.Tensor, ...]:
    """temperature, top_k, top_p, min_p of one row each, off where not given."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    dtypes = {"top_k": torch.int64}
    return tuple(torch.tensor([v], dtype=dtypes.get(n, torch.float32)) for n, v in defaults.items())


def filtered(logits: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    operands = (logits, *given)
    return run(BY_OP["filter_logits"], equation(FILTER_LOGITS, operands), operands)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 1e-38},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 5000},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_filters_keep_what_the_reference_rule_keeps(values: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 300, generator=generator) * 3
    expected = FILTER_LOGITS.reference(logits, *options(**values))
    torch.testing.assert_close(filtered(logits, *options(**values)), expected)


def test_top_p_at_its_edges() -> None:
    # Probabilities .5, .3, .2: U61 of the fault list.
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for top_p, kept in ((0.5, 1), (0.8, 2), (0.79, 2), (1.0, 3), (0.0, 1)):
        found = filtered(logits, *options(top_p=top_p))
        assert int(torch.isfinite(found).sum()) == kept, top_p


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert torch.isfinite(filtered(logits, *options(top_k=2))).tolist() == [[False, True, True, False, False]]
    assert torch.isfinite(filtered(logits, *options(temperature=0.0))).tolist() == [
        [False, True, False, False, False]
    ]


def test_rows_have_options_of_their_own() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    columns = [torch.cat(c) for c in zip(options(top_k=3), options(temperature=0.0), options(), strict=True)]
    assert torch.isfinite(filtered(logits, *columns)).sum(1).tolist() == [3, 1, 50]


def test_a_draw_is_the_inverse_of_the_cumulative_probability() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.0, 0.3]]).log()
    row = BY_OP["draw"]
    for u, token in ((0.0, 0), (0.19, 0), (0.21, 1), (0.69, 1), (0.71, 3), (0.999999, 3)):
        operands = (logits, torch.tensor([u]))
        found = run(row, equation(DRAW, operands), operands)
        assert found.tolist() == [token] == DRAW.reference(*operands).tolist()


def test_draws_agree_with_the_reference_rule_away_from_boundaries() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(500, 64, generator=generator)
    u = torch.rand(500, generator=generator)
    cumulative = torch.softmax(logits.double(), 1).cumsum(1)
    is_clear = (cumulative - u.double().unsqueeze(1)).abs().amin(1) > 1e-6
    operands = (logits, u)
    found = run(BY_OP["draw"], equation(DRAW, operands), operands)
    assert int(is_clear.sum()) > 450
    assert torch.equal(found[is_clear], DRAW.reference(*operands)[is_clear])


def test_top_logprobs_with_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    made = equation(TOP_LOGPROBS, (logits,), n=3)
    values, ids = run(BY_OP["top_logprobs"], made, (logits,))
    expected = TOP_LOGPROBS.reference(logits, n=3)
    torch.testing.assert_close(values, expected[0])
    assert ids.tolist() == expected[1].tolist() == [[1, 2, 4], [4, 0, 1]]


def test_counts_are_updated_in_place_for_active_rows() -> None:
    counts = torch.zeros(2, 4, dtype=torch.int32)
    operands = (counts, torch.tensor([1, 3]), torch.tensor([True, False]))
    expected = COUNT_TOKENS.reference(*operands)
    found = run(BY_OP["count_tokens"], equation(COUNT_TOKENS, operands), operands)
    assert found.data_ptr() == counts.data_ptr()
    assert found.tolist() == expected.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
