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
from atbx.compile import bind, jit
from atbx.core.abstract import Abstract
from atbx.core.arena import Arena
from atbx.core.binding import Binding
from atbx.core.buckets import Bucket
from atbx.core.errors import BindingError
from atbx.core.memory import plan_memory as plan_program
from atbx.core.trees import leaves
from atbx.memory import AbstractBinding, abstract_step
from atbx.models.registry import FAMILIES
from atbx.models.step import Step
from atbx.ops.kv_cache import KVCache, over_arena
from atbx.schedule import Chunk, Policy


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
        device: str,
        numerics: str,
        fallback: str,
        variants: int,
    ) -> None:
        self.config, self.policy, self.dtype = config, policy, dtype
        self._written = forward
        rows = tuple(f"step/{n}" for n in ("ids", "counts", "positions", "want", "limits"))
        batch = tuple((path, 0) for path in (*rows, "cache/rows", "cache/lengths"))
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
            device=device,
            numerics=numerics,
            fallback=fallback,
            capacity=variants,
        )
        self.tally = Tally()
        self._pools: dict[torch.dtype, ArenaPool] = {}
        self._binding: Binding | None = None
        self._activation: dict[Any, int] = {}
        self._lock = threading.Lock()

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
                self._pools[dtype] = ArenaPool(self.config.cache_spec, dtype)
            return self._pools[dtype]

    def open_cache(self, arena: Arena, rows: int, capacity: int) -> KVCache:
        """An empty cache over an arena's first rows."""
        return over_arena(
            arena, self.config.cache_spec, range(rows), capacity=capacity, chunk=self.policy.chunk
        )

    def prefill_chunk(
        self,
        binding: Binding,
        tokens: Sequence[Sequence[int]],
        limits: torch.Tensor,
        chunk: Chunk,
        cache: KVCache,
        all_logits: bool,
    ) -> tuple[torch.Tensor, KVCache]:
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

    def _rows_of(self, cache: KVCache, chunk: Chunk) -> KVCache:
        lengths = torch.full((len(chunk.rows),), chunk.start, dtype=torch.int64)
        extent = self.policy.extent(chunk.end, cache.capacity)
        return replace(cache, rows=cache.rows[list(chunk.rows)], lengths=lengths, extent=extent)

    def decode(
        self,
        binding: Binding,
        tokens: torch.Tensor,
        active: torch.Tensor,
        limits: torch.Tensor,
        cache: KVCache,
        longest: int,
        live: int,
    ) -> tuple[torch.Tensor, KVCache]:
        """Logits [B,V] after one more token of each active row.

        tokens [B]; active [B] int64, 1 for rows that go on; longest: filled slots of the longest active row before
        the step; live: how many rows are active.
        """
        B = tokens.shape[0]
        column = tokens.view(B, 1)
        # A copy: the lengths are donated with the cache.
        positions = cache.lengths.view(B, 1).clone()
        step = Step(column, active, positions, torch.zeros_like(column), limits)
        cache = replace(cache, extent=self.policy.extent(longest + 1, cache.capacity))
        logits, cache = self.forward(binding, step, cache, self.config)
        self._count(live, B, 1)
        return logits[:, 0], cache

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
        self, chunk: Chunk, cache: KVCache, binding: Binding, all_logits: bool
    ) -> tuple[Any, ...]:
        """Abstract arguments of a prefill step."""
        rows, width = len(chunk.rows), chunk.width
        step = abstract_step(rows, width, width if all_logits else 1)
        extent = self.policy.extent(chunk.end, cache.capacity)
        return binding, step, _abstract_rows(cache, rows, extent), self.config

    def planned_decode(self, rows: int, extent: int, cache: KVCache, binding: Binding) -> tuple[Any, ...]:
        """Abstract arguments of a decode step."""
        return binding, abstract_step(rows, 1), _abstract_rows(cache, rows, extent), self.config

    def abstract_cache(self, binding: Binding, rows: int, capacity: int) -> KVCache:
        """A cache of abstract tensors, for planning."""
        spec = self.config.cache_spec
        tree = spec.abstract(rows, capacity, self.cache_dtype(binding), self.policy.chunk)
        return self.open_cache(Arena(tree), rows, capacity)


def _abstract_rows(cache: KVCache, rows: int, extent: int) -> KVCache:
    index = Abstract((rows,), torch.int64)
    return replace(cache, rows=index, lengths=index, extent=extent)
