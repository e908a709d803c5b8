"""The configuration of a model with the Llama block from the metadata of a GGUF file (architecture "llama").

The keys are those of the GGUF specification; their meaning is llama.cpp's. What the metadata leaves open (biases,
tied output, Llama 3's rotary scaling) stands in which tensors there are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from atbx.core.errors import UnsupportedError
from atbx.models.config_values import Values
from atbx.models.llama import LlamaConfig
from atbx.models.llama3_factors import recover_llama3
from atbx.ops.rope import Rope

ARCHITECTURES = ("llama",)
_HARMLESS = {"tensor_data_layout", "expert_used_count"}


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Collection[str],
    read: Callable[[str], torch.Tensor],
    where: str = "the file",
) -> LlamaConfig:
    """The configuration that a GGUF file describes.

    metadata: its keys. tensors: the names of its tensors. read: the values of one (for rotary tables).

    Raises:
        CheckpointError: a key is missing or malformed; names it.
        UnsupportedError: a key or tensor asks for a computation that this family does not have; names it.
    """
    values = values_of(metadata, ARCHITECTURES, where)
    window = values.any("attention.sliding_window", 0)
    config = LlamaConfig(
        **read_sizes(values, metadata, tensors, read),
        window=values.count("attention.sliding_window") if window else None,
    )
    refuse_rest(values)
    return config


def values_of(metadata: Mapping[str, Any], architectures: tuple[str, ...], where: str) -> Values:
    """The keys of the file's architecture. Raises UnsupportedError where it is none of `architectures`."""
    whole = Values(metadata, where)
    arch = whole.text("general.architecture")
    if arch not in architectures:
        raise whole.unsupported("general.architecture", f"one of {', '.join(architectures)}", arch)
    prefix = f"{arch}."
    own = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    return Values(own, where, prefix)


