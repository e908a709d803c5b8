"""Sharded weight trees in Hugging Face's form: an index JSON that says which file holds each leaf, by slash path.

The shards are trees of their own, merged here; metadata of atbx is in the index, so that every shard is a plain
Flax file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atbx.checkpoints import metadata as meta
from atbx.core import trees
from atbx.core.errors import CheckpointError

INDEX_SUFFIX = ".msgpack.index.json"
LARGEST_INDEX = 1 << 30
_SHARD_NAME = re.compile(r"-\d{5}-of-\d{5}\.msgpack$")


@dataclass(frozen=True)
class Index:
    """A shard index: leaf names to file names, and atbx's metadata if it wrote the index."""

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None

    @property
    def files(self) -> list[str]:
        """Names of the shards, each once, in order."""
        return sorted(set(self.weight_map.values()))


def read_index(path: Path) -> Index:
    """Read an index and see that every shard is there.

    Raises:
        CheckpointError: the JSON is malformed, or shards are missing (all of them are named).
    """
    try:
        size = path.stat().st_size
        if not path.is_file():  # opening a pipe would wait for a writer
            raise CheckpointError("the shard index is no regular file", path=path)
        if size > LARGEST_INDEX:
            raise CheckpointError(
                "the shard index is too large", path=path, expected=LARGEST_INDEX, found=size
            )
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"the shard index cannot be opened: {error.strerror or error}", path=path
        ) from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError("the shard index is not UTF-8", path=path, offset=error.start) from error
    content = meta.parse(text, path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the shard index has no weight_map",
            path=path,
            expected="an object of leaf name to file name",
            found="nothing" if weight_map is None else type(weight_map).__name__,
        )
    for name, file in weight_map.items():
        # a name with a folder in it could read any file of the machine
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(
                f"weight_map names a file outside the folder for {name}",
                path=path,
                expected="a plain file name",
                found=repr(file),
            )
    missing = [file for file in sorted(set(weight_map.values())) if not (path.parent / file).is_file()]
    if missing:
        raise CheckpointError(
            f"shards are missing: {', '.join(missing)}",
            path=path,
            expected=f"{len(set(weight_map.values()))} files beside the index",
            hint="The download did not finish, or files were moved",
        )
    extra = content.get("metadata")
    own = extra.get(meta.KEY) if isinstance(extra, dict) else None
    if own is not None:
        if not isinstance(own, dict):
            raise CheckpointError(
                f"metadata/{meta.KEY} is malformed", path=path, expected="an object", found=type(own).__name__
            )
        meta.check_version(own.get("version"), path)
    return Index(path, weight_map, own)


def index_text(weight_map: Mapping[str, str], total_bytes: int, metadata: Mapping[str, Any]) -> str:
    """The JSON of an index."""
    content = {
        "metadata": {"total_size": total_bytes, meta.KEY: dict(metadata)},
        "weight_map": dict(weight_map),
    }
    return meta.to_text(content)


def merge(into: dict[str | int, Any], tree: Any, file: Path, path: tuple[str | int, ...] = ()) -> None:
    """Add a shard's tree to the others'.

    Raises:
        CheckpointError: two shards hold the same leaf.
    """
    if not isinstance(tree, dict):
        raise CheckpointError("a shard is no tree of named leaves", path=file, found=type(tree).__name__)
    for key, value in tree.items():
        here = (*path, key)
        if key not in into:
            into[key] = value
        elif isinstance(into[key], dict) and isinstance(value, dict):
            merge(into[key], value, file, here)
        else:
            raise CheckpointError(f"{trees.path_string(here)} is in two shards", path=file)


def leaf_paths(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of the leaves of nested dicts and lists; an empty dict below the root counts as one."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    empty = True
    for key, value in children:
        empty = False
        yield from leaf_paths(value, (*path, key))
    if empty and path:
        yield path


def check_listed(index: Index, file: str, tree: Any) -> None:
    """See that a shard holds every leaf that the index says it does.

    Raises:
        CheckpointError: leaves are missing; the first few are named.
    """
    held = {trees.path_string(path) for path in leaf_paths(tree)}
    missing = sorted(name for name, where in index.weight_map.items() if where == file and name not in held)
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(
            f"the index says that this shard holds {shown}, and it does not",
            path=index.path.parent / file,
            hint="Shard and index belong to different checkpoints",
        )


def assign(sizes: Sequence[int], shard_bytes: int) -> list[int]:
    """Shard number of each leaf, filled in order; a leaf larger than a shard gets one for itself."""
    shard, filled, numbers = 0, 0, []
    for size in sizes:
        if filled and filled + size > shard_bytes:
            shard, filled = shard + 1, 0
        filled += size
        numbers.append(shard)
    return numbers


def is_shard_name(name: str) -> bool:
    """Whether a file name is that of a shard, which is no weight tree by itself."""
    return _SHARD_NAME.search(name) is not None


def stem_of(path: Path) -> str:
    """The name of a tree without `.msgpack`."""
    return path.name.removesuffix(".index.json").removesuffix(".msgpack")


def index_path(path: Path) -> Path:
    """The index of a sharded tree that is written to `path`."""
    return path.with_name(stem_of(path) + INDEX_SUFFIX)


def shard_names(path: Path, count: int) -> list[str]:
    """File names for new shards, none of which exists: the shards of the tree being replaced stay whole."""
    generation = 0
    while True:
        stem = stem_of(path) + (f".{generation}" if generation else "")
        names = [f"{stem}-{i + 1:05d}-of-{count:05d}.msgpack" for i in range(count)]
        if not any(path.with_name(name).exists() for name in names):
            return names
        generation += 1


def published(path: Path) -> list[Path]:
    """The index and shards that an earlier write to `path` made; [] if it made none.

    Raises:
        CheckpointError: there is an index that atbx did not write: its shards may be all that somebody has.
    """
    index = index_path(path)
    if not index.is_file():
        return []
    content = meta.parse(index.read_text("utf-8", errors="replace"), index)
    extra, weight_map = content.get("metadata"), content.get("weight_map")
    if not isinstance(extra, dict) or meta.KEY not in extra or not isinstance(weight_map, dict):
        raise CheckpointError(
            "a sharded checkpoint that atbx did not write has this name",
            path=index,
            hint="Write to another name, or delete the index and its shards first",
        )
    return [index, *(index.with_name(n) for n in sorted({Path(str(v)).name for v in weight_map.values()}))]


def retire(files: Sequence[Path], keep: Sequence[str]) -> None:
    """Delete the files of a tree that another took the place of, except a new index of the same name."""
    for file in files:
        if file.name not in keep and not (keep and file.name.endswith(INDEX_SUFFIX)):
            file.unlink(missing_ok=True)
