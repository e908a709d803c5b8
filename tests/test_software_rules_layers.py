"""Norms, activations, products, quantisers and sampling as the software NPU computes them: by hand and by torch."""

import math

import pytest
import torch
import torch.nn.functional as fun

from atbx.testing.software_npu.rules import RULES, NotModelledError
from atbx.testing.software_npu.rules.linear import from_fractal, to_fractal

F16, BF16, I8 = torch.float16, torch.bfloat16, torch.int8


def npu(name):
    return RULES[f"npu::{name}"].function


def flat(x):
    return x.flatten().tolist()


# --- norms --------------------------------------------------------------------------------------------------


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    y, rstd = npu("npu_rms_norm")(x, torch.tensor([1.0, 2.0]), 0.0)
    assert flat(y) == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])
    assert flat(rstd) == pytest.approx([1 / math.sqrt(12.5)])
    assert tuple(rstd.shape) == (1, 1)
    inside, _ = npu("npu_rms_norm")(x, torch.tensor([1.0, 1.0]), 87.5)  # epsilon belongs under the root
    assert flat(inside) == pytest.approx([0.3, 0.4])


def test_rms_norm_agrees_with_torch_and_keeps_the_input_dtype():
    x, gamma = torch.randn(2, 3, 64, dtype=BF16), torch.randn(64)
    y, rstd = npu("npu_rms_norm")(x, gamma, 1e-5)
    expected = fun.rms_norm(x.float(), (64,), gamma, 1e-5)
    assert y.dtype == BF16
    torch.testing.assert_close(y, expected.to(BF16))
    assert tuple(rstd.shape) == (2, 3, 1)
    assert rstd.dtype == torch.float32


def test_gemma_adds_one_to_its_weight():
    y, _ = npu("npu_gemma_rms_norm")(torch.tensor([[2.0, 2.0]]), torch.tensor([0.0, 1.0]), 0.0)
    assert flat(y) == pytest.approx([1, 2])


def test_add_rms_norm_rounds_the_sum_before_it_norms():
    # In float16 2048 + 1 is 2048: the norm of the rounded pair is exactly even, that of 2049 and 2048 is not.
    x1, x2 = torch.tensor([[2048.0, 2048.0]], dtype=F16), torch.tensor([[1.0, 0.0]], dtype=F16)
    y, rstd, total = npu("npu_add_rms_norm")(x1, x2, torch.ones(2, dtype=F16), 0.0)
    assert flat(total) == [2048, 2048]
    assert flat(rstd) == [1 / 2048]
    assert flat(y) == [1, 1]


def test_add_rms_norm_v2_leaves_the_norm_in_x1_and_the_sum_in_x2():
    x1, x2 = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]])
    rstd = npu("npu_add_rms_norm_v2")(x1, x2, torch.ones(2), 0.0)
    assert flat(x2) == [3, 4]
    assert flat(x1) == pytest.approx([3 / math.sqrt(12.5), 4 / math.sqrt(12.5)])
    assert flat(rstd) == pytest.approx([1 / math.sqrt(12.5)])
    wide, narrow, _, total = npu("npu_add_rms_norm_cast")(
        x2.to(F16), x2.to(F16), torch.ones(2, dtype=F16), 0.0
    )
    assert (wide.dtype, narrow.dtype, flat(total)) == (torch.float32, F16, [6, 8])


def test_quantising_norms_differ_in_the_sense_of_their_scale():
    x, ones = torch.tensor([[2.0, -2.0]], dtype=F16), torch.ones(2, dtype=F16)
    zero = torch.zeros(2, dtype=F16)
    scale, offset = torch.tensor([4.0], dtype=F16), torch.tensor([3], dtype=I8)
    multiplied = npu("npu_rms_norm_quant")(x, ones, zero, scale, offset, 0.0)
    assert flat(multiplied) == [7, -1]
    assert multiplied.dtype == I8
    out = torch.zeros(1, 2, dtype=I8)
    RULES["atb::_npu_quant_rms_norm"].function(
        x, ones, zero, torch.tensor([0.25], dtype=F16), offset, out, 0.0
    )
    assert flat(out) == [7, -1]  # divides: the reciprocal scale gives the same
    half = torch.full((2,), 0.5)
    divided, _, total = npu("npu_add_rms_norm_quant")(x, x, ones, half, torch.tensor([3, 3]), epsilon=0.0)
    assert flat(divided) == [5, 1]
    assert flat(total) == [4, -4]
    times, _, _ = npu("npu_add_rms_norm_quant")(x, x, ones, half, None, epsilon=0.0, div_mode=False)
    assert flat(times) == [0, 0]  # 0.5 rounds to even


