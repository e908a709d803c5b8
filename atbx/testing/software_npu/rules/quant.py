"""Quantisers and products with quantised operands, each in its own sense of scale and offset.

npu_quantize divides by its scales unless div_mode is off; npu_anti_quant and the weight form of
npu_weight_quant_batchmatmul ADD their offset before they scale; npu_quant_matmul returns int8 unless a dtype is
asked for. Products of int8 are exact in int32 (kept in float64 here, which holds them exactly).
"""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.chips import INFERENCE_310P, family
from atbx.testing.software_npu.rules.norms import to_int8
from atbx.testing.software_npu.rules.registry import (
    NZ,
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

# Numbers of dtypes in arguments of type int: torch's scalar types.
_DTYPES = {
    0: torch.uint8, 1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 12: torch.int8,
    13: torch.uint8, 14: torch.int32, 15: torch.bfloat16,
}  # fmt: skip


def dtype_of(number: object, absent: torch.dtype) -> torch.dtype:
    """The dtype that an int or torch.dtype argument names; quantised names give their storage dtype."""
    if number is None:
        return absent
    if isinstance(number, torch.dtype):
        return {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}.get(
            number, number
        )
    if int(number) not in _DTYPES:  # type: ignore[call-overload]
        raise NotModelledError(f"dtype number {number} is not modelled")
    return _DTYPES[int(number)]  # type: ignore[call-overload]


@rule(
    "npu::npu_dynamic_quant",
    source="op-plugin page and test_npu_dynamic_quant.py",
    status="upstream golden ran",
)
def dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """(y, scale): scale = largest magnitude of the row (times smooth_scales) over 127, y = round(x / scale)."""
    if group_index is not None or quant_mode != "pertoken" or dtype_of(dst_type, torch.int8) != torch.int8:
        raise NotModelledError("npu_dynamic_quant by group, by channel or to another dtype is not modelled")
    wide = input.float() if smooth_scales is None else input.float() * smooth_scales.float()
    scale = wide.abs().amax(dim=-1) / 127.0
    divided = wide / scale.unsqueeze(-1)
    # A row of zeros has the scale 0; what 0/0 becomes is not documented, and zeros are the only sane reading.
    return to_int8(torch.where(scale.unsqueeze(-1) > 0, divided, 0.0)), scale


@rule("npu::npu_quantize", source="op-plugin page and test_npu_quantize.py", status="upstream golden ran")
def quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """round(input / scales) + zero_points along axis; div_mode off multiplies, along the last axis or axis -2."""
    if not div_mode:
        axis = -2 if axis == -2 else -1
    shape = [1] * input.dim()
    shape[axis] = -1

    def spread(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.float().reshape(shape) if parameter.dim() == 1 else parameter.float()

    wide = input.float() / spread(scales) if div_mode else input.float() * spread(scales)
    result = dtype_of(dtype, torch.int8)
    if div_mode:
        wide = torch.round(wide)
    if zero_points is not None:
        wide = wide + spread(zero_points)
    wide = torch.round(wide)
    bounds = torch.iinfo(result)
    return wide.double().clamp(bounds.min, bounds.max).to(result)


@rule("npu::npu_anti_quant", source="op-plugin page and test_npu_anti_quant.py", status="upstream golden ran")
def anti_quant(
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    dst_dtype: int | None = None,
    src_dtype: int | None = None,
) -> torch.Tensor:
    """(x + offset) * scale in float16 unless another dtype is asked for."""
    if x.dtype != torch.int8:
        raise NotModelledError("npu_anti_quant of packed int4 is not modelled")
    wide = x.float() if offset is None else x.float() + offset.float()
    return (wide * scale.float()).to(dtype_of(dst_dtype, torch.float16))


@rule(
    "npu::npu_quant_matmul",
    source="op-plugin page and test_npu_quant_matmul.py",
    status="upstream golden ran",
)
def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x1 @ x2 + int32 bias) * scale (* pertoken_scale of the row) + float bias or offset; int8 unless asked.

    An int64 scale is unpacked from npu_trans_quant_param's form: the low 32 bits are a float32.
    """
    if x1.dtype != torch.int8 or y_scale is not None or group_sizes:
        raise NotModelledError("npu_quant_matmul of packed int4, by group, or with y_scale is not modelled")
    result = dtype_of(output_dtype, torch.int8)
    product = x1.double() @ x2.double()
    if bias is not None and bias.dtype == torch.int32:
        product = product + bias.double()
    if result == torch.int32:
        return product.to(torch.int32)
    if scale.dtype == torch.int64:
        scale = (scale & 0xFFFFFFFF).to(torch.int64).to(torch.int32).view(torch.float32)
    wide = product.float() * scale.float()
    if pertoken_scale is not None:
        wide = wide * pertoken_scale.float().unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        wide = wide + bias.float()
    if offset is not None:
        wide = wide + offset.float()
    return to_int8(wide) if result == torch.int8 else wide.to(result)


@rule(
    "npu::npu_weight_quant_batchmatmul",
    source="op-plugin page and test_npu_weight_quant_batchmatmul.py",
    status="upstream golden ran",
)
def weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    """x [M, K] @ ((weight [K, N] + antiquant_offset) * antiquant_scale) + bias; the scale by column or by group."""
    if weight.dtype != torch.int8 or quant_scale is not None or antiquant_scale.dtype == torch.int64:
        raise NotModelledError(
            "npu_weight_quant_batchmatmul of int4, with a quantised result or packed scales"
        )

    def by_row(parameter: torch.Tensor) -> torch.Tensor:
        wide = parameter.float()
        if antiquant_group_size:
            return wide.repeat_interleave(antiquant_group_size, dim=0)[: weight.shape[0]]
        return wide.reshape(1, -1)

    wide = weight.float()
    if antiquant_offset is not None:
        wide = wide + by_row(antiquant_offset)
    plain = (wide * by_row(antiquant_scale)).to(x.dtype).float()
    out = x.float() @ plain
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


# --- limits -----------------------------------------------------------------------------------------------------

_PAGE = "op-plugin page of the operator (fact sheet 1.7): "


@limit("npu::npu_dynamic_quant", code=PARAMETER, source=_PAGE + "float16 or bfloat16, smooth_scales alike")
def dynamic_quant_dtypes(call: Call) -> str | None:
    floats = (torch.float16, torch.bfloat16)
    return dtype_refusal(call, "input", floats) or dtype_refusal(call, "smooth_scales", floats)


@limit(
    "npu::npu_dynamic_quant",
    code=PARAMETER,
    source=_PAGE + "more than one axis; smooth_scales of the last axis",
)
def dynamic_quant_shapes(call: Call) -> str | None:
    x, smooth = call["input"], call["smooth_scales"]
    if x.dim() < 2:
        return refuse_parameter(call, f"x of {x.dim()} dims should be more than 1 dim.")
    if smooth is not None and call["group_index"] is None and tuple(smooth.shape) != (x.shape[-1],):
        return refuse_parameter(call, f"smooth_scales {tuple(smooth.shape)} should be ({x.shape[-1]},).")
    return None


@limit("npu::npu_quantize", code=PARAMETER, source=_PAGE + "dtypes by div_mode and chip")
def quantize_dtypes(call: Call) -> str | None:
    floats: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    refused = dtype_refusal(call, "input", floats)
    if refused:
        return refused
    if call["div_mode"]:
        return dtype_refusal(call, "scales", (torch.float32, torch.bfloat16)) or dtype_refusal(
            call, "zero_points", (torch.int8, torch.uint8, torch.int32, torch.bfloat16)
        )
    same = (call["input"].dtype,)
    return dtype_refusal(call, "scales", same) or dtype_refusal(call, "zero_points", same)


@limit("npu::npu_anti_quant", code=PARAMETER, source=_PAGE + "int8 or packed int4; float scale, one axis")
def anti_quant_inputs(call: Call) -> str | None:
    packed = () if family(call.chip) == INFERENCE_310P else (torch.int32,)
    scales: tuple[torch.dtype, ...] = (torch.float32,)
    if family(call.chip) != INFERENCE_310P:
        scales = (torch.float32, torch.bfloat16)
    refused = dtype_refusal(call, "x", (torch.int8, *packed)) or dtype_refusal(call, "scale", scales)
    if refused:
        return refused
    scale, offset = call["scale"], call["offset"]
    if scale.dim() != 1:
        return refuse_parameter(call, f"scale of {scale.dim()} dims should be 1 dim.")
    if offset is not None and (offset.shape != scale.shape or offset.dtype != scale.dtype):
        return refuse_parameter(call, "offset should have the shape and dtype of scale.")
    return None


@limit(
    "npu::npu_quant_matmul",
    code=PARAMETER,
    source=_PAGE + "int8 operands; scale float32, int64, bfloat16 (no float16)",
)
def quant_matmul_dtypes(call: Call) -> str | None:
    narrow = family(call.chip) == INFERENCE_310P
    operands = (torch.int8,) if narrow else (torch.int8, torch.int32)
    scales = (torch.float32, torch.int64) if narrow else (torch.float32, torch.int64, torch.bfloat16)
    biases = (torch.int32,) if narrow else (torch.int32, torch.bfloat16, torch.float16, torch.float32)
    return (
        dtype_refusal(call, "x1", operands)
        or dtype_refusal(call, "x2", (call["x1"].dtype,))
        or dtype_refusal(call, "scale", scales)
        or dtype_refusal(call, "bias", biases)
        or dtype_refusal(call, "pertoken_scale", (torch.float32,))
    )


@limit("npu::npu_quant_matmul", code=PARAMETER, source=_PAGE + "no pertoken_scale on 310P")
def quant_matmul_pertoken_scale_not_on_310p(call: Call) -> str | None:
    if call["pertoken_scale"] is not None and family(call.chip) == INFERENCE_310P:
        return refuse_parameter(call, f"pertoken_scale is not supported on {call.chip}.")
    return None


@limit(
    "npu::npu_quant_matmul", code=PARAMETER, source=_PAGE + "last axes at most 65535; operands fit; not empty"
)
def quant_matmul_shapes(call: Call) -> str | None:
    x1, x2, scale = call["x1"], call["x2"], call["scale"]
    for name, x in (("x1", x1), ("x2", x2)):
        if not 2 <= x.dim() <= 6 or x.numel() == 0:
            return refuse_parameter(call, f"{name} {tuple(x.shape)} should be 2 to 6 dims and not empty.")
        if x.shape[-1] > 65535:
            return refuse_parameter(call, f"the last dim of {name} {x.shape[-1]} should not exceed 65535.")
    if x1.shape[-1] != x2.shape[-2]:
        return refuse_parameter(call, f"K of x1 {x1.shape[-1]} should equal K of x2 {x2.shape[-2]}.")
    if scale.numel() not in (1, x2.shape[-1]):
        return refuse_parameter(call, f"scale {tuple(scale.shape)} should have 1 or {x2.shape[-1]} elements.")
    return None


_WEIGHT = "npu::npu_weight_quant_batchmatmul"


@limit(_WEIGHT, code=PARAMETER, source=_PAGE + "x, scale and offset of one dtype; bias float32 with bfloat16")
def weight_quant_dtypes(call: Call) -> str | None:
    x = call["x"].dtype
    bias = torch.float32 if x == torch.bfloat16 else torch.float16
    return (
        dtype_refusal(call, "x", (torch.float16, torch.bfloat16))
        or dtype_refusal(call, "weight", (torch.int8, torch.int32))
        or dtype_refusal(call, "antiquant_scale", (x, torch.int64))
        or dtype_refusal(call, "antiquant_offset", (call["antiquant_scale"].dtype, torch.int32))
        or dtype_refusal(call, "bias", (bias,))
    )


@limit(_WEIGHT, code=TILING, source=_PAGE + "2-D operands, K and N at most 65535")
def weight_quant_sizes(call: Call) -> str | None:
    x, weight = call["x"], call["weight"]
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0]:
        return refuse_tiling(
            call, f"x {tuple(x.shape)} and weight {tuple(weight.shape)} should be (M, K) and (K, N)"
        )
    large = [size for size in weight.shape if size > 65535]
    return refuse_tiling(call, f"K or N {large[0]} should not exceed 65535") if large else None


@limit(_WEIGHT, code=TILING, source=_PAGE + "group size a multiple of 32 in [32, K-1]")
def weight_quant_group_size(call: Call) -> str | None:
    group, k = int(call["antiquant_group_size"] or 0), call["x"].shape[-1]
    if group and not (32 <= group <= k - 1 and group % 32 == 0):
        return refuse_tiling(call, f"antiquantGroupSize {group} should be a multiple of 32 in [32, {k - 1}]")
    return None


@limit(_WEIGHT, code=PARAMETER, source=_PAGE + "a fractal weight only in graph mode, not op by op")
def weight_quant_fractal_not_eager(call: Call) -> str | None:
    if call.formats.get("weight") == NZ:
        return refuse_parameter(call, "weight of format FRACTAL_NZ is not supported in single-operator mode.")
    return None
