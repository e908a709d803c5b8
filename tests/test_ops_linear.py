"""Contractions, norms and feed-forward networks against FP64, and their refusals."""

from __future__ import annotations

import pytest
import torch
from op_checks import FLOATS, check_op, run, shapes, stage
from torch.nn import functional

from atbx import ops
from atbx.core.abstract import Abstract, Dim, tag_of
from atbx.core.errors import BucketError, DTypeError, OptionError, ShapeError

F32 = torch.float32
HALVES = (torch.bfloat16, torch.float16)
# Dot products cancel, so FP32 steps show beside the one rounding.
CANCELLING = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_x_by_the_transposed_weight(lead, biased, dtype):
    x, weight, bias = torch.randn(*lead, 7).to(dtype), torch.randn(5, 7).to(dtype), torch.randn(5).to(dtype)

    def oracle(x, weight, bias=None):
        product = (x[..., None, :] * weight).sum(-1)
        return product if bias is None else product + bias

    operands = (x, weight, bias) if biased else (x, weight)
    check_op(ops.linear, *operands, oracle=oracle, absolute=CANCELLING)


def test_a_square_weight_is_out_by_in():
    weight = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert run(ops.linear, torch.tensor([3.0, 5.0]), weight).tolist() == [5.0, 0.0]
    assert run(ops.matmul, torch.tensor([[3.0, 5.0]]), weight).tolist() == [[0.0, 3.0]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("a", "b"), [((3, 7), (7, 5)), ((2, 1, 3, 7), (4, 7, 5)), ((2, 3, 0), (2, 0, 5)), ((0, 3, 7), (7, 5))]
)
def test_matmul_broadcasts_leading_axes(a, b, dtype):
    x, y = torch.randn(a).to(dtype), torch.randn(b).to(dtype)
    check_op(
        ops.matmul, x, y, oracle=lambda x, y: torch.einsum("...mk,...kn->...mn", x, y), absolute=CANCELLING
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_contractions_accumulate_in_fp32(dtype):
    # In BF16 or FP16 the ones would vanish beside the large partial sum.
    x = torch.tensor([[2048.0, *[1.0] * 64, -2048.0]]).to(dtype)
    ones = torch.ones(1, 66, dtype=dtype)
    assert run(ops.linear, x, ones).item() == 64
    assert run(ops.matmul, x, ones.T).item() == 64
    assert run(ops.linear, x, ones, torch.tensor([0.5]).to(dtype)).item() == 64.5


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_embedding_copies_rows(dtype, ids_dtype):
    table, ids = torch.randint(-9, 9, (11, 6)).to(dtype), torch.tensor([[0, 10, 3], [3, 3, 1]]).to(ids_dtype)
    result = check_op(ops.embedding, table, ids, oracle=lambda t, i: torch.stack([t[r.long()] for r in i]))
    assert result.dtype == dtype
    check_op(ops.embedding, table, ids[:0], oracle=lambda t, i: t[:0].reshape(0, 3, 6))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_rounds_once_whatever_its_weights(dtype, weight_dtype, offset):
    x, weight = (torch.randn(2, 3, 33) * 5).to(dtype), torch.randn(33).to(weight_dtype)

    def oracle(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + offset)

    result = check_op(lambda x, w: ops.rms_norm(x, w, eps=1e-5, offset=offset), x, weight, oracle=oracle)
    assert result.dtype == dtype


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("given", [(), ("weight",), ("weight", "bias")])
def test_layer_norm_matches_torch_in_fp64(dtype, given):
    x = (torch.randn(4, 33) * 5 + 2).to(dtype)
    vectors = [torch.randn(33).to(dtype) for _ in given]

    def oracle(x, weight=None, bias=None):
        return functional.layer_norm(x, (33,), weight, bias, 1e-5)

    check_op(lambda x, *v: ops.layer_norm(x, *v, eps=1e-5), x, *vectors, oracle=oracle, absolute=CANCELLING)


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm_is_the_sum_rounded_then_its_norm(dtype):
    x, residual, weight = torch.randn(2, 33).to(dtype), torch.randn(2, 33).to(dtype), torch.randn(33)

    def oracle(x, residual, weight):
        summed = (x + residual).to(dtype).double()
        return functional.rms_norm(summed, (33,), weight, 1e-5), summed

    check_op(lambda *v: ops.add_rms_norm(*v, eps=1e-5), x, residual, weight, oracle=oracle)
    both = run(lambda: ops.add_rms_norm(x, residual, weight, eps=1e-5, offset=1.0))
    total = run(ops.add, x, residual)
    assert torch.equal(both[1], total)
    assert torch.equal(both[0], run(lambda: ops.rms_norm(total, weight, eps=1e-5, offset=1.0)))


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_large_values_do_not_overflow(dtype):
    x = torch.full((1, 8), 6e4, dtype=dtype)
    assert run(lambda: ops.rms_norm(x, torch.ones(8), eps=1e-6)).tolist() == [[1.0] * 8]
    assert run(lambda: ops.layer_norm(x, eps=1e-6)).tolist() == [[0.0] * 8]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("op", "oracle"),
    [
        (ops.silu, functional.silu),
        (ops.relu, functional.relu),
        (ops.gelu, functional.gelu),
        (lambda x: ops.gelu(x, "tanh"), lambda x: functional.gelu(x, approximate="tanh")),
        (lambda x: ops.activate(x, "gelu_tanh"), lambda x: functional.gelu(x, approximate="tanh")),
    ],
    ids=["silu", "relu", "gelu", "gelu_tanh", "activate"],
)
def test_activations_round_once(op, oracle, dtype):
    check_op(op, (torch.randn(5, 9) * 3).to(dtype), oracle=oracle)


