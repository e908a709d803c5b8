"""Rotary position embeddings: the six operators and how each pairs its elements.

"half" pairs element i with element i + D/2, "interleave" pairs 2i with 2i + 1; npu_interleave_rope takes its
elements apart first (even ones, then odd ones) and returns them in that order. cos and sin come in the full
width D, except in npu_mrope and the ATB form, which look them up in a table of two halves. Products and sums are
taken in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atbx.testing.software_npu.rules.registry import (
    ATB_DTYPE,
    ATB_PARAMETER,
    DEVICE_FAULT,
    PARAMETER,
    TILING,
    Call,
    NotModelledError,
    contiguity_refusal,
    device_fault,
    dtype_refusal,
    limit,
    refuse_atb,
    refuse_parameter,
    refuse_tiling,
    rule,
)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """[-x2, x1] for the two halves of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    """(-x[2i+1], x[2i]) for the pairs of the last axis."""
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    """x * cos + rotate(x) * sin in float32, for cos and sin of full width."""
    wide = x.float()
    if mode == "half":
        turned = rotate_half(wide)
    elif mode == "interleave":
        turned = rotate_pairs(wide)
    else:
        raise NotModelledError(f"rotary_mode {mode!r} is not modelled")
    return wide * cos.float() + turned * sin.float()


@rule("npu::npu_rotary_mul", source="op-plugin page and test_npu_rotary_mul.py", status="upstream golden ran")
def rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """input * r1 + rotate(input) * r2, r1 (cos) and r2 (sin) broadcast over batch and heads.

    rotate: a matrix [D, D] that turns by multiplication, in place of the mode.
    """
    if rotate is not None:
        wide = input.float()
        return (wide * r1.float() + (wide @ rotate.float()) * r2.float()).to(input.dtype)
    return _turned(input, r1, r2, rotary_mode).to(input.dtype)


@rule(
    "npu::npu_apply_rotary_pos_emb",
    source="op-plugin page and test_npu_apply_rotary_pos_emb.py (BSND ran, TND skipped)",
    status="upstream golden ran",
)
def apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, ...]:
    """Both tensors turned in place; cos and sin [B, S, 1, D] (TND: [T, 1, D])."""
    query.copy_(_turned(query, cos, sin, rotary_mode))
    key.copy_(_turned(key, cos, sin, rotary_mode))
    return query, key


