"""ATB's attention and the older npu pair as the software NPU computes them: by hand, and by torch's own attention."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from atbx.testing.software_npu.rules import RULES, NotModelledError

F16, BF16 = torch.float16, torch.bfloat16
INT_MAX = 2147483647


def atb(name):
    return RULES[f"atb::{name}"].function


def uniform(tokens, heads=1, size=16, dtype=F16):
    return torch.zeros(tokens, heads, size, dtype=dtype)


def one_hot(slots, size=16, dtype=F16):
    return torch.eye(size, dtype=dtype)[:slots].unsqueeze(1).contiguous()


def shares(out, slots):
    return [[round(float(one), 3) for one in row[:slots]] for row in out.flatten(1)]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# --- prefill over packed rows -------------------------------------------------------------------------------


def packed(name, dtype=F16, lengths=(1, 3), **named):
    """Uniform scores over one-hot values, two packed sequences."""
    total = sum(lengths)
    out = torch.full((total, 1, 16), float("nan"), dtype=dtype)
    q = uniform(total, dtype=dtype)
    atb(name)(
        q, q, one_hot(total, dtype=dtype), scale_value=1.0, num_heads=1, num_kv_heads=1, out=out, **named
    )
    return shares(out, total)


CAUSAL_SHARES = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0.5, 0.5, 0], [0, 0.333, 0.333, 0.333]]
FULL_SHARES = [[1, 0, 0, 0], *[[0, 0.333, 0.333, 0.333]] * 3]
UPPER = torch.ones(3, 3).triu(1)


def test_lengths_are_per_sequence_and_unpad_masks_nothing():
    assert packed("_npu_flash_attention_unpad", seq_len=int32(1, 3)) == FULL_SHARES
    assert packed("_npu_flash_attention_unpad_v2", seq_len=int32(1, 3)) == FULL_SHARES


def test_a_float16_mask_is_added_as_it_is():
    mask = (UPPER * -10000).to(F16)
    assert packed("_npu_flash_attention", seq_len=int32(1, 3), mask=mask) == CAUSAL_SHARES
    # The sense of the npu operators (1 = masked) does next to nothing here.
    ones = packed("_npu_flash_attention", seq_len=int32(1, 3), mask=UPPER.to(F16))
    assert ones[1] == [0, pytest.approx(1 / (1 + 2 * math.e), abs=1e-3), pytest.approx(0.422, abs=2e-3),
                       pytest.approx(0.422, abs=2e-3)]  # fmt: skip


def test_a_bfloat16_mask_is_multiplied_by_minus_3e38_first():
    ones = packed("_npu_flash_attention", BF16, seq_len=int32(1, 3), mask=UPPER.to(BF16))
    assert [[0 if one < 0.01 else 1 for one in row] for row in ones] == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0],
                                                                         [0, 1, 1, 1]]  # fmt: skip
    added = packed("_npu_flash_attention", BF16, seq_len=int32(1, 3), mask=(UPPER * -10000).to(BF16))
    assert all(math.isnan(one) for one in added[1])  # -10000 * -3e38 is infinite


def test_a_compressed_mask_lies_along_the_diagonal_and_comes_in_strips():
    mask = (torch.ones(2048, 2048).triu(1) * -10000).to(F16)
    strips = mask.unflatten(1, (128, 16)).permute(1, 0, 2).unsqueeze(0).contiguous()
    assert strips.shape == (1, 128, 2048, 16)
    assert packed("_npu_flash_attention_v3", seq_len=int32(1, 3), mask=strips) == CAUSAL_SHARES
    assert packed("_npu_flash_attention_v3", seq_len=int32(1, 3), mask=mask) == CAUSAL_SHARES


def test_the_list_form_has_a_bias_a_head_by_default():
    bias = torch.zeros(1, 3, 3)
    bias[0, :, 2] = float("-inf")
    rows = packed("_npu_flash_attention_v2", seq_len=[1, 3], mask=bias.to(F16))
    assert rows[1] == [0, 0.5, 0.5, 0]
    assert packed("_npu_flash_attention_v2", seq_len=[1, 3], mask_type=9) == CAUSAL_SHARES
    assert packed("_npu_flash_attention_v2", seq_len=[1, 3], mask_type=0) == FULL_SHARES
    with pytest.raises(NotModelledError, match="mask type 4"):
        packed("_npu_flash_attention_v2", seq_len=[1, 3], mask_type=4)


# --- paged caches -------------------------------------------------------------------------------------------


def paged_case(tokens_of, slots_of, block=16, heads=4, kv_heads=2, size=32, blocks=6):
    made = torch.Generator().manual_seed(1)
    q = torch.randn(sum(tokens_of), heads, size, generator=made).to(F16)
    k = torch.randn(blocks, block, kv_heads, size, generator=made).to(F16)
    v = torch.randn(blocks, block, kv_heads, size, generator=made).to(F16)
    table = torch.tensor([[4, 2, 0], [5, 1, 3]], dtype=torch.int32)
    return q, k, v, table


def expected_rows(q, k, v, table, tokens_of, slots_of, scale):
    """torch's own attention, bottom-right causal, of each sequence's gathered cache."""
    rows, start = [], 0
    for sequence, (tokens, slots) in enumerate(zip(tokens_of, slots_of, strict=True)):
        keys = k[table[sequence].long()].flatten(0, 1)[:slots]
        values = v[table[sequence].long()].flatten(0, 1)[:slots]
        allowed = torch.ones(tokens, slots, dtype=torch.bool).tril(slots - tokens)
        wide = [x.double().transpose(0, 1).unsqueeze(0) for x in (q[start : start + tokens], keys, values)]
        out = scaled_dot_product_attention(*wide, attn_mask=allowed, scale=scale, enable_gqa=True)
        rows.append(out[0].transpose(0, 1))
        start += tokens
    return torch.cat(rows)


def strips(cache):
    """A plain cache [blocks, block, K, D] as [blocks, K*D/16, block, 16]."""
    return cache.flatten(2).unflatten(2, (-1, 16)).permute(0, 2, 1, 3).contiguous()


@pytest.mark.parametrize("form", ["plain", "strips"])
def test_paged_attention_reads_context_length_slots_of_its_blocks(form):
    q, k, v, table = paged_case((1, 1), (40, 17))
    caches = (k, v) if form == "plain" else (strips(k), strips(v))
    out = torch.full_like(q, float("nan"))
    atb("_npu_paged_attention")(q, *caches, 2, 4, 0.2, table, int32(40, 17), out)
    torch.testing.assert_close(
        out.double(), expected_rows(q, k, v, table, (1, 1), (40, 17), 0.2), atol=4e-3, rtol=4e-3
    )


def test_paged_attention_includes_the_token_just_written():
    values = torch.zeros(1, 16, 1, 16, dtype=F16)
    values[0, 2, 0, 0] = 1
    out = torch.empty(1, 1, 16, dtype=F16)
    atb("_npu_paged_attention")(uniform(1), values * 0, values, 1, 1, 1.0, int32(0).view(1, 1), int32(3), out)
    assert float(out[0, 0, 0]) == pytest.approx(1 / 3, abs=1e-3)


def test_paged_attention_values_may_have_another_head_size():
    values = torch.ones(1, 16, 1, 8, dtype=F16)
    out = torch.empty(1, 1, 8, dtype=F16)
    atb("_npu_paged_attention")(uniform(1), torch.zeros(1, 16, 1, 16, dtype=F16), values, 1, 1, 1.0,
                                int32(0).view(1, 1), int32(3), out)  # fmt: skip
    assert out.flatten().tolist() == [1] * 8


def test_the_list_form_of_paged_attention_adds_its_mask():
    values = one_hot(3).view(1, 3, 1, 16)
    out = torch.empty(1, 1, 16, dtype=F16)
    mask = torch.tensor([[[[0.0, float("-inf"), 0.0]]]]).to(F16)
    atb("_npu_paged_attention_v2")(uniform(1), values * 0, int32(0).view(1, 1), [3], value_cache=values, mask=mask,
                                   num_kv_heads=1, num_heads=1, mask_type=2, out=out)  # fmt: skip
    assert shares(out, 3) == [[0.5, 0, 0.5]]


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_splitfuse_has_a_mask_row_for_each_packed_row_in_both_dtypes(dtype):
    tokens, slots = (3, 1), (20, 33)
    q, k, v, table = paged_case(tokens, slots)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    mask = torch.zeros(4, 48)
    for row, last in enumerate((17, 18, 19, 32)):
        mask[row, last + 1 :] = -10000
    out = torch.full_like(q, float("nan"))
    atb("_npu_paged_attention_splitfuse")(
        q, k, v, table, int32(*slots), mask.to(dtype), int32(*tokens), 2, 4, 0.2, out
    )
    tolerance = 4e-3 if dtype == F16 else 3e-2
    expected = expected_rows(q, k, v, table, tokens, slots, 0.2)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_splitfuse_with_a_compressed_mask_on_strips():
    tokens, slots = (3, 1), (20, 33)
    q, k, v, table = paged_case(tokens, slots)
    mask = (torch.ones(2048, 2048).triu(1) * -10000).to(F16)
    out = torch.full_like(q, float("nan"))
    atb("_npu_paged_attention_splitfuse_v2")(q, strips(k), strips(v), table, int32(*slots), mask, int32(*tokens), 2, 4,
                                             0.2, out=out)  # fmt: skip
    expected = expected_rows(q, k, v, table, tokens, slots, 0.2)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("name", ["_npu_flash_attention_qlens", "_npu_flash_attention_prefix_v2"])
def test_queries_with_a_prefix_end_at_their_last_position(name):
    tokens, slots = (3, 2), (40, 17)
    q, k, v, table = paged_case(tokens, slots)
    mask = (torch.ones(128, 128).triu(1) * -10000).to(F16)
    out = torch.full_like(q, float("nan"))
    lengths = (int32(*tokens), int32(*slots)) if name.endswith("qlens") else (list(tokens), list(slots))
    atb(name)(q, k, v, table, mask, *lengths, num_kv_heads=2, num_heads=4, scale_value=0.2, out=out)
    expected = expected_rows(q, k, v, table, tokens, slots, 0.2)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=4e-3)


def test_the_prefix_encoder_is_causal_by_itself():
    tokens, slots = (3, 2), (131, 2)
    q, k, v, table = paged_case(tokens, slots, block=128)
    expected = expected_rows(q, k, v, table, tokens, slots, 0.2)
    out = atb("npu_self_attention_prefix_encoder")(q, k, v, table, list(tokens), list(slots), 4, 0.2, 2)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=4e-3)


# --- the older npu pair -------------------------------------------------------------------------------------

PROMPT = RULES["npu::npu_prompt_flash_attention"].function
INCRE = RULES["npu::npu_incre_flash_attention"].function


def prompt(tokens, slots, **named):
    q, k = uniform(tokens).view(1, 1, tokens, 16), uniform(slots).view(1, 1, slots, 16)
    out = PROMPT(q, k, one_hot(slots).view(1, 1, slots, 16), num_heads=1, input_layout="BNSD", **named)
    return shares(out[0, 0], slots)


def test_prompt_attention_cuts_the_future_as_soon_as_there_is_a_mask():
    nothing = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    assert prompt(2, 2) == [[0.5, 0.5], [0.5, 0.5]]
    assert prompt(2, 2, atten_mask=nothing) == [[1, 0], [0.5, 0.5]]
    assert prompt(2, 2, atten_mask=nothing, next_tokens=INT_MAX) == [[0.5, 0.5], [0.5, 0.5]]


def test_prompt_attention_keeps_its_modes_for_one_query_row():
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    assert prompt(1, 3, atten_mask=triangle, sparse_mode=2) == [[1, 0, 0]]
    assert prompt(1, 3, atten_mask=triangle, sparse_mode=3) == [[0.333] * 3]


def test_prompt_attention_lengths_and_scale():
    assert prompt(1, 3, actual_seq_lengths_kv=[2]) == [[0.5, 0.5, 0]]
    q = torch.zeros(1, 1, 16, dtype=F16)
    q[..., 0] = 1
    k = torch.zeros(1, 2, 16, dtype=F16)
    k[0, 1, 0] = math.log(3)
    assert shares(PROMPT(q, k, one_hot(2).view(1, 2, 16), num_heads=1), 2)[0] == [0.25, 0.75]


def test_incremental_attention_lengths_are_those_of_the_keys():
    q, k = uniform(2).view(2, 1, 16), torch.zeros(2, 3, 16, dtype=F16)
    v = one_hot(3).view(1, 3, 16).repeat(2, 1, 1)
    out = INCRE(q, k, v, num_heads=1, actual_seq_lengths=[1, 3])
    assert shares(out, 3) == [[1, 0, 0], [0.333] * 3]
    mask = torch.tensor([[0, 0, 1], [1, 0, 0]], dtype=torch.bool)
    assert shares(INCRE(q, k, v, num_heads=1, atten_mask=mask), 3) == [[0.5, 0.5, 0], [0, 0.5, 0.5]]


def test_incremental_attention_over_blocks():
    q, k, v, table = paged_case((1, 1), (40, 17))
    out = INCRE(q.unsqueeze(2), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), num_heads=4,
                num_key_value_heads=2, input_layout="BNSD", scale_value=0.2, block_table=table, block_size=16,
                actual_seq_lengths=[40, 17])  # fmt: skip
    expected = expected_rows(q, k, v, table, (1, 1), (40, 17), 0.2)
    torch.testing.assert_close(out.squeeze(2).double(), expected, atol=4e-3, rtol=4e-3)
