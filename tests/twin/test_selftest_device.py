"""Self-test and comparison on the software device: kernels by eager launch and by replay, and one that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import random_params, small_llama

import atbx
from atbx.comparison import compare
from atbx.compile import backend
from atbx.core.backend import Backend
from atbx.kernels import ascend
from atbx.kernels.ascend.chips import Chip
from atbx.model_step import random_ids, teacher_forced
from atbx.models import llama
from atbx.selftest_examples import Example, examples
from atbx.selftest_rows import FAILED, run_rows
from atbx.swapping import swap

pytestmark = pytest.mark.usefixtures("npu")

SAMPLED = {"attention": 40, "kv_write": 28, "qkv_rotary_write": 36, "rotary": 6, "linear": 3}
"""Of these ops every so many examples are taken here; `atbx selftest` takes all."""


def some() -> list[Example]:
    """An example or more of every op."""
    found: list[Example] = []
    counts: dict[str, int] = {}
    for example in examples():
        number = counts.get(example.op, 0)
        counts[example.op] = number + 1
        if number % SAMPLED.get(example.op, 2) == 0:
            found.append(example)
    return found


OPS = (
    "embedding",
    "linear",
    "rms_norm",
    "add_rms_norm",
    "qkv_rotary_write",
    "attention",
    "gated_packed",
    "kv_write",
)


def test_kernels_pass_eagerly_and_by_replay() -> None:
    found = list(run_rows(backend("npu"), [e for e in some() if e.op in OPS and "+ 1" not in e.name]))
    rows = [row for row in found if row.op in OPS]
    for row in rows:
        assert [c for c in row.checks if not c.passed] == [], (row.op, row.kernel)
    ran = [c for row in rows for c in row.checks]
    assert len(ran) > 40
    assert all(c.same_in_graph for c in ran)


def arguments(dtype: torch.dtype, device: Backend) -> tuple[Any, ...]:
    """A decode step after a prompt of 9 tokens."""
    config = small_llama(width=64, ff=96, vocab=64, heads=4, kv_heads=1, head_size=64, rope=atbx.ops.Rope(64))
    binding = atbx.bind(random_params(config, dtype))
    steps = teacher_forced(llama.forward, binding, config, random_ids(10, 64), device, dtype)
    *_, step = steps
    return step.arguments


STEP = {"static": ("config",), "donate": ("cache",)}


@pytest.mark.parametrize("end_to_end", [False, True])
def test_a_step_is_within_the_tolerance(half: torch.dtype, end_to_end: bool) -> None:
    device = ascend.backend(execution="eager")
    found = compare(llama.forward, *arguments(half, device), device=device, end_to_end=end_to_end, **STEP)
    assert found.device == "software"
    assert found.passed, found.first
    kernels = {e.kernel for e in found.entries}
    assert "aclnn.mm_nz" in kernels
    assert "npu.rms_norm" in kernels
    assert "on the host" in kernels
    if not end_to_end:
        assert all(e.judgement is not None for e in found.entries)


def test_a_scale_that_is_wrong_is_found(half: torch.dtype, played: Chip) -> None:
    device = ascend.backend(execution="eager")
    real = next(k for k in device.table["attention"] if k.name == "composed.attention")

    def make(equation: Any) -> Any:
        # What an operator's default of 1.0 would do.
        return real.make(replace(equation, params={**equation.params, "scale": 1.0}))

    broken = replace(
        device, table={**device.table, "attention": [replace(real, name="without.scale", make=make)]}
    )
    found = compare(llama.forward, *arguments(half, device), device=broken, **STEP)
    assert {(e.op, e.kernel) for e in found.entries if not e.passed} == {("attention", "without.scale")}
    table = swap(llama.forward, *arguments(half, device), groups=["attention", "mlp"], device=broken, **STEP)
    assert [row.passed for row in table.rows] == [True, False, True, False]


def test_the_command_ends_with_a_report(tmp_path: Path) -> None:
    """A process of its own, as a user starts it."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "atbx.command_line", "selftest", "--device", "npu", "--software"]
    options = ["--only", "buckets", "--json", "--output", str(out)]
    done = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads(out.read_text())
    assert (report["device"], report["chip"], report["passed"]) == ("software", "Ascend910B3", True)
    assert report["speed"]["meaningful"] is False


def test_a_row_that_the_chip_refuses_is_told_apart_from_one_that_fails(played: Chip) -> None:
    found = list(run_rows(backend("npu"), [e for e in some() if e.op == "attention"]))
    rows = {row.kernel: row for row in found if row.op == "attention"}
    assert all(row.status != FAILED for row in rows.values())
    away = "npu.fia_v2" if played.family == "310P" else "npu.pfa_gathered"
    assert rows[away].status == "not for this installation"
    assert rows[away].reason is not None
    assert played.name in rows[away].reason
