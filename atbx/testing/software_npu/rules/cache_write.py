"""Writes into KV caches: by slot into paged caches (plain and fractal forms), and by index into plain ones.

A slot counts tokens through all blocks: block slot // block_size, offset slot % block_size. In the fractal form
[blocks, K*D/16, block, 16] (32 for int8) a token's row is cut into strips of 16. Negative slots are skipped in
the plain form; the ATB fractal form does not skip them.
"""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.registry import NotModelledError, rule


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
        if cache.shape[2:] == rows.shape[1:]:
            write_plain(rows, cache, slot_indices)
        else:
            write_strips(rows, cache, slot_indices)


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
    """key and value [T, K, D] by slot: "Norm" (or None) into [blocks, block, K, D], "PA_NZ" in strips."""
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
