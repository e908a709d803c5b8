"""Rotary position embedding: formulas of both styles, partial rotation, and FP32 tables."""

from __future__ import annotations

import math

import pytest
import torch
from op_checks import FLOATS, RELATIVE, assert_close, check_op, run, shapes, stage

from atbx import ops
from atbx.core.abstract import Abstract, Dim, tag_of
from atbx.core.errors import BucketError, DTypeError, OptionError, ShapeError
from atbx.core.rewrite import share_common
from atbx.ops.rope import Rope
from atbx.ops.rotary import ROTARY

F32 = torch.float32


def by_complex_numbers(x, positions, rope):
    """The rotation as a product of complex numbers in FP64; no line in common with the op."""
    pairs = rope.dims // 2
    speed = torch.tensor([rope.theta ** (-2 * i / rope.dims) for i in range(pairs)], dtype=torch.float64)
    turn = torch.polar(torch.ones(()).double(), (positions.double()[..., None] * speed))[:, :, None]
    head, tail = x.double()[..., : rope.dims], x.double()[..., rope.dims :]
    if rope.style == "half":
        z = torch.complex(head[..., :pairs], head[..., pairs:]) * turn
        return torch.cat([z.real, z.imag, tail], -1)
    z = torch.view_as_complex(head.reshape(*head.shape[:-1], pairs, 2).contiguous()) * turn
    return torch.cat([torch.view_as_real(z).flatten(-2), tail], -1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("size", "dims"), [(8, 8), (64, 64), (96, 96), (128, 128), (128, 64), (10, 6), (7, 2)]
)
def test_both_styles_are_complex_products_for_any_even_dims(style, size, dims, dtype):
    rope = Rope(dims, style=style)
    q, k = torch.randn(2, 3, 4, size).to(dtype), torch.randn(2, 3, 1, size).to(dtype)
    positions = torch.tensor([[0, 1, 2], [7, 40, 41]])
    # FP32 angles of up to 41 radians err by about 41 * 2^-24, also where the operands are FP64.
    close = {**RELATIVE, torch.float64: 1e-5}
    check_op(
        lambda q, k, p: ops.rotary(q, k, p, rope),
        q,
        k,
        positions,
        oracle=lambda q, k, p: (by_complex_numbers(q, p, rope), by_complex_numbers(k, p, rope)),
        equations=2,
        relative=close,
        absolute=dict.fromkeys(FLOATS, 2e-5),
    )


