"""Failures injected at the ACL boundary, told by the op that failed, its operands, the code and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from npu_models import params_of
from small_models import small_llama

import atbx
from atbx.core.errors import CacheStateError, NpuError
from atbx.kernels import ascend
from atbx.models import llama


@pytest.fixture
def config() -> llama.LlamaConfig:
    return small_llama(width=64, ff=96, heads=4, kv_heads=2, head_size=64, rope=atbx.ops.Rope(64))


@pytest.mark.parametrize("execution", ["graph", "eager"])
def test_a_launch_that_is_refused_names_its_op(
    npu: Any, half: torch.dtype, config: llama.LlamaConfig, execution: str
) -> None:
    generate = atbx.generator(llama.forward, config, device=ascend.backend(execution=execution))
    params = params_of(config, half)
    npu.inject(kernel="aclnnSwiGlu", code=561003, message="EZ9999: kernel binary not found", when="launch")
    with pytest.raises(NpuError) as caught:
        generate(params, [[1, 2, 3]], max_new_tokens=2)
    assert caught.value.code == "561003"
    assert "gated_packed" in str(caught.value)
    assert any("192" in operand for operand in caught.value.operands)
    assert caught.value.advice
    npu.reset()
    assert generate(params, [[1, 2, 3]], max_new_tokens=2, eos=()).tokens


def test_a_fault_on_the_device_is_told_with_its_code(
    npu: Any, half: torch.dtype, config: llama.LlamaConfig
) -> None:
    generate = atbx.generator(llama.forward, config, device=ascend.backend(execution="eager"))
    params = params_of(config, half)
    generate(params, [[1, 2, 3]], max_new_tokens=2, eos=())
    npu.inject(
        kernel="aclnnSwiGlu",
        code=507015,
        message="EZ9999: The DDR address of the MTE instruction is out of range",
        when="execution",
    )
    with pytest.raises(NpuError) as caught:
        generate(params, [[1, 2, 3]], max_new_tokens=2, eos=())
    assert "507015" in caught.value.codes or caught.value.code == "507015"
    assert caught.value.advice
    npu.reset()


def test_a_step_that_failed_leaves_its_cache_marked(
    npu: Any, half: torch.dtype, config: llama.LlamaConfig
) -> None:
    generate = atbx.generator(llama.forward, config, device="npu")
    params = params_of(config, half)
    stream = generate.stream(params, [[1, 2, 3]], max_new_tokens=6, eos=())
    next(stream)
    npu.inject(kernel="aclnnFusedInferAttentionScoreV4", code=561002, message="EZ9999: tiling", when="launch")
    with pytest.raises((NpuError, CacheStateError)):
        list(stream)
    npu.reset()
    assert len(generate(params, [[1, 2, 3]], max_new_tokens=3, eos=()).tokens[0]) == 3
