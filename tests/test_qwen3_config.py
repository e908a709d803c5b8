"""Configurations and names of the Qwen family from config.json and GGUF metadata, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atbx.core import trees
from atbx.core.errors import CheckpointError, UnsupportedError
from atbx.models import qwen, qwen_names
from atbx.models.llama import LlamaConfig
from atbx.models.llama_hf_config import config_to_hf as llama_to_hf
from atbx.models.name_map import Foreign
from atbx.models.qwen import QwenConfig
from atbx.models.qwen_gguf_config import config_from_gguf
from atbx.models.qwen_hf_config import config_from_hf, config_to_hf
from atbx.models.registry import FAMILIES, family_of_config, family_of_gguf, family_of_hf
from atbx.ops.rope import Rope

# The values of a published Qwen3-0.6B config.json, and of Qwen2.5-0.5B-Instruct.
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
OURS3 = QwenConfig(
    vocab=151936, width=1024, layers=28, heads=16, kv_heads=8, head_size=128, ff=3072, rope=Rope(128, theta=1e6),
    eps=1e-6, context=40960, tied=True, qk_norm=True,
)  # fmt: skip
OURS2 = QwenConfig(
    vocab=151936, width=896, layers=24, heads=14, kv_heads=2, head_size=64, ff=4864, rope=Rope(64, theta=1e6),
    eps=1e-6, context=32768, tied=True, qkv_bias=True,
)  # fmt: skip
GGUF3: dict[str, Any] = {
    "general.architecture": "qwen3", "qwen3.block_count": 2, "qwen3.context_length": 64, "qwen3.embedding_length": 32,
    "qwen3.feed_forward_length": 48, "qwen3.attention.head_count": 4, "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 16, "qwen3.attention.value_length": 16, "qwen3.rope.freq_base": 1e6,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6, "qwen3.vocab_size": 33,
}  # fmt: skip


def without(description: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A description that lacks some keys."""
    return {key: value for key, value in description.items() if key not in keys}


# --- config.json ---------------------------------------------------------------------------------------------------


def test_published_configurations_read_as_they_stand() -> None:
    assert config_from_hf(QWEN3) == OURS3
    assert config_from_hf(QWEN2) == OURS2


@pytest.mark.oracle
def test_absent_keys_mean_what_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers")
    for model_type, kind in (("qwen2", transformers.Qwen2Config), ("qwen3", transformers.Qwen3Config)):
        theirs = kind()
        given = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        ours = config_from_hf({"model_type": model_type} | {key: getattr(theirs, key) for key in given})
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.head_size == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
        assert ours.context == theirs.max_position_embeddings
        assert ours.eps == theirs.rms_norm_eps
        assert (ours.window, ours.full_layers) == (None, 0)
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.tied == theirs.tie_word_embeddings
        windowed = kind(use_sliding_window=True)
        used = {key: getattr(windowed, key) for key in given} | {"use_sliding_window": True}
        ours = config_from_hf({"model_type": model_type} | used)
        assert ours.window == windowed.sliding_window == 4096
        assert ours.full_layers == windowed.layer_types.count("full_attention") == 28


def test_the_head_size_of_qwen3_does_not_follow_from_the_width() -> None:
    assert config_from_hf(without(QWEN3, "head_dim")).head_size == 128
    assert config_from_hf({**QWEN3, "hidden_size": 1000}).width == 1000  # no multiple of 16 heads
    with pytest.raises(CheckpointError, match="head_dim is missing"):
        config_from_hf({**QWEN3, "head_dim": None})


