"""ATB's self-attention operators: prefill over packed rows, and prefill behind a cached prefix.

ATB's conventions differ from those of the npu namespace. Lengths are per sequence everywhere and results go into
`out`. Masks are ADDED to the scores: in float16 as they are (-10000 or -inf where masked); in bfloat16 the
self-attention kernels multiply the mask by -3e38 first, so that 1 takes a position away and -10000 does the
opposite (paged kernels add a bfloat16 mask as it is). A compressed mask is laid along the diagonal that ends at the
sequence's last position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atbx.testing.software_npu.rules.attention_core import attend, gather_blocks
from atbx.testing.software_npu.rules.registry import NotModelledError, rule

# Kinds of masks, numbered as self-attention numbers them; the paged operators number them otherwise.
NO_MASK, WHOLE, ALIBI, COMPRESSED, CAUSAL = 0, 1, 2, 3, 9

BFLOAT16_COEFFICIENT = -3e38


def is_stripped_cache(cache: torch.Tensor, kv_heads: int, head_size: int) -> bool:
    """Whether a cache is in strips [blocks, K*D/16, block, 16] and not [blocks, block, K, D]."""
    return tuple(cache.shape[2:]) != (kv_heads, head_size) and cache.shape[3] in (16, 32)


def cache_rows(cache: torch.Tensor, kv_heads: int, head_size: int | None) -> torch.Tensor:
    """A cache in either form as [blocks, block, K, D]; values may have another head size (None: read it)."""
    if cache.dim() == 3:
        return cache.unflatten(2, (kv_heads, -1))
    plain = (
        cache.shape[2] == kv_heads if head_size is None else not is_stripped_cache(cache, kv_heads, head_size)
    )
    if plain:
        return cache
    return cache.permute(0, 2, 1, 3).flatten(2).unflatten(2, (kv_heads, -1))


def both_caches(
    key_cache: torch.Tensor, value_cache: torch.Tensor, kv_heads: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as [blocks, block, K, D]; one form for both, told by the keys."""
    keys = cache_rows(key_cache, kv_heads, head_size)
    in_strips = key_cache.dim() == 4 and is_stripped_cache(key_cache, kv_heads, head_size)
    if in_strips:
        return keys, value_cache.permute(0, 2, 1, 3).flatten(2).unflatten(2, (kv_heads, -1))
    return keys, cache_rows(value_cache, kv_heads, None)


def square(mask: torch.Tensor) -> torch.Tensor:
    """A mask as [rows, columns]; strips [1, N/16, M, 16] are put together."""
    if mask.dim() == 4 and mask.shape[3] == 16 and mask.shape[1] * 16 == mask.shape[2]:
        return mask[0].permute(1, 0, 2).flatten(1)
    return mask.reshape(mask.shape[-2:])


def along_diagonal(mask: torch.Tensor, tokens: int, slots: int) -> torch.Tensor:
    """Mask values [tokens, slots] of a compressed mask whose diagonal ends at the last position.

    Beyond the matrix the value of its corners holds: above for later keys, below for earlier ones.
    """
    whole = square(mask)
    reach = whole.shape[0] - 1
    values = torch.cat([whole[:, 0].flip(0), whole[0, 1:]]).float()
    distance = torch.arange(slots) - (torch.arange(tokens).unsqueeze(1) + slots - tokens)
    return values[distance.clamp(-reach, reach) + reach]


