"""What torch_npu decides once a process: chip, memory without a cache, task queue, sanitizer, start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is None, reason="needs torch_npu 2.13.0 (the extra 'twin')"
)

HEAD = """
import torch, torch_npu
def outcome(call):
    try:
        result = call()
        torch.npu.synchronize()
        return result
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def run(tmp_path: Path, script: str, *options: str, **environment: str) -> str:
    """Output of a script on the software NPU, in a process of its own; it must end well."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + script)
    done = subprocess.run(
        [sys.executable, "-m", "atbx.testing.software_npu", *options, str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CHIP = """
print(torch.npu.get_device_name(0))
x = torch.arange(4.0).half().npu()
print((x * 2).cpu().tolist())
w = torch_npu.npu_format_cast(torch.ones(32, 32).half().npu(), 29)
print("nz", torch_npu.get_npu_format(w) == 29)
print(outcome(lambda: (torch.ones(2, dtype=torch.bfloat16, device="npu") + 1).cpu().tolist()))
"""


@pytest.mark.parametrize(
    ("chip", "bfloat16", "nz"),
    [
        ("Ascend910B1", True, False),
        ("Ascend910_9392", True, False),
        ("Ascend310P3", False, True),
        ("Ascend910A", False, True),
    ],
)
def test_a_chip_has_its_dtypes_and_its_defaults(tmp_path: Path, chip: str, bfloat16: bool, nz: bool) -> None:
    out = run(tmp_path, CHIP, "--chip", chip)
    assert f"\n{chip}\n" in f"\n{out}"
    assert "[0.0, 2.0, 4.0, 6.0]" in out
    assert ("[2.0, 2.0]" in out) is bfloat16
    assert (f"DT_BFLOAT16 on {chip}" in out) is not bfloat16
    assert f"nz {nz}" in out


UNCACHED = """
import ctypes
x = torch.ones(64, device="npu")
y = (x * 2 + 1) * 3
print(y.cpu()[:2].tolist())
torch.npu.synchronize()
address = x.untyped_storage().data_ptr()
del x
print([hex(word) for word in (ctypes.c_uint16 * 2).from_address(address)])
print(torch.empty(8, device="npu").cpu().isnan().all().item())
"""


def test_without_a_cache_every_block_is_fresh_and_freed_memory_is_poisoned(tmp_path: Path) -> None:
    out = run(tmp_path, UNCACHED, PYTORCH_NO_NPU_MEMORY_CACHING="1")
    assert "[9.0, 9.0]\n['0xfffe', '0xfffe']\nTrue\n" in out


RACE = """
from torch.cuda._sanitizer import CUDASanitizerErrors
x = torch.zeros(8, device="npu")
side = torch.npu.Stream()
def write():
    with torch.npu.stream(side):
        x.add_(1)
print("unsynchronised:", outcome(write))
side.wait_stream(torch.npu.current_stream())
print("waited:", outcome(write))
"""


def test_the_stream_sanitizer_of_torch_npu_works(tmp_path: Path) -> None:
    out = run(tmp_path, RACE, TORCH_NPU_SANITIZER="1")
    assert "unsynchronised: CUDASanitizerErrors: detected 1 errors" in out
    assert "waited: None" in out


QUEUE = """
cache = torch.zeros(2, 16, 1, 64, dtype=torch.half, device="npu")
rows = torch.ones(1, 1, 64, dtype=torch.half, device="npu")
slots = torch.tensor([3], dtype=torch.int32, device="npu")
write = lambda: torch_npu._npu_reshape_and_cache(rows, rows, cache, cache.clone(), slots)
print("ok:", outcome(write), cache.cpu().view(32, 64)[3].sum().item())
from atbx.testing.software_npu import current
current().inject("atb::ReshapeAndCache", 8, "ATB says: invalid dim")
print("failed:", outcome(write))
print("after:", outcome(lambda: (rows + 1).cpu().sum().item()))
def again():
    current().reset()  # starts the queue again, unless its thread ended with the failure
    return (rows + 1).cpu().sum().item()
print("reset:", outcome(again))
"""


def test_a_launch_that_fails_in_the_task_queue_surfaces_later(tmp_path: Path) -> None:
    out = run(tmp_path, QUEUE, TASK_QUEUE_ENABLE="1")
    assert "ok: None 64.0" in out
    assert "failed: RuntimeError: The Inner error is reported as above" in out
    assert "ATB says: invalid dim" in out
    assert "after: RuntimeError: torch_npu's task queue stopped" in out
    assert "reset: 128.0" in out or "ended with a failure, as on an NPU" in out


@pytest.mark.parametrize("setting", ["TASK_QUEUE_ENABLE=0", "ASCEND_LAUNCH_BLOCKING=1"])
def test_without_the_task_queue_it_fails_where_it_is_called(tmp_path: Path, setting: str) -> None:
    name, value = setting.split("=")
    out = run(tmp_path, QUEUE, **{name: value})
    assert "ok: None 64.0" in out
    assert "atb::ReshapeAndCache setup failed" in out
    assert "after: 128.0" in out


PAGEABLE = """
x, source = torch.ones(3, device="npu"), torch.ones(3)
torch.npu.synchronize()
def capture():
    with torch.npu.graph(torch.npu.NPUGraph()):
        x.copy_(source, non_blocking=True)
print(outcome(capture))
"""


def test_a_pageable_copy_inside_a_capture_is_refused(tmp_path: Path) -> None:
    assert "error code is 507903" in run(tmp_path, PAGEABLE)


@pytest.mark.parametrize(
    "setting",
    [
        "PYTORCH_NO_NPU_MEMORY_CACHING=1",
        "TASK_QUEUE_ENABLE=0",
        "TASK_QUEUE_ENABLE=2",
        "TORCH_NPU_SANITIZER=1",
    ],
)
def test_plain_operators_hold_in_every_mode_of_torch_npu(setting: str) -> None:
    name, value = setting.split("=")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).with_name("test_device_aten.py"))],
        capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2], check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", name: value},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_command_passes_arguments_and_prints_a_summary(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    done = subprocess.run(
        [sys.executable, "-m", "atbx.testing.software_npu", "--devices", "2", "--summary", "show.py", "--x", "1"],
        capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "['--x', '1'] __main__" in done.stdout
    assert "Counts(launches={}" in done.stderr


def test_without_a_compiler_one_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("print('never')\n")
    done = subprocess.run(
        [sys.executable, "-m", "atbx.testing.software_npu", "show.py"],
        capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False,
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "no C++ compiler" in done.stderr
    assert "never" not in done.stdout
