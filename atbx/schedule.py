"""The schedule of a batch: how prompts are prefilled in chunks and groups, and which sizes each step has.

Pure functions of lengths, so that planning, warm-up and the run itself take the same decisions. Rows are prefilled in
groups of equal padded length whose size is a power of two, so a ragged batch is hardly padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atbx.core.buckets import choose, ladder
from atbx.core.errors import CapacityError, OptionError


@dataclass(frozen=True)
class Request:
    """What planning needs to know of a call: prompt lengths of its rows and the options it will pass."""

    prompt_lengths: tuple[int, ...]
    max_new_tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def need_positive(name: str, value: object) -> None:
    """Raise OptionError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(
            "must be a positive whole number", where=name, expected="1 or more", found=repr(value)
        )


@dataclass(frozen=True)
class Policy:
    """Sizes that steps may have.

    context:     tokens a row can hold at most.
    chunk:       most prompt tokens of a row in one step.
    step_tokens: most tokens of all rows in one prefill step.
    score_chunk: chunk where logits of every token are wanted (they are V wide, so fewer at a time).
    batches:     bucket sizes of the batch axis.
    """

    context: int
    chunk: int = 512
    step_tokens: int = 512
    score_chunk: int = 128
    max_batch: int = 256

    def __post_init__(self) -> None:
        for name in ("context", "chunk", "step_tokens", "score_chunk", "max_batch"):
            need_positive(name, getattr(self, name))

    @property
    def batches(self) -> tuple[int, ...]:
        """Buckets of the batch axis B."""
        return ladder(self.max_batch, doubling_until=8, steps=4)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Buckets of the query axis T."""
        return ladder(min(self.chunk, self.context), doubling_until=8, steps=2)

    @property
    def extents(self) -> tuple[int, ...]:
        """Buckets of the KV axis S, for the slots read and for an arena's capacity."""
        return ladder(self.context, smallest=min(256, self.context), steps=1)

    def capacity(self, limit: int) -> int:
        """Capacity of an arena for rows of at most `limit` tokens."""
        return choose(self.extents, limit, "capacity")

    def extent(self, length: int, capacity: int) -> int:
        """Slots that a step reads for rows of at most `length` tokens."""
        return min(choose(self.extents, length, "extent"), capacity)

    def batch(self, rows: int) -> int:
        """Bucket of `rows` batch rows."""
        return choose(self.batches, rows, "batch rows")


@dataclass(frozen=True)
class Chunk:
    """One prefill step: `rows` of the batch, tokens `start` to `start + counts[i]` of each."""

    rows: tuple[int, ...]
    start: int
    counts: tuple[int, ...]

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(self.counts)

    @property
    def end(self) -> int:
        """Filled slots of the longest row after the step."""
        return self.start + self.width


def row_limits(lengths: Sequence[int], max_new_tokens: int | None, context: int) -> tuple[int, ...]:
    """Tokens that each row may hold: its prompt and what may be generated.

    Raises:
        CapacityError: a prompt leaves no room, or an explicit max_new_tokens does not fit the context.
    """
    limits = []
    for row, length in enumerate(lengths):
        if max_new_tokens is None:
            if length >= context:
                raise CapacityError(
                    "the prompt fills the context",
                    where=f"tokens[{row}]",
                    expected=f"under {context}",
                    found=length,
                )
            limits.append(context)
        elif length + max_new_tokens > context:
            raise CapacityError(
                "the request cannot fit the context",
                where=f"tokens[{row}]",
                expected=f"prompt + max_new_tokens at most {context}",
                found=f"{length} + {max_new_tokens}",
                hint="Shorten the prompt, ask for fewer tokens, or pass max_new_tokens=None to go to the context's end",
            )
        else:
            limits.append(length + max_new_tokens)
    return tuple(limits)


def prefill(lengths: Sequence[int], policy: Policy, *, chunk: int | None = None) -> Iterator[Chunk]:
    """The prefill steps of prompts of these lengths, row by row or in groups of rows of one padded length."""
    chunk = min(chunk or policy.chunk, policy.chunk, policy.context)
    shapes: dict[tuple[int, int], list[int]] = {}
    for row, length in enumerate(lengths):
        whole, rest = divmod(length - 1, chunk)
        shapes.setdefault((whole, choose(policy.tokens, rest + 1, "prompt tokens")), []).append(row)
    for (whole, last), rows in shapes.items():
        widest = chunk if whole else last
        for group in _groups(rows, max(1, policy.step_tokens // widest)):
            for index in range(whole):
                yield Chunk(group, index * chunk, (chunk,) * len(group))
            start = whole * chunk
            yield Chunk(group, start, tuple(lengths[row] - start for row in group))


def _groups(rows: list[int], most: int) -> Iterator[tuple[int, ...]]:
    """Rows in groups of powers of two, at most `most` together: exact batch buckets, so no row is padding."""
    start = 0
    while start < len(rows):
        size = 1 << (min(most, len(rows) - start).bit_length() - 1)
        yield tuple(rows[start : start + size])
        start += size


def decode_extents(
    lengths: Sequence[int], limits: Sequence[int], policy: Policy, capacity: int
) -> tuple[int, ...]:
    """Extents that decode steps pass through, from the prompts' lengths to the last token before the limits.

    The last token generated is never fed back, so a row of limit n fills n - 1 slots.
    """
    steps = range(max(lengths) + 1, max(limits))
    return tuple(sorted({policy.extent(length, capacity) for length in _bucket_steps(steps, policy)}))


def _bucket_steps(steps: range, policy: Policy) -> Iterator[int]:
    """The lengths of `steps` at which the extent can change: its ends and the buckets between."""
    if not steps:
        return
    yield steps.start
    yield from (size for size in policy.extents if steps.start < size < steps.stop)
    yield steps.stop - 1
