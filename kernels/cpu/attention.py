"""Attention on the CPU: torch's flash attention over exact slices of the arena, so that no unused slot is ever read.

Slices and masks depend only on lengths and counts, so one host plan a step serves every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from atbx.core.backend import HostPlan, Kernel
from atbx.core.program import Equation
from atbx.ops.attention import ATTENTION, attend_row, check_bounds, ring_positions

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Span:
    """A run of batch rows that are served together: `rows` of the arena, `count` new tokens behind `length` filled.

    writes: (first token, slot, tokens) pieces of the write; reads: (slot, slots) pieces of the live keys, which
    stand at positions first, first + 1, ...; mask is additive [count, slots], or None where `causal` says all.
    rows is None where the batch row is paged: slots then count through all blocks of the arena.
    """

    batch: slice
    rows: slice | None
    length: int
    count: int
    writes: tuple[tuple[int, int, int], ...]
    reads: tuple[tuple[int, int], ...]
    first: int
    causal: bool
    mask: torch.Tensor | None


def _pieces(start: int, end: int, slots: int) -> tuple[tuple[int, int], ...]:
    """Slots of positions start..end in a ring, as runs (slot, length)."""
    found = []
    while start < end:
        slot = start % slots
        run = min(end - start, slots - slot)
        found.append((slot, run))
        start += run
    return tuple(found)


def _block_pieces(start: int, end: int, size: int, table: list[int]) -> tuple[tuple[int, int], ...]:
    """Slots of positions start..end in blocks of `size` slots, as runs (slot, length); neighbouring blocks make one."""
    found: list[tuple[int, int]] = []
    while start < end:
        slot = table[start // size] * size + start % size
        run = min(end - start, size - start % size)
        if found and sum(found[-1]) == slot:
            found[-1] = found[-1][0], found[-1][1] + run
        else:
            found.append((slot, run))
        start += run
    return tuple(found)


def _span(batch: int, row: int | list[int], size: int, length: int, count: int, facts: Any) -> Span:
    _, _, slots, window, _, causal, dtype = facts
    first, end = (0, length + count) if window is None else ring_positions(length, count, window)

    def pieces(start: int, stop: int) -> tuple[tuple[int, int], ...]:
        return (
            _block_pieces(start, stop, slots, row) if isinstance(row, list) else _pieces(start, stop, slots)
        )

    writes = []
    token = 0
    for slot, run in pieces(length, length + count):
        writes.append((token, slot, run))
        token += run
    mask = None
    sees_all = count == 1 or not causal
    # With nothing before the chunk and no window that bites, torch's own causal flag says it all.
    plain_causal = causal and length == 0 and (window is None or window >= count)
    if window is not None and not causal:
        sees_all = count == 1 or window >= end - first
    if not sees_all and not plain_causal:
        i = torch.arange(length, length + count).view(-1, 1)
        j = torch.arange(first, end).view(1, -1)
        seen = j <= i if causal else torch.ones(count, end - first, dtype=torch.bool)
        if window is not None:
            seen = seen & (j > i - window)
        mask = torch.zeros(count, end - first, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return Span(
        slice(batch, batch + size),
        None if isinstance(row, list) else slice(row, row + size),
        length,
        count,
        tuple(writes),
        pieces(first, end),
        first,
        plain_causal and not sees_all,
        mask,
    )


def plan_spans(
    facts: Any, rows: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor
) -> tuple[Span, ...]:
    """Spans of rows with equal length and count that lie side by side in the arena; bounds are checked here.

    A paged row is a span of its own: rows read through one call would first have to be gathered.

    Raises:
        CapacityError, CacheStateError: as `check_bounds`.
    """
    tokens, arena_rows, slots, window, extent, _, _ = facts
    host = rows.tolist(), lengths.tolist(), counts.tolist()
    check_bounds(tokens, slots, arena_rows, window, extent, *host)
    if rows.ndim == 2:
        steps = enumerate(zip(*host, strict=True))
        return tuple(_span(b, table, 1, length, n, facts) for b, (table, length, n) in steps if n)
    spans: list[Span] = []
    start = 0
    total = len(host[0])
    while start < total:
        row, length, count = host[0][start], host[1][start], host[2][start]
        end = start + 1
        while end < total and (host[0][end], host[1][end], host[2][end]) == (
            row + end - start,
            length,
            count,
        ):
            end += 1
        if count:
            spans.append(_span(start, row, end - start, length, count, facts))
        start = end
    return tuple(spans)


def _attention_facts(equation: Equation) -> Hashable:
    q, k_arena = equation.operands[0], equation.operands[1]
    return attention_facts(q, k_arena, equation.params)


def attention_facts(q: Any, k_arena: Any, params: dict[str, Any]) -> Hashable:
    """What `plan_spans` needs to know of an equation."""
    window, extent, causal = params["window"], params["extent"], params.get("causal", True)
    return int(q.shape[1]), int(k_arena.shape[0]), int(k_arena.shape[1]), window, extent, causal, q.dtype


def _write_facts(equation: Equation) -> Hashable:
    return attention_facts(equation.operands[0], equation.operands[2], equation.params)


def _part(arena: torch.Tensor, span: Span, slot: int, run: int) -> torch.Tensor:
    """`run` slots of a span's rows, [rows, run, K, D], as a view."""
    if span.rows is None:
        return arena.view(1, -1, *arena.shape[2:])[:, slot : slot + run]
    return arena[span.rows, slot : slot + run]