def test_add_rms_norm_dynamic_quant_scales_by_the_largest_of_the_row():
    x = torch.tensor([[3.0, 4.0]], dtype=F16)
    y, _, total, scale, _ = npu("npu_add_rms_norm_dynamic_quant")(
        x, x * 0, torch.ones(2, dtype=F16), epsilon=0.0
    )
    assert flat(y) == [95, 127]
    assert flat(scale) == pytest.approx([4 / math.sqrt(12.5) / 127])
    assert flat(total) == [3, 4]


def test_layer_norms_agree_with_torch():
    x, weight, bias = torch.randn(4, 32), torch.randn(32), torch.randn(32)
    expected = fun.layer_norm(x, (32,), weight, bias, 1e-5)
    torch.testing.assert_close(npu("npu_layer_norm_eval")(x, [32], weight, bias, 1e-5), expected)
    y, mean, rstd, total = npu("npu_add_layer_norm")(x, x, weight, bias, 1e-5)
    torch.testing.assert_close(y, fun.layer_norm(2 * x, (32,), weight, bias, 1e-5))
    torch.testing.assert_close(mean, (2 * x).mean(-1, keepdim=True))
    torch.testing.assert_close(rstd, 1 / ((2 * x).var(-1, correction=0, keepdim=True) + 1e-5).sqrt())
    assert torch.equal(total, 2 * x)


# --- activations --------------------------------------------------------------------------------------------

SILU1 = 1 / (1 + math.exp(-1))
GELU1 = 0.8413447


def test_swiglu_activates_the_first_half():
    assert flat(npu("npu_swiglu")(torch.tensor([[1.0, 10.0]]))) == pytest.approx([10 * SILU1])
    assert flat(npu("npu_swiglu")(torch.tensor([[1.0], [10.0]]), dim=0)) == pytest.approx([10 * SILU1])


def test_geglu_activates_the_second_half_unless_told_otherwise():
    x = torch.tensor([[10.0, 1.0]])
    product, gelu = npu("npu_geglu")(x, approximate=0)
    assert flat(product) == pytest.approx([10 * GELU1])
    assert flat(gelu) == pytest.approx([GELU1])
    left, _ = npu("npu_geglu")(x.flip(-1), approximate=0, activate_left=True)
    assert flat(left) == pytest.approx([10 * GELU1])
    tanh, _ = npu("npu_geglu")(x)
    assert flat(tanh) == pytest.approx(flat(10 * fun.gelu(torch.tensor([1.0]), approximate="tanh")))
    assert flat(tanh) != pytest.approx([10 * GELU1], abs=1e-4)


def test_gelu_is_exact_unless_tanh_is_asked_for():
    x = torch.tensor([1.0])
    assert flat(npu("npu_gelu")(x)) == pytest.approx([GELU1])
    assert flat(npu("npu_gelu")(x, approximate="tanh")) == pytest.approx(
        flat(fun.gelu(x, approximate="tanh"))
    )
    assert flat(npu("npu_gelu_mul")(torch.tensor([[1.0, 10.0]]))) == pytest.approx([10 * GELU1])


def test_clipped_swiglu_alternates_by_default_and_clips_each_side_its_own_way():
    op = npu("npu_clipped_swiglu")
    x = torch.tensor([[1.0, 2.0, 9.0, -9.0]])
    first = 1 / (1 + math.exp(-1.702)) * 3
    second = 7 / (1 + math.exp(-7 * 1.702)) * (-7 + 1)
    assert flat(op(x)) == pytest.approx([first, second])
    apart = torch.tensor([[1.0, 9.0, 2.0, -9.0]])
    assert flat(op(apart, interleaved=False)) == pytest.approx([first, second])
    low = torch.tensor([[-20.0, 0.0]])
    assert flat(op(low, alpha=0.0)) == pytest.approx([-10])  # the gate has no lower bound


