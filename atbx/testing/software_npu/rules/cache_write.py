"""Writes into KV caches and reads out of them: by slot into paged caches, by index into plain ones.

A slot counts tokens through all blocks: block slot // block_size, offset slot % block_size. A paged cache is plain
[blocks, block, K, D] or fractal [blocks, K*D/w, block, w], where a token's row is cut into strips of w elements
(16; 32 for int8). No operator here checks its slots or indices: a wrong one is a fault of the device while the
kernel runs, or silent corruption. Negative slots are skipped in the plain forms; ATB's fractal form does not
skip them.
"""

from __future__ import annotations

import itertools

import torch

from atbx.testing.software_npu.rules.registry import NZ, Call, NotModelledError, rule


def write_plain(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """rows [T, ...] into cache [blocks, block, ...] at their slots; negative slots are skipped."""
    block = cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // block, slot % block] = rows[row].reshape(cache.shape[2:])


def write_strips(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """rows [T, K, D] into cache [blocks, K*D/w, block, w], strip by strip; negative slots are skipped."""
    strips, block, width = cache.shape[1:]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // block, :, slot % block] = rows[row].reshape(strips, width)


def is_stripped(cache: torch.Tensor, rows: torch.Tensor, cache_format: int | None = None) -> bool:
    """Whether a cache is in strips: by its storage format where known, else because rows [T, K, D] do not fit."""
    return cache_format == NZ or tuple(cache.shape[2:]) != tuple(rows.shape[1:])


@rule(
    "atb::_npu_reshape_and_cache",
    source="op-plugin test_atb_reshape_and_cache.py (fact sheet 1.3)",
    status="upstream golden ran",
)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """key and value [T, K, D] into caches [blocks, block, K, D], or in strips [blocks, K*D/16, block, 16]."""
    for rows, cache in ((key, key_cache), (value, value_cache)):
        write = write_strips if is_stripped(cache, rows) else write_plain
        write(rows, cache, slot_indices)


@rule(
    "atb::_npu_reshape_and_cache_siso",
    source="op-plugin test_atb_reshape_and_cache_siso.py",
    status="upstream golden ran",
)
def reshape_and_cache_siso(key: torch.Tensor, key_cache: torch.Tensor, slot_indices: torch.Tensor) -> None:
    """key [T, K, D] into one plain cache [blocks, block, K, D]."""
    write_plain(key, key_cache, slot_indices)


@rule(
    "npu::npu_scatter_pa_kv_cache",
    source="op-plugin page and test_scatter_pa_kv_cache.py",
    status="golden skipped upstream",
)
def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """key and value [T, K, D] by slot: "Norm" (or None) into [blocks, block, K, D], "PA_NZ" in strips.

    The mode alone decides: in the default mode a plain cache whose shape would allow it is written in strips.
    """
    if key.dim() == 4 or compress_lens is not None:
        raise NotModelledError("the compressing form of npu_scatter_pa_kv_cache is not modelled")
    write = write_strips if cache_mode == "PA_NZ" else write_plain
    write(key, key_cache, slot_mapping)
    write(value, value_cache, slot_mapping)


def _scatter_nd(target: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    depth = indices.shape[-1]
    target[tuple(indices.long().reshape(-1, depth).unbind(-1))] = updates.reshape(-1, *target.shape[depth:])
    return target


_SCATTER_ND = "op-plugin page npu_scatter_nd_update_ and test_npu_scatter_nd_update.py"


@rule("npu::npu_scatter_nd_update_", source=_SCATTER_ND, status="upstream golden ran")
def scatter_nd_update_in_place(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """input[indices[i]] = updates[i] in place, indices [..., depth] over the first `depth` axes."""
    return _scatter_nd(input, indices, updates)


@rule("npu::npu_scatter_nd_update", source=_SCATTER_ND, status="upstream golden ran")
def scatter_nd_update(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """A copy of input with updates written as by npu_scatter_nd_update_."""
    return _scatter_nd(input.clone(), indices, updates)


def _scatter(target: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int) -> torch.Tensor:
    axis = axis % target.dim()
    length = updates.shape[axis]
    for row in range(updates.shape[0]):
        start, index = (
            (int(indices[row]), row) if indices.dim() == 1 else (int(indices[row, 1]), int(indices[row, 0]))
        )
        target[index].narrow(axis - 1, start, length).copy_(updates[row])
    return target


_SCATTER = "op-plugin pages scatter_update and scatter_update_ (fact sheet 1.3)"


@rule("npu::scatter_update_", source=_SCATTER, status="document only")
def scatter_update_in_place(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int
) -> torch.Tensor:
    """updates[b] written into input[b] along axis from indices[b] on (2-D indices: rows of (batch, start))."""
    return _scatter(input, indices, updates, axis)


@rule("npu::scatter_update", source=_SCATTER, status="document only")
def scatter_update(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int
) -> torch.Tensor:
    """A copy of input with updates written as by scatter_update_."""
    return _scatter(input.clone(), indices, updates, axis)


# --- reads ------------------------------------------------------------------------------------------------------


def _token_rows(cache: torch.Tensor, rows_shape: tuple[int, ...]) -> torch.Tensor:
    """A cache as [blocks, block, *row]: plain as it is, strips put together."""
    if tuple(cache.shape[2:]) == rows_shape or cache.dim() == 3:
        return cache
    return cache.permute(0, 2, 1, 3).flatten(2).unflatten(2, rows_shape)


def sequence_lengths(lengths: torch.Tensor, cumulative: bool) -> list[int]:
    """Lengths of the sequences; cumulative lists begin with 0 and hold one entry more than sequences."""
    listed = [int(one) for one in lengths.tolist()]
    return [after - before for before, after in itertools.pairwise(listed)] if cumulative else listed


def read_blocks(
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: list[int],
    starts: torch.Tensor | None,
    zero_missing: bool,
) -> torch.Tensor:
    """All sequences' rows [sum of lengths, *row], each from block starts[b] // block on.

    Rows of a block that the table does not name (past its columns, or an id out of range) are zeros if
    zero_missing, as npu_gather_pa_kv_cache documents.
    """
    blocks, block = cache.shape[:2]
    out = []
    for sequence, length in enumerate(lengths):
        first = 0 if starts is None else int(starts[sequence]) // block
        for token in range(length):
            column = first + token // block
            known = column < table.shape[1]
            block_id = int(table[sequence, column]) if known else -1
            if zero_missing and not 0 <= block_id < blocks:
                out.append(torch.zeros_like(cache[0, 0]))
            else:
                out.append(cache[block_id, token % block])
    return torch.stack(out) if out else cache.new_empty((0, *cache.shape[2:]))


@rule(
    "npu::npu_gather_pa_kv_cache",
    source="op-plugin test_npu_gather_pa_kv_cache.py (read; its golden uses names that it does not define)",
    status="document only",
)
def gather_pa_kv_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """key and value [T, K, D] filled with the sequences' rows one after another."""
    lengths = sequence_lengths(seq_lens, is_seq_lens_cumsum)
    for cache, target in ((key_cache, key), (value_cache, value)):
        rows = read_blocks(
            _token_rows(cache, tuple(target.shape[1:])), block_tables, lengths, seq_offset, True
        )
        count = min(rows.shape[0], target.shape[0])
        target[:count] = rows[:count].reshape(count, *target.shape[1:])


@rule(
    "atb::npu_paged_cache_load", source="op-plugin test_atb_paged_cache_load.py", status="upstream golden ran"
)
def paged_cache_load(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(key, value) [sum of lengths, K, D] of the sequences one after another; the `.out` form fills key, value."""
    lengths = sequence_lengths(context_lens, cumsum)
    results = []
    for cache, target in ((key_cache, key), (value_cache, value)):
        rows = read_blocks(cache, block_table, lengths, seq_starts, False)
        if target is not None:
            target[: rows.shape[0]] = rows.reshape(rows.shape[0], *target.shape[1:])
        results.append(rows if target is None else target)
    return tuple(results)


def slot_count(call: Call, cache: torch.Tensor, in_strips: bool) -> int:
    """Slots of a paged cache: blocks times block size, read from the form it is in."""
    return cache.shape[0] * cache.shape[2 if in_strips else 1]
