"""Memory told beforehand: weights, KV cache and peak activation of a model at a batch size and capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from atbx.compile import jit
from atbx.core.abstract import Abstract, tree_bytes
from atbx.core.arena import Arena
from atbx.core.binding import Binding
from atbx.core.errors import CapacityError, DTypeError
from atbx.core.interning import intern_signature
from atbx.core.memory import plan_memory as plan_program
from atbx.core.trees import map_leaves
from atbx.models import llama
from atbx.models.step import Step
from atbx.ops.kv_cache import KVCache, over_arena
from atbx.schedule import need_positive


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a model needs. activation: peak of the intermediate values of the largest prefill step."""

    weights: int
    cache: int
    activation: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.cache + self.activation

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {getattr(self, name) / 2**20:.1f} MiB" for name in ("weights", "cache", "activation")
        )
        return f"{self.total / 2**20:.1f} MiB ({parts})"


def abstract_step(rows: int, tokens: int, wanted: int = 1) -> Step:
    """A `Step` of abstract values."""
    i64 = torch.int64
    return Step(
        ids=Abstract((rows, tokens), i64),
        counts=Abstract((rows,), i64),
        positions=Abstract((rows, tokens), i64),
        want=Abstract((rows, wanted), i64),
        limits=Abstract((rows,), i64),
    )


def abstract_cache(spec: Any, rows: int, capacity: int, dtype: torch.dtype, chunk: int) -> KVCache:
    """A KV cache of abstract values."""
    return over_arena(
        Arena(spec.abstract(rows, capacity, dtype, chunk)), spec, range(rows), capacity=capacity, chunk=chunk
    )


def plan_memory(
    config: Any,
    batch: int,
    capacity: int,
    dtype: torch.dtype,
    *,
    chunk: int = 512,
    forward: Callable[..., Any] = llama.forward,
    abstract: Callable[..., Any] = llama.abstract,
) -> MemoryNeeds:
    """Bytes that `config` needs for `batch` rows of at most `capacity` tokens; nothing is allocated.

    chunk is the most prompt tokens in one step. A model of your own passes its `forward` and `abstract`.
    """
    for name, value in (("batch", batch), ("capacity", capacity), ("chunk", chunk)):
        need_positive(name, value)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise DTypeError("must be a floating point dtype", where="dtype", found=repr(dtype))
    params = abstract(config, dtype)
    spec = config.cache_spec
    chunk = min(chunk, capacity)
    compiled = jit(forward, static=("config",), donate=("cache",))
    binding = AbstractBinding(params)
    cache = abstract_cache(spec, batch, capacity, dtype, chunk)
    program = compiled.stage(
        binding, abstract_step(1, chunk), cache.__class__(**_one_row(cache)), config, fused=True
    )
    made = [v for e in program.equations if e.op.name == "concat" for v in e.outputs]
    peak = plan_program(program, skip=made).size
    return MemoryNeeds(tree_bytes(params), spec.nbytes(batch, capacity, dtype, chunk), peak)


def _one_row(cache: KVCache) -> dict[str, Any]:
    fields = {name: getattr(cache, name) for name in ("arena", "spec", "extent", "capacity", "chunk")}
    one = Abstract((1,), torch.int64)
    return {**fields, "rows": one, "lengths": one}


class AbstractBinding(Binding):
    """A binding of abstract parameters: enough to stage and to plan, never to run."""

    def __init__(self, params: Any) -> None:
        empty = map_leaves(lambda a: torch.empty(a.shape, dtype=a.dtype, device="meta"), params)
        super().__init__(empty)
        described = tuple((a.shape, a.dtype, "cpu") for a in self.abstracts)
        self.signature = intern_signature((self.treedef, described), self.paths)


def available_bytes() -> int:
    """Bytes of memory that the system says can be had without swapping."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise CapacityError("this system does not tell how much memory is available", where="/proc/meminfo")


def refuse_if_too_large(needs: MemoryNeeds, limit: int | None) -> None:
    """Raise CapacityError, with the numbers, if `needs` exceed `limit` bytes (default: what is available)."""
    allowed = available_bytes() if limit is None else limit
    if needs.total > allowed:
        raise CapacityError(
            "the request does not fit into memory",
            expected=f"at most {allowed / 2**20:.1f} MiB",
            found=str(needs),
            hint="Lower the batch size, max_new_tokens, or the capacity, or use a narrower dtype",
        )
