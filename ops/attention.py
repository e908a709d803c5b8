"""Attention over a KV arena: the write of new keys and values, and attention over the live slots of each row.

The operand `rows` says where a row's positions lie. [B]: rows[b] is a row of a dense arena [R, S, K, D], position p in
slot p mod S. [B, N]: the arena is R blocks of S slots, and position p is at offset p mod S of block rows[b, p // S];
the last block belongs to no row (kernels that write every token put the padding of a step there).

Only live slots are ever read: a row of length n with c new tokens reads n + c slots (those inside the window, where
there is one), so whatever lies in the others, NaN included, cannot reach any output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import CacheStateError, CapacityError, DTypeError, OptionError, ShapeError
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
    rows: Sequence[int | list[int]],
    lengths: list[int],
    counts: list[int],
) -> None:
    """Raise unless every row may write and read its tokens.

    tokens T is the width of the step; slots S and arena_rows R are the arena's. A windowed ring of S slots takes at
    most S - window + 1 tokens at once, else a token would overwrite one that the chunk's first query still needs.

    Raises:
        CapacityError: a row or a block outside the arena, or more tokens than there are slots.
        CacheStateError: a slot that is written belongs to another position too.
    """
    for index, (row, length, count) in enumerate(zip(rows, lengths, counts, strict=True)):
        where = f"batch row {index}"
        if count == 0:
            continue
        if not isinstance(row, list) and not 0 <= row < arena_rows:
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
        if isinstance(row, list):
            first = 0 if window is None else ring_positions(length, count, window)[0]
            _check_blocks(where, row, first, length + count, slots, arena_rows - 1)
        elif window is not None and slots < extent and count > slots - window + 1:
            raise CapacityError(
                f"a chunk too long for a ring of {slots} slots and a window of {window} tokens",
                where=where,
                expected=f"at most {slots - window + 1} tokens",
                found=count,
            )
    tables = [row for row in rows if isinstance(row, list)]
    if tables:
        _check_owners(slots, tables, lengths, counts)


def _check_blocks(where: str, table: list[int], first: int, end: int, slots: int, blocks: int) -> None:
    """Raise CapacityError unless positions first..end of a row lie in distinct blocks below `blocks`."""
    start, stop = first // slots, -(-end // slots)
    live = table[start:stop]
    if len(live) == stop - start and min(live) >= 0 and max(live) < blocks and len(set(live)) == len(live):
        return
    for entry in range(start, stop):
        block = table[entry] if entry < len(table) else None
        if block is None or not 0 <= block < blocks:
            raise CapacityError(
                "a block outside the arena",
                where=f"{where}, table entry {entry}",
                expected=f"0 to {blocks - 1}",
                found="no entry" if block is None else block,
                hint="Reserve room for the tokens of a step first (atbx.ops.kv_cache.reserve)",
            )
        if block in live[: entry - start]:
            raise CacheStateError(
                "a block that stands in its row already", where=f"{where}, table entry {entry}", found=block
            )


def _check_owners(slots: int, tables: list[list[int]], lengths: list[int], counts: list[int]) -> None:
    """Raise CacheStateError if a slot that is written holds another row's token, or is written twice.

    Rows may share blocks that they only read. Every row counts, those that stand still in this step too.
    """
    written: dict[int, tuple[int, int, int]] = {}  # block: batch row, entry, first offset
    for row, (table, length, count) in enumerate(zip(tables, lengths, counts, strict=True)):
        for entry in range(length // slots, -(-(length + count) // slots) if count else 0):
            if table[entry] in written:
                _refuse_shared(row, entry, table[entry], written[table[entry]][0])
            written[table[entry]] = row, entry, max(0, length - entry * slots)
    for row, (table, length, count) in enumerate(zip(tables, lengths, counts, strict=True)):
        only_read = table[: length // slots if count else -(-length // slots)]
        if written.keys().isdisjoint(only_read):
            continue
        for entry, block in enumerate(only_read):
            # A row that holds only what lies before the first token written may keep it.
            if block in written and min(slots, length - entry * slots) > written[block][2]:
                _refuse_shared(written[block][0], written[block][1], block, row)


def _refuse_shared(row: int, entry: int, block: int, other: int) -> None:
    raise CacheStateError(
        f"a token would be written to block {block}, which batch row {other} holds too",
        where=f"batch row {row}, table entry {entry}",
        hint="Reserve room for the tokens of a step first (atbx.ops.kv_cache.reserve)",
    )


def places_of(row: int | list[int], first: int, end: int, slots: int) -> tuple[Any, torch.Tensor]:
    """Index of positions first..end in an arena [R, S, ...]: rows of it (one, or one each), and slots."""
    position = torch.arange(first, end)
    if isinstance(row, list):
        return torch.tensor(row)[position // slots], position % slots
    return row, position % slots


def _write_shape(
    k: Abstract,
    v: Abstract,
    k_arena: Abstract,
    v_arena: Abstract,
    rows: Any,
    lengths: Any,
    counts: Any,
    *,
    window: int | None,
    extent: int,
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
    _check_index_operands("kv_write", k.shape[0], k_arena.shape[1], window, extent, rows, lengths, counts)
    return Abstract(k_arena.shape, k_arena.dtype), Abstract(v_arena.shape, v_arena.dtype)


def _check_index_operands(
    op: str, batch: int, slots: int, window: int | None, extent: int, *operands: Abstract
) -> None:
    """Raise ShapeError unless rows, lengths and counts fit a batch, and the extent what a row can hold."""
    for name, value in zip(("rows", "lengths", "counts"), operands, strict=True):
        is_table = name == "rows" and value.ndim == 2 and value.shape[0] == batch and value.shape[1] > 0
        if (value.shape != (batch,) and not is_table) or value.dtype != torch.int64:
            or_table = f" or i64[{int(batch)},N]" if name == "rows" else ""
            raise ShapeError(
                f"{op}: {name} does not fit", expected=f"i64[{int(batch)}]{or_table}", found=value
            )
    rows = operands[0]
    held = slots * rows.shape[1] if rows.ndim == 2 else slots
    if extent > held and (rows.ndim == 2 or window is None):
        raise ShapeError(
            f"{op}: extent exceeds the arena's slots"
            if rows.ndim == 1
            else f"{op}: extent exceeds the {rows.shape[1]} blocks of a row",
            expected=f"at most {held}",
            found=extent,
        )


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
        place = places_of(row, length, length + count, slots)
        k_arena[place] = k[b, :count]
        v_arena[place] = v[b, :count]
    return k_arena, v_arena


def _write_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return Cost(0.0, 2.0 * (operands[0].nbytes + operands[1].nbytes))


KV_WRITE = register_op(Op("kv_write", _write_shape, _write_reference, _write_cost, updates=((2, 0), (3, 1))))
"""(k [B,T,K,D], v, k_arena [R,S,K,D], v_arena, rows [B] or [B,N], lengths [B], counts [B]) to the updated arenas: token
t < counts[b] goes to position lengths[b] + t of its row; padding tokens go nowhere."""


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
    slots = k_arena.shape[1]
    _check_index_operands("attention", q.shape[0], slots, window, extent, rows, lengths, counts)
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
    if window is not None and rows.ndim == 1 and slots < extent and q.shape[1] > slots - window + 1:
        raise ShapeError(
            f"attention: a chunk does not fit a ring of {slots} slots with a window of {window}",
            expected=f"at most {slots - window + 1} tokens",
            found=int(q.shape[1]),
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
        place = places_of(row, first, end, slots)
        out[b, :count] = attend_row(
            q[b, :count],
            k_arena[place],
            v_arena[place],
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
    reach = extent if window is None else min(extent, window + T - 1)
    flops = 4.0 * B * T * H * D * reach
    kv = 2.0 * B * reach * k_arena.shape[2] * D * k_arena.dtype.itemsize
    return Cost(flops, kv + 2.0 * q.nbytes)


def _attention_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return attention_cost(operands[0], operands[1], params["extent"], params["window"])


ATTENTION = register_op(Op("attention", _attention_shape, _attention_reference, _attention_cost))
"""(q [B,T,H,D], k_arena [R,S,K,D], v_arena, rows [B] or [B,N], lengths [B], counts [B], slopes [H] or None, sinks [H]
or None) to [B,T,H,D]: token t of row b stands at position lengths[b] + t; tokens past counts[b] give zeros."""


def alibi_slopes(heads: int) -> torch.Tensor:
    """ALiBi slopes [H]: 2^(-8 i / n) for the largest power of two n <= H, the rest from 2n (Press et al. 2022)."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    n = 1 << int(math.log2(heads))
    return torch.tensor(geometric(n) + geometric(2 * n)[0::2][: heads - n], dtype=torch.float32)
