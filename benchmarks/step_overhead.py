"""What a warm compiled step costs beyond its own call list: decode at batch 1, interleaved rounds, medians.

Bare: the calls over slots that are filled already. Step: the same through the compiled function, with reading the
arguments, the key, the host plans, the checks and the new cache value. `beside_calls_us` is taken inside each step (its
time less that of its calls), because the difference of two runs of some 37 ms drowns in their noise.

Two models with the same 30 layers and the same calls: SmolLM2, whose step streams its weights through the caches, and a
narrow one (width 48), whose step leaves the caches warm.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from time import perf_counter
from typing import Any

import real_weights
import torch

import atbx
from atbx import checkpoints
from atbx.core.executable import run_calls
from atbx.models import llama
from atbx.models.step import Step
from atbx.ops.rope import Rope


def smollm2() -> tuple[llama.LlamaConfig, Any]:
    """The real model."""
    model = checkpoints.load(real_weights.path())
    return model.config, model.params


def narrow() -> tuple[llama.LlamaConfig, Any]:
    """As many layers and heads as SmolLM2, a twelfth of its width, random weights."""
    config = llama.LlamaConfig(256, 48, 30, 9, 3, 8, 128, Rope(8), context=8192, tied=True)
    abstract = llama.abstract(config, torch.float32)
    return config, atbx.trees.map_leaves(lambda a: 0.1 * torch.randn(a.shape), abstract)


def measure(name: str, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Median microseconds of both, and of their difference round by round."""
    config, params = {"smollm2": smollm2, "narrow": narrow}[name]()
    generate = atbx.generator(llama.forward, config, eos=(), dtype=dtype)
    engine = generate.engine
    binding = generate.bind(params)
    arena = engine.pool(binding).take(1, 256, engine.policy.chunk)
    for leaf in arena.tensors:
        leaf.zero_()
    cache = engine.open_cache(arena, 1, 256)

    def arguments() -> tuple[Any, ...]:
        lengths = torch.tensor([128])
        current = replace(cache, arena=arena.value(), rows=torch.tensor([0]), lengths=lengths)
        one = torch.ones(1, dtype=torch.int64)
        column = torch.full((1, 1), 7)
        step = Step(
            column, one, torch.full((1, 1), 128), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([256])
        )
        return binding, step, current, config

    engine.forward(*arguments())
    (variant,) = engine.forward.variants
    executable = variant.executables[binding]
    step, cache_now = arguments()[1], arguments()[2]
    slots = executable.begin(_in_program_order(variant, step, cache_now))
    bare, full, inside = [], [], []
    calls = executable.finish

    def timed(filled: list[Any]) -> list[Any]:
        start = perf_counter()
        found = calls(filled)
        inside.append(perf_counter() - start)
        return found

    executable.finish = timed  # type: ignore[method-assign]
    for _ in range(rounds):
        copy = slots.copy()
        with torch.no_grad():
            start = perf_counter()
            run_calls(executable.calls, copy)
            bare.append(perf_counter() - start)
        given = arguments()
        start = perf_counter()
        engine.forward(*given)
        full.append(perf_counter() - start)
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "bare_us": statistics.median(bare) * 1e6,
        "step_us": statistics.median(full) * 1e6,
        "difference_us": statistics.median(f - b for f, b in zip(full, bare, strict=True)) * 1e6,
        "beside_calls_us": statistics.median(f - i for f, i in zip(full, inside, strict=True)) * 1e6,
        "bound_us": 150,
    }


def _in_program_order(variant: Any, step: Step, cache: Any) -> list[Any]:
    arena = cache.arena.arena
    values = {
        **{f"step/{n}": getattr(step, n) for n in ("ids", "counts", "positions", "want", "limits")},
        **{f"cache/arena/{p}": t for p, t in zip(arena.paths, arena.tensors, strict=True)},
        "cache/rows": cache.rows,
        "cache/lengths": cache.lengths,
    }
    return [values[v.path] for v in variant.lowered.program.inputs if v.path in values]


def main() -> None:
    """Print both models in both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in ("narrow", "smollm2"):
        for dtype in (torch.float32, torch.bfloat16):
            print(json.dumps(measure(name, dtype, args.rounds)))


if __name__ == "__main__":
    main()
