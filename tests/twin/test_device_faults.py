"""Faults of the software NPU in torch_npu's own words: documented limits, injected codes, memory that runs out."""

from __future__ import annotations

import pytest
import torch

from atbx.testing.software_npu import SoftwareNpu, software_npu

pytestmark = pytest.mark.usefixtures("npu")


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.npu.npu_rms_norm(x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))[0]


def _row() -> torch.Tensor:
    return torch.tensor([[3.0, 4.0]], dtype=torch.half, device="npu")


def test_a_rule_fills_the_bytes(npu: SoftwareNpu) -> None:
    x = _row()
    npu.reset()
    y = _norm(x)
    # rms of (3, 4) is sqrt(12.5)
    torch.testing.assert_close(y.cpu().float(), torch.tensor([[3.0, 4.0]]) / 12.5**0.5, rtol=1e-3, atol=0)
    assert ("aclnnRmsNorm", "npu::npu_rms_norm") in npu.launches


def test_a_documented_limit_is_refused_by_the_kernel_with_its_code() -> None:
    with pytest.raises(
        RuntimeError, match=r"call aclnnRmsNorm failed, error code is 161002[\s\S]*EZ1001.*DT_INT32"
    ):
        _norm(torch.ones(2, 4, dtype=torch.int32, device="npu"))


def test_op_plugin_checks_are_the_real_ones() -> None:
    with pytest.raises(RuntimeError, match="epsilonn"):
        torch.ops.npu.npu_rms_norm(_row(), torch.ones(2, device="npu").half(), epsilonn=1.0)


def test_an_injected_launch_fails_once(npu: SoftwareNpu) -> None:
    x = _row()
    npu.inject("aclnnRmsNorm", 561003, "EZ9999: Get kernel failed", times=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"error code is 561003[\s\S]*EZ9999: Get kernel failed"):
            _norm(x)
    assert _norm(x).cpu().isfinite().all()


def test_an_injected_fault_surfaces_when_the_stream_runs(npu: SoftwareNpu) -> None:
    x, behind = _row(), torch.zeros(2, device="npu")
    torch.npu.synchronize()
    npu.inject("aclnnRmsNorm", 507015, "EZ9999: aicore exception", when="execution")
    _norm(x)
    behind.add_(1)
    with pytest.raises(RuntimeError, match=r"507015[\s\S]*aicore exception"):
        torch.npu.synchronize()
    assert behind.cpu().tolist() == [0.0, 0.0]  # what stood behind the fault was dropped
    assert _norm(x).cpu().isfinite().all()


def test_a_fault_inside_a_replay_surfaces_at_the_wait(npu: SoftwareNpu) -> None:
    x = _row()
    _norm(x)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        _norm(x)
    npu.inject("aclnnRmsNorm", 507035, "EZ9999: vector core exception", when="execution")
    graph.replay()
    with pytest.raises(RuntimeError, match="507035"):
        torch.npu.synchronize()
    graph.replay()
    torch.npu.synchronize()


def test_a_slot_out_of_range_is_a_device_fault() -> None:
    cache = torch.zeros(2, 16, 1, 64, dtype=torch.half, device="npu")
    rows = torch.ones(1, 1, 64, dtype=torch.half, device="npu")
    good, bad = (torch.tensor([slot], dtype=torch.int32, device="npu") for slot in (17, 99))
    torch.ops.atb._npu_reshape_and_cache(rows, rows, cache, cache.clone(), good)
    assert cache.cpu().view(32, 64)[17].eq(1).all()
    torch.ops.atb._npu_reshape_and_cache(rows, rows, cache, cache.clone(), bad)
    with pytest.raises(RuntimeError, match=r"507015[\s\S]*slot 99"):
        torch.npu.synchronize()


def test_injecting_nonsense_is_refused(npu: SoftwareNpu) -> None:
    with pytest.raises(ValueError, match="when='later'"):
        npu.inject("aclnnAdd", 507015, when="later")
    with pytest.raises(ValueError, match="code 0"):
        npu.inject("aclnnAdd", 0)


def test_memory_runs_out_at_its_limit(npu: SoftwareNpu) -> None:
    npu.set_memory_limit(npu.memory_used() + (64 << 20))
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate 25[68].00 MiB"):
            torch.empty(256 << 20, dtype=torch.uint8, device="npu")
        small = torch.empty(32 << 20, dtype=torch.uint8, device="npu")
        assert small.numel() == 32 << 20
    finally:
        npu.set_memory_limit(npu.memory_limit)
    free, total = torch.npu.mem_get_info()
    assert total == npu.memory_limit
    assert free == total - npu.memory_used()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fresh_memory_is_nan(dtype: torch.dtype) -> None:
    torch.npu.empty_cache()
    assert torch.empty(1 << 21, dtype=dtype, device="npu")[-64:].cpu().isnan().all()


def test_the_report_says_what_it_is(npu: SoftwareNpu) -> None:
    report = npu.report()
    assert report["device"] == "software"
    assert report["chip"] == npu.chip == torch.npu.get_device_name(0)
    assert len(report["not_modelled"]) == 3


def test_a_second_entry_is_refused(npu: SoftwareNpu) -> None:
    with pytest.raises(Exception, match="entered already"), software_npu(npu.chip, npu.cann, npu.devices):
        pass
    with (
        pytest.raises(Exception, match="was given others"),
        software_npu("Ascend910B1", npu.cann, npu.devices),
    ):
        pass
    with pytest.raises(Exception, match="does not play 'H200'"), software_npu("H200"):
        pass
