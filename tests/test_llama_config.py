"""Configurations of the Llama family from config.json and GGUF metadata, and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoints import GGUF_TINY, HF_TINY, TINY, changed

from atbx.core.errors import CheckpointError, UnsupportedError
from atbx.models.llama_gguf_config import config_from_gguf
from atbx.models.llama_hf_config import config_from_hf, config_to_hf
from atbx.ops.rope import Rope


def hf(**keys: Any) -> dict[str, Any]:
    return {**HF_TINY, **keys}


def from_gguf(tensors: dict[str, torch.Tensor] | None = None, **keys: Any) -> Any:
    held = {"output.weight": torch.zeros(1), **(tensors or {})}
    metadata = {**GGUF_TINY, **{f"llama.{key.replace('__', '.')}": value for key, value in keys.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return config_from_gguf(metadata, held, held.__getitem__, "model.gguf")


# --- config.json ---------------------------------------------------------------------------------------------------


def test_a_plain_config_reads_as_it_stands() -> None:
    assert config_from_hf(HF_TINY) == TINY


@pytest.mark.oracle
def test_absent_keys_mean_what_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers")
    for model_type, kind in (("llama", transformers.LlamaConfig), ("mistral", transformers.MistralConfig)):
        theirs = kind()
        given = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        ours = config_from_hf({"model_type": model_type} | {key: getattr(theirs, key) for key in given})
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.head_size == theirs.head_dim
        assert ours.context == theirs.max_position_embeddings
        assert ours.eps == theirs.rms_norm_eps
        assert ours.window == getattr(theirs, "sliding_window", None)
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.tied == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"head_dim": 16}, "head_size", 16),
        ({"head_dim": None}, "head_size", 8),
        ({"num_key_value_heads": None}, "kv_heads", 4),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 7}, "window", 7),
        ({"model_type": "mistral", "architectures": None, "sliding_window": None}, "window", None),
        ({"model_type": "mistral", "architectures": None}, "window", 4096),
        ({"attention_bias": True}, "out_bias", True),
        ({"mlp_bias": True}, "mlp_bias", True),
        ({"tie_word_embeddings": True}, "tied", True),
        ({"hidden_act": "gelu_pytorch_tanh"}, "activation", "gelu_tanh"),
        ({"hidden_act": "gelu"}, "activation", "gelu"),
        ({"rms_norm_eps": 1e-3}, "eps", 1e-3),
    ],
)
def test_keys_reach_their_field(keys: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(config_from_hf(hf(**keys)), field) == value


def scaled(**fields: Any) -> Rope:
    return Rope(dims=8, **fields)


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES: list[tuple[dict[str, Any], Rope]] = [
    ({"rope_theta": 5e5}, scaled(theta=5e5)),
    ({"rope_theta": None}, scaled()),
    ({"rope_scaling": None}, scaled()),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, scaled(scaling="linear", factor=2.0)),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, scaled(scaling="linear", factor=2.0)),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        scaled(scaling="dynamic", factor=4.0, original_context=64),
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 9.0},
        scaled(theta=7.0),
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 16}},
        scaled(scaling="llama3", factor=8.0, original_context=16, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    ({"rope_scaling": {"type": "yarn", **YARN}}, scaled(scaling="yarn", factor=4.0, original_context=16)),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 16, "truncate": False, "mscale": 0.7,
                          "mscale_all_dim": 0.5, "finetuned": True}},
        scaled(scaling="yarn", factor=4.0, original_context=64, beta_fast=16.0, truncate=False, mscale=0.7,
               mscale_all_dim=0.5),
    ),
    (
        {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1.5}, "original_max_position_embeddings": 16},
        scaled(scaling="yarn", factor=4.0, original_context=16, attention_factor=1.5),
    ),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 2, 3, 4.5],
                          "original_max_position_embeddings": 16}},
        scaled(scaling="longrope", factor=4.0, original_context=16, short_factor=(1.0,) * 4,
               long_factor=(1.0, 2.0, 3.0, 4.5), attention_factor=math.sqrt(1.5)),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "rope"), ROPES)
def test_both_forms_of_rotary_description_are_read(keys: dict[str, Any], rope: Rope) -> None:
    assert config_from_hf(hf(**keys)).rope == rope


@pytest.mark.oracle
@pytest.mark.parametrize(("keys", "rope"), ROPES)
def test_rotary_descriptions_mean_what_transformers_makes_of_them(keys: dict[str, Any], rope: Rope) -> None:
    transformers = pytest.importorskip("transformers")
    inits = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    keys = {key: value for key, value in keys.items() if value is not None}
    theirs = transformers.LlamaConfig(**{**HF_TINY, **keys} if "rope_theta" in keys else hf(**keys))
    assert theirs.rope_parameters["rope_type"] == rope.scaling
    assert theirs.rope_parameters["rope_theta"] == rope.theta
    if rope.scaling in ("llama3", "yarn", "longrope"):
        assert theirs.rope_parameters["original_max_position_embeddings"] == rope.original_context
        _, attention = inits[rope.scaling](theirs, "cpu")
        if rope.attention_factor is not None:
            assert attention == pytest.approx(rope.attention_factor, rel=1e-12)


@pytest.mark.parametrize(("keys", "rope"), ROPES)
def test_a_written_config_reads_back_the_same(keys: dict[str, Any], rope: Rope) -> None:
    config = config_from_hf(hf(**keys))
    assert config_from_hf(config_to_hf(config)) == config
    windowed = config_from_hf(hf(**keys, model_type="mistral", architectures=None, sliding_window=9))
    assert config_to_hf(windowed)["model_type"] == "mistral"
    assert config_from_hf(config_to_hf(windowed)) == windowed


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, r"rope_scaling\.rope_type"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, r"rope_scaling\.type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "strange": 3}}, r"rope_scaling\.strange"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"rope_parameters\.partial",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"sliding_window": 5}, "sliding_window"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"model_type": "qwen3"}, "model_type"),
        (
            {"rope_scaling": {"type": "yarn", **YARN}, "original_max_position_embeddings": 32},
            "original_max_position",
        ),
    ],
)
def test_a_key_that_changes_the_computation_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"folder/config.json: {named}"):
        config_from_hf(hf(**keys), "folder/config.json")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is malformed; expected a positive whole number, found 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is malformed"),
        (
            {"num_attention_heads": 5},
            r"hidden_size is malformed; expected a multiple of num_attention_heads \(5\)",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads is malformed"),
        ({"rms_norm_eps": True}, "rms_norm_eps is malformed"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is malformed"),
        ({"rope_scaling": [1]}, "rope_scaling is malformed"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, r"rope_scaling\.low_freq_factor is missing"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1], "long_factor": [1]}},
            r"rope_scaling\.short_factor is malformed; expected a list of 4",
        ),
        ({"head_dim": 7}, "Rope.dims"),
    ],
)
def test_a_malformed_key_is_named(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: .*{said}"):
        config_from_hf(hf(**keys))


def test_bookkeeping_keys_are_harmless() -> None:
    keys = {"attention_dropout": 0.1, "torch_dtype": "bfloat16", "transformers_version": "5", "use_cache": True,
            "is_llama_config": True, "rope_interleaved": False, "_flash_attn_2_enabled": True, "sliding_window": None,
            "pretraining_tp": 1, "initializer_range": 0.02}  # fmt: skip
    assert config_from_hf(hf(**keys)) == TINY


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (changed(rope=Rope(dims=8, style="interleaved")), r"rope\.style"),
        (changed(rope=Rope(dims=4)), r"rope\.dims"),
        (changed(window=5, qkv_bias=True), "window"),
    ],
)
def test_what_transformers_cannot_compute_is_not_written(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        config_to_hf(config)


# --- GGUF metadata -------------------------------------------------------------------------------------------------


def test_plain_metadata_reads_as_it_stands() -> None:
    assert from_gguf() == changed(eps=0.5)


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"attention__head_count_kv": None}, "kv_heads", 4),
        ({"attention__head_count_kv": [2, 2]}, "kv_heads", 2),
        ({"attention__key_length": 16, "attention__value_length": 16}, "head_size", 16),
        ({"attention__sliding_window": 5}, "window", 5),
        ({"attention__sliding_window": 0}, "window", None),
        ({"rope__freq_base": 1e6}, "rope", scaled(theta=1e6)),
        ({"rope__scale_linear": 2.0}, "rope", scaled(scaling="linear", factor=2.0)),
        ({"rope__scaling__type": "none"}, "rope", scaled()),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            "rope",
            scaled(scaling="linear", factor=4.0),
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 16,
            },
            "rope",
            scaled(scaling="yarn", factor=4.0, original_context=16),
        ),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 2.0},
            "rope",
            scaled(
                scaling="yarn", factor=4.0, original_context=64, attention_factor=2 * (0.1 * math.log(4) + 1)
            ),
        ),
    ],
)
def test_metadata_reaches_its_field(keys: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(from_gguf(**keys), field) == value


def test_tensors_decide_biases_and_tying() -> None:
    held = {"blk.0.attn_q.bias": torch.zeros(1), "blk.0.ffn_up.bias": torch.zeros(1)}
    config = from_gguf(held)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.tied) == (True, False, True, False)
    assert config_from_gguf(GGUF_TINY, [], lambda name: torch.zeros(1)).tied


def test_the_vocabulary_counts_where_its_size_is_not_stated() -> None:
    metadata = {k: v for k, v in GGUF_TINY.items() if k != "llama.vocab_size"} | {
        "tokenizer.ggml.tokens": ["a"] * 17
    }
    assert config_from_gguf(metadata, [], lambda name: torch.zeros(1)).vocab == 17


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"expert_count": 8}, "llama.expert_count"),
        ({"attention__scale": 0.5}, "llama.attention.scale"),
        ({"attention__causal": False}, "llama.attention.causal"),
        ({"attention__value_length": 4}, "llama.attention.value_length"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count"),
        ({"rope__scaling__type": "strange"}, "llama.rope.scaling.type"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type.*rope_factors_short.weight"),
        ({"rope__scaling__attn_factor": 2.0}, "llama.rope.scaling.attn_factor"),
        ({"attention__head_count_kv": [1, 2]}, "llama.attention.head_count_kv"),
        ({"logit_scale": 0.25}, "llama.logit_scale"),
    ],
)
def test_metadata_that_changes_the_computation_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"model.gguf: {named}"):
        from_gguf(**keys)


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "feed_forward_length"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model.gguf: llama\.{key} is missing"):
        from_gguf(**{key: None})


# --- whatever stands in a description ------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 70)
    | st.floats()
    | st.sampled_from(["", "llama", "yarn", "linear"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["factor", "type", "x"]), inner)
    ),
    max_leaves=5,
)
_ROPE_KEYS = [
    "rope_scaling",
    "rope_parameters",
    "head_dim",
    "sliding_window",
    "architectures",
    "attention_bias",
]
_GGUF_KEYS = [f"llama.{key}" for key in ("attention.sliding_window", "attention.key_length", "rope.scaling.type",
              "rope.scaling.factor", "rope.freq_base", "attention.scale", "expert_count")]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from([*HF_TINY, *_ROPE_KEYS]), _JSON, min_size=1, max_size=3))
def test_any_config_json_gives_a_configuration_or_an_error_of_ours(changes: dict[str, Any]) -> None:
    try:
        config = config_from_hf({**HF_TINY, **changes})
    except (CheckpointError, UnsupportedError):
        return
    assert config.heads % config.kv_heads == 0


@settings(max_examples=300, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from([*GGUF_TINY, *_GGUF_KEYS, "tokenizer.ggml.tokens"]), _JSON, min_size=1, max_size=3
    ),
    table=st.lists(st.floats(width=32), min_size=3, max_size=4),
)
def test_any_metadata_gives_a_configuration_or_an_error_of_ours(
    changes: dict[str, Any], table: list[float]
) -> None:
    held = {"rope_freqs.weight": torch.tensor(table)}
    try:
        config = config_from_gguf({**GGUF_TINY, **changes}, held, held.__getitem__)
    except (CheckpointError, UnsupportedError):
        return
    assert config.heads % config.kv_heads == 0
