"""What the doctor says: findings, each with what is wrong, where, what it breaks, and the command that mends it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """How bad; the worst one is the exit code of `atbx doctor`."""

    NOTE = 0
    WARNING = 1
    ERROR = 2

    @property
    def word(self) -> str:
        """error, warning, note."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    id: a stable name, as `torch_npu.without_cann`. where: the file, folder, variable or package. breaks: what goes
    wrong because of it, in one sentence. mend: a command, or None where nothing needs mending.
    """

    id: str
    severity: Severity
    what: str
    where: str
    breaks: str
    expected: str | None = None
    found: str | None = None
    mend: str | None = None

    def as_data(self) -> dict[str, Any]:
        """For JSON; the severity as a word."""
        return {**asdict(self), "severity": self.severity.word}


def error(id: str, what: str, where: str, breaks: str, **parts: str | None) -> Finding:
    """Something that will not work."""
    return Finding(id, Severity.ERROR, what, where, breaks, **parts)


def warning(id: str, what: str, where: str, breaks: str, **parts: str | None) -> Finding:
    """Something that works in part, slowly, or by luck."""
    return Finding(id, Severity.WARNING, what, where, breaks, **parts)


def note(id: str, what: str, where: str, breaks: str = "nothing", **parts: str | None) -> Finding:
    """Something to know."""
    return Finding(id, Severity.NOTE, what, where, breaks, **parts)
