"""Qwen's block as a staged program: the order that fusion rules read, and what the CPU backend makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import random_params
from test_fusion import ALL, REFERENCE, UNFUSED, arguments, forward_on

import atbx
from atbx.models import qwen
from atbx.models.qwen import QwenConfig
from atbx.ops.rope import Rope


def small_qwen(**changes: Any) -> QwenConfig:
    """A Qwen of two layers over 61 tokens, heads wider than the width over their number."""
    sizes: dict[str, Any] = {
        "vocab": 61, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 16, "ff": 48,
        "rope": Rope(16, theta=1e6), "context": 600, "eps": 1e-6,
    }  # fmt: skip
    return QwenConfig(**{**sizes, **changes})


ATTENTION = {
    "qwen3": (
        "rms_norm", "linear", "reshape", "linear", "reshape", "linear", "reshape", "rms_norm", "rms_norm",
        "rotary_angles", "rotary", "kv_write", "attention",
    ),
    "qwen2": (
        "rms_norm", "linear", "reshape", "linear", "reshape", "linear", "reshape", "rotary_angles", "rotary",
        "kv_write", "attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_the_written_order_is_norm_projections_heads_head_norms_rotary_attention(kind: str) -> None:
    config = small_qwen(qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2")
    params = atbx.bind(random_params(config))
    step, cache = arguments(config, torch.float32)
    written = forward_on(ALL).stage(params, step, cache, config)
    names = tuple(e.op.name for e in written.equations if e.scope == "layers/1")
    assert names[: len(ATTENTION[kind])] == ATTENTION[kind]
    tail = ("reshape", "linear", "add", "rms_norm", "linear", "linear", "gated", "linear", "add")
    assert names[len(ATTENTION[kind]) :] == tail


def test_head_norms_read_the_reshaped_heads_and_feed_rotary() -> None:
    config = small_qwen(qk_norm=True)
    step, cache = arguments(config, torch.float32)
    written = forward_on(ALL).stage(atbx.bind(random_params(config)), step, cache, config)
    layer = [e for e in written.equations if e.scope == "layers/0"]
    made = {id(var): e for e in layer for var in e.outputs}
    rotary = next(e for e in layer if e.op.name == "rotary")
    for operand, count in zip(rotary.inputs[:2], (config.heads, config.kv_heads), strict=True):
        norm = made[id(operand)]
        assert norm.op.name == "rms_norm"
        assert norm.params["eps"] == 1e-6
        heads = made[id(norm.inputs[0])]
        assert heads.op.name == "reshape"
        assert tuple(norm.outputs[0].abstract.shape[2:]) == (count, 16)
        assert made[id(heads.inputs[0])].op.name == "linear"


def test_a_qwen3_layer_is_six_equations_on_the_cpu_and_a_qwen2_layer_four() -> None:
    for config, expected in (
        (
            small_qwen(qk_norm=True),
            ["norm_qkv", "rms_norm", "rms_norm", "rotary_write", "attend_project", "norm_gated_mlp"],
        ),
        (
            small_qwen(qkv_bias=True),
            ["norm_qkv", "rotary_write", "attend_project", "norm_gated_mlp"],
        ),
    ):
        step, cache = arguments(config, torch.float32)
        variant = forward_on(ALL).explain(atbx.bind(random_params(config)), step, cache, config).variant
        choices = [c for c in variant.choices if c.equation.scope == "layers/1"]
        assert [c.equation.op.name for c in choices] == expected
        assert all(c.kernel.tier == "fused" for c in choices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{"qk_norm": True}, {"qkv_bias": True}, {"qk_norm": True, "window": 3, "full_layers": 1}]
)
def test_fused_kernels_agree_with_unfused_ones_and_both_with_fp64(
    dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    config = small_qwen(**changes)
    tree = random_params(config, dtype)
    logits = {}
    for name, backend in (("fused", ALL), ("unfused", UNFUSED), ("reference", REFERENCE)):
        step, cache = arguments(config, dtype)
        logits[name] = forward_on(backend)(atbx.bind(tree), step, cache, config)[0].double()
    step, cache = arguments(config, torch.float64)
    wide = atbx.trees.map_leaves(lambda t: t.double(), tree)
    exact, _ = atbx.reference(qwen.forward, wide, step, cache, config)
    allowed = 4 * torch.finfo(dtype).eps
    for name, found in logits.items():
        assert (found - exact).norm() <= allowed * exact.norm(), name
