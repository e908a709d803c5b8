"""pytest fixture `software_npu_device`: the real torch_npu on a software NPU, once a session.

Name the module in `pytest_plugins` or import the fixture in a conftest. Chip, CANN release and number of devices come
from ATBX_SOFTWARE_NPU_CHIP, ATBX_SOFTWARE_NPU_CANN and ATBX_SOFTWARE_NPU_DEVICES, since torch_npu asks for them once a
process. Each test starts with counters at zero.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator

import pytest

from atbx.testing.software_npu import SoftwareNpu, software_npu


@pytest.fixture(scope="session")
def software_npu_session() -> Iterator[SoftwareNpu]:
    """The device of the session; the test is skipped where torch_npu is not installed."""
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("needs torch_npu 2.13.0 (the extra 'twin')")
    setting = os.environ.get
    device = software_npu(
        chip=setting("ATBX_SOFTWARE_NPU_CHIP", "Ascend910B3"),
        cann=setting("ATBX_SOFTWARE_NPU_CANN", "9.1.0"),
        devices=int(setting("ATBX_SOFTWARE_NPU_DEVICES", "2")),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch_npu warns of while it is imported is not the test's
        entered = device.__enter__()
        _warn_once()
    try:
        yield entered
    finally:
        device.__exit__(None, None, None)


@pytest.fixture
def software_npu_device(software_npu_session: SoftwareNpu) -> SoftwareNpu:
    """The device with counters at zero and no injected fault."""
    software_npu_session.reset()
    return software_npu_session


def _warn_once() -> None:
    """Have torch_npu give the warnings that it gives once a process, where they are ignored."""
    import torch

    npu = torch.device("npu:0")
    torch.nn.functional.one_hot(torch.tensor([0], device=npu), 2)
    torch.ones(1, dtype=torch.float64).to(npu)
