"""Attention over a KV arena: the write of new keys and values, and attention over the live slots of each row.

Only live slots are ever read: a row of length n with c new tokens reads n + c slots (those inside the window, where
there is one), so whatever lies in the others, NaN included, cannot reach any output.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import CapacityError, DTypeError, OptionError, ShapeError
from atbx.core.op import Cost, Op, register_op


def ring_positions(length: int, count: int, window: int) -> tuple[int, int]:
    """First position that any of `count` new queries sees through a window of `window` tokens, and the end."""
    return max(0, length - window + 1), length + count


def check_bounds(
    tokens: int,
    slots: int,
    arena_rows: int,
    window: int | None,
    extent: int,
    rows: list[int],
    lengths: list[int],
    counts: list[int],
) -> None:
    """Raise CapacityError unless every row may write and read its tokens.

    tokens T is the width of the step; slots S and arena_rows R are the arena's. A windowed arena of S slots takes at
    most S - window + 1 tokens at once, else a token would overwrite one that the chunk's first query still needs.
    """
    for index, (row, length, count) in enumerate(zip(rows, lengths, counts, strict=True)):
        where = f"batch row {index}"
        if count == 0:
            continue
        if not 0 <= row < arena_rows:
            raise CapacityError(
                "a row outside the arena", where=where, expected=f"0 to {arena_rows - 1}", found=row
            )
        if length < 0 or count < 0:
            raise CapacityError(
                "a negative length or count", where=where, found=f"length {length}, count {count}"
            )
        if count > tokens:
            raise CapacityError(
                "a count above the tokens of the step", where=where, expected=f"at most {tokens}", found=count
            )
        if length + count > extent:
            raise CapacityError(
                "the KV cache has too few slots for this step",
                where=where,
                expected=f"length + count at most {extent}",
                found=f"{length} + {count}",
            )
        if window is not None and slots < extent and count > slots - window + 1:
            raise CapacityError(
                f"a chunk too long for a ring of {slots} slots and a window of {window} tokens",
                where=where,
                expected=f"at most {slots - window + 1} tokens",
                found=count,
            )


def _write_shape(
    k: Abstract,
    v: Abstract,
    k_arena: Abstract,
    v_arena: Abstract,
    rows: Any,
    lengths: Any,
    counts: Any,
    **params: Any,
) -> tuple[Abstract, Abstract]:
    for name, new, arena in (("k", k, k_arena), ("v", v, v_arena)):
        if new.ndim != 4 or arena.ndim != 4 or new.shape[2:] != arena.shape[2:]:
            raise ShapeError(
                f"kv_write: {name} does not fit its arena",
                expected="[B,T,K,D] and [R,S,K,D]",
                found=f"{new} and {arena}",
            )
        if new.dtype != arena.dtype:
            raise DTypeError(f"kv_write: {name} and its arena differ", expected=arena.dtype, found=new.dtype)
    _check_index_operands("kv_write", k.shape[0], rows, lengths, counts)
    return Abstract(k_arena.shape, k_arena.dtype), Abstract(v_arena.shape, v_arena.dtype)


def _check_index_operands(op: str, batch: int, *operands: Abstract) -> None:
    for name, value in zip(("rows", "lengths", "counts"), operands, strict=True):
        if value.shape != (batch,) or value.dtype != torch.int64:
            raise ShapeError(f"{op}: {name} does not fit", expected=f"i64[{int(batch)}]", found=value)


def _write_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    *,
    window: int | None,
    extent: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    k_arena, v_arena = k_arena.clone(), v_arena.clone()
    slots = k_arena.shape[1]
    host = rows.tolist(), lengths.tolist(), counts.tolist()
    check_bounds(k.shape[1], slots, k_arena.shape[0], window, extent, *host)
    for b, (row, length, count) in enumerate(zip(*host, strict=True)):
        slot = torch.arange(length, length + count) % slots
        k_arena[row, slot] = k[b, :count]
        v_arena[row, slot] = v[b, :count]
    return k_arena, v_arena


def _write_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return Cost(0.0, 2.0 * (operands[0].nbytes + operands[1].nbytes))


KV_WRITE = register_op(Op("kv_write", _write_shape, _write_reference, _write_cost, updates=((2, 0), (3, 1))))
"""(k [B,T,K,D], v, k_arena [R,S,K,D], v_arena, rows [B], lengths [B], counts [B]) to the updated arenas: the first
counts[b] tokens go to row rows[b], slots (lengths[b] + t) mod S; padding tokens go nowhere."""


def _attention_shape(
    q: Abstract,
    k_arena: Abstract,
    v_arena: Abstract,
    rows: Abstract,
    lengths: Abstract,
    counts: Abstract,
    slopes: Abstract | None,
    sinks: Abstract | None,
    *,
    scale: float,
    extent: int,
    window: int | None,
    soft_cap: float | None,
    causal: bool,
) -> Abstract:
    if q.ndim != 4 or k_arena.ndim != 4 or q.shape[3] != k_arena.shape[3]:
        raise ShapeError(
            "attention: q does not fit its arena",
            expected="q [B,T,H,D], k [R,S,K,D]",
            found=f"{q} and {k_arena}",
        )
    heads, kv_heads = q.shape[2], k_arena.shape[2]
    if heads % kv_heads or v_arena.shape[:3] != k_arena.shape[:3]:
        raise ShapeError(
            "attention: query heads must be a multiple of KV heads",
            expected=f"a multiple of {kv_heads}",
            found=heads,
        )
    if not q.dtype == k_arena.dtype == v_arena.dtype:
        raise DTypeError(
            "attention: q, k and v differ", expected=q.dtype, found=f"{k_arena.dtype}, {v_arena.dtype}"
        )
    _check_index_operands("attention", q.shape[0], rows, lengths, counts)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        # None would make some kernels take a default of their own.
        raise OptionError("attention: scale must be a finite number", where="scale", found=repr(scale))
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise OptionError(
            "attention: a soft cap bounds scores by a positive number", where="soft_cap", found=repr(soft_cap)
        )
    for name, value in (("slopes", slopes), ("sinks", sinks)):
        if value is not None and value.shape != (heads,):
            raise ShapeError(
                f"attention: {name} needs one value a query head", expected=f"[{heads}]", found=value
            )
    if window is not None and window < 1:
        raise ShapeError(
            "attention: a window holds at least the token itself", expected="1 or more", found=window
        )
    slots = k_arena.shape[1]
    if window is not None and slots < extent and q.shape[1] > slots - window + 1:
        raise ShapeError(
            f"attention: a chunk does not fit a ring of {slots} slots with a window of {window}",
            expected=f"at most {slots - window + 1} tokens",
            found=int(q.shape[1]),
        )
    if window is None and slots < extent:
        raise ShapeError(
            "attention: extent exceeds the arena's slots", expected=f"at most {slots}", found=extent
        )
    return Abstract((*q.shape[:3], v_arena.shape[3]), q.dtype)


def attend_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    query_start: int,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    causal: bool,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one row in FP32 (FP64 for FP64 inputs), rounded once at the end.

    q [T,H,D] at positions query_start..; k, v [N,K,D] at positions first..; returns [T,H,D].
    Query i sees key j where j <= i (causal) and i - window < j.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    T, H, _ = q.shape
    N, K, _ = k.shape
    queries = q.to(wide).view(T, K, H // K, -1)
    scores = torch.einsum("tkgd,nkd->kgtn", queries, k.to(wide)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    i = torch.arange(query_start, query_start + T).view(T, 1)
    j = torch.arange(first, first + N).view(1, N)
    if slopes is not None:
        scores = scores + slopes.to(wide).view(K, H // K, 1, 1) * (j - i).to(wide)
    seen = torch.ones(T, N, dtype=torch.bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= j > i - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        # A sink is one more logit in the denominator, with no value behind it.
        extra = sinks.to(wide).view(K, H // K, 1, 1).expand(K, H // K, T, 1)
        weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("kgtn,nkd->tkgd", weights, v.to(wide)).reshape(T, H, -1).to(q.dtype)


def _attention_reference(
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    extent: int,
    window: int | None,
    soft_cap: float | None,
    causal: bool,
) -> torch.Tensor:
    out = q.new_zeros(*q.shape[:3], v_arena.shape[3])
    slots = k_arena.shape[1]
    host = rows.tolist(), lengths.tolist(), counts.tolist()
    check_bounds(q.shape[1], slots, k_arena.shape[0], window, extent, *host)
    for b, (row, length, count) in enumerate(zip(*host, strict=True)):
        if count == 0:
            continue
        first, end = (0, length + count) if window is None else ring_positions(length, count, window)
        slot = torch.arange(first, end) % slots
        out[b, :count] = attend_row(
            q[b, :count],
            k_arena[row, slot],
            v_arena[row, slot],
            first,
            length,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            causal=causal,
            slopes=slopes,
            sinks=sinks,
        )
    return out


def attention_cost(q: Abstract, k_arena: Abstract, extent: int, window: int | None) -> Cost:
    """Two matmuls over the extent (the window, where it is shorter), and K and V of it read once."""
    B, T, H, D = q.shape
    reach = min(extent, k_arena.shape[1]) if window is None else min(extent, window + T - 1)
    flops = 4.0 * B * T * H * D * reach
    kv = 2.0 * B * reach * k_arena.shape[2] * D * k_arena.dtype.itemsize
    return Cost(flops, kv + 2.0 * q.nbytes)


def _attention_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return attention_cost(operands[0], operands[1], params["extent"], params["window"])


ATTENTION = register_op(Op("attention", _attention_shape, _attention_reference, _attention_cost))
"""(q [B,T,H,D], k_arena [R,S,K,D], v_arena, rows [B], lengths [B], counts [B], slopes [H] or None, sinks [H] or None)
to [B,T,H,D]: token t of row b stands at position lengths[b] + t; tokens past counts[b] give zeros."""


def alibi_slopes(heads: int) -> torch.Tensor:
    """ALiBi slopes [H]: 2^(-8 i / n) for the largest power of two n <= H, the rest from 2n (Press et al. 2022)."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    n = 1 << int(math.log2(heads))
    return torch.tensor(geometric(n) + geometric(2 * n)[0::2][: heads - n], dtype=torch.float32)


def static_attention_facts(q: Abstract, k_arena: Abstract, params: dict[str, Any]) -> Hashable:
    """What a kernel's host plan needs to know of an attention equation."""
    return (
        int(q.shape[1]),
        int(k_arena.shape[0]),
        int(k_arena.shape[1]),
        params["window"],
        params["extent"],
    )