def test_ffn_multiplies_activates_and_multiplies():
    op = npu("npu_ffn")
    x = torch.tensor([[1.0, 2.0]], dtype=F16)
    first = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=F16)
    second = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=F16)
    assert flat(op(x, first, second, "relu")) == [1, 2]
    assert flat(op(x, first, second, "relu", bias1=torch.tensor([0.0, 3.0]).to(F16))) == [5, 10]
    gated = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=F16)  # gate 1, up 2
    assert flat(op(x, gated, torch.ones(1, 1, dtype=F16), "swiglu")) == pytest.approx([2 * SILU1], rel=1e-3)
    assert flat(op(x, gated, torch.ones(1, 1, dtype=F16), "reglu")) == [2]
    with pytest.raises(NotModelledError, match="expert_tokens"):
        op(x, first, second, "relu", expert_tokens=[1])


# --- products and formats -----------------------------------------------------------------------------------


def test_linear_multiplies_by_the_transposed_weight():
    x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert flat(npu("npu_linear")(x, weight, torch.tensor([0.0, 0.0, 10.0]))) == [1, 2, 13]


def test_transpose_batchmatmul_swaps_batch_and_rows_in_its_result():
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16, 32)
    op = npu("npu_transpose_batchmatmul")
    out = op(x, weight, perm_x1=[1, 0, 2])
    torch.testing.assert_close(out, torch.einsum("mbk,bkn->mbn", x, weight))
    plain = op(x.transpose(0, 1).contiguous(), weight)
    torch.testing.assert_close(plain, out)
    parts = op(x, weight, perm_x1=[1, 0, 2], batch_split_factor=2)
    assert tuple(parts.shape) == (2, 5, 48)
    torch.testing.assert_close(parts[1, 2], out[2].flatten()[48:])


def test_the_fractal_format_holds_blocks_of_sixteen_rows_by_a_strip():
    x = torch.arange(18 * 34, dtype=F16).view(18, 34)
    storage = to_fractal(x)
    assert tuple(storage.shape) == (3, 2, 16, 16)
    assert storage[1, 0, 2, 3] == x[2, 19]  # strip 1 starts at column 16
    assert storage[0, 1, 1, 0] == x[17, 0]
    assert storage[2, 1, 15, 15] == 0  # padding
    assert torch.equal(from_fractal(storage, 18, 34), x)
    assert tuple(to_fractal(x.to(I8)).shape) == (2, 2, 16, 32)


def test_a_format_cast_changes_no_value():
    x = torch.randn(4, 4)
    cast = npu("npu_format_cast")(x, 29)
    assert torch.equal(cast, x)
    assert cast.data_ptr() != x.data_ptr()


# --- quantisers ---------------------------------------------------------------------------------------------


def test_dynamic_quant_scales_each_row_to_127():
    y, scale = npu("npu_dynamic_quant")(torch.tensor([[1.0, -2.0], [0.0, 0.0]], dtype=F16))
    assert y.tolist() == [[64, -127], [0, 0]]
    assert flat(scale) == pytest.approx([2 / 127, 0])
    smooth, scale = npu("npu_dynamic_quant")(
        torch.tensor([[1.0, -2.0]]), smooth_scales=torch.tensor([4.0, 1.0])
    )
    assert smooth.tolist() == [[127, -64]]


def test_quantize_divides_unless_div_mode_is_off():
    op = npu("npu_quantize")
    x = torch.tensor([[1.0, 2.0], [3.0, 300.0]])
    scales = torch.tensor([0.5, 2.0])
    assert op(x, scales, torch.tensor([1, 1], dtype=torch.int32), 12).tolist() == [
        [3, 2],
        [7, 127],
    ]  # along axis 1
    assert op(x, scales, None, 12, 0).tolist() == [[2, 4], [2, 127]]
    assert op(x, scales, torch.tensor([1.0, 1.0]), 12, -1, False).tolist() == [[2, 5], [2, 127]]
    assert op(x, scales, None, 13).dtype == torch.uint8
    assert op(x, scales, None, torch.qint8).dtype == I8


