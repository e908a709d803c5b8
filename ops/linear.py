"""Contractions: linear (weights stored [out, in]), matmul and embedding; all accumulate in FP32 and round once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import ShapeError
from atbx.core.op import Cost, Op, register_op, traffic
from atbx.core.staging import operators
from atbx.ops.indexing import need_in_range
from atbx.ops.operands import (
    broadcast_shapes,
    common_size,
    need_float,
    need_index,
    need_ndim,
    need_same_dtype,
    need_sizes,
    need_tensor,
    wide_dtype,
)


def _linear_shape(x: Any, weight: Any, bias: Any = None) -> Abstract:
    value = need_ndim("linear", "x", need_float("linear", "x", x), 1)
    matrix = need_tensor("linear", "weight", weight)
    if matrix.ndim != 2 or matrix.shape[1] != value.shape[-1]:
        raise ShapeError(
            "linear: weight does not fit x",
            expected=f"[out,{int(value.shape[-1])}]",
            found=matrix,
            hint="Weights are stored [out, in]",
        )
    if bias is not None:
        need_sizes("linear", "bias", need_tensor("linear", "bias", bias), matrix.shape[:1])
    dtype = need_same_dtype("linear", x=value, weight=matrix, bias=bias)
    return Abstract((*value.shape[:-1], matrix.shape[0]), dtype)


def _linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    wide = wide_dtype(x.dtype)
    out = torch.nn.functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    return out.to(x.dtype)


def _linear_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    inner = int(operands[1].shape[1])
    return Cost(2.0 * results[0].numel * inner, traffic(operands, results))


def _linear_mixes(x: Abstract, weight: Abstract, bias: Any = None) -> Iterable[tuple[int, int]]:
    return (0, x.ndim - 1), (1, 1)


LINEAR = register_op(Op("linear", _linear_shape, _linear_reference, _linear_cost, mixes=_linear_mixes))


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """x by a weight stored [out, in], plus bias: x [..., in], weight [out, in], bias [out] to [..., out].

    Accumulates in FP32, adds the bias there, and rounds once.

    Raises:
        ShapeError: weight or bias does not fit.
        DTypeError: dtypes differ.
    """
    return LINEAR(x, weight, bias)


def _matmul_shape(x: Any, y: Any) -> Abstract:
    a = need_ndim("matmul", "x", need_float("matmul", "x", x), 2)
    b = need_ndim("matmul", "y", need_float("matmul", "y", y), 2)
    dtype = need_same_dtype("matmul", x=a, y=b)
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            "matmul: inner sizes differ", expected=f"[..., {int(a.shape[-1])}, N]", found=f"{a} and {b}"
        )
    common_size("matmul", a.shape[-1], b.shape[-2], -1)
    batch = broadcast_shapes("matmul", (a.shape[:-2], b.shape[:-2]))
    return Abstract((*batch, a.shape[-2], b.shape[-1]), dtype)


def _matmul_reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wide = wide_dtype(x.dtype)
    return torch.matmul(x.to(wide), y.to(wide)).to(x.dtype)


def _matmul_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    inner = int(operands[0].shape[-1])
    return Cost(2.0 * results[0].numel * inner, traffic(operands, results))


def _matmul_mixes(x: Abstract, y: Abstract) -> Iterable[tuple[int, int]]:
    return (0, x.ndim - 1), (1, y.ndim - 2)


MATMUL = register_op(Op("matmul", _matmul_shape, _matmul_reference, _matmul_cost, mixes=_matmul_mixes))


def matmul(x: Any, y: Any) -> Any:
    """Matrix product with broadcast leading axes: x [..., M, K], y [..., K, N] to [..., M, N].

    Raises:
        ShapeError: inner or leading sizes do not fit, or an operand has fewer than two axes.
        DTypeError: dtypes differ.
    """
    return MATMUL(x, y)


def _embedding_shape(table: Any, ids: Any) -> Abstract:
    rows = need_tensor("embedding", "table", table)
    if rows.ndim != 2:
        raise ShapeError("embedding: table must have two axes", expected="[V,M]", found=rows)
    index = need_index("embedding", "ids", ids)
    return Abstract((*index.shape, rows.shape[1]), rows.dtype)


def _embedding_reference(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    need_in_range("embedding", ids, table.shape[0], "ids")
    return table[ids.long()]


def _embedding_cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    # Only the rows that are looked up are read.
    return Cost(0.0, operands[1].nbytes + 2.0 * results[0].nbytes)


EMBEDDING = register_op(Op("embedding", _embedding_shape, _embedding_reference, _embedding_cost))


def embedding(table: Any, ids: Any) -> Any:
    """Rows of a table by id: table [V,M], ids [...] to [..., M].

    Raises:
        ShapeError: an id is outside 0 to V - 1 (found when run).
    """
    return EMBEDDING(table, ids)


operators["matmul"] = matmul
