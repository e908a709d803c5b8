"""Profiling: what is recorded is what ran, costs nothing when off, and compares with an earlier profile."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_chat_model import chat_model, error_of, generator_of, json_of, text_of

import atbx
from atbx import profiling
from atbx.commands import profile as profile_command
from atbx.core import executable
from atbx.core.executable import Call, current_observer, observed, run_calls
from atbx.ops import elementwise
from atbx.ops.linear import matmul
from atbx.profiling import PLAN, Profile, Timed, compare, profile, read_summary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted tiny model."""
    return chat_model(tmp_path_factory.mktemp("profiled"))


def affine(x: Any, weight: Any) -> Any:
    """Two ops: a matmul and a sum."""
    return elementwise.ADD(matmul(x, weight), 1.0)


def test_every_equation_of_a_step_is_recorded_once_in_order() -> None:
    jitted = atbx.jit(affine)
    x, weight = torch.ones(2, 3), torch.ones(3, 4)
    expected = jitted(x, weight)
    with profile() as found:
        for _ in range(3):
            assert torch.equal(jitted(x, weight), expected)
    equations = [c.equation for c in jitted.explain(x, weight).choices]
    assert [e.op.name for e in equations] == ["matmul", "add"]
    assert [t.op for t in found.timed] == ["matmul", "add"] * 3
    assert [t.call.choice.equation for t in found.timed] == equations * 3
    assert all(t.duration > 0 for t in found.timed)
    starts = [t.start for t in found.timed]
    assert starts == sorted(starts)
    assert len(found.steps) == 3


def test_calls_lie_inside_their_step_and_steps_inside_the_block() -> None:
    jitted = atbx.jit(affine)
    jitted(torch.ones(2, 3), torch.ones(3, 4))
    with profile() as found:
        jitted(torch.ones(2, 3), torch.ones(3, 4))
    ((_, start, duration),) = found.steps
    assert start >= 0
    assert start + duration <= found.seconds * 1e9
    for timed in found.timed:
        assert start <= timed.start
        assert timed.start + timed.duration <= start + duration


def test_nothing_is_recorded_outside_the_block_or_in_another_thread() -> None:
    jitted = atbx.jit(affine)
    x, weight = torch.ones(2, 3), torch.ones(3, 4)
    seen: list[Any] = []

    def elsewhere() -> None:
        seen.append(current_observer())
        jitted(x, weight)

    with profile() as found:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    jitted(x, weight)
    assert seen == [None]
    assert found.timed == []
    assert found.steps == []
    assert current_observer() is None


def test_the_observer_goes_when_a_call_fails_and_keeps_what_ran() -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("stop")

    calls = (Call(lambda: 1, (), (0,), (), "one"), Call(fail, (), (1,), (), "two"))
    with pytest.raises(RuntimeError, match="stop"), profile() as found:
        run_calls(calls, [None, None])
    assert current_observer() is None
    assert [t.call.label for t in found.timed] == ["one"]
    assert len(found.steps) == 1


def test_an_unobserved_step_takes_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[str] = []
    monkeypatch.setattr(executable, "_run_observed", lambda *_: marks.append("observed"))
    slots: list[Any] = [None]
    calls = (Call(lambda: 7, (), (0,), (), "one"),)
    run_calls(calls, slots)
    assert (slots, marks) == ([7], [])
    with profile():
        run_calls(calls, slots)
    assert marks == ["observed"]


def test_observed_calls_fill_and_drop_slots_as_others_do() -> None:
    calls = (
        Call(lambda: (1, 2), (), (0, 1), (), "two results"),
        Call(lambda a, b: a + b, (0, 1), (2,), (0, 1), "sum"),
    )
    plain: list[Any] = [None] * 3
    watched: list[Any] = [None] * 3
    run_calls(calls, plain)
    with profile() as found:
        run_calls(calls, watched)
    assert plain == watched == [None, None, 3]
    assert [t.op for t in found.timed] == [PLAN, PLAN]
    assert found.hot_spots()[0].flops_per_second is None


