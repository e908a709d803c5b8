"""What atbx keeps beside the tensors: JSON under the one top-level key `__atbx__`, or in a shard index.

Readers that do not know the key see a map of three entries. Besides what the caller gave (config, layouts, source,
tokenizer, ...) it holds which nodes were lists or tuples, and a checksum per tensor.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from atbx.checkpoints.leaves import NAMES
from atbx.core.errors import CheckpointError

KEY = "__atbx__"
FORMAT, VERSION = "atbx", 1
MAX_DEPTH = 128
RESERVED = ("format", "version", "nodes", "checksums")
"""Entries that the writer makes itself; those of an earlier file are replaced."""


def address(path: Sequence[str | int]) -> str:
    """A tree path as one text that no other path has: slashes and tildes inside keys are escaped as in JSON Pointer."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path)


def first_checksum(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """CRC-32 of `DTYPE SIZE,SIZE,...`: the checksum of a tensor continues it over the tensor's bytes.

    So a flipped bit in a tensor's header is found as well.
    """
    return zlib.crc32(f"{NAMES[dtype]} {','.join(str(int(n)) for n in shape)}".encode())


def check_json(value: Any, where: str = "metadata", depth: int = 0) -> Any:
    """`value` as plain JSON types (tuples become lists).

    Raises:
        CheckpointError: a value or key that JSON does not have, named by its place.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"metadata is nested deeper than {MAX_DEPTH} levels", where=where[:80] + "...")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(
                    f"metadata key {key!r} is not text",
                    where=where,
                    expected="a str",
                    found=type(key).__name__,
                )
        return {key: check_json(part, f"{where}/{key}", depth + 1) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [check_json(part, f"{where}/{index}", depth + 1) for index, part in enumerate(value)]
    raise CheckpointError(
        "metadata holds a value that JSON does not have",
        where=where,
        expected="dict, list, str, int, float, bool or None",
        found=type(value).__name__,
    )


def to_text(metadata: Mapping[str, Any]) -> str:
    """Metadata as compact ASCII JSON (ASCII, because half a surrogate pair in a tokenizer has no UTF-8)."""
    return json.dumps(metadata, separators=(",", ":"))


def pack(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The value of the key `__atbx__`: format, version, JSON text and its CRC-32."""
    text = to_text(metadata)
    return {"format": FORMAT, "version": VERSION, "crc32": zlib.crc32(text.encode()), "metadata": text}


def unpack(value: Any, file: Path) -> dict[str, Any]:
    """The metadata under the key `__atbx__` of a file.

    Raises:
        CheckpointError: it is malformed, damaged, or of a newer version.
    """

    def fail(what: str, **parts: Any) -> CheckpointError:
        return CheckpointError(f"{KEY}: {what}", path=file, **parts)

    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise fail("the key is reserved for atbx's metadata, and what it holds was not written by atbx")
    check_version(value.get("version"), file)
    text = value.get("metadata")
    if not isinstance(text, str):
        raise fail("the metadata is malformed", expected="JSON text", found=type(text).__name__)
    if zlib.crc32(text.encode()) != value.get("crc32"):
        raise fail(
            "the metadata's checksum differs",
            expected=value.get("crc32"),
            found=zlib.crc32(text.encode()),
            hint="The file is damaged",
        )
    return {"format": FORMAT, "version": value["version"], **parse(text, file)}


def check_version(version: Any, file: Path) -> None:
    """Raise `CheckpointError` for a version that this code does not read."""
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{KEY}: the format version is not one that this atbx reads",
            path=file,
            expected=f"1 to {VERSION}",
            found=repr(version),
            hint="Update atbx",
        )


def parse(text: str, file: Path) -> dict[str, Any]:
    """A JSON text as a dict.

    Raises:
        CheckpointError: it is no JSON, or no JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        at = error.pos if isinstance(error, json.JSONDecodeError) else None
        raise CheckpointError(f"this is not valid JSON: {error}", path=file, offset=at) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            "the JSON is malformed", path=file, expected="an object", found=type(value).__name__
        )
    return value


def table(metadata: Mapping[str, Any] | None, name: str, kind: type, file: Path) -> dict[str, Any]:
    """The entry `name` of the metadata, a dict of text to `kind`; {} where there is none.

    Raises:
        CheckpointError: it has another form.
    """
    found = {} if metadata is None else metadata.get(name, {})
    if not isinstance(found, dict) or not all(type(v) is kind for v in found.values()):
        raise CheckpointError(
            f"{KEY}/{name} is malformed",
            path=file,
            expected=f"an object of {kind.__name__}",
            found=type(found).__name__,
        )
    return found
