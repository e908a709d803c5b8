"""What the attention operators of the software NPU refuse: each limit with a call it allows and one it refuses."""

import pytest
import torch
from software_rule_calls import A2, A910, P310, Base, check_pair, limit_named

from atbx.testing.software_npu.rules import LIMITS, first_refusal

F16, BF16 = torch.float16, torch.bfloat16
FIA, FIA2 = "npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2"


def zeros(*shape, dtype=F16):
    return torch.zeros(shape, dtype=dtype)


def triangle():
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def int32(*rows):
    return torch.tensor(rows, dtype=torch.int32)


# --- the fused infer operator -------------------------------------------------------------------------------

PREFILL = Base(FIA2, lambda: {
    "query": zeros(2, 8, 4, 64), "key": zeros(2, 16, 2, 64), "value": zeros(2, 16, 2, 64), "num_query_heads": 4,
    "num_key_value_heads": 2, "input_layout": "BSND", "softmax_scale": 0.125, "sparse_mode": 0, "inner_precise": 0,
    "block_size": 0, "actual_seq_qlen": [8, 8], "actual_seq_kvlen": [16, 9],
})  # fmt: skip
CAUSAL = Base(FIA2, lambda: {**PREFILL.make(), "atten_mask": triangle(), "sparse_mode": 3})
MASKED = Base(FIA2, lambda: {**PREFILL.make(), "atten_mask": zeros(2, 1, 8, 16, dtype=torch.bool)})
PACKED = Base(FIA2, lambda: {
    "query": zeros(6, 4, 128), "key": zeros(9, 2, 128), "value": zeros(9, 2, 128), "num_query_heads": 4,
    "num_key_value_heads": 2, "input_layout": "TND", "sparse_mode": 3, "atten_mask": triangle(), "inner_precise": 0,
    "block_size": 0, "actual_seq_qlen": [2, 6], "actual_seq_kvlen": [4, 9],
})  # fmt: skip
PACKED_MHA = Base(FIA2, lambda: {
    **PACKED.make(), "key": zeros(9, 4, 128), "value": zeros(9, 4, 128), "num_key_value_heads": 4, "inner_precise": 1,
})  # fmt: skip
PAGED = Base(FIA2, lambda: {
    "query": zeros(3, 4, 128), "key": zeros(8, 128, 256), "value": zeros(8, 128, 256), "num_query_heads": 4,
    "num_key_value_heads": 2, "input_layout": "TND", "sparse_mode": 0, "inner_precise": 0, "block_size": 128,
    "block_table": int32([1, 2], [3, 0], [7, 4]), "actual_seq_qlen": [1, 2, 3], "actual_seq_kvlen": [130, 1, 256],
})  # fmt: skip
PAGED_MHA = Base(FIA2, lambda: {
    **PAGED.make(), "num_key_value_heads": 4, "key": zeros(8, 128, 512), "value": zeros(8, 128, 512),
})  # fmt: skip
PAGED_PREFILL = Base(FIA2, lambda: {
    **PREFILL.make(), "key": zeros(8, 128, 128), "value": zeros(8, 128, 128), "block_size": 128,
    "block_table": int32([1, 2], [3, 0]), "actual_seq_kvlen": [130, 8],
})  # fmt: skip
DECODE = Base(FIA2, lambda: {
    **PREFILL.make(), "query": zeros(2, 1, 4, 64), "actual_seq_qlen": None,
})  # fmt: skip
FIRST = Base(FIA, lambda: {
    "query": zeros(2, 8, 256), "key": zeros(2, 16, 128), "value": zeros(2, 16, 128), "num_heads": 4,
    "num_key_value_heads": 2, "input_layout": "BSH", "scale": 0.125, "sparse_mode": 0, "inner_precise": 0,
    "block_size": 0, "actual_seq_lengths": [8, 8], "actual_seq_lengths_kv": [16, 9],
})  # fmt: skip


