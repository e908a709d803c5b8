"""Norms: root-mean-square norms alone, after a residual add, quantised; layer norms.

All reduce in float32. The residual sum is rounded to the data type first and the norm is taken of the rounded sum
(the operators return that sum as the new residual). Quantising forms differ in their sense: npu_rms_norm_quant
multiplies by its scale, npu_add_rms_norm_quant divides by it unless div_mode is off, ATB's form divides.
"""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.chips import A2, A3, INFERENCE_310P, family
from atbx.testing.software_npu.rules.registry import (
    PARAMETER,
    TILING,
    Call,
    NotModelledError,
    dtype_refusal,
    limit,
    refuse_parameter,
    refuse_tiling,
    rule,
)

Results = tuple[torch.Tensor, ...]

_TESTS = "op-plugin test_npu_rms_norm.py, test_npu_add_rms_norm.py (fact sheet 1.4)"


def _rms(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, plus_one: bool = False) -> Results:
    """Norm of x over the axes of gamma, times gamma, in float32; and 1/rms with those axes kept as 1."""
    wide = x.float()
    axes = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(wide.square().mean(dim=axes, keepdim=True) + epsilon)
    weight = gamma.float() + 1.0 if plus_one else gamma.float()
    return wide * rstd * weight, rstd


@rule("npu::npu_rms_norm", source=_TESTS, status="upstream golden ran")
def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Results:
    """(y, 1/rms): y in the dtype of the input, whatever that of gamma; 1/rms in float32."""
    normed, rstd = _rms(input, gamma, epsilon)
    return normed.to(input.dtype), rstd


@rule(
    "npu::npu_gemma_rms_norm", source="op-plugin test_npu_gemma_rms_norm.py", status="golden skipped upstream"
)
def gemma_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Results:
    """(y, 1/rms) with the weight taken as 1 + gamma."""
    normed, rstd = _rms(input, gamma, epsilon, plus_one=True)
    return normed.to(input.dtype), rstd


