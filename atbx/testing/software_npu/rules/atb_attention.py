"""ATB's attention operators: prefill over packed rows, decode over a paged cache, and both at once.

ATB's conventions differ from those of the npu namespace: masks are ADDED to the scores, lengths are per sequence
everywhere, results are written into `out`, and query row i of the paged form is one token of sequence i whose
context length includes the token just written.
"""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.attention_core import attend, gather_blocks
from atbx.testing.software_npu.rules.registry import rule


def cache_rows(cache: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """A cache [blocks, block, K, D], or in strips [blocks, K*D/16, block, 16], as [blocks, block, K, D].

    The two forms are told apart by the KV heads, which the third axis of a plain cache counts.
    """
    if cache.shape[2] == kv_heads and not (cache.shape[3] == 16 and cache.shape[2] % 16 == 0):
        return cache
    if cache.shape[3] in (16, 32):
        return cache.permute(0, 2, 1, 3).flatten(2).unflatten(2, (kv_heads, -1))
    return cache


def _paged(query, key_cache, value_cache, kv_heads, scale, block_table, lengths, out) -> None:
    keys, values = cache_rows(key_cache, kv_heads), cache_rows(value_cache, kv_heads)
    for row in range(query.shape[0]):
        k = gather_blocks(keys, block_table[row], int(lengths[row]))
        v = gather_blocks(values, block_table[row], int(lengths[row]))
        out[row] = attend(query[row : row + 1], k, v, scale)[0][0].reshape(out[row].shape)


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
    _paged(query, key_cache, value_cache, num_kv_heads, scale_value, block_table, context_lens.tolist(), out)


@rule("atb::_npu_paged_attention_get_workspace", source="fact sheet 2.3", status="document only")
def paged_attention_workspace(*arguments: object, **named: object) -> None:
    """A workspace holds no values."""
    return None
