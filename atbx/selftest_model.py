"""The model parts of the self-test: logits fed token by token, greedy tokens, caches, buckets, against an FP64 run.

The small model is always the same: a random Llama of two layers. Its truth is a run by the reference rules in FP64, and
what its dtype costs is the error of the same run in the dtype; the device may be off by `TOLERANCE` times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import atbx
from atbx.checkpoints.loading import load
from atbx.compile import backend as backend_of
from atbx.compile import reference
from atbx.core.abstract import Abstract
from atbx.core.backend import Backend
from atbx.core.trees import map_leaves
from atbx.engine import Engine
from atbx.kernels import ascend
from atbx.kernels.ascend import AscendBackend
from atbx.model_step import random_ids, teacher_forced
from atbx.models import llama
from atbx.models.llama import LlamaConfig
from atbx.models.registry import family_named
from atbx.ops.kv_cache import reserve
from atbx.ops.rope import Rope
from atbx.schedule import Policy, prefill

TOLERANCE = 4.0
"""How many times the error of the reference rules in the same dtype (against FP64) logits may have.

Kernels round where the rules round, and in a few more places: cos, sin and weights of attention in the model's dtype.
"""

CONFIG = LlamaConfig(
    vocab=96,
    width=64,
    layers=2,
    heads=8,
    kv_heads=2,
    head_size=64,
    ff=96,
    rope=Rope(64),
    context=256,
)
PROMPTS = ([5, 9, 3, 22, 41, 7, 8], [1, 2, 90], list(range(1, 40)))


@dataclass(frozen=True)
class Finding:
    """One check: what was done, whether it passed, and the numbers behind it."""

    name: str
    passed: bool
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """Logits [T,V] of each prompt in FP64, and the largest error that others may have."""

    logits: tuple[torch.Tensor, ...]
    tolerance: float

    def judge(self, name: str, found: Sequence[torch.Tensor], **numbers: Any) -> Finding:
        """Whether logits are within the tolerance, and finite."""
        error = _distance(found, self.logits)
        scale = max(float(x.abs().max()) for x in self.logits)
        return Finding(
            name,
            error <= self.tolerance,
            {"error": error, "tolerance": self.tolerance, "scale": scale, **numbers},
        )


def _distance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        error = float((x.cpu().double() - y.cpu().double()).abs().max())
        # A NaN compares as neither larger nor smaller.
        worst = float("inf") if error != error else max(worst, error)
    return worst


def random_params(config: LlamaConfig, dtype: torch.dtype) -> Any:
    """Random parameters: weights that keep the size of what they are applied to, norms near one."""
    generator = torch.Generator().manual_seed(0)

    def make(leaf: Abstract) -> torch.Tensor:
        values = torch.randn(leaf.shape, generator=generator)
        scaled = values * float(leaf.shape[-1]) ** -0.5
        return ((1.0 + 0.1 * values) if leaf.init == "ones" else scaled).to(leaf.dtype)

    return map_leaves(make, llama.abstract(config, dtype))


def truth_of(
    forward: Callable[..., Any],
    params: Any,
    config: Any,
    prompts: Sequence[Sequence[int]],
    dtype: torch.dtype,
) -> Truth:
    """FP64 logits of parameters (as rounded to their dtype), and the tolerance that the dtype gives."""
    wide = map_leaves(lambda x: x.double() if x.is_floating_point() else x, params)
    exact = tuple(_by_rules(forward, wide, config, ids, torch.float64) for ids in prompts)
    rounded = [_by_rules(forward, params, config, ids, dtype) for ids in prompts]
    return Truth(exact, TOLERANCE * _distance(rounded, exact))


def _by_rules(
    forward: Callable[..., Any], params: Any, config: Any, ids: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Logits [T,V] of one prompt by the reference rules."""
    (step,) = teacher_forced(forward, params, config, ids, backend_of("cpu"), dtype, decode=0)
    logits: torch.Tensor = reference(forward, *step.arguments)[0]
    return logits[0]


def engine_of(
    forward: Callable[..., Any],
    config: Any,
    device: Backend,
    *,
    dtype: torch.dtype | None = None,
    chunk: int = 128,
    block_size: int | None = None,
) -> Engine:
    """An engine with this prefill chunk."""
    policy = Policy(config.context, chunk=min(chunk, config.context), score_chunk=min(chunk, config.context))
    return Engine(
        forward,
        config,
        policy,
        dtype=dtype,
        device=device,
        numerics="fast",
        fallback=None,
        variants=64,
        block_size=block_size,
    )


