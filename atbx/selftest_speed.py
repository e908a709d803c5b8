"""The speed table of the self-test: what a launch, a copy and a step of the small model cost.

On the software device the numbers mean nothing, and the report says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from atbx.comparison import is_software
from atbx.core.backend import Backend
from atbx.kernels.ascend import AscendBackend
from atbx.kernels.ascend.runtime import open_device
from atbx.models import llama
from atbx.schedule import prefill
from atbx.selftest_model import CONFIG, PROMPTS, dtypes_of, engine_of, forms_of, random_params


@dataclass(frozen=True)
class Speed:
    """A measurement: the median of several, and what it is in."""

    name: str
    value: float
    unit: str
    repeats: int


def run_speed(chosen: Backend, repeats: int = 20) -> Iterator[Speed]:
    """Launches, copies, then steps of the small model in every form; a few of each on the software device."""
    repeats = repeats if not is_software() else 3
    is_npu = isinstance(chosen, AscendBackend)
    wait: Callable[[], None] = lambda: None  # noqa: E731
    device = torch.device("cpu")
    if is_npu:
        opened = open_device(chosen.device.index or 0)
        device = opened.device

        def wait() -> None:
            opened.npu.synchronize(device)

    # bfloat16, or float16 on a chip without it; float32 on a CPU, which may have no fast path for the others.
    dtype = dtypes_of(chosen)[-1] if is_npu else torch.float32
    x = torch.ones(16, dtype=dtype, device=device)
    launches = 50

    def launch() -> None:
        for _ in range(launches):
            x.add_(1)

    yield Speed("launch of a small kernel", 1e6 * _median(launch, wait, repeats) / launches, "us", repeats)
    if is_npu:
        host = torch.zeros(2**20, dtype=torch.uint8, pin_memory=True)
        target = torch.zeros(2**20, dtype=torch.uint8, device=device)
        seconds = _median(lambda: target.copy_(host, non_blocking=True), wait, repeats)
        yield Speed("copy of 1 MiB to the device, pinned", 1e6 * seconds, "us", repeats)
    size = 1024 if not is_software() else 64
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = _median(lambda: a @ b, wait, repeats)
    yield Speed(f"matmul of {size} x {size} x {size}", 2 * size**3 / seconds / 1e9, "GFLOP/s", repeats)
    params = random_params(CONFIG, dtype)
    for form, one in forms_of(chosen).items():
        yield from _steps(form, one, params, wait, repeats)


def _steps(
    form: str, device: Backend, params: Any, wait: Callable[[], None], repeats: int
) -> Iterator[Speed]:
    """A prefill of 39 tokens and decode steps of one row."""
    engine = engine_of(llama.forward, CONFIG, device)
    binding, policy = engine.bind(params), engine.policy
    ids = list(PROMPTS[2])
    shape = policy.batch(1), policy.capacity(CONFIG.context), policy.chunk
    pool = engine.pool(binding)
    arena = pool.take(*shape)
    limits = torch.tensor([CONFIG.context])
    (chunk,) = prefill([len(ids)], policy)
    times: dict[str, list[float]] = {"prefill": [], "decode": []}
    for round_ in range(3):
        cache: Any = engine.open_cache(arena, 1, shape[1])
        wait()
        start = perf_counter()
        _, cache = engine.prefill_chunk(binding, [ids], limits, chunk, cache, False)
        wait()
        if round_:
            times["prefill"].append(perf_counter() - start)
    cache = replace(cache, lengths=torch.tensor([len(ids)]))
    one = torch.ones(1, dtype=torch.int64)
    for step in range(repeats + 2):
        wait()
        start = perf_counter()
        _, cache = engine.decode(binding, torch.tensor([7]), one, limits, cache, len(ids) + step, 1)
        wait()
        if step > 1:
            times["decode"].append(perf_counter() - start)
    pool.give_back(arena, *shape)
    for name, unit in (("prefill", "prefill of 39 tokens"), ("decode", "decode step of 1 row")):
        yield Speed(f"{unit}, {form}", 1e3 * statistics.median(times[name]), "ms", len(times[name]))


def _median(run: Callable[[], Any], wait: Callable[[], None], repeats: int) -> float:
    run()
    wait()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        run()
        wait()
        times.append(perf_counter() - start)
    return statistics.median(times)
