"""Host plans of the Ascend kernels: slots, block tables, masks and lengths, worked out once a step from host integers.

Arrays are uploaded with the step's other inputs in one copy; lists are host values of a launch, which a captured graph
takes by an update. A dense arena [R, S, K, D] is served as a paged one whose blocks lie in order, so that one kernel
reads both; new tokens past a row's count are written to slots of their own behind the arena (`trash`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from atbx.core.program import Equation
from atbx.ops.attention import check_bounds

BLOCK = 128
"""Slots of a block: what FIA takes for one query token and for many alike."""


@dataclass(frozen=True)
class StepPlan:
    """What a kernel is given of a step: `arrays` as device tensors at fixed addresses, `lists` as host integers."""

    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lists: Mapping[str, list[int]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.arrays[name]


@dataclass(frozen=True)
class CacheFacts:
    """What plans need to know of a step on a KV arena: sizes, and how rows name their slots."""

    tokens: int
    arena_rows: int
    slots: int
    window: int | None
    extent: int
    is_paged: bool

    @classmethod
    def of(cls, tokens: int, arena: Any, rows: Any, window: int | None, extent: int) -> CacheFacts:
        """From the shapes of an equation: arena [R,S,K,D]; rows [B], or [B,N] where the arena is paged."""
        return cls(
            int(tokens), int(arena.shape[0]), int(arena.shape[1]), window, int(extent), len(rows.shape) == 2
        )

    @property
    def block(self) -> int:
        """Slots of a block; a dense arena that is no multiple of `BLOCK` has one block a row."""
        return self.slots if self.is_paged or self.slots % BLOCK else BLOCK

    @property
    def is_ring(self) -> bool:
        """Whether a windowed dense arena wraps around."""
        return self.window is not None and not self.is_paged and self.slots < self.extent

    @property
    def first_trash(self) -> int:
        """Flat slot at which the trash starts."""
        return (self.arena_rows - 1 if self.is_paged else self.arena_rows) * self.slots

    @property
    def reach(self) -> int:
        """Slots that a row of the step can read, rounded up to whole blocks."""
        most = self.slots if self.is_ring else self.extent
        return -(-most // self.block) * self.block


def host_lists(facts: CacheFacts, rows: torch.Tensor, *vectors: torch.Tensor) -> tuple[Any, ...]:
    """rows, lengths and counts as lists, with their bounds checked.

    Raises:
        CapacityError: a row writes past its slots, or names a row or a block that is not there.
    """
    host = rows.tolist(), *(v.tolist() for v in vectors)
    check_bounds(facts.tokens, facts.slots, facts.arena_rows, facts.window, facts.extent, *host)
    return host


def slots_of(
    facts: CacheFacts, rows: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Flat slot [B*T] int32 that each token is written to; padding tokens get slots of their own in the trash.

    The trash lies behind a dense arena, and in and behind the last block of a paged one. Every slot is named once,
    because a device leaves the order of two writes to one slot open.
    """
    B, T = rows.shape[0], facts.tokens
    position = lengths.view(B, 1) + torch.arange(T)
    if facts.is_paged:
        entry = torch.gather(rows, 1, (position // facts.slots).clamp(0, rows.shape[1] - 1))
        flat = entry * facts.slots + position % facts.slots
    else:
        flat = rows.view(B, 1) * facts.slots + position % facts.slots
    padding = torch.arange(T) >= counts.view(B, 1)
    flat[padding] = facts.first_trash + torch.arange(int(padding.sum()))
    return flat.flatten().to(torch.int32)


def block_table(facts: CacheFacts, rows: torch.Tensor) -> torch.Tensor:
    """Blocks [B, reach / block] int32 that each row's positions lie in; unused entries name block 0."""
    blocks = facts.reach // facts.block
    if facts.is_paged:
        table = rows[:, :blocks].clamp(min=0)
        if table.shape[1] < blocks:
            table = torch.nn.functional.pad(table, (0, blocks - table.shape[1]))
    else:
        table = rows.view(-1, 1) * (facts.slots // facts.block) + torch.arange(blocks)
    return table.to(torch.int32)


def live_slots(facts: CacheFacts, lengths: list[int], counts: list[int]) -> list[int]:
    """KV slots of each row that hold something after the step's tokens are written; 0 for a padding row."""
    return [
        0 if count == 0 else min(length + count, facts.slots) if facts.is_ring else length + count
        for length, count in zip(lengths, counts, strict=True)
    ]


def held_positions(facts: CacheFacts, lengths: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Position [B, reach] int64 that each slot of a row holds after the step; -1 where it holds none."""
    end = (lengths + counts).view(-1, 1)
    slot = torch.arange(facts.reach).expand(lengths.shape[0], facts.reach)
    held = slot
    if facts.is_ring:
        newest = end - 1
        held = newest - (newest - slot) % facts.slots
        held = held.masked_fill(slot >= facts.slots, -1)
    return held.masked_fill((held >= end) | (held < 0), -1)


def hidden_slots(
    facts: CacheFacts,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    causal: bool,
    held: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask [B, 1, T, reach] bool, True where a token must not look: unused slots, later tokens, outside the window.

    It goes by the position that a slot holds, so a ring needs no other order of its slots. A token that sees nothing
    (padding) is left open on the first slot, because an all-masked row is undefined.
    """
    B, T = lengths.shape[0], facts.tokens
    held = (held_positions(facts, lengths, counts) if held is None else held).view(B, 1, -1)
    query = (lengths.view(B, 1) + torch.arange(T)).view(B, T, 1)
    seen = (held >= 0).expand(B, T, facts.reach)
    if causal:
        seen = seen & (held <= query)
    if facts.window is not None:
        seen = seen & (held > query - facts.window)
    hidden = ~seen
    hidden[..., 0] &= seen.any(-1)
    return hidden.view(B, 1, T, facts.reach)


def cache_facts(equation: Equation, arena: int, rows: int, tokens: int) -> Hashable:
    """`CacheFacts` of an equation whose operands of these numbers are an arena, the rows, and [B,T,...] new tokens."""
    operands, params = equation.operands, equation.params
    return CacheFacts.of(
        operands[tokens].shape[1], operands[arena], operands[rows], params["window"], params["extent"]
    )
