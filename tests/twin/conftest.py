"""Tests on the software NPU; skipped where torch_npu is not installed.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 pytest tests/twin

Chip and CANN come from ATBX_SOFTWARE_NPU_CHIP and ATBX_SOFTWARE_NPU_CANN (one process a chip).
"""

from __future__ import annotations

import pytest
from npu_fixtures import half, played, unused

from atbx.testing.pytest_plugin import software_npu_device, software_npu_session
from atbx.testing.software_npu import SoftwareNpu

__all__ = ["half", "played", "software_npu_device", "software_npu_session", "unused"]


@pytest.fixture
def npu(software_npu_device: SoftwareNpu) -> SoftwareNpu:
    """The software NPU, `npu:0` being the current device; counters at zero."""
    import torch

    torch.npu.set_device(0)  # type: ignore[attr-defined]
    return software_npu_device
