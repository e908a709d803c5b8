"""Gated and plain activations: which half is activated, and in what order the halves lie.

npu_swiglu and npu_gelu_mul activate the first half (gate, then up); npu_geglu activates the second half unless
told otherwise; npu_clipped_swiglu takes alternating elements by default. Computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as fun

from atbx.testing.software_npu.rules.chips import INFERENCE_310P, TRAINING_910A, family
from atbx.testing.software_npu.rules.registry import (
    PARAMETER,
    TILING,
    Call,
    NotModelledError,
    contiguity_refusal,
    dtype_refusal,
    limit,
    refuse_parameter,
    refuse_tiling,
    rule,
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@rule("npu::npu_swiglu", source="op-plugin page and test_npu_swi_glu.py", status="upstream golden ran")
def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half along dim."""
    gate, up = input.float().chunk(2, dim=dim)
    return (fun.silu(gate) * up).to(input.dtype)


@rule("npu::npu_geglu", source="fact sheet 1.6; op-plugin GeGluKernelNpuOpApi.cpp", status="document only")
def geglu(
    input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, ...]:
    """(product, gelu): the second half is activated unless activate_left; approximate 1 is tanh, 0 is erf."""
    left, right = input.float().chunk(2, dim=dim)
    active, other = (left, right) if activate_left else (right, left)
    gelu = fun.gelu(active, approximate="tanh" if approximate == 1 else "none")
    return (gelu * other).to(input.dtype), gelu.to(input.dtype)


@rule("npu::npu_gelu", source="op-plugin page and test_npu_gelu.py", status="upstream golden ran")
def gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Gelu by erf ("none") or by tanh."""
    return fun.gelu(input.float(), approximate=approximate).to(input.dtype)


@rule("npu::npu_gelu_mul", source="op-plugin page and test_npu_gelu_mul.py", status="upstream golden ran")
def gelu_mul(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """gelu(first half) * second half of the last axis."""
    active, other = input.float().chunk(2, dim=-1)
    return (fun.gelu(active, approximate=approximate) * other).to(input.dtype)


@rule(
    "npu::npu_clipped_swiglu",
    source="op-plugin page and test_npu_clipped_swiglu.py",
    status="upstream golden ran",
)
def clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + bias), gate held below limit and up within +-limit.

    The axes from dim on are one: interleaved takes its even elements as gate and its odd ones as up, else its
    first and second half. Rows past the sum of group_index are not computed.
    """
    axis = dim % x.dim()
    flat = x.float().flatten(axis).reshape(-1, x[(0,) * axis].numel() if axis else x.numel())
    gate, up = (flat[:, ::2], flat[:, 1::2]) if interleaved else flat.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    y = gate * torch.sigmoid(alpha * gate) * (up + bias)
    if group_index is not None:
        y[int(group_index.sum()) :] = float("nan")
    shape = list(x.shape)
    shape[axis] //= 2
    return y.reshape(shape).to(x.dtype)


_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: fun.gelu(x),
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": fun.silu,
}
_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geglu": fun.gelu,
    "swiglu": fun.silu,
    "reglu": torch.relu,
}


@rule("npu::npu_ffn", source="op-plugin page and test_npu_ffn.py", status="upstream golden ran")
def ffn(
    x: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    activation: str,
    *,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    inner_precise: int | None = None,
    **named: Any,
) -> torch.Tensor:
    """activation(x @ weight1 + bias1) @ weight2 + bias2, weights [K1, N1] and [K2, N2], without experts.

    Gated activations split the first product in two halves and activate the first.
    """
    given = [name for name, value in named.items() if value is not None]
    if given:
        raise NotModelledError(f"npu_ffn with {given[0]} is not modelled")
    hidden = x.float() @ weight1.float()
    if bias1 is not None:
        hidden = hidden + bias1.float()
    name = activation.lower()
    if name in _GATED:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = _GATED[name](gate) * up
    else:
        hidden = _PLAIN[name](hidden)
    out = hidden.to(x.dtype).float() @ weight2.float()
    if bias2 is not None:
        out = out + bias2.float()
    return out.to(x.dtype)


# --- limits -----------------------------------------------------------------------------------------------------

_PAGE = "op-plugin page of the operator (fact sheet 1.6): "


@limit(
    "npu::npu_swiglu",
    "npu::npu_geglu",
    "npu::npu_gelu",
    "npu::npu_gelu_mul",
    code=PARAMETER,
    source=_PAGE + "dtypes",
)
def gated_input_dtype(call: Call) -> str | None:
    return dtype_refusal(call, "input", _FLOATS)


@limit("npu::npu_clipped_swiglu", code=PARAMETER, source=_PAGE + "dtypes; contiguous")
def clipped_input_dtype_and_contiguity(call: Call) -> str | None:
    return dtype_refusal(call, "x", _FLOATS) or contiguity_refusal(call, ("x",))


