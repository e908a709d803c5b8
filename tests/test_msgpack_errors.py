"""Every fault of a weight file or tree is refused with file, byte offset or tree path, both sides, and a cause."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
import zlib
from collections import namedtuple
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atbx.checkpoints import msgpack_writer, tree_plan
from atbx.checkpoints.leaves import Lazy
from atbx.checkpoints.msgpack_reader import inspect, read_tree
from atbx.checkpoints.msgpack_walk import CHUNKED, MAX_DEPTH
from atbx.checkpoints.msgpack_writer import write_tree
from atbx.core import trees
from atbx.core.abstract import Abstract
from atbx.core.errors import CheckpointError, OptionError


def ext(shape, dtype="float32", raw=None, code=1):
    raw = bytes(4 * int(np.prod(shape))) if raw is None else raw
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, raw)))


def chunked(shape=None, chunks=None, **other):
    full = {
        CHUNKED: True,
        "shape": {"0": 4} if shape is None else shape,
        "chunks": {"0": ext((4,))} if chunks is None else chunks,
        **other,
    }
    return {"deep": {"big": {k: v for k, v in full.items() if v != "absent"}}}


def fails(path, *fragments, offset=None, **options):
    with pytest.raises(CheckpointError) as caught:
        read_tree(path, **options)
    text = str(caught.value)
    assert str(path) in text
    for fragment in fragments:
        assert fragment in text, text
    if offset is not None:
        assert caught.value.offset == offset
        assert f"at byte {offset}" in text
    return text


def safetensors_bytes():
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    return struct.pack("<Q", len(header)) + header + bytes(4)


NOT_MSGPACK = {
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "Git LFS pointer",
        "git lfs pull",
    ),
    "HTML": (b"\n<!DOCTYPE html><html></html>", "an HTML page", "download"),
    "html tag": (b"<html><head></head></html>", "an HTML page", "login"),
    "XML": (b'<?xml version="1.0"?><Error/>', "XML or HTML", ""),
    "safetensors": (safetensors_bytes(), "a safetensors file", "atbx convert"),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + bytes(24), "a GGUF file", "atbx convert"),
    "pickle": (pickle.dumps({"a": [1]}), "a pickle", "can run code"),
    "numpy": (b"\x93NUMPY\x01\x00", "numpy", ""),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(20), "gzip", ""),
    "JSON": (b'{"a": 1}', "JSON", ""),
    "text": (b"hello", "bytes follow the end of the tree", "no msgpack"),
    "one number": (b"\x05", "this is no weight tree", "a msgpack map"),
    "random": (b"\xc1\x00\x00", "0xc1", "no msgpack file"),
}


@pytest.mark.parametrize("kind", NOT_MSGPACK)
def test_files_of_other_kinds_are_named(kind, tmp_path):
    raw, name, hint = NOT_MSGPACK[kind]
    (tmp_path / "a.msgpack").write_bytes(raw)
    fails(tmp_path / "a.msgpack", name, hint)


def test_a_zip_archive_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.msgpack", "w") as archive:
        archive.writestr("x/data.pkl", b"")
    fails(tmp_path / "a.msgpack", "zip archive", offset=0)


def test_missing_empty_and_special_files(tmp_path):
    fails(tmp_path / "none.msgpack", "no such file")
    (tmp_path / "a.msgpack").write_bytes(b"")
    fails(tmp_path / "a.msgpack", "the file is empty", "did not finish", offset=0)
    os.mkfifo(tmp_path / "pipe.msgpack")
    fails(tmp_path / "pipe.msgpack", "no regular file")
    os.mkfifo(tmp_path / "pipe.msgpack.index.json")
    fails(tmp_path / "pipe.msgpack.index.json", "no regular file")


def test_folders_without_or_with_several_trees(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    fails(tmp_path, "holds no msgpack weights", "config.json", "*.msgpack")
    write_tree(tmp_path / "a.msgpack", {})
    write_tree(tmp_path / "b.msgpack", {})
    fails(tmp_path, "several weight trees", "a.msgpack, b.msgpack", "Name the file")
    (tmp_path / "b.msgpack").unlink()
    (tmp_path / "a.msgpack").rename(tmp_path / "a-00001-of-00002.msgpack")
    fails(tmp_path, "shards without their index", "expected one *.msgpack.index.json", "found 1 shards")


# name: (content of the file or object to pack, fragments)
DAMAGED = {
    "unknown extension": (
        {"m": {"w": msgpack.ExtType(42, b"xx")}},
        ["tree path m/w", "unknown extension type 42", "1 (array)"],
    ),
    "timestamp": ({"m": msgpack.Timestamp(1)}, ["tree path m", "unknown extension type -1"]),
    "unknown dtype": (
        {"w": ext((1,), "float33")},
        ["tree path w", "unknown dtype name 'float33'", "bfloat16"],
    ),
    "string dtype": ({"w": ext((1,), "str64", b"abcdefgh")}, ["unknown dtype name 'str64'"]),
    "int4": ({"w": ext((4,), "int4", b"abcd")}, ["unknown dtype name 'int4'"]),
    "too few bytes": (
        {"m": {"w": ext((2, 3), raw=bytes(20))}},
        ["tree path m/w", "(2, 3)", "expected 24 bytes", "found 20"],
    ),
    "too many bytes": ({"w": ext((), raw=bytes(8))}, ["expected 4 bytes", "found 8"]),
    "negative dimension": ({"w": ext((-1,), raw=b"")}, ["dimension is malformed", "number -1"]),
    "text dimension": ({"w": ext(("3",), raw=b"")}, ["dimension is malformed", "found str"]),
    "huge dimension": ({"w": ext((2**62, 2**62, 0), raw=b"")}, ["beyond any tensor"]),
    "overlong dimension": ({"w": ext((2**64 - 1,), raw=b"")}, ["dimension is malformed"]),
    "many axes": ({"w": ext((1,) * 70, raw=bytes(4))}, ["shape is malformed", "at most 64", "array 70"]),
    "shape no array": ({"w": ext(3, raw=bytes(4))}, ["shape is malformed", "found number 3"]),
    "tuple of two": (
        {"w": msgpack.ExtType(1, msgpack.packb([[1], "float32"]))},
        ["description is malformed", "array 2"],
    ),
    "bytes no bytes": (
        {"w": msgpack.ExtType(1, msgpack.packb([[1], "float32", 1]))},
        ["bytes are malformed"],
    ),
    "dtype no text": ({"w": msgpack.ExtType(1, msgpack.packb([[1], 5, b""]))}, ["dtype name is malformed"]),
    "rest in the entry": (
        {"w": msgpack.ExtType(1, msgpack.packb([[1], "int8", b"a"]) + b"zz")},
        ["2 bytes follow a tensor"],
    ),
    "scalar with a shape": ({"w": ext((1,), code=3)}, ["numpy scalar has a shape", "found (1,)"]),
    "complex of three": (
        {"c": msgpack.ExtType(2, msgpack.packb([1.0, 2.0, 3.0]))},
        ["complex number is malformed"],
    ),
    "complex of text": ({"c": msgpack.ExtType(2, msgpack.packb([1.0, "x"]))}, ["is no number", "found str"]),
    "list key": (b"\x81\x91\x01\x02", ["a map key is neither text nor an integer"]),
    "float key": (b"\x81\xcb" + bytes(8) + b"\x01", ["a map key is neither"]),
    "bool key": (b"\x81\xc3\x01", ["a map key is neither", "found constant"]),
    "twice": (b"\x82\xa1a\x01\xa1a\x02", ["key 'a' occurs twice"]),
    "twice by another spelling": (b"\x82\xa1a\x01\xd9\x01a\x02", ["key 'a' occurs twice"]),
    "not UTF-8": (b"\x81\xa2\xff\xfe\x01", ["a map key is not UTF-8"]),
    "deep": (b"\x81\xa1a" * (MAX_DEPTH + 40) + b"\x01", ["nested too deep", f"at most {MAX_DEPTH} levels"]),
    "deep arrays": (b"\x81\xa1a" + b"\x91" * 5000 + b"\x01", ["nested too deep"]),
    "count beyond the file": (b"\xdf\xff\xff\xff\xff\xa1a\x01", ["a map of 4294967295 entries", "cut short"]),
    "array beyond the file": (
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        ["tree path a", "an array of 4294967295 entries"],
    ),
    "text beyond the file": (b"\x81\xa1a\xdb\xff\xff\xff\xff", ["a text is too long"]),
    "chunks of other things": (chunked(chunks={"0": 3}), ["tree path deep/big", "chunk 0", "a int"]),
    "no shape": (
        chunked(shape="absent"),
        ["tree path deep/big", CHUNKED, "'shape' is malformed", "nothing", "reserved"],
    ),
    "no chunks": (chunked(chunks="absent"), ["'chunks' is malformed", "reserved for chunked arrays"]),
    "empty chunks": (chunked(chunks={}), ["has no chunks"]),
    "gap in chunks": (
        chunked(chunks={"0": ext((2,)), "2": ext((2,))}),
        ["'chunks' is malformed", 'keys "0"'],
    ),
    "chunk not flat": (chunked(chunks={"0": ext((2, 2))}), ["chunk 0", "expected a flat array", "(2, 2)"]),
    "chunks of two dtypes": (
        chunked(chunks={"0": ext((2,)), "1": ext((2,), "int32")}),
        ["chunk 1", "another dtype"],
    ),
    "chunked shape wrong": (
        chunked(shape={"0": 5}),
        ["tree path deep/big", "(5,)", "expected 20 bytes", "found 16"],
    ),
    "chunked shape of text": (chunked(shape={"0": "5"}), ["shape is malformed"]),
    "chunked shape of bool": (chunked(shape={"0": True}), ["shape is malformed"]),
    "metadata by others": ({"__atbx__": {"a": 1}}, ["__atbx__", "reserved for atbx's metadata"]),
    "metadata a tensor": ({"__atbx__": ext((1,))}, ["__atbx__", "not written by atbx"]),
    "newer version": (
        {"__atbx__": {"format": "atbx", "version": 7}},
        ["version", "expected 1 to 1", "found 7", "Update"],
    ),
    "metadata no text": (
        {"__atbx__": {"format": "atbx", "version": 1, "metadata": 3}},
        ["expected JSON text"],
    ),
    "metadata damaged": (
        {"__atbx__": {"format": "atbx", "version": 1, "crc32": 0, "metadata": "{}"}},
        ["checksum differs"],
    ),
    "stream entry": (msgpack.packb([["a"], b"\x01"]) + b"\x91\x01", ["an EasyLM entry is malformed"]),
    "stream key": (
        msgpack.packb([["a"], b"\x01"]) + msgpack.packb([[], b"\x01"]),
        ["EasyLM key path is malformed"],
    ),
    "stream leaf": (msgpack.packb([["a"], 5]), ["tree path a", "EasyLM leaf is malformed"]),
    "stream too deep": (msgpack.packb([["a"] * 200000, b"\x01"]), ["nested too deep", "found 200000"]),
    "very long keys": (
        msgpack.packb({"k" * 60000: {"j" * 60000: msgpack.ExtType(9, b"")}}),
        ["kkk...", "type 9"],
    ),
    "stream twice": (msgpack.packb([["a"], b"\x01"]) * 2, ["same path", "tree path a"]),
    "stream through a leaf": (
        msgpack.packb([["a"], b"\x01"]) + msgpack.packb([["a", "b"], b"\x01"]),
        ["made a leaf"],
    ),
    "stream leaf of two": (msgpack.packb([["a"], b"\x01\x02"]), ["1 bytes follow an EasyLM leaf"]),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_trees_are_refused_by_place(kind, tmp_path):
    content, fragments = DAMAGED[kind]
    raw = content if isinstance(content, bytes) else msgpack.packb(content)
    (tmp_path / "a.msgpack").write_bytes(raw)
    fails(tmp_path / "a.msgpack", *fragments)


def test_trailing_bytes_are_counted_and_placed(tmp_path):
    raw = msgpack.packb({"w": ext((2,))})
    (tmp_path / "a.msgpack").write_bytes(raw + b"\x00" * 5)
    fails(tmp_path / "a.msgpack", "5 bytes follow the end of the tree", offset=len(raw))


def test_a_file_cut_short_says_so_and_names_the_tensor(tmp_path):
    write_tree(tmp_path / "a.msgpack", {"m": {"w": torch.ones(100)}})
    raw = (tmp_path / "a.msgpack").read_bytes()
    (entry,) = inspect(tmp_path / "a.msgpack")
    (tmp_path / "a.msgpack").write_bytes(raw[: entry.offset + 100])
    text = fails(
        tmp_path / "a.msgpack", "tree path m/w", "a tensor runs past the end of the file", "cut short"
    )
    assert f"found {100 + entry.offset - int(text.split('at byte ')[1].split(':')[0])}" in text


def test_every_truncation_is_refused(tmp_path):
    write_tree(tmp_path / "a.msgpack", {"m": [{"w": torch.ones(3)}, 1 + 2j, "x"]})
    raw = (tmp_path / "a.msgpack").read_bytes()
    for length in range(len(raw)):
        (tmp_path / "b.msgpack").write_bytes(raw[:length])
        fails(tmp_path / "b.msgpack")


def test_a_flipped_bit_in_a_tensor_is_found_by_its_checksum(tmp_path):
    write_tree(tmp_path / "a.msgpack", {"m": {"v": torch.ones(9), "w": torch.ones(100)}})
    entry = inspect(tmp_path / "a.msgpack")[1]
    raw = bytearray((tmp_path / "a.msgpack").read_bytes())
    raw[entry.offset + 50] ^= 4
    (tmp_path / "a.msgpack").write_bytes(raw)
    assert read_tree(tmp_path / "a.msgpack").tree["m"]["w"].shape == (100,)
    fails(
        tmp_path / "a.msgpack", "tensor m/w", "checksum differs", "damaged", offset=entry.offset, verify=True
    )


def test_a_changed_shape_of_the_same_size_is_found_by_its_checksum(tmp_path):
    write_tree(tmp_path / "a.msgpack", {"w": torch.ones(2, 3)}, chunk_bytes=2**20)
    raw = (tmp_path / "a.msgpack").read_bytes()
    entry = inspect(tmp_path / "a.msgpack")[0]
    head = raw[: entry.offset]
    at = head.rindex(b"\x02")
    assert raw[head.index(b"\x03", at)] == 3
    swapped = bytearray(raw)
    swapped[at], swapped[head.index(b"\x03", at)] = 3, 2
    (tmp_path / "a.msgpack").write_bytes(swapped)
    assert read_tree(tmp_path / "a.msgpack").tree["w"].shape == (3, 2)
    fails(tmp_path / "a.msgpack", "tensor w", "checksum differs", verify=True)


def test_verify_refuses_files_without_checksums(tmp_path):
    write_tree(tmp_path / "a.msgpack", {"a": torch.ones(2)}, checksums=False)
    fails(tmp_path / "a.msgpack", "no checksums", "read it unverified", verify=True)
    (tmp_path / "b.msgpack").write_bytes(msgpack.packb({"a": ext((1,))}))
    fails(tmp_path / "b.msgpack", "no checksums", verify=True)


def rewritten(path, change):
    """Change the tree and the metadata of the atbx file at `path`, and make the metadata's checksum fit."""
    content = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
    meta = json.loads(content["__atbx__"]["metadata"])
    change(content, meta)
    text = json.dumps(meta)
    content["__atbx__"] |= {"metadata": text, "crc32": zlib.crc32(text.encode())}
    path.write_bytes(msgpack.packb(content))


