"""Small random models of our own, for tests that need a model and no oracle."""

from __future__ import annotations

from typing import Any

import torch

import atbx
from atbx.core.abstract import Abstract
from atbx.models import llama
from atbx.models.llama import LlamaConfig
from atbx.ops.rope import Rope


def small_llama(**changes: Any) -> LlamaConfig:
    """A Llama of two layers over 61 tokens and a context of 600."""
    sizes: dict[str, Any] = {
        "vocab": 61, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "ff": 48,
        "rope": Rope(8), "context": 600,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **changes})


def random_params(config: LlamaConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Random parameters: large enough weights for distinct logits, norms near one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(a: Abstract) -> torch.Tensor:
        values = torch.randn(a.shape, generator=generator)
        return ((1.0 + 0.1 * values) if a.init == "ones" else 0.25 * values).to(a.dtype)

    return atbx.trees.map_leaves(draw, llama.abstract(config, dtype))