def test_anti_quant_adds_its_offset_before_it_scales():
    out = npu("npu_anti_quant")(
        torch.tensor([1, 2, 3, 4], dtype=I8), torch.tensor([2.0]), offset=torch.tensor([2.0])
    )
    assert flat(out) == [6, 8, 10, 12]  # the example of the operator's page
    assert out.dtype == F16


def test_quant_matmul_returns_int8_unless_asked():
    op = npu("npu_quant_matmul")
    x1, x2 = torch.tensor([[10, 20]], dtype=I8), torch.tensor([[1, 10], [2, 10]], dtype=I8)
    scale = torch.tensor([0.5, 2.0])
    assert op(x1, x2, scale).tolist() == [[25, 127]]
    assert op(x1, x2, scale).dtype == I8
    assert op(x1, x2, scale, output_dtype=5).tolist() == [[25, 600]]
    bias = torch.tensor([2, -100], dtype=torch.int32)
    assert op(x1, x2, scale, bias=bias, output_dtype=5).tolist() == [[26, 400]]  # before the scale
    assert op(x1, x2, scale, bias=bias.float(), output_dtype=15).tolist() == [[27, 500]]  # after it
    assert op(x1, x2, scale, pertoken_scale=torch.tensor([2.0]), output_dtype=5).tolist() == [[50, 1200]]
    assert op(x1, x2, scale, offset=torch.tensor([-1.0, -1.0])).tolist() == [[24, 127]]
    packed = scale.view(torch.int32).to(torch.int64) | (1 << 46)
    assert op(x1, x2, packed, output_dtype=5).tolist() == [[25, 600]]
    assert op(x1, x2, scale, output_dtype=3).tolist() == [[50, 300]]


def test_weight_quant_batchmatmul_adds_its_offset_before_it_scales():
    op = npu("npu_weight_quant_batchmatmul")
    x = torch.tensor([[1.0, 2.0]], dtype=F16)
    weight = torch.tensor([[1, 3], [2, 4]], dtype=I8)
    scale, offset = torch.tensor([0.5, 2.0], dtype=F16), torch.tensor([1.0, -1.0], dtype=F16)
    # columns: (1+1)*.5 + 2*(2+1)*.5 = 4 and (3-1)*2 + 2*(4-1)*2 = 16
    assert op(x, weight, scale, offset).tolist() == [[4, 16]]
    assert op(x, weight, scale, offset, bias=torch.tensor([1.0, 1.0]).to(F16)).tolist() == [[5, 17]]
    groups = torch.tensor([[1.0], [10.0]], dtype=F16)
    wide = torch.ones(1, 64, dtype=F16)
    assert op(wide, torch.ones(64, 1, dtype=I8), groups, antiquant_group_size=32).tolist() == [[352]]


# --- sampling -----------------------------------------------------------------------------------------------

INF = float("inf")


def test_top_k_keeps_ties_and_comes_before_top_p():
    op = npu("npu_top_k_top_p")
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    assert op(logits, k=torch.tensor([2], dtype=torch.int32)).tolist() == [[-INF, 3, 2, 2]]
    assert op(logits, k=torch.tensor([1], dtype=torch.int32)).tolist() == [[-INF, 3, -INF, -INF]]


def test_top_p_drops_the_smallest_whose_mass_is_at_most_one_minus_p():
    op = npu("npu_top_k_top_p")
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log()
    assert op(logits, torch.tensor([0.8])).isneginf().tolist() == [[True, False, False]]
    assert op(logits, torch.tensor([0.6])).isneginf().tolist() == [[True, True, False]]
    assert op(logits, torch.tensor([0.0])).isneginf().tolist() == [[True, True, False]]  # the largest stays
    assert op(logits, torch.tensor([1.0])).isneginf().tolist() == [[False] * 3]
    even = torch.zeros(1, 4)  # masses 0.25, 0.5, 0.75, 1 in ascending order: 0.5 is at most 1 - 0.5
    assert op(even, torch.tensor([0.5])).isneginf().tolist() == [[True, True, False, False]]


