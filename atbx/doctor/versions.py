"""Versions as the Ascend stack writes them, and their order.

One grammar reads all of them: CANN (8.5.0, 8.2.RC1, 8.2.RC1.alpha003, 9.0.0-beta.1, 8.0.T63.B020), drivers
(25.0.rc1.1), firmware (7.7.0.1.231), torch and torch_npu (2.9.0.post2, 2.13.0+cpu). Before a release stand its alpha
and beta builds, test builds (T) and release candidates, in that order; a post-release comes after it. Build marks
(.B020, +cpu) do not count.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from atbx.core.errors import OptionError

_GRAMMAR = re.compile(
    r"v?(?P<numbers>\d+(?:\.\d+)*)"
    r"(?:[.-]?(?P<stage>rc|t|beta)\.?(?P<count>\d+)(?:\.(?P<patch>\d+))?)?"
    r"(?:[.-]?alpha\.?(?P<alpha>\d+))?"
    r"(?:[.-]?post\.?(?P<post>\d+))?"
    r"(?:[.-]?dev\d*)?(?:\.b\d+)?(?:\+\S*)?",
    re.IGNORECASE,
)
_ALPHA, _BETA, _TEST, _CANDIDATE, _RELEASE = range(5)
_STAGES = {"beta": _BETA, "t": _TEST, "rc": _CANDIDATE}
_NO_ALPHA = 10**6
"""An alpha of something comes before the thing itself."""


@functools.total_ordering
@dataclass(frozen=True, eq=False)
class Version:
    """A version: its text, its numbers (three at least), and the key that orders it."""

    text: str
    numbers: tuple[int, ...]
    key: tuple[tuple[int, ...], int, int, int, int, int]

    @property
    def series(self) -> tuple[int, int]:
        """Major and minor: 8.5.1 and 8.5.0.alpha003 are of one series."""
        return self.numbers[0], self.numbers[1]

    @property
    def base(self) -> str:
        """Major, minor and patch as text: of 2.9.0.post2 it is 2.9.0."""
        return ".".join(map(str, self.numbers[:3]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.key == other.key

    def __lt__(self, other: Version) -> bool:
        return self.key < other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Version:
    """The version that a text writes.

    Raises:
        OptionError: it is no version.
    """
    found = _GRAMMAR.fullmatch(text.strip())
    if found is None:
        raise OptionError(
            "this is no version", expected="such as 8.5.0, 8.2.RC1 or 2.9.0.post2", found=repr(text)
        )
    numbers = tuple(int(n) for n in found["numbers"].split("."))
    numbers += (0,) * (3 - len(numbers))
    if found["stage"]:
        stage = _STAGES[found["stage"].lower()]
    else:
        stage = _ALPHA if found["alpha"] else _RELEASE
    alpha = int(found["alpha"]) if found["alpha"] else _NO_ALPHA
    key = (numbers, stage, int(found["count"] or 0), int(found["patch"] or 0), alpha, int(found["post"] or 0))
    return Version(text.strip(), numbers, key)


def parsed(text: str | None) -> Version | None:
    """The version that a file gives, or None where it gives none that can be read."""
    if text is None:
        return None
    try:
        return parse(text)
    except OptionError:
        return None
