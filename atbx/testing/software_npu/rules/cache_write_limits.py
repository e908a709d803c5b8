"""What the cache operators refuse, and what goes wrong in them unchecked.

Dtypes and shapes are refused at the launch. Slots and indices live in device memory and are looked at by nobody
before the kernel runs; an address out of range is a fault of the device. Where a page asks for slots that occur
once, a repeated one leaves the cache undefined, which is reported in the same way: no result could be relied on.
"""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.cache_write import is_stripped, sequence_lengths, slot_count
from atbx.testing.software_npu.rules.chips import A2, A3, INFERENCE_310P, TRAINING_910A, family
from atbx.testing.software_npu.rules.linear import fractal_width
from atbx.testing.software_npu.rules.registry import (
    ATB_DTYPE,
    ATB_PARAMETER,
    ATB_SIZE,
    DEVICE_FAULT,
    NZ,
    PARAMETER,
    TILING,
    Call,
    contiguity_refusal,
    device_fault,
    dtype_refusal,
    limit,
    refuse_atb,
    refuse_parameter,
    refuse_tiling,
)

_WRITE, _SISO = "atb::_npu_reshape_and_cache", "atb::_npu_reshape_and_cache_siso"
_SCATTER_PA = "npu::npu_scatter_pa_kv_cache"
_ND_FORMS = ("npu::npu_scatter_nd_update_", "npu::npu_scatter_nd_update")
_AXIS_FORMS = ("npu::scatter_update_", "npu::scatter_update")
_ATB_SOURCE = "fact sheet 1.3; ATB ReshapeAndCache, op-plugin test_atb_reshape_and_cache.py: "
_PA_SOURCE = "op-plugin page npu_scatter_pa_kv_cache: "
_GATHER, _LOAD = "npu::npu_gather_pa_kv_cache", "atb::npu_paged_cache_load"


def _pairs(call: Call) -> list[tuple[str, str]]:
    return [
        (rows, cache)
        for rows, cache in (("key", "key_cache"), ("value", "value_cache"))
        if call[cache] is not None
    ]


# --- ATB writes -------------------------------------------------------------------------------------------------


@limit(_WRITE, _SISO, code=ATB_DTYPE, source=_ATB_SOURCE + "slots are int32 (int64 is refused)")
def slots_int32(call: Call) -> str | None:
    return dtype_refusal(call, "slot_indices", (torch.int32,), refuse_atb)


@limit(_WRITE, _SISO, code=ATB_DTYPE, source=_ATB_SOURCE + "cache of the dtype of its rows")
def rows_of_the_cache_dtype(call: Call) -> str | None:
    for rows, cache in _pairs(call):
        refused = dtype_refusal(call, rows, (call[cache].dtype,), refuse_atb)
        if refused:
            return refused
    return None


@limit(_WRITE, _SISO, code=ATB_PARAMETER, source="op-plugin AtbCommon.cpp: written tensors are contiguous")
def caches_contiguous(call: Call) -> str | None:
    return contiguity_refusal(
        call, [cache for _, cache in _pairs(call) if call.formats.get(cache) != NZ], refuse_atb
    )


@limit(
    _WRITE,
    code=ATB_SIZE,
    source=_ATB_SOURCE + "heads and head sizes match the cache; strips of 16 (int8: 32)",
)
def rows_fit_the_cache(call: Call) -> str | None:
    in_strips = family(call.chip) == INFERENCE_310P or all(
        call.formats.get(cache) == NZ for _, cache in _pairs(call)
    )
    for rows, cache in _pairs(call):
        shape, into = tuple(call[rows].shape), tuple(call[cache].shape)
        if len(shape) != 3 or len(into) != 4:
            return refuse_atb(call, f"{rows} {shape} should be 3 dims and {cache} {into} 4 dims")
        if in_strips:
            width = fractal_width(call[cache].dtype)
            if into[3] != width or into[1] * width != shape[1] * shape[2]:
                return refuse_atb(
                    call, f"{cache} {into} should be [blocks, {shape[1] * shape[2]}/{width}, block, {width}]"
                )
        elif into[2:] != shape[1:]:
            return refuse_atb(call, f"{cache} {into} should end in {shape[1:]}")
    return None


