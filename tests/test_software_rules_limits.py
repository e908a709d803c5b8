"""What the operators of the software NPU other than attention refuse: each limit with a call it allows and one not."""

import itertools

import pytest
import torch
from software_rule_calls import A910, P310, Base, check_pair, limit_named

from atbx.testing.software_npu.rules import LIMITS, RULES, Call, first_refusal
from atbx.testing.software_npu.rules.chips import CHIPS, cann_at_least, family
from atbx.testing.software_npu.rules.registry import STATUSES, limit, rule
from atbx.testing.software_npu.rules.rotary import forget_rotary_table

F16, BF16, F32, I8 = torch.float16, torch.bfloat16, torch.float32, torch.int8


def zeros(*shape, dtype=F16):
    return torch.zeros(shape, dtype=dtype)


def big(*shape, dtype=F16):
    """A tensor of a shape too large to hold, of one element's memory."""
    return torch.zeros(1, dtype=dtype).expand(*shape)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


RMS = Base("npu::npu_rms_norm", lambda: {"input": zeros(2, 64), "gamma": zeros(64), "epsilon": 1e-6})
RMS310 = Base(RMS.operator, RMS.make, chip=P310)
ADD = Base("npu::npu_add_rms_norm", lambda: {"x1": zeros(2, 64), "x2": zeros(2, 64), "gamma": zeros(64)})
RMSQ = Base("npu::npu_rms_norm_quant", lambda: {
    "x": zeros(2, 64), "gamma": zeros(64), "beta": zeros(64), "scale": zeros(1), "offset": zeros(1, dtype=I8),
})  # fmt: skip
ADDQ = Base("npu::npu_add_rms_norm_quant", lambda: {
    **ADD.make(), "scales1": zeros(64, dtype=F32), "zero_points1": zeros(64, dtype=torch.int32),
})  # fmt: skip
NORMS = [
    (RMS, "input_and_gamma_dtypes_pair", {"input": zeros(2, 64, dtype=torch.int32)}),
    (RMS, "input_and_gamma_dtypes_pair", {"gamma": zeros(64, dtype=BF16)}),
    (RMS310, "input_and_gamma_dtypes_pair", {"gamma": zeros(64, dtype=F32)}),
    (RMS, "gamma_has_the_shape_of_the_last_axes", {"gamma": zeros(32)}),
    (RMS310, "last_axis_at_least_32_bytes_on_310p", {"input": zeros(2, 8), "gamma": zeros(8)}),
    (RMS310, "no_bfloat16_on_310p_and_910a", {"input": zeros(2, 64, dtype=BF16)}),
    (ADD, "residual_and_gamma_of_one_dtype", {"gamma": zeros(64, dtype=F32)}),
    (ADD, "residual_of_the_same_shape", {"x2": zeros(1, 64)}),
    (ADD, "residual_of_the_same_shape", {"x1": zeros(0, 64), "x2": zeros(0, 64)}),
    (ADD, "chip_has_the_operator", {"chip": A910}),
    (RMSQ, "quantised_norm_dtypes", {"x": zeros(2, 64, dtype=F32)}),
    (RMSQ, "one_scale_and_an_int8_offset", {"scale": zeros(64)}),
    (RMSQ, "one_scale_and_an_int8_offset", {"offset": zeros(1)}),
    (ADDQ, "quantised_norm_scale_dtypes", {"scales1": zeros(64)}),
    (ADDQ, "last_axis_at_least_32_elements_on_310p", {"chip": P310, "x1": zeros(2, 16)}),
]