def test_styles_differ_and_each_keeps_its_order():
    # One head of 8 channels at position 3; the values are those of both formulas, written out.
    x, position = torch.arange(1.0, 9).view(1, 1, 1, 8), torch.tensor([[3]])
    angles = [3 * 10000 ** (-i / 4) for i in range(4)]
    half, interleaved = [0.0] * 8, [0.0] * 8
    for i, angle in enumerate(angles):
        c, s = math.cos(angle), math.sin(angle)
        half[i], half[i + 4] = (i + 1) * c - (i + 5) * s, (i + 5) * c + (i + 1) * s
        a, b = 2 * i + 1, 2 * i + 2
        interleaved[2 * i], interleaved[2 * i + 1] = a * c - b * s, b * c + a * s
    for style, expected in (("half", half), ("interleaved", interleaved)):
        q, k = run(ops.rotary, x, x, position, Rope(8, style=style))
        torch.testing.assert_close(q.flatten(), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert torch.equal(q, k)
    assert max(abs(a - b) for a, b in zip(half, interleaved, strict=True)) > 1


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_scores_depend_on_the_distance_only(style):
    q, k = torch.randn(1, 1, 2, 16).double(), torch.randn(1, 1, 2, 16).double()

    def score(i, j):
        rotated, _ = run(ops.rotary, q, k, torch.tensor([[i]]), Rope(16, style=style))
        _, keys = run(ops.rotary, q, k, torch.tensor([[j]]), Rope(16, style=style))
        return (rotated * keys).sum(-1)

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(score(9, 4), score(9, 5), atol=1e-2)


def test_the_channels_past_dims_pass_through_bit_for_bit():
    q = torch.randn(1, 2, 3, 64).to(torch.bfloat16)
    rotated, _ = run(ops.rotary, q, q, torch.tensor([[5, 6]]), Rope(32))
    assert torch.equal(rotated[..., 32:], q[..., 32:])
    assert not torch.equal(rotated[..., :32], q[..., :32])


def test_position_zero_rotates_nothing():
    q = torch.randn(1, 1, 3, 8)
    assert torch.equal(run(ops.rotary, q, q, torch.tensor([[0]]), Rope(8))[0], q)


def test_tables_are_values_so_two_models_never_share_one():
    positions = torch.tensor([[500]])
    first = run(ops.rotary_angles, positions, Rope(8))[0]
    other = run(ops.rotary_angles, positions, Rope(8, theta=500000.0))[0]
    assert (first - other).abs().max() > 0.1
    assert torch.equal(run(ops.rotary_angles, positions, Rope(8))[0], first)


# dim 128, base 1e4: the largest error of cos at these positions when the frequencies are kept in BF16.
BF16_FREQUENCY_ERRORS = {255: 0.27, 511: 0.47, 2047: 1.71, 4095: 1.68}


@pytest.mark.parametrize(("position", "if_bf16"), BF16_FREQUENCY_ERRORS.items())
def test_frequencies_and_angles_are_fp32(position, if_bf16):
    speed = torch.tensor([10000 ** (-2 * i / 128) for i in range(64)], dtype=torch.float64)
    exact = (position * speed).cos()
    cos, sin = run(ops.rotary_angles, torch.tensor([[position]]), Rope(128))
    assert cos.dtype == sin.dtype == F32
    assert (cos[0, 0].double() - exact).abs().max() < 5e-4
    assert (sin[0, 0].double() - (position * speed).sin()).abs().max() < 5e-4
    rounded = (position * speed.float().to(torch.bfloat16).double()).cos()
    assert (rounded - exact).abs().max().item() == pytest.approx(if_bf16, abs=0.01)


def test_neighbouring_positions_past_256_stay_apart_in_bf16():
    q = torch.randn(1, 2, 1, 128).to(torch.bfloat16)
    q[:, 1] = q[:, 0]
    for first in (256, 4095):
        rotated, _ = run(ops.rotary, q, q, torch.tensor([[first, first + 1]]), Rope(128))
        assert not torch.equal(rotated[0, 0], rotated[0, 1])
        assert_close(
            rotated,
            by_complex_numbers(q, torch.tensor([[first, first + 1]]), Rope(128)),
            absolute=dict.fromkeys(FLOATS, 2e-3),
        )


def test_an_fp64_table_is_used_in_fp64():
    q = torch.randn(1, 1, 2, 8).double()
    angle = torch.rand(1, 1, 4).double()
    rotated, _ = run(lambda q: ROTARY(q, q, angle.cos(), angle.sin(), style="half"), q)
    a, b = q[..., :4], q[..., 4:]
    c, s = angle.cos()[:, :, None], angle.sin()[:, :, None]
    assert_close(rotated, torch.cat([a * c - b * s, b * c + a * s], -1))


def test_layers_share_one_table():
    rope = Rope(8)

    def two_layers(q, k, positions):
        for _ in range(2):
            q, k = ops.rotary(q, k, positions, rope)
        return q, k

    value, positions = Abstract((2, 3, 4, 8), F32), Abstract((2, 3), torch.int64)
    program = stage(two_layers, value, value, positions)
    assert program.count("rotary_angles") == 2
    shared = share_common(program)
    assert shared.count("rotary_angles") == 1
    assert shared.count("rotary") == 2


def test_bucketed_rows_and_tokens_pass_through():
    B, T = Dim(2, "B"), Dim(4, "T")
    q, k, positions = Abstract((B, T, 3, 8), F32), Abstract((2, 4, 1, 8), F32), Abstract((B, T), torch.int64)
    results = shapes(lambda q, k, p: ops.rotary(q, k, p, Rope(8)), q, k, positions)
    assert [[tag_of(n) for n in r.shape] for r in results] == [["B", "T", None, None]] * 2
    assert len(stage(lambda q, k, p: ops.rotary(q, k, p, Rope(8)), q, k, positions)) == 2
    with pytest.raises(BucketError, match="axis 1 is bucketed in two ways"):
        shapes(lambda q, p: ops.rotary(q, q, p, Rope(8)), q, Abstract((B, Dim(4, "S")), torch.int64))


def test_limits_that_no_scaling_asks_for_are_left_out():
    positions, limits = Abstract((2, 3), torch.int64), Abstract((2,), torch.int64)
    program = stage(lambda p, n: ops.rotary_angles(p, Rope(8), n), positions, limits)
    assert len(list(program.equations[0].input_vars())) == 1
    dynamic = Rope(8, scaling="dynamic", factor=2.0, original_context=16)
    program = stage(lambda p, n: ops.rotary_angles(p, dynamic, n), positions, limits)
    assert len(list(program.equations[0].input_vars())) == 2


def test_rotary_refuses_by_name():
    q, k, positions = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 1, 8), torch.zeros(2, 3).long()
    rope = Rope(8)
    dynamic = Rope(8, scaling="dynamic", factor=2.0, original_context=16)
    cos = torch.ones(2, 3, 4)
    for call, error, message in (
        (
            lambda: ops.rotary(q, k, positions, Rope(16)),
            ShapeError,
            "rotary: q has fewer channels.*at least 16",
        ),
        (lambda: ops.rotary(q, k[..., :6], positions, rope), ShapeError, "rotary: k has fewer channels"),
        (lambda: ops.rotary(q[0], k, positions, rope), ShapeError, "rotary: q has too few axes.*at least 4"),
        (lambda: ops.rotary(q[None], k, positions, rope), ShapeError, "rotary: q must have four axes"),
        (
            lambda: ops.rotary(q, k.half(), positions, rope),
            DTypeError,
            "rotary: k and q.*expected f32, found f16",
        ),
        (lambda: ops.rotary(q, k, positions[:1], rope), ShapeError, "rotary: q: sizes differ along axis 0"),
        (
            lambda: ops.rotary(q, k[:, :2], positions, rope),
            ShapeError,
            "rotary: k: sizes differ along axis 1",
        ),
        (
            lambda: ops.rotary(q, k, positions.float(), rope),
            DTypeError,
            "rotary_angles: positions must be integers",
        ),
        (
            lambda: ops.rotary(q, k, positions[0], rope),
            ShapeError,
            "rotary_angles: positions must have two axes",
        ),
        (
            lambda: ops.rotary(q, k, positions, dynamic),
            OptionError,
            "limits: .*'dynamic' depends on the length",
        ),
        (
            lambda: ops.rotary(q, k, positions, dynamic, limits=positions[0]),
            ShapeError,
            r"rotary_angles: limits does not fit; expected \[2\]",
        ),
        (lambda: ROTARY(q, k, cos, cos, style="neox"), OptionError, "rotary: unknown style.*found 'neox'"),
        (lambda: ROTARY(q, k, cos.half(), cos, style="half"), DTypeError, "rotary: cos must be f32 or f64"),
        (lambda: ROTARY(q, k, cos, cos.double(), style="half"), DTypeError, "rotary: sin and cos"),
        (lambda: ROTARY(q, k, cos, cos[:1], style="half"), ShapeError, "rotary: sin does not fit"),
    ):
        with pytest.raises(error, match=message):
            run(call)