def test_metadata_that_contradicts_the_tree_is_refused(tmp_path):
    path = tmp_path / "a.msgpack"

    def written(change):
        write_tree(path, {"l": [torch.ones(2)], "d": {"x": torch.ones(2)}})
        rewritten(path, change)

    written(lambda content, meta: meta["nodes"].update(d="list"))
    fails(path, "tree path d", "calls this node a list", "found keys 'x'")
    written(lambda content, meta: meta["nodes"].update(l="set"))
    fails(path, "tree path l", "calls this node a set")
    written(lambda content, meta: meta.update(nodes=[1]))
    fails(path, "__atbx__/nodes is malformed")
    written(lambda content, meta: meta.update(checksums={"d/x": "1"}))
    fails(path, "__atbx__/checksums is malformed", verify=True)
    written(lambda content, meta: content["d"].pop("x"))
    fails(path, "tensor d/x: it is not in the file", verify=True)
    written(lambda content, meta: content["d"].update(y=ext((1,))))
    fails(path, "tensor d/y: it has no checksum", verify=True)


# --- shards ---


def sharded(tmp_path, change=None):
    write_tree(
        tmp_path / "a.msgpack",
        {"x": torch.ones(30), "y": torch.ones(30), "z": torch.ones(30)},
        shard_bytes=120,
    )
    index = tmp_path / "a.msgpack.index.json"
    content = json.loads(index.read_text())
    if change:
        change(content)
        index.write_text(json.dumps(content))
    return index


