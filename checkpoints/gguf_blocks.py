"""The block formats of GGUF tensors: their sizes, and their values as float32.

A tensor is a sequence of blocks of equal size; within a block, scales and small integers are packed side by side.
Values are computed in float32 in the order in which ggml computes them, so that they agree to the bit with its own
reference. Work goes block range by block range: temporaries stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

VALUES_AT_ONCE = 1 << 17
"""Values unpacked at a time: about 2 MB of temporaries."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type of ggml: its name, values a block, bytes a block."""

    name: str
    values: int
    nbytes: int


TYPES: dict[int, BlockType] = {
    number: BlockType(name, values, nbytes)
    for number, name, values, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}
"""Every type that a file may hold, by its number; those that can be read are in `READERS`."""


def dequantise(blocks: Array, kind: str) -> Array:
    """The values of packed blocks as float32.

    blocks: uint8 [N, bytes a block].
    kind:   a name in `READERS`; any other is a KeyError (the reader of files refuses it before, by name).
    Returns float32 [N, values a block].
    """
    read = READERS[kind]
    values = next(t.values for t in TYPES.values() if t.name == kind)
    result: Array = np.empty((len(blocks), values), dtype=np.float32)
    step = max(1, VALUES_AT_ONCE // values)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        # Blocks with a scale of infinity or NaN come out as such; that is their value, not a mishap.
        with np.errstate(all="ignore"):
            read(blocks[part], result[part])
    return result


def _half(blocks: Array, start: int) -> Array:
    """The float16 at a byte of each block, as float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """Bytes [..., n] to values 0 to 15 [..., 2n]: the low halves first, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _bits(blocks: Array, start: int) -> Array:
    """The 32 bits of the four bytes at `start` as uint8 [N, 32], lowest first."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")


def _read_f32(blocks: Array, out: Array) -> None:
    out[:] = np.ascontiguousarray(blocks).view(np.float32)


def _read_f16(blocks: Array, out: Array) -> None:
    out[:] = np.ascontiguousarray(blocks).view(np.float16)


def _read_bf16(blocks: Array, out: Array) -> None:
    wide = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16
    out[:] = wide.view(np.float32)


def _read_q4_0(blocks: Array, out: Array) -> None:
    np.subtract(_nibbles(blocks[:, 2:]), 8, out=out, dtype=np.float32, casting="unsafe")
    out *= _half(blocks, 0)


def _read_q4_1(blocks: Array, out: Array) -> None:
    np.multiply(_nibbles(blocks[:, 4:]), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _read_q5_0(blocks: Array, out: Array) -> None:
    values = _nibbles(blocks[:, 6:]) | _bits(blocks, 2) << 4
    np.subtract(values, 16, out=out, dtype=np.float32, casting="unsafe")
    out *= _half(blocks, 0)


def _read_q5_1(blocks: Array, out: Array) -> None:
    values = _nibbles(blocks[:, 8:]) | _bits(blocks, 4) << 4
    np.multiply(values, _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _read_q8_0(blocks: Array, out: Array) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _scales_and_minima(packed: Array) -> tuple[Array, Array]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes [N, 12]: each uint8 [N, 8].

    The first four of each stand whole in the low six bits of bytes 0 to 3 and 4 to 7; the last four have their low
    four bits in the halves of bytes 8 to 11 and their upper two in the top bits of bytes 0 to 7.
    """
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6) << 4), axis=1)
    minima = np.concatenate((middle & 63, (high >> 4) | (middle >> 6) << 4), axis=1)
    return scales, minima


def _scale_and_shift(blocks: Array, values: Array, out: Array) -> None:
    """`d * scale * value - dmin * minimum` for eight runs of 32 values: values uint8 [N, 8, 32]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    result = out.reshape(-1, 8, 32)
    np.multiply(values, (_half(blocks, 0) * scales)[:, :, None], out=result)
    result -= (_half(blocks, 2) * minima)[:, :, None]


def _read_q4_k(blocks: Array, out: Array) -> None:
    _scale_and_shift(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32), out)


def _read_q5_k(blocks: Array, out: Array) -> None:
    values = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # Bit j of byte l is the fifth bit of value l in run j.
    runs = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = blocks[:, None, 16:48] >> runs & 1
    _scale_and_shift(blocks, values | fifth << 4, out)


def _read_q6_k(blocks: Array, out: Array) -> None:
    # Two halves of 128 values; within one, four runs of 32 whose upper two bits share the bytes of qh.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    result = out.reshape(-1, 16, 16)
    values = (low | high << 4).reshape(-1, 16, 16)
    np.subtract(values, 32, out=result, dtype=np.float32, casting="unsafe")
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    result *= (_half(blocks, 208) * scales)[:, :, None]


READERS: dict[str, Callable[[Array, Array], None]] = {
    "F32": _read_f32,
    "F16": _read_f16,
    "BF16": _read_bf16,
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q5_0": _read_q5_0,
    "Q5_1": _read_q5_1,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}
"""`read(blocks, out)` by type name: fill float32 [N, values] from uint8 [N, bytes]."""
