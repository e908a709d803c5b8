"""Qwen2 against transformers on tiny random models: FP32 logits and greedy tokens, by every path a token can take."""

from __future__ import annotations

from typing import Any

import pytest
from qwen_models import (
    PATHS,
    PROMPTS,
    SIZES,
    Case,
    assert_as_close_as_transformers,
    case_of,
    greedy,
    greedy_of_transformers,
)

from atbx.models import qwen

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "num_attention_heads": 6},
    "head_size_64": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "head_size_stated": {"head_dim": 80},
    "windowed_from_layer_2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "layers_listed": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
}


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A kind of Qwen2, saved by transformers and loaded here."""
    config = transformers.Qwen2Config(**{**SIZES, **KINDS[request.param]})
    return case_of(config, tmp_path_factory.mktemp(request.param))


def test_biases_are_those_of_q_k_and_v_alone(case: Case) -> None:
    config = case.loaded.config
    assert type(config) is qwen.QwenConfig
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == (True, False, False, False)
    assert case.loaded.params["layers"][0]["q_bias"].abs().max() > 0
    theirs = case.fp32.config
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [layer.window for layer in config.cache_spec.layers] == windows


@pytest.mark.parametrize(("chunk", "together", "decode"), PATHS)
def test_fp32_logits_are_as_close_to_fp64_as_those_of_transformers(
    case: Case, chunk: int, together: bool, decode: int
) -> None:
    assert_as_close_as_transformers(case, chunk, together, decode)


@pytest.mark.parametrize("chunk", [512, 8])
def test_greedy_tokens_of_a_ragged_batch_are_those_of_transformers(case: Case, chunk: int) -> None:
    assert greedy(case, chunk, 12) == greedy_of_transformers(case.fp32, PROMPTS, 12)
