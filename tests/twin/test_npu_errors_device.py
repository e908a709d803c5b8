"""Errors of the real torch_npu, on the software device, told as errors of atbx: with its task queue on and off.

Each runs in a process of its own: the queue is chosen when torch_npu starts, and a launch that fails inside it ends it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is None, reason="needs torch_npu 2.13.0 (the extra 'twin')"
)

HEAD = """
import json, sys, torch, torch_npu
from atbx.core.errors import NpuError
from atbx.npu_errors import find_cause, npu_call
from atbx.testing.software_npu import current
device = current()
x = torch.ones(2, 8, dtype=torch.half, device="npu")
gain = torch.ones(8, dtype=torch.half, device="npu")
norm = lambda x=x, g=gain: torch.ops.npu.npu_rms_norm(x, g)[0]
cache = torch.zeros(2, 16, 1, 64, dtype=torch.half, device="npu")
rows = torch.ones(1, 1, 64, dtype=torch.half, device="npu")
good, bad = (torch.tensor([s], dtype=torch.int32, device="npu") for s in (3, 99))
write = lambda slots=good: torch_npu._npu_reshape_and_cache(rows, rows, cache, cache.clone(), slots)
torch.npu.synchronize()
def told(error):
    found = {name: getattr(error, name) for name in ("where", "cause", "code", "codes", "advice", "is_late")}
    return {**found, "operands": list(error.operands), "text": str(error)}
def call(name, operands, run, wait=True):
    try:
        with npu_call(name, operands, listen=True):
            run()
            if wait:
                torch.npu.synchronize()
    except NpuError as error:
        return told(error)
    return None
