"""Log-probabilities of given tokens: the prompt's, and those of `score`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from atbx.compile import jit
from atbx.core.abstract import Abstract
from atbx.core.backend import Backend
from atbx.core.buckets import Bucket
from atbx.core.jit import Jit
from atbx.core.trees import node
from atbx.ops.logits import token_logprobs, top_logprobs
from atbx.results import TokenLogprobs
from atbx.sampling import TOP_WIDTHS
from atbx.schedule import Policy, prefill


@node
class Scored:
    """logprob [W], and top_values, top_ids [W, n] where asked for."""

    logprob: Any
    top_values: Any = None
    top_ids: Any = None


def score_tokens(logits: Any, targets: Any, top: int, vocab: int) -> Scored:
    """Log-probabilities of targets [W] under logits [W, V], and of the `top` best tokens.

    As in sampling, ids of `vocab` and above are padding of the weights and have no probability.
    """
    if vocab < logits.shape[1]:
        logits = logits[:, :vocab]
    chosen = token_logprobs(logits, targets)
    return Scored(chosen, *top_logprobs(logits, min(top, logits.shape[1]))) if top else Scored(chosen)


class Scorer:
    """The compiled scorer."""

    def __init__(self, policy: Policy, *, device: Backend, capacity: int) -> None:
        self._policy, self._device = policy, device
        rows = Bucket((("logits", 0), ("targets", 0)), policy.tokens)
        self.program: Jit = jit(
            score_tokens,
            static=("top", "vocab"),
            buckets={"W": rows},
            device=device,
            capacity=capacity,
            host_results=True,
        )

    def logprobs(
        self, logits: torch.Tensor, targets: Sequence[int], top: int, vocab: int
    ) -> list[TokenLogprobs]:
        """Log-probability of each target under its row of logits [W, V], with the `top` best tokens."""
        result = self.program(logits, torch.tensor(targets, dtype=torch.int64), _width(top), vocab)
        chosen = result.logprob.tolist()
        if not top:
            return [TokenLogprobs(token, value) for token, value in zip(targets, chosen, strict=True)]
        ids, values = result.top_ids.tolist(), result.top_values.tolist()
        return [
            TokenLogprobs(token, chosen[i], tuple(zip(ids[i][:top], values[i][:top], strict=True)))
            for i, token in enumerate(targets)
        ]

    def planned(
        self, top: int, lengths: Sequence[int], width: int, vocab: int, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        """Abstract arguments for prompts of these lengths; width: columns of the model's logits."""
        found = []
        for chunk in prefill(lengths, self._policy, chunk=self._policy.score_chunk):
            for row, count in zip(chunk.rows, chunk.counts, strict=True):
                scored = min(count, lengths[row] - chunk.start - 1)
                if scored > 0:
                    targets = Abstract((scored,), torch.int64)
                    logits = Abstract((scored, width), dtype, device=self._device.name)
                    found.append((logits, targets, _width(top), vocab))
        return found


def _width(top: int) -> int:
    return next(width for width in TOP_WIDTHS if width >= top)
