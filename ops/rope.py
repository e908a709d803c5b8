"""Rotary position embedding: its frozen description, and its frequencies in FP32 for every scaling in use.

A scaling that depends on the sequence length ("dynamic", "longrope") is chosen per row from the row's
declared maximum length at start, so that neither a batch neighbour nor a later step ever changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
STYLES = ("half", "interleaved")


@dataclass(frozen=True)
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

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies of a row depend on its declared maximum length."""
        return self.scaling in ("dynamic", "longrope")
