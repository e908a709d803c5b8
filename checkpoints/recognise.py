"""Recognise a file by its first bytes: the name of its format, for errors that say what was given instead."""

from __future__ import annotations

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer"),
    (b"GGUF", "a GGUF file"),
    (b"PK\x03\x04", "a zip archive (a torch or npz file)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x93NUMPY", "a numpy array file"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ\x00", "an xz file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
)

HINTS = {
    "a Git LFS pointer": "The weights were not downloaded: run `git lfs pull`, or download the file itself",
    "an HTML page": "The download returned a web page: check the address and whether it needs a login",
    "a GGUF file": "Convert it with `atbx convert`",
    "a safetensors file": "Convert it with `atbx convert`",
    "a zip archive (a torch or npz file)": "Convert it to safetensors first",
    "a pickle": "Convert it to safetensors first; pickles are never opened because they can run code",
}


def recognise(head: bytes, size: int) -> str | None:
    """The format that the first bytes `head` of a file of `size` bytes tell, in words; None for anything else.

    Msgpack has no magic bytes, so it is never recognised here.
    """
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    text = head[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page"
    if text.startswith((b"<?xml", b"<!--", b"<error")):
        return "an XML or HTML page"
    if len(head) >= 10 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= size - 8:
        return "a safetensors file"
    if len(head) > 2 and head[0] == 0x80 and head[1] in (2, 3, 4, 5):
        return "a pickle"
    if text.startswith((b'{"', b"{\n", b"{\r", b"{ ", b"[{", b'["')):
        return "a JSON text"
    return None


def hint_for(name: str) -> str | None:
    """What to do when a file of this format was given in place of a weight file."""
    return HINTS.get(name)
