"""Alignment inside msgpack: every header has longer spellings of the same value, and their spare bytes are padding.

A 3 may be written in one byte or in nine, a text's length in one byte or in five. Readers accept all spellings, so
the headers between two tensors can be stretched until the next tensor's bytes start at a multiple of 64.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

Spellings = tuple[bytes, ...]
"""One value's encodings, shortest first."""

ALIGNMENT = 64


def _lengths(count: int, fixed: tuple[int, int] | None, tags: Sequence[tuple[int, str]]) -> list[bytes]:
    """Headers that say `count`, shortest first; tags are (tag, struct code of the length)."""
    found = [bytes([fixed[0] | count])] if fixed and count <= fixed[1] else []
    for tag, code in tags:
        if count < 1 << (8 * struct.calcsize(">" + code)):
            found.append(struct.pack(">B" + code, tag, count))
    if not found:
        raise ValueError(f"msgpack lengths end at 2**32 - 1, and this one is {count}")
    return found


def spell_int(value: int) -> Spellings:
    """Encodings of an integer from -2**63 to 2**64 - 1."""
    found = []
    if -32 <= value <= 127:
        found.append(struct.pack(">b", value))
    codes = ((0xCC, "B"), (0xCD, "H"), (0xCE, "I"), (0xCF, "Q"))
    if value < 0:
        codes = ((0xD0, "b"), (0xD1, "h"), (0xD2, "i"), (0xD3, "q"))
    for tag, code in codes:
        bits = 8 * struct.calcsize(">" + code) - (value < 0)
        if -(1 << bits) <= value < 1 << bits:
            found.append(struct.pack(">B" + code, tag, value))
    if not found:
        raise ValueError(f"msgpack has no integer {value}")
    return tuple(found)


def spell_text(text: str) -> Spellings:
    """Encodings of a text."""
    raw = text.encode("utf-8")
    return tuple(h + raw for h in _lengths(len(raw), (0xA0, 31), ((0xD9, "B"), (0xDA, "H"), (0xDB, "I"))))


def spell_map(count: int) -> Spellings:
    """Encodings of the header of a map with `count` entries."""
    return tuple(_lengths(count, (0x80, 15), ((0xDE, "H"), (0xDF, "I"))))


def spell_array(count: int) -> Spellings:
    """Encodings of the header of an array of `count`."""
    return tuple(_lengths(count, (0x90, 15), ((0xDC, "H"), (0xDD, "I"))))


def spell_bytes(length: int) -> Spellings:
    """Encodings of the header of a byte string."""
    return tuple(_lengths(length, None, ((0xC4, "B"), (0xC5, "H"), (0xC6, "I"))))


def spell_extension(code: int, least: int, most: int) -> Spellings:
    """Encodings of the header of an extension whose payload will be `least` to `most` bytes; says `least`."""
    widths = [
        (tag, c)
        for tag, c in ((0xC7, "B"), (0xC8, "H"), (0xC9, "I"))
        if most < 1 << (8 * struct.calcsize(">" + c))
    ]
    return tuple(h + bytes([code]) for h in _lengths(least, None, widths))


def extension_header(width: int, code: int, length: int) -> bytes:
    """An extension's header in `width` bytes (3, 4 or 6)."""
    tag, letter = {3: (0xC7, "B"), 4: (0xC8, "H"), 6: (0xC9, "I")}[width]
    return struct.pack(">B" + letter + "B", tag, length, code)


@lru_cache(maxsize=1024)
def _reachable(spare: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, ...]]:
    """Each sum of spare bytes below `ALIGNMENT` to a choice of one spelling per value that gives it."""
    sums: dict[int, tuple[int, ...]] = {0: ()}
    for options in spare:
        following: dict[int, tuple[int, ...]] = {}
        for total, chosen in sums.items():
            for index, extra in enumerate(options):
                if total + extra < ALIGNMENT:
                    following.setdefault(total + extra, (*chosen, index))
        sums = following
    return sums


def choose(values: Sequence[Spellings], position: int, alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Which spelling of each value to write, from `position` on, so that what follows them is aligned.

    Returns the choices and the alignment reached: `alignment`, or the largest power of two that can be.
    """
    sums = _reachable(tuple(tuple(len(s) - len(v[0]) for s in v) for v in values))
    start = position + sum(len(v[0]) for v in values)
    while alignment > 1:
        for pad in range(-start % alignment, ALIGNMENT, alignment):
            if pad in sums:
                return list(sums[pad]), alignment
        alignment //= 2
    return list(sums[0]), 1
