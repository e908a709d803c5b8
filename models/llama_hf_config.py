"""The configuration of a Llama-family model from and to Hugging Face's `config.json`.

Defaults for absent keys are those of transformers, because that is what the publisher of the file ran. Both forms of
the rotary description are read: `rope_scaling` with `rope_theta`, and `rope_parameters` of transformers 5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from atbx.core.errors import UnsupportedError
from atbx.models.config_values import Values
from atbx.models.llama import LlamaConfig
from atbx.ops.rope import SCALINGS, Rope

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_TO_HF_ACTIVATION = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

# Keys with words that usually mean a change of the computation ...
_SUSPICIOUS = re.compile(
    r"rope|rotary|attn|attention|scal|multiplier|norm|bias|window|expert|moe|softcap|quant|chunk|alibi|position"
    r"|sink|head|layer|kv_|_kv|qkv|residual|clip|shared|parallel|lora|activation|hidden"
)
# ... and those among them that do not change it.
_HARMLESS = {
    "attention_dropout",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "attn_pdrop",
    "hidden_dropout",
    "is_llama_config",
    "output_attentions",
    "output_hidden_states",
    "chunk_size_feed_forward",
    "gradient_checkpointing",
    "use_bias_correction",
    "tie_encoder_decoder",
    "pretraining_tp",
    "base_model_tp_plan",
    "layer_norm_eps",
}
_ROPE_KEYS = {
    "finetuned",
    "type",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
    "truncate",
}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"kv_heads": None, "context": 2048, "window": None},
    "mistral": {"kv_heads": 8, "context": 131072, "window": 4096},
}
"""By model type: what transformers takes where config.json has no such key."""


def config_from_hf(description: Mapping[str, Any], where: str = "config.json") -> LlamaConfig:
    """The configuration that a `config.json` of model type llama or mistral describes.

    Raises:
        CheckpointError: a key is missing or malformed; names it.
        UnsupportedError: a key asks for a computation that this family does not have; names it.
    """
    values = Values(description, where)
    defaults = defaults_of(values, DEFAULTS)
    model_type = values.text("model_type")
    sizes = read_sizes(values, defaults)
    window = None
    if model_type == "mistral":
        window = values.any("sliding_window", None if "sliding_window" in description else defaults["window"])
        window = None if window is None else values.count("sliding_window", window)
    # transformers has these two for llama only; for mistral they fall to refuse_unread.
    attention_bias = model_type == "llama" and values.flag("attention_bias")
    mlp_bias = model_type == "llama" and values.flag("mlp_bias")
    config = LlamaConfig(
        **sizes, window=window, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=mlp_bias
    )
    refuse_rest(values)
    return config


def defaults_of(values: Values, known: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """What is taken for absent keys, by the model type. Raises UnsupportedError for a type that is not `known`."""
    model_type = values.text("model_type")
    if model_type not in known:
        raise values.unsupported("model_type", f"one of {', '.join(known)}", model_type)
    return known[model_type]


def read_sizes(values: Values, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that every family with this block states in the same keys."""
    width, heads = values.count("hidden_size"), values.count("num_attention_heads")
    head_size = _read_head_size(values, width, heads, defaults.get("head_size"))
    # A key that says null asks for as many as heads; an absent one for the model type's own default.
    absent = heads if "num_key_value_heads" in values.values else defaults["kv_heads"] or heads
    kv_heads = values.count("num_key_value_heads", absent)
    if heads % kv_heads:
        raise values.malformed("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    activation = values.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise values.unsupported("hidden_act", f"one of {', '.join(ACTIVATIONS)}", activation)
    context = values.count("max_position_embeddings", defaults["context"])
    return {
        "vocab": values.count("vocab_size"),
        "width": width,
        "layers": values.count("num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "ff": values.count("intermediate_size"),
        "rope": _read_rope(values, head_size, context),
        "eps": values.number("rms_norm_eps", 1e-6),
        "context": context,
        "tied": values.flag("tie_word_embeddings"),
        "activation": ACTIVATIONS[activation],
    }


def refuse_rest(values: Values) -> None:
    """Raise UnsupportedError for a key that nobody has read and that may change the computation."""
    values.refuse_unread(_HARMLESS, _SUSPICIOUS)


def _read_head_size(values: Values, width: int, heads: int, default: int | None) -> int:
    """`default`: what the model type takes where the key is absent; None: the width over the heads."""
    if default is not None:
        # transformers refuses null there.
        return values.count("head_dim") if "head_dim" in values.values else values.count("head_dim", default)
    if not values.has("head_dim") and width % heads:
        raise values.malformed("hidden_size", f"a multiple of num_attention_heads ({heads})", width)
    return values.count("head_dim", width // heads)


def _read_rope(values: Values, dims: int, context: int) -> Rope:
    key = "rope_scaling" if values.any("rope_scaling", {}) else "rope_parameters"
    found = values.any(key, {})
    values.read |= {"rope_scaling", "rope_parameters", "original_max_position_embeddings"}
    if not isinstance(found, Mapping):
        raise values.malformed(key, "an object", found)
    rope = Values(found, values.where, f"{key}.")
    theta = rope.number("rope_theta", values.number("rope_theta", 10000.0))
    for owner in (rope, values):
        partial = owner.number("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise owner.unsupported("partial_rotary_factor", "1", partial)
    type_key = "rope_type" if rope.has("rope_type") or not rope.has("type") else "type"
    scaling = rope.text(type_key, "default")
    if scaling not in SCALINGS:
        raise rope.unsupported(type_key, f"one of {', '.join(SCALINGS)}", scaling)
    scaled: dict[str, Any] = {}
    if scaling in ("linear", "dynamic"):
        scaled = {"factor": rope.number("factor"), "original_context": context if scaling == "dynamic" else 0}
    elif scaling != "default":
        scaled = _read_long_context(values, rope, scaling, dims, context)
    # What other scalings read is inert here, as it is in transformers.
    rope.refuse_unread(_ROPE_KEYS, re.compile(""))
    return values.built(Rope, dims=dims, theta=theta, scaling=scaling, **scaled)


def _read_long_context(values: Values, rope: Values, scaling: str, dims: int, context: int) -> dict[str, Any]:
    key = "original_max_position_embeddings"
    stated = [owner.count(key) for owner in (rope, values) if owner.has(key)]
    if len(set(stated)) > 1:  # versions of transformers differ in which of the two they take
        raise values.unsupported(key, f"the same as in the rotary description, {stated[0]}", stated[1])
    original = stated[0] if stated else context
    read: dict[str, Any] = {"original_context": original}
    if scaling == "llama3":
        return read | {name: rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    read["factor"] = factor = rope.number("factor", context / original)
    if rope.has("attention_factor"):
        read["attention_factor"] = rope.number("attention_factor")
    if scaling == "longrope":
        read |= {name: rope.numbers(name, dims // 2) for name in ("short_factor", "long_factor")}
        if not rope.has("attention_factor"):
            read["attention_factor"] = longrope_attention_factor(factor, original)
        return read
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        read[name] = rope.number(name, default)
    for name in ("mscale", "mscale_all_dim"):
        if rope.any(name, 0):
            read[name] = rope.number(name)
    return read | {"truncate": rope.flag("truncate", True)}


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """The factor on cos and sin that longrope takes where none is stated: sqrt(1 + ln s / ln original)."""
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` of a model, as transformers reads it (4 and 5): a window makes it a mistral, else a llama.

    Raises:
        UnsupportedError: transformers has no model with this combination; names the fields.
    """
    models = "Llama or Mistral"
    biased = config.qkv_bias or config.out_bias
    for field in ("qk_norm", "full_layers"):
        if getattr(config, field):
            raise not_in_transformers(models, field, getattr(config, field))
    if config.window is None:
        written = write_sizes(config, "llama", "LlamaForCausalLM", models)
        return written | {"attention_bias": biased, "mlp_bias": config.mlp_bias}
    if biased or config.mlp_bias:
        raise not_in_transformers(models, "window", f"{config.window} together with biases")
    written = write_sizes(config, "mistral", "MistralForCausalLM", models)
    return written | {"sliding_window": config.window}


def not_in_transformers(models: str, field: str, found: object) -> UnsupportedError:
    """The error for a field that none of these models of transformers has."""
    return UnsupportedError(
        f"no {models} model of transformers computes this", where=f"config.{field}", found=found
    )


def write_sizes(config: LlamaConfig, model_type: str, architecture: str, models: str) -> dict[str, Any]:
    """The keys that `read_sizes` reads. Raises UnsupportedError for a rotation that transformers does not have."""
    rope = config.rope
    if rope.style != "half":
        raise not_in_transformers(models, "rope.style", rope.style)
    if rope.dims != config.head_size:
        raise not_in_transformers(models, "rope.dims", f"{rope.dims} of {config.head_size} channels")
    if rope.scaling == "dynamic" and rope.original_context != config.context:
        found = f"{rope.original_context}, context {config.context}"
        raise not_in_transformers(models, "rope.original_context", found)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.ff,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": _TO_HF_ACTIVATION[config.activation],
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
        "rope_theta": rope.theta,
        "rope_scaling": _write_rope(rope),
    }


def _write_rope(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling == "default":
        return None
    written: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn", "longrope"):
        written["original_max_position_embeddings"] = rope.original_context
    if rope.scaling == "llama3":
        written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "longrope":
        written |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    if rope.scaling == "yarn":
        written |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        written |= {name: v for name in ("mscale", "mscale_all_dim") if (v := getattr(rope, name))}
    if rope.scaling in ("yarn", "longrope") and rope.attention_factor is not None:
        written["attention_factor"] = rope.attention_factor
    return written
