"""Reading a call: arguments to leaves, padded to their buckets, and to the key that names their variant.

This is the one place that decides sizes and keys, for calls, planning and warm-up alike; it runs on every step, so it
does nothing that a known structure has answered before.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from atbx.core import trees
from atbx.core.abstract import Abstract, Dim
from atbx.core.arena import ArenaValue, StagedArena, leaf_signature
from atbx.core.binding import DONATED, Binding, refuse_donated
from atbx.core.buckets import Bucket
from atbx.core.errors import BucketError, DonationError, StagingError, StaticArgumentError
from atbx.core.program import Var
from atbx.core.variants import Key

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, type)


class Interned:
    """A long signature that stands for itself by identity, so that comparing and hashing it cost nothing."""

    __slots__ = ("__weakref__", "paths", "value")

    def __init__(self, value: Hashable, paths: tuple[str, ...]) -> None:
        self.value, self.paths = value, paths


_interned: WeakValueDictionary[Hashable, Interned] = WeakValueDictionary()
_interning = threading.Lock()


def intern_signature(value: Hashable, paths: tuple[str, ...]) -> Interned:
    """The one `Interned` of this signature."""
    with _interning:
        found = _interned.get((value, paths))
        if found is None:
            found = _interned[value, paths] = Interned(value, paths)
        return found


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


@dataclass(frozen=True)
class Layout:
    """What is known of one argument's structure: full leaf paths, and (leaf index, axis, bucket) of padded axes."""

    paths: tuple[str, ...]
    padded: tuple[tuple[int, int, str], ...]


