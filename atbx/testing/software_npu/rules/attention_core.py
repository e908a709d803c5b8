"""Attention over one sequence, with the numerics that the attention operators' goldens share.

Scores in float32 (scale applied to them), softmax in float32 with the row maximum taken off, probabilities cast
to the data type, product with the values accumulated in float32 and cast once. What differs between operators,
masks, lengths, layouts and caches, is settled by their own files before they come here.
"""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    masked: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    empty_row: float = float("nan"),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, Dv] in the dtype of q, and log-sum-exp [T, H] in float32, for q [T, H, D] over k, v [S, K, D].

    masked: [T, S] or [H, T, S], True where the position does not count. bias: float32, broadcastable to
    [H, T, S], added after the scale. sink: [H], one more logit of each head that takes probability and gives no
    value. Query head h reads KV head h // (H // K). A row without any position gets `empty_row`; S == 0 gives
    zeros, as the documents of every operator here say.
    """
    tokens, heads, _ = q.shape
    slots, kv_heads, value_size = v.shape
    if slots == 0:
        zeros = torch.zeros((tokens, heads, value_size), dtype=q.dtype)
        return zeros, torch.full((tokens, heads), float("inf"))
    group = heads // kv_heads
    wide_k = k.float().repeat_interleave(group, dim=1)
    wide_v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.float(), wide_k) * scale
    if bias is not None:
        scores = scores + bias.float()
    if masked is not None:
        scores = scores.masked_fill(masked, float("-inf"))
    if sink is None:
        logits = scores
    else:
        logits = torch.cat([scores, sink.float().view(heads, 1, 1).expand(heads, tokens, 1)], dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    p = torch.exp(scores - logits.amax(dim=-1, keepdim=True))
    p = p / torch.exp(logits - logits.amax(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True)
    out = torch.einsum("hts,shd->thd", p.to(q.dtype).float(), wide_v).to(q.dtype)
    none_left = torch.isneginf(scores).all(dim=-1).transpose(0, 1)
    if bool(none_left.any()):
        out[none_left] = empty_row
    return out, lse.transpose(0, 1).contiguous()


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, tokens: int) -> torch.Tensor:
    """First `tokens` slots [tokens, ...] of a sequence whose cache [blocks, block, ...] is reached by block ids."""
    block_size = cache.shape[1]
    used = blocks_named(tokens, block_size)
    picked = cache.index_select(0, blocks[:used].long())
    return picked.reshape(used * block_size, *cache.shape[2:])[:tokens]


def token_major(cache: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """A paged cache in any documented form as [blocks, block, K, D].

    Forms: [blocks, block, K*D]; [blocks, K, block, D]; [blocks, K, D/16, block, 16] (the fractal form; 32 for
    int8).
    """
    if cache.dim() == 3:
        return cache.unflatten(2, (kv_heads, -1))
    if cache.dim() == 4:
        return cache.transpose(1, 2)
    if cache.dim() == 5:
        return cache.permute(0, 3, 1, 2, 4).flatten(3)
    raise ValueError(f"paged cache of {cache.dim()} dimensions; expected 3, 4 or 5")


def blocks_named(tokens: int, block_size: int) -> int:
    """Entries of a block table row that a sequence of `tokens` tokens uses."""
    return -(-tokens // block_size)


def is_block_out_of_range(block_table: torch.Tensor, row: int, used: int, blocks: int) -> int | None:
    """The first block id among the `used` ones of a row that names no block; None if all do."""
    ids = block_table[row, :used]
    wrong = ids[(ids < 0) | (ids >= blocks)]
    return int(wrong[0]) if wrong.numel() else None
