"""A walk over the headers of one msgpack message in a mapped file: where each tensor lies, without touching it.

Plain dicts, lists and scalars come out as themselves; tensors as `Stored` records. The walk never trusts a length:
every one is compared with the bytes that are left before anything is made of it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from atbx.checkpoints.leaves import DTYPES
from atbx.core import trees
from atbx.core.errors import CheckpointError

CHUNKED = "__msgpack_chunked_array__"
ARRAY, COMPLEX, SCALAR = 1, 2, 3

MAX_DEPTH = 128
_CHUNK_LEVELS = 2  # a chunked array is a map of maps, below the deepest leaf that a tree may have
_SHOWN = 400
MAX_NODES = 1 << 21  # bounds memory: an empty map costs one byte in a file and 64 in memory
MAX_TEXT = 1 << 28
MAX_KEY = 1 << 16
MAX_AXES = 64
_LARGEST = (1 << 63) - 1

_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_NUMBERS = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_LENGTHS = {
    0xC4: ("bin", 1),
    0xC5: ("bin", 2),
    0xC6: ("bin", 4),
    0xC7: ("ext", 1),
    0xC8: ("ext", 2),
    0xC9: ("ext", 4),
    0xD9: ("str", 1),
    0xDA: ("str", 2),
    0xDB: ("str", 4),
    0xDC: ("array", 2),
    0xDD: ("array", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    file, mapped: the file and its mapping.
    dtype, shape: of the whole tensor.
    extents:      (byte offset, bytes) of its parts in order; more than one where the array is chunked.
    is_scalar:    whether it was a numpy scalar.
    """

    file: Path
    mapped: mmap.mmap
    dtype: torch.dtype
    shape: tuple[int, ...]
    extents: tuple[tuple[int, int], ...]
    is_scalar: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return sum(size for _, size in self.extents)