@dataclass
class Signature:
    """A function's parameters as `jit` sees them."""

    names: tuple[str, ...]
    function: Callable[..., Any]
    static: frozenset[str]
    donate: tuple[str, ...]
    buckets: dict[str, Bucket]
    mode: tuple[tuple[str, Hashable], ...]
    layouts: dict[tuple[str, trees.TreeDef], Layout] = field(default_factory=dict)
    checked: dict[int, Any] = field(default_factory=dict)

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
        return cls(names, function, frozenset(static), donate, buckets, mode)

    @functools.cached_property
    def python_signature(self) -> inspect.Signature:
        """The function's signature, for calls by keyword."""
        return inspect.signature(self.function)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults filled in."""
        if not kwargs and len(args) == len(self.names):
            return dict(zip(self.names, args, strict=True))
        try:
            bound = self.python_signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{getattr(self.function, '__name__', 'function')}: {error}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def check_static(self, name: str, value: Any) -> None:
        """`check_static`, once an object."""
        if self.checked.get(id(value)) is not value:
            check_static(value, name)
            if len(self.checked) > 1024:
                self.checked.clear()
            self.checked[id(value)] = value

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
            padded = []
            for tag, bucket in self.buckets.items():
                for path, axis in bucket.axes:
                    if path.split("/")[0] == name:
                        padded += [(index, axis, tag) for index in self._leaves_at(path, paths, tag)]
            found = self.layouts[name, treedef] = Layout(paths, tuple(padded))
        return found


@dataclass
class Group:
    """One dynamic argument: its structure and where its leaves stand among all (arenas counted once)."""

    name: str
    treedef: trees.TreeDef
    leaves: list[Any]
    layout: Layout


class Arguments:
    """A call that was read: its key, the values to run with, and what staging needs to rebuild the arguments."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.groups: list[Group] = []
        self.statics: dict[str, Any] = {}
        self.binding: Binding | None = None
        self.binding_name = ""
        self.sizes: dict[str, int] = {}
        self.values: list[Any] = []
        self.arenas: list[ArenaValue] = []
        self.key: Key

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Path of every leaf of the key; an arena is one."""
        return tuple(p for g in self.groups for p in g.layout.paths)

    def expanded(self) -> list[tuple[str, Any, list[tuple[int, str]], int | None, bool]]:
        """(path, leaf, [(axis, bucket)], arena index, donated) of every program input, arenas expanded."""
        found: list[tuple[str, Any, list[tuple[int, str]], int | None, bool]] = []
        arena_index = 0
        for group in self.groups:
            donated = group.name in self.signature.donate
            for index, leaf in enumerate(group.leaves):
                path = group.layout.paths[index]
                tags = [(axis, tag) for i, axis, tag in group.layout.padded if i == index]
                if isinstance(leaf, ArenaValue):
                    for inner, tensor in zip(leaf.arena.paths, leaf.arena.tensors, strict=True):
                        found.append((f"{path}/{inner}", tensor, [], arena_index, donated))
                    arena_index += 1
                else:
                    found.append((path, leaf, tags, None, donated))
        return found

    @functools.cached_property
    def abstracts(self) -> tuple[Abstract, ...]:
        """Every program input but the bound ones, bucketed sizes tagged."""
        found = []
        for _, leaf, tags, _, _ in self.expanded():
            shape: list[int] = list(leaf.shape)
            for axis, tag in tags:
                shape[axis] = Dim(shape[axis], tag)
            found.append(Abstract(tuple(shape), leaf.dtype))
        return tuple(found)

    @functools.cached_property
    def input_paths(self) -> tuple[str, ...]:
        """Path of every program input but the bound ones."""
        return tuple(path for path, *_ in self.expanded())

    @functools.cached_property
    def donated_indices(self) -> tuple[int, ...]:
        """Indices of the program inputs that belong to donated arguments."""
        return tuple(i for i, (*_, donated) in enumerate(self.expanded()) if donated)

    def is_donated_arena(self, index: int) -> bool:
        """Whether arena number `index` belongs to a donated argument."""
        return any(arena == index and donated for *_, arena, donated in self.expanded())

    def arena_inputs(self, inputs: Sequence[Var]) -> list[list[Var]]:
        """Program inputs of each arena."""
        found: list[list[Var]] = [[] for _ in self.arenas]
        for var, (_, _, _, arena, _) in zip(inputs, self.expanded(), strict=False):
            if arena is not None:
                found[arena].append(var)
        return found

    def bound_leaves(self) -> list[tuple[Abstract, str]]:
        """Abstract value and path of each bound parameter."""
        if self.binding is None:
            return []
        return list(zip(self.binding.abstracts, self.binding.paths, strict=True))

    def rebuild(self, inputs: Sequence[Any], bound: Sequence[Any]) -> dict[str, Any]:
        """The function's arguments with staged values for leaves."""
        args: dict[str, Any] = dict(self.statics)
        position = 0
        arena_index = 0
        for group in self.groups:
            leaves: list[Any] = []
            for leaf in group.leaves:
                if isinstance(leaf, ArenaValue):
                    count = len(leaf.arena.tensors)
                    tree = trees.unflatten(leaf.arena.treedef, inputs[position : position + count])
                    leaves.append(StagedArena(tree, arena_index))
                    arena_index += 1
                    position += count
                else:
                    leaves.append(inputs[position])
                    position += 1
            args[group.name] = trees.unflatten(group.treedef, leaves)
        if self.binding is not None:
            args[self.binding_name] = trees.unflatten(self.binding.treedef, bound)
        return args

    def take_donated(self, function: str) -> list[ArenaValue]:
        """Mark every donated value as used up; returns the donated arenas."""
        taken: list[ArenaValue] = []
        if not self.signature.donate:
            return taken
        owners: dict[int, str] = {}
        for group in self.groups:
            donated = group.name in self.signature.donate
            for leaf, path in zip(group.leaves, group.layout.paths, strict=True):
                identity = id(leaf.arena) if isinstance(leaf, ArenaValue) else leaf.data_ptr()
                if identity and identity in owners and (donated or owners[identity].startswith("!")):
                    raise DonationError(
                        "one buffer is passed at two leaves of a call that donates it",
                        where=f"{owners[identity].lstrip('!')} and {path}",
                        hint="Pass a copy at one of them",
                    )
                owners[identity] = f"!{path}" if donated else path
        for group in self.groups:
            if group.name not in self.signature.donate:
                continue
            for leaf, path in zip(group.leaves, group.layout.paths, strict=True):
                if isinstance(leaf, ArenaValue):
                    leaf.arena.generation += 1
                    taken.append(leaf)
                else:
                    setattr(leaf, DONATED, f"{path} of {function}")
        return taken

    @staticmethod
    def interrupt(donated: Sequence[ArenaValue]) -> None:
        """Mark donated arenas as half updated."""
        for value in donated:
            value.arena.interrupted = True


