# mypy: ignore-errors
"""The kernel: packed projections to rotated queries and to keys and values in the cache, in one launch.

Work is cut into items, each a group of heads of one token: the query groups of a token first, then its key groups, each
with the values of the same heads. Programs stride over the items, so the grid never exceeds the vector cores and one
token spreads over several of them. This module needs Triton; the Ascend compiler and the interpreter take it as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounded(x, dtype: tl.constexpr, BY_HAND: tl.constexpr):
    """x as `dtype`, to nearest even. The compiler does so; the interpreter cuts BF16 off, so it is rounded by hand."""
    if BY_HAND:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        x = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _turned(
    source,
    target,
    cos,
    sin,
    weight,
    first,
    heads: tl.constexpr,
    eps: tl.constexpr,
    target_stride: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    GAP: tl.constexpr,
    IS_NORMED: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """Heads first.. first+GROUP of one token, normed where asked for and turned, from `source` to `target`.

    A head's turning channels are read as its two members of each pair: channel STEP*i and the one GAP further.
    """
    head = first + tl.arange(0, GROUP)
    pair = tl.arange(0, HALF_BLOCK)
    is_pair = pair < HALF
    # Every group is whole where GROUP divides the heads; a mask would only cost then.
    inside = (head < heads)[:, None] & is_pair[None, :]
    at = source + head[:, None] * HEAD + pair[None, :] * STEP
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + GAP, mask=inside, other=0.0).to(tl.float32)
    if REST_BLOCK > 0:
        channel = tl.arange(0, REST_BLOCK)
        is_rest = channel < HEAD - 2 * HALF
        rest_inside = (head < heads)[:, None] & is_rest[None, :]
        rest = tl.load(
            source + head[:, None] * HEAD + 2 * HALF + channel[None, :], mask=rest_inside, other=0.0
        )
    if IS_NORMED:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if REST_BLOCK > 0:
            wide = rest.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
        scale = (1.0 / tl.sqrt(squares / HEAD + eps))[:, None]
        a = a * scale * tl.load(weight + pair * STEP, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        b = b * scale * tl.load(weight + pair * STEP + GAP, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        if REST_BLOCK > 0:
            rest_weight = tl.load(weight + 2 * HALF + channel, mask=is_rest, other=0.0).to(tl.float32)
            rest = _rounded(wide * scale * rest_weight[None, :], target.dtype.element_ty, BY_HAND)
    c = tl.load(cos + pair, mask=is_pair, other=0.0)[None, :]
    s = tl.load(sin + pair, mask=is_pair, other=0.0)[None, :]
    to = target + head[:, None] * target_stride + pair[None, :] * STEP
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(to, _rounded(a * c - b * s, dtype, BY_HAND), mask=inside)
    tl.store(to + GAP, _rounded(b * c + a * s, dtype, BY_HAND), mask=inside)
    if REST_BLOCK > 0:
        tl.store(target + head[:, None] * target_stride + 2 * HALF + channel[None, :], rest, mask=rest_inside)


@triton.jit(do_not_specialize=["tokens"])
def qkv_rotary_write_kernel(
    qkv,
    cos,
    sin,
    slots,
    k_arena,
    v_arena,
    q_out,
    q_norm,
    k_norm,
    tokens,
    eps: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_Q_NORMED: tl.constexpr,
    IS_K_NORMED: tl.constexpr,
    PAGE: tl.constexpr,
    Q_GROUP: tl.constexpr,
    KV_GROUP: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    ROUNDS_BY_HAND: tl.constexpr,
):
    """qkv [N,(H+2K)*D], cos and sin [N,HALF] FP32, slots [N] to q_out [N,H,D] and the arenas.

    PAGE 0: arenas [slots,K,D]; else [blocks,K,PAGE,D]. A negative slot writes no key and no value.
    """
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD
    Q_ITEMS: tl.constexpr = (HEADS + Q_GROUP - 1) // Q_GROUP
    KV_ITEMS: tl.constexpr = (KV_HEADS + KV_GROUP - 1) // KV_GROUP
    ITEMS: tl.constexpr = Q_ITEMS + KV_ITEMS
    STEP: tl.constexpr = 2 if IS_INTERLEAVED else 1
    GAP: tl.constexpr = 1 if IS_INTERLEAVED else HALF
    KV_STRIDE: tl.constexpr = HEAD if PAGE == 0 else PAGE * HEAD
    for item in range(tl.program_id(0), tokens * ITEMS, tl.num_programs(0)):
        token = item // ITEMS
        group = item % ITEMS
        row = qkv + token.to(tl.int64) * WIDTH
        c = cos + token * HALF
        s = sin + token * HALF
        if group < Q_ITEMS:
            _turned(
                row,
                q_out + token.to(tl.int64) * (HEADS * HEAD),
                c,
                s,
                q_norm,
                group * Q_GROUP,
                HEADS,
                eps,
                HEAD,
                HEAD,
                HALF,
                STEP,
                GAP,
                IS_Q_NORMED,
                Q_GROUP,
                HALF_BLOCK,
                REST_BLOCK,
                ROUNDS_BY_HAND,
            )
        else:
            slot = tl.load(slots + token).to(tl.int64)
            if slot >= 0:
                if PAGE == 0:
                    place = slot * (KV_HEADS * HEAD)
                else:
                    place = (slot // PAGE) * (KV_HEADS * PAGE * HEAD) + (slot % PAGE) * HEAD
                first = (group - Q_ITEMS) * KV_GROUP
                _turned(
                    row + HEADS * HEAD,
                    k_arena + place,
                    c,
                    s,
                    k_norm,
                    first,
                    KV_HEADS,
                    eps,
                    KV_STRIDE,
                    HEAD,
                    HALF,
                    STEP,
                    GAP,
                    IS_K_NORMED,
                    KV_GROUP,
                    HALF_BLOCK,
                    REST_BLOCK,
                    ROUNDS_BY_HAND,
                )
                head = first + tl.arange(0, KV_GROUP)
                channel = tl.arange(0, HEAD_BLOCK)
                inside = (head < KV_HEADS)[:, None] & (channel < HEAD)[None, :]
                values = tl.load(
                    row + (HEADS + KV_HEADS) * HEAD + head[:, None] * HEAD + channel[None, :],
                    mask=inside,
                    other=0.0,
                )
                tl.store(v_arena + place + head[:, None] * KV_STRIDE + channel[None, :], values, mask=inside)
