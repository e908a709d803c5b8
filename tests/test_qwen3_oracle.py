"""Qwen3 against transformers on tiny random models: FP32 logits and greedy tokens, by every path a token can take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qwen_models import (
    PATHS,
    PROMPTS,
    SIZES,
    Case,
    assert_as_close_as_transformers,
    case_of,
    greedy,
    greedy_of_transformers,
    reference_logits,
)

from atbx.models import qwen

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle


def heads(query: int, kv: int, size: int) -> dict[str, int]:
    """Keys of a number of query heads, KV heads and channels a head."""
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": size}


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 128}
KINDS: dict[str, dict[str, Any]] = {
    "gqa1_64": heads(4, 4, 64),
    "gqa4_80": heads(8, 2, 80),
    "gqa8_96": heads(8, 1, 96),
    "gqa4_128_tied": {**heads(4, 1, 128), "tie_word_embeddings": True},
    "gqa1_128": heads(2, 2, 128),
    "gqa8_64": heads(8, 1, 64),
    "biased": {**heads(8, 2, 16), "attention_bias": True},
    "yarn": {**heads(8, 2, 64), "rope_parameters": YARN},
    "windowed_from_layer_1": {
        **heads(8, 2, 16), "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
    },
    "windowed": {**heads(8, 2, 16), "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    "window_not_in_use": {**heads(8, 2, 16), "use_sliding_window": False, "sliding_window": 7},
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A kind of Qwen3, saved by transformers and loaded here."""
    config = transformers.Qwen3Config(**{**SIZES, **KINDS[request.param]})
    return case_of(config, tmp_path_factory.mktemp(request.param))


def test_the_configuration_is_what_transformers_took(case: Case) -> None:
    theirs, ours = case.fp32.config, case.loaded.config
    assert type(ours) is qwen.QwenConfig
    assert ours.qk_norm
    assert (ours.head_size, ours.kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [layer.window for layer in ours.cache_spec.layers] == windows


@pytest.mark.parametrize(("chunk", "together", "decode"), PATHS)
def test_fp32_logits_are_as_close_to_fp64_as_those_of_transformers(
    case: Case, chunk: int, together: bool, decode: int
) -> None:
    assert_as_close_as_transformers(case, chunk, together, decode)


@pytest.mark.parametrize("chunk", [512, 8])
def test_greedy_tokens_of_a_ragged_batch_are_those_of_transformers(case: Case, chunk: int) -> None:
    assert greedy(case, chunk, 12) == greedy_of_transformers(case.fp32, PROMPTS, 12)


def test_head_norms_matter(case: Case) -> None:
    # The oracle could not tell a model without them if its own logits did not depend on them.
    before = reference_logits(case.fp32, PROMPTS[2:3])[0]
    kept = [p.detach().clone() for n, p in case.fp32.named_parameters() if "q_norm" in n or "k_norm" in n]
    assert len(kept) == 2 * case.loaded.config.layers
    held = [p for n, p in case.fp32.named_parameters() if "q_norm" in n or "k_norm" in n]
    with torch.no_grad():
        for parameter in held:
            parameter.fill_(1.0)
        after = reference_logits(case.fp32, PROMPTS[2:3])[0]
        for parameter, value in zip(held, kept, strict=True):
            parameter.copy_(value)
    assert (before - after).norm() > 0.01 * before.norm()
