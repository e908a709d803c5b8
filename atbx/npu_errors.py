"""Errors of torch_npu, told as errors of atbx: the first real cause, the op and its operands, the code, what to do.

torch_npu raises RuntimeError with many lines, of which the first real one counts. With its task queue on (the default)
a launch that fails inside the queue is reported by a later call, and the cause goes to stderr; `npu_call` can therefore
listen to stderr, passing everything on as it comes. `find_cause` names the op: it runs calls again, one at a time,
waiting after each.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from atbx.core.errors import AtbxError, NpuError
from atbx.doctor.codes import codes_in, first_cause, operator_in

KEPT_BYTES = 64 * 1024
"""Of what is written to stderr during a call, the first so many bytes are searched."""

_MARKS = (
    *(
        "NPU function error",
        "PTA call acl api failed",
        "ERR00",
        "ERR99999",
        "Inner error is reported as above",
    ),
    *(
        "task queue",
        "atb::",
        "libatb",
        "libhccl",
        "libascend",
        "NPU out of memory",
        "aclnn",
        "aclrt",
        "drvErr",
    ),
)
"""One of these, or an E-code, is in every error that torch_npu raises itself."""


def is_from_npu(error: BaseException) -> bool:
    """Whether an error was raised by torch_npu or below it, not by torch or a caller."""
    if isinstance(error, AtbxError) or not isinstance(error, (RuntimeError, ImportError, OSError)):
        return False
    text = str(error)
    return any(mark in text for mark in _MARKS) or bool(codes_in(text))


def is_task_queue_on() -> bool:
    """Whether torch_npu launches through its queue, as it does unless the environment says otherwise."""
    blocking = os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1"
    return not blocking and os.environ.get("TASK_QUEUE_ENABLE", "1") != "0"


def described(operands: Iterable[Any]) -> tuple[str, ...]:
    """Operands for people: tensors as `[2, 8] float16`, others as they are."""
    found = []
    for value in operands:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None and dtype is not None:
            found.append(f"{[int(n) for n in shape]} {str(dtype).removeprefix('torch.')}")
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
            found.append(f"{len(value)} lengths")
        elif isinstance(value, (bool, int, float, str)):
            found.append(repr(value))
    return tuple(found)


def translate(
    error: BaseException,
    *,
    op: str,
    shapes: Iterable[Any] = (),
    stderr: str | None = None,
    task_queue: bool | None = None,
) -> AtbxError:
    """The error of atbx for one of torch_npu.

    op: what was called. shapes: its operands, tensors or texts. stderr: what was written to it during the call.
    task_queue: whether launches were queued, so that the op may be an earlier one; None asks the environment.
    """
    if isinstance(error, AtbxError):
        return error
    queued = is_task_queue_on() if task_queue is None else task_queue
    cause = first_cause(*((stderr,) if stderr else ()), str(error))
    operands = tuple(
        x if isinstance(x, str) else text for x in shapes for text in (described([x]) or ("",)) if text
    )
    return NpuError(
        cause.text or type(error).__name__,
        where=op,
        code=cause.code,
        codes=cause.codes,
        meaning=None if cause.meaning is None else cause.meaning.text,
        operands=operands,
        advice=cause.advice,
        is_late=queued and is_late(error),
        launch=operator_in(str(error)),
    )


def is_late(error: BaseException) -> bool:
    """Whether torch_npu reports a launch from before: from its queue, or found by a wait."""
    text = str(error)
    late = ("reported as above", "task queue stopped", "Synchronize", "synchronize", "called asynchronously")
    return any(mark in text for mark in late)


@contextlib.contextmanager
def npu_call(op: str, operands: Sequence[Any] = (), *, listen: bool = False) -> Iterator[None]:
    """Around a call of torch_npu: its errors are raised as `NpuError`, everything else passes.

    listen: also search what is written to stderr meanwhile; costs a thread, so it is for whole steps, not each launch.

    Raises:
        NpuError: torch_npu failed.
    """
    heard = _Listener() if listen else None
    try:
        with heard or contextlib.nullcontext():
            yield
    except Exception as error:
        if not is_from_npu(error):
            raise
        said = heard.text if heard is not None else None
        raise translate(error, op=op, shapes=operands, stderr=said) from error


NamedCall = tuple[str, Sequence[Any], Callable[[], Any]]
"""A call to run again: its op, its operands, and what runs it."""


def find_cause(calls: Iterable[NamedCall], synchronize: Callable[[], Any]) -> NpuError | None:
    """Run calls again one by one, waiting after each; the error of the first that fails, or None.

    ASCEND_LAUNCH_BLOCKING is read when torch_npu starts; waiting after every call does in a running process what it
    would have done. synchronize: waits for the device, such as `torch.npu.synchronize`.
    """
    for op, operands, run in calls:
        try:
            with npu_call(op, operands, listen=True):
                run()
                synchronize()
        except NpuError as error:
            error.is_late = False
            return error
    return None


_listening = threading.Lock()
"""File descriptor 2 belongs to the process: one call listens at a time, others meanwhile do without."""


class _Listener:
    """Keeps the beginning of what is written to stderr, by C++ too, while it passes everything on as it comes."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._thread: threading.Thread | None = None

    @property
    def text(self) -> str:
        """What was written."""
        return bytes(self._kept).decode(errors="replace")

    def __enter__(self) -> _Listener:
        if not _listening.acquire(blocking=False):
            return self
        self._real = os.dup(2)
        self._read, write = os.pipe()
        self._stop_read, self._stop_write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        self._thread = threading.Thread(target=self._pass_on, name="atbx-stderr", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        os.dup2(self._real, 2)
        # Not the end of the pipe but this byte ends the thread: a child process may hold the pipe open.
        os.write(self._stop_write, b".")
        self._thread.join()
        for fd in (self._real, self._read, self._stop_read, self._stop_write):
            os.close(fd)
        _listening.release()

    def _pass_on(self) -> None:
        left = 2 * KEPT_BYTES  # what a pipe can hold when it is told to stop, and room
        while left > 0:
            ready, _, _ = select.select([self._read, self._stop_read], [], [])
            if self._read not in ready:
                return
            data = os.read(self._read, KEPT_BYTES)
            if not data:
                return  # nobody holds the pipe any more
            self._kept += data[: max(0, KEPT_BYTES - len(self._kept))]
            if self._stop_read in ready:
                left -= len(data)
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._real, data) :]
