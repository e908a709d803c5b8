"""The real SmolLM2-135M-Instruct for benchmarks, converted once into the user's cache folder."""

from __future__ import annotations

from pathlib import Path

from atbx.demo_weights import cache_folder, demo_model


def path() -> Path:
    """The converted weight file."""
    return demo_model(cache_folder())
