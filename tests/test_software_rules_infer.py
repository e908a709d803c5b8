"""npu_fused_infer_attention_score as the software NPU computes it: values by hand, and by torch's own attention.

The literals use values that are one-hot, so a result names the positions that were attended to and how much; each
would come out differently with the mask's polarity, its alignment, a window's end, the lengths' form, the scale or
the order of heads turned round.
"""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from atbx.testing.software_npu.rules import RULES, NotModelledError

V1 = RULES["npu::npu_fused_infer_attention_score"].function
V2 = RULES["npu::npu_fused_infer_attention_score_v2"].function
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
F16 = torch.float16


def one_hot_values(slots: int, heads: int = 1, size: int = 16) -> torch.Tensor:
    """Values [S, K, D] whose row s is 1 in element s: a result is then the row of probabilities."""
    return torch.eye(size, dtype=F16)[:slots].unsqueeze(1).expand(slots, heads, size).contiguous()


def probabilities(out: torch.Tensor, slots: int) -> list[float]:
    return [round(float(one), 3) for one in out.flatten()[:slots]]


def prefill(tokens: int, slots: int, **named):
    """Uniform scores over one-hot values, BSND: what is left after the masks is shared evenly. [T, S]."""
    q = torch.zeros(1, tokens, 1, 16, dtype=F16)
    k = torch.zeros(1, slots, 1, 16, dtype=F16)
    v = one_hot_values(slots).unsqueeze(0)
    out, _ = V2(q, k, v, num_query_heads=1, input_layout="BSND", **named)
    return [[round(float(one), 3) for one in row[:slots]] for row in out[0, :, 0]]


# --- masks and modes ----------------------------------------------------------------------------------------


def test_a_mask_value_of_one_takes_the_position_away():
    mask = torch.tensor([[[1, 0, 0], [0, 0, 1]]], dtype=torch.bool)
    assert prefill(2, 3, atten_mask=mask) == [[0, 0.5, 0.5], [0.5, 0.5, 0]]


def test_mode_0_without_a_mask_is_full_attention_and_ignores_the_band():
    third = [0.333] * 3
    assert prefill(2, 3, next_tokens=0, pre_tokens=0) == [third, third]


def test_mode_0_with_a_mask_also_cuts_the_band_from_the_top_left():
    mask = torch.zeros(1, 2, 3, dtype=torch.int8)
    assert prefill(2, 3, atten_mask=mask, next_tokens=0) == [[1, 0, 0], [0.5, 0.5, 0]]
    assert prefill(2, 3, atten_mask=mask, pre_tokens=0) == [[0.333] * 3, [0, 0.5, 0.5]]


def test_mode_1_ignores_the_band():
    mask = torch.zeros(1, 2, 3, dtype=torch.uint8)
    assert prefill(2, 3, atten_mask=mask, sparse_mode=1, next_tokens=0, pre_tokens=0) == [[0.333] * 3] * 2


def test_mode_2_is_causal_from_the_top_left():
    assert prefill(2, 4, atten_mask=TRIANGLE, sparse_mode=2) == [[1, 0, 0, 0], [0.5, 0.5, 0, 0]]


def test_mode_3_is_causal_from_the_bottom_right():
    assert prefill(2, 4, atten_mask=TRIANGLE, sparse_mode=3) == [[0.333, 0.333, 0.333, 0], [0.25] * 4]


