"""The stand-in libraries as Python sees them: opened into the process, configured, asked what happened."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

from atbx.testing.software_npu.building import LIBRARIES

ENQUEUE = (
    "_ZN6at_npu6native9OpCommand10RunOpApiV2ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    "RKSt8functionIFivEEb"
)
"""OpCommand::RunOpApiV2(const std::string&, const std::function<int()>&, bool): torch_npu's way into its task queue."""

STEP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_int64)

_TEXT = 4096


class _Text(threading.local):
    """Room for an error's text, one a thread."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_TEXT)


class Boundary:
    """The ACL boundary of the process: one of them, since libraries stay open."""

    def __init__(self, folder: Path) -> None:
        """Open the stand-ins in `folder` so that torch_npu finds them by name, wherever it looks."""
        self.folder = folder
        path = str(folder / "libascendcl.so")
        self._library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self._further = [
            ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES
        ]
        # PyDLL keeps Python's lock: what is called through it comes back to Python in the same thread.
        self._held = ctypes.PyDLL(path)
        self._mark = self._held.standin_mark
        self._mark.argtypes = [
            ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t,
        ]  # fmt: skip
        self._held.standin_name.restype = ctypes.c_void_p
        self._held.standin_launch_count.restype = ctypes.c_int64
        self._held.standin_counters.restype = ctypes.c_size_t
        self._held.standin_used.restype = ctypes.c_uint64
        for name in ("standin_run_stream", "standin_is_capturing", "standin_is_pinned"):
            getattr(self._held, name).argtypes = [ctypes.c_void_p]
        self._held.standin_note_launch.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        self._names: dict[str, int] = {}
        self._callbacks: tuple = ()
        self._text = _Text()

    def configure(self, chip: str, cann: str, devices: int, memory_limit: int, streams: int) -> None:
        """Say what the device is. Bytes of memory a device, streams that captured graphs may take."""
        self._held.standin_configure(
            chip.encode(), cann.encode(), devices, ctypes.c_uint64(memory_limit), ctypes.c_int(streams)
        )

    def connect(self, step: Callable[[int, int], int], release: Callable[[int], None]) -> None:
        """Have `step(number, keep)` called where a stream reaches a step, `release(number)` where one is dropped."""
        self._callbacks = (STEP(step), RELEASE(release))
        python = [
            ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p)
            for name in (
                "PyGILState_Check",
                "PyEval_SaveThread",
                "PyEval_RestoreThread",
                "PyGILState_GetThisThreadState",
                "PyGILState_Ensure",
            )
        ]
        self._held.standin_connect(*self._callbacks, *python)

    def attach(self, torch_npu_library: Path) -> bool:
        """Find torch_npu's task queue in its library, which must be loaded."""
        return self._held.standin_attach(str(torch_npu_library).encode(), ENQUEUE.encode()) == 0

    def name(self, text: str) -> int:
        """Address of a name that lives as long as the process."""
        address = self._names.get(text)
        if address is None:
            address = self._names[text] = self._held.standin_name(text.encode())
        return address

    def mark(self, step: int, operation: int, stream: int, fills: bool) -> None:
        """Put a step (0: none) behind what this thread has queued; what was launched before belongs to `operation`.

        Raises:
            RuntimeError: torch_npu's queue reports an earlier failure, in its own words.
        """
        text = self._text.buffer
        if self._mark(step, operation, stream, fills, text, _TEXT) != 0:
            raise RuntimeError(text.value.decode(errors="replace"))

    def arm(self, code: int, message: str) -> None:
        """Refuse the next workspace call of this thread (or of its queue) with `code`."""
        self._held.standin_arm(code, message.encode())

    def disarm(self) -> None:
        """End `arm`."""
        self._held.standin_disarm()

    def is_queue_alive(self, settle: Callable[[], object]) -> bool:
        """Whether torch_npu's queue runs what is put into it; `settle` waits for the queue."""
        self._held.standin_probe_begin()
        settle()
        return bool(self._held.standin_probe_arrived())

    def refusals(self) -> int:
        """How many calls met the refusal since `arm`, in whichever thread."""
        return int(self._held.standin_refusals())

    def set_error(self, message: str) -> None:
        """What aclGetRecentErrMsg says next in this thread."""
        self._held.standin_set_error(message.encode())

    def note_launch(self, kernel: str, stream: int) -> None:
        """Count a launch that torch_npu's kernel would have made."""
        self._held.standin_note_launch(kernel.encode(), stream)

    def run_stream(self, stream: int) -> int:
        """Run what is queued on a stream; the code of the first failure, or 0."""
        return int(self._held.standin_run_stream(stream))

    def run_device(self, device: int) -> int:
        """Run what is queued on all streams of a device (-1: of all devices)."""
        return int(self._held.standin_run(device))

    def is_capturing(self, stream: int) -> int:
        """1 while the stream is captured, 2 while a task group is updated on it, else 0."""
        return int(self._held.standin_is_capturing(stream))

    def is_pinned(self, address: int) -> bool:
        """Whether a host address lies in pinned memory."""
        return bool(self._held.standin_is_pinned(address))

    def used(self, device: int) -> int:
        """Bytes of device memory in use, the caching allocator's reserve included."""
        return int(self._held.standin_used(device))

    def launches(self, since: int = 0) -> list[tuple[str, str]]:
        """(kernel, operator) of every launch since the reset."""
        kernel, operation = ctypes.c_char_p(), ctypes.c_char_p()
        found = []
        for place in range(since, self._held.standin_launch_count()):
            self._held.standin_launch_at(ctypes.c_int64(place), ctypes.byref(kernel), ctypes.byref(operation))
            found.append(((kernel.value or b"").decode(), (operation.value or b"").decode()))
        return found

    def launch_count(self) -> int:
        """Number of launches since the reset."""
        return int(self._held.standin_launch_count())

    def counters(self) -> dict[str, int]:
        """Every counter since the reset."""
        size = self._held.standin_counters(ctypes.create_string_buffer(1), 0)
        text = ctypes.create_string_buffer(size + _TEXT)
        self._held.standin_counters(text, size + _TEXT)
        lines = text.value.decode().splitlines()
        return {name: int(amount) for name, amount in (line.split() for line in lines)}

    def inject(self, kernel: str, code: int, message: str, at_execution: bool, times: int) -> None:
        """Fail the next `times` launches of a kernel (-1: all)."""
        self._held.standin_inject(kernel.encode(), code, message.encode(), at_execution, times)

    def reset(self) -> None:
        """Forget launches, counters and injections."""
        self._held.standin_reset()


def prepare_environment() -> None:
    """Keep `import torch` from loading torch_npu by itself, before the stand-ins are there."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
