"""Rules and documented limits of Ascend operators, as a second opinion on whoever calls them.

Importing this package fills `RULES` (operator name to how it computes) and `LIMITS` (operator name to what it
refuses); `registry` says what the two hold. Only torch and the standard library are imported.
"""

from __future__ import annotations

from atbx.testing.software_npu.rules import (
    activations,
    atb_attention,
    atb_attention_limits,
    atb_paged_attention,
    attention_infer,
    attention_infer_limits,
    attention_legacy,
    cache_write,
    cache_write_limits,
    chips,
    fused_qkv,
    linear,
    norms,
    quant,
    rotary,
    sampling,
)
from atbx.testing.software_npu.rules.registry import (
    LIMITS,
    RULES,
    Call,
    Limit,
    NotModelledError,
    Rule,
    first_refusal,
    limits_of,
)

__all__ = [
    "LIMITS", "RULES", "Call", "Limit", "NotModelledError", "Rule", "activations", "atb_attention",
    "atb_attention_limits", "atb_paged_attention", "attention_infer", "attention_infer_limits", "attention_legacy",
    "cache_write", "cache_write_limits", "chips", "first_refusal", "fused_qkv", "limits_of", "linear", "norms",
    "quant", "rotary", "sampling",
]  # fmt: skip
