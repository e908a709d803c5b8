"""Rotary operators as the software NPU computes them: by hand, and by transformers' own rotations."""

import math

import pytest
import torch

from atbx.testing.software_npu.rules import RULES
from atbx.testing.software_npu.rules.rotary import forget_rotary_table

F32 = torch.float32
ROTARY_MUL = RULES["npu::npu_rotary_mul"].function
APPLY = RULES["npu::npu_apply_rotary_pos_emb"].function
INTERLEAVE = RULES["npu::npu_interleave_rope"].function
MROPE = RULES["npu::npu_mrope"].function
ATB_ROPE = RULES["atb::_npu_rotary_embedding"].function


def row(*values):
    return torch.tensor(values, dtype=F32).view(1, 1, 1, -1)


def quarter_turn(size):
    """cos and sin of 90 degrees for each pair: [x1, x2] becomes [-x2, x1]."""
    return torch.zeros(1, 1, 1, size), torch.ones(1, 1, 1, size)


def angle_table(positions, size, base=10000.0):
    """[P, size/2] angles of the usual frequencies."""
    inverse = base ** (-torch.arange(0, size, 2).float() / size)
    return torch.outer(torch.arange(positions).float(), inverse)


def test_half_mode_pairs_element_i_with_i_plus_half():
    cos, sin = quarter_turn(4)
    assert ROTARY_MUL(row(1, 2, 3, 4), cos, sin).flatten().tolist() == [-3, -4, 1, 2]


def test_interleave_mode_pairs_neighbours():
    cos, sin = quarter_turn(4)
    assert ROTARY_MUL(row(1, 2, 3, 4), cos, sin, "interleave").flatten().tolist() == [-2, 1, -4, 3]


def test_a_rotation_matrix_takes_the_place_of_the_mode():
    cos, sin = quarter_turn(2)
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert ROTARY_MUL(row(1, 2), cos, sin, "half", swap).flatten().tolist() == [2, 1]


def test_interleave_rope_takes_the_elements_apart_and_leaves_them_so():
    cos, sin = torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)
    assert INTERLEAVE(row(1, 2, 3, 4), cos, sin).flatten().tolist() == [1, 3, 2, 4]
    assert INTERLEAVE(row(1, 2, 3, 4), sin, cos).flatten().tolist() == [-2, -4, 1, 3]


def test_apply_rotary_changes_query_and_key_themselves():
    cos, sin = quarter_turn(4)
    query, key = row(1, 2, 3, 4), row(5, 6, 7, 8)
    out = APPLY(query, key, cos, sin)
    assert out[0] is query
    assert query.flatten().tolist() == [-3, -4, 1, 2]
    assert key.flatten().tolist() == [-7, -8, 5, 6]


def llama_tensors(tokens=3, heads=2, size=64):
    made = torch.Generator().manual_seed(2)
    q, k = (
        torch.randn(1, tokens, heads, size, generator=made),
        torch.randn(1, tokens, heads, size, generator=made),
    )
    angles = angle_table(tokens, size)
    return q, k, torch.cat([angles.cos(), angles.cos()], -1), torch.cat([angles.sin(), angles.sin()], -1)


@pytest.mark.oracle
def test_half_mode_agrees_with_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k, cos, sin = llama_tensors()
    expected_q, expected_k = llama.apply_rotary_pos_emb(
        q.transpose(1, 2), k.transpose(1, 2), cos.unsqueeze(0), sin.unsqueeze(0)
    )
    got = ROTARY_MUL(q, cos.view(1, 3, 1, 64), sin.view(1, 3, 1, 64))
    torch.testing.assert_close(got, expected_q.transpose(1, 2))
    APPLY(q, k, cos.view(1, 3, 1, 64), sin.view(1, 3, 1, 64))
    torch.testing.assert_close(q, expected_q.transpose(1, 2))
    torch.testing.assert_close(k, expected_k.transpose(1, 2))


@pytest.mark.oracle
def test_interleave_mode_agrees_with_transformers_gptj():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    q, _, _, _ = llama_tensors()
    angles = angle_table(3, 64)
    expected = gptj.apply_rotary_pos_emb(q, angles.sin().unsqueeze(0), angles.cos().unsqueeze(0))
    wide = [x.repeat_interleave(2, -1).view(1, 3, 1, 64) for x in (angles.cos(), angles.sin())]
    torch.testing.assert_close(ROTARY_MUL(q, *wide, "interleave"), expected)


# --- npu_mrope ----------------------------------------------------------------------------------------------


def halves(angles):
    return torch.cat([angles.cos(), angles.sin()], -1)


