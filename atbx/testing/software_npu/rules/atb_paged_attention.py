"""ATB's paged operators: decode over a paged cache, and mixed batches of prefill and decode (split-fuse).

Lengths are per sequence and results go into `out`. Query row i of the decode form is one token of sequence i, whose
context length includes the token just written. Masks are added to the scores as they are, in both dtypes. The
operators share their caches' forms and the treatment of packed queries with `atb_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atbx.testing.software_npu.rules.atb_attention import (
    along_diagonal,
    attend_behind_prefix,
    both_caches,
    put,
    rows_of,
    square,
)
from atbx.testing.software_npu.rules.attention_core import attend, gather_blocks
from atbx.testing.software_npu.rules.registry import NotModelledError, rule

# Kinds of masks as the paged operators number them; self-attention numbers them otherwise.
PAGED_NO_MASK, PAGED_ALIBI, PAGED_COMPRESSED = 0, 2, 5


def _paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_heads: int,
    heads: int,
    scale: float,
    block_table: torch.Tensor,
    lengths: Sequence[int],
    out: torch.Tensor,
    bias_of: object = None,
) -> None:
    kv_heads = kv_heads or heads
    q = rows_of(query, heads)
    keys, values = both_caches(key_cache, value_cache, kv_heads, q.shape[-1])
    for row in range(q.shape[0]):
        k = gather_blocks(keys, block_table[row], lengths[row])
        v = gather_blocks(values, block_table[row], lengths[row])
        bias = bias_of(row, lengths[row]) if callable(bias_of) else None
        put(out, row, attend(q[row : row + 1], k, v, scale, bias=bias)[0])


@rule(
    "atb::_npu_paged_attention",
    source="op-plugin test_atb_paged_attention.py (fact sheet 1.2.2)",
    status="upstream golden ran",
)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """out [T, H, Dv] of query [T, H, D], row i over the first context_lens[i] slots of its blocks."""
    _paged(
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        num_heads,
        scale_value,
        block_table,
        context_lens.tolist(),
        out,
    )


@rule(
    "atb::_npu_paged_attention_v2",
    source="op-plugin test_atb_paged_attention_v2.py (mask type 2)",
    status="upstream golden ran",
)
def paged_attention_v2(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: Sequence[int],
    *,
    value_cache: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    num_kv_heads: int = 0,
    num_heads: int = 0,
    scale_value: float = 1.0,
    mask_type: int = PAGED_NO_MASK,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """As _npu_paged_attention; mask type 2 adds mask [T, H, 1, S] (or [T, H, S]) to the scores."""
    if value_cache is None or int(mask_type) not in (PAGED_NO_MASK, PAGED_ALIBI):
        raise NotModelledError(
            f"_npu_paged_attention_v2 with mask type {mask_type}, or without values, is not modelled"
        )

    def alibi(row: int, slots: int) -> torch.Tensor | None:
        if mask is None or int(mask_type) == PAGED_NO_MASK:
            return None
        part = mask[row] if mask.dim() == 4 else mask[row].unsqueeze(1)
        return part[..., :slots].float()

    lengths = [int(one) for one in context_lens]
    _paged(
        query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, lengths, out, alibi
    )
    return out


def _splitfuse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    seq_len: torch.Tensor,
    kv_heads: int,
    heads: int,
    scale: float,
    out: torch.Tensor,
    bias_of: object,
) -> None:
    keys, values = both_caches(key_cache, value_cache, kv_heads, rows_of(query, heads).shape[-1])
    lengths = seq_len.tolist(), context_lens.tolist()
    attend_behind_prefix(query, keys, values, block_table, *lengths, scale, heads, out, bias_of)


@rule(
    "atb::_npu_paged_attention_splitfuse",
    source="op-plugin test_atb_paged_attention_splitfuse.py (fact sheet 1.2.2)",
    status="upstream golden ran",
)
def paged_attention_splitfuse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: torch.Tensor,
) -> None:
    """out of packed queries (seq_len rows a sequence) over context_lens cached slots.

    mask [T, S]: one row for each packed query row, added as it is in both dtypes (-10000 where masked).
    """

    def rows_of_mask(first: int, tokens: int, slots: int) -> torch.Tensor:
        return square(mask)[first : first + tokens, :slots].float()

    _splitfuse(
        query, key_cache, value_cache, block_table, context_lens, seq_len, num_kv_heads, num_heads, scale_value, out,
        rows_of_mask,
    )  # fmt: skip


@rule(
    "atb::_npu_paged_attention_splitfuse_v2",
    source="op-plugin test_atb_paged_attention_splitfuse_v2.py (310P)",
    status="upstream golden ran",
)
def paged_attention_splitfuse_v2(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    *,
    mask_type: int | None = PAGED_COMPRESSED,
    out: torch.Tensor,
) -> None:
    """As _npu_paged_attention_splitfuse with a compressed float16 mask [2048, 2048] (or its strips)."""

    def diagonal(first: int, tokens: int, slots: int) -> torch.Tensor:
        return along_diagonal(mask, tokens, slots)

    _splitfuse(
        query, key_cache, value_cache, block_table, context_lens, seq_len, num_kv_heads, num_heads, scale_value, out,
        diagonal,
    )  # fmt: skip


@rule(
    "atb::_npu_paged_attention_get_workspace",
    "atb::_npu_paged_attention_v2_get_workspace",
    source="fact sheet 2.3",
    status="document only",
)
def workspace_of_paged_attention(*arguments: object, **named: object) -> None:
    """A workspace holds no values; its size is torch_npu's own affair."""
    return None