def made_profile() -> Profile:
    """Two phases with times that are known: milliseconds in round numbers."""
    jitted = atbx.jit(affine)
    x, weight = torch.ones(2, 3), torch.ones(3, 4)
    choices = jitted.explain(x, weight).choices
    calls = [Call(lambda: None, (), (), (), c.equation.op.name, c) for c in choices]
    found = Profile()
    found.timed = [
        Timed(calls[0], "prefill", 0.0, 6e6),
        Timed(calls[1], "prefill", 6e6, 2e6),
        Timed(calls[0], "decode", 10e6, 1e6),
        Timed(calls[1], "decode", 11e6, 3e6),
        Timed(calls[0], "decode", 20e6, 1e6),
        Timed(calls[1], "decode", 21e6, 3e6),
    ]
    found.steps = [("prefill", 0.0, 10e6), ("decode", 10e6, 5e6), ("decode", 20e6, 5e6)]
    return found


def test_hot_spots_are_sums_shares_and_rates_by_the_cost_rules() -> None:
    spots = made_profile().hot_spots()
    assert [(s.phase, s.name, s.calls) for s in spots] == [
        ("prefill", "matmul", 1), ("prefill", "add", 1), ("decode", "add", 2), ("decode", "matmul", 2),
    ]  # fmt: skip
    assert [s.seconds for s in spots] == pytest.approx([6e-3, 2e-3, 6e-3, 2e-3])
    assert [s.share for s in spots] == pytest.approx([0.6, 0.2, 0.6, 0.2])
    # [2,3] by [3,4] in float32: 2 * 2 * 3 * 4 FLOPs; 24 + 48 + 32 bytes.
    product = spots[3]
    assert (product.flops, product.nbytes) == (96.0, 208.0)
    assert product.flops_per_second == pytest.approx(96 / 2e-3)
    assert product.bytes_per_second == pytest.approx(208 / 2e-3)
    by_scope = made_profile().hot_spots("scope")
    assert [(s.phase, s.name, s.calls) for s in by_scope] == [("prefill", "", 2), ("decode", "", 4)]
    with pytest.raises(atbx.errors.OptionError, match=r"by.*'op' or 'scope'.*'layer'"):
        made_profile().hot_spots("layer")


def test_a_trace_is_what_chrome_reads_with_equations_nested_in_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    made_profile().write_trace(path, model="m")
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert [(e["name"], e["ts"], e["dur"]) for e in events] == [
        ("prefill", 0.0, 10000.0), ("matmul", 0.0, 6000.0), ("add", 6000.0, 2000.0),
        ("decode", 10000.0, 5000.0), ("matmul", 10000.0, 1000.0), ("add", 11000.0, 3000.0),
        ("decode", 20000.0, 5000.0), ("matmul", 20000.0, 1000.0), ("add", 21000.0, 3000.0),
    ]  # fmt: skip
    assert {e["ph"] for e in events} == {"X"}
    assert len({(e["pid"], e["tid"]) for e in events}) == 1
    assert events[1]["args"] == {
        "kernel": "torch.matmul", "tier": "composed", "phase": "prefill", "results": ["f32[2,4]"],
        "flops": 48.0, "bytes": 104.0,
    }  # fmt: skip
    summary = read_summary(path)
    assert summary["model"] == "m"
    assert summary["phases"] == {
        "prefill": {"steps": 1, "units": 1, "seconds": 0.01},
        "decode": {"steps": 2, "units": 2, "seconds": 0.01},
    }


