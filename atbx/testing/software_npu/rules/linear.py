"""Matrix products and storage formats.

Tensors in a private format come to a rule in their logical order, and results leave in it; `to_fractal` and
`from_fractal` are the bytes of format 29 for whoever keeps the storage. Products accumulate in float32.
"""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.chips import A2, A3, cann_at_least, family
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


def fractal_width(dtype: torch.dtype) -> int:
    """Columns of a strip of the fractal format: 32 for one-byte elements, 16 otherwise."""
    return 32 if dtype in (torch.int8, torch.uint8) else 16


def to_fractal(x: torch.Tensor) -> torch.Tensor:
    """Storage of format 29 of a tensor [..., M, N]: [..., N/w, M/16, 16, w], padded with zeros."""
    width = fractal_width(x.dtype)
    rows, columns = x.shape[-2:]
    m, n = -(-rows // 16), -(-columns // width)
    padded = x.new_zeros((*x.shape[:-2], m * 16, n * width))
    padded[..., :rows, :columns] = x
    return padded.unflatten(-1, (n, width)).unflatten(-3, (m, 16)).movedim(-2, -4).contiguous()


def from_fractal(storage: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The tensor [..., rows, columns] whose format 29 storage is [..., N/w, M/16, 16, w]."""
    return storage.movedim(-4, -2).flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()


@rule(
    "npu::npu_linear", source="op-plugin page npu_linear and test_npu_linear.py", status="upstream golden ran"
)
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """input [M, K] times weight [N, K] transposed, plus bias [N]."""
    wide = input.float() @ weight.float().T
    if bias is not None:
        wide = wide + bias.float()
    return wide.to(input.dtype)


_CAST = "op-plugin page npu_format_cast (fact sheet 1.11)"


@rule("npu::npu_format_cast", "npu::_npu_format_cast", source=_CAST, status="document only")
def format_cast(
    input: torch.Tensor,
    acl_format: int | None = None,
    *further: object,
    dst: torch.Tensor | None = None,
    **named: object,
) -> torch.Tensor:
    """The same values in another storage format; the values do not change."""
    return input.clone()


@rule("npu::npu_format_cast_", source=_CAST, status="document only")
def format_cast_in_place(input: torch.Tensor, *further: object, **named: object) -> torch.Tensor:
    """The same values, the storage of `input` itself changing its format."""
    return input


@rule(
    "npu::npu_transpose_batchmatmul",
    source="op-plugin page and test_npu_transpose_batchmatmul.py",
    status="golden skipped upstream",
)
def transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """[M, B, N] = (input as [B, M, K]) @ (weight as [B, K, N]), batch and rows swapped in the result.

    batch_split_factor s > 1 gives [s, M, B*N/s].
    """
    if scale is not None:
        raise NotModelledError("npu_transpose_batchmatmul with a quantising scale is not modelled")
    left = input.float().permute(*(perm_x1 or (0, 1, 2)))
    right = weight.float().permute(*(perm_x2 or (0, 1, 2)))
    out = (left @ right).to(input.dtype).permute(*(perm_y or (1, 0, 2))).contiguous()
    split = int(batch_split_factor or 1)
    if split > 1:
        out = out.flatten(1).unflatten(1, (split, -1)).transpose(0, 1).contiguous()
    return out


# --- limits -----------------------------------------------------------------------------------------------------

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@limit(
    "npu::npu_linear", code=PARAMETER, source="op-plugin page npu_linear: 2-D operands, 1-D bias, one dtype"
)
def linear_operands(call: Call) -> str | None:
    refused = dtype_refusal(call, "input", _FLOATS) or dtype_refusal(call, "weight", (call["input"].dtype,))
    if refused:
        return refused
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if x.dim() != 2 or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return refuse_parameter(
            call, f"input {tuple(x.shape)} and weight {tuple(weight.shape)} should be 2 dims."
        )
    if x.shape[1] != weight.shape[1]:
        return refuse_parameter(call, f"K of input {x.shape[1]} should equal K of weight {weight.shape[1]}.")
    return None


@limit(
    "npu::npu_format_cast",
    code=PARAMETER,
    source="op-plugin page npu_format_cast: customize_dtype from CANN 9.1.0",
)
def customize_dtype_needs_cann_9_1(call: Call) -> str | None:
    if call["customize_dtype"] is None:
        return None
    if family(call.chip) in (A2, A3) and cann_at_least(call.cann, "9.1.0"):
        return None
    return refuse_parameter(call, f"customize_dtype is not supported on {call.chip} with CANN {call.cann}.")


_BATCHED = "npu::npu_transpose_batchmatmul"
_BATCHED_PAGE = "op-plugin page npu_transpose_batchmatmul: "


@limit(_BATCHED, code=PARAMETER, source=_BATCHED_PAGE + "dtypes, no bias, three axes, permutations")
def batched_operands(call: Call) -> str | None:
    refused = dtype_refusal(call, "input", _FLOATS) or dtype_refusal(call, "weight", (call["input"].dtype,))
    if refused:
        return refused
    if call["bias"] is not None:
        return refuse_parameter(call, "bias is not supported.")
    if call["input"].dim() != 3 or call["weight"].dim() != 3:
        return refuse_parameter(call, "input and weight should be 3 dims.")
    second = [[0, 1, 2], [0, 2, 1]] if cann_at_least(call.cann, "8.5.0") else [[0, 1, 2]]
    for name, allowed in (("perm_x1", [[0, 1, 2], [1, 0, 2]]), ("perm_x2", second), ("perm_y", [[1, 0, 2]])):
        given = call[name]
        if given is not None and [int(one) for one in given] not in allowed:
            return refuse_parameter(call, f"{name} {list(given)} should be one of {allowed}.")
    return None


@limit(_BATCHED, code=TILING, source=_BATCHED_PAGE + "K and N multiples of 16; last axes at most 65535")
def batched_sizes(call: Call) -> str | None:
    left, right = call["input"], call["weight"]
    order = call["perm_x2"] or (0, 1, 2)
    k, n = right.shape[order[1]], right.shape[order[2]]
    if k != left.shape[-1]:
        return refuse_tiling(call, f"K of input {left.shape[-1]} should equal K of weight {k}")
    if k % 16 or n % 16:
        return refuse_tiling(call, f"K {k} and N {n} should be 16 aligned")
    large = [size for size in (left.shape[-1], right.shape[-1]) if size > 65535]
    return refuse_tiling(call, f"the last dim {large[0]} should not exceed 65535") if large else None


@limit(_BATCHED, code=TILING, source=_BATCHED_PAGE + "batch_split_factor divides N")
def batch_split_factor_divides_n(call: Call) -> str | None:
    split, n = int(call["batch_split_factor"] or 1), call["weight"].shape[(call["perm_x2"] or (0, 1, 2))[2]]
    return (
        None
        if 1 <= split <= n and n % split == 0
        else refuse_tiling(call, f"batchSplitFactor {split}, N {n}")
    )
