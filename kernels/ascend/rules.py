"""Fusion rules of the Ascend backend: projections packed into one matmul, and what follows them into one launch.

A layer becomes add_rms_norm, linear, qkv_rotary_write, attention, linear, add_rms_norm, linear, gated_packed, linear.
"""

from __future__ import annotations

from atbx.core.program import Atom, Literal
from atbx.core.rewrite import Builder, FusionRule, Match, Pattern
from atbx.kernels.ascend import expansion
from atbx.ops.linear import LINEAR
from atbx.ops.norms import ADD_RMS_NORM
from atbx.ops.packed import GATED_PACKED, QKV_ROTARY_WRITE
from atbx.ops.structural import CONCAT

NOTHING = Literal(None)


def _unbound(match: Match, *names: str) -> str | None:
    if match.is_bound(*names):
        return None
    return (
        f"{', '.join(names)} are no bound parameters, so packing them together would copy them on every step"
    )


def _mixed_biases(match: Match, *names: str) -> str | None:
    left_out = {isinstance(match.atoms[n], Literal) for n in names}
    return "some projections have a bias and some have none" if len(left_out) > 1 else None


def _concat(builder: Builder, names: tuple[str, ...]) -> Atom:
    """The named values one under the other; None where all are left out."""
    atoms = [builder.match.atoms[n] for n in names]
    if all(isinstance(a, Literal) for a in atoms):
        return NOTHING
    return builder.apply(CONCAT, atoms, {"axis": 0})[0]


def _heads(match: Match) -> tuple[tuple[int, int, int], int] | None:
    """Head counts and head size of the three reshapes to [B,T,H,D], or None if they are something else."""
    shapes = []
    for name in ("q", "k", "v"):
        shape, before = match.abstract(name).shape, match.abstract(f"{name}_flat").shape
        if len(before) != 3 or len(shape) != 4 or shape[:2] != before[:2]:
            return None
        shapes.append(shape)
    if len({int(s[3]) for s in shapes}) != 1:
        return None
    q, k, v = (int(s[2]) for s in shapes)
    return (q, k, v), int(shapes[0][3])


def _when_qkv(match: Match) -> str | None:
    if _heads(match) is None:
        return "the projections are not reshaped to heads of one size"
    return _unbound(match, "wq", "wk", "wv", "?bq", "?bk", "?bv") or _mixed_biases(match, "?bq", "?bk", "?bv")


def _when_normed_qkv(match: Match) -> str | None:
    q, k = match.params(6), match.params(7)
    if q != k or q["offset"]:
        return "the norms of q and k differ, or add an offset to their weights"
    return _when_qkv(match)


def _build_qkv(match: Match, builder: Builder) -> None:
    found = _heads(match)
    assert found is not None
    heads, size = found
    weight, bias = _concat(builder, ("wq", "wk", "wv")), _concat(builder, ("?bq", "?bk", "?bv"))
    (packed,) = builder.apply(LINEAR, (match.atoms["h"], weight, bias))
    is_normed = "q_weight" in match.atoms
    norms = [match.atoms[n] for n in ("q_weight", "k_weight")] if is_normed else [NOTHING, NOTHING]
    rotary, write = (match.equations[-2].params, match.equations[-1].params)
    params = {
        "heads": heads,
        "head_size": size,
        "eps": match.params(6)["eps"] if is_normed else 0.0,
        **rotary,
        **write,
    }
    names = ("cos", "sin", "k_arena", "v_arena", "rows", "lengths", "counts")
    outs = builder.apply(QKV_ROTARY_WRITE, (packed, *norms, *(match.atoms[n] for n in names)), params)
    for name, var in zip(("q_rotated", "k_written", "v_written"), outs, strict=True):
        builder.bind(name, var)


_PROJECTIONS = (
    Pattern("linear", ("h", "wq", "?bq"), ("q_flat",)),
    Pattern("linear", ("h", "wk", "?bk"), ("k_flat",)),
    Pattern("linear", ("h", "wv", "?bv"), ("v_flat",)),
    Pattern("reshape", ("q_flat",), ("q",)),
    Pattern("reshape", ("k_flat",), ("k",)),
    Pattern("reshape", ("v_flat",), ("v",)),
)
_WRITE = Pattern(
    "kv_write",
    ("k_rotated", "v", "k_arena", "v_arena", "rows", "lengths", "counts"),
    ("k_written", "v_written"),
)


def _when_mlp(match: Match) -> str | None:
    return _unbound(match, "wg", "wu", "?bg", "?bu") or _mixed_biases(match, "?bg", "?bu")


def _build_mlp(match: Match, builder: Builder) -> None:
    weight, bias = _concat(builder, ("wg", "wu")), _concat(builder, ("?bg", "?bu"))
    (both,) = builder.apply(LINEAR, (match.atoms["h"], weight, bias))
    (hidden,) = builder.apply(GATED_PACKED, (both,), match.params(2))
    builder.bind("hidden", hidden)


def _when_add_norm(match: Match) -> str | None:
    shapes = {match.abstract(n) for n in ("a", "b", "sum")}
    return "the sum is broadcast" if len(shapes) > 1 else None


def _build_add_norm(match: Match, builder: Builder) -> None:
    normed, total = builder.apply(
        ADD_RMS_NORM, (match.atoms["a"], match.atoms["b"], match.atoms["norm"]), match.params(1)
    )
    builder.bind("normed", normed)
    builder.bind("sum", total)


RULES = (
    *expansion.RULES,
    FusionRule(
        "normed_qkv_rotary_write",
        (
            *_PROJECTIONS,
            Pattern("rms_norm", ("q", "q_weight"), ("q_normed",)),
            Pattern("rms_norm", ("k", "k_weight"), ("k_normed",)),
            Pattern("rotary", ("q_normed", "k_normed", "cos", "sin"), ("q_rotated", "k_rotated")),
            _WRITE,
        ),
        ("q_rotated", "k_written", "v_written"),
        _build_qkv,
        _when_normed_qkv,
    ),
    FusionRule(
        "qkv_rotary_write",
        (
            *_PROJECTIONS,
            Pattern("rotary", ("q", "k", "cos", "sin"), ("q_rotated", "k_rotated")),
            _WRITE,
        ),
        ("q_rotated", "k_written", "v_written"),
        _build_qkv,
        _when_qkv,
    ),
    FusionRule(
        "gated_packed",
        (
            Pattern("linear", ("h", "wg", "?bg"), ("gate",)),
            Pattern("linear", ("h", "wu", "?bu"), ("up",)),
            Pattern("gated", ("gate", "up"), ("hidden",)),
        ),
        ("hidden",),
        _build_mlp,
        _when_mlp,
    ),
    FusionRule(
        "add_norm",
        (Pattern("add", ("a", "b"), ("sum",)), Pattern("rms_norm", ("sum", "norm"), ("normed",))),
        ("sum", "normed"),
        _build_add_norm,
        _when_add_norm,
    ),
)