def test_missing_shards_are_named_all_at_once(tmp_path):
    index = sharded(tmp_path)
    (tmp_path / "a-00001-of-00003.msgpack").unlink()
    (tmp_path / "a-00003-of-00003.msgpack").unlink()
    fails(index, "a-00001-of-00003.msgpack, a-00003-of-00003.msgpack", "expected 3 files", "did not finish")


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path):
    sharded(
        tmp_path,
        lambda c: c["weight_map"].update(
            {"x": "a-00002-of-00003.msgpack", "n/m": "a-00002-of-00003.msgpack"}
        ),
    )
    with pytest.raises(
        CheckpointError, match=r"a-00002-of-00003.msgpack: .* this shard holds n/m, x, and it does not"
    ):
        read_tree(tmp_path / "a.msgpack")


def test_a_leaf_in_two_shards_is_refused(tmp_path):
    index = sharded(tmp_path)
    first, second = (tmp_path / f"a-0000{i}-of-00003.msgpack" for i in (1, 2))
    content = msgpack.unpackb(second.read_bytes())
    second.write_bytes(msgpack.packb(content | msgpack.unpackb(first.read_bytes())))
    with pytest.raises(CheckpointError, match=r"a-00002-of-00003.msgpack: x is in two shards"):
        read_tree(index)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        pytest.param("[" * 100000, "not valid JSON", id="deep"),
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "expected an object, found list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "names a file outside the folder for a"),
        ('{"weight_map": {"a": "../x.msgpack"}}', "'../x.msgpack'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "'/etc/passwd'"),
        ('{"weight_map": {"a": ".."}}', "outside the folder"),
        ('{"weight_map": {"a": "x\\u0000"}}', "outside the folder"),
        ('{"weight_map": {"a": "x.msgpack"}, "metadata": {"__atbx__": 3}}', "x.msgpack"),
    ],
)
def test_malformed_indices_are_refused(text, fragment, tmp_path):
    (tmp_path / "a.msgpack.index.json").write_text(text)
    fails(tmp_path / "a.msgpack.index.json", fragment)


