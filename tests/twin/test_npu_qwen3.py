"""Qwen2 and Qwen3 on the NPU backend, on the software device: head norms, biases and late windows against FP64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_logits import all_logits, engine_of
from npu_models import check_greedy, check_logits, params_of, reference

import atbx
from atbx.kernels import ascend
from atbx.models import qwen
from atbx.models.qwen import QwenConfig

pytestmark = [pytest.mark.usefixtures("npu"), pytest.mark.every_chip]

PROMPTS = [[5, 9, 3, 22, 41, 7, 8], [1, 2], list(range(1, 40)), [60]]


def config_of(heads: int = 4, kv_heads: int = 2, head_size: int = 64, **changes: Any) -> QwenConfig:
    """Two layers over 61 tokens; a Qwen3 unless told otherwise."""
    sizes: dict[str, Any] = {
        "vocab": 61, "width": 64, "layers": 2, "heads": heads, "kv_heads": kv_heads, "head_size": head_size, "ff": 96,
        "rope": atbx.ops.Rope(head_size, theta=1e6), "context": 600, "eps": 1e-6, "qk_norm": True,
    }  # fmt: skip
    return QwenConfig(**{**sizes, **changes})


@pytest.mark.parametrize("execution", ["graph", "eager"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(4, 4, 64), (4, 1, 80), (8, 1, 96), (4, 2, 128), (8, 1, 64)]
)
def test_logits_of_qwen3_in_every_head_shape(
    heads: int, kv_heads: int, head_size: int, execution: str, half: torch.dtype
) -> None:
    config = config_of(heads, kv_heads, head_size)
    params = params_of(config, half)
    engine = engine_of(qwen.forward, config, dtype=None, device=ascend.backend(execution=execution))
    found = all_logits(engine, params, PROMPTS[:2], decode=1, unused=0.0)
    check_logits(found, reference(config, params, PROMPTS[:2]))


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": False, "qkv_bias": True},
        {"qkv_bias": True, "out_bias": True, "tied": True},
        {"window": 4, "full_layers": 1},
        {"window": 20, "full_layers": 1, "qk_norm": False, "qkv_bias": True},
    ],
)
def test_biases_and_late_windows_in_chunks_of_a_ragged_batch(
    changes: dict[str, Any], half: torch.dtype
) -> None:
    config = config_of(**changes)
    params = params_of(config, half)
    engine = engine_of(qwen.forward, config, dtype=None, chunk=16, device="npu")
    found = all_logits(engine, params, PROMPTS[:3], decode=1, unused=0.0)
    check_logits(found, reference(config, params, PROMPTS[:3]))


def test_greedy_tokens_in_a_ragged_batch(half: torch.dtype) -> None:
    config = config_of(4, 1, 128)
    params = params_of(config, half)
    generate = atbx.generator(qwen.forward, config, device="npu")
    tokens = generate(params, PROMPTS, max_new_tokens=12, eos=()).tokens
    check_greedy(config, params, PROMPTS, tokens)
