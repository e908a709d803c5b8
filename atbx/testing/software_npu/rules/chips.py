"""Which chip has which operator, and the dtypes that a chip lacks.

The table holds the products that each operator's own page names. A page may lag behind the code (an A3 runs
operators whose page names A2 only); such an entry is left open here, because a page that is silent about a
product does not say that the kernel is missing.
"""

from __future__ import annotations

import re

import torch

from atbx.testing.software_npu.rules.registry import (
    ANY,
    NO_KERNEL,
    PARAMETER,
    Call,
    limit,
    refuse_kernel,
    refuse_parameter,
)

A2, A3, INFERENCE_310P, TRAINING_910A = "A2", "A3", "310P", "910A"


def family(chip: str) -> str:
    """The product family of a chip name: "A2" for Ascend910B1 to B4, "A3" for Ascend910_93xx, "310P", "910A"."""
    if chip.startswith("Ascend910B"):
        return A2
    if chip.startswith("Ascend910_93"):
        return A3
    if chip.startswith("Ascend310P"):
        return INFERENCE_310P
    if chip.startswith(("Ascend910A", "Ascend910Pro")) or chip == "Ascend910":
        return TRAINING_910A
    raise ValueError(
        f"chip {chip!r}: no such product; expected Ascend910B*, Ascend910_93*, Ascend310P*, Ascend910A"
    )


def lacks_bfloat16(chip: str) -> bool:
    """Whether the chip has no bfloat16 at all (310P, 910A)."""
    return family(chip) in (INFERENCE_310P, TRAINING_910A)


def _cann_order(version: str) -> tuple[int, ...]:
    """A key that orders CANN versions: 8.3.RC1.alpha002 < 8.3.RC1 < 8.3.RC2 < 8.3.0; "T" releases as the final."""
    found = re.fullmatch(
        r"(\d+)\.(\d+)\.(?:RC(\d+)|T?(\d+))(?:\.?(?:post|p)?(\d+))?(?:\.alpha(\d+))?", version
    )
    if found is None:
        raise ValueError(f"CANN version {version!r}; expected such as 9.1.0, 8.3.RC1 or 8.5.0.alpha003")
    major, minor, candidate, patch, post, alpha = found.groups()
    final = candidate is None
    return (
        int(major), int(minor), int(final), int(patch if final else candidate), int(alpha is None), int(alpha or 0),
        int(post or 0),
    )  # fmt: skip


def cann_at_least(version: str, needed: str) -> bool:
    """Whether a CANN version is `needed` or later."""
    return _cann_order(version) >= _cann_order(needed)


@limit(ANY, code=PARAMETER, source="fact sheet 4.1; platform configuration of CANN 8.1.RC1")
def no_bfloat16_on_310p_and_910a(call: Call) -> str | None:
    if not lacks_bfloat16(call.chip):
        return None
    for name, tensor in call.tensors():
        if tensor.dtype == torch.bfloat16 and name not in call.host:
            return refuse_parameter(
                call,
                f"Tensor {name} not implemented for DT_BFLOAT16 on {call.chip}, should be in dtype support "
                "list [DT_FLOAT,DT_FLOAT16].",
            )
    return None


_A2_A3 = frozenset({A2, A3})
_A2_A3_310P = frozenset({A2, A3, INFERENCE_310P})
_ALL = frozenset({A2, A3, INFERENCE_310P, TRAINING_910A})

CHIPS: dict[str, frozenset[str]] = {
    "npu::npu_fused_infer_attention_score": _A2_A3,
    "npu::npu_fused_infer_attention_score_v2": _A2_A3,
    "npu::_npu_fused_infer_attention_score_get_max_workspace": _A2_A3,
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace": _A2_A3,
    "npu::npu_prompt_flash_attention": _A2_A3_310P,
    "npu::npu_incre_flash_attention": _A2_A3_310P,
    "npu::npu_rms_norm": _ALL,
    "npu::npu_add_rms_norm": _A2_A3_310P,
    "npu::npu_add_rms_norm_v2": _A2_A3_310P,
    "npu::npu_rms_norm_quant": _A2_A3_310P,
    "npu::npu_rotary_mul": _ALL,
    "npu::npu_apply_rotary_pos_emb": _A2_A3_310P,
    "npu::npu_mrope": _A2_A3,
    "npu::npu_interleave_rope": _A2_A3,
    "npu::npu_qkv_rms_norm_rope_cache": _A2_A3,
    "npu::npu_swiglu": _A2_A3_310P,
    "npu::npu_clipped_swiglu": _A2_A3,
    "npu::npu_ffn": _A2_A3,
    "npu::npu_scatter_pa_kv_cache": _A2_A3,
    "npu::npu_gather_pa_kv_cache": _A2_A3,
    "npu::npu_scatter_nd_update": _ALL,
    "npu::npu_scatter_nd_update_": _ALL,
    "npu::npu_top_k_top_p": _A2_A3,
    "npu::npu_dynamic_quant": _A2_A3,
    "npu::npu_quant_matmul": _A2_A3_310P,
    "npu::npu_weight_quant_batchmatmul": _A2_A3_310P,
    "npu::npu_quantize": _A2_A3_310P,
}


@limit(*CHIPS, code=NO_KERNEL, source="fact sheet 1.0.1; product table of the operator's page")
def chip_has_the_operator(call: Call) -> str | None:
    if family(call.chip) in CHIPS[call.name]:
        return None
    return refuse_kernel(call, f"no kernel for soc version {call.chip}")
