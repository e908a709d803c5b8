"""Captured graphs of the software NPU: replay, pools, forks, task groups, the update and the wait for it."""

from __future__ import annotations

import pytest
import torch

from atbx.testing.software_npu import SoftwareNpu

pytestmark = pytest.mark.usefixtures("npu")

HEADS, KV_HEADS, HEAD_SIZE, SLOTS = 4, 2, 64, 16


def _captured(step, **options):
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = step()
    return graph, result


def test_a_capture_computes_nothing_and_a_replay_everything() -> None:
    x = torch.ones(3, device="npu")
    kept = torch.zeros(3, device="npu")

    def step():
        y = x * 2
        y.add_(1)
        kept.copy_(y)
        return y

    graph, y = _captured(step)
    assert kept.cpu().tolist() == [0.0] * 3
    graph.replay()
    assert y.cpu().tolist() == [3.0] * 3
    x.fill_(5)
    graph.replay()
    assert kept.cpu().tolist() == [11.0] * 3


def test_launches_of_a_capture_are_counted_once_and_replays_apart(npu: SoftwareNpu) -> None:
    x = torch.ones(3, device="npu")
    npu.reset()
    graph, _ = _captured(lambda: (x * 2).sin())
    assert npu.counts().launches == {"aclnnMuls": 1, "aclnnSin": 1}
    npu.reset()
    for _ in range(3):
        graph.replay()
    torch.npu.synchronize()
    counts = npu.counts()
    assert counts.replays == 3
    assert counts.launches == {}
    assert counts.device_allocations == 0


def test_graphs_share_a_pool() -> None:
    pool = torch.npu.graph_pool_handle()
    x = torch.ones(1 << 20, device="npu")
    first, a = _captured(lambda: x * 2, pool=pool)
    reserved = torch.npu.memory_reserved()
    del a
    second, b = _captured(lambda: x * 3, pool=pool)
    assert torch.npu.memory_reserved() == reserved
    second.replay()
    assert b[0].item() == 3.0
    first.replay()
    torch.npu.synchronize()


def test_a_fork_that_is_joined_is_part_of_the_graph() -> None:
    x = torch.ones(3, device="npu")
    side = torch.npu.Stream()

    def step():
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x * 2
        main.wait_stream(side)
        return y + 1

    graph, result = _captured(step)
    x.fill_(10)
    graph.replay()
    assert result.cpu().tolist() == [21.0] * 3


def test_a_fork_that_is_not_joined_is_refused() -> None:
    x = torch.ones(3, device="npu")
    side = torch.npu.Stream()

    def step():
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            return x * 2

    with pytest.raises(RuntimeError, match="107025"):
        _captured(step)


def test_reading_a_value_invalidates_the_capture() -> None:
    x = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match=r"1070\d\d|507903"):
        _captured(lambda: x.add_(1).sum().item())
    graph, y = _captured(lambda: x * 2)  # the next capture is not touched by it
    graph.replay()
    assert y.cpu().tolist() == [2.0] * 3


def test_a_pinned_copy_inside_a_capture_reads_at_each_replay() -> None:
    x, source = torch.zeros(3, device="npu"), torch.ones(3).pin_memory()
    graph, _ = _captured(lambda: x.copy_(source, non_blocking=True))
    for value in (4.0, 6.0):
        source.fill_(value)
        graph.replay()
        torch.npu.synchronize()
        assert x.cpu().tolist() == [value] * 3


def test_the_stream_budget_bounds_graphs(npu: SoftwareNpu) -> None:
    x = torch.ones(3, device="npu")
    torch.npu.synchronize()
    npu.set_stream_budget(3)
    try:
        graphs = [_captured(lambda: x * 2) for _ in range(3)]
        with pytest.raises(RuntimeError, match=r"207008[\s\S]*EL0009"):
            _captured(lambda: x * 2)
        graphs[0][0].reset()
        graphs.append(_captured(lambda: x * 2))
    finally:
        npu.set_stream_budget(npu.streams)


# --- lengths that are host values, updated between replays -------------------------------------------------------


def _attention():
    torch.manual_seed(3)
    q = torch.randn(2, HEADS, 1, HEAD_SIZE).half().npu()
    k, v = (torch.randn(2, KV_HEADS, SLOTS, HEAD_SIZE).half().npu() for _ in range(2))

    def run(lengths: list[int]) -> torch.Tensor:
        return torch.ops.npu.npu_fused_infer_attention_score(
            q, k, v, num_heads=HEADS, num_key_value_heads=KV_HEADS, input_layout="BNSD",
            scale=HEAD_SIZE**-0.5, actual_seq_lengths_kv=lengths,
        )[0]  # fmt: skip

    return run


def _update(graph, lengths: list[int]) -> None:
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])


def test_an_update_changes_the_lengths_of_the_replay(npu: SoftwareNpu) -> None:
    run = _attention()
    graph, out = _captured(lambda: run([1, 1]), auto_dispatch_capture=True)
    npu.reset()
    for lengths in ([3, 5], [16, 1], [2, 9]):
        graph.replay()
        _update(graph, lengths)
        torch.npu.synchronize()
        assert torch.equal(out.cpu(), run(lengths).cpu())
    counts = npu.counts()
    assert (counts.replays, counts.graph_updates) == (3, 3)
    assert 0 < counts.update_seconds < 5


@pytest.mark.parametrize("replays_before", [0, 1])
def test_a_replay_that_is_not_updated_ends_in_a_timeout(replays_before: int) -> None:
    run = _attention()
    graph, _ = _captured(lambda: run([1, 1]), auto_dispatch_capture=True)
    for _ in range(replays_before):
        graph.replay()
        _update(graph, [3, 5])
        torch.npu.synchronize()
    graph.replay()
    with pytest.raises(RuntimeError, match="507046"):
        torch.npu.synchronize()


def test_a_task_group_of_other_kernels_is_refused() -> None:
    x = torch.ones(3, device="npu")
    stream = torch.npu.Stream()
    handles = []

    def step():
        here = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(here)
        y = x * 2
        handles.append(torch.npu.graph_task_group_end(here))
        return y

    graph, y = _captured(step)
    with torch.npu.stream(stream):
        torch.npu.graph_task_update_begin(stream, handles[0])
        torch.mul(x, 5, out=y)
        torch.npu.graph_task_update_end(stream)
    stream.synchronize()
    graph.replay()
    assert y.cpu().tolist() == [5.0] * 3

    def other_kernel() -> None:
        with torch.npu.stream(stream):
            torch.npu.graph_task_update_begin(stream, handles[0])
            torch.sin(x, out=y)
            torch.npu.graph_task_update_end(stream)

    with pytest.raises(RuntimeError, match="107040"):
        other_kernel()


def test_what_was_captured_in_inference_mode_replays_outside() -> None:
    x = torch.ones(3, device="npu")
    with torch.inference_mode():
        x.mul_(3)
        graph, y = _captured(lambda: (x + 1).add_(1))
    graph.replay()
    torch.npu.synchronize()
    with torch.inference_mode():
        assert y.cpu().tolist() == [5.0] * 3
    x.add_(5)
    assert x.cpu().tolist() == [8.0] * 3


def test_a_default_device_is_not_taken_for_the_devices_own_work() -> None:
    with torch.device("npu"):
        x = torch.arange(4.0)
        assert x.device.type == "npu"
        assert (x.half() * 2).cpu().tolist() == [0.0, 2.0, 4.0, 6.0]
        assert x.sum().item() == 6.0