ROTARY = Base("npu::npu_rotary_mul", lambda: {
    "input": zeros(2, 5, 4, 64), "r1": zeros(1, 5, 1, 64), "r2": zeros(1, 5, 1, 64), "rotary_mode": "half",
})  # fmt: skip
WIDE_ROTARY = Base(
    ROTARY.operator, lambda: {**ROTARY.make(), "r1": zeros(2, 5, 1, 64), "r2": zeros(2, 5, 1, 64)}
)
APPLY = Base("npu::npu_apply_rotary_pos_emb", lambda: {
    "query": zeros(2, 5, 4, 64), "key": zeros(2, 5, 2, 64), "cos": zeros(2, 5, 1, 64), "sin": zeros(2, 5, 1, 64),
    "layout": "BSND", "rotary_mode": "half",
})  # fmt: skip
APPLY_TND = Base(APPLY.operator, lambda: {
    "query": zeros(5, 4, 128), "key": zeros(5, 2, 128), "cos": zeros(5, 1, 128), "sin": zeros(5, 1, 128),
    "layout": "TND", "rotary_mode": "half",
})  # fmt: skip
APART = Base("npu::npu_interleave_rope", lambda: {
    "x": zeros(2, 4, 1, 64), "cos": zeros(2, 1, 1, 64), "sin": zeros(2, 1, 1, 64),
})  # fmt: skip
MROPE = Base("npu::npu_mrope", lambda: {
    "positions": torch.tensor([0, 7]), "query": zeros(2, 4 * 96), "key": zeros(2, 2 * 96),
    "cos_sin_cache": zeros(8, 64), "head_size": 96, "mrope_section": None, "rotary_mode": "half",
    "cache_mode": "default",
})  # fmt: skip
MROPE3 = Base(MROPE.operator, lambda: {
    **MROPE.make(), "query": zeros(2, 512), "key": zeros(2, 256), "cos_sin_cache": zeros(8, 128), "head_size": 128,
    "positions": torch.zeros(3, 2, dtype=torch.int64), "mrope_section": [16, 24, 24],
})  # fmt: skip
MROPE4 = Base(MROPE.operator, lambda: {
    **MROPE3.make(), "positions": torch.zeros(4, 2, dtype=torch.int64), "mrope_section": [16, 16, 16, 16],
})  # fmt: skip
ATB_ROPE = Base("atb::_npu_rotary_embedding", lambda: {
    "positions": torch.tensor([0, 7]), "query": zeros(2, 256), "key": zeros(2, 128), "head_size": 64,
    "cos_sin_cache": zeros(8, 64, dtype=F32), "is_neox_style": True,
})  # fmt: skip
ROTARIES = [
    (ROTARY, "rotary_mul_inputs", {"input": zeros(2, 5, 4, 64, dtype=I8)}),
    (ROTARY, "rotary_mul_inputs", {"input": zeros(5, 64), "r1": zeros(5, 64), "r2": zeros(5, 64)}),
    (ROTARY, "rotary_mul_head_size", {"input": zeros(2, 5, 4, 896)}),
    (ROTARY, "rotary_mul_head_size", {"input": zeros(2, 5, 4, 63)}),
    (ROTARY, "rotary_mul_tables", {"r1": zeros(1, 5, 1, 32), "r2": zeros(1, 5, 1, 32)}),
    (ROTARY, "rotary_mul_tables", {"r1": zeros(1, 3, 1, 64), "r2": zeros(1, 3, 1, 64)}),
    (WIDE_ROTARY, "rotary_mul_tables", {"rotary_mode": "interleave"}),
    (ROTARY, "rotary_mul_batch_and_heads", {"input": big(1000, 5, 4, 64)}),
    (ROTARY, "rotary_mul_batch_and_heads", {"input": big(250, 5, 4, 64), "rotary_mode": "interleave"}),
    (ROTARY, "rotary_mul_mode", {"rotary_mode": "quarter"}),
    (APPLY, "apply_rotary_one_dtype", {"cos": zeros(2, 5, 1, 64, dtype=F32)}),
    (APPLY, "apply_rotary_layout_and_mode", {"layout": "BNSD"}),
    (APPLY, "apply_rotary_layout_and_mode", {"rotary_mode": "interleave"}),
    (APPLY_TND, "apply_rotary_layout_and_mode", {"layout": "BSND"}),
    (APPLY_TND, "apply_rotary_head_size_64_or_128", {"query": zeros(5, 4, 96)}),
    (APPLY, "apply_rotary_head_size_64_or_128", {"cos": zeros(2, 5, 1, 128)}),
    (APPLY, "apply_rotary_same_rows", {"cos": zeros(1, 5, 1, 64)}),
    (APPLY, "apply_rotary_same_rows", {"sin": zeros(2, 5, 4, 64)}),
    (APART, "interleave_rope_inputs", {"x": zeros(2, 4, 1, 64, dtype=F32)}),
    (APART, "interleave_rope_inputs", {"x": zeros(4, 2, 1, 64).transpose(0, 1)}),
    (APART, "interleave_rope_head_size_64", {"x": zeros(2, 4, 1, 128)}),
    (APART, "interleave_rope_head_size_64", {"cos": zeros(2, 4, 1, 64)}),
    (MROPE, "chip_has_the_operator", {"chip": P310}),
    (MROPE, "mrope_dtypes", {"cos_sin_cache": zeros(8, 64, dtype=F32)}),
    (MROPE, "mrope_dtypes", {"positions": torch.zeros(2)}),
    (MROPE, "mrope_shapes", {"query": zeros(2, 4, 96)}),
    (MROPE, "mrope_shapes", {"query": zeros(3, 4 * 96)}),
    (MROPE, "mrope_sizes_multiples_of_32", {"head_size": 80}),
    (MROPE, "mrope_sizes_multiples_of_32", {"cos_sin_cache": zeros(8, 128)}),
    (MROPE3, "mrope_sections_known", {"mrope_section": [20, 20, 24]}),
    (MROPE3, "mrope_sections_known", {"cos_sin_cache": zeros(8, 64)}),
    (MROPE, "mrope_sections_known", {"mrope_section": [16, 24, 24]}),
    (MROPE4, "mrope_four_sections_in_default_mode", {"cache_mode": "interleave"}),
    (MROPE, "mrope_positions_in_the_table", {"positions": torch.tensor([0, 8])}),
    (ATB_ROPE, "rotary_embedding_query_and_key_of_one_dtype", {"key": zeros(2, 128, dtype=BF16)}),
    (ATB_ROPE, "rotary_embedding_outputs_contiguous", {"query": zeros(256, 2).T}),
    (ATB_ROPE, "rotary_embedding_positions_in_the_first_table", {"positions": torch.tensor([0, -1])}),
]

