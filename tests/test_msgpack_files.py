"""Weight files in use: mapped and not copied, written whole or not at all, node kinds, metadata, shards, EasyLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import weakref

import msgpack
import numpy as np
import pytest
import torch

from atbx.checkpoints import leaves
from atbx.checkpoints.leaves import Lazy, is_mapped, release
from atbx.checkpoints.msgpack_reader import inspect, read_tree
from atbx.checkpoints.msgpack_writer import write_tree
from atbx.core.abstract import Abstract
from atbx.core.errors import CheckpointError

TREE = {
    "embed": torch.arange(60, dtype=torch.float32).reshape(12, 5).to(torch.bfloat16),
    "layers": [{"w": torch.full((6, 4), float(i)), "b": torch.arange(6) + i} for i in range(11)],
    "pair": (torch.tensor([True, False]), 3),
}


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
    if isinstance(expected, (dict, list, tuple)):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def ext(array):
    payload = msgpack.packb((array.shape, array.dtype.name, array.tobytes()))
    return msgpack.ExtType(1, payload)


# --- mapping ---


def test_tensors_are_views_of_the_mapped_file(tmp_path):
    write_tree(tmp_path / "a.msgpack", TREE)
    found = read_tree(tmp_path / "a.msgpack").tree
    raw = (tmp_path / "a.msgpack").read_bytes()
    for entry, tensor in [
        (e, found["layers"][int(e.path.split("/")[1])]["w"])
        for e in inspect(tmp_path / "a.msgpack")
        if e.path.endswith("/w")
    ]:
        mapped, offset = leaves.mapping_of(tensor)
        assert len(mapped) == len(raw)
        assert offset == entry.offset
        assert raw[offset : offset + entry.nbytes] == tensor.numpy().tobytes()
    assert is_mapped(found["embed"])
    assert is_mapped(found["embed"][3:, 1])
    assert not is_mapped(torch.ones(3))


def test_writing_into_a_tensor_never_reaches_the_file(tmp_path):
    write_tree(tmp_path / "a.msgpack", {"a": torch.zeros(5000)})
    before = (tmp_path / "a.msgpack").read_bytes()
    found = read_tree(tmp_path / "a.msgpack").tree["a"]
    found += 1
    assert found.sum() == 5000
    assert (tmp_path / "a.msgpack").read_bytes() == before


def resident_pages(mapped_bytes):
    """KiB resident of the mapping with that many KiB, from the kernel's own account."""
    with open("/proc/self/smaps") as file:
        lines = file.read().splitlines()
    for i, line in enumerate(lines):
        if ".msgpack" in line.split("/")[-1] and int(lines[i + 1].split()[1]) == mapped_bytes:
            return next(int(x.split()[1]) for x in lines[i:] if x.startswith("Rss:"))
    raise AssertionError("the mapping was not found")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's /proc")
