"""Attention in plain NumPy and FP64, written from the definition and from nothing in atbx: a list of keys a row."""

from __future__ import annotations

import math

import numpy as np


def attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    causal: bool = True,
    slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """queries [T,H,D] at positions start..start+T; keys, values [N,K,D] at positions 0..N; returns [T,H,D]."""
    T, H, D = queries.shape
    N, K, _ = keys.shape
    out = np.zeros((T, H, values.shape[2]))
    for t in range(T):
        i = start + t
        for h in range(H):
            kv = h * K // H
            seen = [j for j in range(N) if (not causal or j <= i) and (window is None or j > i - window)]
            scores = []
            for j in seen:
                s = scale * float(sum(float(queries[t, h, d]) * float(keys[j, kv, d]) for d in range(D)))
                if soft_cap is not None:
                    s = soft_cap * math.tanh(s / soft_cap)
                if slopes is not None:
                    s += float(slopes[h]) * (j - i)
                scores.append(s)
            top = max(scores + ([float(sinks[h])] if sinks is not None else []))
            weights = [math.exp(s - top) for s in scores]
            total = sum(weights) + (math.exp(float(sinks[h]) - top) if sinks is not None else 0.0)
            for weight, j in zip(weights, seen, strict=True):
                out[t, h] += weight / total * values[j, kv].astype(np.float64)
    return out
