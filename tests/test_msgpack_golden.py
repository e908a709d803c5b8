"""Bytes that Flax writes are read here, and files written here are what stock Flax restores, bit for bit."""

from __future__ import annotations

import struct

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atbx.checkpoints import msgpack_padding as padding
from atbx.checkpoints.leaves import DTYPES, NAMES, file_name_of, raw_bytes
from atbx.checkpoints.msgpack_reader import inspect, read_tree
from atbx.checkpoints.msgpack_writer import write_tree
from atbx.core.abstract import Abstract


def text(name):
    return bytes([0xA0 + len(name)]) + name.encode()


GOLDEN = {
    "f32": (
        bytes.fromhex("81a161c715019391 02".replace(" ", ""))
        + text("float32")
        + bytes.fromhex("c4080000803f00000040"),
        torch.tensor([1.0, 2.0]),
    ),
    "bf16": (
        bytes.fromhex("81a161c71201939102") + text("bfloat16") + bytes.fromhex("c404803f0040"),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    ),
    "numpy scalar in a fixext16": (
        bytes.fromhex("81a161d8039390") + text("float32") + bytes.fromhex("c4040000803f"),
        torch.tensor(1.0),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_of_flax_are_read(name, tmp_path):
    raw, expected = GOLDEN[name]
    (tmp_path / "a.msgpack").write_bytes(raw)
    found = read_tree(tmp_path / "a.msgpack")
    assert found.form == "flax"
    assert found.metadata is None
    assert list(found.tree) == ["a"]
    assert found.tree["a"].dtype == expected.dtype
    assert torch.equal(found.tree["a"], expected)


def test_golden_complex_number_is_read(tmp_path):
    raw = bytes.fromhex("81a161c7130292") + struct.pack(">BdBd", 0xCB, 1.0, 0xCB, 2.0)
    (tmp_path / "a.msgpack").write_bytes(raw)
    assert read_tree(tmp_path / "a.msgpack").tree == {"a": 1 + 2j}


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_every_fixed_extension_width_is_read_as_an_extension(size, tmp_path):
    """Only 16 can hold a tensor; the others reach the payload parser and are refused there, not as unknown tags."""
    tag = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}[size]
    payload = (b"\x93\x90" + text("uint8") + b"\xc4\x01\x07")[:size].ljust(size, b"\x00")
    (tmp_path / "a.msgpack").write_bytes(b"\x81\xa1a" + bytes([tag, 1]) + payload)
    with pytest.raises(Exception, match="tree path a"):
        read_tree(tmp_path / "a.msgpack")


def bits(leaf):
    return bytes(raw_bytes(leaf))


def some_tensor(dtype, shape, seed=0):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype == torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


SHAPES = [(3, 5), (7,), (), (0, 4), (2, 1, 257)]


@pytest.mark.oracle
@pytest.mark.parametrize("chunk_bytes", [2**30, 64, 1])
@pytest.mark.parametrize("dtype", list(NAMES), ids=list(DTYPES))
def test_flax_restores_what_is_written_here_bit_for_bit(dtype, chunk_bytes, tmp_path):
    fs = pytest.importorskip("flax.serialization")
    tree = {f"t{i}": some_tensor(dtype, shape, i) for i, shape in enumerate(SHAPES)}
    write_tree(tmp_path / "a.msgpack", tree, chunk_bytes=chunk_bytes)
    restored = fs.msgpack_restore((tmp_path / "a.msgpack").read_bytes())
    assert restored.pop("__atbx__")["format"] == "atbx"
    assert list(restored) == list(tree)
    for name, tensor in tree.items():
        assert restored[name].dtype.name == NAMES[dtype]
        assert restored[name].shape == tuple(tensor.shape)
        assert restored[name].tobytes() == bits(tensor)
    again = read_tree(tmp_path / "a.msgpack", verify=True).tree
    for name, tensor in tree.items():
        assert (again[name].dtype, again[name].shape, bits(again[name])) == (
            dtype,
            tensor.shape,
            bits(tensor),
        )


@pytest.mark.oracle
@pytest.mark.parametrize("chunk_bytes", [2**30, 64])
@pytest.mark.parametrize("name", list(DTYPES))
def test_files_of_stock_flax_are_read_bit_for_bit(name, chunk_bytes, tmp_path, monkeypatch):
    fs = pytest.importorskip("flax.serialization")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(fs, "MAX_CHUNK_SIZE", chunk_bytes)  # the limit of 2**32 bytes, made small
    dtype = np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
    arrays = {
        f"t{i}": np.frombuffer(bits(some_tensor(DTYPES[name], s, i)), dtype).reshape(s)
        for i, s in enumerate(SHAPES)
    }
    arrays["list"] = [arrays["t0"], {"deep": arrays["t1"]}]
    (tmp_path / "a.msgpack").write_bytes(fs.to_bytes(arrays))
    found = read_tree(tmp_path / "a.msgpack")
    assert found.form == "flax"
    for i, shape in enumerate(SHAPES):
        assert found.tree[f"t{i}"].dtype == DTYPES[name]
        assert found.tree[f"t{i}"].shape == shape
        assert bits(found.tree[f"t{i}"]) == arrays[f"t{i}"].tobytes()
    assert list(found.tree["list"]) == ["0", "1"]
    assert bits(found.tree["list"]["1"]["deep"]) == arrays["t1"].tobytes()


@pytest.mark.oracle
def test_python_and_numpy_scalars_pass_both_ways(tmp_path):
    fs = pytest.importorskip("flax.serialization")
    tree = {
        "i": -70000,
        "big": 2**64 - 1,
        "f": 0.1,
        "c": 1 - 2j,
        "b": True,
        "n": None,
        "s": "é",
        "raw": b"\x00\xff",
    }
    write_tree(tmp_path / "a.msgpack", {**tree, "np": np.float32(2.5), "np8": np.int8(-3)})
    restored = fs.msgpack_restore((tmp_path / "a.msgpack").read_bytes())
    del restored["__atbx__"]
    assert isinstance(restored["np"], np.float32)
    assert isinstance(restored["np8"], np.int8)
    assert restored == {**tree, "np": 2.5, "np8": -3}
    found = read_tree(tmp_path / "a.msgpack").tree
    assert torch.equal(found.pop("np"), torch.tensor(2.5))
    assert torch.equal(found.pop("np8"), torch.tensor(-3, dtype=torch.int8))
    assert found == tree
    (tmp_path / "b.msgpack").write_bytes(fs.to_bytes({**tree, "np": np.float32(2.5)}))
    assert read_tree(tmp_path / "b.msgpack").tree.pop("np") == 2.5


@pytest.mark.oracle
def test_flax_restores_nodes_as_its_own_state_dict_of_the_tree(tmp_path):
    """Lists and tuples become what Flax makes of them; keys keep their type, also integers."""
    fs = pytest.importorskip("flax.serialization")
    leaf = np.arange(3, dtype=np.int32)
    tree = {"l": [leaf, (leaf, {"x": leaf})], "empty": [], "none": {}, "d": {"a/b": leaf, "~": leaf}}
    write_tree(tmp_path / "a.msgpack", tree)
    restored = fs.msgpack_restore((tmp_path / "a.msgpack").read_bytes())
    del restored["__atbx__"]
    expected = fs.msgpack_restore(fs.to_bytes(tree))
    np.testing.assert_equal(restored, expected)
    write_tree(tmp_path / "b.msgpack", {0: leaf, -5: {2**40: leaf}})
    restored = fs.msgpack_restore((tmp_path / "b.msgpack").read_bytes())
    assert list(restored)[:2] == [0, -5]
    assert list(restored[-5]) == [2**40]


@pytest.mark.oracle
def test_a_root_array_of_flax_is_read(tmp_path):
    fs = pytest.importorskip("flax.serialization")
    (tmp_path / "a.msgpack").write_bytes(fs.to_bytes(np.arange(6.0).reshape(2, 3)))
    assert torch.equal(
        read_tree(tmp_path / "a.msgpack").tree, torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    )


@pytest.mark.oracle
def test_a_file_restored_and_saved_by_flax_keeps_its_metadata(tmp_path):
    fs = pytest.importorskip("flax.serialization")
    tree = {"layers": [torch.arange(4.0), torch.arange(3).to(torch.bfloat16)]}
    write_tree(tmp_path / "a.msgpack", tree, metadata={"config": {"eps": 1e-5}})
    again = fs.msgpack_serialize(fs.msgpack_restore((tmp_path / "a.msgpack").read_bytes()))
    (tmp_path / "b.msgpack").write_bytes(again)
    found = read_tree(tmp_path / "b.msgpack", verify=True)
    assert found.metadata["config"] == {"eps": 1e-5}
    assert torch.equal(found.tree["layers"][0], tree["layers"][0])
    assert torch.equal(found.tree["layers"][1], tree["layers"][1])


@pytest.mark.parametrize("code", ["f2", "f4", "f8", "i2", "i4", "i8", "u2", "u4", "u8", "c8", "c16"])
def test_big_endian_arrays_are_swapped_and_not_corrupted(code, tmp_path):
    array = np.array([[1, 2], [3, 257 if code[1:] != "1" else 7]], dtype=">" + code)
    write_tree(tmp_path / "a.msgpack", {"a": array, "scalar": array[1, 1]})
    found = read_tree(tmp_path / "a.msgpack").tree
    np.testing.assert_array_equal(found["a"].numpy(), array.astype("<" + code))
    assert found["scalar"].item() == array[1, 1].item()


@pytest.mark.parametrize("make", ["transposed", "strided", "conj", "fortran", "broadcast", "parameter"])
def test_tensors_of_any_strides_are_written_in_c_order(make, tmp_path):
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    leaf = {
        "transposed": base.T,
        "strided": base[::2, 1::2],
        "conj": torch.complex(base, -base).conj(),
        "fortran": np.asfortranarray(base.numpy()),
        "broadcast": base[:1].expand(3, 6),
        "parameter": torch.nn.Parameter(base),
    }[make]
    write_tree(tmp_path / "a.msgpack", {"a": leaf})
    found = read_tree(tmp_path / "a.msgpack").tree["a"]
    expected = torch.as_tensor(leaf).detach().resolve_conj()
    assert torch.equal(found, expected)
    assert found.is_contiguous()


@given(st.integers(-(2**63), 2**64 - 1))
def test_every_spelling_of_an_integer_says_it(value):
    spellings = padding.spell_int(value)
    assert spellings[0] == msgpack.packb(value)
    assert [msgpack.unpackb(s) for s in spellings] == [value] * len(spellings)
    assert len({len(s) for s in spellings}) == len(spellings)


@given(st.text(max_size=300))
def test_every_spelling_of_a_text_says_it(value):
    spellings = padding.spell_text(value)
    assert spellings[0] == msgpack.packb(value)
    assert [msgpack.unpackb(s) for s in spellings] == [value] * len(spellings)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300])
