"""Errors of torch_npu told as errors of atbx, from texts that torch_npu 2.13 and CANN print."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from atbx.core.errors import AtbxError, NpuError, ShapeError
from atbx.doctor.codes import CODES, first_cause
from atbx.npu_errors import find_cause, is_from_npu, npu_call, translate

PTA = "[ERROR] 2026-12-01-14:31:29 (PID:24967, Device:0, RankID:-1) ERR00100 PTA call acl api failed"
ACLNN = (
    "npu_rms_norm:../third_party/op-plugin/op_plugin/ops/opapi/RmsNormKernelOpApi.cpp:29 NPU function error: "
    f"call aclnnRmsNorm failed, error code is {{}}\n{PTA}.\n{{}}"
)
SYNC = (
    "npuSynchronizeDevice:../torch_npu/csrc/core/npu/NPUStream.cpp:748 NPU function error: "
    f"AclrtSynchronizeDeviceWithTimeout, error code is {{}}\n{PTA}\n[Error]: The aicore execution is abnormal. \n"
    "        Rectify the fault based on the error information in the ascend log.\n{}"
)
QUEUE = (
    "The Inner error is reported as above. The process exits for this inner error, and the current working operator "
    "name is ReshapeAndCache.\nSince the operator is called asynchronously, the stacktrace may be inaccurate. If you "
    "want to get the accurate stacktrace, please set the environment variable ASCEND_LAUNCH_BLOCKING=1.\n"
    "Note: ASCEND_LAUNCH_BLOCKING=1 will force ops to run in synchronous mode, resulting in performance degradation.\n"
    "[ERROR] 2026-12-01-14:31:29 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed."
)

# name: text, cause, code, part of the advice
TEXTS = {
    "parameter check": (
        ACLNN.format(161002, "EZ1001: aclnnRmsNorm: Tensor input not implemented for DT_INT32."),
        "aclnnRmsNorm: Tensor input not implemented for DT_INT32.",
        "161002",
        "atbx explain",
    ),
    "tiling, the cause below two lines that say nothing": (
        ACLNN.format(
            561002,
            "EZ9999: Inner Error!\n"
            "EZ9999: [PID: 1] 2025-01-01-00:00:00.000.000 head dim 999 is unsupported[FUNC:Check][FILE:a.cpp][LINE:1]\n"
            "        TraceBack (most recent call last):\n        Tiling failed[FUNC:B][FILE:b.cpp][LINE:2]",
        ),
        "head dim 999 is unsupported",
        "561002",
        "atbx explain",
    ),
    "the cause on the line below the code": (
        ACLNN.format(561000, "EZ9999: Inner Error!\n        block table is empty[FUNC:C][FILE:c.cpp][LINE:3]"),
        "block table is empty",
        "561000",
        "atbx doctor",
    ),
    "no kernel": (ACLNN.format(561003, "EZ9999: Get kernel failed"), "Get kernel failed", "561003", "atbx doctor"),
    "binary load failed": (
        ACLNN.format(500002, "EZ9999: binary load failed, soc ascend310p"),
        "binary load failed, soc ascend310p",
        "561003",
        "atbx doctor",
    ),
    "out of memory": (ACLNN.format(207001, "EL0004: no room"), "no room", "207001", "PYTORCH_NPU_ALLOC_CONF"),
    "torch_npu's allocator": (
        "NPU out of memory. Tried to allocate 256.00 MiB (NPU 0; 64.00 GiB total capacity)",
        "NPU out of memory. Tried to allocate 256.00 MiB (NPU 0; 64.00 GiB total capacity)",
        "207001",
        "PYTORCH_NPU_ALLOC_CONF",
    ),
    "streams exhausted": (
        SYNC.format(207008, "EL0009: [PID: 2] 2025-01-01-00:00:00 alloc sq cq fail[FUNC:F][FILE:f.cc][LINE:9]"),
        "alloc sq cq fail",
        "207008",
        "fewer graphs",
    ),
    "cube core": (SYNC.format(507015, "EZ9999: aicore exception"), "aicore exception", "507015", "block tables"),
    "vector core": (SYNC.format(507035, "EZ9999: vector core exception"), "vector core exception", "507035", "slots"),
    "out of bounds": (
        SYNC.format(507011, "EZ2001: The DDR address of the MTE instruction is out of range"),
        "The DDR address of the MTE instruction is out of range",
        "507011",
        "block tables",
    ),
    "stream timeout": (SYNC.format(507046, "EE1002: Stream synchronize timeout"), "Stream synchronize timeout",
                       "507046", "was not updated"),
    "device index": (
        "NPU function error: aclrtSetDevice, error code is 107001\n" + PTA + "\n"
        "[PID: 77] 2025-06-03-12:34:56.789 Invalid_Argument(EE1001): The argument is invalid. Reason: device 8",
        "The argument is invalid. Reason: device 8",
        "107001",
        "ASCEND_RT_VISIBLE_DEVICES",
    ),
    "old driver": (
        f"NPU function error: aclInit, error code is 207000\n{PTA}\nEE1015: driver version capability is insufficient",
        "driver version capability is insufficient",
        "EE1015",
        "driver",
    ),
    "pageable copy while capturing": (
        f"NPU function error: aclrtMemcpyAsync, error code is 107041\n{PTA}\nEE9999: pageable host memory",
        "pageable host memory",
        "107041",
        "pageable",
    ),
    "tbe": (
        f"NPU function error: aclopCompile, error code is 500001\n{PTA}\n"
        "E40020: Failed to import Python module [tbe.common].",
        "Failed to import Python module [tbe.common].",
        "E40020",
        "pip install",
    ),
    "op compile": (
        f"NPU function error: aclopCompile, error code is 500002\n{PTA}\nE40021: Failed to compile Op [Conv3D].",
        "Failed to compile Op [Conv3D].",
        "500002",
        "pip install",
    ),
    "libhccl": (
        "libhccl.so: cannot open shared object file: No such file or directory",
        "libhccl.so: cannot open shared object file: No such file or directory",
        "libhccl.so",
        "ascend-toolkit/set_env.sh",
    ),
    "libatb": (
        "dlopen libatb.so failed: libatb.so: cannot open shared object file",
        "dlopen libatb.so failed: libatb.so: cannot open shared object file",
        "libatb.so",
        "nnal/atb/set_env.sh",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_gives_its_first_cause_its_code_and_advice(name: str) -> None:
    text, cause, code, advice = TEXTS[name]
    found = first_cause(text)
    assert found.text == cause
    assert found.code == code
    assert advice in found.advice


def test_every_code_has_a_meaning_and_advice() -> None:
    assert all(meaning.text and meaning.advice for meaning in CODES.values())
    assert all(code == meaning.code for code, meaning in CODES.items())


def test_the_error_names_op_operands_code_cause_and_advice() -> None:
    text = ACLNN.format(561002, "EZ9999: head dim 999 is unsupported")
    operands = [torch.zeros(2, 999, dtype=torch.float16), [3, 5], 0.5]
    with pytest.raises(NpuError) as caught, npu_call("layers/0:attention", operands):
        raise RuntimeError(text)
    error = caught.value
    assert (error.where, error.code, error.cause) == (
        "layers/0:attention",
        "561002",
        "head dim 999 is unsupported",
    )
    assert error.operands == ("[2, 999] float16", "2 lengths", "0.5")
    assert error.codes == ("561002", "ERR00100", "EZ9999")
    assert str(error) == (
        "layers/0:attention: tiling failed: a rule on shapes, head size or list lengths (561002): "
        "head dim 999 is unsupported; operands [2, 999] float16, 2 lengths, 0.5. "
        "atbx explain MODEL --device npu names the kernel of each op and what it refuses"
    )
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, RuntimeError)
    assert str(error.__cause__) == text


@pytest.mark.parametrize(
    "error",
    [ValueError("EZ9999: not of torch_npu"), RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
     ShapeError("ours"), KeyboardInterrupt()],
)  # fmt: skip
def test_errors_that_are_not_torch_npu_s_pass(error: BaseException) -> None:
    assert not is_from_npu(error)
    with pytest.raises(type(error)) as caught, npu_call("op"):
        raise error
    assert caught.value is error


def test_an_error_of_atbx_is_handed_back_as_it_is() -> None:
    error = ShapeError("ours")
    assert translate(error, op="x", shapes=(), stderr=None, task_queue=True) is error


def test_the_cause_that_went_to_stderr_comes_before_the_text_of_the_error() -> None:
    said = "EZ9999: [PID: 5] 2025-01-01-00:00:00 slot 99 is out of range[FUNC:X][FILE:x.cpp][LINE:1]\n"
    error = translate(
        RuntimeError(QUEUE), op="kv_write", shapes=["[1, 64] float16"], stderr=said, task_queue=True
    )
    assert isinstance(error, NpuError)
    assert (error.cause, error.is_late) == ("slot 99 is out of range", True)
    assert error.launch == "ReshapeAndCache"
    assert "the launch that failed is ReshapeAndCache" in str(error)
    blocking = translate(RuntimeError(QUEUE), op="kv_write", shapes=(), stderr=said, task_queue=False)
    assert isinstance(blocking, NpuError)
    assert not blocking.is_late


def test_a_line_that_the_queue_logged_is_the_cause_where_no_code_tells_more() -> None:
    said = (
        "[W1201 14:59:49.103246320 HcclInterface.cpp:24] Warning: Failed to find this HcclSetConfig function\n"
        "[E1201 14:59:49.129391349 OpParamMaker.cpp:580] atb::ReshapeAndCache setup failed!\n"
        "Exception raised from OperationSetup at AtbCommon.cpp:211 (most recent call first):\n"
    )
    error = translate(RuntimeError(QUEUE), op="kv_write", stderr=said, task_queue=True)
    assert isinstance(error, NpuError)
    assert error.cause == "atb::ReshapeAndCache setup failed!"


def test_a_wait_that_finds_a_fault_says_that_an_earlier_launch_may_have_failed() -> None:
    error = translate(RuntimeError(SYNC.format(507015, "EZ9999: fault")), op="a step", task_queue=True)
    assert "an earlier launch may be the one that failed" in str(error)


def _write_and_fail(*parts: bytes) -> None:
    for part in parts:
        os.write(2, part)
    raise RuntimeError(QUEUE)


def test_what_is_written_to_stderr_is_searched_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NpuError) as caught, npu_call("kv_write", listen=True):
        _write_and_fail(b"EZ9999: slot 99 is out of range\nmore\n")
    assert caught.value.cause == "slot 99 is out of range"
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "EZ9999: slot 99 is out of range\nmore\nafterwards\n"


def test_a_flood_on_stderr_is_passed_on_whole_and_kept_in_part(capfd: pytest.CaptureFixture[str]) -> None:
    line = b"x" * 1023 + b"\n"
    with pytest.raises(NpuError) as caught, npu_call("op", listen=True):
        _write_and_fail(b"EZ9999: the first cause\n", *[line] * 1024)
    assert caught.value.cause == "the first cause"
    assert len(capfd.readouterr().err) == 24 + 1024 * 1024


def test_two_threads_do_not_take_stderr_from_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with npu_call("first", listen=True):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    with npu_call("second", listen=True):
        os.write(2, b"one\n")
        leave.set()
        thread.join(10)
        os.write(2, b"two\n")
    os.write(2, b"three\n")
    assert capfd.readouterr().err == "one\ntwo\nthree\n"


def test_a_child_that_keeps_stderr_does_not_hold_the_call_up() -> None:
    with npu_call("op", listen=True):
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
    # The call ended while the child still lives.
    assert child.poll() is None
    child.communicate()
    assert child.returncode == 0


def test_no_file_descriptor_is_left_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with npu_call("op", listen=True):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_find_cause_names_the_op_whose_wait_fails() -> None:
    pending: list[str] = []
    ran: list[str] = []

    def launch(name: str, fault: str = "") -> None:
        ran.append(name)
        if fault:
            pending.append(fault)

    def synchronize() -> None:
        if pending:
            raise RuntimeError(SYNC.format(507015, f"EZ9999: {pending.pop()}"))

    x = torch.zeros(1, 64)
    calls = [
        ("norm", [x], lambda: launch("norm")),
        ("kv_write", [x], lambda: launch("kv_write", "slot 99 is out of range")),
        ("attention", [x], lambda: launch("attention")),
    ]
    error = find_cause(calls, synchronize)
    assert error is not None
    assert (error.where, error.cause, error.code) == ("kv_write", "slot 99 is out of range", "507015")
    assert not error.is_late
    assert ran == ["norm", "kv_write"]
    assert find_cause(calls[:1], synchronize) is None


def test_the_error_is_one_of_atbx() -> None:
    assert issubclass(NpuError, AtbxError)