@limit(_WRITE, _SISO, code=ATB_SIZE, source=_ATB_SOURCE + "one slot a row")
def one_slot_a_row(call: Call) -> str | None:
    slots, rows = call["slot_indices"], call["key"].shape[0]
    return (
        None
        if slots.numel() == rows
        else refuse_atb(call, f"slotMapping {slots.numel()} should have {rows} entries")
    )


@limit(_WRITE, code=ATB_PARAMETER, source="fact sheet 1.3: A2, and 310P with fractal caches; no 910A")
def chip_has_reshape_and_cache(call: Call) -> str | None:
    return refuse_atb(call, f"not supported on {call.chip}") if family(call.chip) == TRAINING_910A else None


def _slot_fault(
    call: Call, slots: torch.Tensor, count: int, *, negatives_skip: bool, each_once: bool
) -> str | None:
    wrong = slots[slots >= count] if negatives_skip else slots[(slots >= count) | (slots < 0)]
    if wrong.numel():
        return device_fault(call, f"slot {int(wrong[0])}, cache of {count} slots")
    used = slots[slots >= 0]
    if each_once and used.unique().numel() != used.numel():
        return device_fault(call, "a slot occurs twice; the result is not defined")
    return None


@limit(
    _WRITE,
    _SISO,
    code=DEVICE_FAULT,
    source=_ATB_SOURCE + "no bounds check; < 0 skipped in ND only",
    when="execution",
)
def slots_in_the_cache(call: Call) -> str | None:
    for rows, cache in _pairs(call):
        in_strips = call.name == _WRITE and is_stripped(call[cache], call[rows], call.formats.get(cache))
        count = slot_count(call, call[cache], in_strips)
        fault = _slot_fault(call, call["slot_indices"], count, negatives_skip=not in_strips, each_once=False)
        if fault:
            return fault
    return None


# --- npu_scatter_pa_kv_cache ------------------------------------------------------------------------------------


@limit(_SCATTER_PA, code=PARAMETER, source=_PA_SOURCE + "one dtype for rows and caches; slots int32 or int64")
def scatter_pa_dtypes(call: Call) -> str | None:
    same = (call["key"].dtype,)
    refused = dtype_refusal(call, "slot_mapping", (torch.int32, torch.int64))
    for name in ("value", "key_cache", "value_cache"):
        refused = refused or dtype_refusal(call, name, same)
    for name in ("compress_lens", "compress_seq_offsets", "seq_lens"):
        refused = refused or dtype_refusal(call, name, (call["slot_mapping"].dtype,))
    return refused


@limit(_SCATTER_PA, code=PARAMETER, source=_PA_SOURCE + "no non-contiguous tensors")
def scatter_pa_contiguous(call: Call) -> str | None:
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    return contiguity_refusal(call, [name for name in names if call.formats.get(name) != NZ])


@limit(_SCATTER_PA, code=PARAMETER, source=_PA_SOURCE + "cache_mode None, Norm or PA_NZ")
def scatter_pa_mode_known(call: Call) -> str | None:
    known = call["cache_mode"] in (None, "Norm", "PA_NZ")
    return None if known else refuse_parameter(call, f"cacheMode {call['cache_mode']} is not supported.")


