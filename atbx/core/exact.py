"""Exact keys: what tells apart values that Python calls equal but that compute differently.

`1 == True == 1.0` and `0.0 == -0.0` hold, yet a function staged with one of them is not the function staged with the
other; and `nan != nan`, yet it is the same constant. Everything that is shared or looked up by value uses these keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from atbx.core.abstract import Dim


def exact(value: Any) -> Hashable:
    """A key that is equal only for values of one type that compute the same."""
    if isinstance(value, Dim):
        return Dim, int(value), value.tag
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)):
        return type(value), *map(exact, value)
    if isinstance(value, frozenset):
        return type(value), frozenset(map(exact, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((f.name, exact(getattr(value, f.name))) for f in dataclasses.fields(value) if f.compare)
        return type(value), *parts
    return type(value), value


def exact_params(params: Mapping[str, Any]) -> Hashable:
    """The key of an equation's params."""
    return tuple((name, exact(params[name])) for name in sorted(params))
