"""The self-test on the CPU: its examples cover what they must, kernels that are wrong fail it, its report says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_chat_model import chat_model

import atbx
from atbx import selftest as selftest_module
from atbx.command_line import main
from atbx.core.backend import Backend, Kernel
from atbx.core.errors import AtbxError, OptionError
from atbx.kernels import cpu
from atbx.kernels.ascend.table import FORMS, rows
from atbx.ops.attention import ATTENTION
from atbx.selftest import selftest
from atbx.selftest_examples import Example, case, draw, examples
from atbx.selftest_model import CONFIG, PROMPTS, Finding, random_params, run_buckets, run_model, truth_of
from atbx.selftest_rows import FAILED, NOT_HERE, PASSED, run_rows

EXAMPLES = examples()


def only(*names: str) -> list[Example]:
    """The examples of some ops."""
    return [e for e in EXAMPLES if e.op in names]


def test_every_op_of_every_table_has_an_example() -> None:
    wanted = {row.op for form in FORMS for row in rows(form)} | set(cpu.backend().table)
    assert wanted <= {e.op for e in EXAMPLES}


def test_examples_reach_the_sizes_and_caches_that_kernels_differ_by() -> None:
    attention = [case(e, torch.float16).equation for e in only("attention")]
    assert {e.op for e in attention} == {ATTENTION}
    shapes = [(e.operands[0].shape, e.operands[1].shape) for e in attention]
    assert {int(q[3]) for q, _ in shapes} == {64, 80, 96, 128, 256}
    assert {int(q[2] // k[2]) for q, k in shapes} == {1, 4, 8}
    assert {int(q[1]) for q, _ in shapes} == {1, 6}
    assert {len(e.operands[3].shape) for e in attention} == {1, 2}
    assert {e.params["window"] for e in attention} == {None, 8, 64}
    assert any(e.params["window"] and e.operands[1].shape[1] < e.params["extent"] for e in attention)
    assert any(e.params["soft_cap"] for e in attention)
    writes = [case(e, torch.float16).equation for e in only("qkv_rotary_write")]
    assert {e.params["style"] for e in writes} == {"half", "interleaved"}
    assert {e.operands[1] is None for e in writes} == {True, False}


def test_parameters_and_host_values_are_told_apart() -> None:
    (first, *_) = only("linear")
    one = case(first, torch.bfloat16)
    assert [str(v.abstract) for v in one.bound] == ["bf16[96,64]"]
    assert not one.host
    (first, *_) = only("rotary")
    one = case(first, torch.bfloat16)
    assert {one.equation.inputs.index(v) for v in one.host} == {2, 3}
    assert one.operands[2].dtype == torch.float32


def test_every_kernel_of_the_cpu_passes() -> None:
    found = list(run_rows(cpu.backend(), EXAMPLES))
    assert len(found) == sum(map(len, cpu.backend().table.values()))
    assert [(r.op, r.kernel, r.reason) for r in found if r.status == FAILED] == []
    assert {r.kernel for r in found if r.status == NOT_HERE} <= {"onednn.linear"}
    assert sum(len(r.checks) for r in found) > 700


def test_tolerances_are_not_idle() -> None:
    """Some check of a reduction is off by at least a tenth of what it may be: bounds are near what they bound."""
    found = [r for r in run_rows(cpu.backend(), only("linear", "attention")) if r.checks]
    margins = [
        r.worst.judgement.margin for r in found if r.worst is not None and r.worst.judgement is not None
    ]
    assert max(margins) > 0.1


def with_kernel(op: str, make: Any, **options: Any) -> Backend:
    """The CPU backend with one kernel in place of those of an op."""
    return replace(cpu.backend(), table={op: [Kernel(f"ours.{op}", op, make, **options)]})


def test_a_kernel_that_is_wrong_fails_with_its_numbers() -> None:
    device = with_kernel("rms_norm", lambda e: lambda x, w: e.op.reference(x, w, **e.params) * 1.05)
    (row,) = run_rows(device, only("rms_norm"))
    assert row.status == FAILED
    assert not any(c.passed for c in row.checks)
    data = row.as_data()
    assert len(data["failed"]) == len(row.checks) == 18
    assert data["worst"]["judgement"]["units"] > data["worst"]["judgement"]["allowed"]


def test_a_window_that_is_one_off_fails() -> None:
    def make(equation: Any) -> Any:
        params = dict(equation.params)
        if params["window"] is not None:
            params["window"] += 1
        return lambda *operands: equation.op.reference(*operands, **params)

    (row,) = run_rows(with_kernel("attention", make), only("attention"))
    failed = {c.example for c in row.checks if not c.passed}
    assert failed
    assert all("window" in name for name in failed)


def test_a_kernel_that_raises_does_not_stop_the_others() -> None:
    def make(equation: Any) -> Any:
        def run(*operands: Any) -> Any:
            raise RuntimeError("EZ9999: no such kernel\nin the package")

        return run

    device = replace(
        cpu.backend(),
        table={"silu": [Kernel("bad", "silu", make)], "relu": list(cpu.backend().table["relu"])},
    )
    bad, good = run_rows(device, only("silu", "relu"))
    assert (bad.status, good.status) == (FAILED, PASSED)
    assert bad.checks[0].error == "RuntimeError: EZ9999: no such kernel in the package"


def test_a_kernel_that_no_example_reaches_is_no_pass() -> None:
    device = with_kernel("silu", lambda e: torch.nn.functional.silu, refuses=lambda e: "too small")
    (row,) = run_rows(device, only("silu"))
    assert row.status == FAILED
    assert row.reason is not None
    assert "too small" in row.reason
    assert row.refused == {"too small": 3}


def test_the_model_and_its_buckets_pass_on_the_cpu() -> None:
    found = [*run_model(cpu.backend()), *run_buckets(cpu.backend())]
    assert [f for f in found if not f.passed] == []
    names = {f.name for f in found}
    assert {"logits, bfloat16, compiled", "logits, float16, paged cache", "a repeated run"} <= names
    tokens = {f.name: f.numbers for f in found if f.name.startswith("greedy")}
    assert all(n["equal"] + n["within_tolerance"] == 24 and n["equal"] >= 20 for n in tokens.values())


def test_logits_that_are_off_or_no_number_fail() -> None:
    params = random_params(CONFIG, torch.bfloat16)
    truth = truth_of(atbx.models.llama.forward, params, CONFIG, PROMPTS[:1], torch.bfloat16)
    assert 0 < truth.tolerance < 0.1 * float(truth.logits[0].abs().max())
    assert truth.judge("same", truth.logits).passed
    assert not truth.judge("off", [truth.logits[0] + 1.01 * truth.tolerance]).passed
    nan = truth.logits[0].clone()
    nan[0, 0] = float("nan")
    assert not truth.judge("nan", [nan]).passed


def test_a_part_that_stops_leaves_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(chosen: Any) -> Any:
        yield Finding("first", True)
        raise AtbxError("the device went away")

    monkeypatch.setattr(selftest_module, "run_model", stops)
    report = selftest("cpu", parts=("model", "buckets"))
    assert report.errors == ["model: AtbxError: the device went away"]
    assert not report.passed
    assert [f.name for f in report.findings][:2] == ["first", "a repeated run"]


def test_a_report_tells_versions_and_only_variables_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    data = selftest("cpu", parts=("buckets",)).as_data()
    assert data["environment"]["TASK_QUEUE_ENABLE"] == "1"
    assert "hidden" not in json.dumps(data)
    assert data["versions"]["torch"] == torch.__version__
    assert (data["device"], data["chip"], data["passed"]) == ("cpu", None, True)


def test_unknown_parts() -> None:
    with pytest.raises(OptionError, match=r"parts.*rows, model, buckets, speed.*found \['all'\]"):
        selftest("cpu", parts=("all",))


def test_the_command_writes_what_it_prints(capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    model = chat_model(tmp_path)
    argv = ["selftest", "--device", "cpu", "--only", "buckets,speed", "--json", "--output", str(out)]
    assert main([*argv, "--model", str(model)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["speed"]["meaningful"] is True
    assert all(one["value"] > 0 for one in printed["speed"]["measured"])
    names = [c["name"] for c in printed["checks"]]
    assert "a repeated run" in names
    assert any(str(model) in name for name in names)


def test_the_command_ends_with_1_where_something_fails(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(chosen: Any) -> Any:
        yield Finding("logits", False, {"error": 1.0})

    monkeypatch.setattr(selftest_module, "run_buckets", fails)
    out = tmp_path / "report.json"
    assert main(["selftest", "--device", "cpu", "--only", "buckets", "--output", str(out)]) == 1
    captured = capsys.readouterr()
    assert "NOT PASSED" in captured.out
    assert "FAILED logits" in captured.err
    assert json.loads(out.read_text())["passed"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu", "--software"], "--software: plays an NPU"),
        (["--device", "npu", "--chip", "Ascend910B3"], "with --software"),
        (["--device", "cpu", "--only", "everything"], "unknown part"),
        (["--device", "cpu", "--only", "buckets", "--output", "/nowhere/report.json"], "cannot be written"),
    ],
)
def test_options_that_cannot_be_done(capsys: Any, options: list[str], message: str) -> None:
    assert main(["selftest", *options]) == 2
    assert message in capsys.readouterr().err


def test_examples_draw_the_same_numbers_every_time() -> None:
    assert torch.equal(draw(3, 5), draw(3, 5))
    assert not torch.equal(draw(3, 5), draw(3, 5, seed=1))
