"""Interned signatures: long descriptions that stand for themselves by identity.

A key of a variant holds one object per tree, arena, binding and static argument; comparing and hashing it then costs
the same whether it describes one tensor or a thousand.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any
from weakref import WeakValueDictionary

from atbx.core.exact import exact


class Interned:
    """A signature that is equal only to itself; `paths` name the leaves that it describes."""

    __slots__ = ("__weakref__", "paths", "value")

    def __init__(self, value: Any, paths: tuple[str, ...]) -> None:
        self.value, self.paths = value, paths


_interned: WeakValueDictionary[Hashable, Interned] = WeakValueDictionary()
_lock = threading.Lock()


def _intern(identity: Hashable, value: Any, paths: tuple[str, ...]) -> Interned:
    with _lock:
        found = _interned.get(identity)
        if found is None:
            found = _interned[identity] = Interned(value, paths)
        return found


def intern_signature(value: Hashable, paths: tuple[str, ...]) -> Interned:
    """The one `Interned` of this signature over leaves of these paths."""
    return _intern(("signature", value, paths), value, paths)


def intern_static(value: Any) -> Interned:
    """The one `Interned` of a static argument: values that compute the same share it (see `exact`)."""
    return _intern(("static", exact(value)), value, ())
