"""Streams, events, copies and threads of the software NPU: what was not waited for is not there."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from atbx.testing.software_npu import SoftwareNpu

pytestmark = pytest.mark.usefixtures("npu")


def _on_side(x: torch.Tensor) -> torch.npu.Stream:
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.mul_(7)
    return side


def test_work_of_another_stream_is_not_seen_without_a_wait() -> None:
    x = torch.ones(4, device="npu")
    _on_side(x)
    assert x.cpu().tolist() == [1.0] * 4


def test_waiting_for_the_stream_shows_its_work() -> None:
    x = torch.ones(4, device="npu")
    side = _on_side(x)
    torch.npu.current_stream().wait_stream(side)
    assert x.cpu().tolist() == [7.0] * 4


def test_an_event_shows_what_was_queued_before_it_and_nothing_after() -> None:
    x, y = torch.ones(2, device="npu"), torch.ones(2, device="npu")
    torch.npu.synchronize()
    side = torch.npu.Stream()
    event = torch.npu.Event()
    with torch.npu.stream(side):
        x.add_(1)
        event.record()
        y.add_(1)
    torch.npu.current_stream().wait_event(event)
    assert x.cpu().tolist() == [2.0, 2.0]
    assert y.cpu().tolist() == [1.0, 1.0]
    side.synchronize()
    assert y.cpu().tolist() == [2.0, 2.0]


def test_asking_an_event_runs_its_stream() -> None:
    x = torch.ones(2, device="npu")
    torch.npu.synchronize()
    side, event = torch.npu.Stream(), torch.npu.Event()
    with torch.npu.stream(side):
        x.add_(1)
        event.record()
    end = time.monotonic() + 30
    while not event.query():  # the record may still be in torch_npu's own queue
        assert time.monotonic() < end
    assert x.cpu().tolist() == [2.0, 2.0]


def test_a_pinned_source_is_read_when_the_copy_runs(npu: SoftwareNpu) -> None:
    source = torch.ones(4).pin_memory()
    target = source.to("npu", non_blocking=True)
    source.fill_(5)  # too early: the copy has not run
    assert target.cpu().tolist() == [5.0] * 4
    assert npu.counts().h2d_copies == {"pinned_async": 1}


def test_a_pageable_source_is_read_before_the_call_returns(npu: SoftwareNpu) -> None:
    source = torch.ones(4)
    target = source.to("npu", non_blocking=True)
    source.fill_(5)
    assert target.cpu().tolist() == [1.0] * 4
    assert sum(npu.counts().h2d_copies.values()) == 1
    assert not any(kind.startswith("pinned") for kind in npu.counts().h2d_copies)


def test_a_pinned_target_is_filled_when_the_stream_ran() -> None:
    x = torch.arange(4.0, device="npu")
    target = torch.full((4,), -1.0).pin_memory()
    target.copy_(x, non_blocking=True)
    assert target.tolist() == [-1.0] * 4
    torch.npu.current_stream().synchronize()
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_strided_copy_between_host_and_device() -> None:
    source = torch.arange(12.0).view(3, 4)
    target = torch.zeros(4, 6, device="npu")
    target[:, ::2].copy_(source.t())
    assert torch.equal(target.cpu()[:, ::2], source.t())
    back = torch.zeros(3, 8)
    back[:, ::2] = target[:, ::2].t()
    assert torch.equal(back[:, ::2], source)
    assert back[:, 1::2].eq(0).all()


def test_host_syncs_and_bytes_are_counted(npu: SoftwareNpu) -> None:
    x = torch.ones(256, device="npu")
    torch.npu.synchronize()
    npu.reset()
    x.add_(1)
    x.mul_(2)
    assert npu.counts().host_syncs == 0
    x.cpu()
    counts = npu.counts()
    assert counts.host_syncs >= 1
    assert counts.bytes_copied == {"d2h": 1024}
    assert counts.launches == {"aclnnInplaceAdds": 1, "aclnnInplaceMuls": 1}
    assert npu.launches == [("aclnnInplaceAdds", "aten::add_"), ("aclnnInplaceMuls", "aten::mul_")]


def test_every_thread_computes() -> None:
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        x = torch.arange(4.0, device="npu:0") * number
        found[number] = (x + 1).cpu().tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == {number: [1.0 + number * i for i in range(4)] for number in range(6)}


def test_two_devices_are_two_memories() -> None:
    x = torch.arange(3.0, device="npu:0")
    y = x.to("npu:1")
    y.add_(1)
    torch.npu.synchronize(1)
    assert y.device.index == 1
    assert y.cpu().tolist() == [1.0, 2.0, 3.0]
    assert x.cpu().tolist() == [0.0, 1.0, 2.0]


def test_mixing_devices_is_an_error() -> None:
    x, y = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")
    with pytest.raises(RuntimeError, match=r"same device.*npu:0 and npu:1"):
        x + y
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([x, y])
