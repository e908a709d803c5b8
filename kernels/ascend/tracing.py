"""Named ranges around launches, so that a profile of torch_npu or msprof lines up with `atbx explain`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from atbx.kernels.ascend.runtime import npu_module

_is_on: ContextVar[bool] = ContextVar("atbx_ranges", default=False)


@contextmanager
def ranges() -> Iterator[None]:
    """Mark each equation's launches with an mstx range inside this block; off otherwise, for it costs host time."""
    token = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(token)


def span(name: str) -> Any:
    """The range of one equation, where ranges are on."""
    return _range(name) if _is_on.get() else nullcontext()


@contextmanager
def _range(name: str) -> Iterator[None]:
    npu = npu_module()
    mstx = npu.mstx
    number = mstx.range_start(name, npu.current_stream())
    try:
        yield
    finally:
        mstx.range_end(number)
