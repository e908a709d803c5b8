"""Makes tiny public checkpoints byte by byte: GGUF files and Hugging Face folders, without the libraries by others."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atbx import checkpoints
from atbx.core import trees
from atbx.models import llama
from atbx.models.llama import LlamaConfig
from atbx.ops.rope import Rope

TINY = LlamaConfig(
    vocab=33,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=8,
    ff=64,
    rope=Rope(dims=8),
    context=64,
    tied=False,
)
HF_TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 33,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
GGUF_TINY: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "llama.vocab_size": 33,
}
_CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q2_K": 10, "BF16": 30}


def tiny_params(config: LlamaConfig = TINY, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Random parameters of a configuration."""
    generator = torch.Generator().manual_seed(seed)
    return trees.map_leaves(
        lambda leaf: torch.randn(leaf.shape, generator=generator).to(dtype), llama.abstract(config, dtype)
    )


def flat(tree: Any) -> dict[str, torch.Tensor]:
    """Tree path to leaf."""
    paths, leaves, _ = trees.flatten_with_paths(tree)
    return dict(zip(paths, leaves, strict=True))


def gguf_value(value: Any) -> bytes:
    """Type and value of a key as a GGUF file has them: int as uint32, float as float32."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    parts = [gguf_value(item) for item in value]
    return (
        struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(parts)) + b"".join(p[4:] for p in parts)
    )


def text(value: str) -> bytes:
    """A GGUF string."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_bytes(metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], str, bytes]]) -> bytes:
    """A GGUF file: tensors by name with shape (outermost first), type and bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key) + gguf_value(value)
    offset, data = 0, b""
    for name, (shape, kind, raw) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", _CODES[kind], offset)
        data += raw + b"\0" * (-len(raw) % 32)
        offset = len(data)
    return head + b"\0" * (-len(head) % 32) + data


def f32(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, bytes]:
    """A tensor as an F32 entry of `gguf_bytes`."""
    return tuple(tensor.shape), "F32", tensor.contiguous().numpy().tobytes()


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K of the architecture "llama", as it is published there."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def tiny_gguf(path: Path, config: LlamaConfig = TINY, params: Any = None, **metadata: Any) -> Path:
    """A GGUF file of a llama with F32 tensors; keys with dots are given as a dict `metadata`."""
    params = tiny_params(config) if params is None else params
    names = {"embed": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}
    parts = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v",
             "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}  # fmt: skip
    tensors = {}
    for where, leaf in flat(params).items():
        if where in names:
            tensors[names[where]] = f32(leaf)
            continue
        _, layer, name = where.split("/")
        base, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        if base in ("q", "k"):
            heads = config.heads if base == "q" else config.kv_heads
            leaf = torch.from_numpy(llama_cpp_permute(leaf.numpy(), heads))
        tensors[f"blk.{layer}.{parts[base]}.{kind}"] = f32(leaf)
    tensors |= metadata.pop("tensors", {})
    path.write_bytes(gguf_bytes({**GGUF_TINY, **metadata.pop("metadata", {})}, tensors))
    return path


def hf_names(params: Any) -> dict[str, torch.Tensor]:
    """Parameters by Hugging Face's names, spelled out here a second time on purpose."""
    outer = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    parts = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
             "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
             "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip
    named = {}
    for where, leaf in flat(params).items():
        if where in outer:
            named[outer[where]] = leaf
            continue
        _, layer, name = where.split("/")
        base, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        named[f"model.layers.{layer}.{parts[base]}.{kind}"] = leaf
    return named


def hf_folder(folder: Path, params: Any = None, **config: Any) -> Path:
    """A Hugging Face folder with one safetensors file; `config` changes config.json."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**HF_TINY, **config}))
    named = hf_names(tiny_params() if params is None else params)
    save_file({name: leaf.contiguous() for name, leaf in named.items()}, folder / "model.safetensors")
    return folder


def changed(**fields: Any) -> LlamaConfig:
    """The tiny configuration with other fields."""
    return replace(TINY, **fields)


def assert_same(found: Any, expected: Any) -> None:
    """Two parameter trees have the same leaves, dtypes and values."""
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for path in expected:
        assert found[path].dtype == expected[path].dtype, path
        assert torch.equal(found[path], expected[path]), path


def flax_folder(folder: Path, params: Any, wrap: bool = False, **config: Any) -> Path:
    """A folder with flax_model.msgpack: the names of Hugging Face's Flax modules, kernels [in, out]."""
    hf_folder(folder, params, **config)
    (folder / "model.safetensors").unlink()
    tree: dict[str, Any] = {}
    for name, leaf in hf_names(params).items():
        *modules, kind = name.split(".")
        if modules[-1] == "embed_tokens":
            kind = "embedding"
        elif leaf.ndim == 2:
            kind, leaf = "kernel", leaf.t().contiguous()
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[kind] = leaf
    checkpoints.write_tree(folder / "flax_model.msgpack", {"params": tree} if wrap else tree)
    return folder
