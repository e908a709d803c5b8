"""Fusion rules of the CPU backend, as data: which stretches of a block become one op.

A rule that packs weights together applies only to bound parameters: concatenating anything else would copy it on every
step. Rules are applied in the order of `RULES`.
"""

from __future__ import annotations

from typing import Any

from atbx.core.abstract import Abstract
from atbx.core.program import Atom, Literal
from atbx.core.rewrite import Builder, FusionRule, Match, Pattern
from atbx.kernels.cpu.attention import refuses_flash
from atbx.kernels.cpu.matmul import refuses_matmul
from atbx.ops.fused import ATTEND_PROJECT, NORM_GATED_MLP, NORM_QKV, ROTARY_WRITE
from atbx.ops.norms import ADD_RMS_NORM
from atbx.ops.structural import CONCAT

NOTHING = Literal(None)


def _unbound(match: Match, *names: str) -> str | None:
    if match.is_bound(*names):
        return None
    return (
        f"{', '.join(names)} are no bound parameters, so packing them together would copy them on every step"
    )


def _concat(builder: Builder, names: tuple[str, ...]) -> Atom:
    """The named values one under the other; None where all are left out."""
    atoms = [builder.match.atoms[n] for n in names]
    if all(isinstance(a, Literal) for a in atoms):
        return NOTHING
    return builder.apply(CONCAT, atoms, {"axis": 0})[0]


def _mixed_biases(match: Match, *names: str) -> str | None:
    left_out = [isinstance(match.atoms[n], Literal) for n in names]
    return "some projections have a bias and some have none" if len(set(left_out)) > 1 else None


def _heads(match: Match) -> tuple[int, ...] | None:
    """Head counts of the three reshapes to [B,T,H,D], or None if they are something else."""
    found = []
    for name, flat in (("q", "q_flat"), ("k", "k_flat"), ("v", "v_flat")):
        shape, before = match.abstract(name).shape, match.abstract(flat).shape
        if len(before) != 3 or len(shape) != 4 or shape[:2] != before[:2]:
            return None
        found.append(shape)
    return tuple(s[2] for s in found) if len({s[3] for s in found}) == 1 else None


def _when_qkv(match: Match) -> str | None:
    if _heads(match) is None:
        return "the projections are not reshaped to heads of one size"
    return (
        _unbound(match, "wq", "wk", "wv", "?bq", "?bk", "?bv")
        or _mixed_biases(match, "?bq", "?bk", "?bv")
        or refuses_matmul(match.abstract("x").dtype)
    )


def _build_qkv(match: Match, builder: Builder) -> None:
    heads = _heads(match)
    weight = _concat(builder, ("wq", "wk", "wv"))
    bias = _concat(builder, ("?bq", "?bk", "?bv"))
    params = {**match.params(0), "heads": heads, "head_size": match.abstract("q").shape[3]}
    outs = builder.apply(NORM_QKV, (match.atoms["x"], match.atoms["norm"], weight, bias), params)
    for name, var in zip(("q", "k", "v"), outs, strict=True):
        builder.bind(name, var)


def _build_rotary_write(match: Match, builder: Builder) -> None:
    names = ("q", "k", "v", "cos", "sin", "k_arena", "v_arena", "rows", "lengths", "counts")
    params = {**match.params(0), **match.params(1)}
    outs = builder.apply(ROTARY_WRITE, [match.atoms[n] for n in names], params)
    for name, var in zip(("q_rotated", "k_written", "v_written"), outs, strict=True):
        builder.bind(name, var)


def _when_attend_project(match: Match) -> str | None:
    attended, flat = match.abstract("attended"), match.abstract("flat")
    if flat.shape != (*attended.shape[:2], attended.shape[2] * attended.shape[3]):
        return "the heads are not joined before the projection"
    if match.abstract("residual") != match.abstract("sum") or match.abstract("sum") != match.abstract(
        "projected"
    ):
        return "the residual is broadcast"
    return _unbound(match, "w", "?b") or refuses_matmul(attended.dtype) or refuses_flash(match.equations[0])


def _build_attend_project(match: Match, builder: Builder) -> None:
    names = (
        "q",
        "k_arena",
        "v_arena",
        "rows",
        "lengths",
        "counts",
        "?slopes",
        "?sinks",
        "w",
        "?b",
        "residual",
    )
    (out,) = builder.apply(ATTEND_PROJECT, [match.atoms[n] for n in names], match.params(0))
    builder.bind("sum", out)


