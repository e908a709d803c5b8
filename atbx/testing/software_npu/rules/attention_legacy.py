"""npu_prompt_flash_attention (prefill) and npu_incre_flash_attention (decode), the operators that 310P has.

They share the numerics of npu_fused_infer_attention_score and differ in their defaults: the prefill operator's
next_tokens is 0, so that a mask given in mode 0 also cuts everything above the top left diagonal; the decode
operator's single length list is that of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from atbx.testing.software_npu.rules.attention_core import blocks_named, is_block_out_of_range
from atbx.testing.software_npu.rules.attention_infer import COMPRESSED, INT_MAX, LAYOUTS, Inference, infer
from atbx.testing.software_npu.rules.chips import INFERENCE_310P, family
from atbx.testing.software_npu.rules.registry import (
    DEVICE_FAULT,
    PARAMETER,
    TILING,
    Call,
    NotModelledError,
    contiguity_refusal,
    device_fault,
    dtype_refusal,
    limit,
    refuse_parameter,
    refuse_tiling,
    rule,
)

_PROMPT, _INCRE = "npu::npu_prompt_flash_attention", "npu::npu_incre_flash_attention"
_PROMPT_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")
_INCRE_LAYOUTS = ("BSH", "BNSD", "BSND")


def _described(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    kv_heads: int,
    layout: str,
    q_lengths: Sequence[int] | None,
    kv_lengths: Sequence[int] | None,
    decode: bool,
    arguments: dict[str, Any],
) -> Inference:
    query_layout, out_layout = LAYOUTS.get(layout, (layout, layout))
    return Inference(
        arguments,
        query,
        key,
        value,
        heads,
        kv_heads or heads,
        query_layout,
        out_layout,
        None if q_lengths is None else [int(one) for one in q_lengths],
        None if kv_lengths is None else [int(one) for one in kv_lengths],
        decode,
    )


def _unquantised(name: str, given: dict[str, Any]) -> None:
    for argument, value in given.items():
        if value is not None:
            raise NotModelledError(f"{name} with {argument} is not modelled")


@rule(
    _PROMPT,
    source="op-plugin page and test_prompt_flash_attention.py (fact sheet 1.1.2)",
    status="upstream golden ran",
)
def prompt_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    deq_scale1: torch.Tensor | None = None,
    quant_scale1: torch.Tensor | None = None,
    deq_scale2: torch.Tensor | None = None,
    quant_scale2: torch.Tensor | None = None,
    quant_offset2: torch.Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = INT_MAX,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    sparse_mode: int = 0,
) -> torch.Tensor:
    """Prefill attention; modes as in npu_fused_infer_attention_score, next_tokens 0 by default."""
    _unquantised(
        _PROMPT, {"deq_scale1": deq_scale1, "quant_scale1": quant_scale1, "quant_scale2": quant_scale2}
    )
    arguments = {
        "atten_mask": atten_mask, "pse_shift": pse_shift, "softmax_scale": scale_value, "pre_tokens": pre_tokens,
        "next_tokens": next_tokens, "sparse_mode": sparse_mode,
    }  # fmt: skip
    call = _described(
        query, key, value, num_heads, num_key_value_heads, input_layout, actual_seq_lengths, actual_seq_lengths_kv,
        False, arguments,
    )  # fmt: skip
    return infer(call)[0]


@rule(
    _INCRE,
    source="op-plugin page and test_incre_flash_attention.py (fact sheet 1.2.1)",
    status="upstream golden ran",
)
def incre_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    dequant_scale1: torch.Tensor | None = None,
    quant_scale1: torch.Tensor | None = None,
    dequant_scale2: torch.Tensor | None = None,
    quant_scale2: torch.Tensor | None = None,
    quant_offset2: torch.Tensor | None = None,
    kv_padding_size: torch.Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
) -> torch.Tensor:
    """Decode attention, one query row per sequence; actual_seq_lengths are those of the KEYS."""
    _unquantised(
        _INCRE,
        {"antiquant_scale": antiquant_scale, "quant_scale1": quant_scale1, "quant_scale2": quant_scale2},
    )
    arguments = {
        "atten_mask": atten_mask, "pse_shift": pse_shift, "softmax_scale": scale_value, "block_table": block_table,
        "block_size": block_size, "kv_padding_size": kv_padding_size,
    }  # fmt: skip
    call = _described(
        query,
        key,
        value,
        num_heads,
        num_key_value_heads,
        input_layout,
        None,
        actual_seq_lengths,
        True,
        arguments,
    )
    return infer(call)[0]


# --- limits -----------------------------------------------------------------------------------------------------

_PAGES = "op-plugin pages of the two operators (fact sheet 1.1.2, 1.2.1): "
_BOTH = (_PROMPT, _INCRE)


@limit(*_BOTH, code=PARAMETER, source=_PAGES + "float16, bfloat16 on A2 and A3; keys and values alike")
def legacy_dtypes(call: Call) -> str | None:
    floats: tuple[torch.dtype, ...] = (torch.float16,)
    if family(call.chip) != INFERENCE_310P:
        floats = (torch.float16, torch.bfloat16)
    quantised = (torch.int8,) if call.name == _INCRE else ()
    return (
        dtype_refusal(call, "query", (*floats, *(() if call.name == _INCRE else (torch.int8,))))
        or dtype_refusal(call, "key", (call["query"].dtype, *quantised))
        or dtype_refusal(call, "value", (call["key"].dtype,))
        or dtype_refusal(call, "atten_mask", (torch.bool, torch.int8, torch.uint8))
        or dtype_refusal(call, "block_table", (torch.int32,))
    )


@limit(_PROMPT, code=PARAMETER, source=_PAGES + "no non-contiguous tensors")
def prompt_tensors_contiguous(call: Call) -> str | None:
    return contiguity_refusal(call, ("query", "key", "value", "atten_mask", "pse_shift"))


@limit(*_BOTH, code=PARAMETER, source=_PAGES + "input_layout")
def legacy_layout_known(call: Call) -> str | None:
    allowed = _PROMPT_LAYOUTS if call.name == _PROMPT else _INCRE_LAYOUTS
    layout = call["input_layout"]
    return (
        None if layout in allowed else refuse_parameter(call, f"inputLayout {layout} should be in {allowed}.")
    )


def _parsed(call: Call) -> Inference | None:
    layout = call["input_layout"]
    if layout not in _PROMPT_LAYOUTS:
        return None
    decode = call.name == _INCRE
    return _described(
        call["query"],
        call["key"],
        call["value"],
        int(call["num_heads"] or 1),
        int(call["num_key_value_heads"] or 0),
        layout,
        None if decode else call["actual_seq_lengths"],
        call["actual_seq_lengths"] if decode else call["actual_seq_lengths_kv"],
        decode,
        call.arguments,
    )


@limit(*_BOTH, code=TILING, source=_PAGES + "KV heads divide heads, at most 64 times")
def legacy_kv_heads(call: Call) -> str | None:
    parsed = _parsed(call)
    if parsed and (parsed.heads % parsed.kv_heads or parsed.heads // parsed.kv_heads > 64):
        return refuse_tiling(
            call, f"numHeads {parsed.heads} should be a multiple of {parsed.kv_heads}, at most 64 times"
        )
    return None


@limit(*_BOTH, code=TILING, source=_PAGES + "num_heads and num_key_value_heads equal the N of the shapes")
def legacy_heads_agree_with_the_shapes(call: Call) -> str | None:
    parsed = _parsed(call)
    axis = None if parsed is None else {"BSND": 2, "BNSD": 1, "TND": 1}.get(parsed.query_layout)
    if parsed is None or axis is None:
        return None
    if parsed.query.shape[axis] != parsed.heads:
        return refuse_tiling(call, f"query N {parsed.query.shape[axis]} should equal numHeads {parsed.heads}")
    if parsed.block_table is None and parsed.key.shape[axis] != parsed.kv_heads:
        return refuse_tiling(
            call, f"key N {parsed.key.shape[axis]} should equal numKeyValueHeads {parsed.kv_heads}"
        )
    return None


@limit(*_BOTH, code=TILING, source=_PAGES + "D at most 512, multiple of 16; N at most 256")
def legacy_head_size(call: Call) -> str | None:
    parsed = _parsed(call)
    if parsed is None:
        return None
    if parsed.heads > 256:
        return refuse_tiling(call, f"numHeads {parsed.heads} should not be greater than 256")
    if parsed.head_size > 512 or parsed.head_size % 16:
        return refuse_tiling(
            call, f"headDim {parsed.head_size} should be 16 aligned and not greater than 512"
        )
    return None


def _kv_slots(parsed: Inference) -> int:
    if parsed.block_table is not None:
        return parsed.block_table.shape[-1] * parsed.cache_block
    return parsed.key.shape[{"BNSD": 2, "TND": 0}.get(parsed.query_layout, 1)]


@limit(*_BOTH, code=TILING, source=_PAGES + "batch and length by operator and chip")
def legacy_batch_and_length(call: Call) -> str | None:
    parsed = _parsed(call)
    if parsed is None:
        return None
    narrow = family(call.chip) == INFERENCE_310P
    if call.name == _PROMPT:
        batch, length = (128, 65535) if narrow else (65536, 20971520)
    else:
        batch, length = (256, 65536) if narrow else (65535, 262144)
    if parsed.batch > batch:
        return refuse_tiling(
            call, f"batch size {parsed.batch} should not be greater than {batch} on {call.chip}"
        )
    slots = _kv_slots(parsed)
    return (
        refuse_tiling(call, f"sequence length {slots} should not be greater than {length}")
        if slots > length
        else None
    )


@limit(
    *_BOTH,
    code=TILING,
    source=_PAGES + "lists of one entry or at least one a sequence, none longer than the axis",
)
def legacy_length_lists(call: Call) -> str | None:
    parsed = _parsed(call)
    if parsed is None or parsed.is_packed:
        return None
    for name, lengths, most in (
        ("actualSeqLengths", parsed.q_lengths, parsed.q_rows),
        ("actualSeqLengthsKv", parsed.kv_lengths, _kv_slots(parsed)),
    ):
        if lengths is None:
            continue
        if len(lengths) != 1 and len(lengths) < parsed.batch:
            return refuse_tiling(
                call, f"the length of {name} {len(lengths)} should be 1 or at least {parsed.batch}"
            )
        wrong = [length for length in lengths[: parsed.batch] if not 0 <= length <= most]
        if wrong:
            return refuse_tiling(call, f"{name} {wrong[0]} should be in range [0, {most}]")
    return None


@limit(
    _PROMPT,
    code=PARAMETER,
    source=_PAGES + "310P: no GQA, no lengths, mode 0, no pse, next_tokens 0 or INT_MAX",
)
def prompt_restrictions_on_310p(call: Call) -> str | None:
    if family(call.chip) != INFERENCE_310P:
        return None
    if call["num_key_value_heads"]:
        return refuse_parameter(
            call, f"numKeyValueHeads {call['num_key_value_heads']} should be 0 on {call.chip}."
        )
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv", "pse_shift"):
        if call[name] is not None:
            return refuse_parameter(call, f"{name} is not supported on {call.chip}.")
    if call["sparse_mode"]:
        return refuse_parameter(call, f"sparseMode {call['sparse_mode']} should be 0 on {call.chip}.")
    if call["next_tokens"] not in (0, INT_MAX) or call["pre_tokens"] != INT_MAX:
        return refuse_parameter(
            call, f"preTokens and nextTokens {call['next_tokens']} are not supported on {call.chip}."
        )
    return None


@limit(_PROMPT, code=TILING, source=_PAGES + "modes 0 to 4; 1 to 4 need a mask; 2, 3 and 4 one of 2048x2048")
def prompt_mode_and_mask(call: Call) -> str | None:
    mode, mask = int(call["sparse_mode"] or 0), call["atten_mask"]
    if mode not in range(5):
        return refuse_tiling(call, f"sparseMode {mode} is not supported")
    if mode and mask is None:
        return refuse_tiling(call, f"attenMask should not be null when sparseMode is {mode}")
    if mode in (2, 3, 4) and tuple(mask.shape[-2:]) != (COMPRESSED, COMPRESSED):
        return refuse_tiling(call, f"attenMask shape {tuple(mask.shape)} should be [2048, 2048]")
    return None


@limit(_PROMPT, code=DEVICE_FAULT, source=_PAGES + "a mask row entirely 1 is not allowed", when="execution")
def prompt_mask_leaves_a_position(call: Call) -> str | None:
    mask, parsed = call["atten_mask"], _parsed(call)
    if mask is None or parsed is None or int(call["sparse_mode"] or 0) not in (0, 1) or mask.dim() < 2:
        return None
    rows = mask[..., : parsed.q_rows, : _kv_slots(parsed)].bool()
    return (
        device_fault(call, "a row of attenMask is entirely 1; the result is not defined")
        if rows.all(-1).any()
        else None
    )


@limit(_INCRE, code=TILING, source=_PAGES + "one query row per sequence")
def incre_one_query_row(call: Call) -> str | None:
    parsed = _parsed(call)
    if parsed is None or parsed.is_packed or parsed.q_rows == 1:
        return None
    return refuse_tiling(call, f"query S {parsed.q_rows} should be 1")


@limit(_INCRE, code=PARAMETER, source=_PAGES + "310P: no pse_shift, no quantised result")
def incre_restrictions_on_310p(call: Call) -> str | None:
    if family(call.chip) != INFERENCE_310P:
        return None
    given = [name for name in ("pse_shift", "quant_scale2", "quant_offset2") if call[name] is not None]
    return refuse_parameter(call, f"{given[0]} is not supported on {call.chip}.") if given else None


@limit(
    _INCRE,
    code=TILING,
    source=_PAGES + "paged: lengths given, tables large enough, block size aligned, cache forms",
)
def incre_paged_cache(call: Call) -> str | None:
    parsed = _parsed(call)
    if parsed is None or parsed.block_table is None:
        return None
    if parsed.kv_lengths is None:
        return refuse_tiling(call, "actualSeqLengths should be given when blockTable is given")
    forms = (3, 4) if parsed.query_layout == "BNSD" else (3,)
    if parsed.key.dim() not in forms:
        return refuse_tiling(
            call, f"key cache of {parsed.key.dim()} dims does not fit layout {parsed.query_layout}"
        )
    if parsed.key.dim() == 3 and parsed.key.shape[2] > 65535:
        return refuse_tiling(call, f"H {parsed.key.shape[2]} should not be greater than 65535")
    size, step = int(call["block_size"] or 0), 32 if parsed.key.dtype == torch.int8 else 16
    if size != parsed.cache_block or size <= 0 or size % step:
        return refuse_tiling(call, f"blockSize {size} should be that of the cache and {step} aligned")
    table, spans = parsed.block_table, [length for _, length in parsed.kv_spans()]
    if table.dim() != 2 or table.shape[0] != parsed.batch or table.shape[1] * size < max(spans, default=0):
        return refuse_tiling(call, f"blockTable {tuple(table.shape)} is too small for lengths {spans}")
    if sum(blocks_named(length, size) for length in spans) > parsed.key.shape[0]:
        return refuse_tiling(call, f"blockNum {parsed.key.shape[0]} is less than the blocks of all batches")
    return None


@limit(_INCRE, code=DEVICE_FAULT, source=_PAGES + "block ids in [0, blocks), not checked", when="execution")
def incre_block_ids_in_range(call: Call) -> str | None:
    parsed = _parsed(call)
    if parsed is None or parsed.block_table is None:
        return None
    for row, (_, length) in enumerate(parsed.kv_spans()):
        used = blocks_named(length, parsed.cache_block)
        wrong = is_block_out_of_range(parsed.block_table, row, used, parsed.key.shape[0])
        if wrong is not None:
            return device_fault(
                call, f"block id {wrong} of sequence {row}, cache of {parsed.key.shape[0]} blocks"
            )
    return None
