"""Matrix products and storage formats.

Tensors in a private format come to a rule in their logical order, and results leave in it; `to_fractal` and
`from_fractal` are the bytes of format 29 for whoever keeps the storage. Products accumulate in float32.
"""

from __future__ import annotations

import torch

from atbx.testing.software_npu.rules.registry import rule


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
