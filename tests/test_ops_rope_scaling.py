"""Rotary frequencies of every scaling: published values, transformers as an oracle, and independence of rows."""

from __future__ import annotations

import math

import pytest
import torch
from op_checks import run

from atbx import ops
from atbx.core.errors import OptionError
from atbx.ops.rope import Rope, attention_factor, inverse_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}


def test_llama3_bands_have_the_published_values():
    found = inverse_frequencies(Rope(8, theta=500000.0, scaling="llama3", **LLAMA3))
    expected = torch.tensor([1, 0.0376060309, 5.24846161e-4, 6.64786987e-6])
    torch.testing.assert_close(found, expected, rtol=5e-7, atol=0)


def test_llama3_leaves_blends_and_divides_by_wave_length():
    plain = inverse_frequencies(Rope(128, theta=500000.0))
    scaled = inverse_frequencies(Rope(128, theta=500000.0, scaling="llama3", **LLAMA3))
    unchanged, divided = scaled == plain, scaled == plain / 8
    assert int(unchanged.sum()) == 29
    assert int(divided.sum()) == 29
    blended = ~unchanged & ~divided
    assert int(blended.sum()) == 6
    assert ((scaled < plain) & (scaled > plain / 8))[blended].all()


def test_yarn_attention_factor_is_a_tenth_of_the_logarithm():
    assert attention_factor(Rope(64, scaling="yarn", factor=4.0, original_context=64)) == pytest.approx(
        1.138629, abs=1e-6
    )
    assert attention_factor(Rope(64, scaling="yarn", factor=1.0, original_context=64)) == 1.0
    assert (
        attention_factor(Rope(64, scaling="yarn", factor=4.0, original_context=64, attention_factor=1.5))
        == 1.5
    )
    both = Rope(64, scaling="yarn", factor=40.0, original_context=4096, mscale=0.707, mscale_all_dim=0.707)
    assert attention_factor(both) == 1.0
    only = Rope(64, scaling="yarn", factor=4.0, original_context=64, mscale=0.5)
    assert attention_factor(only) == pytest.approx(0.1 * math.log(4) + 1)


def test_the_attention_factor_is_on_cos_and_sin():
    rope = Rope(8, scaling="yarn", factor=4.0, original_context=64)
    cos, sin = run(ops.rotary_angles, torch.tensor([[0, 9]]), rope)
    torch.testing.assert_close(cos[0, 0], torch.full((4,), 1.138629), rtol=1e-6, atol=0)
    torch.testing.assert_close(cos**2 + sin**2, torch.full((1, 2, 4), 1.138629**2), rtol=1e-6, atol=0)


def test_other_scalings_have_no_attention_factor():
    assert attention_factor(Rope(8)) == 1.0
    assert attention_factor(Rope(8, scaling="linear", factor=4.0)) == 1.0
    assert attention_factor(Rope(8, scaling="dynamic", factor=4.0, original_context=64)) == 1.0
    assert attention_factor(Rope(8, scaling="llama3", **LLAMA3)) == 1.0


def test_a_rope_prints_what_is_not_default_and_reads_back():
    rope = Rope(8, style="interleaved", scaling="llama3", **LLAMA3)
    assert repr(Rope(8)) == "Rope(dims=8)"
    assert "theta" not in repr(rope)
    assert eval(repr(rope)) == rope


def test_linear_divides_every_frequency():
    assert torch.equal(
        inverse_frequencies(Rope(16, scaling="linear", factor=4.0)), inverse_frequencies(Rope(16)) / 4
    )


def test_dynamic_with_a_single_pair_is_plain():
    rope = Rope(2, scaling="dynamic", factor=4.0, original_context=8)
    assert inverse_frequencies(rope, torch.tensor([8, 64])).tolist() == [[1.0], [1.0]]


def test_frequencies_are_fp32_whatever_the_limit_dtype():
    for dtype in (torch.int32, torch.int64):
        rope = Rope(8, scaling="dynamic", factor=2.0, original_context=16)
        assert inverse_frequencies(rope, torch.tensor([40], dtype=dtype)).dtype == torch.float32
    assert inverse_frequencies(Rope(8)).dtype == torch.float32


