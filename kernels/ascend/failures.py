"""Failures of torch_npu while an executable runs: named by the op, and told in words by who registered to tell them.

A launch that is refused names its op at once. A fault on the device surfaces later, at a wait, and names the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Teller(Protocol):
    """Turns errors of torch_npu into errors of atbx."""

    def is_from_npu(self, error: BaseException) -> bool:
        """Whether torch_npu, or what lies below it, raised the error."""

    def translate(self, error: BaseException, *, op: str, shapes: Iterable[Any] = ()) -> Exception:
        """The error in words: cause, op, operands, code, advice."""


_tellers: list[Teller] = []


def set_teller(teller: Teller) -> None:
    """Name who tells failures; `atbx.compile` names `atbx.npu_errors`."""
    _tellers[:] = [teller]


def told(error: Exception, op: str, operands: Sequence[Any] = ()) -> Exception:
    """The error as it is to be raised."""
    teller = _tellers[0] if _tellers else None
    if teller is None or not teller.is_from_npu(error):
        return error
    return teller.translate(error, op=op, shapes=operands)