def big(*shape):
    """A tensor of a shape too large to hold, of one element's memory."""
    return torch.zeros(1, dtype=F16).expand(*shape)


INFER_CASES = [
    (PREFILL, "chip_has_the_operator", {"chip": P310}),
    (PREFILL, "query_float16_or_bfloat16", {"query": zeros(2, 8, 4, 64, dtype=torch.float32)}),
    (PREFILL, "key_and_value_of_the_query_dtype_or_quantised", {"value": zeros(2, 16, 2, 64, dtype=BF16)}),
    (MASKED, "mask_bool_or_one_byte", {"atten_mask": zeros(2, 1, 8, 16, dtype=F16)}),
    (PAGED, "block_table_int32", {"block_table": torch.zeros(3, 2, dtype=torch.int64)}),
    (PREFILL, "tensors_contiguous", {"key": zeros(2, 2, 16, 64).transpose(1, 2)}),
    (PREFILL, "known_layout", {"input_layout": "SBH"}),
    (PREFILL, "kv_heads_divide_heads_at_most_64_times", {"num_key_value_heads": 3}),
    (PREFILL, "kv_heads_divide_heads_at_most_64_times", {"num_query_heads": 65, "num_key_value_heads": 1}),
    (PREFILL, "heads_agree_with_the_shapes", {"num_query_heads": 8, "num_key_value_heads": 2}),
    (PREFILL, "heads_agree_with_the_shapes", {"num_key_value_heads": 4}),
    (FIRST, "heads_agree_with_the_shapes", {"num_heads": 3, "num_key_value_heads": 1}),
    (PREFILL, "key_and_value_of_one_shape", {"value": zeros(2, 16, 2, 32)}),
    (PREFILL, "batch_heads_and_head_size_in_range", {"query": zeros(2, 8, 4, 528)}),
    (PREFILL, "batch_heads_and_head_size_in_range", {"num_query_heads": 258}),
    (PREFILL, "batch_heads_and_head_size_in_range", {"query": big(65537, 8, 4, 64)}),
    (PREFILL, "head_size_multiple_of_16", {"query": zeros(2, 8, 4, 72)}),
    (PREFILL, "row_width_below_65535", {"query": big(2, 8, 256, 256), "num_query_heads": 256}),
    (DECODE, "kv_length_in_range", {"key": big(2, 262145, 2, 64), "actual_seq_kvlen": None}),
    (PREFILL, "layouts_that_need_more_rows", {"input_layout": "BNSD_NBSD", "query": zeros(2, 4, 17, 64)}),
    (DECODE, "layouts_that_need_more_rows", {"input_layout": "BNSD_BSND", "query": zeros(2, 4, 1, 64)}),
    (DECODE, "inner_precise_known", {"inner_precise": 2}),
    (PREFILL, "inner_precise_known", {"inner_precise": 4}),
    (PREFILL, "length_lists_cover_the_batch", {"query": zeros(3, 8, 4, 64)}),
    (PREFILL, "length_lists_cover_the_batch", {"actual_seq_kvlen": [17, 1]}),
    (PREFILL, "length_lists_cover_the_batch", {"actual_seq_qlen": [9, 1]}),
    (PACKED, "tnd_needs_both_lists", {"actual_seq_kvlen": None}),
    (PACKED, "tnd_needs_both_lists", {"actual_seq_kvlen": [4]}),
    (PACKED, "tnd_needs_both_lists", {"actual_seq_qlen": [1] * 4097}),
    (PACKED, "tnd_lengths_cumulative", {"actual_seq_qlen": [2, 4]}),
    (PACKED, "tnd_lengths_cumulative", {"actual_seq_kvlen": [4, 5]}),
    (PACKED, "tnd_lengths_cumulative", {"actual_seq_qlen": [7, 6]}),
    (PACKED, "tnd_head_size_64_or_128", {"query": zeros(6, 4, 256), "key": zeros(9, 2, 256),
                                         "value": zeros(9, 2, 256)}),
    (PACKED_MHA, "tnd_mha_modes", {"sparse_mode": 2}),
    (PACKED_MHA, "tnd_mha_modes", {"sparse_mode": 0}),
    (PACKED_MHA, "tnd_mha_inner_precise", {"inner_precise": 2}),
    (PACKED_MHA, "tnd_mha_inner_precise", {"query": zeros(6, 4, 128, dtype=BF16)}),
    (PREFILL, "sparse_mode_known", {"sparse_mode": 5}),
    (CAUSAL, "mode_needs_a_mask", {"atten_mask": None}),
    (CAUSAL, "compressed_mask_2048", {"atten_mask": zeros(8, 16, dtype=torch.bool)}),
    (MASKED, "whole_mask_shape", {"atten_mask": zeros(1, 1, 1, 16, dtype=torch.bool)}),
    (MASKED, "whole_mask_shape", {"atten_mask": triangle()}),
    (PAGED_PREFILL, "paged_cache_form", {"key": zeros(8, 2, 128, 64)}),
    (PAGED, "paged_cache_form", {"key": zeros(8, 128, 2, 128)}),
    (PAGED_MHA, "tnd_mha_paged_cache_of_rows", {"key": zeros(8, 4, 128, 128)}),
    (PAGED, "paged_row_at_most_65535", {"key": big(8, 128, 65536)}),
    (PAGED, "paged_block_size", {"block_size": 64}),
    (PAGED_PREFILL, "paged_block_size", {"block_size": 64, "key": zeros(8, 64, 128)}),
    (PAGED, "paged_needs_kv_lengths", {"actual_seq_kvlen": None}),
    (PAGED, "block_table_covers_the_batch", {"block_table": int32([1], [3], [7])}),
    (PAGED, "block_table_covers_the_batch", {"block_table": int32([1, 2], [3, 0])}),
    (PAGED, "cache_holds_every_sequence", {"key": zeros(4, 128, 256)}),
    (PAGED, "paged_cache_below_2_31_elements", {"key": big(2**16, 128, 256)}),
    (PAGED, "paged_without_left_padding", {"kv_padding_size": torch.tensor([0])}),
    (PAGED, "block_ids_in_range", {"block_table": int32([1, 2], [3, 0], [7, 8])}),
    (PAGED, "block_ids_in_range", {"block_table": int32([1, 2], [-1, 0], [7, 4])}),
    (PREFILL, "no_bfloat16_on_310p_and_910a", {"query": zeros(2, 8, 4, 64, dtype=BF16), "chip": P310}),
]  # fmt: skip