SWIGLU = Base("npu::npu_swiglu", lambda: {"input": zeros(2, 128), "dim": -1})
SWIGLU310 = Base(SWIGLU.operator, SWIGLU.make, chip=P310)
GELU_MUL = Base("npu::npu_gelu_mul", lambda: {"input": zeros(2, 128), "approximate": "none"})
CLIPPED = Base("npu::npu_clipped_swiglu", lambda: {"x": zeros(2, 128), "dim": -1})
FFN = Base("npu::npu_ffn", lambda: {
    "x": zeros(2, 32), "weight1": zeros(32, 128), "weight2": zeros(64, 32), "activation": "swiglu",
    "inner_precise": 1,
})  # fmt: skip
PLAIN_FFN = Base(FFN.operator, lambda: {
    "x": zeros(2, 32, dtype=BF16), "weight1": zeros(32, 64, dtype=BF16), "weight2": zeros(64, 32, dtype=BF16),
    "activation": "gelu", "inner_precise": 0,
})  # fmt: skip
ACTIVATIONS = [
    (SWIGLU, "gated_input_dtype", {"input": zeros(2, 128, dtype=I8)}),
    (SWIGLU, "swiglu_input_contiguous", {"input": zeros(128, 2).T}),
    (SWIGLU, "swiglu_input_not_empty", {"input": zeros(0, 128)}),
    (SWIGLU, "split_axis_even", {"input": zeros(2, 127)}),
    (SWIGLU, "split_axis_even", {"dim": 2}),
    (SWIGLU310, "swiglu_last_axis_multiple_of_32_on_310p", {"input": zeros(2, 48)}),
    (GELU_MUL, "gelu_mul_last_axis_at_most_1024", {"input": zeros(2, 1026)}),
    (GELU_MUL, "gelu_mul_last_axis_at_most_1024", {"input": big(200001, 2)}),
    (GELU_MUL, "gelu_approximation_known", {"approximate": "erf"}),
    (CLIPPED, "clipped_input_dtype_and_contiguity", {"x": zeros(128, 2).T}),
    (FFN, "ffn_activation_known", {"activation": "mish"}),
    (FFN, "ffn_gated_only_in_float16_high_performance", {"inner_precise": 0}),
    (FFN, "ffn_gated_only_in_float16_high_performance", {"weight1": zeros(32, 128, dtype=BF16)}),
    (PLAIN_FFN, "ffn_gated_only_in_float16_high_performance", {"activation": "swiglu"}),
    (PLAIN_FFN, "ffn_dtypes", {"inner_precise": 1}),
    (FFN, "ffn_inner_widths", {"weight2": zeros(128, 32)}),
    (PLAIN_FFN, "ffn_inner_widths", {"weight1": zeros(32, 128, dtype=BF16)}),
]

