"""A compiled function's parameters: which are static, donated or bucketed, and what each argument's structure means.

Everything that only the options or the structure of an argument decide is worked out here, once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from atbx.core import trees
from atbx.core.buckets import Bucket
from atbx.core.errors import BucketError, DonationError, StagingError, StaticArgumentError
from atbx.core.interning import Interned, intern_signature
from atbx.core.statics import StaticTokens

REMEMBERED = 1024
"""Argument structures whose layout is remembered."""


@dataclass(frozen=True)
class Layout:
    """What is known of one argument's structure.

    paths:  full path of each leaf.
    padded: (leaf index, axis, bucket) of each padded axis.
    counts: (leaf index, bucket) of each leaf that counts the real entries of a bucketed axis.
    token:  stands for (argument, tree structure) in a key.
    """

    paths: tuple[str, ...]
    padded: tuple[tuple[int, int, str], ...]
    counts: tuple[tuple[int, str], ...]
    token: Interned


@dataclass
class Signature:
    """A function's parameters as `jit` sees them."""

    names: tuple[str, ...]
    function: Callable[..., Any]
    static: frozenset[str]
    donate: tuple[str, ...]
    buckets: dict[str, Bucket]
    mode: tuple[tuple[str, Hashable], ...]
    positional_only: int
    keyword_only: int
    chosen: dict[tuple[str, int], int] = field(default_factory=dict)
    layouts: dict[tuple[str, trees.TreeDef], Layout] = field(default_factory=dict)
    tokens: StaticTokens = field(default_factory=StaticTokens)

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        static: tuple[str, ...],
        donate: tuple[str, ...],
        buckets: dict[str, Bucket],
        mode: tuple[tuple[str, Hashable], ...],
    ) -> Signature:
        """Read `function`'s parameters and check the options against them."""
        parameters = inspect.signature(function).parameters
        for name, parameter in parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise StagingError(f"jit needs a fixed list of arguments; {name!r} collects any number")
        names = tuple(parameters)
        for option, values in (("static", static), ("donate", donate)):
            for value in values:
                if value not in names:
                    raise StaticArgumentError(
                        f"{option} names no argument of the function",
                        expected=f"one of {names}",
                        found=repr(value),
                    )
        if set(static) & set(donate):
            raise DonationError(
                "an argument cannot be static and donated", found=sorted(set(static) & set(donate))
            )
        for tag, bucket in buckets.items():
            for path, _ in bucket.axes:
                if path.split("/")[0] not in names or path.split("/")[0] in static:
                    raise BucketError(
                        f"bucket {tag!r} names no dynamic argument", expected=f"one of {names}", found=path
                    )
            if bucket.count is not None and bucket.count.split("/")[0] not in names:
                raise BucketError(
                    f"bucket {tag!r} names no argument as its count", expected=names, found=bucket.count
                )
        kinds = [parameter.kind for parameter in parameters.values()]
        positional_only = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
        keyword_only = kinds.count(inspect.Parameter.KEYWORD_ONLY)
        return cls(names, function, frozenset(static), donate, buckets, mode, positional_only, keyword_only)

    def call_function(self, arguments: dict[str, Any]) -> Any:
        """The function of these arguments, each passed the way its kind asks for."""
        first = [arguments[name] for name in self.names[: self.positional_only]]
        rest = {name: arguments[name] for name in self.names[self.positional_only :]}
        return self.function(*first, **rest)

    @functools.cached_property
    def python_signature(self) -> inspect.Signature:
        """The function's signature, for calls by keyword."""
        return inspect.signature(self.function)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults filled in."""
        if not kwargs and len(args) == len(self.names) and not self.keyword_only:
            return dict(zip(self.names, args, strict=True))
        try:
            bound = self.python_signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{getattr(self.function, '__name__', 'function')}: {error}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    @staticmethod
    def _leaves_at(path: str, paths: tuple[str, ...], tag: str) -> list[int]:
        """Indices of the leaves that a bucket's path names: one, or with `argument/*` all that there are."""
        if path.endswith("/*"):
            return [i for i, p in enumerate(paths) if p.startswith(path[:-1])]
        if not paths:
            return []  # the argument was given as None
        if path not in paths:
            raise BucketError(
                f"bucket {tag!r} names a leaf that the call does not have", expected=paths, found=path
            )
        return [paths.index(path)]

    def layout(self, name: str, value: Any, treedef: trees.TreeDef) -> Layout:
        """The layout of an argument of this structure."""
        found = self.layouts.get((name, treedef))
        if found is None:
            inner = trees.flatten_with_paths(value)[0]
            paths = tuple(f"{name}/{p}" if p else name for p in inner)
            counts = [(paths.index(b.count), tag) for tag, b in self.buckets.items() if b.count in paths]
            padded = []
            for tag, bucket in self.buckets.items():
                for path, axis in bucket.axes:
                    if path.split("/")[0] == name:
                        padded += [(index, axis, tag) for index in self._leaves_at(path, paths, tag)]
            token = intern_signature((name, treedef), paths)
            if len(self.layouts) >= REMEMBERED:
                self.layouts.clear()
            found = self.layouts[name, treedef] = Layout(paths, tuple(padded), tuple(counts), token)
        return found
