"""Reading a call: arguments to leaves, padded to their buckets, and to the key that names their variant.

This is the one place that decides sizes and keys, for calls, planning and warm-up alike; it runs on every step, so it
does nothing that a known structure has answered before.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from atbx.core import trees
from atbx.core.abstract import Abstract, Dim
from atbx.core.arena import ArenaValue, StagedArena, leaf_signature
from atbx.core.binding import Binding
from atbx.core.call_signature import Layout, Signature
from atbx.core.donation import mark_donated, refuse_donated, refuse_pair, refuse_shared_buffers, taking
from atbx.core.errors import BucketError, DonationError, DTypeError, StagingError
from atbx.core.interning import Interned
from atbx.core.program import Var
from atbx.core.variants import Key


@dataclass
class Group:
    """One dynamic argument: its structure, its leaves as the program reads them, and as the caller gave them."""

    name: str
    treedef: trees.TreeDef
    leaves: list[Any]
    given: list[Any]
    layout: Layout


class Arguments:
    """A call that was read: its key, the values to run with, and what staging needs to rebuild the arguments."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.groups: list[Group] = []
        self.statics: dict[str, Any] = {}
        self.tokens: list[tuple[str, Interned]] = []
        self.abstract_path: str | None = None
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

    @functools.cached_property
    def host_indices(self) -> tuple[int, ...]:
        """Indices of the program inputs that are plain tensors in host memory."""
        return tuple(
            i
            for i, (_, leaf, _, arena, _) in enumerate(self.expanded())
            if arena is None and (leaf.device if isinstance(leaf, Abstract) else leaf.device.type) == "cpu"
        )

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
        """Mark every donated value as used up; returns the donated arenas.

        Raises:
            DonationError: a value was donated before, or shares memory with another leaf; nothing is marked then.
        """
        if not self.signature.donate:
            return []
        taken: list[tuple[ArenaValue, str]] = []
        plain: list[tuple[torch.Tensor, str, bool]] = []
        arenas: dict[int, str] = {}
        for group in self.groups:
            is_donated = group.name in self.signature.donate
            for leaf, path in zip(group.given, group.layout.paths, strict=True):
                if type(leaf) is not ArenaValue:
                    plain.append((leaf, path, is_donated))
                    continue
                if id(leaf.arena) in arenas:
                    refuse_pair(arenas[id(leaf.arena)], path)
                arenas[id(leaf.arena)] = path
                if is_donated:
                    taken.append((leaf, path))
        owners = [(path, value.arena.addresses) for value, path in taken]
        if self.binding is not None:
            owners.append((self.binding_name, self.binding.addresses))
        refuse_shared_buffers(plain, owners)
        # Two threads may both have read this call's values as current: the check that counts is made here.
        with taking:
            for value, path in taken:
                value.check(path)
            donated = [(tensor, path) for tensor, path, is_donated in plain if is_donated]
            for tensor, path in donated:
                refuse_donated(tensor, path)
            for value, _ in taken:
                value.arena.generation += 1
            for tensor, path in donated:
                mark_donated(tensor, f"{path} of {function}")
        return [value for value, _ in taken]

    def refuse_other_devices(self, allowed: Sequence[str]) -> None:
        """Raise StagingError unless every tensor is on a kind of device that the backend accepts."""
        leaves = [(path, leaf) for path, leaf, *_ in self.expanded()]
        if self.binding is not None:
            leaves += [
                (f"{self.binding_name}/{p}", t)
                for p, t in zip(self.binding.paths, self.binding.leaves, strict=True)
            ]
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type not in allowed:
                raise StagingError(
                    "a tensor is not on the device of the backend",
                    where=path,
                    expected=" or ".join(allowed),
                    found=leaf.device.type,
                )

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
    try:
        if isinstance(value, (np.ndarray, np.generic)):
            return torch.from_numpy(np.asarray(value).copy())
        if isinstance(value, int):
            return torch.tensor(value, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = value.dtype if isinstance(value, (np.ndarray, np.generic)) else value
        raise DTypeError("a dynamic argument fits no torch dtype", where=path, found=kind) from error
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32)
    raise StagingError(
        "a dynamic argument holds something that is no tensor",
        where=path,
        found=type(value).__name__,
        hint="Name the argument in static=(...) if it is configuration",
    )


