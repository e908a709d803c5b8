"""Fusion on the CPU backend: how many equations a layer becomes, and that fused kernels mean what unfused ones do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from small_models import random_params, small_llama

import atbx
from atbx import ops
from atbx.core.jit import Jit
from atbx.kernels import cpu
from atbx.kernels.cpu.matmul import packs_dtype
from atbx.kernels.cpu.rules import RULES
from atbx.memory import abstract_cache, abstract_step
from atbx.models import llama
from atbx.models.step import Step
from atbx.ops import kv_cache

ALL = cpu.backend()
UNFUSED = dataclasses.replace(ALL, rules=[])
REFERENCE = dataclasses.replace(ALL, rules=[], table={})


def forward_on(backend: Any) -> Jit:
    """The Llama family compiled on a backend."""
    return Jit(llama.forward, backend, static=("config",), donate=("cache",))


def arguments(config: Any, dtype: torch.dtype, tokens: int = 5) -> tuple[Step, Any]:
    """A ragged step of two rows and an empty cache of NaN."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(config.vocab, (2, tokens), generator=generator)
    counts = torch.tensor([tokens, max(1, tokens - 2)])
    positions = torch.arange(tokens).expand(2, tokens).contiguous()
    want = torch.arange(tokens).expand(2, tokens).clamp(max=int(counts[1]) - 1).contiguous()
    cache = kv_cache.init(config.cache_spec, batch=2, capacity=16, dtype=dtype, chunk=8)
    for leaf in cache.arena.arena.tensors:
        leaf.fill_(float("nan"))
    return Step(ids, counts, positions, want, torch.tensor([16, 16])), cache


def test_a_llama_layer_is_twenty_equations_and_four_after_fusion() -> None:
    config = small_llama()
    params = atbx.bind(random_params(config, torch.float32))
    step, cache = arguments(config, torch.float32)
    compiled = forward_on(ALL)
    written = compiled.stage(params, step, cache, config)
    # Written out, each layer also asks for the rotary angles, which all layers share after staging.
    assert [written.count(scope=f"layers/{i}") for i in range(config.layers)] == [20] * config.layers
    variant = compiled.explain(params, step, cache, config).variant
    names = [c.equation.op.name for c in variant.choices if c.equation.scope == "layers/1"]
    assert names == ["norm_qkv", "rotary_write", "attend_project", "norm_gated_mlp"]
    outside = [c.equation.op.name for c in variant.choices if c.equation.scope == ""]
    assert outside == ["embedding", "take", "rms_norm", "linear", "add"]
    assert [c.equation.op.name for c in variant.choices].count("rotary_angles") == 1
    assert [e.op.name for e in variant.lowered.prepared] == ["concat", "concat"] * config.layers
    assert all(c.kernel.tier != "reference" for c in variant.choices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"qkv_bias": True, "out_bias": True, "mlp_bias": True}, {"window": 3}]
)
def test_fused_kernels_agree_with_unfused_ones_and_both_with_fp64(
    dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    config = small_llama(**changes)
    tree = random_params(config, dtype)
    logits = {}
    for name, backend in (("fused", ALL), ("unfused", UNFUSED), ("reference", REFERENCE)):
        step, cache = arguments(config, dtype)
        logits[name] = forward_on(backend)(atbx.bind(tree), step, cache, config)[0].double()
    step, cache = arguments(config, torch.float64)
    wide = atbx.trees.map_leaves(lambda t: t.double(), tree)
    exact, _ = atbx.reference(llama.forward, wide, step, cache, config)
    scale = exact.norm()
    bound = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for name, found in logits.items():
        assert (found - exact).norm() / scale < bound, name
    assert (logits["fused"] - logits["unfused"]).norm() / scale < bound


def test_a_rule_does_not_apply_where_an_intermediate_has_another_use() -> None:
    def peeks(p: Any, x: Any) -> tuple[Any, Any]:
        h = ops.rms_norm(x, p["norm"], eps=1e-5)
        hidden = ops.gated(ops.linear(h, p["gate"]), ops.linear(h, p["up"]), activation="silu")
        return x + ops.linear(hidden, p["down"]), h

    params = atbx.bind(
        {
            "norm": torch.ones(8),
            "gate": torch.randn(16, 8),
            "up": torch.randn(16, 8),
            "down": torch.randn(8, 16),
        }
    )
    program = atbx.jit(peeks).stage(params, torch.randn(1, 2, 8), fused=True)
    assert [e.op.name for e in program.equations] == [
        "rms_norm", "linear", "linear", "gated", "linear", "add"
    ]  # fmt: skip


def test_adding_and_norming_fuse_where_nothing_larger_does() -> None:
    def add_then_norm(p: Any, x: Any, y: Any) -> tuple[Any, Any]:
        total = x + y
        return ops.rms_norm(total, p, eps=1e-6), total

    compiled = atbx.jit(add_then_norm)
    weight, x, y = torch.rand(8) + 0.5, torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    program = compiled.stage(weight, x, y, fused=True)
    assert [e.op.name for e in program.equations] == ["add_rms_norm"]
    normed, total = compiled(weight, x, y)
    exact = (x + y).double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), exact, atol=1e-6, rtol=1e-6)
    assert torch.equal(total, x + y)


def test_unbound_weights_are_not_packed_together_and_the_report_says_why() -> None:
    config = small_llama()
    step, cache = arguments(config, torch.bfloat16)
    explanation = forward_on(ALL).explain(random_params(config, torch.bfloat16), step, cache, config)
    reasons = {a.rule: a.refused for a in explanation.variant.fusions if a.refused}
    assert "no bound parameters" in reasons["norm_qkv"]
    assert "no bound parameters" in reasons["norm_gated_mlp"]
    linear = [c for c in explanation.choices if c.equation.op.name == "linear"]
    assert {c.kernel.name for c in linear} == {"torch.linear"}
    # A machine without BF16 kernels of oneDNN refuses to pack for that reason, before it asks what is bound.
    expected = "must be a bound parameter" if packs_dtype(torch.bfloat16) else "are not packed for oneDNN"
    assert expected in linear[0].refused[0].reason


def test_every_rule_names_ops_that_exist() -> None:
    from atbx.core.op import registered_ops

    names = {p.op for rule in RULES for p in rule.pattern}
    assert names <= set(registered_ops())


def test_planning_needs_no_tensor() -> None:
    config = small_llama()
    tree = atbx.models.llama.abstract(config, torch.bfloat16)
    needs = atbx.plan_memory(config, batch=2, capacity=64, dtype=torch.bfloat16)
    assert needs.weights == sum(a.nbytes for a in atbx.trees.leaves(tree))
    assert needs.cache == abstract_cache(config.cache_spec, 2, 64, torch.bfloat16, 64).nbytes
    assert needs.activation > abstract_step(1, 64).ids.nbytes
