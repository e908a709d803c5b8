"""Rewriting programs: dead and common equations, fusion by pattern, and what is prepared once a binding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from core_ops import (
    ADD,
    NEG,
    PAIR,
    SCALE,
    SCALE_ADD,
    SCALE_THEN_ADD,
    VIEW,
    WRITE,
    compiled,
    f32,
    ops_of,
    stage,
)

from atbx.core import staging
from atbx.core.errors import AtbxError
from atbx.core.program import Program
from atbx.core.rewrite import FusionRule, Pattern, drop_dead, fuse, share_common, split_prepared

X, Y = f32(4), f32(4)


def fused(
    function: Any, *abstracts: Any, rule: FusionRule = SCALE_THEN_ADD
) -> tuple[list[str], list[str | None]]:
    """Names of the ops after fusion, and the report's reasons."""
    program, report = fuse(stage(function, *abstracts), [rule])
    return ops_of(program), [applied.refused for applied in report]


# --- fusion --------------------------------------------------------------------------------------------------------


def test_a_pattern_becomes_the_fused_op_and_is_reported_with_its_scope() -> None:
    def function(x: Any, y: Any) -> Any:
        with staging.scope("layers/3"):
            return NEG(ADD(SCALE(x, by=2.0), y))

    program, report = fuse(stage(function, X, Y), [SCALE_THEN_ADD])
    assert program == stage(lambda x, y: NEG(SCALE_ADD(x, y, by=2.0)), X, Y)
    assert [(a.rule, a.scope, a.refused) for a in report] == [("scale_add", "layers/3", None)]
    assert program.equations[0].scope == "layers/3"


def test_every_occurrence_is_fused() -> None:
    def function(x: Any, y: Any) -> Any:
        for i in range(5):
            x = ADD(SCALE(x, by=i), y)
        return x

    names, reasons = fused(function, X, Y)
    assert names == ["t_scale_add"] * 5
    assert reasons == [None] * 5


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (ADD(s := SCALE(x, by=2), y), NEG(s)),
        lambda x, y: (ADD(s := SCALE(x, by=2), y), s),
        lambda x, y: (NEG(s := SCALE(x, by=2)), ADD(s, y)),
        lambda x, y: ADD(s := SCALE(x, by=2), s),
    ],
    ids=["read later", "an output", "read before", "read twice by the pattern"],
)
def test_an_intermediate_with_another_use_is_never_fused_away(function: Any) -> None:
    before = stage(function, X, Y)
    assert fuse(before, [SCALE_THEN_ADD]) == (before, ())


def test_a_name_that_occurs_twice_must_be_one_value() -> None:
    rule = FusionRule(
        "double",
        (Pattern("t_neg", ("x",), ("n",)), Pattern("t_add", ("n", "x"), ("out",))),
        ("out",),
        lambda match, build: build.bind("out", build.apply(SCALE, (match.atoms["x"],), {"by": 0.0})[0]),
    )
    assert fused(lambda x, y: ADD(NEG(x), x), X, Y, rule=rule)[0] == ["t_scale"]
    assert fused(lambda x, y: ADD(NEG(x), y), X, Y, rule=rule)[0] == ["t_neg", "t_add"]


def optional_rule(name: str) -> FusionRule:
    return FusionRule(
        "write",
        (Pattern("t_neg", ("x",), ("n",)), Pattern("t_write", ("cache", "n", name), ("out",))),
        ("out",),
        lambda match, build: build.bind(
            "out", build.apply(WRITE, (match.atoms["cache"], match.atoms["x"], match.atoms[name]))[0]
        ),
    )


def test_an_operand_left_out_matches_only_a_name_that_may_be_none() -> None:
    def function(cache: Any, x: Any) -> Any:
        return WRITE(cache, NEG(x), None)

    assert fused(function, f32(8), X, rule=optional_rule("?at"))[0] == ["t_write"]
    assert fused(function, f32(8), X, rule=optional_rule("at"))[0] == ["t_neg", "t_write"]


def test_a_refusal_is_reported_with_its_reason_and_changes_nothing() -> None:
    rule = dataclasses.replace(SCALE_THEN_ADD, when=lambda match: f"by={match.params(0)['by']} is odd")
    program = stage(lambda x, y: ADD(SCALE(x, by=3), y), X, Y)
    after, report = fuse(program, [rule])
    assert after == program
    assert [(a.rule, a.refused) for a in report] == [("scale_add", "by=3 is odd")]


def test_rules_apply_in_their_order() -> None:
    other = dataclasses.replace(SCALE_THEN_ADD, name="other")
    program = stage(lambda x, y: ADD(SCALE(x, by=3), y), X, Y)
    assert [a.rule for a in fuse(program, [SCALE_THEN_ADD, other])[1]] == ["scale_add"]
    assert [a.rule for a in fuse(program, [other, SCALE_THEN_ADD])[1]] == ["other"]


def test_a_fused_op_stands_where_all_its_operands_exist() -> None:
    def function(x: Any, y: Any) -> Any:
        scaled = SCALE(x, by=2)
        late = NEG(y)
        return ADD(scaled, late)

    assert fused(function, X, Y)[0] == ["t_neg", "t_scale_add"]


@pytest.mark.parametrize("through", [lambda cache: cache, lambda cache: VIEW(cache, shape=(4,))])
def test_a_pattern_is_never_moved_across_an_update_of_what_it_reads(through: Any) -> None:
    def function(cache: Any, x: Any) -> Any:
        scaled = SCALE(through(cache), by=2)
        written = WRITE(cache, x, 0)
        return ADD(scaled, x), written

    names, reasons = fused(function, f32(4), X)
    assert "t_scale_add" not in names
    assert [r is not None and "updated" in r for r in reasons] == [True]


