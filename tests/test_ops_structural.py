"""Structural and indexing ops: values, views, bucket tags and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import check_op, run, shapes, stage

from atbx import ops
from atbx.core.abstract import Abstract, Dim, tag_of
from atbx.core.errors import BucketError, DTypeError, ShapeError

F32 = torch.float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool)
B, T = Dim(4, "B"), Dim(8, "T")


def numbers(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def tags(call, *operands: Abstract) -> list[list[str | None]]:
    results = shapes(call, *operands)
    return [[tag_of(n) for n in r.shape] for r in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_structural_ops_move_entries_and_no_more(dtype):
    x = numbers(2, 3, 4, dtype=dtype)
    check_op(lambda x: ops.reshape(x, (6, -1)), x, oracle=lambda x: x.reshape(6, 4))
    check_op(lambda x: ops.transpose(x, (2, 0, -2)), x, oracle=lambda x: x.permute(2, 0, 1))
    check_op(lambda x: ops.expand_dims(x, -1), x, oracle=lambda x: x[..., None])
    check_op(lambda x: ops.squeeze(x, 0), x[:1], oracle=lambda x: x[0])
    check_op(lambda x: ops.broadcast_to(x, (5, 2, 3, 4)), x, oracle=lambda x: torch.stack([x] * 5))
    check_op(lambda x, y: ops.concat([x, y, x], 1), x, x[:, :1], oracle=lambda x, y: torch.cat([x, y, x], 1))
    check_op(lambda x: ops.split(x, (1, 0, 3)), x, oracle=lambda x: (x[..., :1], x[..., :0], x[..., 1:]))
    check_op(lambda x: ops.split(x, 3, 1), x, oracle=lambda x: (x[:, 0:1], x[:, 1:2], x[:, 2:]))
    check_op(lambda x: ops.reshape(x, (0, 2, 6)), x[:0], oracle=lambda x: x.reshape(0, 2, 6))


def test_views_share_memory_and_broadcast_does_not():
    x = numbers(2, 3)
    for call in (
        lambda x: ops.reshape(x, (3, 2)),
        lambda x: ops.transpose(x, (1, 0)),
        lambda x: ops.expand_dims(x, 0),
        lambda x: ops.getitem(x, (slice(None), 1)),
        lambda x: ops.split(x, (1, 2))[1],
        lambda x: ops.cast(x, F32),
    ):
        assert run(call, x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    repeated = run(lambda x: ops.broadcast_to(x, (4, 2, 3)), x)
    assert repeated.is_contiguous()
    assert repeated.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
def test_cast_rounds_to_nearest_even(source, target):
    x = torch.tensor([0.0, 1.0, -2.0, 257.0]).to(source)
    result = check_op(lambda x: ops.cast(x, target), x, oracle=lambda x: x)
    assert result.dtype == target
    # 257 lies half way between 256 and 258 in BF16; the even significand is 256's.
    assert run(ops.cast, torch.tensor([257.0, 259.0]), torch.bfloat16).tolist() == [256.0, 260.0]


def test_arange_of_a_bucketed_size_carries_its_tag():
    assert run(ops.arange, 4).tolist() == [0, 1, 2, 3]
    assert run(lambda: ops.arange(3, torch.float32)).dtype == F32
    assert tags(lambda: ops.arange(T)) == [["T"]]
    with pytest.raises(ShapeError, match="arange: size must not be negative; found -1"):
        run(ops.arange, -1)


INDICES = [
    0,
    -1,
    slice(None),
    slice(1, 3),
    slice(None, -1),
    slice(0, 99, 2),
    slice(3, 1),
    (1, slice(None), -2),
    (..., 0),
    (slice(1, None), ..., slice(None, 2)),
    (None, 0),
    (slice(None), None, ..., None),
    ...,
]


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_static_indices_are_torchs(index):
    x = numbers(3, 4, 5)
    check_op(lambda x: ops.getitem(x, index), x, oracle=lambda x: x[index])
    assert torch.equal(run(ops.getitem, x, index), x[index])


def test_indices_are_refused_by_name():
    x = numbers(3, 4)
    for index, message in (
        (3, "no such place on axis 0; expected -3 to 2, found 3"),
        ((0, -5), "no such place on axis 1"),
        ((0, 0, 0), "too many indices; expected at most 2, found 3"),
        (slice(None, None, -1), "the step of a slice must be positive .axis 0.; found -1"),
        ((slice(None), slice(0.5)), r"bounds of a slice must be ints \(axis 1\)"),
        (torch.tensor([0]), "found Tensor. ops.take gathers"),
        (True, "found bool"),
        ((..., ...), "at most one"),
    ):
        with pytest.raises(ShapeError, match=f"getitem: .*{message}"):
            run(ops.getitem, x, index)


def test_slicing_a_bucketed_axis_is_refused_unless_whole():
    x = Abstract((B, T, 6), F32)
    for index in ((slice(None), slice(0, 3)), (slice(None), -1), (slice(None), slice(None, 99))):
        with pytest.raises(BucketError, match=r"getitem mixes along axis 1 .* bucket 'T'"):
            stage(lambda x, i=index: x[i], x)
    assert tags(lambda x: ops.getitem(x, (..., slice(2, 4))), x) == [["B", "T", None]]
    assert tags(lambda x: ops.getitem(x, (slice(0, None), slice(None, T), None)), x) == [
        ["B", "T", None, None]
    ]
    assert tags(lambda x: ops.getitem(x, (..., 0)), x) == [["B", "T"]]


def test_cutting_at_a_padded_size_keeps_its_tag_or_is_refused():
    table = Abstract((32, 6), F32)
    assert tags(lambda x: ops.getitem(x, slice(None, T)), table) == [["T", None]]
    assert run(ops.getitem, numbers(32, 6), slice(0, T)).shape == (8, 6)
    for index in (slice(T, None), slice(1, T), T, slice(None, T, 2)):
        with pytest.raises(BucketError, match="getitem: axis 0 is cut at the padded size of 'T'; found 8"):
            shapes(lambda x, i=index: ops.getitem(x, i), table)
    with pytest.raises(ShapeError, match="axis 0 is shorter than the slice; expected 8, found 5"):
        shapes(lambda x: ops.getitem(x, slice(None, T)), Abstract((5,), F32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_take_gathers_rows_of_each_batch_row(dtype, index_dtype):
    x = numbers(2, 5, 3, dtype=dtype)
    want = torch.tensor([[4, 0, 0], [1, 2, 3]]).to(index_dtype)
    check_op(ops.take, x, want, oracle=lambda x, w: torch.stack([x[b][w[b].long()] for b in range(2)]))
    check_op(ops.take, x, want[:, :0], oracle=lambda x, w: x[:, :0])


def test_take_is_free_along_buckets():
    x, want = Abstract((4, T, 6), F32), Abstract((B, Dim(2, "W")), torch.int64)
    assert tags(ops.take, x, want) == [["B", "W", None]]
    assert len(stage(ops.take, x, want)) == 1


def test_take_along_is_a_gather():
    x, i = torch.randn(3, 5), torch.tensor([[4, 0], [1, 1], [2, 3]])
    check_op(ops.take_along, x, i, oracle=lambda x, i: torch.gather(x, 1, i))
    rows = torch.tensor([[2, 0, 1, 1, 0]]).int()
    check_op(lambda x, i: ops.take_along(x, i, 0), x, rows, oracle=lambda x, i: torch.gather(x, 0, i.long()))


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_index_out_of_range_is_refused_and_not_clamped(bad):
    x = numbers(2, 5, 3)
    with pytest.raises(ShapeError, match=f"take: an index is out of range; expected 0 to 4, found {bad}"):
        run(ops.take, x, torch.tensor([[0], [bad]]))
    with pytest.raises(
        ShapeError, match=f"take_along: an index is out of range; expected 0 to 4, found {bad}"
    ):
        run(lambda x, i: ops.take_along(x, i, 1), x, torch.full((2, 1, 3), bad))
    with pytest.raises(
        ShapeError, match=f"embedding: an index is out of range; expected 0 to 4, found {bad}"
    ):
        run(ops.embedding, numbers(5, 2), torch.tensor([bad]))


def test_structural_ops_refuse_by_name():
    x = numbers(2, 6)
    for call, error, message in (
        (
            lambda: ops.reshape(x, (5, 3)),
            ShapeError,
            r"reshape: .*differ; expected 12 in f32\[2,6\], found \[5,3\]",
        ),
        (lambda: ops.reshape(x, (5, -1)), ShapeError, "reshape: -1 cannot be worked out"),
        (lambda: ops.reshape(x, (-1, -1)), ShapeError, "reshape: .*at most one is -1"),
        (lambda: ops.reshape(x, (-2, 6)), ShapeError, "reshape: sizes are positive"),
        (lambda: ops.reshape(x[:0], (0, -1)), ShapeError, "reshape: -1 cannot be worked out"),
        (lambda: ops.transpose(x, (0, 0)), ShapeError, "transpose: axes must name each axis once"),
        (lambda: ops.transpose(x, (0,)), ShapeError, "transpose: axes must name each axis once"),
        (
            lambda: ops.transpose(x, (0, 2)),
            ShapeError,
            "transpose: no such axes entry; expected -2 to 1, found 2",
        ),
        (lambda: ops.squeeze(x, 1), ShapeError, "squeeze: axis 1 must have size 1"),
        (lambda: ops.expand_dims(x, 3), ShapeError, "expand_dims: no such axis; expected -3 to 2, found 3"),
        (lambda: ops.broadcast_to(x, (6,)), ShapeError, "broadcast_to: x has more axes"),
        (lambda: ops.broadcast_to(x, (3, 6)), ShapeError, "broadcast_to: sizes differ along axis 0"),
        (
            lambda: ops.broadcast_to(x, (2, 1)),
            ShapeError,
            "broadcast_to: axis 1 does not fit; expected 1, found 6",
        ),
        (lambda: ops.concat([]), ShapeError, "concat: nothing to join"),
        (lambda: ops.concat([x, x[0]]), ShapeError, "concat: operand 1 has another number of axes"),
        (lambda: ops.concat([x, x], 2), ShapeError, "concat: no such axis"),
        (lambda: ops.concat([x, x[:, :3]]), ShapeError, "concat: operand 1: sizes differ along axis 1"),
        (
            lambda: ops.concat([x, x.double()]),
            DTypeError,
            "concat: operand 1 and operand 0.*expected f32, found f64",
        ),
        (lambda: ops.concat([x, 1.0]), ShapeError, "concat: operand 1 must be a tensor"),
        (lambda: ops.split(x, 4), ShapeError, "split: axis 1 does not divide into 4 equal parts"),
        (lambda: ops.split(x, (2, 3)), ShapeError, r"split: sizes must .*axis 1; expected 6, found \[2,3\]"),
        (lambda: ops.split(x, (7, -1)), ShapeError, "split: sizes must be positive"),
        (lambda: ops.cast(x, float), DTypeError, "cast: dtype must be a torch dtype"),
        (lambda: ops.take(x, x.long()[0]), ShapeError, "take: indices must have two axes"),
        (lambda: ops.take(x, x), DTypeError, "take: indices must be integers"),
        (
            lambda: ops.take(x, x.long()[:1]),
            ShapeError,
            "take: sizes differ along axis 0; expected 2, found 1",
        ),
        (lambda: ops.take_along(x, x.long()[0]), ShapeError, "take_along: indices must have as many axes"),
        (lambda: ops.take_along(x, x.long()[:1]), ShapeError, "take_along: sizes differ along axis 0"),
    ):
        with pytest.raises(error, match=message):
            run(call)


RESHAPES = [
    ((B, T, 6), (B, T, 2, 3), ["B", "T", None, None]),
    ((B, T, 6), (4, 8, 2, 3), ["B", "T", None, None]),
    ((B, T, 6), (B, T, -1), ["B", "T", None]),
    ((B, T, 6), (-1, 6), ["B*T", None]),
    ((B, T, 6), (B * T, 6), ["B*T", None]),
    ((B, T, 2, 3), (B, T, 6), ["B", "T", None]),
    ((B, T, 6), (B, -1), ["B", "T*6"]),
    ((B, T, 6), (-1,), ["B*T*6"]),
    ((Dim(32, "B*T"), 6), (B, T, 6), ["B", "T", None]),
    ((Dim(48, "T*6"),), (T, 6), ["T", None]),
    ((B, 1, 6), (B, 6), ["B", None]),
    ((B, 6), (1, B, 1, 6), [None, "B", None, None]),
    ((Dim(1, "B"), Dim(1, "T"), 6), (1, 1, 2, 3), ["B", "T", None, None]),
    ((Dim(1, "B"), Dim(1, "T"), 6), (1, 6), ["B*T", None]),
    ((B, Dim(1, "T"), 6), (4, 6), ["B*T", None]),
    ((Dim(1, "B"), T, 6), (8, 6), ["B*T", None]),
    ((Dim(1, "T"), 1, 1), (1,), ["T"]),
    ((1, Dim(1, "B"), Dim(1, "T")), (1, Dim(1, "T")), ["B", "T"]),
    ((1, Dim(1, "B"), 6), (Dim(1, "B"), 6), ["B", None]),
    ((Dim(1, "B"), Dim(1, "T"), 6), (Dim(1, "B"), Dim(1, "T"), 1, 6), ["B", "T", None, None]),
    ((B, 0), (B, 0, 5), ["B", None, None]),
]


@pytest.mark.parametrize(("before", "after", "expected"), RESHAPES, ids=str)
def test_reshape_follows_bucket_tags(before, after, expected):
    assert tags(lambda x: ops.reshape(x, after), Abstract(before, F32)) == [expected]


@pytest.mark.parametrize(
    "after", [(T, B, 6), (2, 16, 6), (B, 2, 4, 6), (B, 4, 2, 6), (B, 16, 3), (Dim(4, "S"), T, 6)]
)
def test_reshape_refuses_to_split_or_lose_a_bucketed_axis(after):
    with pytest.raises(BucketError, match=r"reshape: bucketed axis .* would be split or lost"):
        shapes(lambda x: ops.reshape(x, after), Abstract((B, T, 6), F32))


@pytest.mark.parametrize("after", [(Dim(1, "T"), Dim(1, "B"), 6), (Dim(1, "T"), 6), (Dim(1, "S"), 1, 6)])
def test_axes_of_one_entry_are_told_apart_by_their_tags(after):
    with pytest.raises(BucketError, match=r"reshape: bucketed axis .* would be split or lost"):
        shapes(lambda x: ops.reshape(x, after), Abstract((Dim(1, "B"), Dim(1, "T"), 6), F32))


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=5), st.data())
def test_merging_neighbours_names_every_tag_and_splits_back(axes, data):
    before = tuple(Dim(n, f"t{i}") if tagged else n for i, (n, tagged) in enumerate(axes))
    start = data.draw(st.integers(0, len(axes) - 1))
    end = data.draw(st.integers(start + 1, len(axes)))
    size = int(torch.Size([int(n) for n in before[start:end]]).numel())
    merged = shapes(
        lambda x: ops.reshape(x, (*before[:start], size, *before[end:])), Abstract(before, F32)
    ).shape
    assert len(merged) == len(before) - (end - start) + 1
    carried = "*".join(tag_of(n) or "" for n in merged).split("*")
    for n in before:
        assert tag_of(n) is None or tag_of(n) in carried
    if all(n > 1 for n in before):
        assert shapes(lambda x: ops.reshape(x, before), Abstract(merged, F32)).shape == before


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 1))
def test_split_then_concat_is_the_identity(sizes, axis):
    shape = (sum(sizes), 3) if axis == 0 else (3, sum(sizes))
    x = numbers(*shape)
    parts = run(lambda x: ops.split(x, sizes, axis), x)
    assert [p.shape[axis] for p in parts] == sizes
    assert torch.equal(run(ops.concat, parts, axis), x)


def test_bucket_tags_pass_where_nothing_mixes_and_are_refused_where_it_does():
    x = Abstract((B, T, 6), F32)
    assert tags(lambda x: ops.transpose(x, (1, 2, 0)), x) == [["T", None, "B"]]
    assert tags(lambda x: ops.split(x, 2), x) == [["B", "T", None]] * 2
    assert tags(lambda x: ops.concat([x, x], -1), x) == [["B", "T", None]]
    assert tags(lambda x: ops.broadcast_to(ops.expand_dims(x, 0), (2, B, T, 6)), x) == [
        [None, "B", "T", None]
    ]
    assert tags(lambda x: ops.cast(x, torch.bfloat16), x) == [["B", "T", None]]
    with pytest.raises(BucketError, match="concat mixes along axis 1 of operand 0"):
        stage(lambda x: ops.concat([x, x], 1), x)
    with pytest.raises(BucketError, match="split mixes along axis 1"):
        stage(lambda x: ops.split(x, 2, 1), x)
    with pytest.raises(ShapeError, match="squeeze: axis 0 must have size 1 and no bucket"):
        shapes(lambda x: ops.squeeze(x, 0), Abstract((Dim(1, "B"), 2), F32))


def test_structural_views_cost_nothing_and_gathers_what_they_gather():
    x = Abstract((4, 100, 8), F32)
    assert stage(lambda x: ops.reshape(ops.transpose(x, (1, 0, 2))[3:], (-1, 8)), x).cost().bytes == 0
    assert stage(lambda x: ops.cast(x, F32), x).cost().bytes == 0
    assert stage(lambda x: ops.cast(x, torch.bfloat16), x).cost().bytes == 4 * 100 * 8 * 6
    want = Abstract((4, 1), torch.int64)
    assert stage(ops.take, x, want).cost().bytes == 2 * 4 * 8 * 4 + 4 * 8
