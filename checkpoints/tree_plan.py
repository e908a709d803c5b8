"""What will be written of a weight tree, worked out and checked before a byte is: dicts, kinds of nodes, leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atbx.checkpoints import metadata as meta
from atbx.checkpoints.leaves import NAMES, Lazy, file_name_of
from atbx.checkpoints.msgpack_walk import CHUNKED, MAX_DEPTH, MAX_KEY, MAX_TEXT
from atbx.core import trees
from atbx.core.errors import CheckpointError

Keys = tuple[str | int, ...]
Leaf = torch.Tensor | np.ndarray | np.generic | Lazy


@dataclass
class Plan:
    """A tree that can be written.

    path:   the file it will be written to.
    tree:   nested dicts; lists and tuples are dicts with keys "0", "1", ...
    nodes:  address of each node that was a list or tuple, to "list" or "tuple".
    leaves: path and value of each leaf, and of each empty node, in file order.
    """

    path: Path
    tree: dict[str | int, Any] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    leaves: list[tuple[Keys, Any]] = field(default_factory=list)

    def refusal(self, keys: Keys, what: str, **parts: Any) -> CheckpointError:
        """The error that names file and tree path."""
        return CheckpointError(
            f"tree path {trees.path_string(keys) or '(root)'}: {what}", path=self.path, **parts
        )


def plan_tree(tree: Any, path: Path) -> Plan:
    """Check a tree and lay it out.

    Raises:
        CheckpointError: a key or leaf that cannot be written, by tree path.
    """
    plan = Plan(path)
    if not isinstance(tree, (Mapping, list, tuple)):
        raise plan.refusal((), "the root must be a dict, list or tuple", found=type(tree).__name__)
    plan.tree = _plan_node(tree, (), plan)
    if meta.KEY in plan.tree:
        raise plan.refusal((meta.KEY,), "that key is reserved for atbx's metadata")
    return plan


def _plan_node(node: Any, keys: Keys, plan: Plan) -> dict[str | int, Any]:
    if len(keys) >= MAX_DEPTH:
        raise plan.refusal(keys, "the tree is nested too deep", expected=f"at most {MAX_DEPTH} levels")
    if isinstance(node, (list, tuple)):
        if hasattr(node, "_fields"):
            raise plan.refusal(keys, "a named tuple cannot be written", hint="Use a dict of its fields")
        plan.nodes[meta.address(keys)] = "tuple" if isinstance(node, tuple) else "list"
        items: list[tuple[Any, Any]] = [(str(i), value) for i, value in enumerate(node)]
    else:
        items = list(node.items())
    planned: dict[str | int, Any] = {}
    texts: set[str] = set()
    for key, value in items:
        _check_key(key, texts, keys, plan)
        here = (*keys, key)
        if isinstance(value, (Mapping, list, tuple)):
            planned[key] = _plan_node(value, here, plan)
            if not value:
                plan.leaves.append((here, {}))
        else:
            _check_leaf(value, here, plan)
            planned[key] = value
            plan.leaves.append((here, value))
    return planned


def _check_key(key: Any, texts: set[str], keys: Keys, plan: Plan) -> None:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise plan.refusal(
            keys,
            f"the key {key!r} cannot be written",
            expected="text or an integer",
            found=type(key).__name__,
        )
    if isinstance(key, int) and not _fits(key):
        raise plan.refusal(keys, f"the key {key} is beyond 64 bits")
    if isinstance(key, str) and not _is_unicode(key):
        raise plan.refusal(keys, f"the key {key!r} has no UTF-8 form")
    if isinstance(key, str) and len(key.encode()) > MAX_KEY:
        raise plan.refusal(
            keys, "a key is too long", expected=f"at most {MAX_KEY} bytes", found=len(key.encode())
        )
    if key == CHUNKED:
        raise plan.refusal(
            keys, f"the key {CHUNKED} is reserved: Flax would take this dict for a chunked array"
        )
    if str(key) in texts:
        raise plan.refusal(
            keys, f"two keys read {str(key)!r}, one text and one integer", hint="Flax cannot tell them apart"
        )
    texts.add(str(key))


def _check_leaf(value: Any, keys: Keys, plan: Plan) -> None:
    if isinstance(value, Lazy):
        if value.abstract.dtype not in NAMES:
            raise plan.refusal(keys, "the dtype has no name in files", found=value.abstract.dtype)
    elif isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            raise plan.refusal(
                keys, "the tensor has no dense values", found=f"{value.layout} on {value.device}"
            )
        if file_name_of(value.dtype) is None:
            raise plan.refusal(keys, "the dtype has no name in files", found=value.dtype)
    elif isinstance(value, (np.ndarray, np.generic)):
        if file_name_of(value.dtype) is None:
            raise plan.refusal(
                keys,
                "an array of this dtype cannot be written",
                expected="numbers that torch has too",
                found=repr(value.dtype),
            )
        if isinstance(value, np.ma.MaskedArray):
            raise plan.refusal(keys, "a masked array cannot be written: its mask would be lost")
    elif isinstance(value, str):
        if not _is_unicode(value):
            raise plan.refusal(keys, "the text has no UTF-8 form", found=repr(value))
        _check_length(len(value.encode()), keys, plan)
    elif isinstance(value, (bytes, bytearray)):
        _check_length(len(value), keys, plan)
    elif isinstance(value, int):
        if not _fits(value):
            raise plan.refusal(keys, "the integer is beyond 64 bits", found=value)
    elif value is not None and not isinstance(value, (float, complex)):
        raise plan.refusal(
            keys,
            "a value of this type cannot be written",
            expected="a tensor, numpy array, Lazy leaf or Python scalar",
            found=type(value).__name__,
        )


def _check_length(length: int, keys: Keys, plan: Plan) -> None:
    # Longer ones could be written, but the reader copies them and therefore bounds them.
    if length > MAX_TEXT:
        raise plan.refusal(
            keys,
            "the text or byte string is too long",
            expected=f"at most {MAX_TEXT} bytes",
            found=length,
            hint="Make it a uint8 tensor",
        )


def _fits(value: int) -> bool:
    return -(1 << 63) <= value < 1 << 64


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def loaded(leaf: Leaf, keys: Keys, plan: Plan) -> torch.Tensor | np.ndarray | np.generic:
    """The values of a leaf; a lazy one is loaded.

    Raises:
        CheckpointError: a lazy leaf could not be read, or is another tensor than it announced.
    """
    if not isinstance(leaf, Lazy):
        return leaf
    try:
        tensor = leaf.load()
    except OSError as error:
        # Not to be taken for trouble with the file that is being written.
        raise plan.refusal(keys, f"the source of the tensor cannot be read: {error}") from error
    announced = f"{leaf.abstract.dtype} {tuple(leaf.abstract.shape)}"
    found = (
        f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    )
    if found != announced:
        raise plan.refusal(
            keys, "the lazy leaf loaded another tensor than it announced", expected=announced, found=found
        )
    _check_leaf(tensor, keys, plan)
    return tensor


def bytes_of(leaf: Any) -> int:
    """Bytes of a leaf's elements; 0 for Python scalars."""
    if isinstance(leaf, Lazy):
        return leaf.abstract.nbytes
    if isinstance(leaf, (torch.Tensor, np.ndarray, np.generic)):
        return int(leaf.nbytes)
    return 0
