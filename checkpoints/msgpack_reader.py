"""Read weight trees from msgpack: mapped, not copied, whether atbx, Flax, EasyLM or several shards wrote them.

The headers are walked once, which takes microseconds a tensor; the tensors are views of the mapped file, and no byte
of them is read before somebody uses it.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from atbx.checkpoints import easylm, leaves, shards
from atbx.checkpoints import metadata as meta
from atbx.checkpoints.msgpack_walk import Stored, Walk
from atbx.checkpoints.recognise import hint_for, recognise
from atbx.core import trees
from atbx.core.errors import CheckpointError

Form = Literal["atbx", "flax", "easylm", "sharded"]
Keys = tuple[str | int, ...]

_VERIFY_BYTES = 1 << 24


@dataclass(frozen=True)
class WeightFile:
    """A weight tree and where it came from.

    tree:     nested dicts, lists and tuples of tensors (views of the mapped file) and Python scalars.
    metadata: what atbx wrote under `__atbx__`; None for files by others.
    form:     how the file was written.
    path:     the file, or the index of a sharded tree.
    """

    tree: Any
    metadata: dict[str, Any] | None
    form: Form
    path: Path


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: tree path, dtype, shape, bytes, byte offset (of its first chunk), file, chunks."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    file: Path
    chunks: int = 1


@dataclass(frozen=True)
class _Parsed:
    tree: Any
    metadata: dict[str, Any] | None
    form: Form
    path: Path


def read_tree(
    path: str | os.PathLike[str], *, abstract: Any = None, verify: bool = False, progress: bool = False
) -> WeightFile:
    """Read a weight tree; its tensors are views of the file, and nothing of them is read yet.

    Chunked tensors (beyond 1 GiB in Flax files) are the exception: their chunks are joined by copying.

    path:     a file, a shard index, a folder that holds one of them, or the path a sharded tree was written to.
    abstract: the expected tree: where it has a list or tuple and a file by others has a map of keys "0" to "n",
              the map becomes that, in numeric order. It is not compared otherwise: see `checkpoints.check`.
    verify:   compare every tensor with its checksum, which reads the whole file. A file without checksums (by
              others, or written so) is refused then.
    progress: show a bar on stderr while verifying, where that is a terminal.

    Raises:
        CheckpointError: with file, byte offset, tree path, expected and found.
    """
    parsed = _parse(locate(path))
    if verify:
        _verify(parsed, progress)
    nodes = meta.table(parsed.metadata, "nodes", str, parsed.path)
    tree = _build(parsed.tree, (), nodes, abstract, parsed.path)
    return WeightFile(tree, parsed.metadata, parsed.form, parsed.path)


def inspect(path: str | os.PathLike[str]) -> list[TensorEntry]:
    """Every tensor of a weight tree, in file order, without reading one.

    Raises:
        CheckpointError: as `read_tree`.
    """
    return [
        TensorEntry(
            trees.path_string(where), s.dtype, s.shape, s.nbytes, s.extents[0][0], s.file, len(s.extents)
        )
        for where, s in _stored(_parse(locate(path)).tree)
    ]


def locate(path: str | os.PathLike[str]) -> Path:
    """The file or shard index that `path` means: itself, the one in the folder, or the index written beside it.

    Raises:
        CheckpointError: nothing is there, or several files are.
    """
    path = Path(path)
    if path.is_dir():
        return _locate_in(path)
    if not path.exists():
        index = shards.index_path(path)
        if index.exists():
            return index
        raise CheckpointError("there is no such file", path=path)
    return path


def _locate_in(folder: Path) -> Path:
    indices = sorted(folder.glob("*" + shards.INDEX_SUFFIX))
    every = sorted(folder.glob("*.msgpack"))
    files = [
        f for f in every if not shards.is_shard_name(f.name)
    ]  # a killed writer leaves shards without an index
    if len(indices) == 1:
        files = [f for f in files if f.name not in shards.read_index(indices[0]).files]
    found = indices + files
    if len(found) == 1:
        return found[0]
    if not found:
        if every:
            raise CheckpointError(
                "the folder holds shards without their index",
                path=folder,
                expected=f"one *{shards.INDEX_SUFFIX}",
                found=f"{len(every)} shards",
                hint="The download did not finish",
            )
        held = sorted(p.name for p in folder.iterdir())[:8]
        raise CheckpointError(
            "the folder holds no msgpack weights",
            path=folder,
            expected=f"one *.msgpack file or *{shards.INDEX_SUFFIX}",
            found=", ".join(held) or "nothing",
        )
    raise CheckpointError(
        "the folder holds several weight trees",
        path=folder,
        expected="one",
        found=", ".join(p.name for p in found),
        hint="Name the file",
    )


def _parse(path: Path) -> _Parsed:
    if path.name.endswith(".json"):
        return _parse_shards(shards.read_index(path))
    return _parse_file(path)


def _parse_shards(index: shards.Index) -> _Parsed:
    merged: dict[str | int, Any] = {}
    for name in index.files:
        part = _parse_file(index.path.parent / name)
        shards.check_listed(index, name, part.tree)
        shards.merge(merged, part.tree, part.path)
    return _Parsed(merged, index.metadata, "sharded", index.path)


def _parse_file(path: Path) -> _Parsed:
    mapped = leaves.map_file(path)
    named = recognise(mapped[:512], len(mapped))
    if named is not None:
        raise CheckpointError(
            f"this is {named}, not a msgpack weight tree", path=path, offset=0, hint=hint_for(named)
        )
    # Headers are a few bytes every few megabytes: reading ahead would load what nobody asked for.
    mapped.madvise(mmap.MADV_RANDOM)
    walk = Walk(mapped, path)
    form: Form = "flax"
    metadata = None
    if easylm.is_stream(walk):
        form, tree = "easylm", easylm.read_stream(walk)
    else:
        tree = walk.node()
        if walk.position != walk.end:
            walk.fail(
                f"{walk.end - walk.position} bytes follow the end of the tree",
                hint="Two files were joined, or this is no msgpack weight tree",
            )
        if not isinstance(tree, (dict, list, Stored)):
            raise CheckpointError(
                "this is no weight tree",
                path=path,
                offset=0,
                expected="a msgpack map",
                found=f"a {type(tree).__name__}",
                hint="The file has another format, or is damaged",
            )
        if isinstance(tree, dict) and meta.KEY in tree:
            form, metadata = "atbx", meta.unpack(tree.pop(meta.KEY), path)
    mapped.madvise(mmap.MADV_NORMAL)
    # The kernel maps the pages around each header too; hand them back, so that opening a file costs no memory.
    mapped.madvise(mmap.MADV_DONTNEED)
    return _Parsed(tree, metadata, form, path)


def _stored(tree: Any, path: Keys = ()) -> Iterator[tuple[Keys, Stored]]:
    if isinstance(tree, Stored):
        yield path, tree
    elif isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _stored(value, (*path, key))


def _build(tree: Any, path: Keys, nodes: Mapping[str, str], abstract: Any, file: Path) -> Any:
    """The tree with tensors for records, and lists and tuples for the maps that stand for them."""
    if isinstance(tree, Stored):
        return _tensor(tree)
    if isinstance(tree, list):
        inner = abstract if isinstance(abstract, (list, tuple)) else ()
        return [
            _build(value, (*path, i), nodes, inner[i] if i < len(inner) else None, file)
            for i, value in enumerate(tree)
        ]
    if not isinstance(tree, dict):
        return tree
    kind = nodes.get(meta.address(path))
    if kind is not None:
        if kind not in ("list", "tuple") or not _is_numbered(tree):
            raise CheckpointError(
                f"tree path {trees.path_string(path)}: the metadata calls this node a {kind}",
                path=file,
                expected='a list or tuple with keys "0", "1", ...',
                found=f"keys {_some(tree)}",
            )
    elif isinstance(abstract, (list, tuple)) and _is_numbered(tree):
        kind = "tuple" if isinstance(abstract, tuple) else "list"
    built = {
        key: _build(value, (*path, key), nodes, _child(abstract, key), file) for key, value in tree.items()
    }
    if kind is None:
        return built
    ordered = [value for _, value in sorted(built.items(), key=lambda item: int(item[0]))]
    return tuple(ordered) if kind == "tuple" else ordered


def _child(abstract: Any, key: str | int) -> Any:
    if isinstance(abstract, Mapping):
        # Many files wrap the tree in one level more; what is below it is still what the abstract tree describes.
        return abstract if key == "params" and key not in abstract else abstract.get(key)
    if isinstance(abstract, (list, tuple)):
        text = str(key)
        index = int(text) if len(text) < 10 and text.isascii() and text.isdecimal() else len(abstract)
        return abstract[index] if index < len(abstract) else None
    if is_dataclass(abstract) and not isinstance(abstract, type):
        return getattr(abstract, str(key), None) if str(key) in {f.name for f in fields(abstract)} else None
    return None


def _is_numbered(tree: Mapping[str | int, Any]) -> bool:
    return {str(key) for key in tree} == {str(i) for i in range(len(tree))}


def _some(keys: Sequence[Any] | Mapping[Any, Any]) -> str:
    shown = [repr(key) for key in keys]
    return ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")


def _tensor(stored: Stored) -> torch.Tensor:
    if len(stored.extents) == 1 or stored.nbytes == 0:
        return leaves.view(stored.mapped, stored.dtype, stored.shape, stored.extents[0][0])
    joined = torch.empty(stored.nbytes, dtype=torch.uint8)
    filled = 0
    for offset, size in stored.extents:
        chunk = leaves.view(stored.mapped, torch.uint8, (size,), offset)
        joined[filled : filled + size] = chunk
        leaves.release(chunk)
        filled += size
    return joined.view(stored.dtype).reshape(stored.shape)


def _verify(parsed: _Parsed, progress: bool) -> None:
    expected = meta.table(parsed.metadata, "checksums", int, parsed.path)
    stored = {meta.address(path): (trees.path_string(path), record) for path, record in _stored(parsed.tree)}
    if not expected and stored:
        raise CheckpointError(
            "the file holds no checksums to verify",
            path=parsed.path,
            hint="Convert it with `atbx convert`, or read it unverified",
        )
    for address in [*expected, *stored]:
        if address not in stored or address not in expected:
            raise CheckpointError(
                f"tensor {address}: "
                + ("it has no checksum" if address in stored else "it is not in the file"),
                path=parsed.path,
                hint="Somebody changed the tree after atbx wrote it",
            )
    total = sum(record.nbytes for _, record in stored.values())
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=None if progress else True)
    with bar:
        for address, (path, record) in stored.items():
            _verify_one(path, record, expected[address])
            bar.update(record.nbytes)


def _verify_one(path: str, record: Stored, expected: int) -> None:
    found = meta.first_checksum(record.dtype, record.shape)
    for offset, size in record.extents:
        found = _checksum(record.mapped, offset, size, found)
    if found != expected:
        raise CheckpointError(
            f"tensor {path}: the checksum differs",
            path=record.file,
            offset=record.extents[0][0],
            expected=f"{expected:08x}",
            found=f"{found:08x}",
            hint="The file is damaged: convert or download it again",
        )


def _checksum(mapped: mmap.mmap, offset: int, size: int, start: int) -> int:
    with memoryview(mapped) as whole:
        for at in range(offset, offset + size, _VERIFY_BYTES):
            end = min(at + _VERIFY_BYTES, offset + size)
            with whole[at:end] as part:
                start = zlib.crc32(part, start)
            leaves.release(leaves.view(mapped, torch.uint8, (end - at,), at))
    return start
