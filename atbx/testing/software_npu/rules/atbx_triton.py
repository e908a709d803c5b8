"""atbx::qkv_rotary_write, the Triton kernel of our own: split, optional head norms, rotary and the cache write.

The rule is plain torch and knows no kernel. Whoever has the kernel itself in Triton's interpreter may hand it in
(`run_instead`), so that a device runs it; the tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from atbx.testing.software_npu.rules.registry import (
    DEVICE_FAULT,
    PARAMETER,
    Call,
    contiguity_refusal,
    device_fault,
    dtype_refusal,
    limit,
    refuse_parameter,
    rule,
)

_NAME = "atbx::qkv_rotary_write"
_SOURCE = "docs/ascend-triton.md"


_instead: list[Callable[..., None]] = []


def run_instead(kernel: Callable[..., None] | None) -> None:
    """Have `kernel`, called with the operator's arguments, fill the bytes; None: the rule in plain torch again."""
    _instead[:] = [] if kernel is None else [kernel]


@rule(_NAME, source=_SOURCE, status="document only")
def qkv_rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_dim: int,
    style: str = "half",
    eps: float = 0.0,
    layout: str = "slots",
) -> None:
    """qkv [N,(H+2K)*D], cos and sin [N,rotary_dim/2], slots [N] to q_out [N,H,D] and the arenas, in place."""
    compute = _instead[0] if _instead else plainly
    compute(
        qkv,
        cos,
        sin,
        slots,
        k_arena,
        v_arena,
        q_out,
        q_norm,
        k_norm,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        rotary_dim=rotary_dim,
        style=style,
        eps=eps,
        layout=layout,
    )


def plainly(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_dim: int,
    style: str,
    eps: float,
    layout: str,
) -> None:
    """The same in plain torch: FP32 arithmetic, each result rounded once."""
    q, k, v = qkv.view(len(qkv), -1, head_size).split([heads, kv_heads, kv_heads], dim=1)
    # Members of pair i: channels i and i + half, or 2i and 2i + 1.
    first = torch.arange(rotary_dim // 2) * (2 if style == "interleaved" else 1)
    second = first + (1 if style == "interleaved" else rotary_dim // 2)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.float()
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()
        a, b = x[..., first], x[..., second]
        out = x.clone()
        out[..., first], out[..., second] = a * c - b * s, b * c + a * s
        return out.to(qkv.dtype)

    q_out.copy_(turned(q, q_norm))
    kept = slots >= 0
    where = slots[kept].long()
    for arena, new in ((k_arena, turned(k, k_norm)), (v_arena, v)):
        if layout == "BNSD":
            page = arena.shape[2]
            arena[where // page, :, where % page] = new[kept]
        else:
            arena.view(-1, kv_heads, head_size)[where] = new[kept]


@limit(_NAME, code=PARAMETER, source=_SOURCE)
def halves_and_fp32_tables(call: Call) -> str | None:
    halves = (torch.float16, torch.bfloat16)
    for name in ("qkv", "k_arena", "v_arena", "q_out"):
        refusal = dtype_refusal(call, name, halves)
        if refusal is not None:
            return refusal
    for name in ("cos", "sin"):
        refusal = dtype_refusal(call, name, (torch.float32,))
        if refusal is not None:
            return refusal
    return dtype_refusal(call, "slots", (torch.int32, torch.int64))


@limit(_NAME, code=PARAMETER, source=_SOURCE)
def everything_contiguous(call: Call) -> str | None:
    return contiguity_refusal(call, ("qkv", "cos", "sin", "slots", "k_arena", "v_arena", "q_out"))


@limit(_NAME, code=PARAMETER, source=_SOURCE)
def head_size_multiple_of_16_up_to_256(call: Call) -> str | None:
    size = call["head_size"]
    return refuse_parameter(call, f"head_size {size} is not served") if size % 16 or size > 256 else None


@limit(_NAME, code=PARAMETER, source=_SOURCE)
def a2_and_a3_only(call: Call) -> str | None:
    served = call.chip.startswith(("Ascend910B", "Ascend910_93"))
    return None if served else refuse_parameter(call, f"Triton for Ascend does not target {call.chip}")


@limit(_NAME, code=DEVICE_FAULT, source=_SOURCE, when="execution")
def slots_inside(call: Call) -> str | None:
    total = call["k_arena"].numel() // (call["kv_heads"] * call["head_size"])
    outside = call["slots"][call["slots"] >= total]
    return device_fault(call, f"slot {int(outside[0])} of {total}") if outside.numel() else None


@limit(_NAME, code=DEVICE_FAULT, source=_SOURCE, when="execution")
def slots_unique(call: Call) -> str | None:
    named = call["slots"][call["slots"] >= 0]
    # Two writes to one slot race on a device, whose order is open; here the call fails instead of choosing.
    return device_fault(call, "a slot is named twice") if named.unique().numel() != named.numel() else None