WRITE = Base("atb::_npu_reshape_and_cache", lambda: {
    "key": zeros(2, 2, 64), "value": zeros(2, 2, 64), "key_cache": zeros(4, 16, 2, 64),
    "value_cache": zeros(4, 16, 2, 64), "slot_indices": int32(63, -1),
})  # fmt: skip
WRITE_STRIPS = Base(WRITE.operator, lambda: {
    **WRITE.make(), "key_cache": zeros(4, 8, 16, 16), "value_cache": zeros(4, 8, 16, 16),
    "slot_indices": int32(63, 0),
}, chip=P310)  # fmt: skip
SISO = Base("atb::_npu_reshape_and_cache_siso", lambda: {
    "key": zeros(2, 2, 64), "key_cache": zeros(4, 16, 2, 64), "slot_indices": int32(63, -1),
})  # fmt: skip
SCATTER_PA = Base("npu::npu_scatter_pa_kv_cache", lambda: {
    "key": zeros(2, 2, 64), "value": zeros(2, 2, 64), "key_cache": zeros(4, 16, 2, 64),
    "value_cache": zeros(4, 16, 2, 64), "slot_mapping": torch.tensor([63, 0]), "cache_mode": "Norm",
})  # fmt: skip
SCATTER_NZ = Base(SCATTER_PA.operator, lambda: {
    **SCATTER_PA.make(), "key_cache": zeros(4, 8, 16, 16), "value_cache": zeros(4, 8, 16, 16), "cache_mode": "PA_NZ",
})  # fmt: skip
COMPRESSING = Base(SCATTER_PA.operator, lambda: {
    "key": zeros(2, 5, 2, 64), "value": zeros(2, 5, 2, 64), "key_cache": zeros(4, 16, 1, 64),
    "value_cache": zeros(4, 16, 1, 64), "slot_mapping": zeros(2, 2, dtype=torch.int64), "cache_mode": "Norm",
    "compress_lens": zeros(2, 2, dtype=torch.int64), "seq_lens": zeros(2, dtype=torch.int64),
})  # fmt: skip
SCATTER_ND = Base("npu::npu_scatter_nd_update_", lambda: {
    "input": zeros(8, 16), "indices": torch.tensor([[0], [7]]), "updates": zeros(2, 16),
})  # fmt: skip
SCATTER_ND310 = Base(SCATTER_ND.operator, SCATTER_ND.make, chip=P310)
SCATTER = Base("npu::scatter_update_", lambda: {
    "input": zeros(2, 4, 8, 16), "indices": torch.tensor([0, 7]), "updates": zeros(2, 4, 1, 16), "axis": -2,
})  # fmt: skip
GATHER = Base("npu::npu_gather_pa_kv_cache", lambda: {
    "key_cache": zeros(4, 16, 2, 64), "value_cache": zeros(4, 16, 2, 64), "block_tables": int32(1, 2).view(1, 2),
    "seq_lens": int32(20), "key": zeros(20, 2, 64), "value": zeros(20, 2, 64),
})  # fmt: skip
LOAD = Base("atb::npu_paged_cache_load", lambda: {
    "key_cache": zeros(4, 16, 2, 64), "value_cache": zeros(4, 16, 2, 64), "block_table": int32(1, 3).view(1, 2),
    "context_lens": int32(20), "cumsum": False,
})  # fmt: skip
CACHES = [
    (WRITE, "slots_int32", {"slot_indices": torch.tensor([63, -1])}),
    (WRITE, "rows_of_the_cache_dtype", {"key_cache": zeros(4, 16, 2, 64, dtype=BF16)}),
    (WRITE, "caches_contiguous", {"key_cache": zeros(4, 2, 16, 64).transpose(1, 2)}),
    (WRITE, "rows_fit_the_cache", {"key_cache": zeros(4, 16, 2, 32)}),
    (WRITE_STRIPS, "rows_fit_the_cache", {"key_cache": zeros(4, 16, 2, 64)}),
    (WRITE, "one_slot_a_row", {"slot_indices": int32(1)}),
    (WRITE, "chip_has_reshape_and_cache", {"chip": A910}),
    (WRITE, "slots_in_the_cache", {"slot_indices": int32(64, 0)}),
    (WRITE_STRIPS, "slots_in_the_cache", {"slot_indices": int32(63, -1)}),
    (SISO, "slots_in_the_cache", {"slot_indices": int32(0, 64)}),
    (SCATTER_PA, "scatter_pa_dtypes", {"value_cache": zeros(4, 16, 2, 64, dtype=BF16)}),
    (SCATTER_PA, "scatter_pa_dtypes", {"slot_mapping": torch.tensor([1.0, 0.0])}),
    (SCATTER_PA, "scatter_pa_contiguous", {"key": zeros(2, 64, 2).transpose(1, 2)}),
    (SCATTER_PA, "scatter_pa_mode_known", {"cache_mode": "NZ"}),
    (SCATTER_PA, "scatter_pa_shapes", {"cache_mode": "PA_NZ"}),
    (SCATTER_NZ, "scatter_pa_shapes", {"cache_mode": "Norm"}),
    (SCATTER_PA, "scatter_pa_shapes", {"slot_mapping": torch.tensor([1])}),
    (COMPRESSING, "scatter_pa_compressing_form", {"compress_lens": None}),
    (COMPRESSING, "scatter_pa_compressing_form", {"key_cache": zeros(4, 16, 2, 64)}),
    (SCATTER_PA, "scatter_pa_slots_in_the_cache", {"slot_mapping": torch.tensor([64, 0])}),
    (SCATTER_PA, "scatter_pa_slots_in_the_cache", {"slot_mapping": torch.tensor([5, 5])}),
    (SCATTER_NZ, "scatter_pa_slots_in_the_cache", {"slot_mapping": torch.tensor([64, 0])}),
    (SCATTER_PA, "chip_has_the_operator", {"chip": P310}),
    (
        SCATTER_ND310,
        "scatter_nd_dtypes",
        {"input": zeros(8, 16, dtype=I8), "updates": zeros(2, 16, dtype=I8)},
    ),
    (SCATTER_ND, "scatter_nd_dtypes", {"updates": zeros(2, 16, dtype=F32)}),
    (SCATTER_ND, "scatter_nd_dtypes", {"indices": torch.tensor([[0.0], [7.0]])}),
    (SCATTER_ND, "scatter_nd_shapes", {"indices": torch.tensor([0, 7])}),
    (SCATTER_ND, "scatter_nd_shapes", {"updates": zeros(3, 16)}),
    (SCATTER_ND, "scatter_nd_shapes", {"indices": torch.zeros(2, 3, dtype=torch.int64)}),
    (SCATTER_ND, "scatter_nd_indices_in_range", {"indices": torch.tensor([[0], [8]])}),
    (SCATTER, "scatter_update_dtypes", {"updates": zeros(2, 4, 1, 16, dtype=F32)}),
    (SCATTER, "scatter_update_shapes", {"updates": zeros(4, 1, 16)}),
    (SCATTER, "scatter_update_shapes", {"indices": torch.zeros(1, 1, 1, dtype=torch.int64)}),
    (SCATTER, "scatter_update_indices_in_range", {"indices": torch.tensor([0, 8])}),
    (GATHER, "gather_pa_dtypes", {"key": zeros(20, 2, 64, dtype=F32)}),
    (LOAD, "paged_load_int32", {"context_lens": torch.tensor([20])}),
    (LOAD, "paged_load_block_ids_in_range", {"block_table": int32(1, 4).view(1, 2)}),
]