WINDOW = {"use_sliding_window": True, "sliding_window": 512}
FULL, WINDOWED = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("keys", "window", "full_layers"),
    [
        ({**WINDOW, "max_window_layers": 20}, 512, 20),
        ({**WINDOW, "max_window_layers": 0}, 512, 0),
        ({**WINDOW, "max_window_layers": 28}, None, 0),
        ({**WINDOW, "max_window_layers": 99}, None, 0),
        ({"use_sliding_window": True, "sliding_window": None}, None, 0),
        ({"sliding_window": 512, "max_window_layers": 3}, None, 0),
        ({**WINDOW, "layer_types": [FULL] * 5 + [WINDOWED] * 23}, 512, 5),
        ({**WINDOW, "layer_types": [WINDOWED] * 28, "max_window_layers": 28}, 512, 0),
        ({**WINDOW, "layer_types": [FULL] * 28, "max_window_layers": 3}, None, 0),
        ({"layer_types": [FULL] * 28}, None, 0),
    ],
)
def test_window_keys_say_which_layers_have_one(
    keys: dict[str, Any], window: int | None, full_layers: int
) -> None:
    config = config_from_hf({**QWEN3, **keys})
    assert (config.window, config.full_layers) == (window, full_layers)
    windows = [layer.window for layer in config.cache_spec.layers]
    assert windows == [None] * full_layers + [window] * (28 - full_layers)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({**WINDOW, "layer_types": [WINDOWED, FULL] * 14}, "layer_types .*full_attention at layer 1"),
        ({"layer_types": [WINDOWED] * 28}, "layer_types .*no window in use"),
        ({**WINDOW, "layer_types": ["linear_attention"] * 28}, "layer_types .*'linear_attention'"),
        ({"model_type": "qwen3_moe"}, r"model_type .*qwen2, qwen3, found 'qwen3_moe'"),
        ({"num_experts": 128}, "num_experts"),
        ({"moe_intermediate_size": 768}, "moe_intermediate_size"),
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1]}}, r"rope_scaling\.rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "odd": 1}}, r"rope_scaling\.odd"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias"),
    ],
)
def test_what_is_not_served_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"folder/config.json: {said}"):
        config_from_hf({**QWEN3, **keys}, "folder/config.json")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layer_types": [FULL] * 3}, "layer_types is malformed; expected a list of 28"),
        ({"layer_types": FULL}, "layer_types is malformed"),
        ({"use_sliding_window": 1}, "use_sliding_window is malformed"),
        ({**WINDOW, "sliding_window": -1}, "sliding_window is malformed"),
        ({"max_window_layers": -1}, "max_window_layers is malformed"),
        ({"max_window_layers": False}, "max_window_layers is malformed"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is malformed"),
        ({"head_dim": 127}, "Rope.dims"),
    ],
)
def test_a_malformed_key_is_named(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: .*{said}"):
        config_from_hf({**QWEN3, **keys})


def test_what_transformers_cannot_compute_is_not_written() -> None:
    for config, named in (
        (dataclasses.replace(OURS3, mlp_bias=True), "mlp_bias"),
        (dataclasses.replace(OURS2, out_bias=True), "out_bias"),
        (dataclasses.replace(OURS3, rope=Rope(128, style="interleaved")), r"rope\.style"),
    ):
        with pytest.raises(UnsupportedError, match=f"config.{named}: no dense Qwen2 or Qwen3 model"):
            config_to_hf(config)
    fields = {f.name: getattr(OURS3, f.name) for f in dataclasses.fields(OURS3)}
    with pytest.raises(UnsupportedError, match=r"config\.qk_norm: no Llama or Mistral model"):
        llama_to_hf(LlamaConfig(**fields))
    with pytest.raises(UnsupportedError, match=r"config\.full_layers: no Llama or Mistral model"):
        llama_to_hf(LlamaConfig(**{**fields, "qk_norm": False, "window": 9, "full_layers": 2}))


@pytest.mark.parametrize(("window", "full_layers"), [(None, 1), (5, 28), (5, -1)])
def test_full_layers_need_a_window_and_leave_it_a_layer(window: int | None, full_layers: int) -> None:
    with pytest.raises(ValueError, match="full_layers must leave a layer to the window"):
        dataclasses.replace(OURS3, window=window, full_layers=full_layers)


# --- GGUF metadata -------------------------------------------------------------------------------------------------


def from_gguf(tensors: tuple[str, ...] = ("output.weight",), **keys: Any) -> QwenConfig:
    """The configuration of a small qwen3 with other keys."""
    metadata = {**GGUF3, **{f"qwen3.{key.replace('__', '.')}": value for key, value in keys.items()}}
    return config_from_gguf(metadata, tensors, lambda name: torch.zeros(1), "model.gguf")


def test_plain_metadata_reads_as_it_stands() -> None:
    expected = QwenConfig(
        vocab=33, width=32, layers=2, heads=4, kv_heads=2, head_size=16, ff=48, rope=Rope(16, theta=1e6), eps=1e-6,
        context=64, qk_norm=True,
    )  # fmt: skip
    assert from_gguf() == expected
    assert from_gguf(()) == dataclasses.replace(expected, tied=True)
    yarn = from_gguf(rope__scaling__type="yarn", rope__scaling__factor=4.0)
    assert yarn.rope == Rope(16, theta=1e6, scaling="yarn", factor=4.0, original_context=64)


def test_qwen2_has_no_head_norms_and_its_biases_stand_in_tensors() -> None:
    metadata = {key.replace("qwen3", "qwen2"): value for key, value in GGUF3.items()}
    metadata["general.architecture"] = "qwen2"
    names = [f"blk.0.attn_{name}.bias" for name in "qkv"]
    config = config_from_gguf(metadata, names, lambda name: torch.zeros(1))
    assert (config.qk_norm, config.qkv_bias, config.out_bias, config.tied) == (False, True, False, True)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"expert_count": 8}, "qwen3.expert_count"),
        ({"attention__sliding_window": 512}, "qwen3.attention.sliding_window"),
        ({"rope__scaling__type": "strange"}, "qwen3.rope.scaling.type"),
        ({"attention__value_length": 8}, "qwen3.attention.value_length"),
        ({"rope__dimension_count": 8}, "qwen3.rope.dimension_count"),
    ],
)
def test_metadata_that_changes_the_computation_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"model.gguf: {named}"):
        from_gguf(**keys)