@limit("npu::npu_swiglu", code=PARAMETER, source=_PAGE + "contiguous")
def swiglu_input_contiguous(call: Call) -> str | None:
    return contiguity_refusal(call, ("input",))


@limit("npu::npu_swiglu", code=PARAMETER, source=_PAGE + "not empty, 1 to 8 axes")
def swiglu_input_not_empty(call: Call) -> str | None:
    x = call["input"]
    if x.numel() == 0:
        return refuse_parameter(call, "Tensor input should not be empty.")
    return (
        None
        if 1 <= x.dim() <= 8
        else refuse_parameter(call, f"input of {x.dim()} dims should be 1 to 8 dims.")
    )


@limit(
    "npu::npu_swiglu", "npu::npu_geglu", "npu::npu_gelu_mul", "npu::npu_clipped_swiglu",
    code=PARAMETER, source=_PAGE + "the split axis is even",
)  # fmt: skip
def split_axis_even(call: Call) -> str | None:
    x = call["input"] if call["input"] is not None else call["x"]
    dim = -1 if call["dim"] is None else int(call["dim"])
    if not -x.dim() <= dim < x.dim():
        return refuse_parameter(call, f"dim {dim} should be in range [{-x.dim()}, {x.dim() - 1}].")
    return (
        refuse_parameter(call, f"dim {dim} of size {x.shape[dim]} should be even.")
        if x.shape[dim] % 2
        else None
    )


@limit("npu::npu_swiglu", code=TILING, source="fact sheet 1.6: on 310P only last axes in multiples of 32")
def swiglu_last_axis_multiple_of_32_on_310p(call: Call) -> str | None:
    last = call["input"].shape[-1] if call["input"].dim() else 0
    if family(call.chip) in (INFERENCE_310P, TRAINING_910A) and last % 32:
        return refuse_tiling(call, f"the last dim {last} should be 32 aligned on {call.chip}")
    return None


@limit(
    "npu::npu_gelu_mul",
    code=TILING,
    source=_PAGE + "last axis at most 1024, other axes together at most 200000",
)
def gelu_mul_last_axis_at_most_1024(call: Call) -> str | None:
    x = call["input"]
    if not 2 <= x.dim() <= 8:
        return refuse_tiling(call, f"input of {x.dim()} dims should be 2 to 8 dims")
    if x.shape[-1] > 1024:
        return refuse_tiling(call, f"the last dim {x.shape[-1]} should not be greater than 1024")
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return refuse_tiling(call, f"the product of other dims {rows} exceeds 200000") if rows > 200000 else None


@limit("npu::npu_gelu", "npu::npu_gelu_mul", code=PARAMETER, source=_PAGE + "approximate none or tanh")
def gelu_approximation_known(call: Call) -> str | None:
    known = call["approximate"] in ("none", "tanh")
    return None if known else refuse_parameter(call, f"approximate {call['approximate']} is not supported.")


@limit("npu::npu_ffn", code=PARAMETER, source=_PAGE + "activations by name")
def ffn_activation_known(call: Call) -> str | None:
    known = str(call["activation"]).lower() in (*_PLAIN, *_GATED)
    return None if known else refuse_parameter(call, f"activation {call['activation']} is not supported.")


@limit(
    "npu::npu_ffn", code=PARAMETER, source=_PAGE + "gated activations: float16, high performance, no experts"
)
def ffn_gated_only_in_float16_high_performance(call: Call) -> str | None:
    if str(call["activation"]).lower() not in _GATED:
        return None
    for name in ("x", "weight1", "weight2"):
        refused = dtype_refusal(call, name, (torch.float16,))
        if refused:
            return refused
    if call["inner_precise"] != 1:
        return refuse_parameter(call, "inner_precise should be 1 when the activation is gated.")
    if call["expert_tokens"] is not None or call["expert_tokens_index"] is not None:
        return refuse_parameter(call, "expert_tokens is not supported when the activation is gated.")
    return None


@limit("npu::npu_ffn", code=PARAMETER, source=_PAGE + "one dtype; bfloat16 needs inner_precise 0")
def ffn_dtypes(call: Call) -> str | None:
    refused = dtype_refusal(call, "x", (torch.float16, torch.bfloat16, torch.int8))
    if refused:
        return refused
    if call["x"].dtype == torch.bfloat16 and call["inner_precise"] not in (None, 0):
        return refuse_parameter(call, "inner_precise should be 0 for DT_BFLOAT16.")
    return None


@limit("npu::npu_ffn", code=TILING, source=_PAGE + "N1 = 2*K2 when gated, else N1 = K2")
def ffn_inner_widths(call: Call) -> str | None:
    times = 2 if str(call["activation"]).lower() in _GATED else 1
    n1, k2 = call["weight1"].shape[-1], call["weight2"].shape[-2]
    if n1 != times * k2:
        return refuse_tiling(call, f"N1 {n1} should be {times} times K2 {k2}")
    k1 = call["weight1"].shape[-2]
    return refuse_tiling(call, f"K1 {k1} should be the last dim of x") if call["x"].shape[-1] != k1 else None
