"""Counter-based random numbers: one uniform is a pure function of (seed, sequence, position), the same bits everywhere.

Philox-4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3; 2011).
"""

from __future__ import annotations

from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import ShapeError
from atbx.core.op import Cost, Op, register_op

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _multiply(constant: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of the product of two 32-bit numbers, from int64 arithmetic that wraps."""
    product = word * constant
    return (product >> 32) & MASK, product & MASK


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random 32-bit words (in int64) from a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def _halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return value & MASK, (value >> 32) & MASK


def _shape(seed: Abstract, sequence: Abstract, position: Abstract) -> Abstract:
    for name, value in (("seed", seed), ("sequence", sequence), ("position", position)):
        if value.shape != seed.shape or value.ndim != 1 or value.dtype != torch.int64:
            raise ShapeError(
                f"uniform: {name} does not fit", expected=f"i64 of shape {tuple(seed.shape)}", found=value
            )
    return Abstract(seed.shape, torch.float32)


def _reference(seed: torch.Tensor, sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    word = philox((*_halves(position), *_halves(sequence)), _halves(seed))[0]
    # 24 bits: every value is exact in FP32, and 1.0 is never reached.
    return (word >> 8).to(torch.float32) * 2.0**-24


def _cost(operands: tuple[Any, ...], results: tuple[Abstract, ...]) -> Cost:
    return Cost(8.0 * ROUNDS * results[0].numel, 28.0 * results[0].numel)


UNIFORM = register_op(Op("uniform", _shape, _reference, _cost))


def uniform(seed: Any, sequence: Any, position: Any) -> Any:
    """One uniform in [0, 1) a row, as FP32 with 24 random bits: seed, sequence, position [B] int64 to [B].

    The key is the seed's 64 bits; the counter holds the position in its lower and the sequence in its upper 64.
    The first word's upper 24 bits are the number.
    """
    return UNIFORM(seed, sequence, position)