ACTIVATED = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ops.ACTIVATIONS)
def test_gated_activates_the_gate_and_rounds_once(name, dtype):
    gate, up = torch.randn(3, 7).to(dtype), torch.randn(3, 7).to(dtype)
    check_op(
        lambda g, u: ops.gated(g, u, activation=name), gate, up, oracle=lambda g, u: ACTIVATED[name](g) * u
    )
    closed = run(lambda: ops.gated(torch.zeros_like(gate), up, activation=name))
    assert closed.abs().max().item() == 0


@pytest.mark.parametrize("biased", [False, True])
def test_feed_forward_networks_are_their_parts(biased):
    x, gate, up, down = torch.randn(2, 6), torch.randn(9, 6), torch.randn(9, 6), torch.randn(6, 9)
    gb, ub, db = (torch.randn(9), torch.randn(9), torch.randn(6)) if biased else (None, None, None)
    expected = functional.linear(
        functional.silu(functional.linear(x, gate, gb)) * functional.linear(x, up, ub), down, db
    )
    found = run(lambda: ops.gated_mlp(x, gate, up, down, gb, ub, db, activation="silu"))
    torch.testing.assert_close(found, expected)
    plain = functional.linear(functional.gelu(functional.linear(x, up, ub)), down, db)
    torch.testing.assert_close(run(lambda: ops.mlp(x, up, down, ub, db, activation="gelu")), plain)


def test_contractions_norms_and_activations_refuse_by_name():
    x, weight, bad = torch.ones(2, 3), torch.ones(5, 3), torch.ones(3, 5)
    half = weight.half()
    for call, error, message in (
        (
            lambda: ops.linear(x, bad),
            ShapeError,
            r"linear: weight does not fit x; expected \[out,3\].*\[out, in\]",
        ),
        (lambda: ops.linear(x, weight[0]), ShapeError, "linear: weight does not fit x"),
        (lambda: ops.linear(x, weight, x), ShapeError, r"linear: bias does not fit; expected \[5\]"),
        (lambda: ops.linear(x, half), DTypeError, "linear: weight and x.*expected f32, found f16"),
        (lambda: ops.linear(x, weight, half[:, 0]), DTypeError, "linear: bias and x"),
        (lambda: ops.linear(x.long(), weight), DTypeError, "linear: x must be floating point"),
        (lambda: ops.matmul(x, weight), ShapeError, "matmul: inner sizes differ"),
        (lambda: ops.matmul(x[0], weight), ShapeError, "matmul: x has too few axes; expected at least 2"),
        (lambda: ops.matmul(x, bad.double()), DTypeError, "matmul: y and x"),
        (lambda: ops.matmul(torch.ones(2, 2, 3), torch.ones(3, 3, 5)), ShapeError, "matmul: sizes differ"),
        (lambda: ops.embedding(x, x), DTypeError, "embedding: ids must be integers"),
        (lambda: ops.embedding(x[0], x.long()), ShapeError, "embedding: table must have two axes"),
        (lambda: ops.rms_norm(x, weight[0, :2], eps=1e-5), ShapeError, r"rms_norm: weight .*expected \[3\]"),
        (lambda: ops.rms_norm(x, weight[0], eps=-1.0), ShapeError, "rms_norm: eps must be.*found -1.0"),
        (lambda: ops.rms_norm(x, weight[0], eps=None), ShapeError, "rms_norm: eps must be.*found None"),
        (lambda: ops.rms_norm(x, None, eps=1e-5), ShapeError, "rms_norm: weight must be a tensor"),
        (
            lambda: ops.rms_norm(x, weight[0].long(), eps=1e-5),
            DTypeError,
            "rms_norm: weight must be floating",
        ),
        (lambda: ops.rms_norm(x.long(), weight[0], eps=1e-5), DTypeError, "rms_norm: x must be floating"),
        (lambda: ops.layer_norm(x, None, weight, eps=1e-5), ShapeError, "layer_norm: bias does not fit"),
        (
            lambda: ops.add_rms_norm(x, x[:1], x[0], eps=0.0),
            ShapeError,
            "add_rms_norm: residual does not fit",
        ),
        (lambda: ops.add_rms_norm(x, x.half(), x[0], eps=0.0), DTypeError, "add_rms_norm: residual and x"),
        (lambda: ops.gated(x, x[:1], activation="silu"), ShapeError, "gated: sizes differ along axis 0"),
        (
            lambda: ops.gated(x, x[0], activation="silu"),
            ShapeError,
            "gated: gate and up have different shapes",
        ),
        (lambda: ops.gated(x, x.half(), activation="silu"), DTypeError, "gated: up and gate"),
        (lambda: ops.gated(x, x, activation="swish"), OptionError, "gated: unknown activation; .*'swish'"),
        (lambda: ops.activate(x, "swish"), OptionError, "activate: unknown activation"),
        (lambda: ops.gelu(x, "erf"), OptionError, "gelu: unknown approximation"),
        (lambda: ops.silu(x.long()), DTypeError, "silu: x must be floating point"),
    ):
        with pytest.raises(error, match=message):
            run(call)


