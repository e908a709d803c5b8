"""What a launch of the kernel is compiled for, and which calls have no variant: read by dispatch before any launch.

A variant is all that the compiler bakes in: head counts, sizes, style, norms, cache layout and the tile of heads. The
number of tokens is none of it, so that one compilation serves every bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atbx.core.errors import UnsupportedError
from atbx.ops.rope import STYLES

UB_BYTES = 192 * 1024
"""Unified buffer of a vector core of Atlas A2 and A3; what the compiler's memory planning must stay within."""

FAMILIES = ("A2", "A3")
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
LAYOUTS = ("slots", "BNSD")
LARGEST_HEAD = 256
_TILE = 1024
"""Channels of a tile of heads, at most, beyond one head: 8 heads of 128, 4 of 256."""


def _power(n: int) -> int:
    """The next power of two at or above n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


@dataclass(frozen=True)
class Variant:
    """One compilation of the kernel.

    rotary_dim: channels of D that turn, from the first. page: 0 for arenas [slots,K,D], else the slots of a block of
    [blocks,K,page,D]. eps: of the norms, in the units of a squared channel.
    """

    heads: int
    kv_heads: int
    head_size: int
    rotary_dim: int
    style: str
    is_q_normed: bool = False
    is_k_normed: bool = False
    eps: float = 0.0
    page: int = 0

    def group(self, heads: int) -> int:
        """Heads of a tile: a power of two, as many as the channels of a tile allow."""
        is_interleaved, half = self.style == "interleaved", self.rotary_dim // 2
        # Interleaved pairs short of a power of two are masked by a buffer of their own each.
        tile = _TILE // 2 if is_interleaved and half != _power(half) else _TILE
        found = min(_power(heads), max(1, tile // _power(self.head_size)))
        # triton-adapter-opt 3.2.0 crashes on interleaved pairs in a tile of one head.
        return max(2, found) if is_interleaved else found

    @property
    def items(self) -> int:
        """Pieces of work of one token."""
        return sum(-(-n // self.group(n)) for n in (self.heads, self.kv_heads))

    def constants(self, rounds_by_hand: bool = False) -> dict[str, Any]:
        """Compile-time constants of the kernel, by its parameters' names.

        rounds_by_hand: for the interpreter on BF16, which does not round.
        """
        return {
            "eps": self.eps,
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "HEAD": self.head_size,
            "HALF": self.rotary_dim // 2,
            "IS_INTERLEAVED": self.style == "interleaved",
            "IS_Q_NORMED": self.is_q_normed,
            "IS_K_NORMED": self.is_k_normed,
            "PAGE": self.page,
            "Q_GROUP": self.group(self.heads),
            "KV_GROUP": self.group(self.kv_heads),
            "HEAD_BLOCK": _power(self.head_size),
            "HALF_BLOCK": _power(self.rotary_dim // 2),
            "REST_BLOCK": _power(self.head_size - self.rotary_dim),
            "ROUNDS_BY_HAND": rounds_by_hand,
        }

    def problem(self) -> str | None:
        """Why there is no such variant, or None."""
        sizes = (self.heads, self.kv_heads, self.head_size, self.rotary_dim)
        if min(sizes) < 1 or self.heads % self.kv_heads:
            return f"{self.heads} query heads are no multiple of {self.kv_heads} KV heads"
        if self.style not in STYLES:
            return f"style {self.style!r} is none of {', '.join(STYLES)}"
        if self.head_size % 16 or self.head_size > LARGEST_HEAD:
            # A head must be whole 32-byte blocks of the unified buffer, and the tile of one head must fit it.
            return f"head size {self.head_size} is no multiple of 16 up to {LARGEST_HEAD}"
        if self.rotary_dim % 2 or self.rotary_dim > self.head_size:
            return f"{self.rotary_dim} of {self.head_size} channels cannot turn"
        if self.page < 0:
            return f"a block of {self.page} slots"
        return None


def refuses(
    *,
    family: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_dim: int,
    style: str,
    layout: str = "slots",
) -> str | None:
    """Why the kernel does not serve a call, or None; norms and token counts never matter."""
    if family not in FAMILIES:
        return f"Triton for Ascend targets {' and '.join(FAMILIES)}, not {family}"
    if dtype not in DTYPES:
        return f"takes {' and '.join(str(d).removeprefix('torch.') for d in DTYPES)}, found {dtype}"
    if layout not in LAYOUTS:
        return f"cache layout {layout!r} is none of {', '.join(LAYOUTS)}"
    return Variant(heads, kv_heads, head_size, rotary_dim, style).problem()


def need(variant: Variant) -> Variant:
    """The variant, if there is one.

    Raises:
        UnsupportedError: there is none; the message says why.
    """
    problem = variant.problem()
    if problem is not None:
        raise UnsupportedError(f"atbx::qkv_rotary_write has no such variant: {problem}", found=str(variant))
    return variant
