"""npu_top_k_top_p: the argument order is p, then k; what is dropped becomes minus infinity."""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.registry import (
    DEVICE_FAULT,
    PARAMETER,
    Call,
    device_fault,
    dtype_refusal,
    limit,
    refuse_parameter,
    rule,
)

_NAME = "npu::npu_top_k_top_p"
_PAGE = "op-plugin page npu_top_k_top_p (fact sheet 1.10): "


@rule(_NAME, source=_PAGE + "formula; test_npu_top_k_top_p.py", status="upstream golden ran")
def top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """logits [B, V] with everything outside the k largest and the top mass p set to -inf.

    Values equal to the k-th stay. Of the rest, in ascending order (stable), those whose cumulative probability is
    at most 1 - p are dropped; the largest always stays.
    """
    values, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        kth = values.gather(1, (values.shape[1] - k.long()).unsqueeze(1))
        values = values.masked_fill(values < kth, float("-inf"))
    if p is not None:
        mass = values.softmax(dim=-1).cumsum(dim=-1)
        dropped = mass <= 1.0 - p.float().unsqueeze(1)
        dropped[:, -1] = False
        values = values.masked_fill(dropped, float("-inf"))
    return torch.empty_like(values).scatter_(1, order, values).to(logits.dtype)


@limit(_NAME, code=PARAMETER, source=_PAGE + "logits float; p of that dtype; k int32")
def top_k_top_p_dtypes(call: Call) -> str | None:
    return (
        dtype_refusal(call, "logits", (torch.float32, torch.float16, torch.bfloat16))
        or dtype_refusal(call, "p", (call["logits"].dtype,))
        or dtype_refusal(call, "k", (torch.int32,))
    )


@limit(_NAME, code=PARAMETER, source=_PAGE + "logits 2-D; p and k one entry a row")
def top_k_top_p_shapes(call: Call) -> str | None:
    logits = call["logits"]
    if logits.dim() != 2:
        return refuse_parameter(call, f"logits of {logits.dim()} dims should be 2 dims.")
    for name in ("p", "k"):
        given = call[name]
        if given is not None and tuple(given.shape) != (logits.shape[0],):
            return refuse_parameter(
                call, f"{name} shape {tuple(given.shape)} should be ({logits.shape[0]},)."
            )
    return None


# k and p live in device memory, so nothing can look at them before the kernel runs.


@limit(_NAME, code=DEVICE_FAULT, source=_PAGE + "k in [1, 1024] and at most the columns", when="execution")
def top_k_in_1_to_1024(call: Call) -> str | None:
    k = call["k"]
    if k is None:
        return None
    most = min(1024, call["logits"].shape[-1])
    wrong = k[(k < 1) | (k > most)]
    return device_fault(call, f"k {int(wrong[0])}, documented range [1, {most}]") if wrong.numel() else None


@limit(_NAME, code=DEVICE_FAULT, source=_PAGE + "p in [0, 1]", when="execution")
def top_p_in_0_to_1(call: Call) -> str | None:
    p = call["p"]
    if p is None:
        return None
    wrong = p[~((p >= 0) & (p <= 1))]
    return device_fault(call, f"p {float(wrong[0])}, documented range [0, 1]") if wrong.numel() else None
