"""Rotary position embedding: its frozen description, and its frequencies in FP32 for every scaling in use.

A scaling that depends on the sequence length ("dynamic", "longrope") is chosen per row from the row's
declared maximum length at start, so that neither a batch neighbour nor a later step ever changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from atbx.core.errors import OptionError

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
STYLES = ("half", "interleaved")


@dataclass(frozen=True, repr=False)
class Rope:
    """How queries and keys are rotated.

    dims:             leading channels of a head that rotate (even); the rest pass through (partial rotary).
    theta:            base of the frequencies.
    style:            "half" pairs channel i with i + dims/2 (GPT-NeoX, Hugging Face Llama);
                      "interleaved" pairs 2i with 2i + 1 (GPT-J, Meta's Llama files).
    scaling:          one of `SCALINGS`.
    factor:           scaling factor s of linear, dynamic, llama3, yarn, longrope.
    original_context: tokens the model was trained on before scaling.
    low_freq_factor, high_freq_factor: wave-length bands of llama3.
    beta_fast, beta_slow, truncate:    band edges of yarn, and whether they are rounded to whole channels.
    attention_factor: factor on cos and sin; None derives it (yarn: 0.1 ln s + 1; longrope: from the contexts).
    mscale, mscale_all_dim:            yarn's variant of the attention factor (0 = unused).
    short_factor, long_factor:         longrope's factors, one a channel pair.
    """

    dims: int
    theta: float = 10000.0
    style: str = "half"
    scaling: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.dims <= 0 or self.dims % 2:
            raise ValueError(f"Rope.dims: expected a positive even number of channels, found {self.dims}")
        if self.style not in STYLES:
            raise ValueError(f"Rope.style: expected one of {STYLES}, found {self.style!r}")
        if self.scaling not in SCALINGS:
            raise ValueError(f"Rope.scaling: expected one of {SCALINGS}, found {self.scaling!r}")
        if self.scaling in ("dynamic", "llama3", "yarn", "longrope") and self.original_context <= 0:
            raise ValueError(
                f"Rope.original_context: scaling {self.scaling!r} needs it; found {self.original_context}"
            )
        if self.scaling == "longrope":
            for name in ("short_factor", "long_factor"):
                if len(getattr(self, name)) != self.dims // 2:
                    raise ValueError(
                        f"Rope.{name}: expected {self.dims // 2} factors, found {len(getattr(self, name))}"
                    )

    def __repr__(self) -> str:
        """The fields that are not at their defaults, so that a printed program stays readable."""
        given = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Rope({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies of a row depend on its declared maximum length."""
        return self.scaling in ("dynamic", "longrope")


def inverse_frequencies(rope: Rope, limit: torch.Tensor | None = None) -> torch.Tensor:
    """Radians a position for each channel pair, in FP32: [dims/2], or [B, dims/2] where they depend on `limit`.

    limit: [B] tokens that each row will hold at most; needed by "dynamic" and "longrope" only. A row keeps the
    frequencies of its limit from its first token on. This departs from transformers, which goes by the longest
    sequence of the batch at each step, so that a neighbour or a later step changes a row; with a limit equal to
    the sequence's length both agree.

    Raises:
        OptionError: the scaling depends on the length and there is no limit.
    """
    if rope.depends_on_length:
        if limit is None:
            raise OptionError(
                f"rotary: scaling {rope.scaling!r} depends on the length, so it needs limits",
                where="limits",
                expected="[B] integers",
                found=None,
            )
        return _by_limit(rope, limit)
    plain = 1.0 / _powers(rope, rope.theta)
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    return _yarn(rope) if rope.scaling == "yarn" else plain


def _exponents(rope: Rope) -> torch.Tensor:
    return torch.arange(0, rope.dims, 2, dtype=torch.int64).to(torch.float32) / rope.dims


def _powers(rope: Rope, theta: float) -> torch.Tensor:
    return torch.pow(theta, _exponents(rope))


def _by_limit(rope: Rope, limit: torch.Tensor) -> torch.Tensor:
    limits = limit.unsqueeze(-1)
    if rope.scaling == "longrope":
        short = torch.tensor(rope.short_factor, dtype=torch.float32, device=limit.device)
        long = torch.tensor(rope.long_factor, dtype=torch.float32, device=limit.device)
        factors = torch.where(limits > rope.original_context, long, short)
        return 1.0 / (factors * _powers(rope, rope.theta).to(limit.device))
    # Dynamic NTK: the base grows with the length beyond the original context (bloc97, emozilla).
    length = limits.clamp(min=rope.original_context).to(torch.float64)
    stretch = rope.factor * length / rope.original_context - (rope.factor - 1)
    # With a single pair of channels its exponent is 0, and the base plays no part.
    theta = rope.theta * stretch ** (rope.dims / max(rope.dims - 2, 1))
    return 1.0 / theta.to(torch.float32) ** _exponents(rope).to(limit.device)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are divided by the factor, short ones stay, those between are blended (Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    turns = rope.original_context / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * plain / rope.factor + blend * plain
    is_long = wavelength > rope.original_context / rope.low_freq_factor
    is_short = wavelength < rope.original_context / rope.high_freq_factor
    return torch.where(is_long, plain / rope.factor, torch.where(is_short, plain, between))


def _yarn(rope: Rope) -> torch.Tensor:
    """Channel pairs below a band keep their frequency, those above are divided, a ramp between (Peng et al.)."""

    def channel(turns: float) -> float:
        # The pair that turns so many times over the original context.
        return (
            rope.dims * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(rope.dims // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = _powers(rope, rope.theta)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def attention_factor(rope: Rope) -> float:
    """The factor on cos and sin: as stated, else yarn's 0.1 ln s + 1 or longrope's sqrt(1 + ln s / ln original)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.scaling == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
        return _mscale(rope.factor, 1.0)
    if rope.scaling == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
    return 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
