"""Arenas: tensors that one owner keeps at fixed addresses, and the immutable values that name their state.

A pure function takes an `ArenaValue` and returns the next one. The compiled form updates the arena in place and
raises its generation, so an old value is recognised as donated wherever it is used again.
"""

from __future__ import annotations

from typing import Any

import torch

from atbx.core import trees
from atbx.core.abstract import Abstract, abstract_of
from atbx.core.errors import CacheStateError, DonationError
from atbx.core.interning import intern_signature


def leaf_signature(leaf: torch.Tensor | Abstract) -> tuple[Any, ...]:
    """What a compiled variant assumes of a tensor: shape, dtype, device type, and whether it is contiguous.

    An abstract leaf stands for a contiguous tensor on the device that it names.
    """
    if isinstance(leaf, Abstract):
        return tuple(map(int, leaf.shape)), leaf.dtype, leaf.device, True
    return tuple(leaf.shape), leaf.dtype, leaf.device.type, leaf.is_contiguous()


class Arena:
    """Owner of a tree of tensors. `tensors`, `paths` and `signature` (an `Interned`) are computed once."""

    __slots__ = (
        "__weakref__",
        "_addresses",
        "generation",
        "interrupted",
        "is_abstract",
        "paths",
        "signature",
        "tensors",
        "tree",
        "treedef",
    )

    def __init__(self, tree: Any) -> None:
        paths, leaves, self.treedef = trees.flatten_with_paths(tree)
        self.tree, self.paths, self.tensors = tree, tuple(paths), tuple(leaves)
        self.signature = intern_signature(tuple(leaf_signature(t) for t in leaves), self.paths)
        self.is_abstract = any(isinstance(t, Abstract) for t in leaves)
        self._addresses: dict[int, str] | None = None
        self.generation = 0
        self.interrupted = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(abstract_of(t).nbytes for t in self.tensors)

    @property
    def addresses(self) -> dict[int, str]:
        """Paths of the tensors by address; worked out once, because every step asks."""
        if self._addresses is None:
            self._addresses = {t.data_ptr(): p for t, p in zip(self.tensors, self.paths, strict=True)}
        return self._addresses

    def value(self) -> ArenaValue:
        """The current state as a value."""
        return ArenaValue(self, self.generation)


class ArenaValue:
    """One state of an arena: immutable. `tree` gives the tensors, `replaced` the value after an update."""

    __slots__ = ("arena", "generation")

    def __init__(self, arena: Arena, generation: int) -> None:
        self.arena, self.generation = arena, generation

    def check(self, path: str = "cache") -> None:
        """Raise unless this is the arena's current state.

        Raises:
            CacheStateError: a step was interrupted while it updated the arena.
            DonationError: the value was donated to a later step.
        """
        if self.arena.interrupted:
            raise CacheStateError(
                "a step was interrupted while it updated this cache, so its contents are undefined",
                where=path,
                hint="Start from a new cache, or from one that was saved",
            )
        if self.generation != self.arena.generation:
            raise DonationError(
                "this cache value was donated to a later step and its buffers were updated in place",
                where=path,
                hint="Use the cache that the step returned; fork it first to keep the old state",
            )

    @property
    def tree(self) -> Any:
        """The tensors, in the arena's structure."""
        self.check()
        return self.arena.tree

    def replaced(self, tree: Any) -> ArenaValue:
        """A value of the same structure with other tensors (a new arena)."""
        return Arena(tree).value()


class StagedArena:
    """An `ArenaValue` while a function is staged: the same face over staged values.

    `origin` is the index of the program input arena that it descends from.
    """

    __slots__ = ("origin", "tree")

    def __init__(self, tree: Any, origin: int) -> None:
        self.tree, self.origin = tree, origin

    def replaced(self, tree: Any) -> StagedArena:
        """The next state, with these staged values."""
        return StagedArena(tree, self.origin)