def _read(arena: torch.Tensor, span: Span) -> torch.Tensor:
    """Live slots of a span as [rows, K, N, D]; a copy only where a ring wraps or blocks lie apart."""
    pieces = [_part(arena, span, slot, run) for slot, run in span.reads]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).transpose(1, 2)


def write_spans(arena: torch.Tensor, new: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
    """Write the real tokens of `new` [B,T,K,D] into the arena, in place."""
    for span in spans:
        for token, slot, run in span.writes:
            _part(arena, span, slot, run).copy_(new[span.batch, token : token + run])
    return arena


def _run_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    rows: Any,
    lengths: Any,
    counts: Any,
    spans: tuple[Span, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    return write_spans(k_arena, k, spans), write_spans(v_arena, v, spans)


def attend_spans(
    q: torch.Tensor, k_arena: torch.Tensor, v_arena: torch.Tensor, spans: tuple[Span, ...], scale: float
) -> torch.Tensor:
    """Flash attention span by span; q [B,T,H,D] to [B,T,H,D], zeros for padding tokens."""
    B, T, H, D = q.shape
    K = k_arena.shape[2]
    out: torch.Tensor | None = None
    for span in spans:
        k, v = _read(k_arena, span), _read(v_arena, span)
        queries = q[span.batch, : span.count].transpose(1, 2)
        if span.count == 1:
            # The query heads of a group share their keys: as query rows of one head they are one small matmul.
            grouped = queries.reshape(queries.shape[0], K, H // K, D)
            part = flash(grouped, k, v, 0.0, False, scale=scale)[0].reshape(queries.shape[0], 1, H, -1)
        else:
            part = flash(queries, k, v, 0.0, span.causal, attn_mask=span.mask, scale=scale)[0].transpose(1, 2)
        if out is None:
            if span.batch == slice(0, B) and span.count == T:
                return part
            out = q.new_zeros(B, T, H, v_arena.shape[3])
        out[span.batch, : span.count] = part
    return q.new_zeros(B, T, H, v_arena.shape[3]) if out is None else out


def refuses_flash(equation: Equation) -> str | None:
    """Why torch's flash attention does not apply to an attention equation, or None."""
    q, _, v_arena = equation.operands[:3]
    slopes, sinks = equation.operands[6:8]
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"no flash attention for {q.dtype}"
    if equation.params["soft_cap"] is not None:
        return "flash attention has no soft cap"
    if slopes is not None:
        return "flash attention has no ALiBi slopes"
    if sinks is not None:
        return "flash attention has no sinks"
    if v_arena.shape[3] != q.shape[3]:
        return f"flash attention needs one head size, found {q.shape[3]} and {v_arena.shape[3]}"
    return None


def attend_function(equation: Equation) -> Callable[..., torch.Tensor]:
    """`run(q, k_arena, v_arena, spans)` of an equation for which `refuses_flash` says nothing."""
    scale = equation.params["scale"]
    return lambda q, k_arena, v_arena, spans: attend_spans(q, k_arena, v_arena, spans, scale)


def _flash(equation: Equation) -> Callable[..., torch.Tensor]:
    scale = equation.params["scale"]

    def run(
        q: Any, k_arena: Any, v_arena: Any, rows: Any, lengths: Any, counts: Any, s: Any, z: Any, spans: Any
    ) -> Any:
        return attend_spans(q, k_arena, v_arena, spans, scale)

    return run


def _composed(equation: Equation) -> Callable[..., torch.Tensor]:
    params = {name: equation.params[name] for name in ("scale", "window", "soft_cap", "causal")}

    def run(
        q: Any,
        k_arena: Any,
        v_arena: Any,
        rows: Any,
        lengths: Any,
        counts: Any,
        slopes: Any,
        sinks: Any,
        spans: Any,
    ) -> Any:
        out = q.new_zeros(*q.shape[:3], v_arena.shape[3])
        for span in spans:
            k, v = _read(k_arena, span).transpose(1, 2), _read(v_arena, span).transpose(1, 2)
            for index, batch in enumerate(range(span.batch.start, span.batch.stop)):
                out[batch, : span.count] = attend_row(
                    q[batch, : span.count],
                    k[index],
                    v[index],
                    span.first,
                    span.length,
                    slopes=slopes,
                    sinks=sinks,
                    **params,
                )
        return out

    return run


ATTENTION_PLAN = HostPlan((3, 4, 5), _attention_facts, plan_spans)
WRITE_PLAN = HostPlan((4, 5, 6), _write_facts, plan_spans)

KERNELS = (
    Kernel(
        "torch.flash_attention",
        ATTENTION.name,
        _flash,
        refuses=refuses_flash,
        plan=ATTENTION_PLAN,
        tier="fused",
    ),
    Kernel("torch.attention_by_row", ATTENTION.name, _composed, plan=ATTENTION_PLAN),
    Kernel("torch.kv_write", "kv_write", lambda equation: _run_write, plan=WRITE_PLAN, tier="fused"),
)