def test_a_table_of_divisors_that_is_no_known_scaling_is_refused() -> None:
    # All eight are large and close to one another: neither equal, as linear scaling has them, nor llama3's bands.
    table = torch.tensor([911.0, 871.0, 836.0, 911.0] * 2)
    metadata = {**GGUF3, "qwen3.rope.freq_base": 1e4}
    with pytest.raises(UnsupportedError, match=r"model.gguf: rope_freqs\.weight holds divisors"):
        config_from_gguf(metadata, ["rope_freqs.weight"], lambda name: table, "model.gguf")


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe", "qwen2vl", "qwen35"])
def test_other_architectures_of_the_name_are_refused_with_a_list(architecture: str) -> None:
    with pytest.raises(UnsupportedError, match=f"general.architecture.*qwen2, qwen3.*'{architecture}'"):
        family_of_gguf({"general.architecture": architecture}, "f")
    with pytest.raises(UnsupportedError, match=f"general.architecture.*qwen2, qwen3.*'{architecture}'"):
        config_from_gguf({"general.architecture": architecture}, [], lambda name: torch.zeros(1))


# --- names and family ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("naming", [qwen_names.HF, qwen_names.FLAX, qwen_names.GGUF])
@pytest.mark.parametrize("config", [OURS3, OURS2, dataclasses.replace(OURS3, tied=False, qkv_bias=True)])
def test_every_parameter_has_one_name_and_no_name_is_used_twice(naming: Any, config: QwenConfig) -> None:
    names = naming.names(config)
    paths, _, _ = trees.flatten_with_paths(qwen.abstract(config))
    assert sorted(names) == sorted(paths)
    assert len({foreign.name for foreign in names.values()}) == len(names)
    assert not any(naming.is_ignored(foreign.name) for foreign in names.values())


def test_rows_of_q_and_k_stand_in_gguf_files_as_published() -> None:
    names = qwen_names.GGUF.names(OURS3)
    assert names["layers/0/q"] == Foreign("blk.0.attn_q.weight")
    assert names["layers/27/k_norm"] == Foreign("blk.27.attn_k_norm.weight")
    assert qwen_names.HF.names(OURS3)["layers/3/q_norm"] == Foreign("model.layers.3.self_attn.q_norm.weight")


@pytest.mark.oracle
@pytest.mark.parametrize(("config", "arch"), [(OURS3, "QWEN3"), (OURS2, "QWEN2")])
def test_gguf_names_are_those_of_the_gguf_package(config: QwenConfig, arch: str) -> None:
    gguf = pytest.importorskip("gguf")
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch), config.layers)
    theirs = qwen_names.GGUF.names(config)
    for path, foreign in qwen_names.HF.names(config).items():
        assert table.get_name(foreign.name, try_suffixes=(".weight", ".bias")) == theirs[path].name


def test_head_norms_are_vectors_of_one_head_and_start_at_one() -> None:
    layer = qwen.abstract(OURS3)["layers"][0]
    assert (layer["q_norm"].shape, layer["q_norm"].init) == ((128,), "ones")
    assert (layer["k_norm"].shape, layer["q"].shape, layer["k"].shape) == ((128,), (2048, 1024), (1024, 1024))
    assert "q_norm" not in qwen.abstract(OURS2)["layers"][0]


def test_the_family_is_found_by_every_name() -> None:
    family = next(f for f in FAMILIES if f.name == "qwen")
    assert family_of_config(OURS3) is family
    assert family_of_hf(QWEN3, "f") is family
    assert family_of_hf(QWEN2, "f") is family
    assert family_of_gguf(GGUF3, "f") is family
    with pytest.raises(UnsupportedError, match=r"model_type.*qwen2, qwen3.*'qwen3_moe'"):
        family_of_hf({**QWEN3, "model_type": "qwen3_moe"}, "f")
    with pytest.raises(UnsupportedError, match=r"architectures.*'Qwen3ForSequenceClassification'"):
        family_of_hf({**QWEN3, "architectures": ["Qwen3ForSequenceClassification"]}, "f")


_KEYS = [*QWEN3, "layer_types", "rope_parameters"]
_VALUES = (
    st.none() | st.booleans() | st.integers(-2, 70) | st.floats() | st.sampled_from(["", FULL, WINDOWED, "qwen2"])
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(_KEYS), _VALUES | st.lists(_VALUES, max_size=3), min_size=1, max_size=3
    ),
    layers=st.integers(1, 3),
)
def test_any_config_json_gives_a_configuration_or_an_error_of_ours(
    changes: dict[str, Any], layers: int
) -> None:
    try:
        config = config_from_hf({**QWEN3, "num_hidden_layers": layers, **changes})
    except (CheckpointError, UnsupportedError):
        return
    assert len(config.cache_spec.layers) == config.layers
    assert config_from_hf(config_to_hf(config)) == config
