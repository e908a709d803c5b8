"""Reductions: values, counts of real entries, ties, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import FLOATS, check_op, run, shapes, stage

from atbx import ops
from atbx.core.abstract import Abstract, Dim
from atbx.core.errors import BucketError, DTypeError, ShapeError

F32 = torch.float32
KEEPING = {
    ops.sum: torch.sum,
    ops.mean: torch.mean,
    ops.max: torch.amax,
    ops.min: torch.amin,
    ops.logsumexp: torch.logsumexp,
}
WITHOUT = {ops.softmax: torch.softmax, ops.cumsum: torch.cumsum}
# Values of several entries added up err by FP32 steps beyond the one rounding.
LOOSE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-8 * 1.02,
    torch.float16: 2**-11 * 1.05,
}


def by_name(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(("op", "oracle"), KEEPING.items(), ids=by_name)
def test_reductions_match_an_fp64_oracle(op, oracle, axis, dtype):
    x = torch.randn(3, 7, 5).to(dtype)
    for keep in (False, True):
        check_op(
            lambda x, keep=keep: op(x, axis, keepdims=keep),
            x,
            oracle=lambda x, keep=keep: oracle(x, axis, keepdim=keep),
            relative=LOOSE,
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize(("op", "oracle"), WITHOUT.items(), ids=by_name)
def test_softmax_and_cumsum_match_an_fp64_oracle(op, oracle, axis, dtype):
    x = (torch.randn(4, 9) * 3).to(dtype)
    check_op(lambda x: op(x, axis), x, oracle=lambda x: oracle(x, axis), relative=LOOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_and_means_accumulate_in_fp32(dtype):
    # 4096 ones stick at 256 in BF16 and at 2048 in FP16 when they are added one by one in that dtype.
    x = torch.ones(1, 4096, dtype=dtype)
    assert run(ops.sum, x, 1).item() == 4096
    assert run(ops.mean, x, 1).item() == 1
    assert run(ops.cumsum, x, 1)[0, -1].item() == 4096


def test_softmax_stands_large_and_infinite_scores():
    x = torch.tensor([[1e4, 1e4, -torch.inf], [-6e4, -6e4, -6e4]]).to(torch.float16)
    assert run(ops.softmax, x).tolist()[0] == [0.5, 0.5, 0.0]
    torch.testing.assert_close(run(ops.softmax, x)[1].float(), torch.full((3,), 1 / 3), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_are_summed_exactly(dtype):
    x = torch.randint(0, 20, (3, 5)).to(dtype)
    assert check_op(lambda x: ops.sum(x, 1), x, oracle=lambda x: x.sum(1)).dtype == dtype
    assert check_op(lambda x: ops.cumsum(x, 0), x, oracle=lambda x: x.cumsum(0)).dtype == dtype
    check_op(lambda x: ops.max(x, 0), x, oracle=lambda x: x.amax(0))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
def test_argmax_takes_the_lowest_index_of_equals(dtype):
    x = torch.tensor([[3, 7, 7, 1], [5, 5, 5, 5], [-9, -2, -3, -2]]).to(dtype)
    result = check_op(lambda x: ops.argmax(x, 1), x, oracle=lambda x: torch.tensor([1, 0, 1]))
    assert result.dtype == torch.int64
    check_op(lambda x: ops.argmax(x, 0, keepdims=True), x, oracle=lambda x: torch.tensor([[1, 0, 0, 1]]))


def test_argmax_points_at_the_first_nan():
    assert run(ops.argmax, torch.tensor([1.0, torch.nan, 9.0, torch.nan])).item() == 1


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
def test_top_k_is_stable(dtype):
    x = torch.tensor([[1, 4, 4, 2, 4], [0, 0, 0, 0, 0]]).to(dtype)
    values, indices = check_op(
        lambda x: ops.top_k(x, 3),
        x,
        oracle=lambda x: (torch.tensor([[4, 4, 4], [0, 0, 0]]), torch.tensor([[1, 2, 4], [0, 1, 2]])),
    )
    assert values.dtype == dtype
    assert indices.dtype == torch.int64
    assert values.is_contiguous()


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.data())
def test_top_k_is_a_sort_by_value_then_place(numbers, data):
    k = data.draw(st.integers(1, len(numbers)))
    values, indices = run(lambda x: ops.top_k(x, k, axis=0), torch.tensor(numbers))
    expected = sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:k]
    assert indices.tolist() == expected
    assert values.tolist() == [numbers[i] for i in expected]
    assert run(lambda x: ops.argmax(x, 0), torch.tensor(numbers)).item() == expected[0]


ONE_RESULT = [ops.sum, ops.mean, ops.max, ops.min, ops.logsumexp, ops.argmax]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("op", [*ONE_RESULT, ops.softmax, ops.cumsum], ids=by_name)
def test_entries_past_the_count_change_no_bit(op, poison):
    x, counts = torch.randn(3, 6, 2), torch.tensor([6, 4, 1])
    poisoned = x.clone()
    for row, count in enumerate(counts.tolist()):
        poisoned[row, count:] = poison
    result = run(lambda x: op(x, 1, counts=counts), poisoned)
    assert torch.equal(result, run(lambda x: op(x, 1, counts=counts), x))
    for row, count in enumerate(counts.tolist()):
        alone = run(lambda x: op(x, 1), x[row : row + 1, :count])[0]
        ours = result[row] if op in ONE_RESULT else result[row, :count]
        torch.testing.assert_close(ours, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", [ops.sum, ops.mean, ops.max, ops.min, ops.logsumexp], ids=by_name)
def test_a_nan_in_a_real_entry_reaches_its_row_only(op):
    x = torch.randn(2, 5)
    x[1, 2] = torch.nan
    result = run(lambda x: op(x, 1, counts=torch.tensor([3, 3])), x)
    assert result.isnan().tolist() == [False, True]
    assert run(lambda x: ops.softmax(x, counts=torch.tensor(4)), x).isnan().any(1).tolist() == [False, True]


def test_top_k_with_counts_takes_real_entries_first():
    x = torch.tensor([[-torch.inf, 2.0, torch.nan, 9.0]])
    values, indices = run(lambda x: ops.top_k(x, 3, counts=torch.tensor([2])), x)
    assert values.tolist() == [[2.0, -torch.inf, -torch.inf]]
    assert indices[0, :2].tolist() == [1, 0]


def test_a_row_without_real_entries_has_the_neutral_value():
    x, none = torch.full((1, 4), torch.nan), torch.tensor([0])
    values = {op: run(lambda x, op=op: op(x, 1, counts=none), x) for op in ONE_RESULT}
    assert values[ops.sum].item() == 0
    assert values[ops.mean].isnan().item()
    assert values[ops.max].item() == -torch.inf
    assert values[ops.min].item() == torch.inf
    assert values[ops.logsumexp].item() == -torch.inf
    assert values[ops.argmax].item() == 0
    assert run(lambda x: ops.softmax(x, 1, counts=none), x).tolist() == [[0.0] * 4]
    assert run(lambda x: ops.cumsum(x, 1, counts=none), x).tolist() == [[0.0] * 4]


def test_counts_fit_the_leading_axes():
    x = torch.randn(2, 3, 4)
    per_row = torch.tensor([[1, 2, 3], [4, 0, 2]])
    expected = torch.stack(
        [torch.stack([x[b, t, : per_row[b, t]].sum() for t in range(3)]) for b in range(2)]
    )
    check_op(lambda x, c: ops.sum(x, -1, counts=c), x, per_row, oracle=lambda x, c: expected)
    check_op(lambda x, c: ops.sum(x, 1, counts=c), x, torch.tensor(2), oracle=lambda x, c: x[:, :2].sum(1))
    check_op(lambda x, c: ops.sum(x, 2, counts=c), x, torch.tensor([[2], [1]]).int(), oracle=_two_then_one)


def _two_then_one(x, counts):
    return torch.stack([x[0, :, :2].sum(-1), x[1, :, :1].sum(-1)])


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_counts_equal_cutting_the_row(rows, size, data):
    counts = torch.tensor(data.draw(st.lists(st.integers(0, size), min_size=rows, max_size=rows)))
    x = torch.arange(rows * size).view(rows, size)
    assert run(lambda x: ops.sum(x, 1, counts=counts), x).tolist() == [
        int(x[i, :n].sum()) for i, n in enumerate(counts.tolist())
    ]


def test_reductions_refuse_by_name():
    x = torch.ones(2, 3)
    with pytest.raises(ShapeError, match="sum: no such axis; expected -2 to 1, found 2"):
        run(ops.sum, x, 2)
    with pytest.raises(ShapeError, match="sum: axis must be an int; found None"):
        run(ops.sum, x, None)
    with pytest.raises(DTypeError, match="mean: x must be floating point"):
        run(ops.mean, x.long(), 1)
    with pytest.raises(DTypeError, match="sum: x must be a number"):
        run(ops.sum, x > 0, 1)
    with pytest.raises(DTypeError, match="sum: counts must be integers"):
        run(lambda x: ops.sum(x, 1, counts=torch.ones(2)), x)
    with pytest.raises(ShapeError, match="sum: counts must fit the axes before axis 0"):
        run(lambda x: ops.sum(x, 0, counts=torch.ones(3).long()), x)
    with pytest.raises(ShapeError, match="softmax: counts: sizes differ along axis 0; expected 2, found 3"):
        run(lambda x: ops.softmax(x, 1, counts=torch.ones(3).long()), x)
    for k in (0, 4, True):
        with pytest.raises(ShapeError, match="top_k: k does not fit the axis; expected 1 to 3"):
            run(ops.top_k, x, k)
    for op in (ops.max, ops.min, ops.argmax):
        with pytest.raises(ShapeError, match=f"{op.__name__}: axis 1 is empty"):
            run(op, x[:, :0], 1)
    assert run(ops.sum, x[:, :0], 1).tolist() == [0, 0]


@pytest.mark.parametrize("op", [*ONE_RESULT, ops.softmax, ops.cumsum], ids=by_name)
def test_a_bucketed_axis_needs_a_count(op):
    x = Abstract((2, Dim(8, "T"), 4), F32)
    with pytest.raises(BucketError, match=f"{op.__name__} mixes along axis 1 .* bucket 'T'"):
        stage(lambda x: op(x, 1), x)
    with pytest.raises(BucketError, match=f"{op.__name__} mixes along axis -2"):
        stage(lambda x: op(x, -2), x)
    assert len(stage(lambda x, c: op(x, 1, counts=c), x, Abstract((2,), torch.int64))) == 1
    across = shapes(lambda x: op(x, 2), x)
    assert across.shape[1].tag == "T"