@rule("npu::npu_add_rms_norm", source=_TESTS, status="upstream golden ran")
def add_rms_norm(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Results:
    """(y, 1/rms, x1 + x2): the sum in the data type is what is normed and returned."""
    total = x1 + x2
    normed, rstd = _rms(total, gamma, epsilon)
    return normed.to(x1.dtype), rstd, total


@rule(
    "npu::npu_add_rms_norm_v2", source="op-plugin test_npu_add_rms_norm_v2.py", status="upstream golden ran"
)
def add_rms_norm_v2(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> torch.Tensor:
    """1/rms; x1 becomes the norm and x2 becomes the sum, in place."""
    normed, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(normed)
    x2.copy_(total)
    return rstd


@rule(
    "npu::npu_add_rms_norm_cast",
    source="op-plugin test_npu_add_rms_norm_cast.py",
    status="upstream golden ran",
)
def add_rms_norm_cast(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> Results:
    """(y in float32, y in the data type, 1/rms, x1 + x2)."""
    total = x1 + x2
    normed, rstd = _rms(total, gamma, epsilon)
    narrow = normed.to(x1.dtype)
    return narrow.float(), narrow, rstd, total


@rule(
    "npu::npu_rms_norm_quant",
    source="op-plugin page npu_rms_norm_quant multiplies by scale; its test's golden, skipped upstream, divides",
    status="disputed",
)
def rms_norm_quant(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    epsilon: float = 1e-6,
    *,
    dst_dtype: int | None = None,
) -> torch.Tensor:
    """int8 round((norm * gamma + beta) * scale + offset): this form MULTIPLIES by its scale."""
    if dst_dtype not in (None, 1):  # 1 is int8 in the numbering of aclDataType's torch face
        raise NotModelledError(f"npu_rms_norm_quant with dst_dtype {dst_dtype} is not modelled")
    normed, _ = _rms(x, gamma.reshape(-1), epsilon)
    return to_int8((normed + beta.reshape(-1).float()) * scale.float() + offset.float())


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest even and held within int8."""
    return torch.round(x).clamp(-128, 127).to(torch.int8)


@rule(
    "npu::npu_add_rms_norm_quant",
    source="op-plugin page npu_add_rms_norm_quant",
    status="upstream golden ran",
)
def add_rms_norm_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None,
    beta: torch.Tensor | None = None,
    scales2: torch.Tensor | None = None,
    zero_points2: torch.Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> Results:
    """(y1, y2, x1 + x2): int8 round(norm / scales + zero_points), or times the scales when div_mode is off."""
    total = x1 + x2
    normed, _ = _rms(total, gamma, epsilon)
    if beta is not None:
        normed = normed + beta.float()

    def quantised(scales: torch.Tensor, zero_points: torch.Tensor | None) -> torch.Tensor:
        y = normed / scales.float() if div_mode else normed * scales.float()
        return to_int8(y if zero_points is None else y + zero_points.float())

    first = quantised(scales1, zero_points1)
    second = quantised(scales2, zero_points2) if scales2 is not None else torch.zeros_like(first)
    return first, second, total


@rule(
    "npu::npu_add_rms_norm_dynamic_quant",
    source="op-plugin page npu_add_rms_norm_dynamic_quant",
    status="document only",
)
def add_rms_norm_dynamic_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    smooth_scale1: torch.Tensor | None = None,
    smooth_scale2: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | None = None,
    y_dtype: int | None = None,
) -> Results:
    """(y1, y2, x1 + x2, scale1, scale2): the norm quantised by the largest magnitude of each row over 127."""
    if smooth_scale2 is not None or y_dtype not in (None, 1):
        raise NotModelledError(
            "npu_add_rms_norm_dynamic_quant with a second output or another dtype is not modelled"
        )
    total = x1 + x2
    normed, _ = _rms(total, gamma, epsilon)
    if beta is not None:
        normed = normed + beta.float()
    if smooth_scale1 is not None:
        normed = normed * smooth_scale1.float()
    scale = normed.abs().amax(dim=-1) / 127.0
    y = to_int8(torch.where(scale.unsqueeze(-1) > 0, normed / scale.unsqueeze(-1), 0.0))
    return y, torch.empty(1, dtype=torch.int8), total, scale, torch.empty(1)


@rule(
    "atb::_npu_quant_rms_norm",
    source="op-plugin test_atb_quant_rms_norm (fact sheet 1.4): divides",
    status="upstream golden ran",
)
def quant_rms_norm(
    self: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    output: torch.Tensor,
    eps: float = 1e-5,
) -> None:
    """output = int8 round((norm * gamma + beta) / scale + offset): this form DIVIDES by its scale."""
    normed, _ = _rms(self, gamma.reshape(-1), eps)
    output.copy_(to_int8((normed + beta.reshape(-1).float()) / scale.float() + offset.float()))


@rule("npu::npu_layer_norm_eval", source="op-plugin page npu_layer_norm_eval", status="upstream golden ran")
def layer_norm_eval(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer norm over the last axes, of the population variance."""
    axes = tuple(range(-len(normalized_shape), 0))
    normed, _, _ = _layer(input.float(), axes, eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(input.dtype)


def _layer(wide: torch.Tensor, axes: tuple[int, ...], eps: float) -> Results:
    """(normed, mean, 1/deviation) of a float32 tensor over its last axes."""
    mean = wide.mean(dim=axes, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(dim=axes, keepdim=True) + eps)
    return (wide - mean) * rstd, mean, rstd


@rule("npu::npu_add_layer_norm", source="op-plugin test_npu_add_layer_norm.py", status="upstream golden ran")
def add_layer_norm(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float = 1e-5,
    additional_output: bool = False,
) -> Results:
    """(y, mean, 1/deviation, x1 + x2): unlike the rms form, the norm is of the sum before it is rounded."""
    wide = x1.float() + x2.float()
    normed, mean, rstd = _layer(wide, tuple(range(-gamma.dim(), 0)), epsilon)
    y = (normed * gamma.float() + beta.float()).to(x1.dtype)
    return y, mean, rstd, wide.to(x1.dtype)


# --- limits -----------------------------------------------------------------------------------------------------

_RMS_FORMS = ("npu::npu_rms_norm", "npu::npu_gemma_rms_norm")
_ADD_FORMS = ("npu::npu_add_rms_norm", "npu::npu_add_rms_norm_v2", "npu::npu_add_rms_norm_cast")
_QUANT_FORMS = (
    "npu::npu_rms_norm_quant",
    "npu::npu_add_rms_norm_quant",
    "npu::npu_add_rms_norm_dynamic_quant",
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_PAGE = "op-plugin page of the operator (fact sheet 1.4): "


@limit(
    *_RMS_FORMS,
    code=PARAMETER,
    source=_PAGE + "table of dtypes; mixed with float32 weights on A2 and A3 only",
)
def input_and_gamma_dtypes_pair(call: Call) -> str | None:
    refused = dtype_refusal(call, "input", _FLOATS) or dtype_refusal(call, "gamma", _FLOATS)
    if refused:
        return refused
    x, gamma = call["input"].dtype, call["gamma"].dtype
    mixed = gamma == torch.float32 and family(call.chip) in (A2, A3)
    return (
        None
        if x == gamma or mixed
        else refuse_parameter(call, f"dtype of gamma {gamma} does not fit that of x {x}")
    )


@limit(*_ADD_FORMS, code=PARAMETER, source=_PAGE + "x1, x2 and gamma of one dtype")
def residual_and_gamma_of_one_dtype(call: Call) -> str | None:
    same = (call["x1"].dtype,)
    return (
        dtype_refusal(call, "x1", _FLOATS)
        or dtype_refusal(call, "x2", same)
        or dtype_refusal(call, "gamma", same)
    )


@limit(*_QUANT_FORMS, code=PARAMETER, source=_PAGE + "float16 or bfloat16, float16 alone on 310P")
def quantised_norm_dtypes(call: Call) -> str | None:
    first = "x" if call.name == "npu::npu_rms_norm_quant" else "x1"
    return dtype_refusal(call, first, (torch.float16, torch.bfloat16)) or dtype_refusal(
        call, "gamma", (call[first].dtype,)
    )


@limit(
    "npu::npu_add_rms_norm_quant", code=PARAMETER, source=_PAGE + "scales float32 with float16, else bfloat16"
)
def quantised_norm_scale_dtypes(call: Call) -> str | None:
    wanted = torch.float32 if call["x1"].dtype == torch.float16 else torch.bfloat16
    return dtype_refusal(call, "scales1", (wanted,)) or dtype_refusal(call, "scales2", (wanted,))


@limit("npu::npu_rms_norm_quant", code=PARAMETER, source=_PAGE + "scale of one element, offset int8")
def one_scale_and_an_int8_offset(call: Call) -> str | None:
    if call["scale"].numel() != 1:
        return refuse_parameter(call, f"scale shape {tuple(call['scale'].shape)} should be (1,).")
    return dtype_refusal(call, "offset", (torch.int8,))


def _sizes_fit(call: Call, x: torch.Tensor) -> str | None:
    gamma = call["gamma"]
    shape = tuple(gamma.shape[-1:]) if call.name == "npu::npu_rms_norm_quant" else tuple(gamma.shape)
    if len(shape) > x.dim() or tuple(x.shape[x.dim() - len(shape) :]) != shape:
        return refuse_tiling(
            call, f"gamma shape {tuple(gamma.shape)} should equal the last dims of x {tuple(x.shape)}"
        )
    return None


@limit(
    *_RMS_FORMS,
    *_ADD_FORMS,
    *_QUANT_FORMS,
    code=TILING,
    source=_PAGE + "gamma has the shape of the last axes",
)
def gamma_has_the_shape_of_the_last_axes(call: Call) -> str | None:
    for name in ("input", "x", "x1"):
        if call[name] is not None:
            return _sizes_fit(call, call[name])
    return None


@limit(*_ADD_FORMS, *_QUANT_FORMS[1:], code=TILING, source=_PAGE + "x1 and x2 of one shape, not empty")
def residual_of_the_same_shape(call: Call) -> str | None:
    x1, x2 = call["x1"], call["x2"]
    if x1.shape != x2.shape:
        return refuse_tiling(call, f"x1 shape {tuple(x1.shape)} should equal x2 shape {tuple(x2.shape)}")
    return refuse_tiling(call, "x1 should not be an empty tensor") if x1.numel() == 0 else None


@limit(*_RMS_FORMS, _QUANT_FORMS[0], code=TILING, source=_PAGE + "310P: last axis of at least 32 bytes")
def last_axis_at_least_32_bytes_on_310p(call: Call) -> str | None:
    x = call["input"] if call["input"] is not None else call["x"]
    width = x.shape[-1] * x.element_size() if x.dim() else 0
    if family(call.chip) == INFERENCE_310P and width < 32:
        return refuse_tiling(call, f"the last dim of x is {width} bytes, should not be less than 32 bytes")
    return None


@limit("npu::npu_add_rms_norm_quant", code=TILING, source=_PAGE + "310P: last axis of at least 32 elements")
def last_axis_at_least_32_elements_on_310p(call: Call) -> str | None:
    if family(call.chip) == INFERENCE_310P and call["x1"].shape[-1] < 32:
        return refuse_tiling(call, f"the last dim of x1 {call['x1'].shape[-1]} should not be less than 32")
    return None
