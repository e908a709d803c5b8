"""The names of the Llama block's parameters in public checkpoints: Hugging Face, GGUF, and Hugging Face's Flax.

Families that share the block share the names; only llama.cpp stores the rows of Q and K of "llama" in another order.
"""

from __future__ import annotations

import re

from atbx.models.llama import LlamaConfig
from atbx.models.name_map import ROTARY_PAIRS, TRANSPOSED, Foreign, Naming

# Ours, Hugging Face's below `model.layers.N.`, GGUF's below `blk.N.`; the last two without `.weight`.
_NORMS = (
    ("attn_norm", "input_layernorm", "attn_norm"),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm"),
)
_HEAD_NORMS = (
    ("q_norm", "self_attn.q_norm", "attn_q_norm"),
    ("k_norm", "self_attn.k_norm", "attn_k_norm"),
)
_LINEARS = (
    ("q", "self_attn.q_proj", "attn_q"),
    ("k", "self_attn.k_proj", "attn_k"),
    ("v", "self_attn.v_proj", "attn_v"),
    ("o", "self_attn.o_proj", "attn_output"),
    ("gate", "mlp.gate_proj", "ffn_gate"),
    ("up", "mlp.up_proj", "ffn_up"),
    ("down", "mlp.down_proj", "ffn_down"),
)

_HF_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_GGUF_TABLE = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)


def norms(config: LlamaConfig) -> tuple[tuple[str, str, str], ...]:
    """The norms of a layer: our name, Hugging Face's, GGUF's."""
    return _NORMS + _HEAD_NORMS if config.qk_norm else _NORMS


def has_bias(config: LlamaConfig, linear: str) -> bool:
    """Whether a linear layer, by its name in our tree, has a bias."""
    if linear in ("q", "k", "v"):
        return config.qkv_bias
    return config.out_bias if linear == "o" else config.mlp_bias


def hf_names(config: LlamaConfig) -> dict[str, Foreign]:
    """Tree paths to the names in a Hugging Face checkpoint (safetensors). Layouts agree."""
    names = {"embed": Foreign("model.embed_tokens.weight"), "norm": Foreign("model.norm.weight")}
    for layer in range(config.layers):
        ours, theirs = f"layers/{layer}", f"model.layers.{layer}"
        for name, hf, _ in norms(config):
            names[f"{ours}/{name}"] = Foreign(f"{theirs}.{hf}.weight")
        for name, hf, _ in _LINEARS:
            names[f"{ours}/{name}"] = Foreign(f"{theirs}.{hf}.weight")
            if has_bias(config, name):
                names[f"{ours}/{name}_bias"] = Foreign(f"{theirs}.{hf}.bias")
    if not config.tied:
        names["lm_head"] = Foreign("lm_head.weight")
    return names


def flax_names(config: LlamaConfig) -> dict[str, Foreign]:
    """Tree paths to the names in a `flax_model.msgpack` of a Hugging Face repository, whose kernels are [in, out]."""
    names = {"embed": Foreign("model/embed_tokens/embedding"), "norm": Foreign("model/norm/weight")}
    for layer in range(config.layers):
        ours, theirs = f"layers/{layer}", f"model/layers/{layer}"
        for name, hf, _ in norms(config):
            names[f"{ours}/{name}"] = Foreign(f"{theirs}/{hf}/weight")
        for name, hf, _ in _LINEARS:
            module = f"{theirs}/{hf.replace('.', '/')}"
            names[f"{ours}/{name}"] = Foreign(f"{module}/kernel", TRANSPOSED)
            if has_bias(config, name):
                names[f"{ours}/{name}_bias"] = Foreign(f"{module}/bias")
    if not config.tied:
        names["lm_head"] = Foreign("lm_head/kernel", TRANSPOSED)
    return names


def gguf_names(config: LlamaConfig) -> dict[str, Foreign]:
    """Tree paths to the names in a GGUF file of the architecture "llama".

    llama.cpp rotates neighbouring channels there, so its converter reorders the rows of Q and K (weights and biases).
    """
    heads = {"q": config.heads, "k": config.kv_heads}
    for path, foreign in (names := gguf_names_in_halves(config)).items():
        linear = path.rpartition("/")[2].removesuffix("_bias")
        if linear in heads:
            names[path] = Foreign(foreign.name, ROTARY_PAIRS, heads[linear])
    return names


def gguf_names_in_halves(config: LlamaConfig) -> dict[str, Foreign]:
    """Tree paths to the names in a GGUF file of an architecture whose rotation llama.cpp takes as it is published."""
    names = {"embed": Foreign("token_embd.weight"), "norm": Foreign("output_norm.weight")}
    for layer in range(config.layers):
        ours, theirs = f"layers/{layer}", f"blk.{layer}"
        for name, _, gguf in norms(config):
            names[f"{ours}/{name}"] = Foreign(f"{theirs}.{gguf}.weight")
        for name, _, gguf in _LINEARS:
            for suffix, part in (("", "weight"), ("_bias", "bias")):
                if suffix and not has_bias(config, name):
                    continue
                names[f"{ours}/{name}{suffix}"] = Foreign(f"{theirs}.{gguf}.{part}")
    if not config.tied:
        names["lm_head"] = Foreign("output.weight")
    return names


def is_gguf_table(name: str) -> bool:
    """Whether a tensor of a GGUF file is a table of rotary frequencies."""
    return _GGUF_TABLE.fullmatch(name) is not None


HF = Naming(hf_names, lambda name: _HF_BUFFER.fullmatch(name) is not None)
FLAX = Naming(flax_names)
GGUF = Naming(gguf_names, is_gguf_table)