@pytest.mark.parametrize(("base", "name", "changes"), INFER_CASES)
def test_fused_infer_limit(base, name, changes):
    check_pair(base, name, changes)


def test_unused_block_ids_are_never_looked_at():
    assert first_refusal(PAGED.call(block_table=int32([1, 2], [3, 99], [7, 4])), "execution") is None


def test_every_limit_of_the_fused_infer_operator_has_a_case():
    cased = {name for _, name, _ in INFER_CASES}
    assert {one.name for one in LIMITS[FIA2]} <= cased
    assert {one.name for one in LIMITS[FIA]} <= cased


def test_codes_are_those_of_the_real_device():
    codes = {one.name: (one.code, one.when) for one in LIMITS[FIA2]}
    assert codes["query_float16_or_bfloat16"] == (161002, "launch")
    assert codes["tnd_head_size_64_or_128"] == (561002, "launch")
    assert codes["chip_has_the_operator"] == (561003, "launch")
    assert codes["block_ids_in_range"] == (507015, "execution")


def test_messages_are_in_the_manner_of_the_real_log():
    refused = limit_named(FIA2, "tnd_head_size_64_or_128")
    message = refused.check(PACKED.call(query=zeros(6, 4, 256), key=zeros(9, 2, 256), value=zeros(9, 2, 256)))
    assert message is not None
    assert message.startswith(
        "EZ9999: Inner Error! op[FusedInferAttentionScoreV2], layout TND only supports headDim"
    )
    missing = limit_named(FIA2, "chip_has_the_operator").check(PREFILL.call(chip=P310))
    assert missing is not None
    assert "Ascend310P3" in missing


