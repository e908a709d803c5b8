"""Host plans of the Ascend kernels: slots, block tables, masks and lengths, against the reference rules' own loops."""

from __future__ import annotations

import pytest
import torch
from ascend_equations import arena, equation, run
from hypothesis import given
from hypothesis import strategies as st

from atbx.core.errors import CapacityError
from atbx.kernels.ascend.attention import ROWS
from atbx.kernels.ascend.cache import BlockedCacheSpec, empty_arena
from atbx.kernels.ascend.cache_write import slots_view
from atbx.kernels.ascend.plan import (
    BLOCK,
    CacheFacts,
    block_table,
    hidden_slots,
    host_lists,
    live_slots,
    slots_of,
)
from atbx.ops.attention import ATTENTION, KV_WRITE
from atbx.ops.kv_cache import LayerCache

COMPOSED = next(row for row in ROWS if row.kernel == "composed.attention")


def facts(
    tokens: int, rows: int, slots: int, window: int | None = None, extent: int | None = None
) -> CacheFacts:
    return CacheFacts(tokens, rows, slots, window, slots if extent is None else extent, False)


def test_tokens_go_to_the_slot_of_their_position_and_padding_to_slots_of_its_own() -> None:
    found = slots_of(facts(3, 2, 256), torch.tensor([1, 0]), torch.tensor([5, 0]), torch.tensor([2, 1]))
    # Row 1 starts at slot 256; the trash starts behind both rows, at 512.
    assert found.tolist() == [261, 262, 512, 0, 513, 514]
    assert found.dtype == torch.int32


@given(
    st.integers(1, 4).flatmap(
        lambda b: st.tuples(
            st.permutations(range(4)).map(lambda p: p[:b]),
            st.lists(st.integers(0, 100), min_size=b, max_size=b),
            st.lists(st.integers(0, 7), min_size=b, max_size=b),
        )
    )
)
def test_no_two_tokens_of_a_step_share_a_slot(
    case: tuple[list[int], list[int], list[int]],
) -> None:
    rows, lengths, counts = (torch.tensor(x) for x in case)
    found = slots_of(facts(7, 4, 128), rows, lengths, counts).tolist()
    assert len(set(found)) == len(found)
    real = [s for s in found if s < 4 * 128]
    assert len(real) == int(counts.sum())


def test_a_ring_wraps_its_slots() -> None:
    ring = facts(2, 1, 128, window=100, extent=1024)
    assert ring.is_ring
    found = slots_of(ring, torch.tensor([0]), torch.tensor([127]), torch.tensor([2]))
    assert found.tolist() == [127, 0]
    assert live_slots(ring, [127], [2]) == [128]


def test_block_tables_name_the_blocks_of_a_row_in_order() -> None:
    table = block_table(facts(1, 3, 384, extent=256), torch.tensor([2, 0]))
    assert table.tolist() == [[6, 7], [0, 1]]
    assert table.dtype == torch.int32


def test_paged_rows_name_their_blocks_and_unused_entries_are_harmless() -> None:
    paged = CacheFacts(1, 6, 16, None, 64, True)
    rows = torch.tensor([[4, 2, -1, -1]])
    assert block_table(paged, rows).tolist() == [[4, 2, 0, 0]]
    # Position 17 is slot 1 of the second block; a padding row writes to the last block.
    assert slots_of(paged, rows, torch.tensor([17]), torch.tensor([1])).tolist() == [33]
    assert slots_of(paged, rows, torch.tensor([17]), torch.tensor([0])).tolist() == [80]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_hide_what_the_definition_hides(window: int | None, causal: bool) -> None:
    given_facts = facts(4, 2, 128, window=window, extent=128)
    lengths, counts = torch.tensor([6, 0]), torch.tensor([4, 2])
    hidden = hidden_slots(given_facts, lengths, counts, causal)
    for b, t in [(0, 0), (0, 3), (1, 0), (1, 1)]:
        position = int(lengths[b]) + t
        for slot in range(128):
            seen = slot < int(lengths[b] + counts[b])
            seen &= not causal or slot <= position
            seen &= window is None or slot > position - window
            assert bool(hidden[b, 0, t, slot]) is not seen, (b, t, slot)


def test_no_row_of_a_mask_is_hidden_altogether() -> None:
    hidden = hidden_slots(facts(2, 1, 128), torch.tensor([0]), torch.tensor([0]), True)
    assert not hidden.all(-1).any()


def test_bounds_are_checked_before_anything_is_launched() -> None:
    with pytest.raises(CapacityError):
        host_lists(facts(1, 1, 128), torch.tensor([0]), torch.tensor([128]), torch.tensor([1]))