LENGTH_DEPENDENT = [
    Rope(8, scaling="dynamic", factor=2.0, original_context=16),
    Rope(
        8,
        scaling="longrope",
        factor=4.0,
        original_context=16,
        short_factor=(1.0, 1.1, 1.2, 1.3),
        long_factor=(2.0, 3.0, 5.0, 8.0),
    ),
]


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT, ids=lambda r: r.scaling)
def test_a_neighbour_or_a_later_step_never_changes_a_row(rope):
    limits = torch.tensor([10, 16, 17, 60])
    positions = torch.arange(10).expand(4, 10)
    together = run(ops.rotary_angles, positions, rope, limits)
    for row in range(4):
        alone = run(ops.rotary_angles, positions[row : row + 1], rope, limits[row : row + 1])
        for ours, theirs in zip(together, alone, strict=True):
            assert torch.equal(ours[row], theirs[0])
        for step in range(10):
            cos, _ = run(
                ops.rotary_angles, positions[row : row + 1, step : step + 1], rope, limits[row : row + 1]
            )
            assert torch.equal(cos[0, 0], together[0][row, step])
    assert torch.equal(together[0][0], together[0][1])
    assert not torch.equal(together[0][1], together[0][2])


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT, ids=lambda r: r.scaling)
def test_a_scaling_that_depends_on_length_needs_limits(rope):
    with pytest.raises(OptionError, match=r"limits: .*depends on the length, so it needs limits"):
        inverse_frequencies(rope)
    with pytest.raises(OptionError, match=r"limits: .*depends on the length, so it needs limits"):
        run(ops.rotary_angles, torch.tensor([[0]]), rope)


CASES = [
    (Rope(64, scaling="linear", factor=4.0), {}),
    (Rope(128, theta=500000.0, scaling="linear", factor=2.5), {}),
    (Rope(64, scaling="dynamic", factor=2.0, original_context=2048), {}),
    (Rope(96, theta=1e6, scaling="dynamic", factor=8.0, original_context=100), {}),
    (Rope(64, theta=500000.0, scaling="llama3", **LLAMA3), {}),
    (Rope(128, theta=500000.0, scaling="llama3", **{**LLAMA3, "factor": 32.0}), {}),
    (
        Rope(
            32, scaling="llama3", factor=3.0, low_freq_factor=2.0, high_freq_factor=5.0, original_context=300
        ),
        {},
    ),
    (Rope(64, scaling="yarn", factor=4.0, original_context=4096), {}),
    (
        Rope(
            128, theta=1e6, scaling="yarn", factor=40.0, original_context=4096, beta_fast=16.0, beta_slow=2.0
        ),
        {},
    ),
    (Rope(64, scaling="yarn", factor=8.0, original_context=512, truncate=False), {"truncate": False}),
    (
        Rope(64, scaling="yarn", factor=8.0, original_context=512, attention_factor=1.25),
        {"attention_factor": 1.25},
    ),
    (
        Rope(64, scaling="yarn", factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=0.707),
        {"mscale": 1.0, "mscale_all_dim": 0.707},
    ),
    (
        Rope(
            16,
            scaling="longrope",
            factor=32.0,
            original_context=4096,
            short_factor=tuple(1 + i / 10 for i in range(8)),
            long_factor=tuple(1.5**i for i in range(8)),
        ),
        {},
    ),
]


@pytest.mark.oracle
@pytest.mark.parametrize(("rope", "extra"), CASES, ids=lambda v: getattr(v, "scaling", None))
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_frequencies_and_factors_equal_transformers(rope, extra, partial):
    transformers = pytest.importorskip("transformers")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    parameters = {
        "rope_type": rope.scaling,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "partial_rotary_factor": partial,
        **extra,
    }
    context = rope.original_context or 2048
    if rope.scaling in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = rope.original_context
        context = int(rope.original_context * rope.factor)
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if rope.scaling == "longrope":
        parameters |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    head = int(rope.dims / partial)
    config = transformers.LlamaConfig(
        hidden_size=4 * head,
        num_attention_heads=4,
        head_dim=head,
        max_position_embeddings=context,
        rope_parameters=parameters,
    )
    lengths = (
        [1, rope.original_context, rope.original_context + 1, 3 * context]
        if rope.depends_on_length
        else [None]
    )
    for length in lengths:
        expected, factor = functions[rope.scaling](config, "cpu", seq_len=length)
        limit = None if length is None else torch.tensor([length, 1])
        found = inverse_frequencies(rope, limit)
        torch.testing.assert_close(found if limit is None else found[0], expected, rtol=5e-7, atol=0)
        assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


@pytest.mark.oracle
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_cos_and_sin_equal_transformers_bit_for_bit(theta):
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    positions = torch.tensor([[0, 1, 257, 4095, 65537, 131071]])
    expected = module.LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    found = run(ops.rotary_angles, positions, Rope(64, theta=theta, scaling="llama3", **LLAMA3))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs[..., :32])


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("length", "scaling"), [(10, "dynamic"), (40, "dynamic"), (10, "longrope"), (40, "longrope")]
)
def test_with_the_limit_at_the_length_tables_agree_with_transformers(length, scaling):
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    rope = next(r for r in LENGTH_DEPENDENT if r.scaling == scaling)
    parameters = {"rope_type": scaling, "rope_theta": rope.theta, "factor": rope.factor}
    if scaling == "longrope":
        parameters["original_max_position_embeddings"] = 16
        parameters |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=16 if scaling == "dynamic" else 64,
        rope_parameters=parameters,
    )
    positions = torch.arange(length)[None]
    expected = module.LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    found = run(ops.rotary_angles, positions, rope, torch.tensor([length]))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs[..., :4], rtol=1e-5, atol=1e-5)
