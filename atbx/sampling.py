"""Sampling options, and the program that turns logits into tokens.

Option *values* are tensors, one a row, and never part of a compiled variant's key. Which *stages* exist (filters,
penalties, tables of a few widths, log-probabilities) forms a small closed set, so greedy decoding pays for greedy.
"""

from __future__ import annotations

import difflib
import math
import numbers
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from atbx import ops
from atbx.core.errors import OptionError
from atbx.core.trees import node
from atbx.ops.logits import (
    bias_logits,
    count_tokens,
    draw,
    filter_logits,
    is_unusable,
    penalize,
    suppress,
    token_logprobs,
    top_logprobs,
)
from atbx.ops.philox import uniform

TABLE_WIDTHS = (0, 4, 16, 64, 256, 1024, 4096)
"""Widths that a table of token ids (logit bias, suppressed EOS) is padded to."""
TOP_WIDTHS = (0, 1, 5, 20, 100)
"""Widths of the reported alternatives; fewer are cut on the host."""

LARGEST = torch.finfo(torch.float32).max
"""Values are FP32 in the sampler; a larger one would become infinite there, and infinity times zero NaN."""
LARGEST_INT = 2**63 - 1

RANGES: dict[str, tuple[float, float, float]] = {
    "temperature": (0.0, LARGEST, 0.0),
    "top_k": (0, LARGEST_INT, 0),
    "top_p": (0.0, 1.0, 1.0),
    "min_p": (0.0, 1.0, 0.0),
    "repetition_penalty": (0.0, LARGEST, 1.0),
    "presence_penalty": (-LARGEST, LARGEST, 0.0),
    "frequency_penalty": (-LARGEST, LARGEST, 0.0),
}
"""Lowest and highest value of each option, and the value that switches it off."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Each number may also be a sequence with one value a row.

    temperature:  0 is greedy (the default); logits are divided by it.
    top_k, top_p, min_p: filters, off at 0, 1 and 0; see `ops.logits.filter_logits`.
    repetition_penalty, presence_penalty, frequency_penalty: off at 1, 0 and 0; see `ops.logits.penalize`.
    logit_bias:   token id to a number added to its logit; -inf bans it.
    seed:         an int (row i draws from (seed, i)), or one int a row (each draws as if it were alone);
                  None takes a fresh one, and the result tells which.
    """

    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0
    repetition_penalty: float | Sequence[float] = 1.0
    presence_penalty: float | Sequence[float] = 0.0
    frequency_penalty: float | Sequence[float] = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, (lowest, highest, _) in RANGES.items():
            value = getattr(self, name)
            for place, item in _items(name, value):
                _check_number(
                    place,
                    item,
                    lowest,
                    highest,
                    whole=name == "top_k",
                    open_below=name == "repetition_penalty",
                )
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(
                "is no mapping",
                where="logit_bias",
                expected="token ids to numbers",
                found=repr(self.logit_bias),
            )
        for token, bias in self.logit_bias.items():
            place = f"logit_bias[{token!r}]"
            if isinstance(token, bool) or not isinstance(token, numbers.Integral) or token < 0:
                raise OptionError(
                    "is no token id", where=place, expected="an int of 0 or more", found=repr(token)
                )
            # A NaN compares with nothing, so it is refused too. A finite number must not become a ban in FP32.
            strange = isinstance(bias, bool) or not isinstance(bias, numbers.Real)
            if strange or not (bias == -math.inf or -LARGEST <= bias <= LARGEST):
                raise OptionError("is no bias", where=place, expected="a number or -inf", found=repr(bias))
        if self.seed is not None:
            for place, item in _items("seed", self.seed):
                _check_number(place, item, -LARGEST_INT - 1, LARGEST_INT, whole=True)

    @classmethod
    def from_options(cls, **given: Any) -> Sampling:
        """From keyword arguments.

        Raises:
            OptionError: an option is unknown or out of range.
        """
        known = {f.name for f in fields(cls)}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known), 1)
                raise OptionError(
                    "unknown sampling option",
                    where=name,
                    expected=f"one of {sorted(known)}",
                    hint=f"Did you mean {near[0]}?" if near else None,
                )
        return cls(**given)

    def is_on(self, *names: str) -> bool:
        """Whether any row uses one of these options."""
        return any(item != RANGES[name][2] for name in names for _, item in _items(name, getattr(self, name)))

    def check_rows(self, batch: int) -> None:
        """Raise OptionError if an option was given row by row, and not for so many rows: those not used too."""
        for name in (*RANGES, "seed"):
            if getattr(self, name) is not None:
                self.column(name, batch)

    def column(self, name: str, batch: int) -> list[Any]:
        """An option's value of every row.

        Raises:
            OptionError: as many values as rows were given, but not of these rows.
        """
        value = getattr(self, name)
        if isinstance(value, numbers.Real):
            return [value] * batch
        if len(value) != batch:
            raise OptionError("one value a row", where=name, expected=batch, found=len(value))
        return list(value)

    def seeds(self, batch: int) -> tuple[int | tuple[int, ...], list[int], list[int]]:
        """The seed to report, and (seed, sequence) of every row."""
        if self.seed is None:
            fresh = secrets.randbits(63)
            return fresh, [fresh] * batch, list(range(batch))
        if isinstance(self.seed, numbers.Integral):
            return int(self.seed), [int(self.seed)] * batch, list(range(batch))
        each = [int(seed) for seed in self.column("seed", batch)]
        return tuple(each), each, [0] * batch