@limit(_SCATTER_PA, code=TILING, source=_PA_SOURCE + "forms of rows, caches and slots by mode")
def scatter_pa_shapes(call: Call) -> str | None:
    key, value, slots = call["key"], call["value"], call["slot_mapping"]
    if key.dim() not in (3, 4) or key.dim() != value.dim():
        return refuse_tiling(
            call, f"key of {key.dim()} dims and value of {value.dim()} dims should both be 3 or 4"
        )
    if key.dim() == 4:
        return None
    if key.shape[:2] != value.shape[:2]:
        return refuse_tiling(
            call, f"key {tuple(key.shape)} and value {tuple(value.shape)} should share two dims"
        )
    if slots.dim() != 1 or slots.shape[0] != key.shape[0]:
        return refuse_tiling(call, f"slotMapping {tuple(slots.shape)} should be ({key.shape[0]},)")
    for rows, cache in _pairs(call):
        shape, into = tuple(call[rows].shape), tuple(call[cache].shape)
        if len(into) != 4:
            return refuse_tiling(call, f"{cache} of {len(into)} dims should be 4 dims")
        if call["cache_mode"] == "PA_NZ":
            fits = into[1] * into[3] == shape[1] * shape[2] and into[3] == fractal_width(call[cache].dtype)
        else:
            fits = into[2:] == shape[1:]
        if not fits:
            return refuse_tiling(
                call, f"{cache} {into} does not fit {rows} {shape} in mode {call['cache_mode']}"
            )
    return None


@limit(
    _SCATTER_PA, code=TILING, source=_PA_SOURCE + "4-D rows need compress_lens and seq_lens, one cache head"
)
def scatter_pa_compressing_form(call: Call) -> str | None:
    if call["key"].dim() != 4:
        return None
    if call["compress_lens"] is None or call["seq_lens"] is None:
        return refuse_tiling(call, "compressLens and seqLens should be given when key is 4 dims")
    return (
        None
        if call["key_cache"].shape[2] == 1
        else refuse_tiling(call, "the third dim of keyCache should be 1")
    )


@limit(_SCATTER_PA, code=DEVICE_FAULT, source=_PA_SOURCE + "slots in [0, slots), each once", when="execution")
def scatter_pa_slots_in_the_cache(call: Call) -> str | None:
    if call["key"].dim() == 4:
        return None
    count = slot_count(call, call["key_cache"], call["cache_mode"] == "PA_NZ")
    # The page asks for [0, count); its own golden skips negative slots, so they are let through.
    return _slot_fault(call, call["slot_mapping"], count, negatives_skip=True, each_once=True)


# --- scatter by index -------------------------------------------------------------------------------------------

_ND_SOURCE = "op-plugin page npu_scatter_nd_update_ (fact sheet 1.3): "


@limit(
    *_ND_FORMS,
    code=PARAMETER,
    source=_ND_SOURCE + "dtypes by chip; updates of the same dtype; int32/int64 indices",
)
def scatter_nd_dtypes(call: Call) -> str | None:
    allowed: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bool)
    if family(call.chip) in (A2, A3):
        allowed = (*allowed, torch.bfloat16, torch.int64, torch.int8)
    return (
        dtype_refusal(call, "input", allowed)
        or dtype_refusal(call, "updates", (call["input"].dtype,))
        or dtype_refusal(call, "indices", (torch.int32, torch.int64))
    )


@limit(
    *_ND_FORMS,
    code=PARAMETER,
    source=_ND_SOURCE + "indices at least 2-D, last axis at most the rank; updates to fit",
)
def scatter_nd_shapes(call: Call) -> str | None:
    target, indices, updates = call["input"], call["indices"], call["updates"]
    if indices.dim() < 2 or not 1 <= target.dim() <= 8:
        return refuse_parameter(call, f"indices of {indices.dim()} dims should be at least 2 dims.")
    depth = indices.shape[-1]
    if depth > target.dim():
        return refuse_parameter(
            call, f"the last dim of indices {depth} exceeds the dims of input {target.dim()}."
        )
    wanted = (*indices.shape[:-1], *target.shape[depth:])
    if tuple(updates.shape) != wanted:
        return refuse_parameter(call, f"updates shape {tuple(updates.shape)} should be {wanted}.")
    return None


@limit(
    *_ND_FORMS,
    code=DEVICE_FAULT,
    source=_ND_SOURCE + "indices out of range are not supported",
    when="execution",
)
def scatter_nd_indices_in_range(call: Call) -> str | None:
    indices, target = call["indices"], call["input"]
    for axis in range(indices.shape[-1]):
        column = indices[..., axis]
        wrong = column[(column < 0) | (column >= target.shape[axis])]
        if wrong.numel():
            return device_fault(call, f"index {int(wrong[0])} of axis {axis}, size {target.shape[axis]}")
    return None


