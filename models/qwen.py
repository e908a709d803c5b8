"""The dense Qwen family: Qwen2 and 2.5 (biased Q, K and V) and Qwen3 (a norm over each head of q and k).

The block is Llama's, told apart by fields of the configuration; the family is its own because public checkpoints
name, store and describe it in their own way.
"""

from __future__ import annotations

from dataclasses import dataclass

from atbx.models.llama import LlamaConfig, abstract, forward

__all__ = ["QwenConfig", "abstract", "forward"]


@dataclass(frozen=True)
class QwenConfig(LlamaConfig):
    """Sizes and constants of a dense Qwen model, in the fields of `LlamaConfig`: Qwen3 has qk_norm, Qwen2 qkv_bias."""
