"""EasyLM's stream form: not one msgpack message but many, each a pair of a key path and one serialised leaf."""

from __future__ import annotations

from typing import Any

from atbx.checkpoints.msgpack_walk import MAX_DEPTH, Walk


def is_stream(walk: Walk) -> bool:
    """Whether the file begins with a pair whose first item is an array of text; the walk does not move."""
    mapped, size = walk.mapped, walk.end
    if size < 3 or mapped[0] != 0x92:
        return False
    # the key path: fixarray, array16 or array32, not empty, whose first entry is text
    tag = mapped[1]
    first = {0xDC: 4, 0xDD: 6}.get(tag, 2 if 0x91 <= tag <= 0x9F else size)
    return first < size and (0xA0 <= mapped[first] <= 0xBF or 0xD9 <= mapped[first] <= 0xDB)


def read_stream(walk: Walk) -> dict[str | int, Any]:
    """The tree of a stream: nested dicts of scalars and `Stored` tensors.

    Raises:
        CheckpointError: a message is malformed, or two of them give the same path.
    """
    root: dict[str | int, Any] = {}
    while walk.position < walk.end:
        start = walk.position
        walk.path = []
        kind, count = walk.head("an EasyLM entry")
        if kind != "array" or count != 2:
            walk.fail(
                "an EasyLM entry is malformed",
                start,
                expected="a pair of key path and leaf",
                found=f"{kind} {count!r}",
            )
        at = walk.position
        keys = walk.node()
        if not isinstance(keys, list) or not keys or not all(_is_key(key) for key in keys):
            walk.fail(
                "an EasyLM key path is malformed", at, expected="an array of text", found=type(keys).__name__
            )
        if len(keys) > MAX_DEPTH:
            walk.fail(
                "the tree is nested too deep", at, expected=f"at most {MAX_DEPTH} levels", found=len(keys)
            )
        walk.path = list(keys)
        at = walk.position
        kind, length = walk.head("an EasyLM leaf")
        if kind != "bin":
            walk.fail("an EasyLM leaf is malformed", at, expected="a byte string", found=kind)
        leaf = walk.within(length, "an EasyLM leaf")
        _insert(root, keys, leaf, walk, start)
    return root


def _is_key(key: Any) -> bool:
    return isinstance(key, (str, int)) and not isinstance(key, bool)


def _insert(root: dict[str | int, Any], keys: list[Any], leaf: Any, walk: Walk, start: int) -> None:
    node = root
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            walk.fail(f"the path goes through {key!r}, which an earlier entry made a leaf", start)
    if keys[-1] in node:
        walk.fail("two entries of the stream have the same path", start, hint="The file is damaged")
    node[keys[-1]] = leaf