def test_mode_4_keeps_both_ends_of_its_band_from_the_bottom_right():
    # A window of 2 tokens, the own one included, is pre_tokens=1.
    expected = [[0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]
    assert prefill(2, 4, atten_mask=TRIANGLE, sparse_mode=4, pre_tokens=1, next_tokens=0) == expected
    forward = [[0, 0, 0.5, 0.5], [0, 0, 0, 1]]
    assert prefill(2, 4, atten_mask=TRIANGLE, sparse_mode=4, pre_tokens=0, next_tokens=1) == forward


def test_an_inverted_compressed_mask_shows():
    # Ones at and below the diagonal (torch's own sense) leave the future, and nothing to the last row.
    future = prefill(3, 3, atten_mask=~TRIANGLE, sparse_mode=3)
    assert future[0] == [0, 0.5, 0.5]
    assert future[1] == [0, 0, 1]
    assert all(math.isnan(one) for one in future[2])


def test_modes_beyond_the_matrix_reach_over_long_sequences():
    tokens = 2300
    q, k = torch.zeros(1, tokens, 1, 16, dtype=F16), torch.zeros(1, tokens, 1, 16, dtype=F16)
    v = torch.zeros(1, tokens, 1, 16, dtype=F16)
    v[0, 0, 0, 0], v[0, -1, 0, 1] = 1.0, 1.0
    out, _ = V2(q, k, v, num_query_heads=1, input_layout="BSND", atten_mask=TRIANGLE, sparse_mode=3)
    assert float(out[0, 2200, 0, 0]) == pytest.approx(1 / 2201, rel=2e-3)  # still sees slot 0, 2200 back
    assert float(out[0, 2200, 0, 1]) == 0.0  # does not see the last slot
    window, _ = V2(q, k, v, num_query_heads=1, input_layout="BSND", atten_mask=TRIANGLE, sparse_mode=4,
                   pre_tokens=2099, next_tokens=0)  # fmt: skip
    assert float(window[0, 2099, 0, 0]) == pytest.approx(1 / 2100, rel=2e-3)
    assert float(window[0, 2100, 0, 0]) == 0.0


def test_a_row_without_any_position_is_not_a_number_unless_rows_are_corrected():
    mask = torch.tensor([[[1, 1], [0, 0]]], dtype=torch.bool)
    rows = prefill(2, 2, atten_mask=mask)
    assert all(math.isnan(one) for one in rows[0])
    assert rows[1] == [0.5, 0.5]
    assert prefill(2, 2, atten_mask=mask, inner_precise=2)[0] == [0, 0]


# --- one query row ------------------------------------------------------------------------------------------


def test_with_one_query_row_modes_and_bands_have_no_effect():
    quarter = [[0.25] * 4]
    assert prefill(1, 4, atten_mask=TRIANGLE, sparse_mode=4, pre_tokens=0, next_tokens=0) == quarter
    assert prefill(1, 4, atten_mask=TRIANGLE, sparse_mode=2) == quarter
    whole = torch.tensor([[0, 0, 1, 0]], dtype=torch.bool)
    assert prefill(1, 4, atten_mask=whole, pre_tokens=0, next_tokens=0) == [[0.333, 0.333, 0, 0.333]]


def test_with_one_query_row_each_sequence_has_its_own_mask_row():
    q, k = torch.zeros(2, 1, 16, dtype=F16), torch.zeros(2, 2, 16, dtype=F16)
    v = one_hot_values(2).view(1, 2, 16).repeat(2, 1, 1)
    mask = torch.tensor([[1, 0], [0, 1]], dtype=torch.bool)
    out, _ = V1(q, k, v, num_heads=1, atten_mask=mask)
    assert probabilities(out[0], 2) == [0, 1]
    assert probabilities(out[1], 2) == [1, 0]


def test_in_tnd_one_row_sequences_do_follow_the_mode():
    q, k = torch.zeros(1, 1, 16, dtype=F16), torch.zeros(4, 1, 16, dtype=F16)
    out, _ = V2(q, k, one_hot_values(4), num_query_heads=1, input_layout="TND", atten_mask=TRIANGLE, sparse_mode=4,
                pre_tokens=1, next_tokens=0, actual_seq_qlen=[1], actual_seq_kvlen=[4])  # fmt: skip
    assert probabilities(out, 4) == [0, 0, 0.5, 0.5]


# --- lengths ------------------------------------------------------------------------------------------------


def test_lengths_are_per_sequence_in_bsnd_and_one_serves_all():
    q, k = torch.zeros(2, 2, 1, 16, dtype=F16), torch.zeros(2, 3, 1, 16, dtype=F16)
    v = one_hot_values(3).unsqueeze(0).repeat(2, 1, 1, 1)
    out, _ = V2(q, k, v, num_query_heads=1, input_layout="BSND", actual_seq_kvlen=[1, 3, 9])
    assert probabilities(out[0, 1], 3) == [1, 0, 0]
    assert probabilities(out[1, 1], 3) == [0.333] * 3
    out, _ = V2(q, k, v, num_query_heads=1, input_layout="BSND", actual_seq_kvlen=[2], actual_seq_qlen=[1])
    assert probabilities(out[1, 0], 3) == [0.5, 0.5, 0]
    assert bool(out[:, 1].isnan().all())  # rows past the query length are not defined


def test_lengths_are_cumulative_in_tnd():
    # Two sequences of 1 and 2 rows over 1 and 3 keys: per-sequence lists [1, 2], [1, 3] would name other spans.
    q, k = torch.zeros(3, 1, 16, dtype=F16), torch.zeros(4, 1, 16, dtype=F16)
    out, _ = V2(q, k, one_hot_values(4), num_query_heads=1, input_layout="TND", actual_seq_qlen=[1, 3],
                actual_seq_kvlen=[1, 4])  # fmt: skip
    assert probabilities(out[0], 4) == [1, 0, 0, 0]
    assert probabilities(out[1], 4) == [0, 0.333, 0.333, 0.333]
    assert probabilities(out[2], 4) == [0, 0.333, 0.333, 0.333]


def test_with_a_paged_cache_tnd_keeps_key_lengths_per_sequence():
    q = torch.zeros(3, 2, 64, dtype=F16)
    cache = torch.zeros(3, 16, 64, dtype=F16)
    values = torch.zeros(3, 16, 64, dtype=F16)
    values[2, 0, 0], values[0, 1, 1], values[1, 0, 2] = 1, 1, 1
    table = torch.tensor([[2, 0], [0, 0]], dtype=torch.int32)
    out, _ = V2(q, cache, values, num_query_heads=2, num_key_value_heads=1, input_layout="TND", block_table=table,
                block_size=16, actual_seq_qlen=[1, 3], actual_seq_kvlen=[1, 4])  # fmt: skip
    assert probabilities(out[0, 0], 3) == [1, 0, 0]  # slot 0 of block 2
    assert probabilities(out[1, 0], 3) == [0, 0.25, 0]  # four slots of block 0, the second of which is hot


def test_a_key_length_of_zero_gives_zeros():
    q, k = torch.ones(2, 1, 16, dtype=F16), torch.ones(2, 2, 16, dtype=F16)
    out, lse = V1(q, k, k, num_heads=1, actual_seq_lengths_kv=[0, 2], softmax_lse_flag=True)
    assert out[0].abs().sum() == 0
    assert out[1].sum() == 16
    assert tuple(lse.shape) == (2, 1, 1, 1)


def test_left_padding_starts_before_the_padding():
    q, k = torch.zeros(1, 1, 16, dtype=F16), torch.zeros(1, 4, 16, dtype=F16)
    v = one_hot_values(4).view(1, 4, 16)
    named = {"num_heads": 1, "actual_seq_lengths_kv": [2]}
    out, _ = V1(q, k, v, kv_padding_size=torch.tensor([1]), **named)
    assert probabilities(out, 4) == [0, 0.5, 0.5, 0]  # from 4 - 1 - 2 = 1
    out, _ = V1(q, k, v, kv_padding_size=torch.tensor([3]), **named)
    assert probabilities(out, 4) == [0, 0, 0, 0]  # would start before the tensor


# --- scale, heads, numerics ---------------------------------------------------------------------------------


def test_scale_is_one_unless_given():
    q = torch.zeros(1, 1, 16, dtype=F16)
    q[..., 0] = 1
    k = torch.zeros(1, 2, 16, dtype=F16)
    k[0, 1, 0] = math.log(3)
    v = one_hot_values(2).view(1, 2, 16)
    plain, _ = V1(q, k, v, num_heads=1)
    assert probabilities(plain, 2) == [0.25, 0.75]
    halved, _ = V1(q, k, v, num_heads=1, scale=0.5)
    share = math.sqrt(3) / (1 + math.sqrt(3))
    assert probabilities(halved, 2) == pytest.approx([1 - share, share], abs=2e-3)


def test_query_head_h_reads_kv_head_h_by_group():
    q, k = torch.zeros(1, 1, 4, 16, dtype=F16), torch.zeros(1, 1, 2, 16, dtype=F16)
    v = torch.zeros(1, 1, 2, 16, dtype=F16)
    v[0, 0, 0], v[0, 0, 1] = 1, 2
    out, _ = V2(q, k, v, num_query_heads=4, num_key_value_heads=2, input_layout="BSND")
    assert out[0, 0, :, 0].tolist() == [1, 1, 2, 2]  # h // 2, not h % 2


def test_probabilities_are_rounded_to_the_data_type_before_they_meet_the_values():
    # Probabilities 0.1 and 0.9 over values 9 and -1 cancel; in bfloat16 they are 0.10009765625 and 0.8984375.
    q, k = torch.zeros(1, 1, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 16, dtype=torch.bfloat16)
    q[..., 0], k[0, 1, 0] = 1, 1
    v = torch.zeros(1, 2, 16, dtype=torch.bfloat16)
    v[0, :, 0] = torch.tensor([9.0, -1.0])
    out, _ = V1(q, k, v, num_heads=1, scale=math.log(9))
    assert float(out[0, 0, 0]) == 9 * 0.10009765625 - 0.8984375 == 0.00244140625


def test_log_sum_exp_of_equal_scores_is_the_log_of_their_number():
    q, k = torch.zeros(3, 1, 16, dtype=F16), torch.zeros(5, 1, 16, dtype=F16)
    _, lse = V2(q, k, k, num_query_heads=1, input_layout="TND", actual_seq_qlen=[3], actual_seq_kvlen=[5],
                return_softmax_lse=True)  # fmt: skip
    assert tuple(lse.shape) == (3, 1, 1)
    assert lse.flatten().tolist() == pytest.approx([math.log(5)] * 3)


def test_an_additive_shift_comes_after_the_scale():
    q, k = torch.zeros(1, 1, 2, 16, dtype=F16), torch.zeros(1, 1, 2, 16, dtype=F16)
    v = one_hot_values(2).view(1, 1, 2, 16)
    shift = torch.zeros(1, 1, 2, 2, dtype=F16)
    shift[..., 1] = math.log(3)
    out, _ = V1(q, k, v, num_heads=1, input_layout="BNSD", scale=0.25, pse_shift=shift)
    assert probabilities(out[0, 0, 0], 2) == [0.25, 0.75]


def test_a_learnable_sink_takes_probability_and_gives_nothing():
    q, k = torch.zeros(1, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    out, _ = V2(q, k, torch.ones_like(k), num_query_heads=1, input_layout="TND", actual_seq_qlen=[1],
                actual_seq_kvlen=[1], learnable_sink=torch.zeros(1, dtype=torch.bfloat16))  # fmt: skip
    assert float(out[0, 0, 0]) == 0.5


# --- layouts and caches -------------------------------------------------------------------------------------


def random_case(tokens=5, slots=7, heads=4, kv_heads=2, size=16, batch=2, seed=0):
    made = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, tokens, heads, size, generator=made).to(F16)
    k = torch.randn(batch, slots, kv_heads, size, generator=made).to(F16)
    v = torch.randn(batch, slots, kv_heads, size, generator=made).to(F16)
    return q, k, v


def torch_attention(q, k, v, scale, allowed=None):
    """torch's own attention of BSND tensors in float64."""
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    return scaled_dot_product_attention(*wide, attn_mask=allowed, scale=scale, enable_gqa=True).transpose(
        1, 2
    )


def into(layout: str, x: torch.Tensor) -> torch.Tensor:
    """A BSND tensor in another layout."""
    if layout == "BSND":
        return x
    if layout == "BSH":
        return x.flatten(2)
    if layout == "BNSD":
        return x.transpose(1, 2).contiguous()
    packed = x.flatten(0, 1)
    return packed if layout == "TND" else packed.transpose(0, 1).contiguous()


def back(layout: str, x: torch.Tensor, batch: int) -> torch.Tensor:
    """A result in some layout as BSND."""
    if layout == "BSND":
        return x
    if layout == "BSH":
        return x.unflatten(2, (4, -1))
    if layout == "BNSD":
        return x.transpose(1, 2)
    if layout == "NBSD":
        return x.permute(1, 2, 0, 3)
    packed = x if layout == "TND" else x.transpose(0, 1)
    return packed.unflatten(0, (batch, -1))


@pytest.mark.parametrize(
    ("layout", "inner", "outer"),
    [
        ("BSH", "BSH", "BSH"), ("BSND", "BSND", "BSND"), ("BNSD", "BNSD", "BNSD"), ("BNSD_BSND", "BNSD", "BSND"),
        ("BSH_NBSD", "BSH", "NBSD"), ("BSND_NBSD", "BSND", "NBSD"), ("BNSD_NBSD", "BNSD", "NBSD"),
        ("TND", "TND", "TND"), ("TND_NTD", "TND", "NTD"), ("NTD_TND", "NTD", "TND"),
    ],
)  # fmt: skip
def test_layouts_agree_with_torch(layout, inner, outer):
    q, k, v = random_case()
    allowed = torch.ones(5, 7, dtype=torch.bool).tril(2)
    named = {"actual_seq_qlen": [5, 10], "actual_seq_kvlen": [7, 14]} if inner in ("TND", "NTD") else {}
    out, _ = V2(*(into(inner, x) for x in (q, k, v)), num_query_heads=4, num_key_value_heads=2, softmax_scale=0.3,
                input_layout=layout, sparse_mode=3, atten_mask=TRIANGLE, **named)  # fmt: skip
    expected = torch_attention(q, k, v, 0.3, allowed)
    torch.testing.assert_close(back(outer, out, 2).double(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("form", ["rows", "heads", "fractal"])
@pytest.mark.parametrize("layout", ["TND", "BNSD"])
def test_paged_caches_in_each_form_agree_with_torch(form, layout):
    q, k, v = random_case(tokens=1, slots=40, size=64)
    block, lengths = 16, [40, 23]
    table = torch.tensor([[5, 1, 3], [0, 4, 2]], dtype=torch.int32)
    caches = []
    for x in (k, v):
        cache = torch.full((6, block, 2, 64), float("nan"), dtype=F16)
        for sequence, length in enumerate(lengths):
            for slot in range(length):
                cache[table[sequence, slot // block], slot % block] = x[sequence, slot]
        if form == "rows":
            caches.append(cache.flatten(2))
        elif form == "heads":
            caches.append(cache.transpose(1, 2).contiguous())
        else:
            caches.append(cache.unflatten(3, (4, 16)).permute(0, 2, 3, 1, 4).contiguous())
    named = {"actual_seq_qlen": [1, 2]} if layout == "TND" else {}
    out, _ = V2(into(layout, q), *caches, num_query_heads=4, num_key_value_heads=2, softmax_scale=0.125,
                input_layout=layout, block_table=table, block_size=block, actual_seq_kvlen=lengths,
                **named)  # fmt: skip
    got = back(layout, out, 2)
    for sequence, length in enumerate(lengths):
        one = slice(sequence, sequence + 1)
        expected = torch_attention(q[one], k[one, :length], v[one, :length], 0.125)
        torch.testing.assert_close(got[one].double(), expected, atol=4e-3, rtol=4e-3)


def test_the_rope_halves_are_part_of_the_scores():
    q, k, v = random_case(size=16)
    left = [x[..., :8].contiguous() for x in (q, k)]
    right = [x[..., 8:].contiguous() for x in (q, k)]
    joined, _ = V2(q, k, v, num_query_heads=4, num_key_value_heads=2, input_layout="BSND")
    apart, _ = V2(left[0], left[1], v, query_rope=right[0], key_rope=right[1], num_query_heads=4,
                  num_key_value_heads=2, input_layout="BSND")  # fmt: skip
    assert torch.equal(joined, apart)


def test_quantised_keys_add_their_offset_before_they_scale():
    q = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    k = torch.zeros(1, 2, 32, dtype=torch.int8)
    k[0, 1, 0] = 1
    v = torch.full((1, 2, 32), 4, dtype=torch.int8)
    scale = torch.full((32,), 0.5, dtype=torch.bfloat16)
    offset = torch.full((32,), 2.0, dtype=torch.bfloat16)
    out, _ = V2(q, k, v, num_query_heads=1, dequant_scale_key=scale, dequant_offset_key=offset,
                dequant_scale_value=scale, dequant_offset_value=offset)  # fmt: skip
    assert float(out[0, 0, 0]) == 3.0  # (4 + 2) * 0.5; offset after scale would give 4


def test_the_first_form_names_the_same_things_otherwise():
    q, k, v = random_case()
    first, _ = V1(q.flatten(2), k.flatten(2), v.flatten(2), num_heads=4, num_key_value_heads=2, scale=0.3,
                  sparse_mode=3, atten_mask=TRIANGLE, actual_seq_lengths=[5, 4],
                  actual_seq_lengths_kv=[7, 6])  # fmt: skip
    second, _ = V2(q.flatten(2), k.flatten(2), v.flatten(2), num_query_heads=4, num_key_value_heads=2,
                   softmax_scale=0.3, sparse_mode=3, atten_mask=TRIANGLE, actual_seq_qlen=[5, 4],
                   actual_seq_kvlen=[7, 6])  # fmt: skip
    torch.testing.assert_close(first, second, equal_nan=True, atol=0, rtol=0)


def test_the_out_overload_writes_its_pair():
    q, k, v = random_case()
    out, lse = torch.full((2, 5, 64), float("nan"), dtype=F16), torch.full((1,), float("nan"))
    expected, _ = V1(q.flatten(2), k.flatten(2), v.flatten(2), num_heads=4, num_key_value_heads=2)
    got = V1(q.flatten(2), k.flatten(2), v.flatten(2), num_heads=4, num_key_value_heads=2,
             workspace=torch.empty(8, dtype=torch.uint8), out=[out, lse])  # fmt: skip
    assert got[0] is out
    assert torch.equal(out, expected)
    assert bool(lse.isnan().all())  # untouched: no log-sum-exp was asked for


def test_what_is_not_modelled_says_so():
    q = torch.zeros(1, 1, 16, dtype=F16)
    with pytest.raises(NotModelledError, match="quant_scale2"):
        V1(q, q, q, num_heads=1, quant_scale2=torch.ones(1))
