"""How a tokenizer spells bytes in its tokens: GPT-2's byte alphabet, or SentencePiece's marked spaces.

A decoder that works on a whole list of tokens cannot say what one token contributes. The two spellings in use
can be read token by token, and this module says which one a `tokenizer.json` has and reads it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atbx.core.errors import UnsupportedError

SPACE_MARK = "▁"  # U+2581
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Spelling:
    """is_byte_level: tokens are written in GPT-2's byte alphabet; otherwise spaces are marked with U+2581.
    has_byte_tokens: `<0x41>` is the byte 0x41. start_spaces: spaces dropped at the start of a whole text."""

    is_byte_level: bool
    has_byte_tokens: bool = False
    start_spaces: int = 0

    def to_bytes(self, token: str, *, is_added: bool) -> bytes:
        """The bytes that a token stands for; an added token of a byte-level vocabulary is spelled in plain text."""
        if self.is_byte_level:
            return token.encode() if is_added else _unspell(token)
        byte = _BYTE_TOKEN.fullmatch(token) if self.has_byte_tokens else None
        return bytes.fromhex(byte[1]) if byte else token.replace(SPACE_MARK, " ").encode()


def read_spelling(decoder: Mapping[str, Any] | None) -> Spelling:
    """The spelling that the `decoder` of a `tokenizer.json` undoes.

    Raises UnsupportedError naming a decoder that cannot be read token by token.
    """
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if "ByteLevel" in names and set(names) <= {"ByteLevel", "Fuse"}:
        return Spelling(is_byte_level=True)
    if names.count("Replace") == 1 and set(names) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replace = steps[names.index("Replace")]
        strips = [step for step in steps if step["type"] == "Strip"]
        is_marked = replace["pattern"] == {"String": SPACE_MARK} and replace["content"] == " "
        is_start_only = all(step["content"] == " " and step["stop"] == 0 for step in strips)
        # A strip before the fuse would work on every token.
        is_fused = not strips or ("Fuse" in names and names.index("Fuse") < names.index("Strip"))
        if is_marked and is_start_only and is_fused:
            return Spelling(False, "ByteFallback" in names, sum(step["start"] for step in strips))
    raise UnsupportedError(
        "this decoder cannot be read token by token",
        where="tokenizer.json, decoder",
        expected="ByteLevel, or Replace ▁ with ByteFallback, Fuse and Strip at the start",
        found=" + ".join(names) or "none",
    )


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 bytes are themselves, the others the letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _unspell(token: str) -> bytes:
    table = _byte_of_letter()
    if all(letter in table for letter in token):
        return bytes(table[letter] for letter in token)
    return token.encode()
