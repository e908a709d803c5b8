"""Tokens a second beside transformers, in interleaved rounds of one process: SmolLM2, 2 threads, medians.

Work: prefill = 512 tokens, batch 1; decode = 64 greedy steps after 128 tokens, batch 1 and 8, EOS ignored.
Decode is the difference between a call for 65 new tokens and a call for one. A record, not a target.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import real_weights
import torch

import atbx
from atbx import checkpoints
from atbx.models import llama

Generate = Callable[[list[list[int]], int], Any]


def ours(model: Any, dtype: torch.dtype) -> Generate:
    """atbx."""
    generate = atbx.generator(llama.forward, model.config, eos=(), dtype=dtype)
    return lambda rows, new: generate(model.params, rows, max_new_tokens=new)


def theirs(model: Any, dtype: torch.dtype) -> Generate:
    """transformers with the same weights, through an export."""
    import tempfile

    import transformers

    folder = tempfile.mkdtemp()
    checkpoints.export_safetensors(model.params, model.config, folder, progress=False)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    peer.generation_config.eos_token_id = None

    def generate(rows: list[list[int]], new: int) -> Any:
        ids = torch.tensor(rows)
        with torch.inference_mode():
            return peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )

    return generate


def prompt(tokens: int, rows: int) -> list[list[int]]:
    """Rows of distinct ids."""
    return [[(7919 * (row * tokens + i) + 13) % 30000 + 100 for i in range(tokens)] for row in range(rows)]


def seconds(generate: Generate, rows: list[list[int]], new: int) -> float:
    """Wall time of one call."""
    start = perf_counter()
    generate(rows, new)
    return perf_counter() - start


TASKS: dict[str, Callable[[Generate], float]] = {
    "prefill512": lambda g: 512 / seconds(g, prompt(512, 1), 1),
    "decode1": lambda g: 64 / (seconds(g, prompt(128, 1), 65) - seconds(g, prompt(128, 1), 1)),
    "decode8": lambda g: 512 / (seconds(g, prompt(128, 8), 65) - seconds(g, prompt(128, 8), 1)),
}


def main() -> None:
    """Print tokens a second of both, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(2)
    model = checkpoints.load(real_weights.path())
    for dtype in (torch.float32, torch.bfloat16):
        peers = {"atbx": ours(model, dtype), "transformers": theirs(model, dtype)}
        for task, run in TASKS.items():
            rates: dict[str, list[float]] = {name: [] for name in peers}
            for name in peers:
                run(peers[name])
            for _ in range(args.rounds):
                for name, peer in peers.items():
                    rates[name].append(run(peer))
            found = {name: round(statistics.median(values), 1) for name, values in rates.items()}
            print(
                json.dumps(
                    {
                        "dtype": str(dtype),
                        "task": task,
                        **found,
                        "ratio": round(found["atbx"] / found["transformers"], 2),
                    }
                )
            )


if __name__ == "__main__":
    main()
