"""What generation and scoring give back: plain values, one entry a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

FINISH_REASONS = ("eos", "stop", "length", "cache_full", "cancelled")
"""eos: an end-of-sequence token; stop: a stop string or token sequence; length: max_new_tokens; cache_full: the
context's end, where max_new_tokens was not given; cancelled: by `cancel`, or by closing the stream."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability (natural log) of a token, and the most probable tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """One token of one row, as it appears in a stream.

    text is what this token adds to what may be shown: whole characters only, so it can be empty; None without a
    tokenizer. `finish` is set on a row's last event, whose token is None if the row ended without one (cancelled).
    """

    row: int
    token: int | None
    text: str | None = None
    finish: str | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Generation:
    """Result of `generate`, one entry a row.

    tokens:   new tokens only, EOS included.
    finish:   why each row ended, one of `FINISH_REASONS`.
    text:     new text, cut before a stop string; None without a tokenizer.
    logprobs: of the chosen tokens, where asked for. prompt_logprobs: of every prompt token but the first.
    seed:     the seed used, to get the same tokens again; None if nothing was drawn at random.
    """

    tokens: list[list[int]]
    finish: list[str]
    text: list[str] | None
    logprobs: list[list[TokenLogprobs]] | None
    prompt_logprobs: list[list[TokenLogprobs]] | None
    seed: int | tuple[int, ...] | None


@dataclass(frozen=True)
class Score:
    """Log-likelihoods of given tokens, one entry a row; natural logarithms.

    logprobs: of every token but the first, given those before it. total: their sum. tokens: how many there are.
    """

    logprobs: list[list[float]]
    total: list[float]
    tokens: list[int]

    @property
    def perplexity(self) -> list[float]:
        """exp(-mean log-likelihood) of each row."""
        return [_perplexity(t, n) for t, n in zip(self.total, self.tokens, strict=True)]


def _perplexity(total: float, tokens: int) -> float:
    """exp(-total / tokens): infinite past the largest float, NaN for no tokens."""
    if not tokens:
        return math.nan
    try:
        return math.exp(-total / tokens)
    except OverflowError:
        return math.inf
