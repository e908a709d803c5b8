"""Seconds that `import atbx` takes on top of `import torch`: fresh processes, medians."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

CODE = """
from time import perf_counter
import torch
start = perf_counter()
import atbx
print(perf_counter() - start)
"""


def main() -> None:
    """Print the median of seven."""
    command = [sys.executable, "-c", CODE]
    seconds = [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(7)
    ]
    print(
        json.dumps(
            {
                "median_seconds": statistics.median(seconds),
                "worst_seconds": max(seconds),
                "bound_seconds": 0.3,
            }
        )
    )


if __name__ == "__main__":
    main()
