"""Bad calls: each is refused by an error of atbx that names the argument, the path or the user's line.

Bad options and caches are in test_bad_options; bad files in test_msgpack_errors, test_gguf_reader, test_safetensors,
test_load and test_convert; operands of single ops in test_ops_*.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from refusals import cases, check
from small_models import random_params, small_llama

import atbx
from atbx import ops
from atbx.core import errors
from atbx.core.buckets import Bucket, ladder
from atbx.models import llama

CONFIG = small_llama()
PARAMS = random_params(CONFIG)
GENERATE = atbx.generator(llama.forward, CONFIG)

# --- jit: what it is made of ---------------------------------------------------------------------------------------


class Mutable:
    """Hashable, and can change after it was hashed."""

    def __init__(self) -> None:
        self.size = 1

    def __hash__(self) -> int:
        return 1


@dataclass(frozen=True)
class Outer:
    """Frozen, around something that is not."""

    inner: Any = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """Frozen, and compared by identity."""


def scale(x: Any, config: Any) -> Any:
    return x + x


def pair(x: Any, y: Any) -> Any:
    return x + y


def collects(*values: Any) -> Any:
    return values[0]


def bucket(*axes: tuple[str, int], count: str | None = None) -> dict[str, Bucket]:
    return {"T": Bucket(axes, (4, 8), count=count)}


X = torch.ones(3, 2)
scaled = atbx.jit(scale, static=("config",))
paired = atbx.jit(pair, buckets=bucket(("x", 0), ("y", 0)))


@cases(
    (
        "static-unknown",
        lambda: atbx.jit(scale, static=("sizes",)),
        errors.StaticArgumentError,
        "static .*'sizes'",
    ),
    (
        "donate-unknown",
        lambda: atbx.jit(scale, donate=("cache",)),
        errors.StaticArgumentError,
        "donate .*'cache'",
    ),
    (
        "static-and-donated",
        lambda: atbx.jit(scale, static=("x",), donate=("x",)),
        errors.DonationError,
        r"\['x'\]",
    ),
    ("any-number", lambda: atbx.jit(collects), errors.StagingError, "'values' collects any number"),
    (
        "numerics",
        lambda: atbx.jit(scale, numerics="strict"),
        errors.UnsupportedError,
        "numerics: .*found strict",
    ),
    ("fallback", lambda: atbx.jit(scale, fallback="hide"), errors.UnsupportedError, "fallback: .*found hide"),
    ("device-name", lambda: atbx.jit(scale, device="gpu"), errors.UnsupportedError, "device: .*found gpu"),
    ("device-index", lambda: atbx.jit(scale, device=0), errors.UnsupportedError, "device: .*found 0"),
    (
        "bucket-argument",
        lambda: atbx.jit(scale, buckets=bucket(("ids", 0))),
        errors.BucketError,
        "'T'.*found ids",
    ),
    (
        "bucket-count",
        lambda: atbx.jit(scale, buckets=bucket(("x", 0), count="counts")),
        errors.BucketError,
        "'T' names no argument as its count.*found counts",
    ),
    ("bucket-empty", lambda: Bucket((), (4,)), errors.BucketError, "no .argument path, axis."),
    ("bucket-order", lambda: Bucket((("x", 0),), (8, 4)), errors.BucketError, r"ascending; found \(8, 4\)"),
    ("bucket-zero", lambda: Bucket((("x", 0),), (0, 4)), errors.BucketError, r"positive.*found \(0, 4\)"),
    ("ladder", lambda: ladder(4, smallest=5), errors.BucketError, "found smallest=5, capacity=4"),
)
def test_a_compiled_function_is_refused_by_option(call: Any, kind: Any, pattern: str) -> None:
    check(call, kind, pattern)


# --- jit: what it is called with -----------------------------------------------------------------------------------


def twice_donated() -> None:
    write = atbx.jit(lambda table, other, n: ops_count(table, n) + other, donate=("table",))
    table = torch.zeros(1, 4, dtype=torch.int32)
    write(table, table, torch.tensor([1]))


def ops_count(table: Any, n: Any) -> Any:
    """An op that updates its first operand."""
    from atbx.ops.logits import count_tokens

    return count_tokens(table, n, ops.equal(n, n))


def used_again() -> None:
    write = atbx.jit(ops_count, donate=("table",))
    table = torch.zeros(1, 4, dtype=torch.int32)
    write(table, torch.tensor([1]))
    write(table, torch.tensor([1]))


def frozen_miss() -> None:
    function = atbx.jit(scale, static=("config",))
    function(X, 1)
    function.freeze()
    function(X, 2)


@cases(
    ("static-mutable", lambda: scaled(X, [1]), errors.StaticArgumentError, "^config: .*found list"),
    ("static-hashable", lambda: scaled(X, Mutable()), errors.StaticArgumentError, "^config: .*found Mutable"),
    ("static-nested", lambda: scaled(X, Outer()), errors.StaticArgumentError, "^config.inner: .*found list"),
    ("static-tuple", lambda: scaled(X, (1, {})), errors.StaticArgumentError, "^config/1: .*found dict"),
    ("static-identity", lambda: scaled(X, ByIdentity()), errors.StaticArgumentError, "^config: .*eq=False"),
    ("static-tensor", lambda: scaled(X, X), errors.StaticArgumentError, "^config: .*found Tensor"),
    ("dynamic-string", lambda: paired("a", X), errors.StagingError, "^x: .*found str.*static"),
    (
        "dynamic-object",
        lambda: paired({"a": [X, object()]}, X),
        errors.BucketError,
        "'T' names a leaf.*found x",
    ),
    (
        "bucket-axis",
        lambda: paired(torch.tensor(1.0), X),
        errors.BucketError,
        "^x: bucket 'T' names axis 0.*0 axes",
    ),
    (
        "bucket-sizes",
        lambda: paired(X, torch.ones(2, 2)),
        errors.BucketError,
        "^y: .*'T'; expected 3, found 2",
    ),
    (
        "bucket-full",
        lambda: paired(torch.ones(9), torch.ones(9)),
        errors.BucketError,
        "'T'.*at most 8, found 9",
    ),
    ("two-bindings", lambda: atbx.jit(pair)(atbx.bind(X), atbx.bind(X)), errors.StagingError, "^x and y: "),
    ("donated-used-again", used_again, errors.DonationError, "^table: .*donated as table of ops_count"),
    ("donated-twice", twice_donated, errors.DonationError, "^table and other: one buffer"),
    (
        "donated-for-nothing",
        lambda: atbx.jit(pair, donate=("y",))(X, X.clone()),
        errors.DonationError,
        "'y' is donated, but pair updates no leaf of it",
    ),
    (
        "frozen",
        frozen_miss,
        errors.FrozenCacheError,
        "scale is frozen.*static argument of config: 2 here, 1 in",
    ),
)
def test_a_compiled_function_refuses_arguments_by_path(call: Any, kind: Any, pattern: str) -> None:
    check(call, kind, pattern)


def test_a_missing_argument_is_named_like_python_names_it() -> None:
    with pytest.raises(TypeError, match="pair: missing a required argument: 'y'"):
        paired(X)


# --- staging: what a function may not do ---------------------------------------------------------------------------

LARGE = torch.ones(2000)
outlived: list[Any] = []


def branches(x: Any) -> Any:
    return x + 1 if x > 0 else x


def calls_torch(x: Any) -> Any:
    return torch.exp(x)


def calls_a_method(x: Any) -> Any:
    return x.exp()


def captures(x: Any) -> Any:
    return x + LARGE


def reads(x: Any) -> Any:
    return x + x.item()


def turns_to_int(x: Any) -> Any:
    return x + int(x)


def turns_to_numpy(x: Any) -> Any:
    return x + np.asarray(x)


def iterates(x: Any) -> Any:
    return list(x)


def keeps(x: Any) -> Any:
    outlived.append(x + 1)
    return outlived[0] + x


def returns_a_tensor(x: Any) -> Any:
    return {"sum": x + x, "extra": torch.ones(2)}


def returns_text(x: Any) -> Any:
    return {"name": "x", "value": x}


def uses_the_padded_size(x: Any) -> Any:
    return x * x.shape[0]


def mixes(x: Any) -> Any:
    return ops.softmax(x, axis=0)


def merges(x: Any) -> Any:
    return ops.reshape(x, (-1,))


def promotes(x: Any) -> Any:
    return x + ops.cast(x, torch.bfloat16)


def line(function: Callable[..., Any]) -> str:
    """Pattern of the place of a function's last statement."""
    lines, first = inspect.getsourcelines(function)
    return rf"test_bad_calls\.py:{first + len(lines) - 1} in {function.__name__}"