def test_mrope_looks_its_angles_up_by_position():
    # Position 1 turns by 90 degrees, position 0 not at all: cos in the first half of the table, sin in the second.
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    out, key = MROPE(torch.tensor([0, 1]), q, q * 2, table, 4)
    assert out.tolist() == [[1, 2, 3, 4], [-3, -4, 1, 2]]
    assert key.tolist() == [[2, 4, 6, 8], [-6, -8, 2, 4]]
    assert q.tolist() == [[1, 2, 3, 4]] * 2  # fresh results, nothing in place


def test_mrope_interleaves_neighbours_when_asked():
    table = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert MROPE(torch.tensor([0]), q, q, table, 4, rotary_mode="interleave")[0].tolist() == [[-2, 1, -4, 3]]


def test_mrope_turns_only_the_first_elements_of_each_head():
    table = torch.tensor([[0.0, 1.0]])  # two elements a head, by 90 degrees
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]])
    out, _ = MROPE(torch.tensor([0]), q, q, table, 4)
    assert out.tolist() == [[-2, 1, 3, 4, -6, 5, 7, 8]]


@pytest.mark.oracle
def test_mrope_agrees_with_transformers_on_plain_positions():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k, cos, sin = llama_tensors(tokens=5)
    chosen = torch.tensor([4, 0, 2])
    expected_q, _ = llama.apply_rotary_pos_emb(
        q[:, :3].transpose(1, 2), k[:, :3].transpose(1, 2), cos[chosen].unsqueeze(0), sin[chosen].unsqueeze(0)
    )
    got, _ = MROPE(chosen, q[0, :3].flatten(1), k[0, :3].flatten(1), halves(angle_table(5, 64)), 64)
    torch.testing.assert_close(got.view(1, 3, 2, 64), expected_q.transpose(1, 2))


def test_mrope_sections_take_a_part_of_the_width_from_each_position_row():
    angles = torch.tensor([[0.0] * 4, [math.pi / 2] * 4])
    q = torch.tensor([[1.0] * 4 + [2.0] * 4])
    positions = torch.tensor([[1], [0], [1]])
    out, _ = MROPE(positions, q, q, halves(angles), 8, mrope_section=[1, 2, 1])
    # The first and last of the four pairs turn by 90 degrees ([1, 2] to [-2, 1]), the middle two do not.
    torch.testing.assert_close(out, torch.tensor([[-2.0, 1, 1, -2, 1, 2, 2, 1]]), atol=1e-6, rtol=0)


def test_mrope_interleaved_sections_alternate():
    angles = torch.tensor([[0.0] * 6, [math.pi / 2] * 6])
    q = torch.tensor([[1.0] * 6 + [2.0] * 6])
    positions = torch.tensor([[0], [1], [0]])
    out, _ = MROPE(positions, q, q, halves(angles), 12, mrope_section=[2, 2, 2], cache_mode="interleave")
    turned = [one < 0 for one in out[0, :6].tolist()]
    assert turned == [False, True, False, False, True, False]


# --- ATB's rotary embedding ---


@pytest.fixture
def fresh_process():
    forget_rotary_table()
    yield
    forget_rotary_table()


@pytest.mark.usefixtures("fresh_process")
def test_atb_rotary_turns_in_place_in_both_styles():
    table = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    q, k = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[5.0, 6.0, 7.0, 8.0]])
    assert ATB_ROPE(torch.tensor([0]), q, k, 4, table, True) is None
    assert q.tolist() == [[-3, -4, 1, 2]]
    assert k.tolist() == [[-7, -8, 5, 6]]
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    ATB_ROPE(torch.tensor([0]), q, k, 4, table, False)
    assert q.tolist() == [[-2, 1, -4, 3]]


@pytest.mark.usefixtures("fresh_process")
def test_atb_rotary_keeps_the_first_table_of_the_process():
    still, turning = torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    ATB_ROPE(torch.tensor([0]), q, q.clone(), 4, still, True)
    ATB_ROPE(torch.tensor([0]), q, q.clone(), 4, turning, True)
    assert q.tolist() == [[1, 2, 3, 4]]  # the second model's table was never looked at
    forget_rotary_table()
    ATB_ROPE(torch.tensor([0]), q, q.clone(), 4, turning, True)
    assert q.tolist() == [[-3, -4, 1, 2]]


@pytest.mark.usefixtures("fresh_process")
def test_atb_rotary_takes_a_copy_of_its_table():
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    ATB_ROPE(torch.tensor([0]), q, q.clone(), 4, table, True)
    table.copy_(torch.tensor([[0.0, 0.0, 1.0, 1.0]]))
    ATB_ROPE(torch.tensor([0]), q, q.clone(), 4, table, True)
    assert q.tolist() == [[1, 2, 3, 4]]