def test_top_p_is_the_second_argument_and_sees_what_top_k_left():
    op = npu("npu_top_k_top_p")
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the two largest, 0.3 has 3/7 of the mass: kept for p = 0.6 (3/7 > 0.4), dropped for p = 0.5.
    k = torch.tensor([2], dtype=torch.int32)
    assert op(logits, torch.tensor([0.6]), k).isneginf().tolist() == [[False, False, True, True]]
    assert op(logits, torch.tensor([0.5]), k).isneginf().tolist() == [[False, True, True, True]]


# --- one launch for the query, key and value projections' end -----------------------------------------------


def fused_case(dtype=F16, q_heads=2, tokens=2):
    made = torch.Generator().manual_seed(3)
    qkv = torch.randn(tokens, (q_heads + 2) * 128, generator=made).to(dtype)
    q_gamma, k_gamma = torch.randn(128, generator=made).to(dtype), torch.randn(128, generator=made).to(dtype)
    angles = torch.randn(tokens, 64, generator=made)
    cos, sin = (torch.cat([one, one], -1).to(dtype) for one in (angles.cos(), angles.sin()))
    return qkv, q_gamma, k_gamma, cos, sin


def run_fused(qkv, q_gamma, k_gamma, cos, sin, index, *caches, q_heads=2, **named):
    tokens = qkv.shape[0]
    q_out = torch.zeros(tokens, q_heads * 128, dtype=qkv.dtype)
    kept = npu("npu_qkv_rms_norm_rope_cache")(
        qkv,
        q_gamma,
        k_gamma,
        cos,
        sin,
        index,
        q_out,
        *caches,
        [tokens, 1, q_heads + 2, 128],
        [q_heads, 1, 1],
        **named,
    )
    return q_out, kept


def test_fused_qkv_norms_turns_and_writes_as_the_single_operators_do():
    qkv, q_gamma, k_gamma, cos, sin = fused_case()
    caches = torch.zeros(2, 8, 4, 16, dtype=F16), torch.zeros(2, 8, 4, 16, dtype=F16)
    q_out, kept = run_fused(
        qkv, q_gamma, k_gamma, cos, sin, torch.tensor([5, -1]), *caches, is_output_qkv=True
    )
    q, k, v = qkv.split([256, 128, 128], dim=-1)

    def turned(x, gamma):
        normed = fun.rms_norm(x.float().unflatten(-1, (-1, 128)), (128,), gamma.float(), 1e-6)
        return npu("npu_rotary_mul")(normed, cos.float().unsqueeze(1), sin.float().unsqueeze(1)).flatten(1)

    torch.testing.assert_close(q_out, turned(q, q_gamma).to(F16), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(kept[1], turned(k, k_gamma).to(F16), atol=2e-3, rtol=2e-3)
    assert torch.equal(kept[2], v)
    assert torch.equal(caches[0][1, :, 1].flatten(), kept[1][0])  # slot 5 of blocks of 4
    assert torch.equal(caches[1][1, :, 1].flatten(), v[0])
    assert int((caches[1] != 0).any(-1).sum()) == 8  # the row of slot -1 was skipped
    _, nothing = run_fused(qkv, q_gamma, k_gamma, cos, sin, torch.tensor([5, -1]), *caches)
    assert nothing == (None, None, None)


def test_fused_qkv_divides_by_its_scales_when_the_caches_are_int8():
    qkv, q_gamma, k_gamma, cos, sin = fused_case()
    caches = torch.zeros(2, 4, 4, 32, dtype=I8), torch.zeros(2, 4, 4, 32, dtype=I8)
    scale = torch.full((1, 128), 0.5)
    run_fused(qkv, q_gamma, k_gamma, cos, sin, torch.tensor([0, 1]), *caches, k_scale=scale, v_scale=scale)
    expected = torch.round(qkv[0, -128:].float() / 0.5).clamp(-128, 127)
    assert torch.equal(caches[1][0, :, 0].flatten().float(), expected)
