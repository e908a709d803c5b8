"""The Llama block as pure functions: Llama 2 and 3.x, SmolLM2, TinyLlama, Mistral (with its window).

`forward` is written over a parameter tree, a `Step` and a KV cache; `abstract` describes that tree. What other dense
families add to the block (Qwen's head norms) is a field of the configuration, so that there is one block to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atbx import ops
from atbx.core.abstract import Abstract
from atbx.core.staging import scope
from atbx.models.step import Step
from atbx.ops.kv_cache import CacheSpec, KVCache, LayerCache
from atbx.ops.rope import Rope


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a Llama-family model.

    vocab V, width M, layers L, heads H, kv_heads K, head_size D, ff F (feed-forward width), eps of the norms,
    context (tokens the model was trained for), window (sliding window W, the token itself included; None =
    full attention), full_layers (leading layers that attend to everything although there is a window), tied
    (the output projection is the embedding), qk_norm (an RMS norm over each head of q and k, before rotary),
    biases of the projections, activation of the gated feed-forward network ("silu", "gelu" or "gelu_tanh").
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ff: int
    rope: Rope
    eps: float = 1e-5
    context: int = 2048
    window: int | None = None
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    qk_norm: bool = False
    full_layers: int = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: heads must be a multiple of kv_heads; found {self.heads} and {self.kv_heads}"
            )
        if self.full_layers and (self.window is None or not 0 < self.full_layers < self.layers):
            raise ValueError(
                "LlamaConfig: full_layers must leave a layer to the window; found "
                f"{self.full_layers} of {self.layers} layers and window {self.window}"
            )

    @property
    def scale(self) -> float:
        """Factor on attention scores, 1 / sqrt(head size)."""
        return float(self.head_size) ** -0.5

    @property
    def cache_spec(self) -> CacheSpec:
        """What each layer keeps in the KV cache."""
        full = LayerCache(self.kv_heads, self.head_size)
        windowed = LayerCache(self.kv_heads, self.head_size, self.window)
        return CacheSpec((full,) * self.full_layers + (windowed,) * (self.layers - self.full_layers))


def abstract(config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The parameter tree of `config` as `Abstract` leaves; linear weights are [out, in]."""

    def weight(*shape: int, axes: tuple[str, ...], layout: str | None = "out_in") -> Abstract:
        return Abstract(shape, dtype, axes=axes, layout=layout)

    def vector(size: int, axis: str, init: str) -> Abstract:
        return Abstract((size,), dtype, axes=(axis,), init=init)

    M, F, D = config.width, config.ff, config.head_size
    q, kv = config.heads * D, config.kv_heads * D
    layer: dict[str, Abstract] = {
        "attn_norm": vector(M, "model", "ones"),
        "q": weight(q, M, axes=("heads", "model")),
        "k": weight(kv, M, axes=("kv_heads", "model")),
        "v": weight(kv, M, axes=("kv_heads", "model")),
        "o": weight(M, q, axes=("model", "heads")),
        "mlp_norm": vector(M, "model", "ones"),
        "gate": weight(F, M, axes=("ff", "model")),
        "up": weight(F, M, axes=("ff", "model")),
        "down": weight(M, F, axes=("model", "ff")),
    }
    if config.qk_norm:
        layer |= {"q_norm": vector(D, "head", "ones"), "k_norm": vector(D, "head", "ones")}
    if config.qkv_bias:
        layer |= {
            "q_bias": vector(q, "heads", "zeros"),
            "k_bias": vector(kv, "kv_heads", "zeros"),
            "v_bias": vector(kv, "kv_heads", "zeros"),
        }
    if config.out_bias:
        layer |= {"o_bias": vector(M, "model", "zeros")}
    if config.mlp_bias:
        layer |= {
            "gate_bias": vector(F, "ff", "zeros"),
            "up_bias": vector(F, "ff", "zeros"),
            "down_bias": vector(M, "model", "zeros"),
        }
    tree: dict[str, Any] = {
        "embed": weight(config.vocab, M, axes=("vocab", "model"), layout=None),
        "layers": [dict(layer) for _ in range(config.layers)],
        "norm": vector(M, "model", "ones"),
    }
    if not config.tied:
        tree["lm_head"] = weight(config.vocab, M, axes=("vocab", "model"))
    return tree


def forward(params: dict[str, Any], step: Step, cache: KVCache, config: LlamaConfig) -> tuple[Any, KVCache]:
    """Logits of the wanted tokens, and the cache after this step.

    params: the tree that `abstract` describes. Returns logits [B, W, V] in the parameters' dtype.
    """
    x = ops.embedding(params["embed"], step.ids)  # [B, T, M]
    for index, p in enumerate(params["layers"]):
        with scope(f"layers/{index}"):
            x, cache = block(p, x, step, cache, index, config)
    x = ops.rms_norm(ops.take(x, step.want), params["norm"], eps=config.eps)  # [B, W, M]
    head = params["embed"] if config.tied else params["lm_head"]
    return ops.linear(x, head), cache.advance(step.counts)


def block(
    p: dict[str, Any], x: Any, step: Step, cache: KVCache, index: int, config: LlamaConfig
) -> tuple[Any, KVCache]:
    """One layer: attention and feed-forward network, each behind its norm and added to x [B, T, M]."""
    B, T, _ = x.shape
    h = ops.rms_norm(x, p["attn_norm"], eps=config.eps)
    q = ops.reshape(ops.linear(h, p["q"], p.get("q_bias")), (B, T, config.heads, config.head_size))
    k = ops.reshape(ops.linear(h, p["k"], p.get("k_bias")), (B, T, config.kv_heads, config.head_size))
    v = ops.reshape(ops.linear(h, p["v"], p.get("v_bias")), (B, T, config.kv_heads, config.head_size))
    if config.qk_norm:
        q = ops.rms_norm(q, p["q_norm"], eps=config.eps)
        k = ops.rms_norm(k, p["k_norm"], eps=config.eps)
    q, k = ops.rotary(q, k, step.positions, config.rope, limits=step.limits)
    a, cache = ops.attend(q, k, v, cache, layer=index, counts=step.counts, scale=config.scale)
    a = ops.reshape(a, (B, T, config.heads * config.head_size))
    x = x + ops.linear(a, p["o"], p.get("o_bias"))
    h = ops.rms_norm(x, p["mlp_norm"], eps=config.eps)
    gate = ops.linear(h, p["gate"], p.get("gate_bias"))
    up = ops.linear(h, p["up"], p.get("up_bias"))
    hidden = ops.gated(gate, up, activation=config.activation)
    return x + ops.linear(hidden, p["down"], p.get("down_bias")), cache