def test_release_hands_the_pages_back_and_the_tensor_stays_valid(tmp_path):
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    write_tree(tmp_path / "a.msgpack", {"a": tensor, "b": torch.ones(3)})
    found = read_tree(tmp_path / "a.msgpack").tree
    kib = -(-os.path.getsize(tmp_path / "a.msgpack") // leaves.PAGE) * leaves.PAGE // 1024
    assert resident_pages(kib) == 0
    assert found["a"].sum() == tensor.sum()
    assert resident_pages(kib) >= 4096
    assert release(found["a"]) is True
    assert resident_pages(kib) <= 2 * leaves.PAGE // 1024
    assert torch.equal(found["a"], tensor)
    assert release(found["b"]) is True
    assert release(torch.ones(3)) is False
    assert release(found["a"].clone()) is False


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_opening_a_file_of_64_mib_takes_no_memory_and_verifying_it_neither(tmp_path):
    tree = {f"t{i}": torch.full((1 << 21,), i, dtype=torch.float32) for i in range(8)}
    write_tree(tmp_path / "a.msgpack", tree)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * leaves.PAGE

    before = resident()
    found = read_tree(tmp_path / "a.msgpack", verify=True).tree
    assert resident() - before < 20 << 20  # what verifying reads is handed back as it goes
    assert all(is_mapped(tensor) for tensor in found.values())


def test_a_mapping_lives_as_long_as_a_tensor_of_it_and_no_longer(tmp_path):
    write_tree(tmp_path / "a.msgpack", {"a": torch.ones(8), "b": torch.ones(8)})
    tree = read_tree(tmp_path / "a.msgpack").tree
    a = tree["a"]
    mapped = weakref.ref(leaves.mapping_of(a)[0])
    del tree
    assert mapped() is not None
    (tmp_path / "a.msgpack").unlink()
    assert torch.equal(a, torch.ones(8))
    del a
    assert mapped() is None


# --- writing ---


def test_trees_come_back_with_their_node_kinds(tmp_path):
    write_tree(tmp_path / "a.msgpack", TREE)
    assert_same(read_tree(tmp_path / "a.msgpack", verify=True).tree, TREE)
    for root in ([torch.ones(2), {}], (torch.ones(2), [], ())):
        write_tree(tmp_path / "b.msgpack", root)
        assert_same(read_tree(tmp_path / "b.msgpack").tree, root)


def test_integer_keys_and_keys_with_slashes_keep_apart(tmp_path):
    tree = {0: [1], 7: {2**60: torch.ones(2)}, "a/b": (2,), "a": {"b": [3], "~1": (4,)}}
    write_tree(tmp_path / "a.msgpack", tree)
    assert_same(read_tree(tmp_path / "a.msgpack", verify=True).tree, tree)


def test_metadata_comes_back_with_format_and_version(tmp_path):
    metadata = {
        "config": {"eps": 1e-5, "layers": 2, "rope": None},
        "layouts": {"layers/0/w": "out_in"},
        "source": "test",
        "tokenizer": {"tokens": ["a", "\ud800", "é", "\x00"]},
        "generation": {"eos": [1, 2], "sample": True},
        "version": 99,
    }
    write_tree(tmp_path / "a.msgpack", TREE, metadata=metadata)
    found = read_tree(tmp_path / "a.msgpack").metadata
    assert {k: found[k] for k in metadata} == {**metadata, "version": 1}
    assert found["format"] == "atbx"
    assert found["nodes"] == {"layers": "list", "pair": "tuple"}
    write_tree(tmp_path / "b.msgpack", TREE, metadata=found)  # metadata of a file serves for the next
    assert read_tree(tmp_path / "b.msgpack").metadata == found


def test_lazy_leaves_are_loaded_one_at_a_time_and_released(tmp_path):
    alive, most = weakref.WeakSet(), []

    def load(i):
        tensor = torch.full((100, 10), float(i))
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    tree = {f"t{i}": Lazy(Abstract((100, 10), torch.float32), lambda i=i: load(i)) for i in range(8)}
    write_tree(tmp_path / "a.msgpack", tree)
    assert max(most) <= 2  # the one before is dropped as the next takes its name
    found = read_tree(tmp_path / "a.msgpack", verify=True).tree
    assert [float(found[f"t{i}"].mean()) for i in range(8)] == list(range(8))
    most.clear()
    write_tree(tmp_path / "b.msgpack", tree, shard_bytes=9000)
    assert len(most) == 8
    assert len(list(tmp_path.glob("b-*.msgpack"))) == 4


def test_a_tree_read_from_a_file_can_be_written_over_it(tmp_path):
    write_tree(tmp_path / "a.msgpack", TREE)
    found = read_tree(tmp_path / "a.msgpack")
    found.tree["embed"] = found.tree["embed"] * 2
    write_tree(tmp_path / "a.msgpack", found.tree, metadata=found.metadata)
    again = read_tree(tmp_path / "a.msgpack", verify=True).tree
    assert torch.equal(again["embed"], TREE["embed"] * 2)
    assert torch.equal(again["layers"][10]["w"], TREE["layers"][10]["w"])


def test_a_link_keeps_pointing_at_the_file_that_was_replaced(tmp_path):
    write_tree(tmp_path / "real.msgpack", {"a": torch.zeros(2)})
    (tmp_path / "link.msgpack").symlink_to("real.msgpack")
    write_tree(tmp_path / "link.msgpack", {"a": torch.ones(2)})
    assert (tmp_path / "link.msgpack").is_symlink()
    assert torch.equal(read_tree(tmp_path / "real.msgpack").tree["a"], torch.ones(2))


@pytest.mark.parametrize("shard_bytes", [None, 100])
def test_an_error_while_writing_leaves_the_old_file_whole_and_no_litter(shard_bytes, tmp_path):
    path = tmp_path / "a.msgpack"
    write_tree(path, TREE, shard_bytes=shard_bytes)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def breaks():
        raise KeyboardInterrupt

    lazy = Lazy(Abstract((2,), torch.float32), breaks)
    with pytest.raises(KeyboardInterrupt):
        write_tree(path, {"x": torch.ones(4000), "y": lazy}, shard_bytes=shard_bytes)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert_same(read_tree(path, verify=True).tree, TREE)


@pytest.mark.parametrize("shard_bytes", [None, 100])
def test_a_killed_writer_leaves_the_old_file_whole(shard_bytes, tmp_path):
    path = tmp_path / "a.msgpack"
    write_tree(path, TREE, shard_bytes=shard_bytes)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    script = f"""
        import os, signal, torch
        from atbx.checkpoints.leaves import Lazy
        from atbx.checkpoints.msgpack_writer import write_tree
        from atbx.core.abstract import Abstract
        def die():
            os.kill(os.getpid(), signal.SIGKILL)
        tree = {{"x": torch.ones(1 << 20), "y": Lazy(Abstract((2,), torch.float32), die)}}
        write_tree({str(path)!r}, tree, shard_bytes={shard_bytes})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {k: v for k, v in after.items() if k in before} == before
    assert_same(read_tree(path, verify=True).tree, TREE)
    assert_same(read_tree(tmp_path).tree, TREE)
    write_tree(path, {"a": torch.ones(1)})  # what it left behind is in nobody's way
    assert_same(read_tree(tmp_path).tree, {"a": torch.ones(1)})


def test_progress_stays_silent_where_stderr_is_no_terminal(tmp_path, capfd):
    write_tree(tmp_path / "a.msgpack", TREE, progress=True)
    assert capfd.readouterr().err == ""


# --- files by others ---


def test_foreign_numbered_maps_become_lists_in_numeric_order_only_where_the_abstract_tree_has_one(tmp_path):
    # Eleven entries in text order: "10" comes before "2".
    order = sorted(str(i) for i in range(11))
    raw = {
        "layers": {k: {"w": ext(np.array([int(k)]))} for k in order},
        "vocab": {"0": ext(np.array([5]))},
        "t": {1: 1, 0: 0},
    }
    (tmp_path / "a.msgpack").write_bytes(msgpack.packb(raw))
    plain = read_tree(tmp_path / "a.msgpack").tree
    assert list(plain["layers"]) == order
    leaf = Abstract((1,), torch.int64)
    abstract = {"layers": [{"w": leaf}] * 11, "vocab": {"0": leaf}, "t": (leaf, leaf)}
    guided = read_tree(tmp_path / "a.msgpack", abstract=abstract).tree
    assert [int(layer["w"]) for layer in guided["layers"]] == list(range(11))
    assert list(guided["vocab"]) == ["0"]
    assert guided["t"] == (0, 1)
    huge = {"layers": {"9" * 5000: 1}}
    (tmp_path / "c.msgpack").write_bytes(msgpack.packb(huge))
    assert read_tree(tmp_path / "c.msgpack", abstract={"layers": [leaf]}).tree == huge
    # One level more around the tree, as many files have it, is seen through.
    (tmp_path / "d.msgpack").write_bytes(msgpack.packb({"params": {"params": {"layers": {"1": 1, "0": 0}}}}))
    wrapped = read_tree(tmp_path / "d.msgpack", abstract={"layers": [leaf, leaf]}).tree
    assert wrapped == {"params": {"params": {"layers": [0, 1]}}}
    # A list of another length is still a list: `check` reports its length. Gaps stay a map.
    shorter = read_tree(tmp_path / "a.msgpack", abstract={"layers": [leaf] * 3}).tree
    assert len(shorter["layers"]) == 11
    (tmp_path / "b.msgpack").write_bytes(msgpack.packb({"layers": {"0": 1, "2": 2}}))
    assert read_tree(tmp_path / "b.msgpack", abstract={"layers": [leaf, leaf]}).tree == {
        "layers": {"0": 1, "2": 2}
    }


def test_raw_arrays_are_lists_and_long_ones_are_read(tmp_path):
    (tmp_path / "a.msgpack").write_bytes(
        msgpack.packb({"a": [1, [ext(np.arange(3))]], "long": list(range(70000))})
    )
    found = read_tree(tmp_path / "a.msgpack").tree
    assert found["a"][0] == 1
    assert torch.equal(found["a"][1][0], torch.arange(3))
    assert found["long"] == list(range(70000))


def test_easylm_streams_are_read_as_one_tree(tmp_path):
    packer = msgpack.Packer()
    parts = {
        ("params", "params", "wte"): torch.ones(3, 2).to(torch.bfloat16),
        ("params", "params", "h", "0", "w"): torch.arange(4.0),
        ("params", "params", "h", "1", "w"): torch.arange(4.0) + 1,
    }
    with open(tmp_path / "a.easylm", "wb") as file:
        for path, tensor in parts.items():
            name = str(tensor.dtype).removeprefix("torch.")
            payload = msgpack.packb((tuple(tensor.shape), name, bytes(leaves.raw_bytes(tensor))))
            file.write(packer.pack((path, msgpack.packb(msgpack.ExtType(1, payload)))))
        file.write(packer.pack((("step",), msgpack.packb(7))))
    found = read_tree(tmp_path / "a.easylm", abstract={"params": {"params": {"h": [1, 2]}}})
    assert found.form == "easylm"
    assert found.metadata is None
    assert found.tree["step"] == 7
    inner = found.tree["params"]["params"]
    assert torch.equal(inner["wte"], torch.ones(3, 2).to(torch.bfloat16))
    assert torch.equal(inner["h"][1]["w"], torch.arange(4.0) + 1)
    assert is_mapped(inner["wte"])
    assert [e.path for e in inspect(tmp_path / "a.easylm")] == ["/".join(p) for p in parts]


@pytest.mark.oracle
def test_easylm_leaves_that_flax_chunked_are_read(tmp_path, monkeypatch):
    fs = pytest.importorskip("flax.serialization")
    monkeypatch.setattr(fs, "MAX_CHUNK_SIZE", 16)
    big = np.arange(40, dtype=np.float32).reshape(8, 5)
    parts = {("a", "big"): big, ("a", "scalar"): np.float32(3), ("a", "z"): 1 + 2j, ("none",): None}
    stream = b"".join(msgpack.packb((path, fs.to_bytes(leaf))) for path, leaf in parts.items())
    (tmp_path / "a.stream").write_bytes(stream)
    found = read_tree(tmp_path / "a.stream").tree
    np.testing.assert_array_equal(found["a"]["big"].numpy(), big)
    assert found["a"]["scalar"] == 3
    assert found["a"]["z"] == 1 + 2j
    assert found["none"] is None


def test_tensors_beyond_4_gib_are_mapped(tmp_path):
    """A sparse file: offsets and lengths pass 32 bits, and nothing of the first tensor is read."""
    size = 2**32 - 1024
    head = b"\x93" + msgpack.packb([size]) + msgpack.packb("uint8") + b"\xc6" + size.to_bytes(4, "big")
    with open(tmp_path / "a.msgpack", "wb") as file:
        file.write(b"\x82\xa1a\xc9" + (len(head) + size).to_bytes(4, "big") + b"\x01" + head)
        file.seek(size, os.SEEK_CUR)
        file.write(msgpack.packb("b") + msgpack.packb(ext(np.arange(1000))))
    first, second = inspect(tmp_path / "a.msgpack")
    assert (first.shape, first.nbytes) == ((size,), size)
    assert second.offset > 2**32 - 1024
    found = read_tree(tmp_path / "a.msgpack").tree
    assert torch.equal(found["b"], torch.arange(1000))
    assert found["a"][-1] == 0


# --- shards ---


def test_shards_are_read_by_path_by_index_and_by_folder(tmp_path):
    write_tree(tmp_path / "a.msgpack", TREE, metadata={"source": "x"}, shard_bytes=300)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 7
    assert names[0] == "a-00001-of-00006.msgpack"
    assert names[-1] == "a.msgpack.index.json"
    for path in (tmp_path / "a.msgpack", tmp_path / "a.msgpack.index.json", tmp_path):
        found = read_tree(path, verify=True)
        assert found.form == "sharded"
        assert found.path.name == "a.msgpack.index.json"
        assert found.metadata["source"] == "x"
        assert_same(found.tree, TREE)
    assert len({e.file for e in inspect(tmp_path)}) == 6


@pytest.mark.oracle
def test_every_shard_opens_in_stock_flax_and_holds_what_the_index_says(tmp_path):
    fs = pytest.importorskip("flax.serialization")
    traverse = pytest.importorskip("flax.traverse_util")
    write_tree(tmp_path / "a.msgpack", TREE, shard_bytes=300, chunk_bytes=40)
    index = json.loads((tmp_path / "a.msgpack.index.json").read_text())
    held = {}
    for path in sorted(tmp_path.glob("a-*.msgpack")):
        flat = traverse.flatten_dict(fs.msgpack_restore(path.read_bytes()), sep="/")
        assert all(index["weight_map"][name] == path.name for name in flat)
        held |= flat
    assert set(held) == set(index["weight_map"])
    expected = traverse.flatten_dict(fs.to_state_dict({**TREE, "embed": 0}), sep="/")
    assert index["metadata"]["total_size"] == 12 * 5 * 2 + 11 * (24 * 4 + 6 * 8) + 2
    for name, value in expected.items():
        if name != "embed":
            np.testing.assert_array_equal(held[name], np.asarray(value))
    assert held["embed"].tobytes() == bytes(leaves.raw_bytes(TREE["embed"]))


def test_foreign_shards_are_read_like_hugging_face_writes_them(tmp_path):
    a, b = np.arange(4, dtype=np.float32), np.ones((2, 2), np.float16)
    (tmp_path / "flax_model-00001-of-00002.msgpack").write_bytes(msgpack.packb({"m": {"a": ext(a)}}))
    (tmp_path / "flax_model-00002-of-00002.msgpack").write_bytes(msgpack.packb({"m": {"b": ext(b)}}))
    weight_map = {"m/a": "flax_model-00001-of-00002.msgpack", "m/b": "flax_model-00002-of-00002.msgpack"}
    text = json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map})
    (tmp_path / "flax_model.msgpack.index.json").write_text(text)
    found = read_tree(tmp_path)
    assert found.metadata is None
    assert torch.equal(found.tree["m"]["a"], torch.arange(4.0))
    assert torch.equal(found.tree["m"]["b"], torch.ones(2, 2).half())
    with pytest.raises(CheckpointError, match="that atbx did not write has this name"):
        write_tree(tmp_path / "flax_model.msgpack", TREE, shard_bytes=300)
    assert len(list(tmp_path.iterdir())) == 3


def test_writing_again_replaces_shards_and_single_files_of_the_name(tmp_path):
    path = tmp_path / "a.msgpack"
    for shard_bytes in (300, 500, None, 300, 300, None):
        write_tree(path, {**TREE, "mark": shard_bytes}, shard_bytes=shard_bytes)
        assert read_tree(path, verify=True).tree["mark"] == shard_bytes
        assert_same(read_tree(tmp_path).tree["layers"], TREE["layers"])  # nothing else is left in the folder
    assert [p.name for p in tmp_path.iterdir()] == ["a.msgpack"]


def test_a_leaf_larger_than_a_shard_gets_one_for_itself(tmp_path):
    tree = {"a": torch.ones(10), "big": torch.ones(1000), "b": torch.ones(10)}
    write_tree(tmp_path / "a.msgpack", tree, shard_bytes=100)
    index = json.loads((tmp_path / "a.msgpack.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"a-0000{i}-of-00003.msgpack" for i in (1, 2, 3)]
    assert_same(read_tree(tmp_path).tree, tree)


def test_chunked_tensors_are_joined_and_single_chunks_stay_views(tmp_path):
    tensor = torch.arange(1000, dtype=torch.int16).reshape(10, 100)
    write_tree(tmp_path / "a.msgpack", {"a": tensor, "b": tensor[:1]}, chunk_bytes=300)
    entries = inspect(tmp_path / "a.msgpack")
    assert [(e.path, e.chunks, e.nbytes, e.shape) for e in entries] == [
        ("a", 7, 2000, (10, 100)),
        ("b", 1, 200, (1, 100)),
    ]
    found = read_tree(tmp_path / "a.msgpack", verify=True).tree
    assert torch.equal(found["a"], tensor)
    assert not is_mapped(found["a"])
    assert is_mapped(found["b"])
