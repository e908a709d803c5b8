"""Variants: compiled forms keyed by everything they assume, in a bounded cache that explains each miss as data.

A key is a handful of named components, so that a miss can say which component differs from the nearest variant, where,
and how.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from atbx.core import trees
from atbx.core.abstract import SHORT_DTYPES
from atbx.core.backend import Choice
from atbx.core.errors import FrozenCacheError
from atbx.core.exact import exact
from atbx.core.executable import Executable, Lowered
from atbx.core.interning import Interned
from atbx.core.program import Program
from atbx.core.rewrite import Applied

LEAF_COMPONENTS = ("shape", "dtype", "device", "layout")


class Key(NamedTuple):
    """What a variant assumes, by component.

    structures: (argument, tree structure) for every dynamic argument, interned.
    leaves:     signature of each leaf (shape, dtype, device, contiguous); an arena's are one, interned.
    params:     name of the bound argument and the binding's signature, interned; None without a binding.
    statics:    name of every static argument and its value, interned.
    mode:       (name, value) of what holds for the whole function: backend, numerics, fallback.
    """

    structures: tuple[Interned, ...]
    leaves: tuple[Hashable, ...]
    params: tuple[str, Interned] | None
    statics: tuple[tuple[str, Interned], ...]
    mode: tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True)
class Difference:
    """One component in which a call differs from a cached variant."""

    component: str
    where: str
    found: str
    cached: str

    def __str__(self) -> str:
        return f"{self.component} of {self.where}: {self.found} here, {self.cached} in the variant"


@dataclass(eq=False)
class Variant:
    """A compiled form: its key, leaf paths, programs, lowered calls, and what it cost and served."""

    key: Key
    paths: tuple[str, ...]
    program: Program
    fused: Program
    fusions: tuple[Applied, ...]
    lowered: Lowered
    compile_seconds: float
    outputs: Any
    hits: int = 0
    executables: WeakKeyDictionary[Any, Executable] = field(default_factory=WeakKeyDictionary)
    unbound: Executable | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Kernel of each equation of the step."""
        return self.lowered.choices

    @property
    def name(self) -> str:
        """The key in short: shapes of the dynamic leaves that are no arena."""
        return describe_key(self.key, self.paths)


def describe_key(key: Key, paths: Iterable[str]) -> str:
    """A key in one line: the leaves and static values."""
    parts = []
    for path, leaf in zip(paths, key.leaves, strict=True):
        if isinstance(leaf, tuple) and len(leaf) == 4 and not isinstance(leaf[0], str):
            parts.append(f"{path}:{_leaf_text(leaf)}")
    fixed = [f"{name}={value}" for name, value in structure_statics(key)]
    return " ".join(parts + fixed)


def structure_statics(key: Key) -> Iterator[tuple[str, Hashable]]:
    """Static fields of arguments that are dataclass nodes and plain numbers, such as a cache's extent."""
    for argument, treedef in (token.value for token in key.structures):
        if treedef.type is not None and dataclasses.is_dataclass(treedef.type):
            for name, value in _static_fields(treedef):
                if isinstance(value, int):
                    yield f"{argument}.{name}", value


def _leaf_text(leaf: Any) -> str:
    shape, dtype = leaf[0], leaf[1]
    return f"{SHORT_DTYPES.get(dtype, str(dtype))}{list(map(int, shape))}"


def differences(key: Key, paths: tuple[str, ...], cached: Variant) -> tuple[Difference, ...]:
    """Every component in which `key` differs from a cached variant."""
    found: list[Difference] = []
    other = cached.key
    for (name, value), (_, old) in zip(key.mode, other.mode, strict=True):
        if value != old:
            found.append(Difference(name, "the function", str(value), str(old)))
    for (name, value), (_, old) in zip(key.statics, other.statics, strict=True):
        if value is not old:
            found += _static_differences(name, value.value, old.value)
    structures = {token.value[0]: token for token in key.structures}
    olds = {token.value[0]: token for token in other.structures}
    # An argument that is bound in one call and a plain tree in the other is told by the binding, below.
    for name in structures.keys() & olds.keys():
        if structures[name] is not olds[name]:
            found += _structure_differences(name, structures[name], olds[name])
    cached_leaves = dict(zip(cached.paths, other.leaves, strict=True))
    for path, leaf in zip(paths, key.leaves, strict=True):
        if path in cached_leaves:
            found += _leaf_differences(path, leaf, cached_leaves[path])
    if key.params != other.params:
        found += _param_differences(key.params, other.params)
    return tuple(found)


