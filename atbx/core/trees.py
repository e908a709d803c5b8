"""Pytrees: thin, typed wrappers over optree, with slash paths and frozen dataclass nodes.

Dicts are walked in optree's order (sorted keys, so "10" comes before "2"); lists and tuples in their own.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import optree
from typing_extensions import dataclass_transform

NAMESPACE = "atbx"
TreeDef = optree.PyTreeSpec
Class = TypeVar("Class", bound=type)


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """Leaves of `tree` in a fixed order, and its structure. `None` is an empty node, not a leaf."""
    return optree.tree_flatten(tree, namespace=NAMESPACE)


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Any:
    """The tree of structure `treedef` with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Any) -> list[Any]:
    """Leaves of `tree` in the order of `flatten`."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def path_string(path: Sequence[Any]) -> str:
    """A path as text: keys, indices and field names joined by slashes, e.g. `layers/3/attn_norm`."""
    return "/".join(str(entry) for entry in path)


def flatten_with_paths(tree: Any) -> tuple[list[str], list[Any], TreeDef]:
    """Slash paths, leaves and structure of `tree`, the first two in the same order."""
    paths, found, treedef = optree.tree_flatten_with_path(tree, namespace=NAMESPACE)
    return [path_string(path) for path in paths], found, treedef


def map_leaves(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`function` over the leaves of trees of one structure; returns a tree of that structure."""
    return optree.tree_map(function, tree, *rest, namespace=NAMESPACE)


def map_with_paths(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """`function(path, leaf)` over the leaves of `tree`; returns a tree of the same structure."""
    paths, found, treedef = flatten_with_paths(tree)
    return unflatten(treedef, [function(path, leaf) for path, leaf in zip(paths, found, strict=True)])


def static_field(**kwargs: Any) -> Any:
    """A dataclass field of a `node` class that belongs to the structure and not to the leaves."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def _fields_getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives these fields of a value as a tuple; every step flattens its arguments through it."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static_field))
def node(cls: Class) -> Class:
    """Class decorator: a frozen dataclass that is a pytree node.

    Fields are children, except those made with `static_field()`, which are part of the tree structure
    and must be hashable.
    """
    frozen: Any = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(frozen)
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    static = tuple(f.name for f in fields if f.metadata.get("static"))

    children_of, static_of = _fields_getter(children), _fields_getter(static)

    def flatten_node(value: Any) -> tuple[Any, Any, tuple[str, ...]]:
        return children_of(value), static_of(value), children

    def unflatten_node(metadata: Any, parts: Any) -> Any:
        # Not through __init__: a half-built value (placeholders as leaves) must be able to pass.
        value = object.__new__(frozen)
        for name, part in zip(children, parts, strict=True):
            object.__setattr__(value, name, part)
        for name, part in zip(static, metadata, strict=True):
            object.__setattr__(value, name, part)
        return value

    optree.register_pytree_node(frozen, flatten_node, unflatten_node, namespace=NAMESPACE)
    return frozen  # type: ignore[no-any-return, unused-ignore]
