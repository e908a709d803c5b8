"""`Step`: what a model is given at one step, as a pytree of values."""

from __future__ import annotations

from typing import Any

from atbx.core.trees import node


@node
class Step:
    """One step of a batch.

    ids:       [B, T] int64 token ids; entries past a row's count are padding and mean nothing.
    counts:    [B] int64 real tokens of each row; 0 for a padding row.
    positions: [B, T] int64 position of each token in its row.
    want:      [B, W] int64 indices along T of the tokens whose logits are wanted.
    limits:    [B] int64 tokens that the row will hold at most, declared when it starts; rotary scalings that
               depend on length go by it, so that no later step and no neighbour changes them.
    """

    ids: Any
    counts: Any
    positions: Any
    want: Any
    limits: Any
