"""Ops on logits [B, V] between a model and the next token: penalties, biases, filters, the draw, log-probabilities.

All compute in FP32 and give FP32. A row depends on nothing but its own values, so batch neighbours never change it.
"""

from __future__ import annotations

from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import DTypeError, ShapeError
from atbx.core.op import Cost, Op, register_op, traffic

CUMULATIVE_SLACK = 1e-6
"""Probability by which a cumulative sum may be off: probabilities are FP32, so .5 + .3 is .8 only to about 1e-7."""


def _rows(op: str, logits: Abstract, **vectors: tuple[Abstract, torch.dtype]) -> None:
    """Refuse logits that are not [B,V], and vectors that are not [B] of their dtype."""
    if logits.ndim != 2 or not logits.dtype.is_floating_point:
        raise ShapeError(f"{op}: logits do not fit", expected="floats [B,V]", found=logits)
    for name, (value, dtype) in vectors.items():
        _fits(op, name, value, (int(logits.shape[0]),), dtype)


def _fits(op: str, name: str, value: Abstract, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    expected = Abstract(shape, dtype)
    if value.shape != shape:
        raise ShapeError(f"{op}: {name} does not fit", expected=expected, found=value)
    if value.dtype != dtype:
        # FP64 would widen the result beyond what the shape rule says.
        raise DTypeError(f"{op}: {name} has another dtype", expected=expected, found=value)


def _wide(logits: Abstract) -> Abstract:
    return Abstract(logits.shape, torch.float32)


def _passes(count: float) -> Any:
    def cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
        return Cost(count * operands[0].numel, traffic(operands, results))

    return cost


def _penalize_shape(
    logits: Abstract,
    seen: Abstract,
    counts: Abstract,
    repetition: Abstract,
    presence: Abstract,
    frequency: Abstract,
) -> Abstract:
    f32 = torch.float32
    _rows(
        "penalize", logits, repetition=(repetition, f32), presence=(presence, f32), frequency=(frequency, f32)
    )
    _fits("penalize", "seen", seen, logits.shape, torch.bool)
    _fits("penalize", "counts", counts, logits.shape, torch.int32)
    return _wide(logits)


def _penalize(
    logits: torch.Tensor,
    seen: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    x = logits.float()
    factor = repetition.unsqueeze(1)
    repeated = torch.where(x > 0, x / factor, x * factor)
    x = torch.where(seen | (counts > 0), repeated, x)
    return x - presence.unsqueeze(1) * (counts > 0) - frequency.unsqueeze(1) * counts


PENALIZE = register_op(Op("penalize", _penalize_shape, _penalize, _passes(6)))


def penalize(logits: Any, seen: Any, counts: Any, repetition: Any, presence: Any, frequency: Any) -> Any:
    """Logits [B,V] with penalties for tokens that occurred.

    seen [B,V] bool: tokens of the prompt; counts [B,V] int32: how often each was generated. Repetition [B] (1 = off)
    divides positive logits and multiplies negative ones of every token seen or generated, once however often it
    occurred (Keskar et al. 2019, as Hugging Face transformers does it). Presence and frequency [B] (0 = off)
    are subtracted for generated tokens only: once, and per occurrence (as in OpenAI's API).
    """
    return PENALIZE(logits, seen, counts, repetition, presence, frequency)


def _table_shape(op: str, logits: Abstract, ids: Abstract) -> None:
    if ids.ndim != 2 or ids.shape[0] != logits.shape[0] or ids.dtype != torch.int64:
        raise ShapeError(f"{op}: ids do not fit", expected=f"i64 [{int(logits.shape[0])},N]", found=ids)


def _bias_shape(logits: Abstract, ids: Abstract, values: Abstract) -> Abstract:
    _rows("bias_logits", logits)
    _table_shape("bias_logits", logits, ids)
    _fits("bias_logits", "values", values, ids.shape, torch.float32)
    return _wide(logits)


def _bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    used = ids >= 0
    return logits.float().scatter_add(1, ids.clamp(min=0), torch.where(used, values, 0.0))


BIAS_LOGITS = register_op(Op("bias_logits", _bias_shape, _bias, _passes(1)))


def bias_logits(logits: Any, ids: Any, values: Any) -> Any:
    """Logits [B,V] plus values [B,N] at ids [B,N]; id -1 is an unused place, -inf bans a token."""
    return BIAS_LOGITS(logits, ids, values)


def _suppress_shape(logits: Abstract, ids: Abstract, active: Abstract) -> Abstract:
    _rows("suppress", logits, active=(active, torch.bool))
    _table_shape("suppress", logits, ids)
    return _wide(logits)


def _suppress(logits: torch.Tensor, ids: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    used = (ids >= 0) & active.unsqueeze(1)
    marks = torch.zeros_like(logits, dtype=torch.float32).scatter_add(1, ids.clamp(min=0), used.float())
    return logits.float().masked_fill(marks > 0, -torch.inf)


SUPPRESS = register_op(Op("suppress", _suppress_shape, _suppress, _passes(1)))


def suppress(logits: Any, ids: Any, active: Any) -> Any:
    """Logits [B,V] with -inf at ids [B,N] (-1 = unused) of the rows where active [B] is true."""
    return SUPPRESS(logits, ids, active)


def _filter_shape(
    logits: Abstract, temperature: Abstract, top_k: Abstract, top_p: Abstract, min_p: Abstract
) -> Abstract:
    f32 = torch.float32
    _rows(
        "filter_logits",
        logits,
        temperature=(temperature, f32),
        top_k=(top_k, torch.int64),
        top_p=(top_p, f32),
        min_p=(min_p, f32),
    )
    return _wide(logits)


def _keep_top_k(x: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Mask [B,V] of each row's top_k largest, ties by lowest id; rows with top_k 0 keep all."""
    V = x.shape[1]
    wanted = torch.where(top_k > 0, top_k.clamp(max=V), V)
    limited = wanted < V
    if not bool(limited.any()):
        return torch.ones_like(x, dtype=torch.bool)
    most = int(wanted[limited].max())
    threshold = x.topk(most, dim=1).values.gather(1, (wanted.clamp(max=most) - 1).unsqueeze(1))
    above, equal = x > threshold, x == threshold
    room = wanted.unsqueeze(1) - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= room)) | ~limited.unsqueeze(1)


def _keep_top_p(x: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask [B,V] of each row's smallest set of most probable tokens whose probabilities reach top_p."""
    limited = top_p < 1
    keep = torch.ones_like(x, dtype=torch.bool)
    if not bool(limited.any()):
        return keep
    rows = limited.nonzero().squeeze(1)
    order = x[rows].sort(dim=1, descending=True, stable=True)
    probabilities = torch.softmax(order.values.double(), dim=1)
    before = probabilities.cumsum(1) - probabilities
    inside = before < top_p[rows].double().unsqueeze(1) - CUMULATIVE_SLACK
    inside[:, 0] = True
    keep[rows] = torch.zeros_like(inside).scatter(1, order.indices, inside)
    return keep


def _filter(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    x = logits.float()
    hot = temperature > 0
    scaled = x / torch.where(hot, temperature, 1.0).unsqueeze(1)
    # A tiny temperature may overflow: what is left then is the distance to the best, which is 0 or -inf.
    scaled = torch.where(scaled.isfinite().all(1, keepdim=True), scaled, _distances(x, temperature))
    scaled = scaled.masked_fill(~_keep_top_k(scaled, top_k), -torch.inf)
    scaled = scaled.masked_fill(~_keep_top_p(scaled, top_p), -torch.inf)
    best = scaled.max(dim=1, keepdim=True).values
    floor = torch.where(min_p > 0, min_p, 0.0).log().unsqueeze(1)
    scaled = scaled.masked_fill(scaled - best < floor, -torch.inf)
    greedy = torch.full_like(x, -torch.inf).scatter(1, x.argmax(dim=1, keepdim=True), 0.0)
    return torch.where(hot.unsqueeze(1), scaled, greedy)


def _distances(x: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    safe = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    return torch.where(x == -torch.inf, x, (x - x.max(dim=1, keepdim=True).values) / safe)


FILTER_LOGITS = register_op(Op("filter_logits", _filter_shape, _filter, _passes(20)))


def filter_logits(logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Logits [B,V] over temperature, with -inf for what the filters drop; each option is [B], one a row.

    In this order, as Hugging Face transformers applies them: temperature (0 = greedy: only the best token stays,
    the lowest id on ties), top_k (int64, 0 = off), top_p (1 = off: the smallest set whose probability reaches it, at
    least one token), min_p (0 = off: tokens below min_p times the best token's probability go).
    """
    return FILTER_LOGITS(logits, temperature, top_k, top_p, min_p)


def _draw_shape(logits: Abstract, u: Abstract) -> Abstract:
    _rows("draw", logits, u=(u, torch.float32))
    return Abstract(u.shape, torch.int64)


def _draw(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    cumulative = torch.softmax(logits.double(), dim=1).cumsum(1)
    total = cumulative[:, -1:]
    # The first id whose cumulative probability exceeds u: one of probability zero adds nothing, so it is never first.
    found = torch.searchsorted(cumulative, u.double().unsqueeze(1) * total, right=True).squeeze(1)
    return found.clamp(max=logits.shape[1] - 1)


DRAW = register_op(Op("draw", _draw_shape, _draw, _passes(6)))


def draw(logits: Any, u: Any) -> Any:
    """One token a row from softmax(logits [B,V]) by inverse CDF over ids in order: u [B] in [0,1) to ids [B] int64."""
    return DRAW(logits, u)


def _unusable_shape(logits: Abstract) -> Abstract:
    _rows("is_unusable", logits)
    return Abstract((logits.shape[0],), torch.bool)


def _unusable(logits: torch.Tensor) -> torch.Tensor:
    # The largest entry is NaN where any is, and -inf where all are.
    best = logits.amax(dim=1)
    return best.isnan() | best.isinf()


IS_UNUSABLE = register_op(Op("is_unusable", _unusable_shape, _unusable, _passes(1)))


def is_unusable(logits: Any) -> Any:
    """True for rows of logits [B,V] that no token can be taken from: a NaN, a +inf, or nothing above -inf."""
    return IS_UNUSABLE(logits)


def _token_logprobs_shape(logits: Abstract, tokens: Abstract) -> Abstract:
    _rows("token_logprobs", logits, tokens=(tokens, torch.int64))
    return Abstract(tokens.shape, torch.float32)


def _token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    x = logits.float()
    return x.gather(1, tokens.unsqueeze(1)).squeeze(1) - x.logsumexp(dim=1)


TOKEN_LOGPROBS = register_op(Op("token_logprobs", _token_logprobs_shape, _token_logprobs, _passes(4)))


def token_logprobs(logits: Any, tokens: Any) -> Any:
    """Natural log-probability of tokens [B] under softmax(logits [B,V]), in FP32: [B]."""
    return TOKEN_LOGPROBS(logits, tokens)


def _top_logprobs_shape(logits: Abstract, *, n: int) -> tuple[Abstract, Abstract]:
    _rows("top_logprobs", logits)
    if not 1 <= n <= logits.shape[1]:
        raise ShapeError("top_logprobs: n does not fit", expected=f"1 to {int(logits.shape[1])}", found=n)
    shape = (logits.shape[0], n)
    return Abstract(shape, torch.float32), Abstract(shape, torch.int64)


def _top_logprobs(logits: torch.Tensor, *, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits.float()
    best = x.topk(n, dim=1).values
    # topk orders ties as it likes, and by how many are asked for: ids are found anew, the lowest first, as argmax does.
    rows, ids = (~(x < best[:, -1:])).nonzero(as_tuple=True)
    order = x[rows, ids].sort(descending=True, stable=True).indices
    order = order[rows[order].sort(stable=True).indices]
    starts = torch.searchsorted(rows, torch.arange(x.shape[0], device=x.device))
    found = ids[order[starts.unsqueeze(1) + torch.arange(n, device=x.device)]]
    return best - x.logsumexp(dim=1, keepdim=True), found


TOP_LOGPROBS = register_op(Op("top_logprobs", _top_logprobs_shape, _top_logprobs, _passes(6)))


def top_logprobs(logits: Any, n: int) -> tuple[Any, Any]:
    """The n largest log-probabilities of softmax(logits [B,V]) and ids, best first, lowest id on ties: [B,n] each."""
    return TOP_LOGPROBS(logits, n=n)


def _count_shape(counts: Abstract, tokens: Abstract, active: Abstract) -> Abstract:
    if counts.ndim != 2 or counts.dtype != torch.int32:
        raise ShapeError("count_tokens: counts do not fit", expected="i32 [B,V]", found=counts)
    _fits("count_tokens", "tokens", tokens, counts.shape[:1], torch.int64)
    _fits("count_tokens", "active", active, counts.shape[:1], torch.bool)
    return Abstract(counts.shape, counts.dtype)


def _count(counts: torch.Tensor, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    return counts.scatter_add(1, tokens.unsqueeze(1), active.to(torch.int32).unsqueeze(1))


def _count_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...]) -> Cost:
    return Cost(float(operands[1].numel), 16.0 * operands[1].numel)


COUNT_TOKENS = register_op(Op("count_tokens", _count_shape, _count, _count_cost, updates=((0, 0),)))


def count_tokens(counts: Any, tokens: Any, active: Any) -> Any:
    """counts [B,V] int32 with one more for tokens [B] of the rows where active [B] is true; updates counts."""
    return COUNT_TOKENS(counts, tokens, active)
