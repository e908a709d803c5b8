"""`check` compares parameters with the abstract tree as a whole: one report, every mismatch, by tree path."""

from __future__ import annotations

import pytest
import torch

from atbx.checkpoints.check import check
from atbx.checkpoints.msgpack_reader import read_tree
from atbx.checkpoints.msgpack_writer import write_tree
from atbx.core import trees
from atbx.core.abstract import Abstract
from atbx.core.errors import OptionError, TreeError

F32, BF16 = torch.float32, torch.bfloat16


def abstract(layers=2):
    layer = {"w": Abstract((6, 4), F32, layout="out_in"), "square": Abstract((4, 4), F32, layout="out_in")}
    return {
        "embed": Abstract((10, 4), F32),
        "layers": [dict(layer) for _ in range(layers)],
        "norm": Abstract((4,), F32),
    }


def params(dtype=F32, layers=2):
    return trees.map_leaves(lambda a: torch.zeros(a.shape, dtype=dtype), abstract(layers))


def mismatches(found, expected=None, **options):
    with pytest.raises(TreeError) as caught:
        check(found, abstract() if expected is None else expected, **options)
    text = str(caught.value)
    count = len(caught.value.mismatches)
    assert f"({count} mismatch{'es' if count > 1 else ''})" in text
    assert all(f"\n  {line}" in text for line in caught.value.mismatches)
    return list(caught.value.mismatches)


def test_a_tree_that_fits_passes():
    check(params(), abstract())
    check(params(BF16), abstract())
    check(abstract(), abstract(), dtype="same")
    check(params(), abstract(), metadata={"layouts": {"layers/0/w": "out_in"}, "config": {}})
    check(params(torch.int8), abstract(), dtype="any")


def test_every_mismatch_is_in_one_report():
    found = params()
    del found["norm"]
    found["extra"] = {"deep": torch.zeros(3, dtype=BF16), "empty": {}}
    found["embed"] = torch.zeros(11, 4)
    found["layers"][0]["w"] = torch.zeros(4, 6)
    found["layers"][1]["w"] = torch.zeros(6, 4, dtype=torch.int8)
    found["layers"][1]["square"] = [torch.zeros(4)]
    assert mismatches(found) == [
        "embed: expected shape [10, 4], found [11, 4] (only the first axis differs: +1 rows)",
        "layers/0/w: expected shape [6, 4], found [4, 6] (transposed; the model wants out_in [out, in])",
        "layers/1/w: expected floating point (like float32), found int8",
        "layers/1/square: expected float32 [4, 4], found a list of 1",
        "norm: missing, expected float32 [4]",
        "extra/deep: unexpected, found bfloat16 [3]",
        "extra/empty: unexpected, found an empty dict",
    ]


def test_dtypes_are_compared_by_family_or_exactly():
    assert mismatches(params(BF16), dtype="same")[0] == "embed: expected dtype float32, found bfloat16"
    assert len(mismatches(params(BF16), dtype="same")) == 6
    one = {"a": Abstract((2,), torch.int32)}
    check({"a": torch.zeros(2, dtype=torch.uint8)}, one)
    for dtype, family in ((F32, "float32"), (torch.bool, "bool"), (torch.complex64, "complex64")):
        line = mismatches({"a": torch.zeros(2, dtype=dtype)}, one)
        assert line == [f"a: expected integers (like int32), found {family}"]
    with pytest.raises(OptionError, match=r"check\(dtype=\).*'loose'"):
        check(params(), abstract(), dtype="loose")


def test_a_square_matrix_stored_transposed_is_found_by_its_layout():
    metadata = {"layouts": {"layers/1/square": "in_out", "layers/0/w": "out_in"}}
    assert mismatches(params(), metadata=metadata) == [
        "layers/1/square: expected layout out_in, the file's metadata says in_out: it is stored [in, out], transpose it"
    ]
    assert mismatches(params(), metadata={"layouts": {"layers/1/w": "blocked"}}) == [
        "layers/1/w: expected layout out_in, the file's metadata says blocked"
    ]


@pytest.mark.parametrize("levels", [1, 2])
def test_an_extra_level_is_named_once_and_the_rest_compared_below_it(levels):
    found = params()
    del found["norm"]
    for _ in range(levels):
        found = {"params": found}
    lines = mismatches(found)
    assert lines[0] == "(root): there is an extra level 'params': pass tree['params']"
    assert lines[1:] == [
        *["params: there is an extra level 'params': pass tree['params']"] * (levels - 1),
        "/".join(["params"] * levels + ["norm"]) + ": missing, expected float32 [4]",
    ]