@cases(
    ("branch", lambda: atbx.jit(branches)(X), errors.StagingError, line(branches) + ": a Python branch"),
    ("torch", lambda: atbx.jit(calls_torch)(X), errors.StagingError, line(calls_torch) + r": torch\.exp"),
    (
        "capture",
        lambda: atbx.jit(captures)(LARGE),
        errors.StagingError,
        line(captures) + r".*\(2000,\).*captured",
    ),
    ("item", lambda: atbx.jit(reads)(X), errors.StagingError, line(reads) + ".*not known while staging"),
    ("int", lambda: atbx.jit(turns_to_int)(X), errors.StagingError, line(turns_to_int)),
    ("numpy", lambda: atbx.jit(turns_to_numpy)(X), errors.StagingError, line(turns_to_numpy)),
    ("iteration", lambda: atbx.jit(iterates)(X), errors.StagingError, "in iterates: .*iterated"),
    (
        "returned-tensor",
        lambda: atbx.jit(returns_a_tensor)(X),
        errors.StagingError,
        "output extra is a torch tensor",
    ),
    ("returned-text", lambda: atbx.jit(returns_text)(X), errors.StagingError, "output name is a str"),
    (
        "padded-size",
        lambda: atbx.jit(uses_the_padded_size, buckets=bucket(("x", 0)))(X),
        errors.BucketError,
        line(uses_the_padded_size) + ": .*padded size 4 of bucketed axis 'T'",
    ),
    (
        "mixing",
        lambda: atbx.jit(mixes, buckets=bucket(("x", 0)))(X),
        errors.BucketError,
        line(mixes) + ": softmax mixes along axis 0 of operand 0.*'T'",
    ),
    (
        "merged-buckets",
        lambda: atbx.jit(merges, buckets={**bucket(("x", 0)), "M": Bucket((("x", 1),), (2,))})(X),
        errors.BucketError,
        "axis 0 of output result merges bucketed axes",
    ),
    ("promotion", lambda: atbx.jit(promotes)(X), errors.DTypeError, "add.*f32.*bf16|add.*bf16.*f32"),
)
def test_a_function_that_cannot_be_staged_is_refused_at_its_line(call: Any, kind: Any, pattern: str) -> None:
    check(call, kind, pattern)