# --- the older pair -----------------------------------------------------------------------------------------

PROMPT = "npu::npu_prompt_flash_attention"
INCRE = "npu::npu_incre_flash_attention"
INT_MAX = 2147483647
PFA = Base(PROMPT, lambda: {
    "query": zeros(2, 8, 64), "key": zeros(2, 8, 64), "value": zeros(2, 8, 64), "num_heads": 4, "scale_value": 0.25,
    "num_key_value_heads": 0, "input_layout": "BSH", "sparse_mode": 0, "pre_tokens": INT_MAX, "next_tokens": 0,
    "atten_mask": torch.zeros(2, 1, 8, 8, dtype=torch.bool),
}, chip=P310)  # fmt: skip
PFA_A2 = Base(PROMPT, PFA.make)
IFA = Base(INCRE, lambda: {
    "query": zeros(2, 1, 64), "key": zeros(2, 8, 32), "value": zeros(2, 8, 32), "num_heads": 4,
    "num_key_value_heads": 2, "input_layout": "BSH", "block_size": 0, "actual_seq_lengths": [8, 3],
}, chip=P310)  # fmt: skip
IFA_PAGED = Base(INCRE, lambda: {
    **IFA.make(), "key": zeros(4, 16, 32), "value": zeros(4, 16, 32), "block_table": int32([1, 2], [3, 0]),
    "block_size": 16, "actual_seq_lengths": [20, 3],
})  # fmt: skip

