"""A user's own op, the operators of staged values, and the public face of the ops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_checks import check_op, run, shapes, stage

from atbx import ops
from atbx.core.abstract import Abstract, Dim
from atbx.core.errors import AtbxError, BucketError, OptionError, ShapeError, StagingError
from atbx.core.op import Cost, registered_ops

F32 = torch.float32
SQUARED_RELU = ops.define_op(
    "test_squared_relu",
    lambda x, *, slope: Abstract(x.shape, x.dtype),
    lambda x, *, slope: (x.clamp(min=0) * slope).square(),
    lambda operands, results, *, slope: Cost(3.0 * results[0].numel, 2.0 * results[0].nbytes),
)
MIRROR = ops.define_op("test_mirror", lambda x: x, lambda x: x.flip(0), mixes=lambda x: [(0, 0)])


def test_a_users_op_runs_stages_and_costs_like_a_built_in_one():
    x = torch.randn(3, 5)
    check_op(lambda x: SQUARED_RELU(x, slope=2.0), x, oracle=lambda x: 4 * x.clamp(min=0) ** 2)
    program = stage(lambda x: SQUARED_RELU(x, slope=2.0) + 1.0, Abstract((3, 5), F32))
    assert "test_squared_relu[slope=2.0]" in str(program)
    assert program.equations[0].cost() == Cost(45.0, 120.0)
    assert registered_ops()["test_squared_relu"] is SQUARED_RELU
    assert stage(MIRROR, Abstract((3,), F32)).cost() == Cost(0.0, 24.0)


def test_a_users_op_that_mixes_is_refused_on_a_padded_axis():
    with pytest.raises(BucketError, match="test_mirror mixes along axis 0"):
        stage(MIRROR, Abstract((Dim(8, "T"),), F32))
    assert shapes(lambda x: SQUARED_RELU(x, slope=1.0), Abstract((Dim(8, "T"),), F32)).shape[0].tag == "T"


def test_a_name_is_taken_once_and_is_an_identifier():
    for name in ("test_mirror", "add", "rms_norm"):
        with pytest.raises(AtbxError, match=f"an op named '{name}' exists already"):
            ops.define_op(name, lambda x: x, lambda x: x)
    with pytest.raises(OptionError, match="name: define_op: a name must be an identifier; found 'my op'"):
        ops.define_op("my op", lambda x: x, lambda x: x)


@pytest.mark.parametrize(
    ("name", "shape", "reference", "message"),
    [
        ("test_wrong_size", lambda x: x, lambda x: x[:1], r"result 0 .*expected f32\[3\], found f32\[1\]"),
        (
            "test_wrong_dtype",
            lambda x: x,
            lambda x: x.double(),
            r"result 0 .*expected f32\[3\], found f64\[3\]",
        ),
        ("test_wrong_number", lambda x: (x, x), lambda x: (x,), "differ in the number of results"),
        ("test_not_a_tuple", lambda x: (x,), lambda x: x, "differ in the number of results"),
        ("test_no_tensor", lambda x: x, lambda x: 3.0, "result 0 of the reference rule is no tensor"),
    ],
)
def test_a_reference_rule_that_breaks_its_shape_rule_is_named(name, shape, reference, message):
    op = ops.define_op(name, shape, reference)
    with pytest.raises(ShapeError, match=f"{name}: .*{message}"):
        run(op, torch.ones(3))


def test_staged_operators_are_the_ops():
    def everything(x, y):
        chosen = ops.where((x < y) == (x >= 0), x + y * 2 - y / 3, -x)
        more = ops.where(ops.logical_or(x > 1, x <= 2), 1 - chosen, 2 / y)
        return (more @ y[0])[None, ..., 1:], x != y

    x, y = torch.randn(2, 3, 3), torch.randn(2, 3, 3)

    def oracle(x, y):
        chosen = torch.where((x < y) == (x >= 0), x + y * 2 - y / 3, -x)
        return ((1 - chosen) @ y[0])[None, ..., 1:], x != y

    program = stage(everything, Abstract((2, 3, 3), F32), Abstract((2, 3, 3), F32))
    names = [e.op.name for e in program.equations]
    assert names == [
        *("less", "less_equal", "equal", "multiply", "add", "divide", "subtract", "multiply", "where"),
        *("less", "less_equal", "logical_or", "subtract", "divide", "where"),
        *("getitem", "matmul", "getitem", "not_equal"),
    ]
    # The operators of torch tensors have the same meaning.
    for ours, theirs in zip(run(everything, x, y), oracle(x.double(), y.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes on exceptions came with Python 3.11")
def test_errors_while_staging_name_the_users_line():
    def wrong(x):
        return x @ ops.reshape(x, (3, 2)) + x

    with pytest.raises(ShapeError, match="add: sizes differ") as caught:
        stage(wrong, Abstract((2, 3), F32))
    assert any("test_ops_define.py" in note and "in wrong" in note for note in caught.value.__notes__)


def test_an_index_tensor_is_refused_with_the_op_to_use():
    with pytest.raises(ShapeError, match=r"getitem: .*found Staged. ops.take gathers"):
        stage(lambda x, i: x[i], Abstract((2, 3), F32), Abstract((2,), torch.int64))
    with pytest.raises(StagingError, match="add got a list"):
        stage(lambda x: ops.add(x, [1.0]), Abstract((2,), F32))


def test_every_public_op_is_listed_and_has_a_docstring():
    for name in ops.__all__:
        value = getattr(ops, name)
        assert value is not None
        if callable(value):
            assert value.__doc__, name


def test_the_folder_is_no_package_of_its_own():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import ops"
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=False
    )
    assert found.returncode != 0
    assert "this folder is the package atbx.ops" in found.stderr
