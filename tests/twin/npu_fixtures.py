"""Fixtures of the tests that run the NPU backend on the software device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atbx.kernels.ascend.chips import Chip, chip


@pytest.fixture
def played(npu: Any) -> Chip:
    """The chip that it plays."""
    return chip(npu.report()["chip"])


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def half(request: pytest.FixtureRequest, played: Chip) -> torch.dtype:
    """A 16-bit dtype that the chip computes in."""
    if request.param == torch.bfloat16 and not played.has_bf16:
        pytest.skip(f"{played.name} has no bfloat16")
    return request.param


@pytest.fixture
def unused(played: Chip) -> float:
    """What unused slots may hold: anything where attention is given lengths, zeros where it is given a mask."""
    return float("nan") if played.family in ("A2", "A3") else 0.0