@rule("npu::npu_interleave_rope", source="op-plugin page npu_interleave_rope", status="document only")
def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, N, S, 64] taken apart into even and odd elements, then turned by halves; the order stays apart."""
    apart = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
    return _turned(apart, cos, sin, "half").to(x.dtype)


def _sections(table: torch.Tensor, sections: list[int], cache_mode: str) -> torch.Tensor:
    """cos or sin [m, T, R/2] of the m position rows brought to [T, R/2], a part of the width from each row."""
    if cache_mode == "default":
        parts = table.split(sections, dim=-1)
        return torch.cat([part[row] for row, part in enumerate(parts)], dim=-1)
    mixed = table[0].clone()
    for row in (1, 2):
        stop = sections[1] * 3
        mixed[..., row:stop:3] = table[row][..., row:stop:3]
    return mixed


@rule("npu::npu_mrope", source="op-plugin page npu_mrope and test_npu_mrope.py", status="upstream golden ran")
def mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, ...]:
    """Fresh query [T, H*D] and key [T, K*D], their first R = cos_sin_cache.shape[-1] elements a head turned.

    positions: [T], or [m, T] with one row a section. cos_sin_cache: [P, R], cos in the first half and sin in
    the second, each of R/2 angles.
    """
    rotary = cos_sin_cache.shape[-1]
    looked_up = cos_sin_cache[positions.long()].float()
    cos, sin = looked_up.chunk(2, dim=-1)
    if positions.dim() == 2:
        sections = [int(one) for one in mrope_section or ()]
        cos = _sections(cos, sections, cache_mode or "default")
        sin = _sections(sin, sections, cache_mode or "default")
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        heads = x.float().unflatten(-1, (-1, head_size))
        part, rest = heads[..., :rotary], heads[..., rotary:]
        if (rotary_mode or "half") == "half":
            first, second = part.chunk(2, dim=-1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        else:
            first, second = part[..., ::2], part[..., 1::2]
            turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        return torch.cat([turned, rest], dim=-1).flatten(-2).to(x.dtype)

    return turn(query), turn(key)


@dataclass
class _FirstTable:
    """The cos and sin halves that _npu_rotary_embedding keeps for the life of the process."""

    halves: torch.Tensor | None = None


_FIRST = _FirstTable()


def forget_rotary_table() -> None:
    """What ending the process does: the next call of _npu_rotary_embedding brings its own table."""
    _FIRST.halves = None


@rule(
    "atb::_npu_rotary_embedding",
    source="op-plugin op_plugin/ops/atb/RopeAtb.cpp (process-wide table) and test_atb_rope.py",
    status="upstream golden ran",
)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """query [T, H*D] and key [T, K*D] turned in place, with the table of the FIRST call in this process.

    The operator keeps that table and never looks at a later cos_sin_cache: another base, or a longer context,
    silently turns by the old angles (an index past its end is a fault of the device).
    """
    if _FIRST.halves is None:
        _FIRST.halves = cos_sin_cache.clone()
    cos, sin = _FIRST.halves[positions.flatten().long()].chunk(2, dim=-1)
    mode = "half" if is_neox_style else "interleave"
    for tensor in (query, key):
        heads = tensor.reshape(cos.shape[0], -1, head_size)
        if mode == "half":
            wide_cos, wide_sin = cos.repeat(1, 2), sin.repeat(1, 2)
        else:
            wide_cos, wide_sin = cos.repeat_interleave(2, 1), sin.repeat_interleave(2, 1)
        turned = _turned(heads, wide_cos.unsqueeze(1), wide_sin.unsqueeze(1), mode)
        tensor.copy_(turned.to(tensor.dtype).reshape(tensor.shape))


# --- limits -----------------------------------------------------------------------------------------------------

_PAGE = "op-plugin page of the operator (fact sheet 1.5): "
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@limit("npu::npu_rotary_mul", code=PARAMETER, source=_PAGE + "3 or 4 axes; float16, bfloat16 or float32")
def rotary_mul_inputs(call: Call) -> str | None:
    refused = dtype_refusal(call, "input", _FLOATS)
    if refused:
        return refused
    for name in ("input", "r1", "r2"):
        if call[name].dim() not in (3, 4):
            return refuse_parameter(call, f"{name} of {call[name].dim()} dims should be 3 or 4 dims.")
        if call[name].dim() != call["input"].dim():
            return refuse_parameter(call, f"{name} of {call[name].dim()} dims should have the dims of input.")
    return None


@limit("npu::npu_rotary_mul", code=TILING, source=_PAGE + "D even and below 896")
def rotary_mul_head_size(call: Call) -> str | None:
    size = call["input"].shape[-1]
    if size % 2 or size >= 896:
        return refuse_tiling(call, f"the last dim D {size} should be even and less than 896")
    return None


@limit(
    "npu::npu_rotary_mul",
    code=TILING,
    source=_PAGE + "cos and sin of the full width D, broadcast over B and N",
)
def rotary_mul_tables(call: Call) -> str | None:
    x, cos, sin = call["input"], call["r1"], call["r2"]
    if cos.shape != sin.shape or cos.shape[-1] != x.shape[-1]:
        return refuse_tiling(
            call, f"r1 {tuple(cos.shape)} and r2 {tuple(sin.shape)} should end in D {x.shape[-1]}"
        )
    fits = all(small in (1, large) for small, large in zip(cos.shape, x.shape, strict=True))
    only_one_full = sum(small != 1 for small in cos.shape[:-1]) <= 1
    if not fits:
        return refuse_tiling(
            call, f"r1 shape {tuple(cos.shape)} cannot be broadcast to input {tuple(x.shape)}"
        )
    if call["rotary_mode"] == "interleave" and not only_one_full:
        return refuse_tiling(
            call, f"r1 shape {tuple(cos.shape)} should be 1S1D, 11SD, S11D or T1D in interleave mode"
        )
    return None


@limit("npu::npu_rotary_mul", code=TILING, source=_PAGE + "B and N below 1000, B*N below 1000 for interleave")
def rotary_mul_batch_and_heads(call: Call) -> str | None:
    x, cos = call["input"], call["r1"]
    if x.dim() != 4:
        return None
    # The layout is read off the tables: their axis of length S tells batch from heads where they are broadcast.
    outer = [size for size, table in zip(x.shape[:-1], cos.shape[:-1], strict=True) if table == 1]
    if call["rotary_mode"] == "interleave":
        together = 1
        for size in outer:
            together *= size
        return refuse_tiling(call, f"B*N {together} should be less than 1000") if together >= 1000 else None
    large = [size for size in outer if size >= 1000]
    return refuse_tiling(call, f"B or N {large[0]} should be less than 1000") if large else None


@limit("npu::npu_rotary_mul", code=PARAMETER, source=_PAGE + "modes half and interleave")
def rotary_mul_mode(call: Call) -> str | None:
    mode = call["rotary_mode"]
    return (
        None
        if mode in ("half", "interleave")
        else refuse_parameter(call, f"rotary_mode {mode} is not supported.")
    )


_APPLY = "npu::npu_apply_rotary_pos_emb"
_APPLY_TENSORS = ("query", "key", "cos", "sin")


@limit(_APPLY, code=PARAMETER, source=_PAGE + "one dtype for query, key, cos and sin")
def apply_rotary_one_dtype(call: Call) -> str | None:
    refused = dtype_refusal(call, "query", _FLOATS)
    for name in _APPLY_TENSORS[1:]:
        refused = refused or dtype_refusal(call, name, (call["query"].dtype,))
    return refused


@limit(
    _APPLY, code=PARAMETER, source=_PAGE + "layouts BSND (4-D) and TND (3-D), mode half on A2, A3 and 310P"
)
def apply_rotary_layout_and_mode(call: Call) -> str | None:
    axes = {"BSND": 4, "TND": 3}.get(call["layout"])
    if axes is None:
        return refuse_parameter(call, f"layout {call['layout']} is not supported on {call.chip}.")
    if call["rotary_mode"] != "half":
        return refuse_parameter(call, f"rotary_mode {call['rotary_mode']} is not supported on {call.chip}.")
    for name in _APPLY_TENSORS:
        if call[name].dim() != axes:
            return refuse_parameter(call, f"{name} of {call[name].dim()} dims should be {axes} dims.")
    return None


@limit(_APPLY, code=TILING, source=_PAGE + "D of 64 or 128, not empty")
def apply_rotary_head_size_64_or_128(call: Call) -> str | None:
    for name in _APPLY_TENSORS:
        size = call[name].shape[-1]
        if size not in (64, 128) or size != call["query"].shape[-1]:
            return refuse_tiling(
                call, f"the last dim D of {name} {size} should be 64 or 128 and the same everywhere"
            )
        if call[name].numel() == 0:
            return refuse_tiling(call, f"{name} should not be an empty tensor")
    return None


@limit(_APPLY, code=TILING, source=_PAGE + "the same rows everywhere; one head in cos and sin")
def apply_rotary_same_rows(call: Call) -> str | None:
    rows = call["query"].shape[:-2]
    for name in _APPLY_TENSORS[1:]:
        if call[name].shape[:-2] != rows:
            return refuse_tiling(
                call, f"{name} shape {tuple(call[name].shape)} should begin with {tuple(rows)}"
            )
    for name in ("cos", "sin"):
        if call[name].shape[-2] != 1:
            return refuse_tiling(call, f"the N dim of {name} {call[name].shape[-2]} should be 1")
    return None


@limit("npu::npu_interleave_rope", code=PARAMETER, source=_PAGE + "4-D, contiguous, float16 or bfloat16")
def interleave_rope_inputs(call: Call) -> str | None:
    refused = dtype_refusal(call, "x", (torch.float16, torch.bfloat16)) or contiguity_refusal(
        call, ("x", "cos", "sin")
    )
    if refused:
        return refused
    bad = [name for name in ("x", "cos", "sin") if call[name].dim() != 4]
    return refuse_parameter(call, f"{bad[0]} should be 4 dims.") if bad else None


@limit("npu::npu_interleave_rope", code=TILING, source=_PAGE + "D of 64, one head in cos and sin")
def interleave_rope_head_size_64(call: Call) -> str | None:
    for name in ("x", "cos", "sin"):
        if call[name].shape[-1] != 64:
            return refuse_tiling(call, f"the last dim D of {name} {call[name].shape[-1]} should be 64")
    return refuse_tiling(call, "the N dim of cos should be 1") if call["cos"].shape[1] != 1 else None


_MROPE = "npu::npu_mrope"
_MROPE_SECTIONS = ([16, 24, 24], [24, 20, 20], [8, 12, 12], [16, 16, 16, 16])


@limit(_MROPE, code=PARAMETER, source=_PAGE + "query, key and table of one dtype; positions int32 or int64")
def mrope_dtypes(call: Call) -> str | None:
    same = (call["query"].dtype,)
    return (
        dtype_refusal(call, "query", _FLOATS)
        or dtype_refusal(call, "key", same)
        or dtype_refusal(call, "cos_sin_cache", same)
        or dtype_refusal(call, "positions", (torch.int32, torch.int64))
    )


@limit(_MROPE, code=TILING, source=_PAGE + "2-D query, key and table; rows as positions")
def mrope_shapes(call: Call) -> str | None:
    for name in ("query", "key", "cos_sin_cache"):
        if call[name].dim() != 2:
            return refuse_tiling(call, f"{name} of {call[name].dim()} dims should be 2 dims")
    size = int(call["head_size"])
    for name in ("query", "key"):
        rows, width = call[name].shape
        if width % size or rows != call["positions"].shape[-1]:
            return refuse_tiling(
                call, f"{name} shape ({rows}, {width}) does not fit headSize {size} and the positions"
            )
    return None


@limit(
    _MROPE,
    code=TILING,
    source=_PAGE + "head_size and rotary_dim multiples of 32 (16 in float32), rotary <= head",
)
def mrope_sizes_multiples_of_32(call: Call) -> str | None:
    step = 16 if call["query"].dtype == torch.float32 else 32
    size, rotary = int(call["head_size"]), call["cos_sin_cache"].shape[-1]
    if size % step or rotary % step:
        return refuse_tiling(call, f"headSize {size} and rotaryDim {rotary} should be multiples of {step}")
    return refuse_tiling(call, f"rotaryDim {rotary} exceeds headSize {size}") if rotary > size else None


@limit(_MROPE, code=TILING, source=_PAGE + "mrope_section: one of four lists, summing to rotary_dim / 2")
def mrope_sections_known(call: Call) -> str | None:
    section, positions = call["mrope_section"], call["positions"]
    listed = [int(one) for one in section] if section is not None else [0, 0, 0]
    if positions.dim() == 1:
        if any(listed):
            return refuse_tiling(call, f"mropeSection {listed} should be [0, 0, 0] for 1-D positions")
        return None
    if listed not in _MROPE_SECTIONS or len(listed) != positions.shape[0]:
        return refuse_tiling(
            call, f"mropeSection {listed} should be one of {_MROPE_SECTIONS}, one entry a row"
        )
    half = call["cos_sin_cache"].shape[-1] // 2
    return refuse_tiling(call, f"mropeSection {listed} should sum to {half}") if sum(listed) != half else None


@limit(_MROPE, code=PARAMETER, source=_PAGE + "four sections take cache_mode default alone")
def mrope_four_sections_in_default_mode(call: Call) -> str | None:
    # For 1-D positions the page asks for the default mode too, but upstream's test runs the other one: disputed,
    # and without effect on the result, so it is let through.
    four = call["mrope_section"] is not None and len(call["mrope_section"]) == 4
    if call["cache_mode"] == "interleave" and four:
        return refuse_parameter(
            call, "cache_mode interleave is not supported for mropeSection of 4 elements."
        )
    return None


@limit(
    _MROPE,
    code=DEVICE_FAULT,
    source=_PAGE + "every position below the rows of the table, nothing checked",
    when="execution",
)
def mrope_positions_in_the_table(call: Call) -> str | None:
    return _position_fault(call, call["cos_sin_cache"].shape[0])


@limit(
    "atb::_npu_rotary_embedding",
    code=DEVICE_FAULT,
    source="fact sheet 1.5: rows are looked up in the table kept from the first call",
    when="execution",
)
def rotary_embedding_positions_in_the_first_table(call: Call) -> str | None:
    kept = _FIRST.halves if _FIRST.halves is not None else call["cos_sin_cache"]
    return _position_fault(call, kept.shape[0])


def _position_fault(call: Call, rows: int) -> str | None:
    positions = call["positions"]
    wrong = positions[(positions < 0) | (positions >= rows)]
    return device_fault(call, f"position {int(wrong[0])}, table of {rows} rows") if wrong.numel() else None


@limit("atb::_npu_rotary_embedding", code=ATB_DTYPE, source="fact sheet 1.5; op-plugin test_atb_rope.py")
def rotary_embedding_query_and_key_of_one_dtype(call: Call) -> str | None:
    # The table may be float32 beside float16 queries: the upstream test runs so.
    return dtype_refusal(call, "key", (call["query"].dtype,), refuse_atb)


@limit(
    "atb::_npu_rotary_embedding", code=ATB_PARAMETER, source="op-plugin AtbCommon.cpp: tensors are contiguous"
)
def rotary_embedding_outputs_contiguous(call: Call) -> str | None:
    return contiguity_refusal(call, ("query", "key"), refuse_atb)
