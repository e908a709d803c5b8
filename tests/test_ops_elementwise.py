"""Elementwise ops: values, broadcasting, weak scalars and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_checks import FLOATS, check_op, run, shapes, stage

from atbx import ops
from atbx.core.abstract import Abstract, Dim, tag_of
from atbx.core.errors import BucketError, DTypeError, ShapeError

F32, I64, BOOL = torch.float32, torch.int64, torch.bool

ARITHMETIC = {
    ops.add: torch.add,
    ops.subtract: torch.subtract,
    ops.multiply: torch.multiply,
    ops.divide: torch.divide,
    ops.maximum: torch.maximum,
    ops.minimum: torch.minimum,
}
COMPARISONS = {ops.less: torch.lt, ops.less_equal: torch.le, ops.equal: torch.eq, ops.not_equal: torch.ne}
SIGNED = {ops.negative: torch.neg, ops.exp: torch.exp, ops.tanh: torch.tanh, ops.sigmoid: torch.sigmoid}
SIGNED |= {ops.erf: torch.special.erf, ops.sin: torch.sin, ops.cos: torch.cos}
POSITIVE = {ops.log: torch.log, ops.sqrt: torch.sqrt, ops.rsqrt: torch.rsqrt}


def by_name(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("op", "oracle"), ARITHMETIC.items(), ids=by_name)
def test_arithmetic_rounds_once(op, oracle, dtype):
    x, y = torch.randn(3, 1, 5).to(dtype), torch.randn(2, 5).to(dtype)
    check_op(op, x, y, oracle=oracle)
    check_op(op, x[:0], y, oracle=oracle)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("op", [ops.add, ops.subtract, ops.multiply, ops.maximum, ops.minimum], ids=by_name)
def test_integers_stay_integers(op, dtype):
    x, y = torch.randint(-9, 9, (4, 3)).to(dtype), torch.randint(-9, 9, (3,)).to(dtype)
    assert check_op(op, x, y, oracle=ARITHMETIC[op]).dtype == dtype


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize(("op", "oracle"), COMPARISONS.items(), ids=by_name)
def test_comparisons_give_bool(op, oracle, dtype):
    x, y = torch.randint(-2, 2, (4, 1, 3)).to(dtype), torch.randint(-2, 2, (2, 3)).to(dtype)
    assert check_op(op, x, y, oracle=oracle).dtype == torch.bool


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("op", "oracle"), (SIGNED | POSITIVE).items(), ids=by_name)
def test_unary_functions_round_once(op, oracle, dtype):
    x = torch.randn(3, 7) * 2
    x = (x.abs() + 0.1 if op in POSITIVE else x).to(dtype)
    check_op(op, x, oracle=oracle)


@pytest.mark.parametrize("dtype", FLOATS)
def test_power_of_tensors_and_scalars(dtype):
    x, y = (torch.rand(3, 5) + 0.5).to(dtype), torch.randn(5).to(dtype)
    check_op(ops.power, x, y, oracle=torch.pow)
    check_op(lambda x: ops.power(x, 3), x, oracle=lambda x: x * x * x)
    check_op(lambda x: ops.power(2.0, x), x, oracle=torch.exp2)


def test_logic_of_bools():
    x, y = torch.tensor([[True], [False]]), torch.tensor([True, False])
    check_op(ops.logical_and, x, y, oracle=torch.logical_and)
    check_op(ops.logical_or, x, y, oracle=torch.logical_or)
    check_op(ops.logical_not, x, oracle=torch.logical_not)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_where_chooses_by_entry(dtype):
    x, y = torch.randint(-9, 9, (3, 4)).to(dtype), torch.randint(-9, 9, (4,)).to(dtype)
    test = torch.tensor([[True], [False], [True]])
    check_op(ops.where, test, x, y, oracle=torch.where)
    check_op(lambda t, x: ops.where(t, x, -7), test, x, oracle=lambda t, x: torch.where(t, x, -7))
    check_op(lambda t, x: ops.where(t, 3, x), test, x, oracle=lambda t, x: torch.where(t, 3, x))


def test_where_does_not_let_the_other_nan_through():
    x, nan = torch.ones(3), torch.full((3,), torch.nan)
    assert torch.equal(run(ops.where, torch.tensor([True] * 3), x, nan), x)
    assert run(ops.where, torch.tensor([False, True, True]), nan, x)[0].item() == 1.0


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
def test_clip_binds_where_a_bound_is_given(dtype):
    x, high = torch.tensor([[-5, -1, 0], [3, 4, 9]]).to(dtype), torch.tensor([1, 2, 3]).to(dtype)
    check_op(lambda x: ops.clip(x, -2, 4), x, oracle=lambda x: torch.clamp(x, -2, 4))
    check_op(lambda x, h: ops.clip(x, -2, h), x, high, oracle=lambda x, h: torch.minimum(x.clamp(min=-2), h))
    check_op(lambda x: ops.clip(x, low=0), x, oracle=lambda x: torch.clamp(x, min=0))
    assert run(ops.clip, x) is not x
    assert torch.equal(run(ops.clip, x), x)


def test_maximum_minimum_and_clip_keep_nan():
    x = torch.tensor([torch.nan, 1.0])
    for result in (run(ops.maximum, x, 0.0), run(ops.minimum, 0.0, x), run(ops.clip, x, -1.0, 1.0)):
        assert result.isnan().tolist() == [True, False]


def test_a_scalar_takes_the_tensors_dtype():
    # 0.1 in BF16 is 0.10009765625: every kernel must see that number, not one with more digits.
    x = torch.tensor([1.0, 257.0]).to(torch.bfloat16)
    program = stage(lambda x: ops.multiply(x, 0.1), Abstract((2,), torch.bfloat16))
    assert program.equations[0].inputs[1].value == 0.10009765625
    expected = (x.double() * 0.10009765625).to(torch.bfloat16)
    assert torch.equal(run(ops.multiply, x, 0.1), expected)
    assert torch.equal(run(ops.multiply, 0.1, x), expected)
    assert run(ops.add, torch.arange(2), True).dtype == I64


@pytest.mark.parametrize(
    ("tensor", "scalar", "named"),
    [
        (torch.ones(2, dtype=I64), 0.5, "i64"),
        (torch.ones(2, dtype=BOOL), 1, "bool"),
        (torch.ones(2, dtype=torch.int8), 300, "-128 to 127"),
        (torch.ones(2, dtype=torch.float16), -1e9, "f16"),
    ],
    ids=["float-on-int", "int-on-bool", "too-large-int", "too-large-float"],
)
def test_a_scalar_that_would_promote_or_overflow_is_refused(tensor, scalar, named):
    for call in (lambda: run(ops.equal, tensor, scalar), lambda: run(ops.where, tensor > 0, tensor, scalar)):
        with pytest.raises(DTypeError, match=named) as caught:
            call()
        assert str(scalar) in str(caught.value)


def test_infinite_scalars_are_meant():
    x = torch.zeros(2, dtype=torch.float16)
    assert run(ops.where, x > 0, x, -torch.inf).tolist() == [-torch.inf] * 2


def test_mixed_dtypes_are_refused_by_name():
    x, y = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    for op in (ops.add, ops.less, ops.power):
        with pytest.raises(DTypeError, match=f"{op.__name__}: y and x.*expected f32, found bf16"):
            run(op, x, y)
    with pytest.raises(DTypeError, match="where: y and x"):
        run(ops.where, x > 0, x, y)
    with pytest.raises(DTypeError, match="clip: high and x"):
        run(ops.clip, x, None, y)


def test_ops_refuse_dtypes_they_have_no_meaning_for():
    ints, bools = torch.ones(2, dtype=I64), torch.ones(2, dtype=BOOL)
    for op in (ops.divide, ops.power):
        with pytest.raises(DTypeError, match=f"{op.__name__}: x must be floating point"):
            run(op, ints, ints)
    for op in (ops.exp, ops.sqrt, ops.tanh):
        with pytest.raises(DTypeError, match=f"{op.__name__}: x must be floating point.*i64"):
            run(op, ints)
    for op in (ops.add, ops.less, ops.maximum):
        with pytest.raises(DTypeError, match=f"{op.__name__}: x must be a number.*bool"):
            run(op, bools, bools)
    with pytest.raises(DTypeError, match="where: condition must be bool"):
        run(ops.where, ints, ints, ints)
    with pytest.raises(DTypeError, match="logical_and: y must be bool"):
        run(ops.logical_and, bools, ints)


def test_an_op_needs_a_tensor():
    with pytest.raises(DTypeError, match="add: no operand is a tensor; found 1, 2"):
        run(ops.add, 1, 2)
    with pytest.raises(DTypeError, match="clip: x must be a tensor"):
        run(ops.clip, 1.0, torch.ones(1))
    with pytest.raises(ShapeError, match="exp: x must be a tensor"):
        run(ops.exp, 2.0)


def test_sizes_that_do_not_broadcast_name_the_axis():
    with pytest.raises(ShapeError, match="add: sizes differ along axis 1; expected 3, found 4"):
        run(ops.add, torch.ones(2, 3), torch.ones(4))


SIZES = st.lists(st.integers(0, 4), max_size=4)


@given(SIZES, SIZES)
def test_broadcasting_is_torchs(a, b):
    try:
        expected = tuple(torch.broadcast_shapes(a, b))
    except RuntimeError:
        with pytest.raises(ShapeError, match="add: sizes differ along axis"):
            shapes(ops.add, Abstract(tuple(a), F32), Abstract(tuple(b), F32))
    else:
        assert shapes(ops.add, Abstract(tuple(a), F32), Abstract(tuple(b), F32)).shape == expected


@given(st.lists(st.tuples(st.integers(2, 5), st.booleans(), st.booleans(), st.booleans()), max_size=4))
def test_broadcasting_keeps_every_tag(axes):
    full = tuple(Dim(n, f"t{i}") if tagged else n for i, (n, tagged, _, _) in enumerate(axes))
    other = tuple(
        1 if one else int(n) if plain else n for n, (_, _, plain, one) in zip(full, axes, strict=True)
    )
    for pair in ((full, other), (other, full)):
        result = shapes(ops.multiply, *(Abstract(s, F32) for s in pair)).shape
        assert result == full
        assert [tag_of(n) for n in result] == [tag_of(n) for n in full]


def test_axes_that_agree_only_in_one_bucket_are_refused():
    with pytest.raises(BucketError, match="add: axis 0 is bucketed in two ways, 'T' and 'S'"):
        shapes(ops.add, Abstract((Dim(8, "T"),), F32), Abstract((Dim(8, "S"),), F32))
    with pytest.raises(BucketError, match=r"add: axis 0 is bucketed .'T'. and would be broadcast"):
        shapes(ops.add, Abstract((Dim(1, "T"),), F32), Abstract((8,), F32))


def test_costs_count_entries_and_bytes():
    program = stage(ops.add, Abstract((4, 1), F32), Abstract((8,), F32))
    assert program.cost().flops == 32
    assert program.cost().bytes == 4 * (4 + 8 + 32)