def test_every_spelling_of_a_container_header_says_its_count(count):
    for spelling in padding.spell_map(count):
        body = b"".join(msgpack.packb(i) + b"\xc0" for i in range(count))
        assert len(msgpack.unpackb(spelling + body, strict_map_key=False)) == count
    for spelling in padding.spell_array(count):
        assert msgpack.unpackb(spelling + b"\xc0" * count) == [None] * count
    for spelling in padding.spell_bytes(count):
        assert msgpack.unpackb(spelling + b"x" * count) == b"x" * count


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text("abcdefgh_", min_size=1, max_size=40),
            st.lists(st.integers(0, 300), max_size=3),
            st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.bool, torch.complex128]),
        ),
        max_size=6,
        unique_by=lambda entry: entry[0],
    )
)
def test_every_tensor_starts_at_a_multiple_of_64(tmp_path_factory, entries):
    folder = tmp_path_factory.mktemp("align")
    tree = {"deep": {name: torch.zeros([n % 40 for n in dims], dtype=dtype) for name, dims, dtype in entries}}
    write_tree(folder / "a.msgpack", tree)
    for entry in inspect(folder / "a.msgpack"):
        # Headers of a scalar are so short that 64 is out of reach at times; 32 never is.
        assert entry.nbytes == 0 or entry.offset % (64 if entry.shape else 32) == 0
        assert entry.chunks == 1
    found = read_tree(folder / "a.msgpack").tree["deep"]
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {
        k: (v.shape, v.dtype) for k, v in tree["deep"].items()
    }
    assert all(v.numel() == 0 or v.data_ptr() % (64 if v.ndim else 32) == 0 for v in found.values())


def test_abstract_dtypes_are_named_like_numpy_names_them():
    for name, dtype in DTYPES.items():
        assert file_name_of(dtype) == name
        assert Abstract((2,), dtype).nbytes == 2 * dtype.itemsize
    for name in ("float32", "int8", "uint64", "complex128", "bool"):
        assert file_name_of(np.dtype(name)) == name
