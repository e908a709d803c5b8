"""Rotary position embeddings: the six operators and how each pairs its elements.

"half" pairs element i with element i + D/2, "interleave" pairs 2i with 2i + 1; npu_interleave_rope takes its
elements apart first (even ones, then odd ones) and returns them in that order. cos and sin come in the full
width D, except in npu_mrope and the ATB form, which look them up in a table of two halves. Products and sums are
taken in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atbx.testing.software_npu.rules.registry import NotModelledError, rule


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """[-x2, x1] for the two halves of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    """(-x[2i+1], x[2i]) for the pairs of the last axis."""
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    """x * cos + rotate(x) * sin in float32, for cos and sin of full width."""
    wide = x.float()
    if mode == "half":
        turned = rotate_half(wide)
    elif mode == "interleave":
        turned = rotate_pairs(wide)
    else:
        raise NotModelledError(f"rotary_mode {mode!r} is not modelled")
    return wide * cos.float() + turned * sin.float()


@rule("npu::npu_rotary_mul", source="op-plugin page and test_npu_rotary_mul.py", status="upstream golden ran")
def rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """input * r1 + rotate(input) * r2, r1 (cos) and r2 (sin) broadcast over batch and heads.

    rotate: a matrix [D, D] that turns by multiplication, in place of the mode.
    """
    if rotate is not None:
        wide = input.float()
        return (wide * r1.float() + (wide @ rotate.float()) * r2.float()).to(input.dtype)
    return _turned(input, r1, r2, rotary_mode).to(input.dtype)


@rule(
    "npu::npu_apply_rotary_pos_emb",
    source="op-plugin page and test_npu_apply_rotary_pos_emb.py (BSND ran, TND skipped)",
    status="upstream golden ran",
)
def apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
):
    """Both tensors turned in place; cos and sin [B, S, 1, D] (TND: [T, 1, D])."""
    query.copy_(_turned(query, cos, sin, rotary_mode))
    key.copy_(_turned(key, cos, sin, rotary_mode))
    return query, key


@rule("npu::npu_interleave_rope", source="op-plugin page npu_interleave_rope", status="document only")
def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, N, S, 64] taken apart into even and odd elements, then turned by halves; the order stays apart."""
    apart = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
    return _turned(apart, cos, sin, "half").to(x.dtype)


def _sections(table: torch.Tensor, sections: list[int], cache_mode: str) -> torch.Tensor:
    """cos or sin [m, T, R/2] of the m position rows brought to [T, R/2], a part of the width from each row."""
    if cache_mode == "default":
        parts = table.split(sections, dim=-1)
        return torch.cat([part[row] for row, part in enumerate(parts)], dim=-1)
    mixed = table[0].clone()
    for row in (1, 2):
        stop = sections[1] * 3
        mixed[..., row:stop:3] = table[row][..., row:stop:3]
    return mixed


@rule("npu::npu_mrope", source="op-plugin page npu_mrope and test_npu_mrope.py", status="upstream golden ran")
def mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
):
    """Fresh query [T, H*D] and key [T, K*D], their first R = cos_sin_cache.shape[-1] elements a head turned.

    positions: [T], or [m, T] with one row a section. cos_sin_cache: [P, R], cos in the first half and sin in
    the second, each of R/2 angles.
    """
    rotary = cos_sin_cache.shape[-1]
    looked_up = cos_sin_cache[positions.long()].float()
    cos, sin = looked_up.chunk(2, dim=-1)
    if positions.dim() == 2:
        sections = [int(one) for one in mrope_section or ()]
        cos = _sections(cos, sections, cache_mode or "default")
        sin = _sections(sin, sections, cache_mode or "default")
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        heads = x.float().unflatten(-1, (-1, head_size))
        part, rest = heads[..., :rotary], heads[..., rotary:]
        if (rotary_mode or "half") == "half":
            first, second = part.chunk(2, dim=-1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        else:
            first, second = part[..., ::2], part[..., 1::2]
            turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        return torch.cat([turned, rest], dim=-1).flatten(-2).to(x.dtype)

    return turn(query), turn(key)


@dataclass
class _FirstTable:
    """The cos and sin halves that _npu_rotary_embedding keeps for the life of the process."""

    halves: torch.Tensor | None = None


_FIRST = _FirstTable()


def forget_rotary_table() -> None:
    """What ending the process does: the next call of _npu_rotary_embedding brings its own table."""
    _FIRST.halves = None


@rule(
    "atb::_npu_rotary_embedding",
    source="op-plugin op_plugin/ops/atb/RopeAtb.cpp (process-wide table) and test_atb_rope.py",
    status="upstream golden ran",
)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """query [T, H*D] and key [T, K*D] turned in place, with the table of the FIRST call in this process.

    The operator keeps that table and never looks at a later cos_sin_cache: another base, or a longer context,
    silently turns by the old angles (an index past its end is a fault of the device).
    """
    if _FIRST.halves is None:
        _FIRST.halves = cos_sin_cache.clone()
    cos, sin = _FIRST.halves[positions.flatten().long()].chunk(2, dim=-1)
    mode = "half" if is_neox_style else "interleave"
    for tensor in (query, key):
        heads = tensor.reshape(cos.shape[0], -1, head_size)
        if mode == "half":
            wide_cos, wide_sin = cos.repeat(1, 2), sin.repeat(1, 2)
        else:
            wide_cos, wide_sin = cos.repeat_interleave(2, 1), sin.repeat_interleave(2, 1)
        turned = _turned(heads, wide_cos.unsqueeze(1), wide_sin.unsqueeze(1), mode)
        tensor.copy_(turned.to(tensor.dtype).reshape(tensor.shape))
