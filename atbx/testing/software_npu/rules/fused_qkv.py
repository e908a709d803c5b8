"""npu_qkv_rms_norm_rope_cache: query and key norms, rotary and the cache write in one launch.

It always norms the query and key heads (so it serves models that have such norms), turns them by halves over the
full head, writes keys and values into a fractal paged cache and leaves the queries in q_out. A slot of -1 skips
its row; values are neither normed nor turned.
"""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.linear import fractal_width
from atbx.testing.software_npu.rules.norms import to_int8
from atbx.testing.software_npu.rules.registry import (
    DEVICE_FAULT,
    PARAMETER,
    TILING,
    Call,
    device_fault,
    dtype_refusal,
    limit,
    refuse_parameter,
    refuse_tiling,
    rule,
)
from atbx.testing.software_npu.rules.rotary import rotate_half

_NAME = "npu::npu_qkv_rms_norm_rope_cache"
_SOURCE = "op-plugin test_npu_qkv_rms_norm_rope_cache.py (fact sheet, corrections at the top): "


@rule(_NAME, source=_SOURCE + "golden", status="golden skipped upstream")
def qkv_rms_norm_rope_cache(
    qkv: torch.Tensor,
    q_gamma: torch.Tensor,
    k_gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qkv_size: list[int],
    head_nums: list[int],
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_offset: torch.Tensor | None = None,
    v_offset: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    cache_mode: str = "PA_NZ",
    is_output_qkv: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """q_out [T, Nq*D] and the caches [blocks, N*D/w, block, w] written in place, from qkv [T, (Nq+Nk+Nv)*D].

    qkv_size: [B, S, Nq+Nk+Nv, D] with T = B*S; head_nums: [Nq, Nk, Nv]; cos, sin: [T, D]; index: [T] slots.
    Returns (q, k, v) [T, N*D] before quantisation if is_output_qkv, else three absent tensors.
    """
    size = int(qkv_size[3])
    heads = [int(one) for one in head_nums]
    q, k, v = (
        part.unflatten(-1, (-1, size))
        for part in qkv.float().split([count * size for count in heads], dim=-1)
    )
    q, k = (
        _normed_and_turned(q, q_gamma, cos, sin, epsilon),
        _normed_and_turned(k, k_gamma, cos, sin, epsilon),
    )
    q_out.copy_(q.flatten(1))
    _written(k, k_cache, index, k_scale, k_offset)
    _written(v, v_cache, index, v_scale, v_offset)
    if not is_output_qkv:
        return None, None, None
    return tuple(part.flatten(1).to(qkv.dtype) for part in (q, k, v))


def _normed_and_turned(
    x: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, epsilon: float
) -> torch.Tensor:
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * gamma.float()
    return normed * cos.float().unsqueeze(1) + rotate_half(normed) * sin.float().unsqueeze(1)


def _written(
    rows: torch.Tensor,
    cache: torch.Tensor,
    index: torch.Tensor,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
) -> None:
    if scale is not None:  # quantised caches hold rows / scale + offset, per head and element
        rows = rows / scale.float() if offset is None else rows / scale.float() + offset.float()
        rows = to_int8(rows)
    strips, block, width = cache.shape[1:]
    for row, slot in enumerate(index.tolist()):
        if slot >= 0:
            cache[slot // block, :, slot % block] = rows[row].reshape(strips, width).to(cache.dtype)


@limit(_NAME, code=PARAMETER, source=_SOURCE + "one float dtype; index int64")
def fused_qkv_dtypes(call: Call) -> str | None:
    refused = dtype_refusal(call, "qkv", (torch.float16, torch.bfloat16)) or dtype_refusal(
        call, "index", (torch.int64,)
    )
    same = (call["qkv"].dtype,)
    for name in ("q_gamma", "k_gamma", "cos", "sin", "q_out"):
        refused = refused or dtype_refusal(call, name, same)
    for cache, scale in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        refused = refused or dtype_refusal(call, cache, same if call[scale] is None else (torch.int8,))
    return refused


@limit(_NAME, code=PARAMETER, source=_SOURCE + "cache_mode PA_NZ")
def fused_qkv_cache_mode(call: Call) -> str | None:
    mode = call["cache_mode"]
    return None if mode == "PA_NZ" else refuse_parameter(call, f"cacheMode {mode} is not supported.")


@limit(_NAME, code=TILING, source=_SOURCE + "D of 128")
def fused_qkv_head_size_128(call: Call) -> str | None:
    size = int(call["qkv_size"][3])
    return None if size == 128 else refuse_tiling(call, f"D {size} should be 128")


@limit(_NAME, code=TILING, source=_SOURCE + "qkv_size and head_nums describe qkv")
def fused_qkv_sizes_describe_qkv(call: Call) -> str | None:
    batch, rows, heads, size = (int(one) for one in call["qkv_size"])
    if tuple(call["qkv"].shape) != (batch * rows, heads * size):
        return refuse_tiling(
            call, f"qkv {tuple(call['qkv'].shape)} should be ({batch * rows}, {heads * size})"
        )
    if sum(int(one) for one in call["head_nums"]) != heads:
        return refuse_tiling(call, f"headNums {list(call['head_nums'])} should sum to {heads}")
    for name in ("cos", "sin"):
        if tuple(call[name].shape) != (batch * rows, size):
            return refuse_tiling(call, f"{name} {tuple(call[name].shape)} should be ({batch * rows}, {size})")
    if call["index"].numel() != batch * rows:
        return refuse_tiling(call, f"index of {call['index'].numel()} entries should have {batch * rows}")
    return None


@limit(_NAME, code=TILING, source=_SOURCE + "caches in strips [blocks, N*D/w, block, w]")
def fused_qkv_caches_in_strips(call: Call) -> str | None:
    size = int(call["qkv_size"][3])
    for name, heads in (("k_cache", call["head_nums"][1]), ("v_cache", call["head_nums"][2])):
        shape, width = tuple(call[name].shape), fractal_width(call[name].dtype)
        if len(shape) != 4 or shape[3] != width or shape[1] * width != int(heads) * size:
            return refuse_tiling(
                call, f"{name} {shape} should be [blocks, {int(heads) * size}/{width}, block, {width}]"
            )
    return None


@limit(
    _NAME,
    code=DEVICE_FAULT,
    source=_SOURCE + "slots below the cache's, each once; -1 skips",
    when="execution",
)
def fused_qkv_slots_in_the_cache(call: Call) -> str | None:
    index, count = call["index"], call["k_cache"].shape[0] * call["k_cache"].shape[2]
    wrong = index[(index < -1) | (index >= count)]
    if wrong.numel():
        return device_fault(call, f"slot {int(wrong[0])}, cache of {count} slots")
    used = index[index >= 0]
    return None if used.unique().numel() == used.numel() else device_fault(call, "a slot occurs twice")