def logits_of(
    engine: Engine, params: Any, prompts: Sequence[Sequence[int]], decode: int = 2
) -> list[torch.Tensor]:
    """Logits [T,V] of each prompt as one ragged batch, its last `decode` tokens fed one at a time."""
    binding, policy = engine.bind(params), engine.policy
    heads = [list(p[: len(p) - decode]) for p in prompts]
    shape = policy.batch(len(prompts)), policy.capacity(max(map(len, prompts))), policy.chunk
    pool = engine.pool(binding)
    arena = pool.take(*shape)
    limits = torch.tensor([len(p) for p in prompts])
    opened: Any = engine.open_cache(arena, len(prompts), shape[1])
    cache = reserve(opened, limits)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for chunk in prefill([len(p) for p in heads], policy):
        logits, cache = engine.prefill_chunk(binding, heads, limits, chunk, cache, True)
        for index, (row, count) in enumerate(zip(chunk.rows, chunk.counts, strict=True)):
            found[row].append(logits[index, :count].cpu())
    cache = replace(cache, lengths=torch.tensor([len(p) for p in heads]))
    everyone = torch.ones(len(prompts), dtype=torch.int64)
    for step in range(decode):
        tokens = torch.tensor([p[len(h) + step] for p, h in zip(prompts, heads, strict=True)])
        filled = max(map(len, heads)) + step
        logits, cache = engine.decode(binding, tokens, everyone, limits, cache, filled, len(prompts))
        for row in range(len(prompts)):
            found[row].append(logits[row].unsqueeze(0).cpu())
    pool.give_back(arena, *shape)
    return [torch.cat(parts) for parts in found]


def forms_of(chosen: Backend) -> dict[str, Backend]:
    """The ways in which a backend runs a model: graphs with lengths by update and by mask, and eagerly, on an NPU."""
    if not isinstance(chosen, AscendBackend):
        return {"compiled": chosen}
    index = chosen.device.index or 0
    return {
        "graph, lengths by update": ascend.backend(index=index),
        "graph, lengths by mask": ascend.backend(index=index, lengths="mask"),
        "eager": ascend.backend(index=index, execution="eager"),
    }


def dtypes_of(chosen: Backend) -> tuple[torch.dtype, ...]:
    """Dtypes that a model is tested in: those the chip's matmuls and attention are made for."""
    if not isinstance(chosen, AscendBackend):
        return torch.float32, torch.bfloat16, torch.float16
    return (torch.float16, torch.bfloat16) if chosen.environment.chip.has_bf16 else (torch.float16,)


def run_model(chosen: Backend) -> Iterator[Finding]:
    """The small model in every form, dtype and kind of cache: logits, then greedy tokens."""
    for dtype in dtypes_of(chosen):
        kind = str(dtype).removeprefix("torch.")
        params = random_params(CONFIG, dtype)
        truth = truth_of(llama.forward, params, CONFIG, PROMPTS, dtype)
        found: dict[str, list[torch.Tensor]] = {}
        for form, device in forms_of(chosen).items():
            found[form] = logits_of(engine_of(llama.forward, CONFIG, device), params, PROMPTS)
            yield truth.judge(f"logits, {kind}, {form}", found[form])
        yield from _agreement(kind, truth, found)
        device = next(iter(forms_of(chosen).values()))
        paged = engine_of(llama.forward, CONFIG, device, block_size=128)
        yield truth.judge(f"logits, {kind}, paged cache", logits_of(paged, params, PROMPTS))
        windowed = replace(CONFIG, window=20)
        wanted = truth_of(llama.forward, params, windowed, PROMPTS, dtype)
        for form, one in forms_of(chosen).items():
            engine = engine_of(llama.forward, windowed, one, chunk=16)
            yield wanted.judge(f"logits, {kind}, a window of 20, {form}", logits_of(engine, params, PROMPTS))
        yield _greedy(kind, params, truth, device, dtype)


def _agreement(kind: str, truth: Truth, found: dict[str, list[torch.Tensor]]) -> Iterator[Finding]:
    """Graphs against eager launches (the same kernels: the same bits), and both forms of lengths."""
    if "eager" not in found:
        return
    update, mask = found["graph, lengths by update"], found["graph, lengths by mask"]
    same = all(torch.equal(a, b) for a, b in zip(update, found["eager"], strict=True))
    error = _distance(update, found["eager"])
    yield Finding(f"replay equals eager, {kind}", same, {"same_bits": same, "error": error})
    error = _distance(update, mask)
    same = all(torch.equal(a, b) for a, b in zip(update, mask, strict=True))
    yield Finding(
        f"lengths by update agree with lengths by mask, {kind}",
        error <= 2 * truth.tolerance,
        {"same_bits": same, "error": error, "tolerance": 2 * truth.tolerance},
    )