def _static_differences(name: str, value: Any, old: Any) -> list[Difference]:
    if dataclasses.is_dataclass(value) and type(value) is type(old):
        inner: list[Difference] = []
        for f in dataclasses.fields(value):
            a, b = getattr(value, f.name), getattr(old, f.name)
            if f.compare and exact(a) != exact(b):
                inner += _static_differences(f"{name}.{f.name}", a, b)
        return inner
    return [Difference("static argument", name, repr(value), repr(old))]


def _path_differences(name: str, paths: tuple[str, ...], olds: tuple[str, ...]) -> Difference | None:
    """How two trees differ, told by the leaves that one of them lacks; None where their paths are the same."""
    added, gone = [p for p in paths if p not in set(olds)], [p for p in olds if p not in set(paths)]
    if not added and not gone:
        return None
    return Difference(
        "tree structure", name, ", ".join(added) or "no leaf more", ", ".join(gone) or "no leaf more"
    )


def _structure_differences(name: str, token: Interned, cached: Interned) -> list[Difference]:
    treedef, old = token.value[1], cached.value[1]
    fields = []
    if treedef.type is not None and treedef.type is old.type and dataclasses.is_dataclass(treedef.type):
        fields = [
            Difference("static field", f"{name}.{field_name}", repr(a), repr(b))
            for (field_name, a), (_, b) in zip(_static_fields(treedef), _static_fields(old), strict=True)
            if a != b
        ]
    by_path = _path_differences(name, token.paths, cached.paths)
    found = [*fields, *([by_path] if by_path else [])]
    return found or [Difference("tree structure", name, str(treedef), str(old))]


