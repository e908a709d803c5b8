"""GGUF blocks dequantise to the bits of the gguf package, and its block sizes are ours."""

from __future__ import annotations

import numpy as np
import pytest

from atbx.checkpoints.gguf_blocks import READERS, TYPES, VALUES_AT_ONCE, dequantise

BY_NAME = {kind.name: kind for kind in TYPES.values()}


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, BY_NAME[name].nbytes), dtype=np.uint8)


@pytest.mark.oracle
@pytest.mark.parametrize("name", READERS)
def test_random_blocks_dequantise_to_the_bits_of_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    count = VALUES_AT_ONCE // BY_NAME[name].values + 37
    blocks = random_blocks(name, count)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    ours = dequantise(blocks, name)
    assert ours.shape == (count, BY_NAME[name].values)
    expected = np.ascontiguousarray(expected, np.float32).reshape(ours.shape)
    assert np.array_equal(np.isnan(ours), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert np.array_equal(ours.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
    assert numbers.mean() > 0.8


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantised_numbers_come_back_as_the_gguf_package_says(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    blocks = packed.view(np.uint8).reshape(-1, BY_NAME[name].nbytes)
    ours = dequantise(blocks, name).reshape(8, 256)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name]).reshape(8, 256)
    assert np.array_equal(ours.view(np.uint32), expected.view(np.uint32))
    assert np.abs(ours - values).max() < 0.5


@pytest.mark.oracle
def test_block_sizes_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {int(t): (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    ours = {number: (kind.name, kind.values, kind.nbytes) for number, kind in TYPES.items()}
    shared = theirs.keys() & ours.keys()
    assert {n: theirs[n] for n in shared} == {n: ours[n] for n in shared}
    assert len(shared) >= 30


def test_a_q8_0_block_is_a_scale_times_signed_bytes() -> None:
    block = np.concatenate(
        (np.array([0.5], np.float16).view(np.uint8), np.arange(-16, 16, dtype=np.int8).view(np.uint8))
    )
    assert dequantise(block[None], "Q8_0")[0].tolist() == [0.5 * i for i in range(-16, 16)]


def test_a_q4_0_block_holds_low_halves_first_around_eight() -> None:
    quants = np.full(16, 0xF0, np.uint8)
    block = np.concatenate((np.array([2.0], np.float16).view(np.uint8), quants))
    assert dequantise(block[None], "Q4_0")[0].tolist() == [-16.0] * 16 + [14.0] * 16


def test_no_blocks_give_no_values() -> None:
    assert dequantise(np.empty((0, 144), np.uint8), "Q4_K").shape == (0, 256)