def test_comparing_is_by_the_unit_and_names_kernels_that_changed() -> None:
    before = made_profile().summary()
    after = made_profile()
    after.units = {"decode": 4}
    changed = after.summary()
    changed["hot_spots"][3]["kernel"] = "better.matmul"
    found = {(c.phase, c.op): c for c in compare(before, changed)}
    add, product = found["decode", "add"], found["decode", "matmul"]
    assert (add.before, add.after) == pytest.approx((3.0, 1.5))
    assert (product.before, product.after, product.difference) == pytest.approx((1.0, 0.5, -0.5))
    assert (product.kernels_before, product.kernels_after) == (("torch.matmul",), ("better.matmul",))
    assert found["prefill", "matmul"].difference == 0.0
    # The largest change of a phase first.
    assert [c.op for c in compare(before, changed) if c.phase == "decode"] == ["add", "matmul"]
    del changed["hot_spots"][0]
    gone = next(c for c in compare(before, changed) if (c.phase, c.op) == ("prefill", "matmul"))
    assert (gone.before, gone.after) == (pytest.approx(6.0), None)


class Event:
    """An event of a device whose clock the test turns: milliseconds."""

    clock = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.clock

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_times_of_a_device_are_its_own_and_read_after_one_wait() -> None:
    waits: list[float] = []
    npu = SimpleNamespace(Event=Event, synchronize=lambda device: waits.append(Event.clock))
    device = SimpleNamespace(npu=npu, device="npu:0")
    Event.clock = 100.0

    def launch(milliseconds: float) -> Any:
        def run() -> str:
            Event.clock += milliseconds
            return "result"

        return run

    calls = [Call(launch(2.0), (), (0,), (), "a"), Call(launch(5.0), (), (1,), (), "b")]
    with profile("decode") as found:
        observer = current_observer()
        assert observer is not None
        for _ in range(2):
            with observer.walk(calls, device):
                assert [observer.run(call, []) for call in calls] == ["result", "result"]
        assert waits == [100.0]
    assert waits == [100.0, 114.0]
    assert [(t.call.label, t.phase) for t in found.timed] == [("a", "decode"), ("b", "decode")] * 2
    assert [t.duration for t in found.timed] == pytest.approx([2e6, 5e6, 2e6, 5e6])
    assert [duration for _, _, duration in found.steps] == pytest.approx([7e6, 7e6])
    assert found.steps[1][1] - found.steps[0][1] == pytest.approx(7e6)


def test_a_profile_turns_the_ranges_of_the_device_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from atbx.kernels.ascend import tracing

    log: list[tuple[str, Any]] = []
    mstx = SimpleNamespace(
        range_start=lambda name, stream: (log.append(("start", name)), len(log))[1],
        range_end=lambda number: log.append(("end", number)),
    )
    npu = SimpleNamespace(mstx=mstx, current_stream=lambda: "stream")
    monkeypatch.setattr(tracing, "npu_module", lambda: npu)
    with tracing.span("layers/0:linear"):
        pass
    assert log == []
    with profile(), tracing.span("layers/0:linear"):
        pass
    assert log == [("start", "layers/0:linear"), ("end", 1)]


def test_observers_nest_and_the_outer_one_comes_back() -> None:
    with profile() as outer:
        with profile() as inner:
            run_calls((Call(lambda: 1, (), (0,), (), "one"),), [None])
        run_calls((Call(lambda: 1, (), (0,), (), "two"),), [None])
    assert [t.call.label for t in inner.timed] == ["one"]
    assert [t.call.label for t in outer.timed] == ["two"]
    with observed(profiling._Recorder(Profile())):
        assert current_observer() is not None


def test_a_generation_is_the_same_watched_or_not(model: Path) -> None:
    generate, params, _ = generator_of(model)
    plain = generate(params, [[1, 2, 3]], max_new_tokens=4, eos=()).tokens
    with profile() as found:
        watched = generate(params, [[1, 2, 3]], max_new_tokens=4, eos=()).tokens
    assert watched == plain
    prefill, decode = generate.explain(params, prompt=3)
    # One prefill and three steps of decoding; the sampler has no layers.
    expected = [c.equation.op.name for c in (*prefill.choices, *decode.choices * 3) if c.equation.scope]
    assert [t.op for t in found.timed if t.scope] == expected


