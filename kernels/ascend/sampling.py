"""Sampling on the device, without a branch on a value: what a captured graph can hold.

The reference rules look at values to do less; these give the same for every value. Sums of probabilities are FP32
here and FP64 on the CPU, so a draw can fall on the neighbour of a token where u meets a boundary to about 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from atbx.core.program import Equation
from atbx.kernels.ascend.capability import Capability
from atbx.ops.logits import CUMULATIVE_SLACK


def _filter(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    x = logits.float()
    V = x.shape[1]
    hot = (temperature > 0).unsqueeze(1)
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    scaled = x / divisor
    best = x.amax(dim=1, keepdim=True)
    distances = torch.where(x == -torch.inf, x, (x - best) / divisor)
    scaled = torch.where(scaled.isfinite().all(dim=1, keepdim=True), scaled, distances)
    # One stable sort serves both filters: equal values stay in order of their ids.
    values, ids = scaled.sort(dim=1, descending=True, stable=True)
    place = torch.arange(V, device=x.device).unsqueeze(0)
    wanted = torch.where(top_k > 0, top_k.clamp(max=V), V).unsqueeze(1)
    values = values.masked_fill(place >= wanted, -torch.inf)
    probabilities = torch.softmax(values, dim=1)
    before = probabilities.cumsum(1) - probabilities
    reach = torch.where(top_p < 1, top_p - CUMULATIVE_SLACK, torch.inf).unsqueeze(1)
    values = values.masked_fill((before >= reach) & (place > 0), -torch.inf)
    floor = torch.where(min_p > 0, min_p, 0.0).log().unsqueeze(1)
    values = values.masked_fill(values - values[:, :1] < floor, -torch.inf)
    kept = torch.full_like(x, -torch.inf).scatter(1, ids, values)
    greedy = torch.full_like(x, -torch.inf).scatter(1, x.argmax(dim=1, keepdim=True), 0.0)
    return torch.where(hot, kept, greedy)


def _draw(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    cumulative = torch.softmax(logits, dim=1).cumsum(1)
    target = u.unsqueeze(1) * cumulative[:, -1:]
    # As many ids as have a cumulative probability of at most u: the next one exceeds it, so its own is not zero.
    return (cumulative <= target).sum(dim=1).clamp(max=logits.shape[1] - 1)


def _top_logprobs(equation: Equation) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    n = int(equation.params["n"])

    def run(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = logits.float()
        values, ids = x.sort(dim=1, descending=True, stable=True)
        return values[:, :n] - x.logsumexp(dim=1, keepdim=True), ids[:, :n].contiguous()

    return run


def _count(counts: torch.Tensor, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    return counts.scatter_add_(1, tokens.unsqueeze(1), active.to(torch.int32).unsqueeze(1))


def _row(
    op: str, make: Callable[[Equation], Callable[..., object]], launches: int, *operators: str
) -> Capability:
    return Capability(
        op,
        f"composed.{op}",
        operators,
        make,
        dtypes=None,
        evidence=("own",),
        tier="composed",
        launches=launches,
    )


ROWS = (
    _row("filter_logits", lambda equation: _filter, 48, "aten::sort", "aten::cumsum", "aten::scatter"),
    _row("draw", lambda equation: _draw, 8, "aten::softmax", "aten::cumsum"),
    _row("top_logprobs", _top_logprobs, 4, "aten::sort", "aten::logsumexp"),
    _row("count_tokens", lambda equation: _count, 2, "aten::scatter_add_"),
)
