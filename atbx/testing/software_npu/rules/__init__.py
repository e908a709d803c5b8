"""Rules and documented limits of Ascend operators, as a second opinion on whoever calls them.

Importing this package fills `RULES` (operator name to how it computes) and `LIMITS` (operator name to what it
refuses); `registry` says what the two hold. Only torch and the standard library are imported.
"""

from __future__ import annotations

from atbx.testing.software_npu.rules import (
    activations,
    atb_attention,
    attention_infer,
    cache_write,
    chips,
    linear,
    norms,
    rotary,
)
from atbx.testing.software_npu.rules.registry import (
    LIMITS,
    RULES,
    Call,
    Limit,
    Rule,
    first_refusal,
    limits_of,
)

__all__ = [
    "LIMITS", "RULES", "Call", "Limit", "Rule", "activations", "atb_attention", "attention_infer", "cache_write",
    "chips", "first_refusal", "limits_of", "linear", "norms", "rotary",
]  # fmt: skip
