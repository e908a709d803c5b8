"""GGUF files are read as the gguf package reads them, and damaged ones are refused by place."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoints import GGUF_TINY, f32, gguf_bytes, text, tiny_gguf

from atbx import checkpoints
from atbx.checkpoints.gguf_reader import GgufFile
from atbx.checkpoints.leaves import is_mapped
from atbx.core.errors import CheckpointError, TreeError, UnsupportedError


def write(folder: Path, raw: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(raw)
    return path


def small(metadata: dict[str, Any] | None = None) -> bytes:
    tensors = {"a": f32(torch.arange(6.0).reshape(2, 3)), "b": f32(torch.ones(8))}
    return gguf_bytes(metadata or {"general.architecture": "llama", "list": ["x", "yz"]}, tensors)


@pytest.mark.oracle
def test_values_of_every_type_are_those_that_the_gguf_package_wrote(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGUFValueType
    values = {
        "u8": (200, kinds.UINT8), "i8": (-5, kinds.INT8), "u16": (60000, kinds.UINT16), "i16": (-300, kinds.INT16),
        "u32": (4000000000, kinds.UINT32), "i32": (-7, kinds.INT32), "u64": (1 << 63, kinds.UINT64),
        "i64": (-(1 << 40), kinds.INT64), "f32": (0.5, kinds.FLOAT32), "f64": (0.1, kinds.FLOAT64),
        "bool": (True, kinds.BOOL), "text": ("grüße", kinds.STRING),
    }  # fmt: skip
    for key, (value, kind) in values.items():
        writer.add_key_value(key, value, kind)
    writer.add_array("texts", ["a", "", "日本"])
    writer.add_array("numbers", [1, 2, -3])
    writer.add_array("flags", [True, False])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("t", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("h", np.arange(8, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert {key: file.metadata[key] for key in values} == {key: value for key, (value, _) in values.items()}
    assert file.metadata["texts"] == ["a", "", "日本"]
    assert file.metadata["numbers"] == [1, 2, -3]
    assert file.metadata["flags"] == [True, False]
    assert file.metadata["nested"] == [[1, 2], [3]]
    assert file.metadata["general.architecture"] == "llama"
    assert set(file.metadata) == {*values, "texts", "numbers", "flags", "nested", "general.architecture"}
    assert file.tensor("t").tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert file.tensor("h").dtype == torch.float16
    assert file.tensor("h").tolist() == list(range(8))


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_tensors_quantised_by_the_gguf_package_have_its_shape_and_bits(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    path = tmp_path / "q.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(path).tensor("w").float()
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind]).reshape(5, 64)
    assert found.shape == (5, 64)
    assert np.array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.oracle
@pytest.mark.weights
def test_the_real_file_reads_as_the_gguf_package_reads_it(smollm2_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    theirs, ours = gguf.GGUFReader(smollm2_path), GgufFile(smollm2_path)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    assert all(ours.metadata[key] == theirs.fields[key].contents() for key in keys)
    assert [
        (t.name, tuple(t.shape[::-1].tolist()), t.tensor_type.name, t.data_offset) for t in theirs.tensors
    ] == [(t.name, t.shape, t.kind.name, t.offset) for t in ours.tensors.values()]
    for tensor in theirs.tensors[:12:2]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = ours.tensor(tensor.name).numpy()
        assert np.array_equal(found.view(np.uint32).ravel(), expected.view(np.uint32).ravel())


def test_unquantised_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    raw = torch.arange(4, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    path = write(tmp_path, gguf_bytes({}, {"f": f32(torch.ones(3, 5)), "b": ((4,), "BF16", raw)}))
    file = GgufFile(path)
    assert is_mapped(file.tensor("f"))
    assert is_mapped(file.tensor("b"))
    assert file.tensor("b").dtype == torch.bfloat16
    assert file.tensor("b").tolist() == [0, 1, 2, 3]


def test_opening_reads_no_array_and_asking_reads_it_once(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path, small()))
    assert list(file.metadata) == ["general.architecture", "list"]
    first = file.metadata["list"]
    assert first == ["x", "yz"]
    assert file.metadata["list"] is first


def test_the_stated_alignment_moves_the_data(tmp_path: Path) -> None:
    tensors = {"a": f32(torch.arange(32.0))}
    plain = GgufFile(write(tmp_path, gguf_bytes({"general.alignment": 32}, tensors)))
    head = gguf_bytes({"general.alignment": 8}, {})
    assert plain.tensor("a").tolist() == list(range(32))
    assert GgufFile(write(tmp_path, head, "b.gguf")).alignment == 8


# --- damaged files -------------------------------------------------------------------------------------------------


def test_a_file_cut_at_any_byte_is_refused_with_its_name(tmp_path: Path) -> None:
    raw = small()
    last = raw.rindex(struct.pack("<f", 1.0)) + 4
    for size in range(1, last):
        path = write(tmp_path, raw[:size])
        with pytest.raises(CheckpointError, match=r"model\.gguf") as caught:
            GgufFile(path)
        assert caught.value.offset is not None
        assert caught.value.offset <= max(size, 256)
    GgufFile(write(tmp_path, raw[:last]))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "a Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"PK\x03\x04 and more", "a zip archive"),
        (b"ggml and more bytes", "expected b'GGUF', found b'ggml'"),
    ],
)
def test_another_kind_of_file_is_named(tmp_path: Path, head: bytes, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        GgufFile(write(tmp_path, head))
    assert caught.value.offset == 0


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "byte 4: the GGUF version .* found 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
)
def test_versions_that_are_not_read_are_unsupported(tmp_path: Path, raw: bytes, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        GgufFile(write(tmp_path, raw))


HEAD = b"GGUF" + struct.pack("<I", 3)
ONE_KEY, ONE_TENSOR = HEAD + struct.pack("<QQ", 0, 1), HEAD + struct.pack("<QQ", 1, 0)


@pytest.mark.parametrize(
    ("raw", "offset", "said"),
    [
        (HEAD + struct.pack("<QQ", 1 << 60, 0), 8, "the number of tensors is absurd"),
        (HEAD + struct.pack("<QQ", 0, 1 << 60), 16, "the number of keys is absurd"),
        (HEAD + struct.pack("<QQ", 3, 0) + b"\0" * 48, 8, "too short for the number of tensors.*at most 2, found 3"),
        (HEAD + struct.pack("<QQ", 0, 9) + b"\0" * 48, 16, "too short for the number of keys"),
        (ONE_KEY + struct.pack("<Q", 1 << 50) + b"\0" * 16, 24, "name of key 0 is too long"),
        (ONE_KEY + text("k") + struct.pack("<I", 13) + b"\0" * 8, 33, "'k' has an unknown value type.*found 13"),
        (ONE_KEY + text("k") + struct.pack("<IQ", 8, 99) + b"ab", 45, "ends inside the value of key 'k'"),
        (ONE_KEY + text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe", 45, "value of key 'k' is not UTF-8"),
        (ONE_KEY + text("k") + struct.pack("<IIQ", 9, 13, 1), 37, "unknown element type"),
        (ONE_KEY + text("k") + struct.pack("<IIQ", 9, 0, 1 << 62), 41, "more elements than the file has bytes"),
        (ONE_KEY + text("k") + struct.pack("<IIQQ", 9, 8, 1, 5) + b"ab", 57, "element 0 of key 'k'"),
        (ONE_KEY + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5 + b"\0" * 50, None, "too deeply"),
        (HEAD + struct.pack("<QQ", 0, 2) + (text("k") + struct.pack("<IB", 0, 1)) * 2, 38, "'k' stands twice"),
        (ONE_TENSOR + text("t") + struct.pack("<I", 5) + b"\0" * 64, 33, "too many axes"),
        (ONE_TENSOR + text("t") + struct.pack("<IQIQ", 1, 8, 99, 0) + b"\0" * 64, 45, "'t' has an unknown type.*99"),
        (ONE_TENSOR + text("t") + struct.pack("<IQIQ", 1, 33, 2, 0) + b"\0" * 64, 37, "whole number of Q4_0 blocks"),
        (ONE_TENSOR + text("t") + struct.pack("<IQIQ", 1, 8, 0, 7) + b"\0" * 64, 49, "'t' is not aligned"),
        (ONE_TENSOR + text("t") + struct.pack("<IQIQ", 1, 1 << 62, 0, 0) + b"\0" * 64, 64, "past the end"),
        (ONE_TENSOR + text("t") + struct.pack("<IQIQ", 1, 8, 0, 1 << 62) + b"\0" * 64, None, "past the end"),
    ],
)  # fmt: skip
def test_damage_is_named_with_its_offset(tmp_path: Path, raw: bytes, offset: int | None, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        GgufFile(write(tmp_path, raw))
    assert caught.value.offset == offset or offset is None


def test_a_tensor_that_stands_twice_is_refused(tmp_path: Path) -> None:
    entry = text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)
    with pytest.raises(CheckpointError, match="'t' stands twice"):
        GgufFile(write(tmp_path, HEAD + struct.pack("<QQ", 2, 0) + entry * 2 + b"\0" * 64))


def test_tensors_that_overlap_are_named_both(tmp_path: Path) -> None:
    entries = text("t") + struct.pack("<IQIQ", 1, 16, 0, 0) + text("u") + struct.pack("<IQIQ", 1, 8, 0, 32)
    with pytest.raises(CheckpointError, match="'t' and 'u' overlap"):
        GgufFile(write(tmp_path, HEAD + struct.pack("<QQ", 2, 0) + entries + b"\0" * 128))


@pytest.mark.parametrize("alignment", [0, 12, "x"])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment: Any) -> None:
    with pytest.raises(CheckpointError, match=r"general\.alignment.*a power of two"):
        GgufFile(write(tmp_path, small({"general.alignment": alignment})))


def test_a_type_that_cannot_be_read_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes({}, {"w": ((1, 256), "Q2_K", b"\0" * 84)}))
    file = GgufFile(path)
    assert file.tensors["w"].nbytes == 84
    assert not file.tensors["w"].is_supported
    with pytest.raises(
        UnsupportedError, match=r"w \(Q2_K\) cannot be read.*model.gguf|model.gguf.*w \(Q2_K\)"
    ):
        file.tensor("w")


def test_empty_missing_and_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="empty"):
        GgufFile(write(tmp_path, b""))
    with pytest.raises(CheckpointError, match="cannot be opened"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="folder"):
        GgufFile(tmp_path)


@pytest.fixture(scope="module")
def valid_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("fuzz")
    vocabulary = {"tokenizer.ggml.tokens": ["a", "b"], "llama.rope.scaling.type": "linear",
                  "llama.rope.scaling.factor": 2.0}  # fmt: skip
    raw = tiny_gguf(folder / "valid.gguf", metadata=vocabulary).read_bytes()
    return folder / "fuzzed.gguf", raw


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_changed_bytes_give_a_model_or_an_error_of_ours(
    data: st.DataObject, valid_file: tuple[Path, bytes]
) -> None:
    path, valid = valid_file
    raw = bytearray(valid)
    header = 2600
    assert len(valid) > header
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        raw[at : at + 1] = data.draw(
            st.sampled_from([b"\0", b"\xff", b"\x01", b"\x7f"]) | st.binary(min_size=0, max_size=9)
        )
    path.write_bytes(raw)
    try:
        model = checkpoints.load(path)
    except (CheckpointError, UnsupportedError, TreeError):
        return
    assert model.family == "llama"
    assert set(GGUF_TINY) - set(GgufFile(path).metadata) <= {
        "llama.attention.head_count_kv",
        "llama.vocab_size",
    }
