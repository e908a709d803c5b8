"""Peak resident memory of `generate` on SmolLM2, less what `import torch` alone takes, against weights + cache.

Each dtype runs in a process of its own: a prompt of 128 tokens and 64 new ones, from the converted FP32 file.
"""

from __future__ import annotations

import json
import subprocess
import sys

import real_weights

PEAK = """
def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM:"))
"""
RUN = (
    PEAK
    + """
import json, sys, torch
torch.set_num_threads(2)
import atbx
from atbx import checkpoints
from atbx.models import llama
dtype = getattr(torch, sys.argv[2])
model = checkpoints.load(sys.argv[1])
generate = atbx.generator(llama.forward, model.config, eos=(), dtype=dtype)
generate(model.params, list(range(100, 228)), max_new_tokens=64)
needs = atbx.plan_memory(model.config, 1, 256, dtype)
print(json.dumps({"peak": peak(), "weights": needs.weights, "cache": needs.cache}))
"""
)


def main() -> None:
    """Print both dtypes."""
    path = str(real_weights.path())
    base = int(_run(PEAK + "import torch\nprint(peak())"))
    for dtype in ("float32", "bfloat16"):
        found = json.loads(_run(RUN, path, dtype))
        own = found["peak"] - base
        allowed = 1.3 * (found["weights"] + found["cache"])
        mib = {"import_torch": base, "peak": found["peak"], "own": own, "allowed": allowed}
        print(
            json.dumps(
                {
                    "dtype": dtype,
                    **{f"{k}_mib": round(v / 2**20, 1) for k, v in mib.items()},
                    "met": own < allowed,
                }
            )
        )


def _run(code: str, *args: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main()
