"""Read GGUF files: one walk over the header of a mapped file finds every key and tensor.

No length in the file is trusted: each is compared with the bytes that are left before anything is made of it. Arrays
(a vocabulary has hundreds of thousands of strings) are stepped over, and decoded when their key is asked for.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from atbx.checkpoints.gguf_blocks import READERS, TYPES, BlockType, dequantise
from atbx.checkpoints.leaves import map_file, release, view
from atbx.checkpoints.recognise import hint_for, recognise
from atbx.core.errors import CheckpointError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
MAX_DEPTH = 4
MAX_NAME = 1 << 16
MAX_ENTRIES = 1 << 17  # bounds memory: an entry costs 13 bytes in a file and some hundred in memory

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_NATIVE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a GGUF file.

    shape:  outermost axis first, as torch has it (the file lists the innermost first).
    kind:   its block type.
    offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `GgufFile.tensor` gives: its own, or float32 where it is quantised."""
        return _NATIVE.get(self.kind.name, torch.float32)

    @property
    def is_supported(self) -> bool:
        """Whether its type can be read."""
        return self.kind.name in READERS


class GgufFile:
    """An open GGUF file: `metadata`, `tensors` by name, and their values.

    Raises:
        CheckpointError: the file is no GGUF file, is cut short, or contradicts itself; with byte offset and key.
        UnsupportedError: a version or byte order that is not read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.mapped = map_file(path)
        walk = _Walk(self.path, self.mapped)
        self.version, tensor_count, key_count = walk.preamble()
        self.metadata: Mapping[str, Any] = walk.keys(key_count)
        self.alignment = walk.alignment(self.metadata)
        self.tensors: dict[str, TensorInfo] = walk.tensors(tensor_count, self.alignment)

    def tensor(self, name: str) -> torch.Tensor:
        """The values of a tensor: a view of the file for F32, F16 and BF16, otherwise dequantised to float32.

        Raises:
            UnsupportedError: its type cannot be read; names the tensor and the type.
        """
        info = self.tensors[name]
        native = _NATIVE.get(info.kind.name)
        if native is not None:
            return view(self.mapped, native, info.shape, info.offset)
        self.check_supported([name])
        packed = self.packed(name)
        blocks = packed.numpy().reshape(-1, info.kind.nbytes)
        values = torch.from_numpy(dequantise(blocks, info.kind.name)).reshape(info.shape)
        release(packed)  # its pages would stay resident beside the values
        return values

    def packed(self, name: str) -> torch.Tensor:
        """The bytes of a tensor as they stand: uint8 [bytes], a view of the file."""
        info = self.tensors[name]
        return view(self.mapped, torch.uint8, (info.nbytes,), info.offset)

    def check_supported(self, names: list[str] | None = None) -> None:
        """Raise `UnsupportedError` naming every tensor (of `names`) whose type cannot be read."""
        refused = [i for i in map(self.tensors.__getitem__, names or self.tensors) if not i.is_supported]
        if refused:
            listed = ", ".join(f"{i.name} ({i.kind.name})" for i in refused[:8])
            raise UnsupportedError(
                f"the type of {listed}{' and others' if len(refused) > 8 else ''} cannot be read",
                where=f"{self.path} at byte {refused[0].offset}",
                expected=f"one of {', '.join(READERS)}",
                found=", ".join(sorted({i.kind.name for i in refused})),
            )


@dataclass(frozen=True, slots=True)
class _Array:
    """An array in the header that has not been decoded: where its element type stands."""

    start: int


class _Metadata(Mapping[str, Any]):
    """The keys of a file. Arrays are decoded on first access, then kept."""

    def __init__(self, walk: _Walk, values: dict[str, Any]) -> None:
        self._walk, self._values = walk, values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            # A walk of its own: two threads may ask at once.
            walk = _Walk(self._walk.path, self._walk.data, value.start)
            value = self._values[key] = walk.array(key, 0)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


class _Walk:
    def __init__(self, path: Path, mapped: mmap.mmap, at: int = 0) -> None:
        self.path, self.data, self.size, self.at = path, mapped, len(mapped), at

    def fail(self, what: str, offset: int, **parts: object) -> NoReturn:
        raise CheckpointError(what, path=self.path, offset=offset, **parts)

    def need(self, count: int, what: str) -> int:
        """Step over `count` bytes; returns where they start."""
        start, left = self.at, self.size - self.at
        if count > left:
            self.fail(
                f"the file ends inside {what}",
                start,
                expected=f"{count} more bytes",
                found=left,
                hint="It is cut short (an unfinished download or copy), or this length is damaged",
            )
        self.at = start + count
        return start

    def number(self, form: struct.Struct, what: str) -> Any:
        return form.unpack_from(self.data, self.need(form.size, what))[0]

    def text(self, what: str, most: int | None = None) -> str:
        start = self.at
        length = self.number(_U64, f"the length of {what}")
        if most is not None and length > most:
            self.fail(f"{what} is too long", start, expected=f"at most {most} bytes", found=length)
        begin = self.need(length, what)
        try:
            return str(self.data[begin : self.at], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason}", begin + error.start)

    def preamble(self) -> tuple[int, int, int]:
        """Magic and version; returns the version, the number of tensors and the number of keys."""
        head = self.data[: min(self.size, 1024)]
        if not head.startswith(MAGIC):
            name = recognise(head, self.size)
            self.fail(
                "this is not a GGUF file",
                0,
                expected=MAGIC,
                found=name or head[:4],
                hint=hint_for(name) if name else None,
            )
        self.at = len(MAGIC)
        version = self.number(_U32, "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            raise UnsupportedError(
                "this GGUF file is big-endian"
                if swapped in VERSIONS
                else "the GGUF version is not one that is read",
                where=f"{self.path} at byte 4",
                expected="little-endian version " + " or ".join(map(str, VERSIONS)),
                found=version,
            )
        start = self.at
        tensor_count = self.number(_U64, "the number of tensors")
        key_count = self.number(_U64, "the number of keys")
        left = self.size - self.at
        # The shortest key takes 8 + 0 + 4 + 1 bytes, the shortest tensor entry 8 + 0 + 4 + 4 + 8.
        for count, what, least, at in (
            (tensor_count, "tensors", 24, start),
            (key_count, "keys", 13, start + 8),
        ):
            if count > MAX_ENTRIES:
                self.fail(
                    f"the number of {what} is absurd", at, expected=f"at most {MAX_ENTRIES}", found=count
                )
            if count * least > left:
                self.fail(
                    f"the file is too short for the number of {what} that it states",
                    at,
                    expected=f"at most {left // least}",
                    found=count,
                    hint="It is cut short, or this number is damaged",
                )
        return version, tensor_count, key_count

    def keys(self, count: int) -> _Metadata:
        values: dict[str, Any] = {}
        for index in range(count):
            start = self.at
            key = self.text(f"the name of key {index}", MAX_NAME)
            if key in values:
                self.fail(f"the key {key!r} stands twice", start)
            kind = self.number(_U32, f"the type of key {key!r}")
            if kind == _ARRAY:
                values[key] = _Array(self.at)
                self.skip_array(key, 0)
            else:
                values[key] = self.scalar(kind, key)
        return _Metadata(self, values)

    def scalar(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(f"the value of key {key!r}")
        if kind not in _SCALARS:
            self.fail(f"key {key!r} has an unknown value type", self.at - 4, expected="0 to 12", found=kind)
        return self.number(_SCALARS[kind], f"the value of key {key!r}")

    def array_head(self, key: str, depth: int) -> tuple[int, int]:
        """The element type and the number of elements of an array, both checked."""
        start = self.at
        kind = self.number(_U32, f"the element type of key {key!r}")
        count = self.number(_U64, f"the number of elements of key {key!r}")
        if kind not in _SCALARS and kind not in (_STRING, _ARRAY):
            self.fail(f"key {key!r} has an unknown element type", start, expected="0 to 12", found=kind)
        if kind == _ARRAY and depth + 1 >= MAX_DEPTH:
            self.fail(f"key {key!r} nests arrays too deeply", start, expected=f"at most {MAX_DEPTH} levels")
        least = {_STRING: 8, _ARRAY: 12}.get(kind) or _SCALARS[kind].size
        if count * least > self.size - self.at:
            self.fail(
                f"key {key!r} states more elements than the file has bytes for",
                start + 4,
                expected=f"at most {(self.size - self.at) // least}",
                found=count,
                hint="The file is cut short, or this number is damaged",
            )
        return kind, count

    def skip_array(self, key: str, depth: int) -> None:
        kind, count = self.array_head(key, depth)
        if kind == _ARRAY:
            for _ in range(count):
                self.skip_array(key, depth + 1)
        elif kind == _STRING:
            at, data, size, unpack = self.at, self.data, self.size, _U64.unpack_from
            for index in range(count):
                if at + 8 > size or (end := at + 8 + unpack(data, at)[0]) > size:
                    self.at = at
                    self.text(f"element {index} of key {key!r}")  # raises, naming the offset
                at = end
            self.at = at
        else:
            self.at += count * _SCALARS[kind].size

    def array(self, key: str, depth: int) -> list[Any]:
        kind, count = self.array_head(key, depth)
        if kind == _ARRAY:
            return [self.array(key, depth + 1) for _ in range(count)]
        if kind == _STRING:
            return [self.text(f"element {index} of key {key!r}") for index in range(count)]
        form = _SCALARS[kind].format
        begin = self.need(count * _SCALARS[kind].size, f"the value of key {key!r}")
        found: list[Any] = np.frombuffer(self.data, np.dtype(form), count=count, offset=begin).tolist()
        return found

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        found = metadata.get("general.alignment", 32)
        if type(found) is not int or found <= 0 or found & (found - 1):
            self.fail(
                "key 'general.alignment' is malformed",
                self.at,
                expected="a power of two",
                found=repr(found)[:80],
            )
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        entries = []
        names: set[str] = set()
        for index in range(count):
            start = self.at
            name = self.text(f"the name of tensor {index}", MAX_NAME)
            if name in names:
                self.fail(f"the tensor {name!r} stands twice", start)
            names.add(name)
            entries.append((name, *self.tensor_entry(name)))
        base = -(-self.at // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        for name, shape, kind, offset, at in entries:
            nbytes = math.prod(shape) // kind.values * kind.nbytes
            if offset % alignment:
                self.fail(
                    f"tensor {name!r} is not aligned", at, expected=f"a multiple of {alignment}", found=offset
                )
            if base + offset + nbytes > self.size:
                self.fail(
                    f"tensor {name!r} ({kind.name} {list(shape)}) reaches past the end of the file",
                    base + offset,
                    expected=f"{nbytes} bytes",
                    found=max(0, self.size - base - offset),
                    hint="The file is cut short (an unfinished download or copy)",
                )
            found[name] = TensorInfo(name, shape, kind, base + offset, nbytes)
        self.refuse_overlap(found)
        return found

    def tensor_entry(self, name: str) -> tuple[tuple[int, ...], BlockType, int, int]:
        """Shape, type, offset from the start of the data, and where that offset stands."""
        start = self.at
        axes = self.number(_U32, f"the number of axes of tensor {name!r}")
        if axes > MAX_AXES:
            self.fail(f"tensor {name!r} has too many axes", start, expected=f"at most {MAX_AXES}", found=axes)
        begin = self.need(8 * axes, f"the shape of tensor {name!r}")
        sizes = struct.unpack_from(f"<{axes}Q", self.data, begin)
        start = self.at
        number = self.number(_U32, f"the type of tensor {name!r}")
        kind = TYPES.get(number)
        if kind is None:
            self.fail(f"tensor {name!r} has an unknown type", start, expected="a type of ggml", found=number)
        if sizes and sizes[0] % kind.values:
            self.fail(
                f"a row of tensor {name!r} is no whole number of {kind.name} blocks",
                begin,
                expected=f"a multiple of {kind.values} values",
                found=sizes[0],
            )
        if not sizes and kind.values > 1:
            self.fail(f"tensor {name!r} has no axes but type {kind.name}", start, expected="a row of blocks")
        at = self.at
        return sizes[::-1], kind, self.number(_U64, f"the offset of tensor {name!r}"), at

    def refuse_overlap(self, found: Mapping[str, TensorInfo]) -> None:
        filled = sorted((i for i in found.values() if i.nbytes), key=lambda i: i.offset)
        for before, after in itertools.pairwise(filled):
            if before.offset + before.nbytes > after.offset:
                self.fail(
                    f"tensors {before.name!r} and {after.name!r} overlap",
                    after.offset,
                    expected=f"byte {before.offset + before.nbytes} or later",
                )
