"""The engine: a model compiled over the generator's buckets, its bindings and arenas, one step at a time.

It knows nothing of requests: `prefill_chunk` and `decode` take token values and a cache and give logits and the next
cache, always at the sizes that the policy names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atbx.arena_pool import ArenaPool
from atbx.checkpoints.check import check
from atbx.compile import backend, bind, jit
from atbx.core.abstract import Abstract
from atbx.core.arena import Arena
from atbx.core.backend import Backend
from atbx.core.binding import Binding
from atbx.core.buckets import Bucket
from atbx.core.errors import BindingError
from atbx.core.jit import Jit
from atbx.core.memory import plan_memory as plan_program
from atbx.core.trees import leaves, map_leaves
from atbx.kernels.ascend.cache import BlockedCacheSpec
from atbx.memory import AbstractBinding, abstract_step
from atbx.models.registry import FAMILIES
from atbx.models.step import Step
from atbx.ops.kv_cache import CacheSpec, KVCache, PagedCache, PagedSpec, open_arena
from atbx.sampling import Sampled, SamplerArguments, SamplerStep, SamplerValues, Stages, sample_step
from atbx.schedule import Chunk, Policy

Cache = KVCache | PagedCache


@dataclass
class Tally:
    """Tokens that steps were asked for, and tokens that the padded steps had room for."""

    real: int = 0
    padded: int = 0
    steps: int = 0

    @property
    def waste(self) -> float:
        """Padded over real tokens; 1.0 when nothing is padded."""
        return self.padded / self.real if self.real else 1.0


class Engine:
    """A model's compiled forward function with what it needs around it."""

    def __init__(
        self,
        forward: Callable[..., Any],
        config: Any,
        policy: Policy,
        *,
        dtype: torch.dtype | None,
        device: str | Backend,
        numerics: str,
        fallback: str | None,
        variants: int,
        block_size: int | None = None,
    ) -> None:
        self.config, self.policy, self.dtype = config, policy, dtype
        self.backend = backend(device)
        self.cache_spec = place_cache(config.cache_spec, self.backend, block_size)
        self._written = forward
        rows = tuple(f"step/{n}" for n in ("ids", "counts", "positions", "want", "limits"))
        places = "cache/rows" if block_size is None else "cache/tables"
        batch = tuple((path, 0) for path in (*rows, places, "cache/lengths"))
        buckets = {
            "B": Bucket(batch, policy.batches),
            "T": Bucket((("step/ids", 1), ("step/positions", 1)), policy.tokens, count="step/counts"),
            "W": Bucket((("step/want", 1),), policy.tokens),
        }
        self.forward = jit(
            forward,
            static=("config",),
            donate=("cache",),
            buckets=buckets,
            device=self.backend,
            numerics=numerics,
            fallback=fallback,
            capacity=variants,
        )
        self.sampled_decode: Jit | None = None
        if self.backend.name == "npu":
            # One graph a token: the choice of the token is part of it, and nothing else comes back to the host.
            self.sampled_decode = jit(
                decode_and_sample(forward),
                static=("config", "stages", "vocab"),
                donate=("cache", "counts"),
                buckets={
                    "B": Bucket((*batch, ("values/*", 0), ("counts", 0), ("choice/*", 0)), policy.batches)
                },
                device=self.backend,
                numerics=numerics,
                fallback=fallback,
                capacity=variants,
                host_results=True,
            )
        self.tally = Tally()
        self._pools: dict[torch.dtype, ArenaPool] = {}
        self._binding: Binding | None = None
        self._activation: dict[Any, int] = {}
        self._lock = threading.Lock()

    @property
    def programs(self) -> tuple[Jit, ...]:
        """The compiled programs: the model's step, and on an NPU the step that also chooses the token."""
        return (self.forward,) if self.sampled_decode is None else (self.forward, self.sampled_decode)

    def bind(self, params: Any) -> Binding:
        """The binding of `params`: the one from before while the tree holds the same unchanged tensors."""
        if isinstance(params, Binding):
            changed = params.changed_leaf()
            if changed is not None:
                raise BindingError(
                    "a bound parameter was changed in place",
                    where=changed,
                    hint="Bind the tree again after changing it",
                )
            return params
        with self._lock:
            if self._binding is None or not self._binding.is_current(params):
                self._check(params)
                # The old store goes first: two packed copies of a model need not fit.
                self._binding = None
                self._binding = bind(params, dtype=self.dtype)
            return self._binding

    def _check(self, params: Any) -> None:
        """One report of everything that is wrong with the parameters of a known family."""
        family = next((f for f in FAMILIES if f.forward is self._written), None)
        if family is not None and isinstance(self.config, family.config_class):
            check(params, family.abstract(self.config))

    def planning_binding(self, params: Any) -> Binding:
        """A binding to plan with: the real one, or one of abstract parameters."""
        if not isinstance(params, Binding) and all(isinstance(leaf, Abstract) for leaf in leaves(params)):
            return AbstractBinding(params)
        return self.bind(params)

    def cache_dtype(self, binding: Binding) -> torch.dtype:
        """Dtype of keys and values: that of the floating parameters."""
        for abstract in binding.abstracts:
            if abstract.dtype.is_floating_point and len(abstract.shape) > 1:
                return abstract.dtype
        raise BindingError("the parameters hold no floating matrix, so the cache has no dtype")

    def pool(self, binding: Binding) -> ArenaPool:
        """Arenas for this binding's dtype."""
        dtype = self.cache_dtype(binding)
        with self._lock:
            if dtype not in self._pools:
                self._pools[dtype] = ArenaPool(
                    self.cache_spec,
                    dtype,
                    device=self.backend.device,
                    trash=trash_slots(self.policy, self.backend),
                )
            return self._pools[dtype]

    def open_cache(self, arena: Arena, rows: int, capacity: int) -> Cache:
        """An empty cache of `rows` rows over an arena."""
        return open_arena(arena, self.cache_spec, rows, capacity=capacity, chunk=self.policy.chunk)

    def prefill_chunk(
        self,
        binding: Binding,
        tokens: Sequence[Sequence[int]],
        limits: torch.Tensor,
        chunk: Chunk,
        cache: Cache,
        all_logits: bool,
    ) -> tuple[torch.Tensor, Cache]:
        """Logits of a chunk's rows: of each row's last token [B,1,V], or of every token [B,T,V].

        Returns them with the cache of the whole batch, its lengths not yet set (see `filled`).
        """
        step = self._prefill_step(tokens, limits, chunk, all_logits)
        part = self._rows_of(cache, chunk)
        logits, part = self.forward(binding, step, part, self.config)
        self._count(sum(chunk.counts), len(chunk.rows), chunk.width)
        return logits, replace(cache, arena=part.arena)

    def _prefill_step(
        self, tokens: Sequence[Sequence[int]], limits: torch.Tensor, chunk: Chunk, all_logits: bool
    ) -> Step:
        B, T = len(chunk.rows), chunk.width
        ids = torch.zeros(B, T, dtype=torch.int64)
        for i, (row, count) in enumerate(zip(chunk.rows, chunk.counts, strict=True)):
            ids[i, :count] = torch.tensor(tokens[row][chunk.start : chunk.start + count], dtype=torch.int64)
        counts = torch.tensor(chunk.counts, dtype=torch.int64)
        positions = torch.arange(chunk.start, chunk.start + T, dtype=torch.int64).expand(B, T).contiguous()
        if all_logits:
            want = torch.minimum(torch.arange(T).expand(B, T), counts.view(B, 1) - 1)
        else:
            want = counts.view(B, 1) - 1
        return Step(ids, counts, positions, want.contiguous(), limits[list(chunk.rows)])

    def _rows_of(self, cache: Cache, chunk: Chunk) -> Cache:
        lengths = torch.full((len(chunk.rows),), chunk.start, dtype=torch.int64)
        extent = self.policy.extent(chunk.end, cache.capacity)
        return cache.part(chunk.rows, lengths).with_extent(extent)

    def decode(
        self,
        binding: Binding,
        tokens: torch.Tensor,
        active: torch.Tensor,
        limits: torch.Tensor,
        cache: Cache,
        longest: int,
        live: int,
    ) -> tuple[torch.Tensor, Cache]:
        """Logits [B,V] after one more token of each active row.

        tokens [B]; active [B] int64, 1 for rows that go on; longest: filled slots of the longest active row before
        the step; live: how many rows are active.
        """
        step, cache = self._decode_step(tokens, active, limits, cache, longest, live)
        logits, cache = self.forward(binding, step, cache, self.config)
        return logits[:, 0], cache

    def decode_sampled(
        self,
        binding: Binding,
        tokens: torch.Tensor,
        active: torch.Tensor,
        limits: torch.Tensor,
        cache: Cache,
        longest: int,
        live: int,
        sampler: SamplerArguments,
    ) -> tuple[Sampled, Cache]:
        """The tokens that follow one more token of each active row, chosen in the same program; see `decode`."""
        assert self.sampled_decode is not None
        step, cache = self._decode_step(tokens, active, limits, cache, longest, live)
        values, counts, choice, stages, vocab = sampler
        found: tuple[Sampled, Cache] = self.sampled_decode(
            binding, step, cache, values, counts, choice, self.config, stages, vocab
        )
        return found

    def _decode_step(
        self,
        tokens: torch.Tensor,
        active: torch.Tensor,
        limits: torch.Tensor,
        cache: Cache,
        longest: int,
        live: int,
    ) -> tuple[Step, Cache]:
        B = tokens.shape[0]
        column = tokens.view(B, 1)
        # A copy: the lengths are donated with the cache.
        positions = cache.lengths.view(B, 1).clone()
        self._count(live, B, 1)
        step = Step(column, active, positions, torch.zeros_like(column), limits)
        return step, replace(cache, extent=self.policy.extent(longest + 1, cache.capacity))

    def activation_bytes(self, binding: Binding) -> int:
        """Peak of the intermediate values of the largest prefill step; staged once a binding's shapes."""
        if binding.signature not in self._activation:
            width = min(self.policy.chunk, self.policy.context)
            cache = self.abstract_cache(binding, 1, self.policy.capacity(width))
            args = self.planned_prefill(Chunk((0,), 0, (width,)), cache, binding, False)
            program = self.forward.stage(*args, fused=True)
            prepared = [v for e in program.equations if e.op.name == "concat" for v in e.outputs]
            self._activation[binding.signature] = plan_program(program, skip=prepared).size
        return self._activation[binding.signature]

    def _count(self, real: int, rows: int, width: int) -> None:
        self.tally.real += real
        self.tally.padded += self.policy.batch(rows) * self.forward_width(width)
        self.tally.steps += 1

    def forward_width(self, width: int) -> int:
        """Padded query tokens of a step of `width` tokens."""
        return next(size for size in self.policy.tokens if size >= width)

    def planned_prefill(
        self, chunk: Chunk, cache: Cache, binding: Binding, all_logits: bool
    ) -> tuple[Any, ...]:
        """Abstract arguments of a prefill step."""
        rows, width = len(chunk.rows), chunk.width
        step = abstract_step(rows, width, width if all_logits else 1)
        extent = self.policy.extent(chunk.end, cache.capacity)
        return binding, step, _abstract_rows(cache, rows, extent), self.config

    def planned_decode(self, rows: int, extent: int, cache: Cache, binding: Binding) -> tuple[Any, ...]:
        """Abstract arguments of a decode step."""
        return binding, abstract_step(rows, 1), _abstract_rows(cache, rows, extent), self.config

    def abstract_cache(self, binding: Binding, rows: int, capacity: int) -> Cache:
        """A cache of abstract tensors, for planning."""
        described = self.cache_spec.abstract(rows, capacity, self.cache_dtype(binding), self.policy.chunk)
        tree = map_leaves(lambda leaf: replace(leaf, device=self.backend.name), described)
        return self.open_cache(Arena(tree), rows, capacity)


def decode_and_sample(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's step of one token a row with the choice of the next one: to `Sampled` and the next cache."""

    def step_and_sample(
        params: Any,
        step: Step,
        cache: Cache,
        values: SamplerValues,
        counts: Any,
        choice: SamplerStep,
        config: Any,
        stages: Stages,
        vocab: int,
    ) -> tuple[Sampled, Cache]:
        logits, cache = forward(params, step, cache, config)
        return sample_step(logits[:, 0], values, counts, choice, stages, vocab), cache

    return step_and_sample


def place_cache(spec: CacheSpec, chosen: Backend, block_size: int | None) -> CacheSpec:
    """The spec with as many slots as the backend's kernels want: whole blocks on an NPU; or in pages."""
    if block_size is not None:
        return PagedSpec(spec.layers, block_size)
    return spec if chosen.name == "cpu" else BlockedCacheSpec(spec.layers)


def trash_slots(policy: Policy, chosen: Backend) -> int:
    """Slots behind an arena that a step's padding tokens are written to; the CPU writes none."""
    return 0 if chosen.name == "cpu" else max(policy.step_tokens, policy.max_batch)


def _abstract_rows(cache: Cache, rows: int, extent: int) -> Cache:
    return cache.abstract_part(rows).with_extent(extent)