def _greedy(kind: str, params: Any, truth: Truth, device: Backend, dtype: torch.dtype) -> Finding:
    """Each greedy token is the best by FP64, unless another is nearer to it than twice the tolerance."""
    prompts = [list(p) for p in PROMPTS]
    generate = atbx.generator(llama.forward, CONFIG, device=device)
    new = generate(params, prompts, max_new_tokens=8, eos=()).tokens
    whole = [p + t for p, t in zip(prompts, new, strict=True)]
    exact = truth_of(llama.forward, params, CONFIG, whole, dtype)
    equal = near = wrong = 0
    for prompt, tokens, logits in zip(prompts, new, exact.logits, strict=True):
        for index, token in enumerate(tokens):
            row = logits[len(prompt) + index - 1]
            margin = float(row.max() - row[token])
            equal += margin == 0
            near += 0 < margin <= 2 * exact.tolerance
            wrong += margin > 2 * exact.tolerance
    return Finding(
        f"greedy tokens, {kind}", not wrong, {"equal": equal, "within_tolerance": near, "wrong": wrong}
    )


def run_buckets(chosen: Backend) -> Iterator[Finding]:
    """The same tokens in steps of several sizes: a repeated run has the same bits; others are within the tolerance, and
    whether their bits agree is told."""
    device = next(iter(forms_of(chosen).values()))
    dtype = dtypes_of(chosen)[-1] if isinstance(chosen, AscendBackend) else torch.float32
    params, ids = random_params(CONFIG, dtype), PROMPTS[2]
    truth = truth_of(llama.forward, params, CONFIG, [ids], dtype)
    engine = engine_of(llama.forward, CONFIG, device)
    alone = logits_of(engine, params, [ids])
    again = logits_of(engine, params, [ids])
    same = torch.equal(alone[0], again[0])
    yield Finding("a repeated run", same, {"same_bits": same, "error": _distance(alone, again)})
    others = {
        "beside 1 row": ([ids, PROMPTS[0]], engine),
        "beside 4 rows": ([ids, *PROMPTS[:2], *PROMPTS[:2]], engine),
        "in chunks of 16": ([ids], engine_of(llama.forward, CONFIG, device, chunk=16)),
    }
    for name, (prompts, one) in others.items():
        found = logits_of(one, params, prompts)[:1]
        bits = torch.equal(found[0], alone[0])
        yield truth.judge(f"the same tokens {name}", found, same_bits=bits, apart=_distance(found, alone))


def run_file(chosen: Backend, path: str, tokens: int = 24) -> Iterator[Finding]:
    """A model from a file, random tokens, teacher-forced against the reference rules.

    Its truth is an FP64 run where the weights in FP64 are under `LARGEST` bytes, an FP32 run otherwise.
    """
    model = load(path)
    forward = family_named(model.family, path).forward
    own = next(x.dtype for x in atbx.trees.leaves(model.params) if x.dtype.is_floating_point and x.ndim > 1)
    dtype = own if own in dtypes_of(chosen) else dtypes_of(chosen)[-1]
    params = map_leaves(lambda x: x.to(dtype) if x.is_floating_point() else x, model.params)
    ids = random_ids(min(tokens, model.config.context), model.config.vocab)
    wide = sum(x.numel() for x in atbx.trees.leaves(params)) * 8
    if wide < LARGEST:
        truth, kind = truth_of(forward, params, model.config, [ids], dtype), "float64"
    else:
        truth, kind = _truth_in_fp32(forward, params, model.config, ids, dtype), "float32"
    for form, device in forms_of(chosen).items():
        found = logits_of(engine_of(forward, model.config, device), params, [ids])
        best = float((found[0].double().argmax(-1) == truth.logits[0].argmax(-1)).double().mean())
        name = f"{path}, {str(dtype).removeprefix('torch.')}, {form}"
        yield truth.judge(name, found, truth=kind, same_best=best)


LARGEST = 8 * 2**30


def _truth_in_fp32(
    forward: Callable[..., Any], params: Any, config: Any, ids: Sequence[int], dtype: torch.dtype
) -> Truth:
    single = map_leaves(lambda x: x.float() if x.is_floating_point() else x, params)
    exact = _by_rules(forward, single, config, ids, torch.float32)
    del single
    rounded = _by_rules(forward, params, config, ids, dtype)
    return Truth((exact,), TOLERANCE * _distance([rounded], [exact]))