CASES = [
    # heads, kv heads, head size, window, slots, extent
    (4, 4, 64, None, 128, 128),
    (8, 2, 80, None, 256, 200),
    (8, 1, 96, 5, 128, 128),
    (4, 2, 128, 20, 128, 1024),
    (4, 2, 256, None, 100, 100),
]


@pytest.mark.parametrize(("heads", "kv_heads", "size", "window", "slots", "extent"), CASES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_composition_is_the_reference_rule(
    heads: int, kv_heads: int, size: int, window: int | None, slots: int, extent: int, tokens: int
) -> None:
    torch.manual_seed(0)
    arenas = tuple(arena(3, slots, kv_heads, size, torch.float32, seed) for seed in (1, 2))
    q = torch.randn(3, tokens, heads, size)
    lengths = torch.tensor([7, 0, 90])
    if window is not None and slots < extent:
        lengths[2] = 300
    operands = (q, *arenas, torch.tensor([2, 1, 0]), lengths, torch.tensor([tokens, 1, max(1, tokens - 2)]))
    operands = (*operands, None, None)
    params = {"scale": size**-0.5, "extent": extent, "window": window, "soft_cap": None, "causal": True}
    made = equation(ATTENTION, operands, **params)
    expected = ATTENTION.reference(*operands, **params)
    found = run(COMPOSED, made, operands)
    for row, count in enumerate(operands[5].tolist()):
        torch.testing.assert_close(found[row, :count], expected[row, :count], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["soft_cap", "slopes", "sinks", "not causal"])
def test_the_composition_has_every_option(option: str) -> None:
    torch.manual_seed(1)
    arenas = tuple(arena(2, 128, 2, 32, torch.float32, seed) for seed in (1, 2))
    q = torch.randn(2, 3, 4, 32)
    slopes = torch.rand(4) if option == "slopes" else None
    sinks = torch.randn(4) if option == "sinks" else None
    operands = (q, *arenas, torch.arange(2), torch.tensor([4, 30]), torch.tensor([3, 3]), slopes, sinks)
    params = {
        "scale": 0.2,
        "extent": 128,
        "window": None,
        "soft_cap": 5.0 if option == "soft_cap" else None,
        "causal": option != "not causal",
    }
    made = equation(ATTENTION, operands, **params)
    torch.testing.assert_close(
        run(COMPOSED, made, operands), ATTENTION.reference(*operands, **params), rtol=1e-5, atol=1e-5
    )


def test_nan_in_unused_slots_reaches_nothing() -> None:
    arenas = [arena(2, 128, 2, 32, torch.float32, seed) for seed in (1, 2)]
    for tensor in arenas:
        tensor[:, 10:] = torch.nan
    q = torch.randn(2, 1, 4, 32)
    operands = (q, *arenas, torch.arange(2), torch.tensor([9, 3]), torch.tensor([1, 0]), None, None)
    params = {"scale": 0.2, "extent": 128, "window": None, "soft_cap": None, "causal": True}
    found = run(COMPOSED, equation(ATTENTION, operands, **params), operands)
    assert torch.isfinite(found[0]).all()


def test_an_arena_has_room_for_padding_behind_it() -> None:
    made = empty_arena((2, 256, 2, 32), torch.float16, torch.device("cpu"), 512)
    view = slots_view(made, facts(512, 2, 256), 512)
    assert view.shape == (2 * 256 // BLOCK + 4, BLOCK, 2, 32)
    assert view.data_ptr() == made.data_ptr()
    view[4:] = 7.0
    assert not made.any()
    with pytest.raises(CapacityError, match="trash"):
        slots_view(torch.zeros(2, 256, 2, 32), facts(1, 2, 256), 1)


def test_rows_of_an_arena_are_whole_blocks() -> None:
    spec = BlockedCacheSpec((LayerCache(2, 32), LayerCache(2, 32, window=100)))
    assert spec.slots(0, 300, 64) == 384
    # window + chunk - 1 = 163 slots, rounded up.
    assert spec.slots(1, 10_000, 64) == 256


def test_a_write_reads_back_through_the_blocks() -> None:
    k_arena, v_arena = (empty_arena((2, 128, 2, 32), torch.float32, torch.device("cpu"), 128) for _ in "kv")
    k, v = torch.randn(2, 3, 2, 32), torch.randn(2, 3, 2, 32)
    operands = (k, v, k_arena, v_arena, torch.tensor([1, 0]), torch.tensor([4, 0]), torch.tensor([2, 3]))
    expected = KV_WRITE.reference(*operands, window=None, extent=128)
    given_facts = facts(3, 2, 128)
    slots = slots_of(given_facts, *operands[4:])
    for new, into, wanted in ((k, k_arena, expected[0]), (v, v_arena, expected[1])):
        slots_view(into, given_facts, 6).reshape(-1, 2, 32)[slots.long()] = new.reshape(-1, 2, 32)
        assert torch.equal(into, wanted)
