"""Static arguments: configuration that becomes part of a variant's key.

They must be frozen all through, because a value that changes after the call would give stale results, and they are
looked up by value. Both are worked out once an object.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

import torch

from atbx.core.errors import StaticArgumentError
from atbx.core.interning import Interned, intern_static

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, type)

REMEMBERED = 1024
"""Objects whose check is remembered; a function of more distinct configurations checks anew."""


def check_static(value: Any, path: str) -> None:
    """Raise StaticArgumentError unless `value` is frozen all through, hashable, and compared by value."""
    if isinstance(value, PLAIN):
        return
    if isinstance(value, (tuple, frozenset)):
        for index, item in enumerate(value):
            check_static(item, f"{path}/{index}")
        return
    params: Any = getattr(value, "__dataclass_params__", None)
    if dataclasses.is_dataclass(value) and params.frozen:
        if not params.eq:
            raise StaticArgumentError(
                "a static argument must compare by value",
                where=path,
                found=f"{type(value).__name__} with eq=False",
            )
        for f in dataclasses.fields(value):
            check_static(getattr(value, f.name), f"{path}.{f.name}")
        return
    if inspect.isfunction(value) or inspect.isbuiltin(value):
        return
    raise StaticArgumentError(
        "a static argument must be frozen and hashable",
        where=path,
        expected="numbers, strings, tuples, frozen dataclasses, functions",
        found=type(value).__name__,
        hint="A value that can change after the call would give stale results",
    )


class StaticTokens:
    """Tokens of static arguments, checked and interned once an object."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Interned]] = {}

    def token(self, name: str, value: Any) -> Interned:
        """The token of argument `name`; StaticArgumentError if its value is not frozen."""
        known = self._known.get(id(value))
        # The object is kept beside its token, so its id stays its own.
        if known is not None and known[0] is value:
            return known[1]
        check_static(value, name)
        token = intern_static(value)
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[id(value)] = value, token
        return token
