"""A Llama-like model in plain torch and FP64, written from the formulas: no cache, no padding, no op of atbx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attention_oracle import attention


def rotate(x: torch.Tensor, dims: int, theta: float) -> torch.Tensor:
    """x [T,H,D] rotated by its positions 0..T: channel i with i + dims/2, channels past dims as they are."""
    half = dims // 2
    angles = torch.arange(x.shape[0]).double().view(-1, 1) * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = x[..., :half], x[..., half:dims]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., dims:]], dim=-1)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over the root mean square of its last axis, times weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def logits(
    params: Any,
    tokens: Sequence[int],
    config: Any,
    *,
    windows: Sequence[int | None] | None = None,
    qk_norm: bool = False,
    learned_positions: bool = False,
) -> torch.Tensor:
    """Logits [T, V] of a whole sequence; windows: one a layer (None = full attention)."""
    windows = windows or (config.window,) * config.layers
    T = len(tokens)

    def wide(p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        return p[name].double()

    x = wide(params, "embed")[torch.tensor(tokens)]
    if learned_positions:
        x = x + wide(params, "positions")[:T]
    for p, window in zip(params["layers"], windows, strict=True):
        h = norm(x, wide(p, "attn_norm"), config.eps)
        q, k, v = ((h @ wide(p, n).T).view(T, -1, config.head_size) for n in ("q", "k", "v"))
        if qk_norm:
            q, k = (norm(y, wide(p, f"{n}_norm"), config.eps) for n, y in (("q", q), ("k", k)))
        if not learned_positions:
            q, k = (rotate(y, config.rope.dims, config.rope.theta) for y in (q, k))
        scale = config.head_size**-0.5
        a = attention(q.numpy(), k.numpy(), v.numpy(), 0, scale=scale, window=window)
        x = x + torch.from_numpy(a).view(T, -1) @ wide(p, "o").T
        h = norm(x, wide(p, "mlp_norm"), config.eps)
        gate, up = h @ wide(p, "gate").T, h @ wide(p, "up").T
        x = x + (gate * torch.sigmoid(gate) * up) @ wide(p, "down").T
    return norm(x, wide(params, "norm"), config.eps) @ wide(params, "lm_head").T


def greedy(params: Any, prompt: Sequence[int], new: int, config: Any, **options: Any) -> list[int]:
    """`new` greedy tokens, the whole sequence anew for each."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(logits(params, tokens, config, **options)[-1].argmax()))
    return tokens[len(prompt) :]