def test_a_result_that_is_read_before_the_pattern_ends_refuses_the_rule() -> None:
    rule = FusionRule(
        "pair_add",
        (Pattern("t_pair", ("x",), ("up", "down")), Pattern("t_add", ("up", "y"), ("out",))),
        ("down", "out"),
        lambda match, build: None,
    )

    def function(x: Any, y: Any) -> Any:
        up, down = PAIR(x)
        return ADD(up, NEG(down))

    assert fused(function, X, Y, rule=rule) == (
        ["t_pair", "t_neg", "t_add"],
        ["a result is read, or an operand updated, before the pattern is complete"],
    )


def test_a_rule_that_forgets_a_result_is_refused_by_name() -> None:
    broken = dataclasses.replace(SCALE_THEN_ADD, build=lambda match, build: None)
    with pytest.raises(AtbxError, match=r"scale_add.*out"):
        fuse(stage(lambda x, y: ADD(SCALE(x, by=3), y), X, Y), [broken])


def test_a_rule_that_changes_a_shape_is_refused_by_name() -> None:
    broken = dataclasses.replace(
        SCALE_THEN_ADD,
        build=lambda match, build: build.bind(
            "out", build.apply(VIEW, (match.atoms["x"],), {"shape": (2, 2)})[0]
        ),
    )
    with pytest.raises(AtbxError, match=r"scale_add.*out.*f32\[4\].*f32\[2,2\]"):
        fuse(stage(lambda x, y: ADD(SCALE(x, by=3), y), X, Y), [broken])


def test_only_bound_values_count_as_parameters() -> None:
    seen: list[tuple[bool, bool]] = []
    rule = dataclasses.replace(
        SCALE_THEN_ADD, when=lambda m: seen.append((m.is_bound("x"), m.is_bound("y"))) or None
    )
    program = stage(lambda x, y: ADD(SCALE(x, by=3), y), X, Y)
    fuse(program, [rule], bound=[program.inputs[1]])
    assert seen == [(False, True)]


def test_a_fused_program_computes_what_the_unfused_one_does() -> None:
    def function(x: Any, y: Any) -> Any:
        a = ADD(SCALE(x, by=2.0), y)
        return ADD(SCALE(a, by=3.0), x), NEG(a)

    x, y = torch.randn(4), torch.randn(4)
    plain, quick = compiled(function), compiled(function, rules=(SCALE_THEN_ADD,))
    assert [c.equation.op.name for c in quick.explain(x, y).choices] == [
        "t_scale_add",
        "t_scale_add",
        "t_neg",
    ]
    for a, b in zip(plain(x, y), quick(x, y), strict=True):
        assert torch.equal(a, b)


# --- common equations ----------------------------------------------------------------------------------------------


def test_a_computation_is_done_once_and_chains_of_it_collapse() -> None:
    def function(x: Any) -> Any:
        return ADD(NEG(SCALE(x, by=2)), NEG(SCALE(x, by=2)))

    program = share_common(stage(function, X))
    assert ops_of(program) == ["t_scale", "t_neg", "t_add"]
    add = program.equations[-1]
    assert add.inputs[0] is add.inputs[1]


def test_outputs_follow_what_was_shared() -> None:
    program = share_common(stage(lambda x: (NEG(x), NEG(x)), X))
    assert ops_of(program) == ["t_neg"]
    assert program.outputs[0] is program.outputs[1]


def test_updates_are_never_shared() -> None:
    program = share_common(stage(lambda c, x: (WRITE(c, x, 0), WRITE(c, x, 0)), f32(8), X))
    assert ops_of(program) == ["t_write", "t_write"]


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0)])
def test_what_python_calls_equal_but_computes_otherwise_is_not_shared(one: Any, other: Any) -> None:
    assert share_common(stage(lambda x: (ADD(x, one), ADD(x, other)), X)).count() == 2
    assert share_common(stage(lambda x: (SCALE(x, by=one), SCALE(x, by=other)), X)).count() == 2
    assert share_common(stage(lambda x: (ADD(x, one), ADD(x, one)), X)).count() == 1


def test_the_sign_of_a_zero_reaches_the_result() -> None:
    plus, minus = compiled(lambda x: (ADD(x, 0.0), ADD(x, -0.0)))(torch.tensor([-0.0]))
    assert not torch.signbit(plus).item()
    assert torch.signbit(minus).item()


# --- dead equations ------------------------------------------------------------------------------------------------


def test_what_nobody_reads_is_dropped_with_its_constants() -> None:
    captured = torch.ones(4)

    def function(x: Any) -> Any:
        NEG(ADD(x, captured))
        _, down = PAIR(x)
        return down

    program = drop_dead(stage(function, X))
    assert ops_of(program) == ["t_pair"]
    assert program.constants == ()
    assert len(program.inputs) == 1


# --- prepared equations --------------------------------------------------------------------------------------------


def split(function: Any, *abstracts: Any, bound: int) -> tuple[list[str], list[str]]:
    program: Program = stage(function, *abstracts)
    prepared, step = split_prepared(program, program.inputs[-bound:])
    return [e.op.name for e in prepared], [e.op.name for e in step]


def test_what_only_parameters_feed_is_prepared() -> None:
    assert split(lambda x, w: ADD(x, NEG(SCALE(w, by=2))), X, Y, bound=1) == (
        ["t_scale", "t_neg"],
        ["t_add"],
    )
    assert split(lambda x, w: NEG(x), X, Y, bound=1) == ([], ["t_neg"])


def test_an_update_of_a_parameter_is_part_of_the_step() -> None:
    assert split(lambda x, w: WRITE(NEG(w), x, 0), X, f32(8), bound=1) == (["t_neg"], ["t_write"])