_AXIS_SOURCE = "op-plugin page scatter_update_ (fact sheet 1.3): "


@limit(*_AXIS_FORMS, code=PARAMETER, source=_AXIS_SOURCE + "dtypes; no bfloat16 on 910A")
def scatter_update_dtypes(call: Call) -> str | None:
    allowed: tuple[torch.dtype, ...] = (torch.int8, torch.float16, torch.float32, torch.int32)
    if family(call.chip) in (A2, A3):
        allowed = (*allowed, torch.bfloat16)
    return (
        dtype_refusal(call, "input", allowed)
        or dtype_refusal(call, "updates", (call["input"].dtype,))
        or dtype_refusal(call, "indices", (torch.int32, torch.int64))
    )


@limit(
    *_AXIS_FORMS,
    code=PARAMETER,
    source=_AXIS_SOURCE + "2 to 8 axes, one rank, 1-D or 2-D indices, nothing empty",
)
def scatter_update_shapes(call: Call) -> str | None:
    target, indices, updates = call["input"], call["indices"], call["updates"]
    if not 2 <= target.dim() <= 8 or updates.dim() != target.dim():
        return refuse_parameter(
            call, f"data of {target.dim()} dims and updates of {updates.dim()} should be one rank."
        )
    if indices.dim() not in (1, 2):
        return refuse_parameter(call, f"indices of {indices.dim()} dims should be 1 or 2 dims.")
    empty = [name for name in ("input", "indices", "updates") if call[name].numel() == 0]
    return refuse_parameter(call, f"{empty[0]} should not be an empty tensor.") if empty else None


@limit(*_AXIS_FORMS, code=DEVICE_FAULT, source=_AXIS_SOURCE + "no range check", when="execution")
def scatter_update_indices_in_range(call: Call) -> str | None:
    target, updates, indices = call["input"], call["updates"], call["indices"]
    axis = int(call["axis"]) % target.dim()
    starts = indices if indices.dim() == 1 else indices[:, 1]
    last = target.shape[axis] - updates.shape[axis]
    wrong = starts[(starts < 0) | (starts > last)]
    return (
        device_fault(call, f"index {int(wrong[0])} along axis {axis}, at most {last}")
        if wrong.numel()
        else None
    )


# --- reads ------------------------------------------------------------------------------------------------------


@limit(
    _GATHER, code=PARAMETER, source="op-plugin test_npu_gather_pa_kv_cache.py: caches and rows of one dtype"
)
def gather_pa_dtypes(call: Call) -> str | None:
    return dtype_refusal(call, "key", (call["key_cache"].dtype,)) or dtype_refusal(
        call, "value", (call["value_cache"].dtype,)
    )


@limit(_LOAD, code=ATB_DTYPE, source="op-plugin test_atb_paged_cache_load.py: tables and lengths are int32")
def paged_load_int32(call: Call) -> str | None:
    refused = dtype_refusal(call, "block_table", (torch.int32,), refuse_atb)
    for name in ("context_lens", "seq_starts"):
        refused = refused or dtype_refusal(call, name, (torch.int32,), refuse_atb)
    return refused


@limit(_LOAD, code=DEVICE_FAULT, source="fact sheet 1.3: block ids are not checked", when="execution")
def paged_load_block_ids_in_range(call: Call) -> str | None:
    cache, table = call["key_cache"], call["block_table"]
    blocks, block = cache.shape[:2]
    for row, length in enumerate(sequence_lengths(call["context_lens"], bool(call["cumsum"]))):
        first = 0 if call["seq_starts"] is None else int(call["seq_starts"][row]) // block
        ids = table[row, first : first - (-length // block)]
        wrong = ids[(ids < 0) | (ids >= blocks)]
        if wrong.numel():
            return device_fault(call, f"block id {int(wrong[0])}, cache of {blocks} blocks")
    return None
