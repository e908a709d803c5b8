"""A language model of your own in one file: config, parameters, forward pass, and `generate` over it.

The model is a small post-norm transformer with ALiBi instead of rotary embeddings and a plain GELU network, so no
family of atbx covers it. What `atbx.generator` asks of a model is all here: a pure function
`forward(params, step, cache, config)` and a frozen config with `vocab`, `context` and `cache_spec`.

Run it: python examples/own_model.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import atbx
from atbx import ops
from atbx.ops.attention import alibi_slopes
from atbx.ops.kv_cache import CacheSpec, LayerCache


@dataclass(frozen=True)
class Config:
    """Sizes of the model: vocabulary V, width M, layers L, heads H."""

    vocab: int = 256
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 512
    eps: float = 1e-5

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    @property
    def cache_spec(self) -> CacheSpec:
        """What each layer keeps: as many KV heads as query heads, and no window."""
        return CacheSpec((LayerCache(self.heads, self.head_size),) * self.layers)


def random_params(config: Config, seed: int = 0) -> dict[str, Any]:
    """A parameter tree of random values; linear weights are [out, in]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return 0.15 * torch.randn(shape, generator=generator)

    M = config.width
    layer = {
        "qkv": (3 * M, M),
        "out": (M, M),
        "up": (4 * M, M),
        "down": (M, 4 * M),
    }
    return {
        "embed": normal(config.vocab, M),
        "slopes": alibi_slopes(config.heads),
        "layers": [
            {
                **{name: normal(*shape) for name, shape in layer.items()},
                "norm": torch.ones(M),
                "bias": torch.zeros(M),
            }
            for _ in range(config.layers)
        ],
    }


def forward(params: dict[str, Any], step: Any, cache: Any, config: Config) -> tuple[Any, Any]:
    """Logits [B, W, V] of the wanted tokens, and the next cache."""
    x = ops.embedding(params["embed"], step.ids)  # [B, T, M]
    B, T, M = x.shape
    heads = (B, T, config.heads, config.head_size)
    for index, p in enumerate(params["layers"]):
        with atbx.scope(f"layers/{index}"):
            q, k, v = ops.split(ops.linear(x, p["qkv"]), (M, M, M), axis=-1)
            q, k, v = ops.reshape(q, heads), ops.reshape(k, heads), ops.reshape(v, heads)
            a, cache = ops.attend(
                q,
                k,
                v,
                cache,
                layer=index,
                counts=step.counts,
                scale=config.head_size**-0.5,
                slopes=params["slopes"],
            )
            x = x + ops.linear(ops.reshape(a, (B, T, M)), p["out"])
            x = x + ops.linear(ops.gelu(ops.linear(x, p["up"])), p["down"])
            x = ops.layer_norm(x, p["norm"], p["bias"], eps=config.eps)
    return ops.linear(ops.take(x, step.want), params["embed"]), cache.advance(step.counts)


def main() -> None:
    """Generate from two prompts at once and say what ran."""
    config = Config()
    params = random_params(config)
    generate = atbx.generator(forward, config)
    result = generate(params, [list(b"atbx"), list(b"hello, world")], max_new_tokens=12)
    for tokens, finish in zip(result.tokens, result.finish, strict=True):
        print(tokens, finish)
    print(generate.cache_info())


if __name__ == "__main__":
    main()