@pytest.mark.parametrize("name", ["eps", "activation"])
def test_no_hidden_default_where_models_differ(name):
    call = ops.rms_norm if name == "eps" else ops.gated
    with pytest.raises(TypeError, match=name):
        call(torch.ones(1, 1), torch.ones(1))


def test_contracted_and_normed_axes_must_not_be_padded():
    M = Dim(8, "M")
    x, weight = Abstract((2, M), F32), Abstract((4, 8), F32)
    with pytest.raises(BucketError, match="linear mixes along axis 1 of operand 0"):
        stage(ops.linear, x, weight)
    with pytest.raises(BucketError, match="linear mixes along axis 1 of operand 1"):
        stage(ops.linear, Abstract((2, 8), F32), Abstract((4, M), F32))
    with pytest.raises(BucketError, match="matmul mixes along axis 1 of operand 0"):
        stage(ops.matmul, x, Abstract((8, 4), F32))
    with pytest.raises(BucketError, match="matmul mixes along axis 0 of operand 1"):
        stage(ops.matmul, Abstract((2, 8), F32), Abstract((M, 4), F32))
    for call in (lambda x, w: ops.rms_norm(x, w, eps=0.0), lambda x, w: ops.layer_norm(x, w, eps=0.0)):
        with pytest.raises(BucketError, match="norm mixes along axis 1 of operand 0"):
            stage(call, x, Abstract((8,), F32))


def test_bucketed_leading_axes_pass_through():
    x = Abstract((Dim(2, "B"), Dim(4, "T"), 8), F32)
    plain = Abstract((2, 4, 8), F32)

    def tags(call, *operands):
        found = shapes(call, *operands)
        return [[tag_of(n) for n in r.shape] for r in (found if isinstance(found, tuple) else (found,))]

    assert tags(ops.linear, x, Abstract((5, 8), F32)) == [["B", "T", None]]
    assert tags(ops.matmul, x, Abstract((8, Dim(3, "N")), F32)) == [["B", "T", "N"]]
    norm = Abstract((8,), F32)
    assert tags(lambda x, w: ops.rms_norm(x, w, eps=0.0), x, norm) == [["B", "T", None]]
    assert tags(lambda x, y, w: ops.add_rms_norm(x, y, w, eps=0.0), plain, x, norm) == [["B", "T", None]] * 2
    assert tags(lambda x, y: ops.gated(x, y, activation="silu"), plain, x) == [["B", "T", None]]
    ids = Abstract((Dim(2, "B"), Dim(4, "T")), torch.int64)
    assert tags(ops.embedding, Abstract((9, 5), F32), ids) == [["B", "T", None]]


def test_costs_of_contractions_are_honest():
    x, weight = Abstract((4, 8, 64), torch.bfloat16), Abstract((128, 64), torch.bfloat16)
    cost = stage(ops.linear, x, weight).cost()
    assert cost.flops == 2 * 32 * 64 * 128
    assert cost.bytes == 2 * (32 * 64 + 128 * 64 + 32 * 128)
    table, ids = Abstract((50000, 64), torch.bfloat16), Abstract((1, 3), torch.int64)
    assert stage(ops.embedding, table, ids).cost().bytes == 3 * 8 + 2 * 3 * 64 * 2
