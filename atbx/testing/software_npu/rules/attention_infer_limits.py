"""npu_fused_infer_attention_score, first and second form: what it refuses.

Each check reads the call through `read`, so both forms, their `.out` overloads and the workspace queries meet the
same limits. Dtypes and strides are parameter checks (161002), shapes and modes are refused by tiling (561002).
Block ids are not checked by the operator: a wrong one is a fault of the device while the kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from atbx.testing.software_npu.rules.attention_core import blocks_named, is_block_out_of_range
from atbx.testing.software_npu.rules.attention_infer import COMPRESSED, EVERY_FORM, LAYOUTS, Inference, read
from atbx.testing.software_npu.rules.registry import (
    DEVICE_FAULT,
    NZ,
    PARAMETER,
    TILING,
    Call,
    contiguity_refusal,
    device_fault,
    dtype_refusal,
    limit,
    refuse_tiling,
)

_PAGE = "op-plugin pages npu_fused_infer_attention_score(_v2), "
_FLOATS = (torch.float16, torch.bfloat16)


def _shape_limit(source: str) -> Callable[[Callable[[Inference], str | None]], Callable[[Call], str | None]]:
    """Register a tiling check written over the parsed call; calls whose layout is unknown meet only that limit."""

    def register(check: Callable[[Inference], str | None]) -> Callable[[Call], str | None]:
        def of_call(call: Call) -> str | None:
            if call["input_layout"] not in LAYOUTS:
                return None
            text = check(read(call.arguments))
            return None if text is None else refuse_tiling(call, text)

        limit(*EVERY_FORM, code=TILING, source=_PAGE + source, name=check.__name__)(of_call)
        return of_call

    return register


# --- parameter checks -------------------------------------------------------------------------------------------


@limit(*EVERY_FORM, code=PARAMETER, source=_PAGE + "parameters")
def query_float16_or_bfloat16(call: Call) -> str | None:
    return dtype_refusal(call, "query", (*_FLOATS, torch.int8))


@limit(*EVERY_FORM, code=PARAMETER, source=_PAGE + "parameters")
def key_and_value_of_the_query_dtype_or_quantised(call: Call) -> str | None:
    allowed = (call["query"].dtype, torch.int8, torch.int32)
    return dtype_refusal(call, "key", allowed) or dtype_refusal(call, "value", (call["key"].dtype,))


@limit(*EVERY_FORM, code=PARAMETER, source=_PAGE + "parameters (atten_mask)")
def mask_bool_or_one_byte(call: Call) -> str | None:
    return dtype_refusal(call, "atten_mask", (torch.bool, torch.int8, torch.uint8))


@limit(*EVERY_FORM, code=PARAMETER, source=_PAGE + "parameters (block_table)")
def block_table_int32(call: Call) -> str | None:
    return dtype_refusal(call, "block_table", (torch.int32,))


@limit(*EVERY_FORM, code=PARAMETER, source=_PAGE + "parameters: non-contiguous tensors not supported")
def tensors_contiguous(call: Call) -> str | None:
    # A cache in the fractal format has no strides to speak of.
    names = ("query", "key", "value", "atten_mask", "pse_shift", "block_table", "query_rope", "key_rope")
    return contiguity_refusal(call, [name for name in names if call.formats.get(name) != NZ])


@limit(*EVERY_FORM, code=PARAMETER, source=_PAGE + "parameters (input_layout)")
def known_layout(call: Call) -> str | None:
    layout = call["input_layout"]
    if layout in LAYOUTS:
        return None
    return f"EZ1001: inputLayout {layout} is not supported, should be in {sorted(LAYOUTS)}."


# --- heads and sizes --------------------------------------------------------------------------------------------


@_shape_limit("num_key_value_heads")
def kv_heads_divide_heads_at_most_64_times(call: Inference) -> str | None:
    if call.heads % call.kv_heads or call.heads // call.kv_heads > 64:
        return f"numHeads {call.heads} should be a multiple of numKeyValueHeads {call.kv_heads}, at most 64 times"
    return None


@_shape_limit("num_query_heads, num_key_value_heads")
def heads_agree_with_the_shapes(call: Inference) -> str | None:
    axis = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}.get(call.query_layout)
    if axis is None:
        if call.query.shape[-1] % call.heads:
            return f"query H {call.query.shape[-1]} should be a multiple of numHeads {call.heads}"
        return None
    if call.query.shape[axis] != call.heads:
        return f"query N {call.query.shape[axis]} should equal numHeads {call.heads}"
    if call.block_table is None and call.key.shape[axis] != call.kv_heads:
        return f"key N {call.key.shape[axis]} should equal numKeyValueHeads {call.kv_heads}"
    return None


@_shape_limit("constraints: key and value of one shape (upstream's tests run D 192 with values of 128)")
def key_and_value_of_one_shape(call: Inference) -> str | None:
    if call.key.shape == call.value.shape or (call.head_size, call.value_head_size) == (192, 128):
        return None
    return f"key shape {tuple(call.key.shape)} should equal value shape {tuple(call.value.shape)}"


@_shape_limit("constraints: B <= 65536, N <= 256, D <= 512")
def batch_heads_and_head_size_in_range(call: Inference) -> str | None:
    if call.batch > 65536:
        return f"batch size {call.batch} should not be greater than 65536"
    if call.heads > 256:
        return f"numHeads {call.heads} should not be greater than 256"
    if call.head_size > 512:
        return f"headDim {call.head_size} should not be greater than 512"
    return None


@_shape_limit("constraints: D in multiples of 16")
def head_size_multiple_of_16(call: Inference) -> str | None:
    step = 32 if torch.int8 in (call.query.dtype, call.key.dtype) else 16
    return f"headDim {call.head_size} should be {step} aligned" if call.head_size % step else None


@_shape_limit("constraints: N*D below 65535 for BSH and BSND")
def row_width_below_65535(call: Inference) -> str | None:
    width = call.heads * call.head_size
    if call.query_layout in ("BSH", "BSND") and width >= 65535:
        return f"N*D {width} should be less than 65535 in layout {call.query_layout}"
    return None


@_shape_limit("constraints: KV_S <= 262144 for one query row, 20971520 above")
def kv_length_in_range(call: Inference) -> str | None:
    most = 262144 if call.is_decode else 20971520
    longest = max((length for _, length in call.kv_spans()), default=0)
    return f"KV sequence length {longest} should not be greater than {most}" if longest > most else None


@_shape_limit("input_layout: results in another layout")
def layouts_that_need_more_rows(call: Inference) -> str | None:
    layout = call.arguments.get("input_layout")
    if layout == "BNSD_BSND" and call.q_rows == 1:
        return "layout BNSD_BSND is only supported when Q_S is greater than 1"
    if layout == "BNSD_NBSD" and not 1 < call.q_rows <= 16:
        return f"layout {layout} is only supported when Q_S is in (1, 16], but got {call.q_rows}"
    return None


@_shape_limit("inner_precise")
def inner_precise_known(call: Inference) -> str | None:
    most = 1 if call.is_decode else 3
    precise = int(call.arguments.get("inner_precise", 0))
    return None if 0 <= precise <= most else f"innerPrecise {precise} should be in [0, {most}]"


# --- lengths ----------------------------------------------------------------------------------------------------


def _length_list(call: Inference, name: str, lengths: list[int] | None, whole: int) -> str | None:
    if lengths is None:
        return None
    if len(lengths) != 1 and len(lengths) < call.batch:
        return f"the length of {name} is {len(lengths)}, should be 1 or not less than batch size {call.batch}"
    wrong = [length for length in lengths[: call.batch] if not 0 <= length <= whole]
    return f"{name} {wrong[0]} should be in range [0, {whole}]" if wrong else None


@_shape_limit("actual_seq_lengths: one, or at least as many as sequences, none longer than the axis")
def length_lists_cover_the_batch(call: Inference) -> str | None:
    if call.is_packed:
        return None
    rows = None if call.is_decode else _length_list(call, "actualSeqLengths", call.q_lengths, call.q_rows)
    if rows is not None:
        return rows
    if call.block_table is not None:
        most = call.block_table.shape[-1] * call.cache_block
    else:
        most = call.key.shape[2 if call.query_layout == "BNSD" else 1]
    return _length_list(call, "actualSeqLengthsKv", call.kv_lengths, most)


@_shape_limit("TND: both lists given, at most 4096 entries")
def tnd_needs_both_lists(call: Inference) -> str | None:
    if not call.is_packed:
        return None
    if call.q_lengths is None or call.kv_lengths is None:
        return "actualSeqLengths and actualSeqLengthsKv should be given when the layout is TND"
    if len(call.q_lengths) > 4096:
        return f"the length of actualSeqLengths {len(call.q_lengths)} should not be greater than 4096"
    if len(call.kv_lengths) < len(call.q_lengths) or (
        call.block_table is None and len(call.kv_lengths) != len(call.q_lengths)
    ):
        return (
            f"the length of actualSeqLengthsKv {len(call.kv_lengths)} should equal that of actualSeqLengths "
            f"{len(call.q_lengths)}"
        )
    return None


@_shape_limit("TND: lengths are cumulative and end at the number of rows")
def tnd_lengths_cumulative(call: Inference) -> str | None:
    if not call.is_packed or not call.q_lengths or call.kv_lengths is None:
        return None
    lists = [("actualSeqLengths", call.q_lengths, call.q_rows)]
    if call.block_table is None:
        slots = call.key.shape[0 if call.query_layout == "TND" else 1]
        lists.append(("actualSeqLengthsKv", call.kv_lengths, slots))
    for name, ends, total in lists:
        if any(after < before for before, after in zip([0, *ends], ends, strict=False)):
            return f"{name} {ends} should not be negative and should not decrease"
        if ends and ends[-1] != total:
            return f"the last element of {name} {ends[-1]} should be equal to T {total}"
    return None


@_shape_limit("TND without rope: D of 64 or 128, or 192 with values of 128 or 192 (256 is refused)")
def tnd_head_size_64_or_128(call: Inference) -> str | None:
    if not call.is_packed or call.arguments.get("query_rope") is not None:
        return None
    size, value_size = call.head_size, call.value_head_size
    if (size in (64, 128) and value_size == size) or (size == 192 and value_size in (128, 192)):
        return None
    return f"layout TND only supports headDim 64, 128 or 192 with value headDim 128, 192, but got {size}, {value_size}"


def _is_packed_mha(call: Inference) -> bool:
    return call.is_packed and call.heads == call.kv_heads and call.arguments.get("query_rope") is None


@_shape_limit("TND with as many KV heads as heads: modes 0 without a mask, 3 and 4")
def tnd_mha_modes(call: Inference) -> str | None:
    if not _is_packed_mha(call) or (call.mode == 0 and call.mask is None) or call.mode in (3, 4):
        return None
    return f"layout TND in MHA supports sparseMode 0 without attenMask, 3 and 4, but got {call.mode}"


@_shape_limit("TND with as many KV heads as heads: inner_precise 0 or 1 in float16, 0 in bfloat16")
def tnd_mha_inner_precise(call: Inference) -> str | None:
    precise = int(call.arguments.get("inner_precise", 0))
    most = 1 if call.query.dtype == torch.float16 else 0
    if not _is_packed_mha(call) or 0 <= precise <= most:
        return None
    return f"innerPrecise {precise} should be in [0, {most}] in layout TND in MHA"


# --- masks ------------------------------------------------------------------------------------------------------


@_shape_limit("sparse_mode: 0 to 4 (9 with rope)")
def sparse_mode_known(call: Inference) -> str | None:
    tree = call.mode == 9 and call.arguments.get("query_rope") is not None
    return None if call.mode in range(5) or tree else f"sparseMode {call.mode} is not supported"


@_shape_limit("sparse_mode: modes 1 to 4 need a mask")
def mode_needs_a_mask(call: Inference) -> str | None:
    if call.mode in (1, 2, 3, 4) and call.mask is None and not call.is_decode:
        return f"attenMask should not be null when sparseMode is {call.mode}"
    return None


@_shape_limit("atten_mask: [2048, 2048] (or with leading ones) in modes 2, 3 and 4")
def compressed_mask_2048(call: Inference) -> str | None:
    if call.mask is None or call.mode not in (2, 3, 4):
        return None
    shape = tuple(call.mask.shape)
    if shape[-2:] == (COMPRESSED, COMPRESSED) and len(shape) <= 4 and set(shape[:-2]) <= {1}:
        return None
    return f"attenMask shape {shape} should be [2048, 2048], [1, 2048, 2048] or [1, 1, 2048, 2048]"


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


@_shape_limit("atten_mask: the whole matrix in modes 0 and 1; its last axis may be padded to 16 or 32")
def whole_mask_shape(call: Inference) -> str | None:
    if call.mask is None or call.mode not in (0, 1) or call.is_packed:
        return None
    if call.block_table is None:
        slots = call.key.shape[2 if call.query_layout == "BNSD" else 1]
        wide = {slots, _up(slots, 16), _up(slots, 32)}
    else:
        slots = call.block_table.shape[-1] * call.cache_block
        wide = set(range(slots, max(slots, call.mask.shape[-1]) + 1))
    tall = {call.q_rows, _up(call.q_rows, 16), _up(call.q_rows, 32)}
    shape = tuple(call.mask.shape)
    if call.is_decode and len(shape) == 2:
        fits = shape[0] in (1, call.batch) and shape[1] in wide
    else:
        lead = shape[:-2]
        leads_fit = lead in ((), (1,), (1, 1), (call.batch, 1)) or (call.is_decode and lead == (call.batch,))
        fits = len(shape) >= 2 and leads_fit and shape[-2] in tall and shape[-1] in wide
    if fits:
        return None
    return f"attenMask shape {shape} should be (1 or B, 1, {call.q_rows}, {slots}) when sparseMode is {call.mode}"


# --- paged caches -----------------------------------------------------------------------------------------------


def _paged_limit(source: str) -> Callable[[Callable[[Inference], str | None]], Callable[[Call], str | None]]:
    """As _shape_limit, for calls that carry a block table."""

    def register(check: Callable[[Inference], str | None]) -> Callable[[Call], str | None]:
        def guarded(call: Inference) -> str | None:
            return None if call.block_table is None else check(call)

        guarded.__name__ = check.__name__
        return _shape_limit(source)(guarded)

    return register


@_paged_limit(
    "paged: [blocks, block, H] for BSH and BSND; also [blocks, KV_N, block, D] for BNSD and TND; 5-D fractal"
)
def paged_cache_form(call: Inference) -> str | None:
    forms = (3, 5) if call.query_layout in ("BSH", "BSND") else (3, 4, 5)
    if call.key.dim() not in forms:
        return f"key cache of {call.key.dim()} dims is not supported for query layout {call.query_layout}"
    if call.key.dim() == 4 and call.key.shape[1] != call.kv_heads:
        return f"key cache shape {tuple(call.key.shape)} should be [blockNum, {call.kv_heads}, blockSize, D]"
    if call.key.dim() == 5 and (call.key.shape[1] != call.kv_heads or call.key.shape[4] not in (16, 32)):
        return f"key cache shape {tuple(call.key.shape)} should be [blockNum, {call.kv_heads}, D/16, blockSize, 16]"
    if call.key.dim() == 3 and call.key.shape[2] % call.kv_heads:
        return f"key cache H {call.key.shape[2]} should be a multiple of numKeyValueHeads {call.kv_heads}"
    return None


@_paged_limit("TND with as many KV heads as heads: the cache is [blocks, block, H]")
def tnd_mha_paged_cache_of_rows(call: Inference) -> str | None:
    if _is_packed_mha(call) and call.key.dim() == 4:
        return "layout TND in MHA only supports a key cache of shape [blockNum, blockSize, H]"
    return None


@_paged_limit("paged: H of a cache [blocks, block, H] at most 65535")
def paged_row_at_most_65535(call: Inference) -> str | None:
    if call.key.dim() == 3 and call.key.shape[2] > 65535:
        return f"KV_N*D {call.key.shape[2]} should not be greater than 65535"
    return None


@_paged_limit("paged: block_size; 128 to 512 in multiples of 128, multiples of 16 for one row and in TND")
def paged_block_size(call: Inference) -> str | None:
    size = int(call.arguments.get("block_size", 0))
    if size != call.cache_block:
        return f"blockSize {size} should equal the block size of the key cache {call.cache_block}"
    step = 32 if call.key.dtype == torch.int8 else 16
    if call.is_packed:
        fits = 0 < size <= 1024 and size % 16 == 0
    elif call.is_decode:
        fits = 0 < size <= 512 and size % step == 0
    else:
        fits = 128 <= size <= 512 and size % 128 == 0
    return None if fits else f"blockSize {size} is not supported when Q_S is {call.q_rows}"


@_paged_limit("paged: KV lengths must be given")
def paged_needs_kv_lengths(call: Inference) -> str | None:
    return "actualSeqLengthsKv should be given when blockTable is given" if call.kv_lengths is None else None


@_paged_limit("paged: block_table [B, at least the blocks of the longest sequence]")
def block_table_covers_the_batch(call: Inference) -> str | None:
    table = call.block_table
    if table is None or call.kv_lengths is None:
        return None
    if table.dim() != 2 or table.shape[0] != call.batch:
        return f"blockTable shape {tuple(table.shape)} should be 2-D with batch size {call.batch} rows"
    longest = max((length for _, length in call.kv_spans()), default=0)
    if table.shape[1] * call.cache_block < longest:
        return f"blockTable second dim {table.shape[1]} is less than the blocks of KV length {longest}"
    return None


@_paged_limit("paged: no fewer blocks than the sequences use together")
def cache_holds_every_sequence(call: Inference) -> str | None:
    if call.kv_lengths is None:
        return None
    used = sum(-(-length // call.cache_block) for _, length in call.kv_spans())
    if used > call.key.shape[0]:
        return f"blockNum {call.key.shape[0]} should not be less than the blocks of all batches {used}"
    return None


@_paged_limit("paged: cache elements within int32")
def paged_cache_below_2_31_elements(call: Inference) -> str | None:
    if call.key.numel() >= 2**31 or call.value.numel() >= 2**31:
        return f"the element count of key {call.key.numel()} exceeds int32"
    return None


@_paged_limit("paged: no left padding")
def paged_without_left_padding(call: Inference) -> str | None:
    given = [n for n in ("query_padding_size", "kv_padding_size") if call.arguments.get(n) is not None]
    return f"{given[0]} is not supported with blockTable" if given else None


@limit(
    *EVERY_FORM[:2],
    code=DEVICE_FAULT,
    source=_PAGE + "paged: block ids are not validated (fact sheet 1.3, 6.5)",
    when="execution",
)
def block_ids_in_range(call: Call) -> str | None:
    parsed = read(call.arguments)
    if parsed.block_table is None or parsed.kv_lengths is None:
        return None
    for row, (_, length) in enumerate(parsed.kv_spans()):
        used = blocks_named(length, parsed.cache_block)
        wrong = is_block_out_of_range(parsed.block_table, row, used, parsed.key.shape[0])
        if wrong is not None:
            return device_fault(
                call, f"block id {wrong} of sequence {row}, cache of {parsed.key.shape[0]} blocks"
            )
    return None