def _as_leaf(value: Any, path: str) -> Any:
    """A leaf as a tensor; Python numbers become scalars (bool, int64, float32)."""
    if isinstance(value, (torch.Tensor, Abstract, ArenaValue)):
        return value
    if isinstance(value, (bool, np.bool_)):
        return torch.tensor(bool(value))
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32)
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.asarray(value).copy())
    raise StagingError(
        "a dynamic argument holds something that is no tensor",
        where=path,
        found=type(value).__name__,
        hint="Name the argument in static=(...) if it is configuration",
    )


def _padded(tensor: Any, shape: Sequence[int]) -> Any:
    if isinstance(tensor, Abstract):
        return Abstract(tuple(shape), tensor.dtype)
    padded = tensor.new_zeros(tuple(shape))
    padded[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return padded


def read_arguments(signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Read one call.

    Raises:
        StaticArgumentError, BucketError, DonationError, StagingError: an argument does not fit.
    """
    call = Arguments(signature)
    counted: list[tuple[str, str]] = []
    for name, value in signature.arguments(args, kwargs).items():
        if name in signature.static:
            signature.check_static(name, value)
            call.statics[name] = value
        elif isinstance(value, Binding):
            if call.binding is not None:
                raise StagingError(
                    "a call takes one binding",
                    where=f"{call.binding_name} and {name}",
                    hint="Bind one tree of both",
                )
            call.binding, call.binding_name = value, name
        elif value is None and (tags := [t for t, b in signature.buckets.items() if b.count == name]):
            counted.append((name, tags[0]))
        else:
            _read_group(call, name, value)
    for name, tag in counted:
        _read_group(call, name, torch.tensor(call.sizes[tag], dtype=torch.int64))
    call.key = _key(call)
    return call


def _read_group(call: Arguments, name: str, value: Any) -> None:
    leaves, treedef = trees.flatten(value)
    layout = call.signature.layout(name, value, treedef)
    for index, leaf in enumerate(leaves):
        # Before the plain leaves of a cache: the arena knows best why a cache cannot be used.
        if isinstance(leaf, ArenaValue):
            leaf.check(layout.paths[index])
    for index, leaf in enumerate(leaves):
        if type(leaf) is not torch.Tensor:
            leaves[index] = _as_leaf(leaf, layout.paths[index])
        else:
            refuse_donated(leaf, layout.paths[index])
    for index, axis, tag in layout.padded:
        leaf = leaves[index]
        if axis >= len(leaf.shape):
            raise BucketError(
                f"bucket {tag!r} names axis {axis}",
                where=layout.paths[index],
                found=f"{len(leaf.shape)} axes",
            )
        real = int(leaf.shape[axis])
        if call.sizes.setdefault(tag, real) != real:
            raise BucketError(
                f"leaves disagree on the size of bucketed axis {tag!r}",
                where=layout.paths[index],
                expected=call.sizes[tag],
                found=real,
            )
        size = call.signature.buckets[tag].choose(real, tag)
        if size != real:
            shape = list(leaf.shape)
            shape[axis] = size
            leaves[index] = _padded(leaf, shape)
    for leaf in leaves:
        if isinstance(leaf, ArenaValue):
            call.arenas.append(leaf)
            call.values.extend(leaf.arena.tensors)
        else:
            call.values.append(leaf)
    call.groups.append(Group(name, treedef, leaves, layout))


def _key(call: Arguments) -> Key:
    leaves: list[Hashable] = []
    for group in call.groups:
        for leaf in group.leaves:
            if isinstance(leaf, ArenaValue):
                leaves.append(intern_signature(leaf.arena.signature, leaf.arena.paths))
            else:
                leaves.append(leaf_signature(leaf))
    params = None
    if call.binding is not None:
        params = intern_signature(call.binding.signature, call.binding.paths)
    structures = tuple((g.name, g.treedef) for g in call.groups)
    return Key(structures, tuple(leaves), params, tuple(call.statics.items()), call.signature.mode)