class Walk:
    """A position in a mapped file. `path` is where in the tree the walk stands, for errors."""

    __slots__ = ("_nodes", "end", "file", "mapped", "path", "position")

    def __init__(self, mapped: mmap.mmap, file: Path) -> None:
        self.mapped, self.file = mapped, file
        self.position, self.end = 0, len(mapped)
        self.path: list[Any] = []
        self._nodes = 0

    def fail(self, what: str, offset: int | None = None, **parts: object) -> NoReturn:
        """Raise a `CheckpointError` that names file, byte offset and tree path."""
        where = trees.path_string(self.path)
        if len(where) > _SHOWN:  # keys of a damaged file can be very long
            where = where[:_SHOWN] + "..."
        where = f"tree path {where}: " if where else ""
        offset = self.position if offset is None else offset
        raise CheckpointError(where + what, path=self.file, offset=offset, **parts)

    def _need(self, count: int, what: str) -> int:
        """The position, after which `count` bytes are known to exist; moves past them."""
        start = self.position
        if count > self.end - start:
            inside = self.end < len(self.mapped)
            self.fail(
                f"{what} runs past the end of {'its enclosing entry' if inside else 'the file'}",
                expected=f"{count} bytes",
                found=f"{self.end - start}",
                hint="The file is damaged"
                if inside
                else "The file is cut short: the download, the copy or the write did not finish",
            )
        self.position = start + count
        return start

    def head(self, what: str) -> tuple[str, Any]:
        """Kind and value or length of the next object: number, constant, str, bin, array, map, ext.

        For str and bin the bytes follow at the position; for ext the type code and the bytes do.
        """
        start = self._need(1, what)
        tag = self.mapped[start]
        if tag <= 0x7F:
            return "number", tag
        if tag >= 0xE0:
            return "number", tag - 256
        if tag <= 0x8F:
            return "map", tag & 0x0F
        if tag <= 0x9F:
            return "array", tag & 0x0F
        if tag <= 0xBF:
            return "str", tag & 0x1F
        if tag in _NUMBERS:
            number = _NUMBERS[tag]
            return "number", number.unpack_from(self.mapped, self._need(number.size, "a number"))[0]
        if tag in _LENGTHS:
            kind, width = _LENGTHS[tag]
            at = self._need(width, f"the length of a {kind}")
            return kind, int.from_bytes(self.mapped[at : at + width], "big")
        if tag in _FIXEXT:
            return "ext", _FIXEXT[tag]
        if tag in _CONSTANTS:
            return "constant", _CONSTANTS[tag]
        self.fail(
            "byte 0xc1 starts no msgpack object", start, hint="This is no msgpack file, or it is damaged"
        )

    def text(self, length: int, what: str, *, most: int = MAX_TEXT) -> str:
        """The UTF-8 text of `length` bytes at the position."""
        raw = self.raw(length, what, most=most)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(
                f"{what} is not UTF-8",
                self.position - length + error.start,
                hint="The file is damaged, or no msgpack file",
            )

    def raw(self, length: int, what: str, *, most: int = MAX_TEXT) -> bytes:
        """`length` bytes at the position, copied."""
        if length > most:
            self.fail(f"{what} is too long", expected=f"at most {most} bytes", found=length)
        start = self._need(length, what)
        return self.mapped[start : start + length]

    def node(self) -> Any:
        """The object at the position: dict, list, scalar or `Stored`."""
        self._nodes += 1
        start = self.position
        if self._nodes > MAX_NODES:
            self.fail(
                f"the tree has more than {MAX_NODES} nodes", hint="This is no weight tree, or it is damaged"
            )
        kind, value = self.head("an object")
        if kind in ("number", "constant"):
            return value
        if kind == "str":
            return self.text(value, "a text")
        if kind == "bin":
            return self.raw(value, "a byte string")
        if kind == "ext":
            return self._extension(value, start)
        if len(self.path) >= MAX_DEPTH + _CHUNK_LEVELS:
            self.fail("the tree is nested too deep", start, expected=f"at most {MAX_DEPTH} levels")
        # An entry takes a byte at least (two in a map), so a count beyond that is known to be wrong before the loop.
        if value * (2 if kind == "map" else 1) > self.end - self.position:
            self._need(
                value * (2 if kind == "map" else 1),
                f"{'a map' if kind == 'map' else 'an array'} of {value} entries",
            )
        return self._map(value, start) if kind == "map" else self._list(value)

    def _list(self, count: int) -> list[Any]:
        found = []
        for index in range(count):
            self.path.append(index)
            found.append(self.node())
            self.path.pop()
        return found

    def _map(self, count: int, start: int) -> Any:
        found: dict[str | int, Any] = {}
        for _ in range(count):
            at = self.position
            kind, key = self.head("a map key")
            if kind == "str":
                key = self.text(key, "a map key", most=MAX_KEY)
            elif kind != "number" or not isinstance(key, int):
                self.fail("a map key is neither text nor an integer", at, found=kind)
            if key in found:
                self.fail(
                    f"the key {repr(key)[:_SHOWN]} occurs twice in one map", at, hint="The file is damaged"
                )
            self.path.append(key)
            found[key] = self.node()
            self.path.pop()
        return self._joined(found, start) if CHUNKED in found else found

    def _extension(self, length: int, start: int) -> Any:
        code = self.mapped[self._need(1, "an extension's type code")]
        code = code - 256 if code > 127 else code
        if code not in (ARRAY, COMPLEX, SCALAR):
            self.fail(
                f"unknown extension type {code}",
                start,
                expected="1 (array), 2 (complex) or 3 (numpy scalar)",
                hint="The file was not written by Flax or atbx, or it is damaged",
            )
        if code == COMPLEX:
            return self._enclosed(length, "a complex number", self._complex)
        return self._enclosed(length, "a tensor", lambda: self._tensor(code == SCALAR, start))

    def within(self, length: int, what: str) -> Any:
        """The one object that fills the next `length` bytes."""
        return self._enclosed(length, what, self.node)

    def _enclosed(self, length: int, what: str, parse: Callable[[], Any]) -> Any:
        start = self._need(length, what)
        outer, self.position, self.end = self.end, start, start + length
        found = parse()
        if self.position != self.end:
            self.fail(
                f"{self.end - self.position} bytes follow {what} inside its entry", hint="The file is damaged"
            )
        self.end = outer
        return found

    def _array_of(self, count: int, what: str) -> None:
        at = self.position
        kind, length = self.head(what)
        if kind != "array" or length != count:
            self.fail(f"{what} is malformed", at, expected=f"an array of {count}", found=f"{kind} {length!r}")

    def _complex(self) -> complex:
        self._array_of(2, "a complex number")
        parts = []
        for _ in range(2):
            at = self.position
            kind, value = self.head("part of a complex number")
            if kind != "number":
                self.fail("part of a complex number is no number", at, found=kind)
            parts.append(value)
        return complex(*parts)

    def _tensor(self, is_scalar: bool, start: int) -> Stored:
        self._array_of(3, "a tensor's description")
        at = self.position
        kind, axes = self.head("a tensor's shape")
        if kind != "array" or axes > MAX_AXES:
            self.fail(
                "a tensor's shape is malformed",
                at,
                expected=f"an array of at most {MAX_AXES}",
                found=f"{kind} {axes!r}",
            )
        dims = []
        for _ in range(axes):
            at = self.position
            kind, dim = self.head("a tensor's dimension")
            if kind != "number" or not isinstance(dim, int) or not 0 <= dim <= _LARGEST:
                self.fail(
                    "a tensor's dimension is malformed",
                    at,
                    expected="an integer from 0",
                    found=f"{kind} {dim!r}",
                )
            dims.append(dim)
        shape = tuple(dims)
        at = self.position
        kind, length = self.head("a dtype name")
        if kind not in ("str", "bin"):
            self.fail("a tensor's dtype name is malformed", at, expected="text", found=kind)
        name = self.text(length, "a dtype name", most=256)
        if name not in DTYPES:
            self.fail(f"unknown dtype name {name!r}", at, expected="one of " + ", ".join(DTYPES))
        dtype = DTYPES[name]
        at = self.position
        kind, length = self.head("a tensor's bytes")
        if kind not in ("bin", "str"):
            self.fail("a tensor's bytes are malformed", at, expected="a byte string", found=kind)
        offset = self._need(length, "a tensor's bytes")
        self._check_size(shape, dtype, length, start)
        if is_scalar and shape:
            self.fail("a numpy scalar has a shape", start, expected="()", found=shape)
        return Stored(self.file, self.mapped, dtype, shape, ((offset, length),), is_scalar)

    def _check_size(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int, start: int) -> None:
        # torch refuses strides beyond 63 bits even where another axis is empty
        if math.prod(max(dim, 1) for dim in shape) * dtype.itemsize > _LARGEST:
            self.fail(f"the shape {shape} is beyond any tensor", start)
        expected = math.prod(shape) * dtype.itemsize
        if nbytes != expected:
            self.fail(
                f"shape {shape} and dtype {str(dtype).removeprefix('torch.')} disagree with the bytes",
                start,
                expected=f"{expected} bytes",
                found=nbytes,
                hint="The file is damaged",
            )

    def _joined(self, found: dict[str | int, Any], start: int) -> Stored:
        """The tensor that a chunked-array map describes."""

        def in_order(name: str) -> list[Any]:
            part = found.get(name)
            if not isinstance(part, dict) or set(part) != {str(i) for i in range(len(part))}:
                self.fail(
                    f"the map holds the key {CHUNKED} but its {name!r} is malformed",
                    start,
                    expected='a map with keys "0", "1", ...',
                    found="nothing" if part is None else _describe(part),
                    hint="That key is reserved for chunked arrays: a tree of other things must not use it",
                )
            return [part[str(i)] for i in range(len(part))]

        dims, chunks = in_order("shape"), in_order("chunks")
        if len(dims) > MAX_AXES or any(
            isinstance(d, bool) or not isinstance(d, int) or not 0 <= d <= _LARGEST for d in dims
        ):
            self.fail(
                "a chunked array's shape is malformed",
                start,
                expected="integers from 0",
                found=dims[:MAX_AXES],
            )
        if not chunks:
            self.fail("a chunked array has no chunks", start)
        for index, chunk in enumerate(chunks):
            if not isinstance(chunk, Stored) or len(chunk.shape) != 1:
                self.fail(
                    f"chunk {index} of a chunked array is malformed",
                    start,
                    expected="a flat array",
                    found=_describe(chunk),
                )
            if chunk.dtype != chunks[0].dtype:
                self.fail(
                    f"chunk {index} of a chunked array has another dtype",
                    start,
                    expected=chunks[0].dtype,
                    found=chunk.dtype,
                )
        shape, dtype = tuple(dims), chunks[0].dtype
        extents = tuple(extent for chunk in chunks for extent in chunk.extents)
        self._check_size(shape, dtype, sum(size for _, size in extents), start)
        return Stored(self.file, self.mapped, dtype, shape, extents)


def _describe(value: Any) -> str:
    if isinstance(value, Stored):
        return f"a tensor {value.shape}"
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