LINEAR = Base("npu::npu_linear", lambda: {"input": zeros(2, 16), "weight": zeros(8, 16)})
CAST = Base("npu::npu_format_cast", lambda: {"input": zeros(16, 16), "acl_format": 29, "customize_dtype": 3})
BATCHED = Base("npu::npu_transpose_batchmatmul", lambda: {
    "input": zeros(5, 3, 16), "weight": zeros(3, 16, 32), "perm_x1": [1, 0, 2], "batch_split_factor": 2,
})  # fmt: skip
TOP = Base("npu::npu_top_k_top_p", lambda: {
    "logits": zeros(2, 2048, dtype=F32), "p": torch.tensor([0.5, 1.0]), "k": int32(1, 1024),
})  # fmt: skip
DYNAMIC = Base("npu::npu_dynamic_quant", lambda: {"input": zeros(2, 64), "smooth_scales": zeros(64)})
QUANTIZE = Base("npu::npu_quantize", lambda: {
    "input": zeros(2, 64), "scales": zeros(64, dtype=F32), "zero_points": zeros(64, dtype=torch.int32), "dtype": 12,
    "axis": 1, "div_mode": True,
})  # fmt: skip
MULTIPLY = Base(QUANTIZE.operator, lambda: {
    **QUANTIZE.make(), "scales": zeros(64), "zero_points": zeros(64), "div_mode": False,
})  # fmt: skip
ANTI = Base("npu::npu_anti_quant", lambda: {"x": zeros(4, 8, dtype=I8), "scale": zeros(8, dtype=F32)})
QMM = Base("npu::npu_quant_matmul", lambda: {
    "x1": zeros(2, 16, dtype=I8), "x2": zeros(16, 8, dtype=I8), "scale": zeros(8, dtype=F32),
})  # fmt: skip
WEIGHT = Base("npu::npu_weight_quant_batchmatmul", lambda: {
    "x": zeros(2, 64), "weight": zeros(64, 8, dtype=I8), "antiquant_scale": zeros(2, 8), "antiquant_group_size": 32,
})  # fmt: skip
FUSED = Base("npu::npu_qkv_rms_norm_rope_cache", lambda: {
    "qkv": zeros(2, 512), "q_gamma": zeros(128), "k_gamma": zeros(128), "cos": zeros(2, 128), "sin": zeros(2, 128),
    "index": torch.tensor([7, -1]), "q_out": zeros(2, 256), "k_cache": zeros(2, 8, 4, 16),
    "v_cache": zeros(2, 8, 4, 16), "qkv_size": [2, 1, 4, 128], "head_nums": [2, 1, 1], "cache_mode": "PA_NZ",
})  # fmt: skip
PRODUCTS = [
    (LINEAR, "linear_operands", {"weight": zeros(8, 16, dtype=F32)}),
    (LINEAR, "linear_operands", {"input": zeros(1, 2, 16)}),
    (LINEAR, "linear_operands", {"weight": zeros(16, 8)}),
    (CAST, "customize_dtype_needs_cann_9_1", {"cann": "8.5.0"}),
    (CAST, "customize_dtype_needs_cann_9_1", {"chip": P310}),
    (BATCHED, "batched_operands", {"bias": zeros(32)}),
    (BATCHED, "batched_operands", {"perm_x1": [2, 1, 0]}),
    (BATCHED, "batched_operands", {"perm_x2": [0, 2, 1], "cann": "8.3.RC1"}),
    (BATCHED, "batched_sizes", {"weight": zeros(3, 16, 40)}),
    (BATCHED, "batch_split_factor_divides_n", {"batch_split_factor": 3}),
    (TOP, "top_k_top_p_dtypes", {"k": torch.tensor([1, 1024])}),
    (TOP, "top_k_top_p_dtypes", {"p": torch.tensor([0.5, 1.0], dtype=F16)}),
    (TOP, "top_k_top_p_shapes", {"logits": zeros(2048, dtype=F32)}),
    (TOP, "top_k_top_p_shapes", {"p": torch.tensor([0.5])}),
    (TOP, "top_k_in_1_to_1024", {"k": int32(1, 1025)}),
    (TOP, "top_k_in_1_to_1024", {"k": int32(0, 1)}),
    (TOP, "top_p_in_0_to_1", {"p": torch.tensor([0.5, 1.5])}),
    (TOP, "chip_has_the_operator", {"chip": P310}),
    (DYNAMIC, "dynamic_quant_dtypes", {"input": zeros(2, 64, dtype=F32)}),
    (DYNAMIC, "dynamic_quant_shapes", {"smooth_scales": zeros(32)}),
    (DYNAMIC, "dynamic_quant_shapes", {"input": zeros(64)}),
    (QUANTIZE, "quantize_dtypes", {"scales": zeros(64)}),
    (MULTIPLY, "quantize_dtypes", {"scales": zeros(64, dtype=F32)}),
    (ANTI, "anti_quant_inputs", {"scale": zeros(8)}),
    (ANTI, "anti_quant_inputs", {"offset": zeros(4, dtype=F32)}),
    (QMM, "quant_matmul_dtypes", {"scale": zeros(8)}),
    (QMM, "quant_matmul_dtypes", {"x1": zeros(2, 16)}),
    (QMM, "quant_matmul_pertoken_scale_not_on_310p", {"chip": P310, "pertoken_scale": zeros(2, dtype=F32)}),
    (QMM, "quant_matmul_shapes", {"x2": zeros(8, 8, dtype=I8)}),
    (QMM, "quant_matmul_shapes", {"x2": big(16, 65536, dtype=I8)}),
    (QMM, "quant_matmul_shapes", {"scale": zeros(4, dtype=F32)}),
    (WEIGHT, "weight_quant_dtypes", {"antiquant_scale": zeros(2, 8, dtype=BF16)}),
    (WEIGHT, "weight_quant_dtypes", {"bias": zeros(8, dtype=F32)}),
    (WEIGHT, "weight_quant_sizes", {"weight": zeros(32, 8, dtype=I8)}),
    (WEIGHT, "weight_quant_group_size", {"antiquant_group_size": 48}),
    (WEIGHT, "weight_quant_group_size", {"antiquant_group_size": 64}),
    (WEIGHT, "weight_quant_fractal_not_eager", {"formats": {"weight": 29}}),
    (FUSED, "fused_qkv_dtypes", {"index": int32(7, -1)}),
    (FUSED, "fused_qkv_dtypes", {"k_cache": zeros(2, 8, 4, 16, dtype=BF16)}),
    (FUSED, "fused_qkv_cache_mode", {"cache_mode": "Norm"}),
    (FUSED, "fused_qkv_head_size_128", {"qkv_size": [2, 1, 4, 64]}),
    (FUSED, "fused_qkv_sizes_describe_qkv", {"head_nums": [2, 2, 1]}),
    (FUSED, "fused_qkv_sizes_describe_qkv", {"cos": zeros(2, 64)}),
    (FUSED, "fused_qkv_caches_in_strips", {"v_cache": zeros(2, 4, 1, 128)}),
    (FUSED, "fused_qkv_slots_in_the_cache", {"index": torch.tensor([8, -1])}),
    (FUSED, "fused_qkv_slots_in_the_cache", {"index": torch.tensor([3, 3])}),
    (FUSED, "fused_qkv_slots_in_the_cache", {"index": torch.tensor([-2, 3])}),
    (FUSED, "chip_has_the_operator", {"chip": P310}),
]