found = {}
"""
TAIL = "\nprint('FOUND ' + json.dumps(found), flush=True)\nimport os; os._exit(0)\n"


def run(tmp_path: Path, script: str, **environment: str) -> tuple[dict[str, Any], str]:
    """What a script found, and what it wrote to stderr."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + script + TAIL)
    done = subprocess.run(
        [sys.executable, "-m", "atbx.testing.software_npu", str(path)],
        capture_output=True, text=True, timeout=240, cwd=tmp_path, check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND ")), done.stderr


QUEUES = pytest.mark.parametrize("queue", ["1", "0"])

LAUNCHES = """
whole = torch.ones(2, 4, dtype=torch.int32, device="npu")
found["genuine"] = call("norm", [whole], lambda: norm(whole, whole[0]))
def injected(code, message, when):
    device.inject("aclnnRmsNorm", code, message, when)
    return call("layers/0:rms_norm", [x, gain], norm)
inner = ("EZ9999: Inner Error!\\nEZ9999: [PID: 7] 2025-01-01-00:00:00.000.000 head dim 999 is unsupported"
         "[FUNC:Check][FILE:tiling.cpp][LINE:7]\\n        TraceBack (most recent call last):\\n        Tiling failed")
found["tiling"] = injected(561002, inner, "launch")
found["kernel"] = injected(561003, "EZ9999: Get kernel failed", "launch")
found["memory"] = injected(207001, "EL0004: no room for a workspace", "launch")
found["cube"] = injected(507015, "EZ9999: The DDR address of the MTE instruction is out of range", "execution")
found["vector"] = injected(507035, "EZ9999: vector core exception", "execution")
found["timeout"] = injected(507046, "EE1002: Stream synchronize timeout", "execution")
found["afterwards"] = call("norm", [x], norm)
"""


@QUEUES
def test_launches_that_are_refused_and_faults_on_the_device(tmp_path: Path, queue: str) -> None:
    found, _ = run(tmp_path, LAUNCHES, TASK_QUEUE_ENABLE=queue)
    causes = {name: (error["code"], error["cause"]) for name, error in found.items() if error is not None}
    assert causes == {
        "genuine": (
            "161002",
            "aclnnRmsNorm: Tensor input not implemented for DT_INT32, should be in dtype support list "
            "[DT_FLOAT16,DT_BFLOAT16,DT_FLOAT].",
        ),
        "tiling": ("561002", "head dim 999 is unsupported"),
        "kernel": ("561003", "Get kernel failed"),
        "memory": ("207001", "no room for a workspace"),
        "cube": ("507015", "The DDR address of the MTE instruction is out of range"),
        "vector": ("507035", "vector core exception"),
        "timeout": ("507046", "Stream synchronize timeout"),
    }
    assert found["afterwards"] is None
    assert found["genuine"]["operands"] == ["[2, 4] int32"]
    assert found["tiling"]["where"] == "layers/0:rms_norm"
    assert found["tiling"]["operands"] == ["[2, 8] float16", "[8] float16"]
    advice = {name: error["advice"] for name, error in found.items() if error is not None}
    assert "atbx explain" in advice["tiling"]
    assert "atbx doctor" in advice["kernel"]
    assert "PYTORCH_NPU_ALLOC_CONF" in advice["memory"]
    assert "block tables" in advice["cube"]
    assert "was not updated" in advice["timeout"]
    # A wait found these: with the queue on, the op may be an earlier one, and the error says so.
    late = {name for name, error in found.items() if error is not None and error["is_late"]}
    assert late == ({"cube", "vector", "timeout"} if queue == "1" else set())


QUEUED = """
device.inject("atb::ReshapeAndCache", 8, "EZ9999: slot mapping has the wrong rank")
found["write"] = call("layers/0:kv_write", [rows, cache], write)
"""


def test_with_the_queue_on_the_cause_is_on_stderr_and_is_passed_on(tmp_path: Path) -> None:
    found, stderr = run(tmp_path, QUEUED, TASK_QUEUE_ENABLE="1")
    error = found["write"]
    assert (error["where"], error["cause"]) == ("layers/0:kv_write", "slot mapping has the wrong rank")
    assert error["operands"] == ["[1, 1, 64] float16", "[2, 16, 1, 64] float16"]
    assert error["is_late"]
    assert "the launch that failed is ReshapeCacheOperation" in error["text"]
    assert error["advice"]
    # What torch_npu's queue logged meanwhile was passed on.
    assert "atb::ReshapeAndCache setup failed!" in stderr


SILENT = """
device.inject("atb::ReshapeAndCache", 8)
found["write"] = call("layers/0:kv_write", [rows, cache], write)
"""


def test_with_the_queue_on_a_cause_that_only_stderr_tells_is_found_there(tmp_path: Path) -> None:
    found, stderr = run(tmp_path, SILENT, TASK_QUEUE_ENABLE="1")
    assert found["write"]["cause"] == "atb::ReshapeAndCache setup failed!"
    assert "atb::ReshapeAndCache setup failed!" in stderr


@pytest.mark.parametrize("setting", ["TASK_QUEUE_ENABLE=0", "ASCEND_LAUNCH_BLOCKING=1"])
def test_with_the_queue_off_the_same_fails_where_it_is_called(tmp_path: Path, setting: str) -> None:
    name, value = setting.split("=")
    found, _ = run(tmp_path, QUEUED, **{name: value})
    error = found["write"]
    assert error["where"] == "layers/0:kv_write"
    assert not error["is_late"]
    assert (
        "slot mapping has the wrong rank" in error["cause"]
        or "ReshapeAndCache setup failed" in error["cause"]
    )


RERUN = """
steps = [("norm", [x], norm), ("kv_write", [rows, cache, bad], lambda: write(bad)), ("norm again", [x], norm)]
def together():
    for _, _, run in steps:
        run()
found["together"] = call("a step", [], together)
error = find_cause(steps, torch.npu.synchronize)
found["rerun"] = None if error is None else told(error)
fine = find_cause([steps[0], ("kv_write", [rows, cache, good], write)], torch.npu.synchronize)
found["fine"] = None if fine is None else told(fine)
"""


@QUEUES
def test_a_rerun_that_waits_after_every_call_names_the_op(tmp_path: Path, queue: str) -> None:
    found, _ = run(tmp_path, RERUN, TASK_QUEUE_ENABLE=queue)
    assert found["together"]["where"] == "a step"
    assert found["together"]["code"] == "507015"
    error = found["rerun"]
    assert (error["where"], error["code"]) == ("kv_write", "507015")
    assert "slot 99" in error["cause"]
    assert error["operands"] == ["[1, 1, 64] float16", "[2, 16, 1, 64] float16", "[1] int32"]
    assert not error["is_late"]
    assert found["fine"] is None


CAPTURE = """
source = torch.ones(2, 8).half()
def capture():
    with torch.npu.graph(torch.npu.NPUGraph()):
        x.copy_(source, non_blocking=True)
found["pageable"] = call("capture", [x], capture, wait=False)
"""


@QUEUES
def test_an_operation_that_a_capture_forbids_is_the_cause_not_the_end_of_the_capture(
    tmp_path: Path, queue: str
) -> None:
    found, _ = run(tmp_path, CAPTURE, TASK_QUEUE_ENABLE=queue)
    error = found["pageable"]
    assert "pageable" in error["cause"]
    assert error["code"] in ("107041", "507903")
    assert "507903" in error["codes"]
    assert "pageable memory" in error["advice"]


STREAMS = """
device.set_stream_budget(2)
kept = []
def capture():
    for _ in range(4):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            norm()
        kept.append(graph)
found["streams"] = call("capture", [x], capture, wait=False)
"""


def test_streams_that_run_out_are_told_with_what_to_do(tmp_path: Path) -> None:
    error = run(tmp_path, STREAMS)[0]["streams"]
    assert error["code"] == "207008"
    assert "fewer graphs" in error["advice"]


def test_the_doctor_says_what_this_environment_lacks() -> None:
    """torch_npu without CANN: read from files, while plain `import torch` fails for it."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    command = [sys.executable, "-m", "atbx.command_line", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    data = json.loads(done.stdout)
    assert done.returncode == data["exit_code"] == 2
    finding = next(f for f in data["findings"] if f["id"] == "torch_npu.without_cann")
    assert finding["severity"] == "error"
    assert "libhccl.so" in finding["breaks"]
    plain = [sys.executable, "-c", "import torch"]
    broken = subprocess.run(plain, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert broken.returncode == 1
    assert "libhccl.so: cannot open shared object file" in broken.stderr
    mended = {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert subprocess.run(plain, env=mended, timeout=120, check=False).returncode == 0