def read_sizes(
    values: Values,
    metadata: Mapping[str, Any],
    tensors: Collection[str],
    read: Callable[[str], torch.Tensor],
) -> dict[str, Any]:
    """The fields of a configuration that every family with this block states in the same keys and tensors."""
    layers = values.count("block_count")
    width, heads = values.count("embedding_length"), _per_layer(values, "attention.head_count", layers)
    kv_heads = _per_layer(values, "attention.head_count_kv", layers, heads)
    if heads % kv_heads:
        raise values.malformed(
            "attention.head_count_kv", f"a divisor of attention.head_count ({heads})", kv_heads
        )
    if not values.has("attention.key_length") and width % heads:
        raise values.malformed("embedding_length", f"a multiple of attention.head_count ({heads})", width)
    head_size = values.count("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = values.count(key, head_size)
        if found != head_size:
            raise values.unsupported(key, f"the head size, {head_size}", found)
    if values.has("attention.scale") and abs(values.number("attention.scale") - head_size**-0.5) > 1e-6:
        raise values.unsupported("attention.scale", f"1 / sqrt({head_size})", values.any("attention.scale"))
    if not values.flag("attention.causal", True):
        raise values.unsupported("attention.causal", "true", False)
    context = values.count("context_length")
    tokens = metadata.get("tokenizer.ggml.tokens") if not values.has("vocab_size") else None
    vocab = len(tokens) if isinstance(tokens, list) else None
    return {
        "vocab": values.count("vocab_size", vocab),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "ff": _per_layer(values, "feed_forward_length", layers),
        "rope": _read_rope(values, tensors, read, head_size, context),
        "eps": values.number("attention.layer_norm_rms_epsilon"),
        "context": context,
        "tied": "output.weight" not in tensors,
        "qkv_bias": any(f"blk.0.attn_{name}.bias" in tensors for name in "qkv"),
        "out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": any(f"blk.0.ffn_{name}.bias" in tensors for name in ("gate", "up", "down")),
    }


def refuse_rest(values: Values) -> None:
    """Raise UnsupportedError for a key that nobody has read."""
    values.refuse_unread(_HARMLESS, re.compile(""))


def _per_layer(values: Values, key: str, layers: int, default: int | None = None) -> int:
    """A count that a file may state once, or once a layer if all are equal."""
    found = values.any(key, default) if default is not None else values.any(key)
    if isinstance(found, list):
        if len(found) < layers or any(count != found[0] for count in found):
            raise values.unsupported(key, "the same in every layer", found)
        return Values({key: found[0]}, values.where, values.place).count(key)
    return values.count(key, default) if default is not None else values.count(key)


def _read_rope(
    values: Values, tensors: Collection[str], read: Callable[[str], torch.Tensor], dims: int, context: int
) -> Rope:
    theta = values.number("rope.freq_base", 10000.0)
    # Files of 2023 state only a factor, as "scale_linear".
    factor_key = "rope.scaling.factor" if values.has("rope.scaling.factor") else "rope.scale_linear"
    scaling = values.text("rope.scaling.type", "linear" if values.has(factor_key) else "none")
    values.read |= {"rope.scaling.finetuned", "rope.scale_linear"}
    original = context
    if values.has("rope.scaling.original_context_length"):
        original = values.count("rope.scaling.original_context_length")
    attention_factor = values.number("rope.scaling.attn_factor", 1.0)
    found: dict[str, Any]
    if scaling == "none":
        values.read.add(factor_key)
        found = {"scaling": "default"}
    elif scaling == "linear":
        factor = values.number(factor_key, 1.0)
        found = {"scaling": "linear", "factor": factor} if factor != 1.0 else {"scaling": "default"}
    elif scaling == "yarn":
        found = _read_yarn(values, factor_key, original, attention_factor)
    elif scaling == "longrope":
        names = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
        missing = [name for name in names.values() if name not in tensors]
        if missing:
            raise values.unsupported(
                "rope.scaling.type", f"tensors {', '.join(names.values())}", "longrope without them"
            )
        found = {"scaling": "longrope", "original_context": original, "attention_factor": attention_factor}
        found |= {field: tuple(read(name).flatten().tolist()) for field, name in names.items()}
        found["factor"] = values.number(factor_key, context / original)
    else:
        raise values.unsupported("rope.scaling.type", "none, linear, yarn or longrope", scaling)
    if scaling in ("none", "linear") and attention_factor != 1.0:
        raise values.unsupported("rope.scaling.attn_factor", "1", attention_factor)
    if "rope_freqs.weight" in tensors:
        stated = original if values.has("rope.scaling.original_context_length") else None
        found = _with_table(
            read("rope_freqs.weight").flatten().tolist(), theta, dims, stated, found, values.where
        )
    return values.built(Rope, dims=dims, theta=theta, **found)


def _read_yarn(values: Values, factor_key: str, original: int, attention_factor: float) -> dict[str, Any]:
    if values.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise values.unsupported(
            "rope.scaling.yarn_ext_factor", "1", values.any("rope.scaling.yarn_ext_factor")
        )
    factor = values.number(factor_key)
    rope = {
        "scaling": "yarn",
        "factor": factor,
        "original_context": original,
        "beta_fast": values.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": values.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    attention_factor *= values.number("rope.scaling.yarn_attn_factor", 1.0)
    if attention_factor != 1.0:  # llama.cpp multiplies it onto yarn's own factor
        rope["attention_factor"] = attention_factor * yarn_attention_factor(factor)
    return rope


def yarn_attention_factor(factor: float) -> float:
    """The factor on cos and sin that yarn takes where none is stated: 0.1 ln s + 1."""
    return 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0


def _with_table(
    table: list[float], theta: float, dims: int, context: int | None, found: dict[str, Any], where: str
) -> dict[str, Any]:
    if len(table) != dims // 2:
        raise UnsupportedError(
            "rope_freqs.weight has another number of entries than a head has channel pairs",
            where=where,
            expected=dims // 2,
            found=len(table),
        )
    recovered = recover_llama3(table, theta, context)
    if recovered is None:
        raise UnsupportedError(
            "rope_freqs.weight holds divisors that are not those of Llama 3's rotary scaling", where=where
        )
    if recovered == {"scaling": "default"}:
        return found
    if found != {"scaling": "default"}:
        raise UnsupportedError(
            "rope_freqs.weight together with another rotary scaling is not supported",
            where=where,
            expected="rope.scaling.type none",
            found=found["scaling"],
        )
    return recovered
