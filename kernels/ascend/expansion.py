"""Fused ops that no Ascend kernel serves whole, written as the parts that have kernels.

They come from programs that were fused for another backend. The rules below are fusion rules of one equation: what
explanations show are the parts, each with its own kernel and launches.
"""

from __future__ import annotations

from atbx.core.rewrite import Builder, FusionRule, Match, Pattern
from atbx.ops.attention import ATTENTION, KV_WRITE
from atbx.ops.elementwise import ADD
from atbx.ops.linear import LINEAR
from atbx.ops.norms import RMS_NORM
from atbx.ops.packed import GATED_PACKED
from atbx.ops.reshaping import RESHAPE
from atbx.ops.rotary import ROTARY
from atbx.ops.structural import SPLIT

ATTENTION_OPERANDS = ("q", "k_arena", "v_arena", "rows", "lengths", "counts", "?slopes", "?sinks")


def _norm_qkv(match: Match, builder: Builder) -> None:
    atoms, params = match.atoms, match.params(0)
    (normed,) = builder.apply(
        RMS_NORM, (atoms["x"], atoms["norm"]), {"eps": params["eps"], "offset": params["offset"]}
    )
    (packed,) = builder.apply(LINEAR, (normed, atoms["w"], atoms["?b"]))
    heads, size = params["heads"], params["head_size"]
    parts = builder.apply(SPLIT, (packed,), {"sizes": tuple(n * size for n in heads), "axis": -1})
    for name, part, count in zip(("q", "k", "v"), parts, heads, strict=True):
        (shaped,) = builder.apply(RESHAPE, (part,), {"shape": (*part.abstract.shape[:-1], count, size)})
        builder.bind(name, shaped)


def _rotary_write(match: Match, builder: Builder) -> None:
    atoms, params = match.atoms, match.params(0)
    rotated = builder.apply(ROTARY, [atoms[n] for n in ("q", "k", "cos", "sin")], {"style": params["style"]})
    rest = [atoms[n] for n in ("v", "k_arena", "v_arena", "rows", "lengths", "counts")]
    written = builder.apply(
        KV_WRITE, (rotated[1], *rest), {"window": params["window"], "extent": params["extent"]}
    )
    for name, var in zip(("q_out", "k_out", "v_out"), (rotated[0], *written), strict=True):
        builder.bind(name, var)


def _attend_project(match: Match, builder: Builder) -> None:
    atoms = match.atoms
    (attended,) = builder.apply(ATTENTION, [atoms[n] for n in ATTENTION_OPERANDS], match.params(0))
    B, T, H, D = attended.abstract.shape
    (flat,) = builder.apply(RESHAPE, (attended,), {"shape": (B, T, H * D)})
    (projected,) = builder.apply(LINEAR, (flat, atoms["w"], atoms["?b"]))
    (out,) = builder.apply(ADD, (atoms["residual"], projected))
    builder.bind("out", out)


def _norm_gated_mlp(match: Match, builder: Builder) -> None:
    atoms, params = match.atoms, match.params(0)
    (normed,) = builder.apply(
        RMS_NORM, (atoms["x"], atoms["norm"]), {"eps": params["eps"], "offset": params["offset"]}
    )
    (both,) = builder.apply(LINEAR, (normed, atoms["gate_up"], atoms["?gate_up_bias"]))
    (hidden,) = builder.apply(GATED_PACKED, (both,), {"activation": params["activation"]})
    (down,) = builder.apply(LINEAR, (hidden, atoms["down"], atoms["?down_bias"]))
    (out,) = builder.apply(ADD, (atoms["x"], down))
    builder.bind("out", out)


RULES = (
    FusionRule(
        "expand_norm_qkv",
        (Pattern("norm_qkv", ("x", "norm", "w", "?b"), ("q", "k", "v")),),
        ("q", "k", "v"),
        _norm_qkv,
    ),
    FusionRule(
        "expand_rotary_write",
        (
            Pattern(
                "rotary_write",
                ("q", "k", "v", "cos", "sin", "k_arena", "v_arena", "rows", "lengths", "counts"),
                ("q_out", "k_out", "v_out"),
            ),
        ),
        ("q_out", "k_out", "v_out"),
        _rotary_write,
    ),
    FusionRule(
        "expand_attend_project",
        (Pattern("attend_project", (*ATTENTION_OPERANDS, "w", "?b", "residual"), ("out",)),),
        ("out",),
        _attend_project,
    ),
    FusionRule(
        "expand_norm_gated_mlp",
        (
            Pattern(
                "norm_gated_mlp",
                ("x", "norm", "gate_up", "?gate_up_bias", "down", "?down_bias"),
                ("out",),
            ),
        ),
        ("out",),
        _norm_gated_mlp,
    ),
)

EXPANDED = {rule.pattern[0].op: rule.name for rule in RULES}
"""Fused ops without a kernel of their own, and the rule that replaces each by its parts."""
