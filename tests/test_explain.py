"""Explanations of misses: each component of a key, changed alone, is named with its path and both values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from core_ops import ADD, NEG, SCALE, WRITE, compiled, f32, make_backend

from atbx.core import trees
from atbx.core.arena import Arena
from atbx.core.binding import bind
from atbx.core.call import read_arguments
from atbx.core.errors import UnsupportedError
from atbx.core.jit import Explanation
from atbx.core.variants import CacheInfo, Difference, Miss, differences


@dataclass(frozen=True)
class Rope:
    base: float = 10_000.0
    kind: str = "default"


@dataclass(frozen=True)
class OtherRope:
    base: float = 10_000.0


@dataclass(frozen=True)
class Config:
    width: int = 4
    rope: Rope = Rope()


@trees.node
class Step:
    ids: Any
    counts: Any
    extent: int = trees.static_field(default=8)


def forward(params: Any, step: Step, cache: Any, config: Config, extra: Any = None) -> Any:
    x = ADD(step.ids, step.counts)
    tree = cache.tree
    return SCALE(x, by=config.rope.base), cache.replaced({**tree, "k": NEG(tree["k"])})


PARAMS = {"w": torch.ones(4, 3), "b": [torch.ones(4)]}
BOUND = bind(PARAMS)


def step(**changed: Any) -> Step:
    return Step(**{"ids": torch.ones(2, 3), "counts": torch.tensor(1.0), **changed})


def cache(**changed: Any) -> Any:
    return Arena({"k": torch.zeros(3), "v": torch.zeros(3), **changed}).value()


def call(**changed: Any) -> tuple[Any, ...]:
    base = {
        "params": BOUND,
        "step": step(),
        "cache": cache(),
        "config": Config(),
        "extra": {"a": torch.ones(1)},
    }
    return tuple({**base, **changed}.values())


def explained(**changed: Any) -> list[tuple[str, str, str, str]]:
    """The differences between a call and the one cached variant."""
    jit = compiled(forward, static=("config",))
    jit(*call())
    assert jit.explain(*call()).hit
    explanation = jit.explain(*call(**changed))
    assert not explanation.hit
    assert jit.cache_info().variants == 1
    assert explanation.miss is not None
    return [(d.component, d.where, d.found, d.cached) for d in explanation.miss.differences]


def test_a_shape_is_named_alone() -> None:
    assert explained(step=step(ids=torch.ones(2, 5))) == [("shape", "step/ids", "(2, 5)", "(2, 3)")]


def test_a_dtype_is_named_alone() -> None:
    changed = step(ids=torch.ones(2, 3, dtype=torch.bfloat16), counts=torch.tensor(1.0, dtype=torch.bfloat16))
    assert explained(step=changed) == [
        ("dtype", "step/ids", "torch.bfloat16", "torch.float32"),
        ("dtype", "step/counts", "torch.bfloat16", "torch.float32"),
    ]


def test_a_memory_layout_is_named_alone() -> None:
    assert explained(step=step(ids=torch.ones(3, 2).T)) == [("layout", "step/ids", "False", "True")]


def test_a_device_is_named_alone() -> None:
    changed = step(ids=torch.ones(2, 3, device="meta"))
    assert explained(step=changed) == [("device", "step/ids", "meta", "cpu")]


def test_a_leaf_more_or_less_is_named_by_its_path() -> None:
    assert explained(extra={"a": torch.ones(1), "b": torch.ones(1)}) == [
        ("tree structure", "extra", "extra/b", "no leaf more")
    ]
    assert explained(extra={"c": torch.ones(1)}) == [("tree structure", "extra", "extra/c", "extra/a")]
    assert explained(extra=None) == [("tree structure", "extra", "no leaf more", "extra/a")]


def test_another_kind_of_node_with_the_same_paths_is_named() -> None:
    jit = compiled(lambda x: NEG(x[0]))
    jit([torch.ones(1)])
    ((difference),) = jit.explain((torch.ones(1),)).miss.differences
    assert (difference.component, difference.where) == ("tree structure", "x")
    assert "(*,)" in difference.found
    assert "[*]" in difference.cached


def test_a_structure_and_a_leaf_elsewhere_are_both_named() -> None:
    found = explained(extra=None, step=step(ids=torch.ones(2, 5)))
    assert [(component, where) for component, where, *_ in found] == [
        ("tree structure", "extra"),
        ("shape", "step/ids"),
    ]


def test_a_static_field_of_a_node_is_named_alone() -> None:
    assert explained(step=step(extent=16)) == [("static field", "step.extent", "16", "8")]


@pytest.mark.parametrize(
    ("config", "where", "found", "cached"),
    [
        (Config(rope=Rope(base=5e5)), "config.rope.base", "500000.0", "10000.0"),
        (Config(rope=Rope(kind="yarn")), "config.rope.kind", "'yarn'", "'default'"),
        (Config(width=5), "config.width", "5", "4"),
        (Config(width=4.0), "config.width", "4.0", "4"),  # type: ignore[arg-type]
    ],
)
def test_the_field_of_a_static_argument_is_named_alone(
    config: Config, where: str, found: str, cached: str
) -> None:
    assert explained(config=config) == [("static argument", where, found, cached)]


def test_a_static_argument_of_another_class_is_named_whole() -> None:
    ((component, where, found, cached),) = explained(config=Config(rope=OtherRope()))  # type: ignore[arg-type]
    assert (component, where) == ("static argument", "config.rope")
    assert (found, cached) == (repr(OtherRope()), repr(Rope()))


def test_the_dtype_that_parameters_are_bound_at_is_named_alone() -> None:
    found = explained(params=bind(PARAMS, dtype=torch.bfloat16))
    assert found == [
        ("dtype", "params/b/0", "torch.bfloat16", "torch.float32"),
        ("dtype", "params/w", "torch.bfloat16", "torch.float32"),
    ]


def test_the_shape_of_a_parameter_is_named_alone() -> None:
    assert explained(params=bind({**PARAMS, "w": torch.ones(5, 3)})) == [
        ("shape", "params/w", "(5, 3)", "(4, 3)")
    ]


def test_the_structure_of_parameters_is_named_by_path() -> None:
    assert explained(params=bind({**PARAMS, "norm": torch.ones(1)})) == [
        ("tree structure", "params", "norm", "no leaf more")
    ]
    assert [d[:2] for d in explained(params=bind({**PARAMS, "b": (torch.ones(4),)}))] == [
        ("tree structure", "params")
    ]


def test_other_values_of_parameters_are_no_difference() -> None:
    jit = compiled(forward, static=("config",))
    jit(*call())
    assert jit.explain(*call(params=bind({"w": torch.zeros(4, 3), "b": [torch.ones(4)]}))).hit


def test_bound_and_plain_parameters_are_told_apart() -> None:
    assert explained(params=PARAMS) == [("binding", "params", "not bound", "bound")]


def test_the_tensors_of_a_cache_are_named_by_path() -> None:
    assert explained(cache=cache(v=torch.zeros(7))) == [("shape", "cache/v", "(7,)", "(3,)")]
    assert explained(cache=cache(v=torch.zeros(3).half())) == [
        ("dtype", "cache/v", "torch.float16", "torch.float32")
    ]
    assert explained(cache=cache(w=torch.zeros(3))) == [("tree structure", "cache", "w", "no leaf more")]


@pytest.mark.parametrize(
    ("options", "component", "found", "cached"),
    [
        ({"fallback": "error"}, "fallback", "error", "report"),
        ({"backend": make_backend(name="other")[0]}, "backend", "other", "test"),
    ],
)
def test_backend_and_fallback_of_the_function_are_named_alone(
    options: Any, component: str, found: str, cached: str
) -> None:
    def function(x: Any) -> Any:
        return NEG(x)

    one, other = compiled(function), compiled(function, **options)
    one(torch.ones(1))
    (variant,) = one.variants
    read = read_arguments(other._signature, (torch.ones(1),), {})
    assert differences(read.key, read.paths, variant) == (
        Difference(component, "the function", found, cached),
    )


def test_a_numerics_mode_that_does_not_exist_yet_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"numerics.*fast.*strict"):
        compiled(NEG, numerics="strict")


def test_the_nearest_variant_is_the_one_with_the_fewest_differences() -> None:
    jit = compiled(lambda x, y: (NEG(x), NEG(y)))
    jit(torch.ones(1), torch.ones(1))
    jit(torch.ones(2), torch.ones(2))
    jit(torch.ones(3), torch.ones(4))
    miss = jit.explain(torch.ones(2), torch.ones(3)).miss
    assert isinstance(miss, Miss)
    assert miss.nearest is not None
    assert miss.nearest.name == "x:f32[2] y:f32[2]"
    assert [str(d) for d in miss.differences] == ["shape of y: (3,) here, (2,) in the variant"]


def test_the_first_call_of_all_has_no_nearest_variant() -> None:
    explanation = compiled(lambda x: NEG(x)).explain(f32(2))
    assert explanation.miss == Miss(None, ())
    assert "not cached: no variant is cached" in str(explanation)


def test_an_explanation_prints_kernels_reasons_copies_and_refused_fusions() -> None:
    jit = compiled(lambda cache, x: WRITE(cache, ADD(x, 1.0)))
    explanation = jit.explain(torch.zeros(3), torch.ones(1))
    assert isinstance(explanation, Explanation)
    lines = str(explanation).splitlines()
    assert lines[:2] == ["variant cache:f32[3] x:f32[1]", "not cached: no variant is cached"]
    assert any("t_add" in line and "test.add" in line and "preferred kernel" in line for line in lines)
    assert any("refused test.write: needs an offset" in line for line in lines)
    assert "  copy inserted: t_write operand 0 is read later, or was not donated" in lines
    jit(torch.zeros(3), torch.ones(1))
    assert str(jit.explain(torch.zeros(3), torch.ones(1))).splitlines()[1] == "cached"


def test_explaining_runs_nothing_and_changes_no_counter() -> None:
    backend, counts = make_backend()
    jit = compiled(lambda x: NEG(x), backend=backend)
    jit.explain(torch.ones(1))
    assert counts.launched == []
    info = jit.cache_info()
    assert (info.variants, info.hits, info.misses) == (0, 0, 0)


def test_the_counters_print() -> None:
    jit = compiled(lambda x: NEG(x), capacity=4)
    for size in (1, 1, 2):
        jit(torch.ones(size))
    info = jit.cache_info()
    assert isinstance(info, CacheInfo)
    lines = str(info).splitlines()
    assert lines[0].startswith("2 variants (at most 4), 1 hits, 2 misses, 0 evicted, ")
    assert lines[1:] == ["  x:f32[1]", "  x:f32[2]"]