CASES = [*NORMS, *ROTARIES, *ACTIVATIONS, *CACHES, *PRODUCTS]


@pytest.mark.parametrize(
    ("base", "name", "changes"), CASES, ids=lambda one: one if isinstance(one, str) else ""
)
def test_limit(base, name, changes):
    forget_rotary_table()
    check_pair(base, name, changes)


def test_every_limit_outside_attention_has_a_case():
    cased = {name for _, name, _ in CASES}
    everywhere = {
        one.name for operator, limits in LIMITS.items() if "attention" not in operator for one in limits
    }
    assert everywhere <= cased


@pytest.mark.parametrize(("operator", "chips"), sorted(CHIPS.items()))
def test_chip_table(operator, chips):
    """Each operator is allowed on the chips of its page and refused with 561003 elsewhere."""
    refused = limit_named(operator, "chip_has_the_operator")
    assert refused.code == 561003
    for chip in ("Ascend910B1", "Ascend910B4", "Ascend910_9392", "Ascend310P3", "Ascend910A"):
        message = refused.check(Call(operator, {}, {}, frozenset(), chip, "9.1.0"))
        assert (message is None) == (family(chip) in chips)


def test_bfloat16_is_refused_for_every_operator_on_310p_and_910a():
    for chip in (P310, A910):
        call = Call("aten::add", {"self": zeros(2, dtype=BF16)}, {}, frozenset(), chip, "9.1.0")
        found = first_refusal(call)
        assert found is not None
        assert (found[0].code, found[0].operator) == (161002, "*")
    in_host_memory = Call("aten::add", {"self": zeros(2, dtype=BF16)}, {}, frozenset({"self"}), P310, "9.1.0")
    assert first_refusal(in_host_memory) is None
    listed = Call("aten::cat", {"tensors": [zeros(2), zeros(2, dtype=BF16)]}, {}, frozenset(), P310, "9.1.0")
    refused = first_refusal(listed)
    assert refused is not None
    assert "tensors[1]" in refused[1]