def test_the_command_prints_phases_hot_spots_and_writes_a_trace(
    capsys: Any, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    options = ("--prompt", 5, "--new", 4, "--repeats", 2)
    said = text_of(capsys, "profile", model, *options, "--output", path)
    assert "2 x (1 x 5 prompt tokens, 4 new)" in said
    for part in (
        "Prefill: ",
        " ms a prompt",
        "Decode: ",
        " ms a token",
        "norm_qkv",
        "by scope",
        "layers/1",
        str(path),
    ):
        assert part in said
    summary = read_summary(path)
    assert [summary["phases"][p]["units"] for p in ("prefill", "decode")] == [2, 6]
    assert summary["phases"]["prefill"]["seconds"] < summary["seconds"]
    # Layers of the model that ran while decoding: two, each once a token.
    (qkv,) = [s for s in summary["hot_spots"] if (s["phase"], s["op"]) == ("decode", "norm_qkv")]
    assert qkv["calls"] == 2 * 6
    assert sum(s["share"] for s in summary["hot_spots"] if s["phase"] == "decode") == pytest.approx(
        1, abs=0.5
    )


def test_a_device_without_time_is_named_and_divides_by_nothing(
    capsys: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    software = SimpleNamespace(_process={"entered": True})
    monkeypatch.setitem(sys.modules, "atbx.testing.software_npu", software)
    assert profile_command._device_name("npu:1") == "software"
    assert profile_command._device_name("cpu") == "cpu"
    software._process = {}
    assert profile_command._device_name("npu:1") == "npu:1, eager"
    monkeypatch.setattr(profiling._HostClock, "now", lambda self: 7)
    said = text_of(capsys, "profile", model, "--prompt", 5, "--new", 2, "--repeats", 1, "--top", 2)
    assert "Decode: 0.000 ms a token in compiled steps" in said
    assert "  0.0%" in said


def test_the_command_compares_with_an_earlier_trace(capsys: Any, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ("--prompt", 5, "--new", 3, "--repeats", 1)
    json_of(capsys, "profile", model, *options, "--output", path, "--json")
    found = json_of(
        capsys, "profile", model, "--prompt", 6, "--new", 3, "--repeats", 1, "--compare", path, "--json"
    )
    changes = {(c["phase"], c["op"]): c for c in found["changes"]}
    assert changes["decode", "norm_qkv"]["before_ms"] > 0
    assert changes["decode", "norm_qkv"]["kernels_before"] == ["torch.norm_qkv"]
    said = text_of(capsys, "profile", model, "--prompt", 6, "--new", 3, "--repeats", 1, "--compare", path)
    assert "Before and after" in said
    assert "not the same prompt: 5 before, 6 now" in said
    assert "not the same new" not in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "the trace cannot be read"),
        ("{", "the trace is no JSON"),
        ("[]", "this is no trace of this version of atbx; expected 1, found no summary"),
        ('{"traceEvents": [], "atbx": {"version": 7}}', "expected 1, found 7"),
    ],
)
def test_what_is_no_trace_is_refused_before_anything_runs(
    capsys: Any, model: Path, tmp_path: Path, content: str | None, says: str
) -> None:
    path = tmp_path / "earlier.json"
    if content is not None:
        path.write_text(content)
    said = error_of(capsys, "profile", model, "--compare", path)
    assert said.startswith(str(path))
    assert says in said


def test_too_few_tokens_and_unwritable_traces_are_refused(capsys: Any, model: Path, tmp_path: Path) -> None:
    assert error_of(capsys, "profile", model, "--new", 1).startswith("--new: too few tokens to see decoding")
    nowhere = tmp_path / "no" / "trace.json"
    said = error_of(capsys, "profile", model, "--prompt", 3, "--new", 2, "--repeats", 1, "--output", nowhere)
    assert said.startswith(f"{nowhere}: the trace cannot be written")
