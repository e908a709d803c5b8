"""KV cache operators as the software NPU computes them, value by value."""

import pytest
import torch

from atbx.testing.software_npu.rules import RULES, NotModelledError

F16 = torch.float16
WRITE = RULES["atb::_npu_reshape_and_cache"].function
SISO = RULES["atb::_npu_reshape_and_cache_siso"].function
SCATTER_PA = RULES["npu::npu_scatter_pa_kv_cache"].function
SCATTER_ND = RULES["npu::npu_scatter_nd_update"].function
SCATTER_ND_ = RULES["npu::npu_scatter_nd_update_"].function
SCATTER = RULES["npu::scatter_update"].function
SCATTER_ = RULES["npu::scatter_update_"].function
GATHER = RULES["npu::npu_gather_pa_kv_cache"].function
LOAD = RULES["atb::npu_paged_cache_load"].function


def rows(tokens, heads, size):
    """Rows [T, K, D] that count up, so that a value names its token, head and element."""
    return torch.arange(tokens * heads * size, dtype=torch.float32).view(tokens, heads, size) + 1


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_a_slot_is_a_block_and_an_offset():
    key, value = rows(2, 2, 16), rows(2, 2, 8) * 10
    key_cache, value_cache = torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 8)
    WRITE(key, value, key_cache, value_cache, int32(9, 2))
    assert torch.equal(key_cache[2, 1], key[0])  # 9 = 2 * 4 + 1
    assert torch.equal(key_cache[0, 2], key[1])
    assert torch.equal(value_cache[2, 1], value[0])
    assert int((key_cache != 0).sum()) == 2 * 32


def test_negative_slots_are_skipped():
    key = rows(2, 1, 16)
    caches = torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1, 16)
    WRITE(key, key, *caches, int32(-1, 0))
    assert torch.equal(caches[0][0, 0], key[1])
    assert int((caches[0] != 0).sum()) == 16
    one = torch.zeros(2, 4, 1, 16)
    SISO(key, one, int32(5, -1))
    assert torch.equal(one[1, 1], key[0])
    assert int((one != 0).sum()) == 16


def test_strips_hold_sixteen_elements_of_a_row_each():
    key = rows(1, 2, 16)
    cache = torch.zeros(3, 2, 4, 16)
    WRITE(key, key, cache, cache.clone(), int32(9))
    assert cache[2, 0, 1].tolist() == list(range(1, 17))
    assert cache[2, 1, 1].tolist() == list(range(17, 33))
    assert int((cache != 0).sum()) == 32


def test_the_mode_of_scatter_pa_decides_the_form():
    # K=2, D=16 and block=2: both readings of the shape [3, 2, 2, 16] are possible, and give different bytes.
    key = rows(1, 2, 16)
    plain, stripped = torch.zeros(3, 2, 2, 16), torch.zeros(3, 2, 2, 16)
    SCATTER_PA(key, key, plain, plain.clone(), torch.tensor([3]), cache_mode="Norm")
    SCATTER_PA(key, key, stripped, stripped.clone(), torch.tensor([3]))
    assert torch.equal(plain[1, 1], key[0])
    assert torch.equal(stripped[1, :, 1], key[0])
    assert not torch.equal(plain, stripped)
    none = torch.zeros(3, 2, 2, 16)
    SCATTER_PA(key, key, none, none.clone(), torch.tensor([3]), cache_mode=None)
    assert torch.equal(none, plain)
    with pytest.raises(NotModelledError, match="compressing"):
        SCATTER_PA(key.unsqueeze(0), key.unsqueeze(0), none, none, torch.tensor([[3]]))


def test_scatter_nd_writes_at_its_indices():
    target = torch.zeros(3, 2)
    updates = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    copy = SCATTER_ND(target, torch.tensor([[2], [0]]), updates)
    assert copy.tolist() == [[3, 4], [0, 0], [1, 2]]
    assert target.abs().sum() == 0
    assert SCATTER_ND_(target, torch.tensor([[2, 1]]), torch.tensor([9.0])) is target
    assert target.tolist() == [[0, 0], [0, 0], [0, 9]]


def test_scatter_update_writes_along_an_axis_from_its_index_on():
    data = torch.zeros(2, 1, 4, 2)
    updates = torch.arange(1.0, 9.0).view(2, 1, 2, 2)
    copy = SCATTER(data, torch.tensor([1, 2]), updates, -2)
    assert copy[0, 0].tolist() == [[0, 0], [1, 2], [3, 4], [0, 0]]
    assert copy[1, 0].tolist() == [[0, 0], [0, 0], [5, 6], [7, 8]]
    assert data.abs().sum() == 0
    assert SCATTER_(data, torch.tensor([[1, 0]]), updates[:1], 2) is data
    assert data[1, 0].tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]


def paged():
    cache = torch.arange(4 * 2 * 1 * 16, dtype=torch.float32).view(4, 2, 1, 16)
    return cache, int32(3, 1, 0, 2).view(2, 2)


def test_gather_puts_sequences_one_after_another():
    cache, table = paged()
    key, value = torch.zeros(4, 1, 16), torch.zeros(4, 1, 16)
    GATHER(cache, cache * 2, table, int32(3, 1), key, value)
    assert torch.equal(key, torch.stack([cache[3, 0], cache[3, 1], cache[1, 0], cache[0, 0]]))
    assert torch.equal(value, key * 2)
    again = torch.zeros(4, 1, 16)
    GATHER(cache, cache, table, int32(0, 3, 4), again, value, is_seq_lens_cumsum=True)
    assert torch.equal(again, key)


def test_gather_starts_at_the_block_of_its_offset_and_fills_unknown_blocks_with_zeros():
    cache, table = paged()
    key = torch.ones(3, 1, 16)
    GATHER(cache, cache, table, int32(3), key, key.clone(), seq_offset=int32(2))
    assert torch.equal(key[:2], torch.stack([cache[1, 0], cache[1, 1]]))
    assert key[2].abs().sum() == 0  # block table has no third column


def test_gather_puts_strips_together():
    cache = torch.arange(2 * 2 * 4 * 16, dtype=torch.float32).view(2, 2, 4, 16)
    key = torch.zeros(1, 2, 16)
    GATHER(cache, cache, int32(1).view(1, 1), int32(1), key, key.clone())
    assert torch.equal(key[0], cache[1, :, 0])


def test_paged_cache_load_in_both_forms():
    cache, table = paged()
    key, value = LOAD(cache, cache * 2, table, int32(3, 1))
    assert torch.equal(key, torch.stack([cache[3, 0], cache[3, 1], cache[1, 0], cache[0, 0]]))
    assert torch.equal(value, key * 2)
    shifted, _ = LOAD(cache, cache, table, int32(2, 1), seq_starts=int32(2, 0))
    assert torch.equal(shifted, torch.stack([cache[1, 0], cache[1, 1], cache[0, 0]]))
    out = torch.zeros(4, 1, 16), torch.zeros(4, 1, 16)
    assert LOAD(cache, cache, table, int32(0, 3, 4), cumsum=True, key=out[0], value=out[1])[0] is out[0]
    assert torch.equal(out[0], key)
