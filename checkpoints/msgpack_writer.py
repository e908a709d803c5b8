"""Write weight trees as msgpack that stock Flax restores: aligned for mapping, checksummed, replaced by rename.

Tensors start at multiples of 64 bytes, by longer spellings of the headers before them (`msgpack_padding`), and where
those do not stretch far enough, by Flax's chunked form with one chunk. One tensor is in memory at a time. Lists and
tuples become maps with keys "0", "1", ... as in Flax; which of the two a node was stands in the metadata, under the
top-level key `__atbx__`.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from atbx.checkpoints import metadata as meta
from atbx.checkpoints import shards
from atbx.checkpoints.leaves import DTYPES, file_name_of, raw_bytes
from atbx.checkpoints.msgpack_padding import (
    ALIGNMENT,
    Spellings,
    choose,
    extension_header,
    spell_array,
    spell_bytes,
    spell_extension,
    spell_int,
    spell_map,
    spell_text,
)
from atbx.checkpoints.msgpack_walk import ARRAY, CHUNKED, COMPLEX, MAX_TEXT, SCALAR
from atbx.checkpoints.replace_file import replacing
from atbx.checkpoints.tree_plan import Keys, Leaf, Plan, bytes_of, loaded, plan_tree
from atbx.core import trees
from atbx.core.errors import OptionError

LARGEST_CHUNK = (1 << 32) - 1024
"""An extension's length has 32 bits, and holds a tensor's shape and dtype besides its bytes."""

_PIECE = 1 << 24


def write_tree(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    shard_bytes: int | None = None,
    chunk_bytes: int = 2**30,
    checksums: bool = True,
    progress: bool = False,
) -> None:
    """Write a weight tree; without the key `__atbx__` the file is what Flax would restore, bit for bit.

    path:        the file. A tree of more than `shard_bytes` becomes `STEM-0000i-of-0000n.msgpack` beside it and
                 `STEM.msgpack.index.json`, and is read by the same path.
    tree:        dicts (keys text or integers), lists and tuples of tensors, numpy arrays, `Lazy` leaves and Python
                 scalars.
    metadata:    JSON-like; config, layouts, source, tokenizer, generation by custom.
    chunk_bytes: tensors of more bytes are cut into chunks of this size.
    checksums:   keep a CRC-32 of each tensor.
    progress:    show a bar on stderr where that is a terminal.

    Raises:
        CheckpointError: a leaf, key or metadata value that cannot be written, by its path; or the system refused.
        OptionError: `chunk_bytes` or `shard_bytes` is out of range.
    """
    path = Path(path)
    if path.name.endswith(shards.INDEX_SUFFIX):
        path = path.with_name(shards.stem_of(path) + ".msgpack")
    if not 1 <= chunk_bytes <= LARGEST_CHUNK:
        raise OptionError("chunk_bytes is out of range", expected=f"1 to {LARGEST_CHUNK}", found=chunk_bytes)
    if shard_bytes is not None and shard_bytes < 1:
        raise OptionError("shard_bytes is out of range", expected="at least 1", found=shard_bytes)
    plan = plan_tree(tree, path)
    extra = {k: v for k, v in meta.check_json(metadata or {}).items() if k not in meta.RESERVED}
    sizes = [bytes_of(leaf) for _, leaf in plan.leaves]
    numbers = shards.assign(sizes, shard_bytes) if shard_bytes is not None else []
    with tqdm(
        total=sum(sizes), unit="B", unit_scale=True, desc=path.name, disable=None if progress else True
    ) as bar:
        if numbers and numbers[-1] > 0:
            _write_shards(path, plan, extra, numbers, chunk_bytes, checksums, bar)
        else:
            _write_single(path, plan, extra, chunk_bytes, checksums, bar)


def _write_single(
    path: Path, plan: Plan, extra: dict[str, Any], chunk_bytes: int, checksums: bool, bar: Any
) -> None:
    old = shards.published(path)
    with replacing(path) as file:
        writer = _Writer(file, plan, chunk_bytes, checksums, bar)
        writer.map_header(len(plan.tree) + 1)
        writer.entries(plan.tree, ())
        packed = meta.pack({**extra, "nodes": plan.nodes, "checksums": writer.checksums})
        if len(packed["metadata"]) > MAX_TEXT:
            raise plan.refusal(
                (meta.KEY,),
                "the metadata is too long",
                expected=f"at most {MAX_TEXT} bytes of JSON",
                found=len(packed["metadata"]),
            )
        writer.value(meta.KEY)
        writer.value(packed)
        writer.flush()
    shards.retire(old, keep=())


def _write_shards(
    path: Path,
    plan: Plan,
    extra: dict[str, Any],
    numbers: list[int],
    chunk_bytes: int,
    checksums: bool,
    bar: Any,
) -> None:
    count = numbers[-1] + 1
    old = shards.published(path)
    names = shards.shard_names(path, count)
    weight_map: dict[str, str] = {}
    paths = [trees.path_string(keys) for keys, _ in plan.leaves]
    if len(set(paths)) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise plan.refusal(
            (twice,), "two leaves have this path, because keys hold slashes, and an index needs one"
        )
    sums: dict[str, int] = {}
    written: list[Path] = []
    try:
        for number, name in enumerate(names):
            part: dict[str | int, Any] = {}
            for (keys, leaf), where in zip(plan.leaves, numbers, strict=True):
                if where == number:
                    node = part
                    for key in keys[:-1]:
                        node = node.setdefault(key, {})
                    node[keys[-1]] = leaf
                    weight_map[trees.path_string(keys)] = name
            written.append(path.with_name(name))
            with replacing(written[-1]) as file:
                writer = _Writer(file, plan, chunk_bytes, checksums, bar)
                writer.map_header(len(part))
                writer.entries(part, ())
                writer.flush()
            sums.update(writer.checksums)
        own = {
            "format": meta.FORMAT,
            "version": meta.VERSION,
            **extra,
            "nodes": plan.nodes,
            "checksums": sums,
        }
        text = shards.index_text(weight_map, sum(bytes_of(leaf) for _, leaf in plan.leaves), own)
        with replacing(shards.index_path(path)) as file:
            file.write(text.encode())
    except BaseException:
        for shard in written:
            shard.unlink(missing_ok=True)
        raise
    path.unlink(missing_ok=True)  # a single file of that name is the tree just replaced
    shards.retire(old, keep=names)


class _Writer:
    """Encodes values into a file; headers wait in `pending` until it is known how far they must stretch."""

    def __init__(self, file: BinaryIO, plan: Plan, chunk_bytes: int, checksums: bool, bar: Any) -> None:
        self.file, self.plan, self.bar = file, plan, bar
        self.chunk_bytes, self.wants_checksums = chunk_bytes, checksums
        self.pending: list[Spellings] = []
        self.position = 0
        self.checksums: dict[str, int] = {}

    def map_header(self, count: int) -> None:
        self.pending.append(spell_map(count))

    def entries(self, node: Mapping[str | int, Any], keys: Keys) -> None:
        for key, value in node.items():
            self.value(key)
            here = (*keys, key)
            if isinstance(value, dict):
                self.map_header(len(value))
                self.entries(value, here)
            elif isinstance(value, Leaf):
                self.tensor(value, here)
            else:
                self.value(value)

    def value(self, value: Any) -> None:
        """A Python scalar, text, byte string or map of them."""
        if value is None or isinstance(value, bool):
            self.pending.append(({None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value],))
        elif isinstance(value, int):
            self.pending.append(spell_int(value))
        elif isinstance(value, float):
            self.pending.append((struct.pack(">Bd", 0xCB, value),))
        elif isinstance(value, complex):
            payload = struct.pack(">BBdBd", 0x92, 0xCB, value.real, 0xCB, value.imag)
            self.pending.append((extension_header(3, COMPLEX, len(payload)) + payload,))
        elif isinstance(value, str):
            self.pending.append(spell_text(value))
        elif isinstance(value, dict):
            self.map_header(len(value))
            for key, part in value.items():
                self.value(key)
                self.value(part)
        else:
            self.pending.append(spell_bytes(len(value)))
            self.pending.append((bytes(value),))

    def flush(self) -> None:
        """Write what is pending in its shortest spelling."""
        self._emit([0] * len(self.pending))

    def _emit(self, choices: list[int]) -> None:
        for spellings, index in zip(self.pending, choices, strict=True):
            self.position += self.file.write(spellings[index])
        self.pending = []

    def tensor(self, leaf: Leaf, keys: Keys) -> None:
        """One tensor or numpy scalar, chunked where it is too large, aligned, with its checksum."""
        array = loaded(leaf, keys, self.plan)
        name = file_name_of(array.dtype)
        assert name is not None  # the plan refused every other dtype
        shape = tuple(int(n) for n in array.shape)
        raw = raw_bytes(np.asarray(array) if isinstance(array, np.generic) else array)
        if self.wants_checksums:
            self.checksums[meta.address(keys)] = _crc32(raw, meta.first_checksum(DTYPES[name], shape))
        code = SCALAR if isinstance(array, np.generic) else ARRAY
        itemsize = DTYPES[name].itemsize
        step = max(1, self.chunk_bytes // itemsize) * itemsize
        if len(raw) > step:
            self._chunked(raw, name, shape, step)
        elif code == SCALAR or len(raw) == 0:
            self._extension(raw, name, shape, code)
        elif not self._extension(raw, name, shape, code, demand=ALIGNMENT):
            # The headers are too short to stretch that far. One chunk is the same tensor with longer headers.
            self._chunked(raw, name, shape, step)

    def _chunked(self, raw: memoryview, name: str, shape: tuple[int, ...], step: int) -> None:
        itemsize = DTYPES[name].itemsize
        self.map_header(3)
        self.value(CHUNKED)
        self.value(True)
        self.value("shape")
        self.value({str(i): size for i, size in enumerate(shape)})
        self.value("chunks")
        offsets = range(0, len(raw), step)
        self.map_header(len(offsets))
        for index, offset in enumerate(offsets):
            self.value(str(index))
            part = raw[offset : offset + step]
            self._extension(part, name, (len(part) // itemsize,), ARRAY)

    def _extension(
        self, raw: memoryview, name: str, shape: tuple[int, ...], code: int, demand: int | None = None
    ) -> bool:
        """A tensor's entry; False, with nothing written, where an alignment in demand is out of reach."""
        inner = [
            spell_array(3),
            spell_array(len(shape)),
            *(spell_int(size) for size in shape),
            spell_text(name),
            spell_bytes(len(raw)),
        ]
        least, most = (sum(len(v[end]) for v in inner) + len(raw) for end in (0, -1))
        outer = spell_extension(code, least, most)
        values = [*self.pending, outer, *inner]
        choices, reached = choose(values, self.position)
        if demand is not None and reached < demand:
            return False
        at = len(self.pending)
        payload = sum(len(v[i]) for v, i in zip(inner, choices[at + 1 :], strict=True)) + len(raw)
        header = extension_header(len(outer[choices[at]]), code, payload)
        values[at], choices[at] = (header,), 0
        self.pending = values
        self._emit(choices)
        for start in range(0, len(raw), _PIECE):
            piece = raw[start : start + _PIECE]
            self.file.write(piece)
            self.bar.update(len(piece))
        self.position += len(raw)
        return True


def _crc32(raw: memoryview, start: int) -> int:
    for at in range(0, len(raw), _PIECE):
        start = zlib.crc32(raw[at : at + _PIECE], start)
    return start
