"""How long a weight file of 1 GiB takes to open, and how much memory that costs: `python benchmarks/open_weights.py`.

It writes a file shaped like a 28-layer model in a temporary folder, opens it in a fresh process, and prints the
seconds and the new resident memory, next to those of the first use of every tensor and of handing the pages back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from atbx.checkpoints.leaves import Lazy, release
from atbx.checkpoints.msgpack_reader import read_tree
from atbx.checkpoints.msgpack_writer import write_tree
from atbx.core import trees
from atbx.core.abstract import Abstract


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_model(path: Path, gib: float, layers: int = 28) -> None:
    """A tree of about `gib` GiB in BF16: nine tensors a layer, an embedding, a norm, and a large tokenizer."""
    width = int((gib * 2**30 / 2 / (layers * 12.04 + 32)) ** 0.5) // 64 * 64 + 64

    def leaf(*shape: int) -> Lazy:
        return Lazy(Abstract(shape, torch.bfloat16), lambda: torch.zeros(shape, dtype=torch.bfloat16))

    layer = {name: leaf(width, width) for name in ("q", "k", "v", "o")}
    layer |= {
        "gate": leaf(8 * width // 3, width),
        "up": leaf(8 * width // 3, width),
        "down": leaf(width, 8 * width // 3),
    }
    layer |= {"attn_norm": leaf(width), "mlp_norm": leaf(width)}
    tree = {
        "embed": leaf(32 * width, width),
        "layers": [dict(layer) for _ in range(layers)],
        "norm": leaf(width),
    }
    tokens = [f"token-{i}" for i in range(50_000)]
    write_tree(
        path, tree, metadata={"config": {"width": width}, "tokenizer": {"tokens": tokens}}, progress=True
    )


def measure(path: Path) -> dict[str, float]:
    """Seconds and new resident bytes of opening, reading every tensor, and releasing every tensor."""
    torch.zeros(1 << 16).sum()  # threads and allocator are not the file's cost
    before = resident_bytes()
    start = time.perf_counter()
    tree = read_tree(path).tree
    opened = time.perf_counter() - start
    after_open = resident_bytes() - before
    tensors = trees.leaves(tree)
    start = time.perf_counter()
    for tensor in tensors:
        tensor.view(torch.uint8).sum()
    touched = time.perf_counter() - start
    after_touch = resident_bytes() - before
    for tensor in tensors:
        release(tensor)
    return {
        "file_bytes": path.stat().st_size,
        "tensors": len(tensors),
        "open_seconds": opened,
        "open_resident_bytes": after_open,
        "read_all_seconds": touched,
        "read_all_resident_bytes": after_touch,
        "released_resident_bytes": resident_bytes() - before,
    }


def main() -> None:
    """Write, open in a fresh process, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the file (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.msgpack"
        write_model(path, arguments.gib)
        runs = [
            json.loads(
                subprocess.run(
                    [sys.executable, __file__, "--measure", str(path)], check=True, capture_output=True
                ).stdout
            )
            for _ in range(3)
        ]
    best = min(runs, key=lambda run: run["open_seconds"])
    if arguments.json:
        print(json.dumps(best))
        return
    print(f"file                     {best['file_bytes'] / 2**20:9.1f} MiB, {best['tensors']:.0f} tensors")
    print(f"open                     {best['open_seconds'] * 1e3:9.1f} ms   (best of 3)")
    print(f"  new resident memory    {best['open_resident_bytes'] / 2**20:9.1f} MiB")
    print(f"read every tensor        {best['read_all_seconds'] * 1e3:9.1f} ms")
    print(f"  new resident memory    {best['read_all_resident_bytes'] / 2**20:9.1f} MiB")
    print(f"  after release          {best['released_resident_bytes'] / 2**20:9.1f} MiB")


if __name__ == "__main__":
    main()
