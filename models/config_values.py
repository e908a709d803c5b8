"""Reads the values of a foreign model description one by one, and refuses what nobody has read.

A value that changes the computation must never be passed over in silence. So each value that is used is asked for by
name and type, and at the end every other value that could matter (by the words in its name) must be inert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from atbx.core.errors import CheckpointError, UnsupportedError

_REQUIRED = object()
Thing = TypeVar("Thing")


class Values:
    """The values of a description. `where` names it in errors; `place` is put before each key."""

    def __init__(self, values: Mapping[str, Any], where: str, place: str = "") -> None:
        self.values, self.where, self.place = values, where, place
        self.read: set[str] = set()

    def malformed(self, key: str, expected: str, found: object) -> CheckpointError:
        """The error for a value of the wrong kind."""
        return CheckpointError(
            f"{self.place}{key} is malformed", where=self.where, expected=expected, found=repr(found)[:80]
        )

    def unsupported(self, key: str, expected: str, found: object) -> UnsupportedError:
        """The error for a value that is valid elsewhere."""
        return UnsupportedError(
            f"{self.place}{key} is not supported", where=self.where, expected=expected, found=repr(found)[:80]
        )

    def has(self, key: str) -> bool:
        """Whether a key is there with a value that is not null."""
        return self.values.get(key) is not None

    def any(self, key: str, default: Any = _REQUIRED) -> Any:
        """A value of any kind; null counts as absent."""
        self.read.add(key)
        found = self.values.get(key)
        if found is not None:
            return found
        if default is _REQUIRED:
            raise CheckpointError(f"{self.place}{key} is missing", where=self.where, expected="a value")
        return default

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        """A positive whole number."""
        found = self.any(key, default)
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 1 << 31:
            raise self.malformed(key, "a positive whole number", found)
        return found

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive finite number."""
        found = self.any(key, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
            raise self.malformed(key, "a positive number", found)
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or False."""
        found = self.any(key, default)
        if not isinstance(found, bool):
            raise self.malformed(key, "true or false", found)
        return found

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """A text."""
        found = self.any(key, default)
        if not isinstance(found, str):
            raise self.malformed(key, "a text", found)
        return found

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        found = self.any(key)
        if (
            not isinstance(found, (list, tuple))
            or len(found) != length
            or not all(type(v) in (int, float) and 0 < v < math.inf for v in found)
        ):
            raise self.malformed(key, f"a list of {length} positive numbers", found)
        return tuple(float(v) for v in found)

    def built(self, kind: Callable[..., Thing], **fields: Any) -> Thing:
        """`kind(**fields)`; a ValueError of its own checks becomes one that names this description."""
        try:
            return kind(**fields)
        except ValueError as error:
            raise CheckpointError(f"the values contradict each other: {error}", where=self.where) from error

    def refuse_unread(self, harmless: Iterable[str], suspicious: re.Pattern[str]) -> None:
        """Raise for a key that was not read, is not harmless, matches `suspicious`, and has a value that is not inert.

        None, False, zero and empty values are inert.
        """
        harmless = set(harmless)
        for key, value in self.values.items():
            if key in self.read or key in harmless or not suspicious.search(key):
                continue
            if value:
                raise UnsupportedError(
                    f"{self.place}{key} may change the computation, and is not supported",
                    where=self.where,
                    expected="no such key, or null",
                    found=repr(value)[:80],
                )