def test_a_method_of_tensors_is_refused_at_its_line() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'exp' \(.*" + line(calls_a_method)):
        atbx.jit(calls_a_method)(X)


def test_a_value_that_outlived_its_call_is_refused_at_its_line() -> None:
    outlived.clear()
    function = atbx.jit(keeps)
    function(X)
    check(lambda: function(torch.ones(5)), errors.StagingError, line(keeps) + ": .*staged by another call")


def test_an_op_without_a_kernel_is_refused_where_fallbacks_are_errors() -> None:
    op = atbx.define_op(
        "bad_call_op", shape=lambda x: atbx.Abstract(x.shape, x.dtype), reference=lambda x: x + 1
    )

    def uses(x: Any) -> Any:
        return op(x)

    reported = atbx.jit(uses)
    assert torch.equal(reported(X), X + 1)
    (choice,) = reported.explain(X).choices
    assert (choice.is_fallback, choice.why) == (True, "no kernel is registered")
    check(
        lambda: atbx.jit(uses, fallback="error")(X),
        errors.FallbackError,
        line(uses) + r": no kernel of backend 'cpu' applies to bad_call_op \(f32\[3,2\]\)",
    )


# --- bindings ------------------------------------------------------------------------------------------------------


def changed_in_place() -> None:
    params = {
        "layers": [{**p} for p in PARAMS["layers"]],
        **{k: v for k, v in PARAMS.items() if k != "layers"},
    }
    params["layers"][1]["q"] = params["layers"][1]["q"].clone()
    bound = atbx.bind(params)
    params["layers"][1]["q"].mul_(2)
    GENERATE(bound, [5], max_new_tokens=1)


@cases(
    ("leaf", lambda: atbx.bind({"a": [X, "w"]}), errors.BindingError, "^a/1: .*found str"),
    ("array", lambda: atbx.bind({"a": np.ones(2)}), errors.BindingError, "^a: .*found ndarray"),
    ("empty", lambda: atbx.bind({}), errors.BindingError, "no leaves"),
    ("changed", changed_in_place, errors.BindingError, "^layers/1/q: .*changed in place"),
    (
        "integers",
        lambda: GENERATE({"embed": torch.ones(2, 2, dtype=torch.int64)}, [5], max_new_tokens=1),
        errors.TreeError,
        "(?s)embed.*layers.*norm",
    ),
    (
        "missing",
        lambda: GENERATE({k: v for k, v in PARAMS.items() if k != "norm"}, [5], max_new_tokens=1),
        errors.TreeError,
        "norm: missing",
    ),
    (
        "shape",
        lambda: GENERATE({**PARAMS, "norm": torch.ones(31)}, [5], max_new_tokens=1),
        errors.TreeError,
        r"norm: .*32.*31",
    ),
    (
        "mixed",
        lambda: GENERATE({**PARAMS, "lm_head": PARAMS["lm_head"].bfloat16()}, [5], max_new_tokens=1),
        errors.DTypeError,
        "linear: weight and x.*expected f32, found bf16",
    ),
)
def test_parameters_are_refused_by_path(call: Any, kind: Any, pattern: str) -> None:
    check(call, kind, pattern)


def test_every_error_is_of_one_tree_and_of_a_builtin_kind() -> None:
    kinds = [e for e in vars(errors).values() if inspect.isclass(e) and e is not errors.AtbxError]
    assert len(kinds) >= 15
    for kind in kinds:
        assert issubclass(kind, errors.AtbxError)
        assert issubclass(kind, (ValueError, TypeError, RuntimeError, ImportError))
        assert kind.__doc__
