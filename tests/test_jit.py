"""Compiled functions: padded buckets, static arguments, numbers, calls."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from core_ops import ADD, NEG, PAIR, SCALE, SUM, compiled, f32, make_backend

from atbx.core import trees
from atbx.core.abstract import Abstract
from atbx.core.arena import Arena
from atbx.core.backend import Kernel
from atbx.core.binding import bind
from atbx.core.buckets import Bucket
from atbx.core.errors import (
    BucketError,
    DonationError,
    DTypeError,
    OptionError,
    StagingError,
    StaticArgumentError,
    UnsupportedError,
)
from atbx.core.op import ReferenceInterpreter, ShapeInterpreter, interpreter


@dataclass(frozen=True)
class Inner:
    scale: float = 2.0


@dataclass(frozen=True)
class Config:
    name: str = "a"
    inner: Inner = Inner()
    note: str = dataclasses.field(default="", compare=False)


def scaled(x: Any, config: Config) -> Any:
    return SCALE(x, by=config.inner.scale)


# --- buckets -------------------------------------------------------------------------------------------------------

T = {"T": Bucket((("x", 0),), (4, 8), count="n")}


def test_axes_are_padded_with_zeros_and_outputs_cut_back() -> None:
    seen: list[tuple[int, ...]] = []
    backend, _ = make_backend()

    def watch(equation: Any) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(x.tolist()))
            return -x

        return run

    backend.add(Kernel("watch", "t_neg", watch), preferred=True)
    jit = compiled(
        lambda x: {"same": NEG(x), "pair": PAIR(x)},
        backend=backend,
        buckets={"T": Bucket((("x", 0),), (4, 8))},
    )
    result = jit(torch.tensor([1.0, 2.0, 3.0]))
    assert seen == [(1.0, 2.0, 3.0, 0.0)]
    assert result["same"].tolist() == [-1.0, -2.0, -3.0]
    assert [v.tolist() for v in result["pair"]] == [[2.0, 3.0, 4.0], [0.0, 1.0, 2.0]]
    assert jit(torch.ones(4))["same"].shape == (4,)
    assert jit.cache_info().variants == 1


def test_a_count_left_out_is_the_real_size() -> None:
    jit = compiled(lambda x, n: SUM(ADD(x, 1.0), n, axis=0), buckets=T)
    for size in range(1, 9):
        assert jit(torch.ones(size), None).item() == 2.0 * size
    assert jit(torch.ones(7), torch.tensor(3)).item() == 6.0
    assert jit.cache_info().variants == 2


def test_a_count_that_exceeds_its_axis_is_refused() -> None:
    jit = compiled(lambda x, n: SUM(x, n, axis=0), buckets=T)
    with pytest.raises(BucketError, match=r"n: .*'T' exceeds its size; expected at most 3, found 4"):
        jit(torch.ones(3), torch.tensor(4))


def test_a_count_that_nothing_tells_is_refused_by_name() -> None:
    def function(x: Any, y: Any, n: Any) -> Any:
        return SUM(y, n, axis=0) if x is None else SUM(x, n, axis=0)

    jit = compiled(function, buckets=T)
    with pytest.raises(BucketError, match=r"n: count argument 'n' is None.*'T'"):
        jit(None, torch.ones(3), None)
    two = {"T": Bucket((("x", 0),), (4, 8), "n"), "U": Bucket((("y", 0),), (4, 8), "n")}
    jit = compiled(lambda x, y, n: (SUM(x, n, axis=0), SUM(y, n, axis=0)), buckets=two)
    assert [v.item() for v in jit(torch.ones(3), torch.ones(3), None)] == [3.0, 3.0]
    with pytest.raises(BucketError, match=r"count argument 'n' is None.*'T'.*'U'"):
        jit(torch.ones(3), torch.ones(2), None)


def test_leaves_that_share_a_bucket_must_agree_and_are_named() -> None:
    buckets = {"T": Bucket((("step/ids", 0), ("step/positions", 0)), (4, 8))}
    jit = compiled(lambda step: ADD(step["ids"], step["positions"]), buckets=buckets)
    assert jit({"ids": torch.ones(3), "positions": torch.ones(3)}).tolist() == [2.0] * 3
    with pytest.raises(BucketError, match=r"step/positions: .*'T'; expected 3, found 2"):
        jit({"ids": torch.ones(3), "positions": torch.ones(2)})
    with pytest.raises(BucketError, match=r"names a leaf that the call does not have.*step/positions"):
        jit({"ids": torch.ones(3)})
    with pytest.raises(BucketError, match=r"step/ids: bucket 'T' names axis 0, found 0 axes|0 axes"):
        jit({"ids": torch.tensor(1.0), "positions": torch.tensor(1.0)})


def test_a_path_with_a_star_names_every_leaf_below() -> None:
    jit = compiled(lambda x: ADD(x["a"], x["b"]["c"]), buckets={"T": Bucket((("x/*", 0),), (4, 8))})
    assert jit({"a": torch.ones(3), "b": {"c": torch.ones(3)}}).tolist() == [2.0] * 3
    (planned,) = jit.plan([({"a": f32(3), "b": {"c": f32(3)}},)])
    assert planned.name == "x/a:f32[4] x/b/c:f32[4]"


def test_two_bucketed_axes_are_padded_and_cut_together() -> None:
    buckets = {"B": Bucket((("x", 0),), (2, 4)), "T": Bucket((("x", 1),), (4, 8))}
    jit = compiled(lambda x: ADD(x, 1.0), buckets=buckets)
    x = torch.arange(15.0).reshape(3, 5)
    assert torch.equal(jit(x), x + 1)
    assert "x:f32[4, 8]" in jit.cache_info().names[0]


def test_more_than_the_capacity_is_refused_before_anything_is_compiled() -> None:
    jit = compiled(lambda x: NEG(x), buckets={"T": Bucket((("x", 0),), (4, 8))})
    with pytest.raises(BucketError, match=r"'T' does not fit.*at most 8, found 9"):
        jit(torch.ones(9))
    assert jit.cache_info().misses == 0


def test_mixing_along_a_bucket_without_a_count_is_refused_at_staging() -> None:
    jit = compiled(lambda x: SUM(x, axis=0), buckets={"T": Bucket((("x", 0),), (4, 8))})
    with pytest.raises(BucketError, match=r"test_jit\.py.*t_sum mixes along axis 0"):
        jit(torch.ones(4))


def test_a_bucket_leaves_a_cache_alone_and_says_so() -> None:
    jit = compiled(lambda cache: NEG(cache.tree["k"]), buckets={"T": Bucket((("cache", 0),), (4, 8))})
    with pytest.raises(BucketError, match=r"cache: bucket 'T' names axis 0.*a cache"):
        jit(Arena({"k": torch.zeros(3)}).value())


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"buckets": {"T": Bucket((("y", 0),), (4,))}}, BucketError, "names no dynamic argument.*y"),
        ({"buckets": {"T": Bucket((("config", 0),), (4,))}, "static": ("config",)}, BucketError, "config"),
        ({"buckets": {"T": Bucket((("x", 0),), (4,), "m")}}, BucketError, "as its count.*found m"),
        ({"static": ("nothing",)}, StaticArgumentError, "static names no argument.*'nothing'"),
        ({"donate": ("nothing",)}, StaticArgumentError, "donate names no argument.*'nothing'"),
        ({"static": ("x",), "donate": ("x",)}, DonationError, "static and donated.*x"),
        ({"numerics": "strict"}, UnsupportedError, "numerics.*strict"),
        ({"fallback": "never"}, UnsupportedError, "fallback.*never"),
        ({"capacity": 0}, OptionError, "capacity.*0"),
    ],
)
def test_an_option_that_fits_nothing_is_refused_at_once(options: Any, error: Any, what: str) -> None:
    with pytest.raises(error, match=what):
        compiled(lambda x, config: NEG(x), **options)


def test_a_function_that_collects_arguments_is_refused() -> None:
    with pytest.raises(StagingError, match="'xs' collects any number"):
        compiled(lambda *xs: xs[0])


# --- static arguments ----------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


@dataclass
class Mutable:
    scale: float = 2.0

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class ById:
    scale: float = 2.0


@dataclass(frozen=True)
class Holder:
    items: Any = ()


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([1], "config"),
        ({"a": 1}, "config"),
        (Mutable(), "config"),
        (ById(), "config"),
        (Holder([1]), r"config\.items"),
        (Holder((1, {})), r"config\.items/1"),
        ((1, [2]), "config/1"),
        (torch.ones(1), "config"),
        (object(), "config"),
        (frozenset([ById()]), "config/0"),
    ],
)
def test_what_can_change_is_no_static_argument_and_is_named(value: Any, where: str) -> None:
    jit = compiled(lambda x, config: NEG(x), static=("config",))
    with pytest.raises(StaticArgumentError, match=rf"^{where}: "):
        jit(torch.ones(1), value)
    with pytest.raises(TypeError):
        jit(torch.ones(1), config=value)
    assert jit.cache_info().misses == 0


@pytest.mark.parametrize(
    "value",
    [1, 1.5, "a", b"a", None, True, torch.float32, torch.device("cpu"), Color.RED, int, (1, ("a",)), Config(), len,
     frozenset([1])],
    ids=repr,
)  # fmt: skip
def test_what_is_frozen_all_through_is_a_static_argument(value: Any) -> None:
    jit = compiled(lambda x, config: NEG(x), static=("config",))
    assert jit(torch.ones(1), value).item() == -1.0
    assert jit(torch.ones(1), value).item() == -1.0
    assert jit.cache_info().variants == 1


def test_static_arguments_are_compared_by_value() -> None:
    jit = compiled(scaled, static=("config",))
    assert jit(torch.ones(1), Config()).item() == 2.0
    assert jit(torch.ones(1), Config("a", Inner(2.0))).item() == 2.0
    assert jit(torch.ones(1), Config(note="does not count")).item() == 2.0
    assert jit.cache_info().variants == 1
    assert jit(torch.ones(1), Config(inner=Inner(3.0))).item() == 3.0
    assert jit.cache_info().variants == 2


@pytest.mark.parametrize(("one", "other"), [(1, True), (2, 2.0), (0.0, -0.0), ((1,), (True,))])
def test_static_values_that_python_calls_equal_are_two_variants(one: Any, other: Any) -> None:
    seen: list[Any] = []

    def function(x: Any, value: Any) -> Any:
        seen.append(value)
        return NEG(x)

    jit = compiled(function, static=("value",))
    for value in (one, other, one, other):
        jit(torch.ones(1), value)
    assert list(map(repr, seen)) == [repr(one), repr(other)]
    config = compiled(scaled, static=("config",))
    config(torch.ones(1, dtype=torch.int64), Config(inner=Inner(one)))
    config(torch.ones(1, dtype=torch.int64), Config(inner=Inner(other)))
    assert config.cache_info().variants == 2


def test_nan_is_one_static_value() -> None:
    jit = compiled(lambda x, value: ADD(x, value), static=("value",))
    for _ in range(3):
        assert jit(torch.ones(1), float("nan")).isnan().all()
    assert jit.cache_info().variants == 1


def test_a_frozen_object_that_is_changed_by_force_under_a_new_identity_is_looked_up_by_value() -> None:
    jit = compiled(scaled, static=("config",))
    for scale in (2.0, 3.0, 2.0, 4.0):
        assert jit(torch.ones(1), Config(inner=Inner(scale))).item() == scale
    assert jit.cache_info().variants == 3


# --- numbers, arrays, tensors --------------------------------------------------------------------------------------


def test_a_number_is_the_same_key_as_an_array_or_tensor_of_its_dtype() -> None:
    jit = compiled(lambda x, n: ADD(x, n))
    x = torch.ones(2, dtype=torch.int64)
    for three in (3, np.int64(3), np.array(3), torch.tensor(3)):
        assert jit(x, three).tolist() == [4, 4]
    y = torch.ones(2)
    for half in (0.5, np.float32(0.5), torch.tensor(0.5)):
        assert jit(y, half).tolist() == [1.5, 1.5]
    assert jit.cache_info().variants == 2


def test_a_number_of_another_dtype_is_named() -> None:
    jit = compiled(lambda x, n: ADD(x, n))
    jit(torch.ones(2, dtype=torch.int64), 3)
    miss = jit.explain(torch.ones(2, dtype=torch.int64).int(), np.int32(3)).miss
    assert {(d.component, d.where) for d in miss.differences} == {("dtype", "x"), ("dtype", "n")}
    with pytest.raises(DTypeError, match=r"torch\.int64.*torch\.int32"):
        jit(torch.ones(2, dtype=torch.int64), np.int32(3))


@pytest.mark.parametrize(
    ("value", "error"),
    [("text", StagingError), (object(), StagingError), (2**63, DTypeError), (np.array(["a"]), DTypeError),
     (np.array([None]), DTypeError), (1j, StagingError)],
)  # fmt: skip
def test_what_is_no_tensor_is_refused_by_its_path(value: Any, error: Any) -> None:
    jit = compiled(lambda tree: NEG(tree["a"][0]))
    with pytest.raises(error, match=r"^tree/a/1: "):
        jit({"a": [torch.ones(1), value]})


def test_an_array_is_copied_and_keeps_its_dtype() -> None:
    jit = compiled(lambda x: NEG(x))
    array = np.arange(6, dtype=np.float64)[::-2]
    assert jit(array).dtype == torch.float64
    assert jit(array).tolist() == [-5.0, -3.0, -1.0]


def test_a_call_with_an_abstract_value_is_refused_by_its_path() -> None:
    jit = compiled(lambda x, cache: (NEG(x["a"]), NEG(cache.tree["k"])))
    cache = Arena({"k": torch.ones(1)}).value()
    abstract = Arena({"k": f32(1)}).value()
    jit({"a": torch.ones(2)}, cache)
    with pytest.raises(StagingError, match=r"^x/a: .*Abstract"):
        jit({"a": f32(2)}, cache)
    with pytest.raises(StagingError, match=r"^cache: .*Abstract"):
        jit({"a": torch.ones(2)}, abstract)
    assert jit.plan([({"a": f32(2)}, abstract)])[0].compiled


def test_a_tensor_on_another_device_is_refused_by_its_path() -> None:
    jit = compiled(lambda p, x: ADD(x["a"], p["w"]))
    with pytest.raises(StagingError, match=r"^x/a: .*expected cpu, found meta"):
        jit({"w": torch.ones(1)}, {"a": torch.ones(1, device="meta")})
    with pytest.raises(StagingError, match=r"^p/w: .*expected cpu, found meta"):
        jit(bind({"w": torch.ones(1, device="meta")}), {"a": torch.ones(1)})
    assert jit.cache_info().variants == 0


# --- calls ---------------------------------------------------------------------------------------------------------


def test_keywords_defaults_and_kinds_of_parameters_give_one_key() -> None:
    def function(x: Any, /, y: Any = 2.0, *, by: Any = 3.0) -> Any:
        return ADD(SCALE(x, by=by), y)

    jit = compiled(function, static=("by",))
    x = torch.ones(1)
    assert jit(x).item() == 5.0
    assert jit(x, 2.0).item() == 5.0
    assert jit(x, y=2.0, by=3.0).item() == 5.0
    assert jit.cache_info().variants == 1
    assert jit(x, 1.0, by=4.0).item() == 5.0
    assert jit.cache_info().variants == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f(),
        lambda f, x: f(x, 1.0, 2.0),
        lambda f, x: f(x, z=1),
        lambda f, x: f(x=x),
    ],
)
def test_a_wrong_call_is_a_type_error_that_names_the_function(call: Any) -> None:
    def shifted(x: Any, /, y: Any = 2.0, *, by: Any = 3.0) -> Any:
        return ADD(x, y)

    with pytest.raises(TypeError, match=r"^shifted: "):
        call(compiled(shifted), torch.ones(1))


def test_results_keep_their_tree_numbers_and_none() -> None:
    jit = compiled(lambda x: {"a": (NEG(x), [3, None]), "b": True})
    result = jit(torch.ones(1))
    assert result["a"][0].item() == -1.0
    assert result["a"][1] == [3, None]
    assert result["b"] is True


def test_a_compiled_function_inside_another_is_its_function() -> None:
    inner = compiled(lambda x: NEG(x))
    outer = compiled(lambda x: ADD(inner(x), 1.0))
    assert outer(torch.ones(2)).tolist() == [0.0, 0.0]
    assert [e.op.name for e in outer.stage(f32(2)).equations] == ["t_neg", "t_add"]
    assert inner.cache_info().variants == 0
    with interpreter(ReferenceInterpreter()):
        assert outer(torch.ones(2)).tolist() == [0.0, 0.0]
    with interpreter(ShapeInterpreter()):
        assert outer(f32(2)) == f32(2)
    assert outer.cache_info().variants == 1


def test_a_compiled_function_looks_like_the_one_it_wraps() -> None:
    def documented(x: Any) -> Any:
        """What it does."""
        return NEG(x)

    jit = compiled(documented)
    assert (jit.__name__, jit.__doc__, jit.__wrapped__) == ("documented", "What it does.", documented)


def test_arguments_are_abstract_or_real_alike_for_staging() -> None:
    jit = compiled(lambda x, n: ADD(x, n))
    assert jit.stage(f32(2), Abstract((), torch.float32)) == jit.stage(torch.ones(2), 1.0)


def test_a_node_argument_keeps_its_static_fields_in_the_key() -> None:
    @trees.node
    class Window:
        values: Any
        extent: int = trees.static_field(default=2)

    jit = compiled(lambda w: SCALE(w.values, by=w.extent))
    assert jit(Window(torch.ones(1), 2)).item() == 2.0
    assert jit(Window(torch.ones(1), 3)).item() == 3.0
    assert jit(Window(torch.ones(1), extent=2)).item() == 2.0
    assert jit.cache_info().variants == 2
    assert jit.cache_info().names == ("w/values:f32[1] w.extent=3", "w/values:f32[1] w.extent=2")
