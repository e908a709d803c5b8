"""Small models run on the NPU backend beside an FP64 run, with the tolerance that their dtype allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from model_logits import all_logits, engine_of
from small_models import random_params

import atbx
from atbx.models import llama
from atbx.models.llama import LlamaConfig

TOLERANCE = 4.0
"""How many times the error of the CPU backend in the same dtype (against FP64) the NPU backend may have.

Both round at the same places but for cos and sin, which stock operators take in the model's dtype.
"""


@dataclass
class Reference:
    """FP64 logits [T, V] of each prompt, and the largest error that the NPU's logits may have."""

    logits: list[torch.Tensor]
    tolerance: float


def in_float64(params: Any) -> Any:
    """The same parameter values in FP64."""
    return atbx.trees.map_leaves(lambda x: x.double(), params)


def reference(config: LlamaConfig, params: Any, prompts: Sequence[list[int]]) -> Reference:
    """FP64 logits of `params` (as rounded to their dtype) by the CPU backend, and what the dtype costs there."""
    exact = all_logits(engine_of(llama.forward, config, dtype=torch.float64), in_float64(params), prompts)
    rounded = all_logits(engine_of(llama.forward, config, dtype=None), params, prompts)
    error = max(float((a.double() - b).abs().max()) for a, b in zip(rounded, exact, strict=True))
    return Reference(exact, TOLERANCE * error)


def params_of(config: LlamaConfig, dtype: torch.dtype, seed: int = 0) -> Any:
    """Random parameters, small enough that activations stay of order one in FP16."""
    return random_params(config, dtype, seed)


def check_logits(found: Sequence[torch.Tensor], expected: Reference) -> None:
    """Every logit within the tolerance, and finite."""
    for row, (a, b) in enumerate(zip(found, expected.logits, strict=True)):
        error = float((a.cpu().double() - b).abs().max())
        assert error <= expected.tolerance, f"row {row}: {error} > {expected.tolerance}"


def check_greedy(
    config: LlamaConfig, params: Any, prompts: Sequence[list[int]], new: Sequence[list[int]]
) -> None:
    """Each new token is the best by FP64, unless the best is nearer than twice the tolerance."""
    whole = [p + t for p, t in zip(prompts, new, strict=True)]
    expected = reference(config, params, whole)
    checked = 0
    for prompt, tokens, logits in zip(prompts, new, expected.logits, strict=True):
        for index, token in enumerate(tokens):
            row = logits[len(prompt) + index - 1]
            best = row.max()
            if best - row[token] == 0:
                checked += 1
                continue
            assert best - row[token] <= 2 * expected.tolerance, (index, token, int(row.argmax()))
    assert checked >= len(new), "hardly any token was decided by its margin"
