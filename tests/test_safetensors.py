"""Safetensors files: mapped, single and sharded, with every damage named by file."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atbx.checkpoints.leaves import is_mapped, release
from atbx.checkpoints.safetensors_reader import DTYPES, read_safetensors
from atbx.core.errors import CheckpointError, MissingExtraError, UnsupportedError

safetensors = pytest.importorskip("safetensors.torch")


def save(path: Path, **tensors: torch.Tensor) -> Path:
    safetensors.save_file(tensors, path)
    return path


def shards(folder: Path) -> Path:
    save(folder / "model-00001-of-00002.safetensors", a=torch.arange(4.0), b=torch.ones(2, 3))
    save(folder / "model-00002-of-00002.safetensors", c=torch.zeros(5))
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors",
             "c": "model-00002-of-00002.safetensors"}  # fmt: skip
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d != torch.float8_e8m0fnu])
def test_tensors_of_every_dtype_have_their_bits_and_are_views(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(3, 5)
    found = read_safetensors(save(tmp_path / "m.safetensors", odd=torch.ones(3, dtype=torch.int8), x=tensor))
    assert set(found) == {"odd", "x"}
    loaded = found["x"].load()
    assert (loaded.dtype, loaded.shape, found["x"].abstract.shape) == (dtype, (3, 5), (3, 5))
    assert torch.equal(loaded.reshape(-1).view(torch.uint8), bits)
    assert is_mapped(loaded)


def test_pages_that_were_read_can_be_handed_back(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", x=torch.arange(100000.0))
    tensor = read_safetensors(path)["x"].load()
    assert tensor.sum() == torch.arange(100000.0).sum()
    assert release(tensor)
    assert tensor[99999] == 99999


def test_shards_read_as_one(tmp_path: Path) -> None:
    for path in (shards(tmp_path), tmp_path / "model.safetensors.index.json"):
        found = read_safetensors(path)
        assert sorted(found) == ["a", "b", "c"]
        assert found["a"].load().tolist() == [0, 1, 2, 3]
        assert found["c"].load().shape == (5,)


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    found = read_safetensors(save(tmp_path / "m.safetensors", s=torch.tensor(2.5), e=torch.empty(0, 7)))
    assert found["s"].load() == 2.5
    assert found["e"].load().shape == (0, 7)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shards are missing: model-00002-of-00002\.safetensors"):
        read_safetensors(tmp_path)


def test_a_shard_of_another_download_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    save(shards(tmp_path) / "model-00002-of-00002.safetensors", d=torch.zeros(1))
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors: the shard does not hold c"
    ):
        read_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    save(shards(tmp_path) / "model-00002-of-00002.safetensors", a=torch.zeros(4), c=torch.zeros(5))
    with pytest.raises(CheckpointError, match="a is in two shards"):
        read_safetensors(tmp_path)


def test_an_index_never_reaches_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../other.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="outside the folder for a"):
        read_safetensors(tmp_path)


def test_a_folder_without_weights_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"
    ):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "an HTML page"),
        (b"\x80\x02}q\x00.", "the file ends inside the header|a pickle"),
        (b"abc", "ends inside the header.*8 bytes of length"),
        (struct.pack("<Q", 1 << 40) + b"{}", "ends inside the header.*1099511627776 bytes of JSON"),
        (struct.pack("<Q", 9) + b'{"a": 1}}', "the header is malformed"),
        (struct.pack("<Q", 7) + b"nothing", "the header is malformed"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, raw: bytes, said: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"m\.safetensors at byte \d+: .*({said})"):
        read_safetensors(path)


def test_a_file_cut_at_any_byte_is_refused_with_its_size(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", a=torch.arange(6.0), b=torch.ones(3))
    raw = path.read_bytes()
    for size in range(1, len(raw), 3):
        path.write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=r"m\.safetensors at byte") as caught:
            read_safetensors(path)
        if size > 8 + struct.unpack("<Q", raw[:8])[0]:
            assert f"expected {len(raw)} bytes, found {size}" in str(caught.value)


def test_a_missing_library_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "m.safetensors", a=torch.ones(1))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match=r"safetensors.*atbx\[convert\]"):
        read_safetensors(path)


def test_a_dtype_that_torch_lacks_is_named_with_its_tensor(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(
        (UnsupportedError, CheckpointError), match=r"m\.safetensors.*(dtype of w|malformed).*F4|F4"
    ):
        read_safetensors(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_changed_bytes_give_tensors_or_an_error_of_ours(data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    path = save(folder / "m.safetensors", a=torch.arange(6.0), b=torch.ones(3, dtype=torch.bfloat16))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + 1] = data.draw(st.binary(min_size=0, max_size=4))
    path.write_bytes(raw)
    try:
        found = read_safetensors(path)
    except (CheckpointError, UnsupportedError):
        return
    for lazy in found.values():
        assert lazy.load().shape == lazy.abstract.shape