def _items(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    return [(name, value)]


def _check_number(
    place: str, value: Any, lowest: float, highest: float, *, whole: bool = False, open_below: bool = False
) -> None:
    kind = numbers.Integral if whole else numbers.Real
    # Compared, not converted: an int may be too large for a float, and a float cannot tell 2**63 - 1 from 2**63.
    strange = isinstance(value, bool) or not isinstance(value, kind) or value != value
    if strange or value in (math.inf, -math.inf):
        expected = "a whole number" if whole else "a finite number"
        raise OptionError(
            "is not a number that makes sense here", where=place, expected=expected, found=repr(value)
        )
    if not lowest <= value <= highest or (open_below and value == lowest):
        low = f"above {lowest}" if open_below else f"{lowest}"
        raise OptionError("out of range", where=place, expected=f"{low} to {highest}", found=value)


@dataclass(frozen=True)
class Stages:
    """Which parts a sampler program has. The set is closed: 2 x 2 x 7 x 7 x 6 x 2 programs at most exist.

    filters: temperature, top_k, top_p, min_p and the draw. penalties: tables of what occurred. bias, eos: width of
    the bias table and of the table of suppressed ids (0 = no such stage). logprobs: None, or the width of the
    alternatives. processed: log-probabilities of what was sampled from, not of the model's logits; for a greedy row
    those after penalties, biases and suppressed ids, whatever the rows beside it do.
    """

    filters: bool = False
    penalties: bool = False
    bias: int = 0
    eos: int = 0
    logprobs: int | None = None
    processed: bool = False

    @classmethod
    def of(
        cls, sampling: Sampling, *, eos: int = 0, logprobs: int | None = None, processed: bool = False
    ) -> Stages:
        """The stages that options need; eos is how many ids are suppressed for a while."""
        return cls(
            filters=sampling.is_on("temperature"),
            penalties=sampling.is_on("repetition_penalty", "presence_penalty", "frequency_penalty"),
            bias=_width("logit_bias", len(sampling.logit_bias), TABLE_WIDTHS),
            eos=_width("eos", eos, TABLE_WIDTHS),
            logprobs=None if logprobs is None else _width("logprobs", logprobs, TOP_WIDTHS),
            processed=processed and logprobs is not None,
        )


def _width(name: str, size: int, widths: tuple[int, ...]) -> int:
    for width in widths:
        if width >= size:
            return width
    raise OptionError("too many entries", where=name, expected=f"at most {widths[-1]}", found=size)


@node
class SamplerValues:
    """Option values of a batch: tensors [B], tables [B, N]; None for stages that do not exist."""

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    seed: Any = None
    sequence: Any = None
    repetition: Any = None
    presence: Any = None
    frequency: Any = None
    seen: Any = None
    bias_ids: Any = None
    bias_values: Any = None
    eos_ids: Any = None

    @classmethod
    def of(
        cls,
        sampling: Sampling,
        stages: Stages,
        prompts: Sequence[Sequence[int]],
        vocab: int,
        eos: Sequence[int],
    ) -> tuple[SamplerValues, int | tuple[int, ...] | None]:
        """Values for these prompts, and the seed used (None where nothing is drawn)."""
        batch = len(prompts)
        sampling.check_rows(batch)
        values: dict[str, Any] = {}
        seed: int | tuple[int, ...] | None = None

        def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(sampling.column(name, batch), dtype=dtype)

        if stages.filters:
            seed, seeds, sequences = sampling.seeds(batch)
            values |= {
                "temperature": column("temperature"),
                "top_k": column("top_k", torch.int64),
                "top_p": column("top_p"),
                "min_p": column("min_p"),
                "seed": torch.tensor(seeds, dtype=torch.int64),
                "sequence": torch.tensor(sequences, dtype=torch.int64),
            }
        if stages.penalties:
            seen = torch.zeros(batch, vocab, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                seen[row, torch.tensor([t for t in prompt if t < vocab], dtype=torch.int64)] = True
            values |= {
                "seen": seen,
                "repetition": column("repetition_penalty"),
                "presence": column("presence_penalty"),
                "frequency": column("frequency_penalty"),
            }
        if stages.bias:
            ids = list(sampling.logit_bias)
            for token in ids:
                if token >= vocab:
                    raise OptionError(
                        "is outside the vocabulary",
                        where=f"logit_bias[{token}]",
                        expected=f"under {vocab}",
                        found=token,
                    )
            values["bias_ids"] = _table(ids, stages.bias, batch, -1, torch.int64)
            values["bias_values"] = _table(
                list(sampling.logit_bias.values()), stages.bias, batch, 0.0, torch.float32
            )
        if stages.eos:
            values["eos_ids"] = _table([t for t in eos if t < vocab], stages.eos, batch, -1, torch.int64)
        return cls(**values), seed


def _table(items: Sequence[Any], width: int, batch: int, fill: Any, dtype: torch.dtype) -> torch.Tensor:
    row = torch.tensor([*items, *[fill] * (width - len(items))], dtype=dtype)
    return row.expand(batch, width).contiguous()


@node
class SamplerStep:
    """What changes every step, each [B]: `position` of the token to choose, rows that go on, rows that may not end."""

    position: Any
    active: Any
    unfinished: Any


@node
class Sampled:
    """Result of a step. tokens [B]; unusable [B]: no token can be taken from the row's logits; logprob [B] and
    top_values, top_ids [B,n] where asked for; counts [B,V] is the updated table of generated tokens."""

    tokens: Any
    unusable: Any
    logprob: Any = None
    top_values: Any = None
    top_ids: Any = None
    counts: Any = None


def sample_step(
    logits: Any, values: SamplerValues, counts: Any, step: SamplerStep, stages: Stages, vocab: int
) -> Sampled:
    """One token a row from logits [B, V]; ids of `vocab` and above are padding of the weights and never chosen.

    counts: [B, vocab] int32 tokens generated so far, or None without penalties.
    """
    raw = logits if vocab == logits.shape[1] else logits[:, :vocab]
    x = raw
    if stages.penalties:
        x = penalize(x, values.seen, counts, values.repetition, values.presence, values.frequency)
    if stages.bias:
        x = bias_logits(x, values.bias_ids, values.bias_values)
    if stages.eos:
        x = suppress(x, values.eos_ids, step.unfinished)
    unusable = is_unusable(x)
    processed = x
    if stages.filters:
        x = filter_logits(x, values.temperature, values.top_k, values.top_p, values.min_p)
        tokens = draw(x, uniform(values.seed, values.sequence, step.position))
        if stages.processed:
            # A greedy row reports what it does alone, where no filters exist: its one token left would give 0.
            hot = ops.expand_dims(values.temperature > 0, 1)
            processed = ops.where(hot, x, ops.cast(processed, torch.float32))
    else:
        tokens = ops.argmax(x, axis=1)
    result: dict[str, Any] = {}
    if stages.logprobs is not None:
        source = processed if stages.processed else raw
        result["logprob"] = token_logprobs(source, tokens)
        if stages.logprobs:
            result["top_values"], result["top_ids"] = top_logprobs(source, min(stages.logprobs, vocab))
    if stages.penalties:
        result["counts"] = count_tokens(counts, tokens, step.active)
    return Sampled(tokens, unusable, **result)


SamplerArguments = tuple[SamplerValues, Any, SamplerStep, Stages, int]
"""What `sample_step` takes after the logits."""