LEGACY_CASES = [
    (PFA, "chip_has_the_operator", {"chip": A910}),
    (IFA, "chip_has_the_operator", {"chip": A910}),
    (PFA, "legacy_dtypes", {"query": zeros(2, 8, 64, dtype=BF16)}),
    (IFA_PAGED, "legacy_dtypes", {"block_table": torch.zeros(2, 2, dtype=torch.int64)}),
    (PFA, "prompt_tensors_contiguous", {"key": zeros(2, 64, 8).transpose(1, 2)}),
    (PFA, "legacy_layout_known", {"input_layout": "SBH"}),
    (IFA, "legacy_layout_known", {"input_layout": "TND"}),
    (PFA_A2, "legacy_kv_heads", {"num_key_value_heads": 3}),
    (IFA, "legacy_heads_agree_with_the_shapes", {"input_layout": "BSND", "query": zeros(2, 1, 8, 16)}),
    (PFA, "legacy_head_size", {"query": zeros(2, 8, 96), "num_heads": 4}),
    (PFA, "legacy_batch_and_length", {"query": big(129, 8, 64)}),
    (IFA, "legacy_batch_and_length", {"key": big(2, 65537, 32)}),
    (IFA, "legacy_length_lists", {"actual_seq_lengths": [9, 3]}),
    (PFA_A2, "legacy_length_lists", {"query": zeros(3, 8, 64), "actual_seq_lengths": [1, 2]}),
    (PFA, "prompt_restrictions_on_310p", {"num_key_value_heads": 2}),
    (PFA, "prompt_restrictions_on_310p", {"actual_seq_lengths": [8, 8]}),
    (PFA, "prompt_restrictions_on_310p", {"sparse_mode": 3}),
    (PFA, "prompt_restrictions_on_310p", {"next_tokens": 1}),
    (PFA_A2, "prompt_mode_and_mask", {"sparse_mode": 3}),
    (PFA_A2, "prompt_mode_and_mask", {"sparse_mode": 1, "atten_mask": None}),
    (PFA_A2, "prompt_mode_and_mask", {"sparse_mode": 6}),
    (PFA, "prompt_mask_leaves_a_position", {"atten_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)}),
    (IFA, "incre_one_query_row", {"query": zeros(2, 2, 64)}),
    (IFA, "incre_restrictions_on_310p", {"pse_shift": zeros(2, 4, 1, 8)}),
    (IFA_PAGED, "incre_paged_cache", {"actual_seq_lengths": None}),
    (IFA_PAGED, "incre_paged_cache", {"block_size": 32}),
    (IFA_PAGED, "incre_paged_cache", {"key": zeros(4, 2, 16, 16)}),
    (IFA_PAGED, "incre_paged_cache", {"block_table": int32([1], [3])}),
    (IFA_PAGED, "incre_paged_cache", {"key": zeros(2, 16, 32)}),
    (IFA_PAGED, "incre_block_ids_in_range", {"block_table": int32([1, 4], [3, 0])}),
]


@pytest.mark.parametrize(("base", "name", "changes"), LEGACY_CASES)
def test_older_attention_limit(base, name, changes):
    check_pair(base, name, changes)


def test_every_limit_of_the_older_pair_has_a_case():
    cased = {(base.operator, name) for base, name, _ in LEGACY_CASES}
    named = {name for _, name in cased}
    assert {one.name for operator in (PROMPT, INCRE) for one in LIMITS[operator]} <= named


# --- ATB ---

PA = Base("atb::_npu_paged_attention", lambda: {
    "query": zeros(2, 4, 64), "key_cache": zeros(4, 128, 2, 64), "value_cache": zeros(4, 128, 2, 64),
    "num_kv_heads": 2, "num_heads": 4, "scale_value": 0.125, "block_table": int32([1, 2], [3, 0]),
    "context_lens": torch.tensor([130, 5], dtype=torch.int32), "out": zeros(2, 4, 64),
}, host=frozenset({"context_lens"}))  # fmt: skip
PA_STRIPS = Base(PA.operator, lambda: {
    **PA.make(), "key_cache": zeros(4, 8, 128, 16), "value_cache": zeros(4, 8, 128, 16),
}, chip=P310)  # fmt: skip
SPLIT = Base("atb::_npu_paged_attention_splitfuse", lambda: {
    **PA.make(), "query": zeros(5, 4, 64), "out": zeros(5, 4, 64), "mask": zeros(5, 256),
    "seq_len": torch.tensor([3, 2], dtype=torch.int32),
}, host=frozenset({"context_lens", "seq_len"}))  # fmt: skip
SPLIT2 = Base("atb::_npu_paged_attention_splitfuse_v2", lambda: {
    **SPLIT.make(), "key_cache": zeros(4, 8, 128, 16), "value_cache": zeros(4, 8, 128, 16),
    "mask": zeros(2048, 2048), "mask_type": 5,
}, chip=P310, host=frozenset({"seq_len"}))  # fmt: skip
QLENS = Base(
    "atb::_npu_flash_attention_qlens", lambda: {**SPLIT.make(), "mask": zeros(128, 128)}, host=SPLIT.host
)
FA = Base("atb::_npu_flash_attention", lambda: {
    "query": zeros(16, 4, 64), "key": zeros(16, 2, 64), "value": zeros(16, 2, 64), "mask": zeros(16, 16),
    "seq_len": torch.tensor([9, 7], dtype=torch.int32), "scale_value": 0.125, "num_heads": 4, "num_kv_heads": 2,
    "out": zeros(16, 4, 64),
}, host=frozenset({"seq_len"}))  # fmt: skip
FA310 = Base(FA.operator, FA.make, chip=P310, host=FA.host)
FA3 = Base("atb::_npu_flash_attention_v3", lambda: {**FA.make(), "mask": zeros(1, 128, 2048, 16), "mask_type": 3},
           chip=P310, host=FA.host)  # fmt: skip
ENCODER = Base("atb::npu_self_attention_prefix_encoder", lambda: {
    "query": zeros(5, 4, 64), "key": zeros(4, 128, 2, 64), "value": zeros(4, 128, 2, 64), "q_headnum": 4,
    "kv_headnum": 2, "block_tables": int32([1, 2], [3, 0]), "seqlen": [3, 2], "kv_seqlen": [131, 2], "qk_scale": 0.1,
})  # fmt: skip

ATB_CASES = [
    (PA, "query_and_keys_of_one_float_dtype", {"query": zeros(2, 4, 64, dtype=torch.float32)}),
    (PA, "query_and_keys_of_one_float_dtype", {"out": zeros(2, 4, 64, dtype=BF16)}),
    (PA, "atb_kv_heads_divide_heads", {"num_kv_heads": 3}),
    (PA, "atb_written_tensors_contiguous", {"out": zeros(4, 2, 64).transpose(0, 1)}),
    (FA, "packed_lengths_within_the_rows", {"seq_len": torch.tensor([9, 8], dtype=torch.int32)}),
    (FA, "query_lengths_int32_in_host_memory", {"host": frozenset()}),
    (FA, "query_lengths_int32_in_host_memory", {"seq_len": torch.tensor([9, 7])}),
    (PA, "context_lengths_int32_in_host_memory", {"host": frozenset()}),
    (PA, "context_lengths_int32_in_host_memory", {"context_lens": torch.tensor([130, 5])}),
    (FA, "whole_mask_covers_the_longest", {"mask": zeros(8, 8)}),
    (FA, "mask_of_the_query_dtype", {"mask": zeros(16, 16, dtype=torch.bool)}),
    (FA3, "flash_attention_v3_on_310p", {"chip": A2}),
    (FA3, "flash_attention_v3_on_310p", {"mask_type": 1}),
    (FA310, "packed_rows_aligned_to_16_on_310p", {"query": zeros(17, 4, 64)}),
    (ENCODER, "prefix_in_multiples_of_128", {"kv_seqlen": [132, 2]}),
    (ENCODER, "prefix_in_multiples_of_128", {"kv_seqlen": [131, 1]}),
    (SPLIT, "packed_prefill_alone_on_910a", {"chip": A910}),
    (PA, "atb_block_table_int32", {"block_table": torch.zeros(2, 2, dtype=torch.int64)}),
    (ENCODER, "atb_block_table_int32", {"block_tables": torch.zeros(2, 2, dtype=torch.int64)}),
    (PA, "query_rows_within_the_tables", {"query": zeros(3, 4, 64)}),
    (PA, "paged_head_size_at_most_256", {"query": zeros(2, 4, 288)}),
    (
        PA,
        "block_times_head_size_at_most_16384",
        {"query": zeros(2, 4, 256), "key_cache": zeros(4, 128, 2, 256)},
    ),
    (PA, "paged_head_sizes_agree", {"query": zeros(2, 4, 32)}),
    (PA_STRIPS, "fractal_caches_of_16", {"key_cache": zeros(4, 128, 2, 64)}),
    (SPLIT2, "compressed_paged_mask_on_310p", {"chip": A2}),
    (SPLIT2, "compressed_paged_mask_on_310p", {"mask": zeros(128, 128)}),
    (PA, "atb_block_ids_in_range", {"block_table": int32([1, 4], [3, 0])}),
    (QLENS, "atb_block_ids_in_range", {"block_table": int32([1, -1], [3, 0])}),
    (ENCODER, "atb_block_ids_in_range", {"block_tables": int32([1], [3])}),
]


@pytest.mark.parametrize(("base", "name", "changes"), ATB_CASES)
def test_atb_attention_limit(base, name, changes):
    check_pair(base, name, changes)


def test_every_limit_of_atb_attention_has_a_case():
    cased = {name for _, name, _ in ATB_CASES}
    operators = [name for name in LIMITS if name.startswith("atb::") and "attention" in name]
    assert {one.name for operator in operators for one in LIMITS[operator]} <= cased