def self_attention_bias(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What a self-attention kernel adds for mask values: times -3e38 in bfloat16."""
    return values.float() * (BFLOAT16_COEFFICIENT if mask.dtype == torch.bfloat16 else 1.0)


def rows_of(packed: torch.Tensor, heads: int) -> torch.Tensor:
    """Packed rows [T, H, D] of [T, H, D] or [T, H*D]."""
    return packed if packed.dim() == 3 else packed.unflatten(-1, (heads, -1))


def put(out: torch.Tensor, start: int, part: torch.Tensor) -> None:
    """Rows [T, H, D] into a result [T, H, D] or [T, H*D] from row `start` on."""
    out[start : start + part.shape[0]] = part.reshape(part.shape[0], *out.shape[1:])


def _encode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    heads: int,
    kv_heads: int,
    out: torch.Tensor,
    mask: torch.Tensor | None,
    kind: int,
) -> None:
    """Prefill over packed rows: sequence by sequence, keys as many as queries."""
    if kind not in (NO_MASK, WHOLE, ALIBI, COMPRESSED, CAUSAL):
        raise NotModelledError(f"self-attention mask type {kind} is not modelled")
    kv_heads = kv_heads or heads
    q, k, v = rows_of(query, heads), rows_of(key, kv_heads), rows_of(value, kv_heads)
    start = 0
    for sequence, length in enumerate(lengths):
        span = slice(start, start + length)
        bias = None
        if kind == CAUSAL:
            bias = torch.full((length, length), float("-inf")).triu(1)
        elif kind == COMPRESSED and mask is not None:
            bias = self_attention_bias(mask, along_diagonal(mask, length, length))
        elif kind == WHOLE and mask is not None:
            part = mask[sequence if mask.shape[0] == len(lengths) else 0] if mask.dim() == 3 else square(mask)
            bias = self_attention_bias(mask, part[:length, :length])
        elif kind == ALIBI and mask is not None:
            part = mask[sequence if mask.shape[0] > 1 else 0] if mask.dim() == 4 else mask
            bias = part[..., :length, :length].float()
        put(out, start, attend(q[span], k[span], v[span], scale, bias=bias)[0])
        start += length


_SELF = "op-plugin test_atb_flash_attention*.py (fact sheet 1.1.4)"


@rule("atb::_npu_flash_attention", source=_SELF, status="upstream golden ran")
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: torch.Tensor,
) -> None:
    """out of packed query, key, value [T, H, D]; the mask [S, S] (or one a sequence) is added whole."""
    lengths = seq_len.tolist()
    _encode(query, key, value, lengths, scale_value, num_heads, num_kv_heads, out, mask, WHOLE)


@rule("atb::_npu_flash_attention_v3", source=_SELF + " (310P)", status="upstream golden ran")
def flash_attention_v3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    *,
    mask_type: int | None = COMPRESSED,
    out: torch.Tensor,
) -> None:
    """As _npu_flash_attention with a compressed mask, on 310P in strips [1, 128, 2048, 16]."""
    kind = COMPRESSED if mask_type is None else int(mask_type)
    _encode(query, key, value, seq_len.tolist(), scale_value, num_heads, num_kv_heads, out, mask, kind)


@rule("atb::_npu_flash_attention_unpad", source=_SELF, status="upstream golden ran")
def flash_attention_unpad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: torch.Tensor,
) -> None:
    """As _npu_flash_attention without any mask: every row sees its whole sequence."""
    _encode(query, key, value, seq_len.tolist(), scale_value, num_heads, num_kv_heads, out, None, NO_MASK)


@rule("atb::_npu_flash_attention_unpad_v2", source=_SELF, status="document only")
def flash_attention_unpad_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    *,
    kernel_type: int | None = 0,
    out: torch.Tensor,
) -> None:
    """As _npu_flash_attention_unpad; the kernel type chooses how products accumulate."""
    _encode(query, key, value, seq_len.tolist(), scale_value, num_heads, num_kv_heads, out, None, NO_MASK)


@rule("atb::_npu_flash_attention_v2", source=_SELF, status="upstream golden ran")
def flash_attention_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_len: Sequence[int],
    *,
    mask: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    kernel_type: int = 0,
    mask_type: int = ALIBI,
    scale_value: float = 1,
    num_heads: int = 0,
    num_kv_heads: int = 0,
    out: torch.Tensor,
) -> torch.Tensor:
    """out, by mask type: the DEFAULT is an additive bias a head (ALIBI), 0 none, 1 whole, 9 causal."""
    lengths = [int(one) for one in seq_len]
    _encode(query, key, value, lengths, scale_value, num_heads, num_kv_heads, out, mask, int(mask_type))
    return out


def attend_behind_prefix(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    q_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    scale: float,
    heads: int,
    out: torch.Tensor,
    bias_of: object,
) -> None:
    """Queries at the end of each sequence over its paged keys; bias_of(first row, tokens, slots) is added."""
    q = rows_of(query, heads)
    start = 0
    for sequence, (tokens, slots) in enumerate(zip(q_lengths, kv_lengths, strict=False)):
        k = gather_blocks(keys, block_table[sequence], slots)
        v = gather_blocks(values, block_table[sequence], slots)
        bias = bias_of(start, tokens, slots) if callable(bias_of) else None
        put(out, start, attend(q[start : start + tokens], k, v, scale, bias=bias)[0])
        start += tokens


def _causal(first: int, tokens: int, slots: int) -> torch.Tensor:
    return torch.full((tokens, slots), float("-inf")).triu(slots - tokens + 1)


@rule(
    "atb::_npu_flash_attention_qlens",
    source="op-plugin test_atb_flash_attention_qlens.py (fact sheet 1.1.4)",
    status="upstream golden ran",
)
def flash_attention_qlens(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    context_lens: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: torch.Tensor,
) -> None:
    """out of packed queries (seq_len rows a sequence) over context_lens cached slots, compressed mask."""
    keys, values = both_caches(key_cache, value_cache, num_kv_heads, rows_of(query, num_heads).shape[-1])

    def bias(first: int, tokens: int, slots: int) -> torch.Tensor:
        return self_attention_bias(mask, along_diagonal(mask, tokens, slots))

    attend_behind_prefix(
        query,
        keys,
        values,
        block_table,
        seq_len.tolist(),
        context_lens.tolist(),
        scale_value,
        num_heads,
        out,
        bias,
    )


@rule(
    "atb::_npu_flash_attention_prefix_v2",
    source="op-plugin test_atb_flash_attention_prefix_v2.py (alibi forms alone)",
    status="document only",
)
def flash_attention_prefix_v2(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor,
    seq_len: Sequence[int],
    context_lens: Sequence[int],
    *,
    slopes: torch.Tensor | None = None,
    kernel_type: int = 1,
    mask_type: int = COMPRESSED,
    num_kv_heads: int = 0,
    num_heads: int = 0,
    scale_value: float = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    """As _npu_flash_attention_qlens with lengths as lists; other mask types than 3 are not modelled."""
    if int(mask_type) != COMPRESSED:
        raise NotModelledError(f"_npu_flash_attention_prefix_v2 with mask type {mask_type} is not modelled")
    flash_attention_qlens(
        query, key_cache, value_cache, block_table, mask, torch.tensor([int(one) for one in seq_len]),
        torch.tensor([int(one) for one in context_lens]), num_kv_heads or num_heads, num_heads, scale_value, out,
    )  # fmt: skip
    return out


@rule(
    "atb::npu_self_attention_prefix_encoder",
    source="op-plugin test_atb_selfattention_prefix_encoder.py (fact sheet 1.1.4)",
    status="document only",
)
def self_attention_prefix_encoder(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_tables: torch.Tensor,
    seqlen: Sequence[int],
    kv_seqlen: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    *,
    mask: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    mask_type: str | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries at the end of each sequence over paged keys; causal unless a compressed mask is named."""
    size = rows_of(query, q_headnum).shape[-1]
    keys, values = both_caches(key, value, kv_headnum, size)
    out = torch.empty_like(query) if output is None else output
    kind = mask_type or "mask_type_causal_mask"
    if kind == "mask_type_causal_mask":
        bias: object = _causal
    elif kind == "mask_type_norm_compress" and mask is not None:
        given = mask

        def compressed(first: int, tokens: int, slots: int) -> torch.Tensor:
            return self_attention_bias(given, along_diagonal(given, tokens, slots))

        bias = compressed
    else:
        raise NotModelledError(f"npu_self_attention_prefix_encoder with {kind} is not modelled")
    lengths = [int(one) for one in seqlen], [int(one) for one in kv_seqlen]
    attend_behind_prefix(query, keys, values, block_tables, *lengths, qk_scale, q_headnum, out, bias)
    return out