def _attend_project(add_operands: tuple[str, str]) -> FusionRule:
    attention = ("q", "k_arena", "v_arena", "rows", "lengths", "counts", "?slopes", "?sinks")
    return FusionRule(
        "attend_project",
        (
            Pattern("attention", attention, ("attended",)),
            Pattern("reshape", ("attended",), ("flat",)),
            Pattern("linear", ("flat", "w", "?b"), ("projected",)),
            Pattern("add", add_operands, ("sum",)),
        ),
        ("sum",),
        _build_attend_project,
        _when_attend_project,
    )


def _when_mlp(match: Match) -> str | None:
    if match.abstract("x") != match.abstract("sum"):
        return "the residual is broadcast"
    return (
        _unbound(match, "wg", "wu", "?bg", "?bu", "wd", "?bd")
        or _mixed_biases(match, "?bg", "?bu")
        or refuses_matmul(match.abstract("x").dtype)
    )


def _build_mlp(match: Match, builder: Builder) -> None:
    gate_up = _concat(builder, ("wg", "wu"))
    bias = _concat(builder, ("?bg", "?bu"))
    atoms = match.atoms
    params = {**match.params(0), **match.params(3)}
    (out,) = builder.apply(
        NORM_GATED_MLP, (atoms["x"], atoms["norm"], gate_up, bias, atoms["wd"], atoms["?bd"]), params
    )
    builder.bind("sum", out)


def _norm_gated_mlp(add_operands: tuple[str, str]) -> FusionRule:
    return FusionRule(
        "norm_gated_mlp",
        (
            Pattern("rms_norm", ("x", "norm"), ("h",)),
            Pattern("linear", ("h", "wg", "?bg"), ("gate",)),
            Pattern("linear", ("h", "wu", "?bu"), ("up",)),
            Pattern("gated", ("gate", "up"), ("hidden",)),
            Pattern("linear", ("hidden", "wd", "?bd"), ("mlp",)),
            Pattern("add", add_operands, ("sum",)),
        ),
        ("sum",),
        _build_mlp,
        _when_mlp,
    )


def _when_add_norm(match: Match) -> str | None:
    shapes: set[Any] = {match.abstract(n) for n in ("a", "b", "sum")}
    if len(shapes) > 1 or not isinstance(match.abstract("a"), Abstract):
        return "the sum is broadcast"
    return None


def _build_add_norm(match: Match, builder: Builder) -> None:
    normed, total = builder.apply(
        ADD_RMS_NORM, (match.atoms["a"], match.atoms["b"], match.atoms["norm"]), match.params(1)
    )
    builder.bind("normed", normed)
    builder.bind("sum", total)


RULES = (
    FusionRule(
        "norm_qkv",
        (
            Pattern("rms_norm", ("x", "norm"), ("h",)),
            Pattern("linear", ("h", "wq", "?bq"), ("q_flat",)),
            Pattern("linear", ("h", "wk", "?bk"), ("k_flat",)),
            Pattern("linear", ("h", "wv", "?bv"), ("v_flat",)),
            Pattern("reshape", ("q_flat",), ("q",)),
            Pattern("reshape", ("k_flat",), ("k",)),
            Pattern("reshape", ("v_flat",), ("v",)),
        ),
        ("q", "k", "v"),
        _build_qkv,
        _when_qkv,
    ),
    FusionRule(
        "rotary_write",
        (
            Pattern("rotary", ("q", "k", "cos", "sin"), ("q_rotated", "k_rotated")),
            Pattern(
                "kv_write",
                ("k_rotated", "v", "k_arena", "v_arena", "rows", "lengths", "counts"),
                ("k_written", "v_written"),
            ),
        ),
        ("q_rotated", "k_written", "v_written"),
        _build_rotary_write,
    ),
    _attend_project(("residual", "projected")),
    _attend_project(("projected", "residual")),
    _norm_gated_mlp(("x", "mlp")),
    _norm_gated_mlp(("mlp", "x")),
    FusionRule(
        "add_norm",
        (Pattern("add", ("a", "b"), ("sum",)), Pattern("rms_norm", ("sum", "norm"), ("normed",))),
        ("sum", "normed"),
        _build_add_norm,
        _when_add_norm,
    ),
)
