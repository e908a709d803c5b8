"""Seconds of staging, fusing and lowering one SmolLM2 variant, without packing: medians over distinct shapes."""

from __future__ import annotations

import json
import statistics

import real_weights
import torch

import atbx
from atbx import checkpoints
from atbx.models import llama


def main() -> None:
    """Print the median and the worst of sixteen variants."""
    torch.set_num_threads(2)
    model = checkpoints.load(real_weights.path())
    generate = atbx.generator(llama.forward, model.config, eos=(), dtype=torch.bfloat16)
    generate.warm(
        model.params, [atbx.Request((n,), 2) for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)]
    )
    seconds = [v.compile_seconds for v in generate.engine.forward.variants]
    print(
        json.dumps(
            {
                "variants": len(seconds),
                "median_seconds": statistics.median(seconds),
                "worst_seconds": max(seconds),
                "bound_seconds": 0.5,
            }
        )
    )


if __name__ == "__main__":
    main()