def test_atb_rotary_positions_are_held_against_the_table_of_the_first_call():
    forget_rotary_table()
    RULES["atb::_npu_rotary_embedding"].function(
        torch.tensor([0]), zeros(1, 64), zeros(1, 64), 64, zeros(4, 64), True
    )
    longer = ATB_ROPE.call(positions=torch.tensor([0, 7]))  # its own table has eight rows
    found = first_refusal(longer, "execution")
    forget_rotary_table()
    assert found is not None
    assert found[0].code == 507015
    assert "table of 4 rows" in found[1]


def test_cann_versions_order_alpha_before_rc_before_release():
    order = ["8.2.RC1", "8.3.RC1.alpha002", "8.3.RC1", "8.3.RC2", "8.3.0", "8.5.0.alpha003", "8.5.0", "9.1.0"]
    for earlier, later in itertools.pairwise(order):
        assert cann_at_least(later, earlier)
        assert not cann_at_least(earlier, later)
    with pytest.raises(ValueError, match="CANN version 'newest'"):
        cann_at_least("newest", "9.1.0")
    with pytest.raises(ValueError, match="no such product"):
        family("Tesla")


def test_each_rule_and_limit_states_its_source_and_status():
    for name, one in RULES.items():
        assert name == one.name
        assert one.source
        assert one.status in STATUSES
        assert one.function.__doc__
    for operator, limits in LIMITS.items():
        for entry in limits:
            assert entry.operator == operator
            assert entry.source
            assert entry.code in {161002, 561002, 561003, 507015, 1, 6, 8, 9}


def test_the_registry_refuses_what_would_go_unnoticed():
    with pytest.raises(ValueError, match="status 'surely'"):
        rule("npu::npu_new", source="page", status="surely")
    with pytest.raises(ValueError, match="two rules for npu::npu_rms_norm"):
        rule("npu::npu_rms_norm", source="page", status="document only")(lambda: None)
    with pytest.raises(ValueError, match="when='later'"):
        limit("npu::npu_new", code=161002, source="page", when="later")
    with pytest.raises(ValueError, match="two limits input_and_gamma_dtypes_pair"):
        limit("npu::npu_rms_norm", code=161002, source="page", name="input_and_gamma_dtypes_pair")(
            lambda call: None
        )


def test_the_rules_import_neither_torch_npu_nor_the_kernels():
    import ast
    import pathlib

    import atbx.testing.software_npu.rules as package

    allowed = {"torch", "__future__", "collections", "dataclasses", "typing", "re", "itertools", "math"}
    for path in pathlib.Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                inside = name.startswith("atbx.testing.software_npu.rules")
                assert inside or name.split(".")[0] in allowed, f"{path.name} imports {name}"
