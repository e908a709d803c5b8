"""Recovers Llama 3's rotary scaling from the table of divisors that llama.cpp stores in its place.

GGUF files hold `rope_freqs.weight`: for each pair of channels the number by which its frequency is divided. Between
the bands, 1 / divisor is linear in the frequency, with slope and intercept made of three parameters (original
context, low and high factor) that only matter together. So fixing the context gives the other two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_TOLERANCE = 2e-5
"""Relative. The table is float32, and its blended entries are differences of nearly equal numbers."""

_PUBLISHED = (8192, 1.0, 4.0)


def recover_llama3(
    divisors: Sequence[float], theta: float, context: int | None = None
) -> dict[str, Any] | None:
    """The fields of `Rope` (scaling and its parameters) that give this table; None where llama3 cannot.

    divisors: one a channel pair.
    context:  the original context if the file states it.
    """
    table = np.asarray(divisors, dtype=np.float64)
    if not len(table) or not np.all(np.isfinite(table)) or table.min() < 1 - _TOLERANCE or not theta > 1:
        return None
    factor = float(table.max())
    if factor <= 1 + _TOLERANCE:
        return {"scaling": "default"}
    if table.min() >= factor * (1 - _TOLERANCE):
        return {"scaling": "linear", "factor": factor}
    original, low, high = _PUBLISHED
    tried = [(context or original, low, high)]
    frequencies = theta ** (-np.arange(len(table)) / len(table))
    fitted = _fit(table, frequencies, factor, context or original)
    if fitted is not None:
        tried.append(fitted)
    for candidate in tried:
        if np.allclose(divisors_of(frequencies, factor, *candidate), table, rtol=_TOLERANCE, atol=0):
            return {
                "scaling": "llama3",
                "factor": factor,
                "original_context": candidate[0],
                "low_freq_factor": candidate[1],
                "high_freq_factor": candidate[2],
            }
    return None


def divisors_of(frequencies: np.ndarray, factor: float, original: int, low: float, high: float) -> np.ndarray:
    """The table of llama3 scaling: 1 where a wave is short, `factor` where it is long, blended between."""
    smooth = np.clip((original * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
    blended: np.ndarray = 1 / ((1 - smooth) / factor + smooth)
    return blended


def _fit(
    table: np.ndarray, frequencies: np.ndarray, factor: float, original: int
) -> tuple[int, float, float] | None:
    """Original context, low and high factor of the line through the blended entries."""
    smooth = (1 / table - 1 / factor) / (1 - 1 / factor)
    blended = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    at, values = frequencies[blended], smooth[blended]
    above, below = frequencies[smooth >= 1 - 1e-4], frequencies[smooth <= 1e-4]
    # With fewer than two blended entries several lines fit: take one that keeps the plain entries plain.
    if len(at) == 1:
        slopes = [(1 - values[0]) / (above.min() - at[0])] if len(above) else []
        slopes += [values[0] / (at[0] - below.max())] if len(below) else []
        slope = max(slopes, default=0.0)
        intercept = values[0] - slope * at[0]
    elif len(at) == 0:
        if not len(above) or not len(below):
            return None  # nothing to put the step between
        gap = above.min() - below.max()
        slope, intercept = 2 / gap, -2 * (below.max() + gap / 4) / gap
    else:
        from_mean = at - at.mean()
        slope = (from_mean * values).sum() / (from_mean**2).sum()
        intercept = values.mean() - slope * at.mean()
    if slope <= 0 or intercept >= 0:
        return None
    width = original / (2 * math.pi * slope)
    low = -intercept * width
    return original, float(low), float(low + width)