def test_an_index_that_is_no_text_is_refused_by_offset(tmp_path):
    (tmp_path / "a.msgpack.index.json").write_bytes(b'{"a": "\xff"}')
    fails(tmp_path / "a.msgpack.index.json", "not UTF-8", offset=7)


def test_metadata_of_an_index_is_checked(tmp_path):
    index = sharded(tmp_path, lambda c: c["metadata"].update(__atbx__=3))
    fails(index, "metadata/__atbx__ is malformed", "found int")
    sharded_folder = tmp_path / "b"
    sharded_folder.mkdir()
    index = sharded(sharded_folder, lambda c: c["metadata"]["__atbx__"].update(version="2"))
    fails(index, "version", "found '2'")


# --- writing ---

Point = namedtuple("Point", "x y")
BAD_TREES = {
    "root tensor": (torch.ones(2), ["(root)", "dict, list or tuple", "Tensor"]),
    "reserved metadata key": ({"__atbx__": 1}, ["tree path __atbx__", "reserved"]),
    "reserved chunk key": ({"m": {CHUNKED: 1}}, ["tree path m", CHUNKED, "reserved"]),
    "string array": ({"m": {"s": np.array(["a"])}}, ["tree path m/s", "dtype('<U1')"]),
    "structured array": ({"s": np.zeros(2, "i4,f4")}, ["tree path s", "cannot be written"]),
    "object array": ({"s": np.array([None])}, ["tree path s", "dtype('O')"]),
    "datetime array": ({"s": np.array(["2020"], "M8[D]")}, ["tree path s"]),
    "longdouble": ({"s": np.zeros(1, np.longdouble)}, ["tree path s"]),
    "masked array": ({"s": np.ma.masked_array([1.0], [True])}, ["tree path s", "mask would be lost"]),
    "numpy text": ({"s": np.str_("a")}, ["tree path s"]),
    "meta tensor": ({"s": torch.empty(2, device="meta")}, ["tree path s", "no dense values"]),
    "sparse tensor": ({"s": torch.ones(2, 2).to_sparse()}, ["tree path s", "no dense values", "sparse"]),
    "quantised bits": (
        {"s": torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
        ["tree path s", "float4"],
    ),
    "object": ({"a": [{"b": object()}]}, ["tree path a/0/b", "object"]),
    "set": ({"a": {1, 2}}, ["tree path a", "set"]),
    "named tuple": ({"p": Point(1, 2)}, ["tree path p", "named tuple"]),
    "float key": ({"a": {1.5: 1}}, ["tree path a", "1.5", "float"]),
    "bool key": ({True: 1}, ["(root)", "bool"]),
    "huge key": ({2**64: 1}, ["beyond 64 bits"]),
    "huge integer": ({"a": -(2**63) - 1}, ["tree path a", "beyond 64 bits"]),
    "two spellings of a key": ({"a": {1: 1, "1": 2}}, ["tree path a", "'1'", "one text and one integer"]),
    "surrogate": ({"a": "\ud800"}, ["tree path a", "no UTF-8"]),
    "surrogate key": ({"\ud800": 1}, ["no UTF-8"]),
    "lazy of an odd dtype": (
        {"a": Lazy(Abstract((1,), torch.complex32), lambda: None)},
        ["tree path a", "complex32"],
    ),
    "lazy lies": (
        {"m": {"a": Lazy(Abstract((2,), torch.float32), lambda: torch.ones(3))}},
        ["tree path m/a", "announced", "torch.float32 (2,)", "torch.float32 (3,)"],
    ),
    "lazy gives an array": (
        {"a": Lazy(Abstract((1,), torch.float32), lambda: np.ones(1))},
        ["tree path a", "ndarray"],
    ),
    "lazy source gone": (
        {"a": Lazy(Abstract((1,), torch.float32), lambda: Path("/nonexistent/source").read_bytes())},
        ["tree path a", "source of the tensor", "/nonexistent/source"],
    ),
}


@pytest.mark.parametrize("kind", BAD_TREES)
def test_trees_that_cannot_be_written_are_refused_by_path_and_leave_nothing(kind, tmp_path):
    tree, fragments = BAD_TREES[kind]
    with pytest.raises(CheckpointError) as caught:
        write_tree(tmp_path / "a.msgpack", tree)
    for fragment in (str(tmp_path / "a.msgpack"), *fragments):
        assert fragment in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_too_deep_is_refused_and_one_at_the_limit_is_not(tmp_path):
    tree = torch.ones(1)
    for _ in range(MAX_DEPTH):
        tree = {"a": tree}
    write_tree(tmp_path / "a.msgpack", tree)
    assert inspect(tmp_path / "a.msgpack")[0].path == trees.path_string(["a"] * MAX_DEPTH)
    with pytest.raises(CheckpointError, match="nested too deep"):
        write_tree(tmp_path / "a.msgpack", {"a": tree})


@pytest.mark.parametrize(
    ("metadata", "where", "found"),
    [
        ({"config": {"x": [1, b"raw"]}}, "metadata/config/x/1", "bytes"),
        ({"config": {1: 2}}, "metadata/config", "int"),
        ({"source": np.float32(1)}, "metadata/source", "float32"),
        ({"t": torch.ones(1)}, "metadata/t", "Tensor"),
        ({"t": {1, 2}}, "metadata/t", "set"),
    ],
)
def test_metadata_that_json_does_not_have_is_refused_by_place(metadata, where, found, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        write_tree(tmp_path / "a.msgpack", {}, metadata=metadata)
    assert str(caught.value).startswith(where + ":")
    assert f"found {found}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_the_reader_would_refuse_as_too_long_is_not_written(tmp_path, monkeypatch):
    with pytest.raises(
        CheckpointError, match=r"tree path a: a key is too long; expected at most 65536 bytes"
    ):
        write_tree(tmp_path / "a.msgpack", {"a": {"é" * 40000: 1}})
    monkeypatch.setattr(tree_plan, "MAX_TEXT", 10)
    for leaf in ("é" * 6, b"x" * 11):
        with pytest.raises(
            CheckpointError, match=r"tree path a: .* too long; expected at most 10 bytes.*uint8"
        ):
            write_tree(tmp_path / "a.msgpack", {"a": leaf})
    monkeypatch.setattr(msgpack_writer, "MAX_TEXT", 100)
    with pytest.raises(
        CheckpointError, match=r"__atbx__: the metadata is too long; expected at most 100 bytes"
    ):
        write_tree(tmp_path / "a.msgpack", {}, metadata={"x": "y" * 100})
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_holds_itself_is_refused(tmp_path):
    loop = {}
    loop["a"] = loop
    with pytest.raises(CheckpointError, match=r"metadata/a/a/.*nested deeper than 128 levels"):
        write_tree(tmp_path / "a.msgpack", {}, metadata=loop)
    with pytest.raises(CheckpointError, match=r"tree path a/a/.*nested too deep"):
        write_tree(tmp_path / "a.msgpack", loop)
    assert list(tmp_path.iterdir()) == []


def test_options_out_of_range_are_refused(tmp_path):
    for options in ({"chunk_bytes": 0}, {"chunk_bytes": 2**32}, {"shard_bytes": 0}):
        with pytest.raises(OptionError, match=next(iter(options))):
            write_tree(tmp_path / "a.msgpack", {}, **options)


def test_paths_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"none/a.msgpack: the file cannot be written: No such file"):
        write_tree(tmp_path / "none" / "a.msgpack", {})
    (tmp_path / "folder.msgpack").mkdir()
    with pytest.raises(CheckpointError, match=r"folder.msgpack: the file cannot be written"):
        write_tree(tmp_path / "folder.msgpack", {})
    assert [p.name for p in tmp_path.iterdir()] == ["folder.msgpack"]


def test_keys_that_collide_in_an_index_are_refused(tmp_path):
    tree = {"a/b": torch.ones(9), "a": {"b": torch.ones(9)}}
    with pytest.raises(CheckpointError, match="tree path a/b: two leaves have this path"):
        write_tree(tmp_path / "a.msgpack", tree, shard_bytes=36)
    assert list(tmp_path.iterdir()) == []


# --- hostile bytes ---


def valid_files():
    flax = msgpack.packb({"a": ext((2, 3)), "l": {"0": ext((1,), "int8", b"a"), "1": 1.5}, "c": chunked()})
    stream = msgpack.packb([["a", "b"], msgpack.packb(ext((2,)))]) + msgpack.packb([["a", "c"], b"\x01"])
    return [flax, stream]


@pytest.fixture(scope="module")
def own_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "a.msgpack"
    write_tree(
        path,
        {"m": [torch.ones(3), (1 + 2j, np.float32(1))], 5: torch.ones(40)},
        metadata={"c": {"x": 1}},
        chunk_bytes=80,
    )
    return path.read_bytes()


def assert_tree_or_error(raw, path):
    path.write_bytes(raw)
    for read in (read_tree, inspect):
        try:
            found = read(path)
        except CheckpointError:
            continue
        tensors = (
            [x for x in trees.leaves(found.tree) if isinstance(x, torch.Tensor)] if read is read_tree else []
        )
        for tensor in tensors:  # every byte of every view can be read
            assert tensor.numel() * tensor.element_size() <= len(raw)
            bytes(tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b"")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_give_a_tree_or_a_checkpoint_error(data, own_file, tmp_path):
    raw = bytearray(data.draw(st.sampled_from([*valid_files(), own_file])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        action = data.draw(st.sampled_from(["set", "insert", "delete", "repeat"]))
        if action == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif action == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif action == "repeat":
            raw[at:at] = raw[at : at + data.draw(st.integers(1, 30))]
        elif len(raw) > 1:
            del raw[at : at + data.draw(st.integers(1, 9))]
        raw = raw or bytearray(b"\x80")
    assert_tree_or_error(bytes(raw), tmp_path / "a.msgpack")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(min_size=1, max_size=200))
def test_random_bytes_give_a_tree_or_a_checkpoint_error(raw, tmp_path):
    assert_tree_or_error(raw, tmp_path / "a.msgpack")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tree=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_any_msgpack_tree_is_read_as_the_package_msgpack_reads_it(tree, tmp_path):
    (tmp_path / "a.msgpack").write_bytes(msgpack.packb({"root": tree}))
    assert read_tree(tmp_path / "a.msgpack").tree == {"root": tree}


def test_a_file_of_nothing_but_empty_maps_is_refused_before_memory_is_gone(tmp_path):
    """One byte in the file is 64 in memory: the count of nodes is bounded."""
    count = (1 << 21) + 10
    (tmp_path / "a.msgpack").write_bytes(b"\x81\xa1a\xdd" + struct.pack(">I", count) + b"\x80" * count)
    fails(tmp_path / "a.msgpack", "more than 2097152 nodes", "tree path a/")
