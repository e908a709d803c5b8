"""npu_fused_infer_attention_score, first and second form: what it computes.

Both forms are brought to one frozen description (`Inference`) whose names are those of the second form; lengths,
layouts, masks and caches are settled there, sequence by sequence, and `attend` does the rest. The operator's own
conventions: a mask value of 1 (True) takes the position away; lengths are cumulative in TND and NTD layouts, per
sequence elsewhere, and the KV lengths of a paged cache are per sequence even in TND; with one query row per
sequence (not in TND) modes and bands have no effect; a sequence of KV length 0 gives zeros.

Values that no document defines (a row with every position taken away while inner_precise has bit 1 unset, and
query rows past their sequence's length) come out as NaN, so that nobody can rest on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atbx.testing.software_npu.rules.attention_core import attend, gather_blocks, token_major
from atbx.testing.software_npu.rules.registry import NotModelledError, rule

V1 = "npu::npu_fused_infer_attention_score"
V2 = "npu::npu_fused_infer_attention_score_v2"
V1_WORKSPACE = "npu::_npu_fused_infer_attention_score_get_max_workspace"
V2_WORKSPACE = "npu::_npu_fused_infer_attention_score_v2_get_max_workspace"
EVERY_FORM = (V1, V2, V1_WORKSPACE, V2_WORKSPACE)

COMPRESSED = 2048  # rows and columns of the fixed triangular mask of modes 2, 3 and 4
INT_MAX = 2147483647

# Layout of the queries (and of keys and values without a cache), and layout of the result.
LAYOUTS = {
    "BSH": ("BSH", "BSH"),
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "BSH_BNSD": ("BSH", "BNSD"),
    "BSND_BNSD": ("BSND", "BNSD"),
    "BSH_NBSD": ("BSH", "NBSD"),
    "BSND_NBSD": ("BSND", "NBSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"),
    "TND": ("TND", "TND"),
    "NTD": ("NTD", "NTD"),
    "TND_NTD": ("TND", "NTD"),
    "NTD_TND": ("NTD", "TND"),
}

_SECOND_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "key_antiquant_scale": "dequant_scale_key",
    "key_antiquant_offset": "dequant_offset_key",
    "value_antiquant_scale": "dequant_scale_value",
    "value_antiquant_offset": "dequant_offset_value",
    "key_antiquant_mode": "key_quant_mode",
    "value_antiquant_mode": "value_quant_mode",
    "softmax_lse_flag": "return_softmax_lse",
}

# Arguments whose meaning is not modelled: quantised queries and results, a shared prefix, the merged form of
# the KV quantisation parameters.
_NOT_MODELLED = (
    "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2", "antiquant_scale",
    "antiquant_offset", "key_shared_prefix", "value_shared_prefix", "actual_shared_prefix_len",
    "key_rope_antiquant_scale", "dequant_scale_query", "dequant_scale_key_rope", "quant_scale_out",
    "quant_offset_out", "quant_scale_p",
)  # fmt: skip


def _listed(value: Any) -> list[int] | None:
    return None if value is None else [int(one) for one in value]


@dataclass(frozen=True)
class Inference:
    """One call of either form, by the names of the second form; layouts parsed, lists as Python ints.

    query_layout, out_layout: "BSH", "TND", ...; batch: sequences; q_rows: query rows of a sequence, or all rows T
    in TND and NTD; paged: whether a block table was given.
    """

    arguments: Mapping[str, Any]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    heads: int
    kv_heads: int
    query_layout: str
    out_layout: str
    q_lengths: list[int] | None
    kv_lengths: list[int] | None
    one_row_is_decode: bool = True  # false in the prefill operator, which has no incremental kernel

    @property
    def block_table(self) -> torch.Tensor | None:
        return self.arguments.get("block_table")

    @property
    def mask(self) -> torch.Tensor | None:
        return self.arguments.get("atten_mask")

    @property
    def mode(self) -> int:
        return int(self.arguments.get("sparse_mode", 0))

    @property
    def is_packed(self) -> bool:
        return self.query_layout in ("TND", "NTD")

    @property
    def q_rows(self) -> int:
        return self.query.shape[{"BSH": 1, "BSND": 1, "BNSD": 2, "TND": 0, "NTD": 1}[self.query_layout]]

    @property
    def batch(self) -> int:
        if self.is_packed:
            return len(self.q_lengths or ())
        return self.query.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether the incremental kernel runs: one query row per sequence, not in a packed layout."""
        return self.one_row_is_decode and not self.is_packed and self.q_rows == 1

    @property
    def head_size(self) -> int:
        return self.query.shape[-1] // self.heads if self.query_layout == "BSH" else self.query.shape[-1]

    @property
    def cache_block(self) -> int:
        """Slots of a cache block, read from the cache's shape."""
        return self.key.shape[{3: 1, 4: 2, 5: 3}[self.key.dim()]]

    @property
    def value_head_size(self) -> int:
        if self.block_table is not None:
            return token_major(self.value, self.kv_heads).shape[-1]
        return self.value.shape[-1] // self.kv_heads if self.query_layout == "BSH" else self.value.shape[-1]

    def q_spans(self) -> list[tuple[int, int]]:
        """First row and row count of every sequence's queries (rows of the packed axis, or of its own)."""
        if self.is_packed:
            ends = self.q_lengths or []
            return [(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]
        rows = self.q_rows
        # With one row per sequence the list of query lengths has no effect.
        lengths = None if self.is_decode else self.q_lengths
        return [(0, length) for length in spread(lengths, self.batch, rows)]

    def kv_spans(self) -> list[tuple[int, int]]:
        """First slot and slot count of every sequence's keys; the start is 0 except in a packed layout."""
        if self.block_table is None and self.is_packed:
            ends = self.kv_lengths or []
            return [(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]
        if self.block_table is not None:
            return [(0, length) for length in spread(self.kv_lengths, self.batch, 0)]
        slots = self.key.shape[2 if self.query_layout == "BNSD" else 1]
        return [(0, length) for length in spread(self.kv_lengths, self.batch, slots)]


def spread(lengths: Sequence[int] | None, batch: int, whole: int) -> list[int]:
    """Lengths of `batch` sequences: one for all, or the first `batch` of the list; absent means `whole`."""
    if lengths is None:
        return [whole] * batch
    if len(lengths) == 1:
        return [int(lengths[0])] * batch
    return [int(one) for one in lengths[:batch]]


def read(arguments: Mapping[str, Any]) -> Inference:
    """The call of either form as one description."""
    named = {_SECOND_NAMES.get(name, name): value for name, value in arguments.items()}
    query, key, value = named["query"], named["key"], named["value"]
    heads = int(named.get("num_query_heads", 1))
    layout = named.get("input_layout", "BSH")
    query_layout, out_layout = LAYOUTS.get(layout, (layout, layout))
    return Inference(
        named, query, key, value, heads, int(named.get("num_key_value_heads", 0)) or heads, query_layout, out_layout,
        _listed(named.get("actual_seq_qlen")), _listed(named.get("actual_seq_kvlen")),
    )  # fmt: skip


# --- masks ------------------------------------------------------------------------------------------------------


def _diagonals(mask: torch.Tensor) -> torch.Tensor:
    """Value of the compressed mask on each diagonal (column - row), from -2047 to 2047: [4095].

    The kernel lays the fixed matrix along the diagonal of each tile, so only its diagonals count.
    """
    square = mask.reshape(mask.shape[-2:]).bool()
    return torch.cat([square[:, 0].flip(0), square[0, 1:]])


def _on_diagonal(diagonals: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Mask value at each distance (key - query position): beyond the matrix, above is taken and below is kept."""
    reach = COMPRESSED - 1
    near = diagonals[(distance.clamp(-reach, reach) + reach).long()]
    return torch.where(distance > reach, True, torch.where(distance < -reach, False, near))


def masked_positions(call: Inference, sequence: int, tokens: int, slots: int) -> torch.Tensor | None:
    """Which of the [tokens, slots] positions of one sequence are taken away; None for none.

    Modes: 0 the whole mask and the band of pre_tokens and next_tokens from the top left corner (without a mask
    nothing is taken away and the band is ignored); 1 the whole mask; 2 causal from the top left corner; 3 causal
    from the bottom right corner; 4 the band from the bottom right corner, both ends included.
    """
    mask, mode = call.mask, call.mode
    if mask is None:
        return None
    if call.is_decode:
        return _whole(mask, sequence, tokens, slots) if mode in (0, 1) else None
    rows = torch.arange(tokens).unsqueeze(1)
    distance = torch.arange(slots).unsqueeze(0) - rows
    before = int(call.arguments.get("pre_tokens", INT_MAX))
    after = int(call.arguments.get("next_tokens", INT_MAX))
    if mode == 0:
        return _whole(mask, sequence, tokens, slots) | (distance > after) | (distance < -before)
    if mode == 1:
        return _whole(mask, sequence, tokens, slots)
    diagonals = _diagonals(mask)
    if mode == 2:
        return _on_diagonal(diagonals, distance)
    distance = distance - (slots - tokens)
    if mode == 3:
        return _on_diagonal(diagonals, distance)
    if mode == 4:
        above = _on_diagonal(diagonals, distance - after)
        return above | ~_on_diagonal(diagonals, distance + before + 1)
    raise NotModelledError(f"sparse_mode {mode} is not modelled")


def _whole(mask: torch.Tensor, sequence: int, tokens: int, slots: int) -> torch.Tensor:
    """The part of a whole mask [.., rows, slots] that one sequence uses, as bool [tokens, slots].

    Forms: [B, S] (one query row), [Q, S], [1, Q, S], [B, 1, Q, S], [1, 1, Q, S]; rows and slots may be padded.
    """
    if mask.dim() == 2 and tokens == 1 and mask.shape[0] != 1:
        mask = mask[sequence].view(1, -1)
    while mask.dim() > 2:
        mask = mask[sequence if mask.shape[0] > 1 else 0]
    return mask[:tokens, :slots].bool()


# --- keys and values --------------------------------------------------------------------------------------------


def _dequantised(tensor: torch.Tensor, call: Inference, side: str, sequence: int, start: int) -> torch.Tensor:
    """Keys or values [S, K, D] of one sequence in the dtype of the queries: (int8 + offset) * scale."""
    if tensor.dtype not in (torch.int8, torch.int32):
        return tensor
    scale, offset = call.arguments.get(f"dequant_scale_{side}"), call.arguments.get(f"dequant_offset_{side}")
    mode = int(call.arguments.get(f"{side}_quant_mode", 0))
    if tensor.dtype == torch.int32 or scale is None or mode not in (0, 1):
        raise NotModelledError(f"quantised {side} with {side}_quant_mode {mode} is not modelled")
    slots, heads, size = tensor.shape

    def shaped(parameter: torch.Tensor) -> torch.Tensor:
        if mode == 1:  # per token: [B, S]
            return parameter.float()[sequence, start : start + slots].view(slots, 1, 1)
        if parameter.numel() == 1:
            return parameter.float().view(1, 1, 1)
        return parameter.float().reshape(1, heads, size)

    wide = tensor.float()
    if offset is not None:
        wide = wide + shaped(offset)
    return (wide * shaped(scale)).to(call.query.dtype)


def _slots_of(call: Inference, tensor: torch.Tensor, sequence: int, start: int, count: int) -> torch.Tensor:
    """Keys or values [S, K, D] of one sequence, from a paged cache or from the layout of the call."""
    if call.block_table is not None:
        return gather_blocks(token_major(tensor, call.kv_heads), call.block_table[sequence], count)
    if call.query_layout == "BSH":
        whole = tensor[sequence].unflatten(-1, (call.kv_heads, -1))
    elif call.query_layout == "BSND":
        whole = tensor[sequence]
    elif call.query_layout == "BNSD":
        whole = tensor[sequence].transpose(0, 1)
    elif call.query_layout == "TND":
        whole = tensor
    else:
        whole = tensor.transpose(0, 1)
    return whole[start : start + count]


def _queries(call: Inference, tensor: torch.Tensor, sequence: int) -> torch.Tensor:
    """All query rows [T, H, D] of one sequence, or of the whole packed axis."""
    if call.query_layout == "BSH":
        return tensor[sequence].unflatten(-1, (call.heads, -1))
    if call.query_layout == "BSND":
        return tensor[sequence]
    if call.query_layout == "BNSD":
        return tensor[sequence].transpose(0, 1)
    return tensor if call.query_layout == "TND" else tensor.transpose(0, 1)


def _left_padding(call: Inference, name: str, whole: int, length: int) -> int | None:
    """First row of a left-padded sequence; None if it would lie before the tensor."""
    padding = call.arguments.get(name)
    if padding is None:
        return 0
    start = whole - max(0, int(padding.reshape(-1)[0])) - length
    return start if start >= 0 else None


# --- the rule ---------------------------------------------------------------------------------------------------


def infer(call: Inference) -> tuple[torch.Tensor, torch.Tensor]:
    """Result in the call's output layout, and log-sum-exp (empty unless asked for)."""
    arguments = call.arguments
    for name in _NOT_MODELLED:
        if arguments.get(name) is not None:
            raise NotModelledError(f"argument {name} is not modelled")
    rows_first, lse = _all_sequences(call)
    result = _laid_out(call, rows_first)
    if not call.arguments.get("return_softmax_lse", False):
        return result, torch.empty(0, dtype=torch.float32)
    if call.is_packed:
        return result, lse.unsqueeze(-1)
    return result, lse.unflatten(0, (call.batch, call.q_rows)).transpose(1, 2).unsqueeze(-1).contiguous()


def _all_sequences(call: Inference) -> tuple[torch.Tensor, torch.Tensor]:
    """Result [rows, H, Dv] and log-sum-exp [rows, H], sequences one after another (padded rows included)."""
    total = call.q_rows if call.is_packed else call.batch * call.q_rows
    out = torch.full((total, call.heads, call.value_head_size), float("nan"), dtype=call.query.dtype)
    lse = torch.full((total, call.heads), float("nan"))
    correct_rows = bool(int(call.arguments.get("inner_precise", 0)) & 2)
    extra_q, extra_k = call.arguments.get("query_rope"), call.arguments.get("key_rope")
    for sequence, ((q_start, tokens), (kv_start, slots)) in enumerate(
        zip(call.q_spans(), call.kv_spans(), strict=True)
    ):
        base = q_start if call.is_packed else sequence * call.q_rows
        q_from, kv_from = q_start, kv_start
        if not call.is_packed:
            padded_q = _left_padding(call, "query_padding_size", call.q_rows, tokens)
            whole = (
                call.key.shape[2 if call.query_layout == "BNSD" else 1] if call.block_table is None else slots
            )
            padded_kv = _left_padding(call, "kv_padding_size", whole, slots)
            if padded_q is None or padded_kv is None:
                out[base : base + call.q_rows] = 0.0
                continue
            q_from, kv_from = padded_q, padded_kv
            base += padded_q
        q = _queries(call, call.query, sequence)[q_from : q_from + tokens]
        k = _dequantised(_slots_of(call, call.key, sequence, kv_from, slots), call, "key", sequence, kv_from)
        v = _dequantised(
            _slots_of(call, call.value, sequence, kv_from, slots), call, "value", sequence, kv_from
        )
        if extra_q is not None and extra_k is not None:
            q = torch.cat([q, _queries(call, extra_q, sequence)[q_from : q_from + tokens]], dim=-1)
            k = torch.cat([k, _slots_of(call, extra_k, sequence, kv_from, slots)], dim=-1)
        shift = call.arguments.get("pse_shift")
        bias = None
        if shift is not None:
            bias = shift[sequence if shift.shape[0] > 1 else 0][:, :tokens, :slots]
        part, part_lse = attend(
            q, k, v, float(call.arguments.get("softmax_scale", 1.0)),
            masked=masked_positions(call, sequence, tokens, slots), bias=bias,
            sink=call.arguments.get("learnable_sink"), empty_row=0.0 if correct_rows else float("nan"),
        )  # fmt: skip
        out[base : base + tokens] = part
        lse[base : base + tokens] = part_lse
    return out, lse


def _laid_out(call: Inference, rows: torch.Tensor) -> torch.Tensor:
    """Rows [rows, H, Dv] in the output layout."""
    if call.out_layout == "TND":
        return rows
    if call.out_layout == "NTD":
        return rows.transpose(0, 1).contiguous()
    by_sequence = rows.unflatten(0, (call.batch, call.q_rows))
    if call.out_layout == "BSH":
        return by_sequence.flatten(2)
    if call.out_layout == "BSND":
        return by_sequence
    return by_sequence.permute(*((0, 2, 1, 3) if call.out_layout == "BNSD" else (2, 0, 1, 3))).contiguous()


_SOURCE = (
    "op-plugin pages of npu_fused_infer_attention_score and _v2 (fact sheet 1.1.1); own golden of their tests"
)


def _run(arguments: dict[str, Any]) -> Any:
    out = arguments.pop("out", None)
    workspace_free = {name: value for name, value in arguments.items() if name != "workspace"}
    results = infer(read(workspace_free))
    if out is None:
        return results
    for target, result in zip(out, results, strict=True):
        if result.numel() or target.numel() == 0:
            target.copy_(result)
    return tuple(out)


@rule(V1, V2, source=_SOURCE, status="golden skipped upstream")
def fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any
) -> Any:
    """Attention of the two forms; the `.out` overload writes its `out` pair, which it returns."""
    return _run({"query": query, "key": key, "value": value, **named})


@rule(V1_WORKSPACE, V2_WORKSPACE, source="fact sheet 2.3", status="document only")
def workspace_of_infer_attention(*arguments: Any, **named: Any) -> None:
    """A workspace holds no values; its size is torch_npu's own affair."""
    return None