def _padded(tensor: Any, shape: Sequence[int]) -> Any:
    if isinstance(tensor, Abstract):
        return replace(tensor, shape=tuple(shape))
    padded = tensor.new_zeros(tuple(shape))
    padded[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return padded


def read_arguments(signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Read one call.

    Raises:
        StaticArgumentError, BucketError, DonationError, StagingError: an argument does not fit.
    """
    call = Arguments(signature)
    counted: list[tuple[str, list[str]]] = []
    for name, value in signature.arguments(args, kwargs).items():
        if name in signature.static:
            call.tokens.append((name, signature.tokens.token(name, value)))
            call.statics[name] = value
        elif isinstance(value, Binding):
            _read_binding(call, name, value)
        elif value is None and (tags := [t for t, b in signature.buckets.items() if b.count == name]):
            counted.append((name, tags))
        else:
            _read_group(call, name, value)
    for name, tags in counted:
        _read_group(call, name, torch.tensor(_real_size(call, name, tags), dtype=torch.int64))
    for group in call.groups:
        for index, tag in group.layout.counts:
            _check_count(call, group.given[index], tag, group.layout.paths[index])
    call.key = _key(call)
    return call


def _check_count(call: Arguments, count: Any, tag: str, path: str) -> None:
    """Raise BucketError if a count on the host exceeds the real size of its axis: padding would pass as real."""
    is_known = isinstance(count, torch.Tensor) and count.device.type == "cpu" and count.numel()
    # Through a list: a reduction by torch costs several times as much for the few counts that there are.
    if is_known and tag in call.sizes and (most := max(count.flatten().tolist())) > call.sizes[tag]:
        raise BucketError(
            f"a count of bucketed axis {tag!r} exceeds its size",
            where=path,
            expected=f"at most {call.sizes[tag]}",
            found=most,
        )


def _read_binding(call: Arguments, name: str, binding: Binding) -> None:
    if call.binding is not None:
        raise StagingError(
            "a call takes one binding",
            where=f"{call.binding_name} and {name}",
            hint="Bind one tree of both",
        )
    if name in call.signature.donate:
        raise DonationError("bound parameters cannot be donated", where=name)
    call.binding, call.binding_name = binding, name


def _real_size(call: Arguments, name: str, tags: Sequence[str]) -> int:
    """The count that stands for a count argument left out."""
    sizes = {tag: call.sizes[tag] for tag in tags if tag in call.sizes}
    if len(set(sizes.values())) != 1:
        raise BucketError(
            f"count argument {name!r} is None, and the axes that it counts do not tell it",
            where=name,
            expected=f"one size of {', '.join(map(repr, tags))}",
            found=sizes or "none of their arguments",
        )
    return next(iter(sizes.values()))


def _read_group(call: Arguments, name: str, value: Any) -> None:
    leaves, treedef = trees.flatten(value)
    layout = call.signature.layout(name, value, treedef)
    arenas = [
        (leaf, path) for leaf, path in zip(leaves, layout.paths, strict=True) if type(leaf) is ArenaValue
    ]
    # Before the plain leaves of a cache: the arena knows best why a cache cannot be used.
    for arena, path in arenas:
        arena.check(path)
        call.arenas.append(arena)
        if arena.arena.is_abstract:
            call.abstract_path = path
    for index, leaf in enumerate(leaves):
        if type(leaf) is not torch.Tensor and type(leaf) is not ArenaValue:
            leaves[index] = leaf = _as_leaf(leaf, layout.paths[index])
            if isinstance(leaf, Abstract):
                call.abstract_path = layout.paths[index]
        refuse_donated(leaf, layout.paths[index])
    given = leaves
    if layout.padded:
        leaves = _pad(call, leaves, layout)
    if arenas:
        for leaf in leaves:
            if type(leaf) is ArenaValue:
                call.values.extend(leaf.arena.tensors)
            else:
                call.values.append(leaf)
    else:
        call.values.extend(leaves)
    call.groups.append(Group(name, treedef, leaves, given, layout))


def _pad(call: Arguments, given: list[Any], layout: Layout) -> list[Any]:
    """The leaves with every bucketed axis padded; notes the real sizes."""
    leaves = given.copy()
    chosen = call.signature.chosen
    for index, axis, tag in layout.padded:
        leaf = leaves[index]
        shape = getattr(leaf, "shape", ())
        if axis >= len(shape):
            raise BucketError(
                f"bucket {tag!r} names axis {axis}",
                where=layout.paths[index],
                found=f"{len(shape)} axes" if not isinstance(leaf, ArenaValue) else "a cache",
            )
        real = int(shape[axis])
        if call.sizes.setdefault(tag, real) != real:
            raise BucketError(
                f"leaves disagree on the size of bucketed axis {tag!r}",
                where=layout.paths[index],
                expected=call.sizes[tag],
                found=real,
            )
        size = chosen.get((tag, real))
        if size is None:
            size = chosen[tag, real] = call.signature.buckets[tag].choose(real, tag)
        if size != real:
            leaves[index] = _padded(leaf, [*shape[:axis], size, *shape[axis + 1 :]])
    return leaves


def _key(call: Arguments) -> Key:
    leaves: list[Hashable] = []
    for group in call.groups:
        for leaf in group.leaves:
            leaves.append(leaf.arena.signature if type(leaf) is ArenaValue else leaf_signature(leaf))
    params = None if call.binding is None else (call.binding_name, call.binding.signature)
    structures = tuple([group.layout.token for group in call.groups])
    return Key(structures, tuple(leaves), params, tuple(call.tokens), call.signature.mode)