def _static_fields(treedef: Any) -> tuple[tuple[str, Any], ...]:
    # A node's metadata is reached through a rebuilt value: the one way that every optree release documents.
    value = trees.unflatten(treedef, [None] * treedef.num_leaves)
    return tuple(
        (f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.metadata.get("static")
    )


def _leaf_differences(path: str, leaf: Any, old: Any) -> list[Difference]:
    if leaf == old:
        return []
    if not (isinstance(leaf, tuple) and isinstance(old, tuple)):
        return _arena_differences(path, leaf, old)
    return [
        Difference(component, path, str(a), str(b))
        for component, a, b in zip(LEAF_COMPONENTS, leaf, old, strict=True)
        if a != b
    ]


def _arena_differences(path: str, arena: Any, old: Any) -> list[Difference]:
    if isinstance(arena, tuple) or isinstance(old, tuple):
        kinds = ["a tensor" if isinstance(x, tuple) else "a cache" for x in (arena, old)]
        return [Difference("tree structure", path, *kinds)]
    by_path = _path_differences(path, arena.paths, old.paths)
    if by_path is not None:
        return [by_path]
    return [
        difference
        for inner, leaf, before in zip(arena.paths, arena.value, old.value, strict=True)
        for difference in _leaf_differences(f"{path}/{inner}", leaf, before)
    ]


def _param_differences(
    params: tuple[str, Interned] | None, old: tuple[str, Interned] | None
) -> list[Difference]:
    if params is None or old is None or params[0] != old[0]:
        name = params[0] if params else old[0] if old else ""
        here, there = ("not bound" if p is None or p[0] != name else "bound" for p in (params, old))
        return [Difference("binding", name, here, there)]
    name, token, cached = params[0], params[1], old[1]
    by_path = _path_differences(name, token.paths, cached.paths)
    if by_path is not None:
        return [by_path]
    if token.value[0] != cached.value[0]:
        return [Difference("tree structure", name, str(token.value[0]), str(cached.value[0]))]
    return [
        Difference(component, f"{name}/{path}", str(a), str(b))
        for path, new, before in zip(token.paths, token.value[1], cached.value[1], strict=True)
        for component, a, b in zip(("shape", "dtype", "device"), new, before, strict=True)
        if a != b
    ]


@dataclass(frozen=True)
class Miss:
    """Why a call has no variant: the nearest cached one and every difference from it; None where there is none."""

    nearest: Variant | None
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        if self.nearest is None:
            return "no variant is cached"
        return f"nearest variant {self.nearest.name}; differs in " + "; ".join(map(str, self.differences))


@dataclass(frozen=True)
class CacheInfo:
    """What a variant cache holds and has done. Seconds are of staging, fusing and lowering."""

    variants: int
    capacity: int
    hits: int
    misses: int
    evictions: int
    frozen: bool
    compile_seconds: float
    workspace_bytes: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        head = (
            f"{self.variants} variants (at most {self.capacity}{', frozen' if self.frozen else ''}), "
            f"{self.hits} hits, {self.misses} misses, {self.evictions} evicted, "
            f"{self.compile_seconds:.2f} s compiling, {self.workspace_bytes} bytes of workspace"
        )
        return "\n".join([head, *(f"  {name}" for name in self.names)])


class VariantCache:
    """Variants by key, least recently used evicted past `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.frozen = False
        self.hits = self.misses = self.evictions = 0
        self.compile_seconds = 0.0
        self._variants: OrderedDict[Key, Variant] = OrderedDict()

    def __len__(self) -> int:
        return len(self._variants)

    def __iter__(self) -> Iterator[Variant]:
        return iter(tuple(self._variants.values()))

    def __contains__(self, key: Key) -> bool:
        return key in self._variants

    def get(self, key: Key) -> Variant | None:
        """The variant of `key`, counted as a hit."""
        variant = self._variants.get(key)
        if variant is not None:
            self.hits += 1
            variant.hits += 1
            self._variants.move_to_end(key)
        return variant

    def peek(self, key: Key) -> Variant | None:
        """The variant of `key`, not counted."""
        return self._variants.get(key)

    def put(self, variant: Variant) -> None:
        """Enter a variant; evict the least recently used past the capacity."""
        self.misses += 1
        self.compile_seconds += variant.compile_seconds
        self._variants[variant.key] = variant
        while len(self._variants) > self.capacity:
            self._variants.popitem(last=False)
            self.evictions += 1

    def explain_miss(self, key: Key, paths: tuple[str, ...]) -> Miss:
        """The nearest cached variant, and how `key` differs from it."""
        best: Miss | None = None
        for variant in reversed(self._variants.values()):
            found = differences(key, paths, variant)
            if best is None or len(found) < len(best.differences):
                best = Miss(variant, found)
        return best or Miss(None, ())

    def refuse_if_frozen(self, key: Key, paths: tuple[str, ...], function: str) -> None:
        """Raise FrozenCacheError if the cache is frozen: the caller is about to compile `key`."""
        if self.frozen:
            raise FrozenCacheError(
                f"the variant cache of {function} is frozen and has no variant for {describe_key(key, paths)}",
                found=str(self.explain_miss(key, paths)),
                hint="Plan and warm this shape before freezing, or call unfreeze()",
            )

    def clear(self) -> None:
        """Forget every variant; counters stay."""
        self._variants.clear()

    def info(self) -> CacheInfo:
        """Counters and names."""
        variants = list(self._variants.values())
        return CacheInfo(
            len(variants),
            self.capacity,
            self.hits,
            self.misses,
            self.evictions,
            self.frozen,
            self.compile_seconds,
            sum(v.lowered.memory.size for v in variants),
            tuple(v.name for v in variants),
        )