def test_a_wrapper_with_other_collections_beside_it_is_named():
    lines = mismatches({"params": params(), "step": 3})
    assert lines == ["(root): there is an extra level 'params': pass tree['params']"]


def test_a_missing_level_is_named():
    assert mismatches(params(), {"params": abstract()}) == [
        "(root): the level 'params' is missing: pass {'params': tree}"
    ]


def test_lists_of_another_length_say_both_lengths():
    lines = mismatches(params(layers=3))
    assert lines[0] == "layers: expected 2 entries, found 3"
    assert lines[1:] == [
        "layers/2/w: unexpected, found float32 [6, 4]",
        "layers/2/square: unexpected, found float32 [4, 4]",
    ]
    lines = mismatches(params(layers=1))
    assert lines[0] == "layers: expected 2 entries, found 1"
    assert lines[1:] == [
        "layers/1/w: missing, expected float32 [6, 4]",
        "layers/1/square: missing, expected float32 [4, 4]",
    ]


def test_kinds_of_nodes_are_compared():
    found = params()
    found["layers"] = dict(enumerate(found["layers"]))
    assert mismatches(found) == [
        "layers: expected a list, found a dict with the same keys: "
        "read it with abstract=, which turns such a dict into a list"
    ]
    found["layers"] = tuple(found["layers"].values())
    assert mismatches(found) == ["layers: expected a list, found a tuple"]
    found["layers"] = torch.ones(2)
    assert mismatches(found) == ["layers: expected a list of 2, found float32 [2]"]


def test_integer_and_text_keys_are_told_apart():
    lines = mismatches({0: torch.zeros(2)}, {"0": Abstract((2,), F32)})
    assert lines == [
        "0: missing, expected float32 [2] (there is the key 0 of type int)",
        "0: unexpected, found float32 [2]",
    ]


@pytest.mark.parametrize(
    ("shape", "guess"),
    [
        ((4, 6), " (transposed)"),
        ((12, 6, 4), " (an extra first axis of 12: layers stacked by a scan?)"),
        ((5, 4), " (only the first axis differs: -1 rows)"),
        ((24,), " (the same number of elements in another shape)"),
        ((6, 5), ""),
        ((), ""),
    ],
)
def test_wrong_shapes_come_with_a_guess(shape, guess):
    text = "[" + ", ".join(map(str, shape)) + "]"
    assert mismatches({"a": torch.zeros(shape)}, {"a": Abstract((6, 4), F32)}) == [
        f"a: expected shape [6, 4], found {text}{guess}"
    ]


def test_python_scalars_are_compared_with_what_stands_in_their_place():
    check({"a": 3, "n": None}, {"a": 3, "n": None})
    assert mismatches({"a": 3.0}, {"a": Abstract((), F32)}) == ["a: expected float32 [], found 3.0"]
    assert mismatches({"a": 3}, {"a": 4}) == ["a: expected 4, found 3"]
    assert mismatches({"a": torch.ones(())}, {"a": 4}) == ["a: expected 4, found float32 []"]


def test_dataclass_nodes_are_walked_by_their_fields():
    @trees.node
    class Pair:
        left: object
        right: object
        name: str = trees.static_field(default="x")

    one = Abstract((1,), F32)
    check(Pair(torch.ones(1), torch.ones(1)), Pair(one, one, "y"))
    assert mismatches({"p": Pair(torch.ones(1), torch.ones(2))}, {"p": Pair(one, one)}) == [
        "p/right: expected shape [1], found [2] (only the first axis differs: +1 rows)"
    ]
    assert mismatches({"left": torch.ones(1), "right": torch.ones(1)}, Pair(one, one)) == [
        "(root): expected a Pair, found a dict"
    ]


def test_what_is_read_from_a_file_is_checked_with_its_metadata(tmp_path):
    write_tree(tmp_path / "a.msgpack", params(), metadata={"layouts": {"layers/0/square": "in_out"}})
    found = read_tree(tmp_path / "a.msgpack")
    check(found.tree, abstract(), dtype="same")
    assert len(mismatches(found.tree, metadata=found.metadata)) == 1
