"""Lookups by index: one gather each, with indices that came from the host checked there before the launch.

No operator checks an index on the device: one out of range reads foreign memory or stops the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from atbx.core.backend import HostPlan, Preparation
from atbx.core.program import Equation
from atbx.kernels.ascend.capability import Capability
from atbx.kernels.ascend.plan import StepPlan
from atbx.kernels.ascend.runtime import rows_of_table
from atbx.ops.indexing import need_in_range


def _embedding_key(equation: Equation) -> Hashable:
    return int(equation.operands[0].shape[0])


def _embedding_plan(rows: Any, ids: torch.Tensor) -> StepPlan:
    need_in_range("embedding", ids, rows, "ids")
    return StepPlan({"index": ids})


def _embedding(equation: Equation) -> Callable[..., torch.Tensor]:
    def run(table: torch.Tensor, ids: torch.Tensor, plan: StepPlan | None) -> torch.Tensor:
        return F.embedding(ids if plan is None else plan["index"], table)

    return run


def _take_key(equation: Equation) -> Hashable:
    return int(equation.operands[0].shape[0]), int(equation.operands[0].shape[1])


def _take_plan(key: Any, indices: torch.Tensor) -> StepPlan:
    batch, tokens = key
    need_in_range("take", indices, tokens, "indices into axis 1")
    flat = indices + torch.arange(batch).unsqueeze(1) * tokens
    return StepPlan({"index": flat.flatten().to(torch.int64)})


def _take(equation: Equation) -> Callable[..., torch.Tensor]:
    tokens = int(equation.operands[0].shape[1])
    shape = tuple(map(int, equation.results[0].shape))

    def run(x: torch.Tensor, indices: torch.Tensor, plan: StepPlan | None) -> torch.Tensor:
        if plan is None:
            rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
            return x[rows, indices.long()]
        if tokens == 1 and shape[1] == 1:
            # The one row there is; its index was found to be 0.
            return x
        return x.reshape(-1, *shape[2:]).index_select(0, plan["index"]).view(shape)

    return run


def _take_launches(equation: Equation) -> int:
    return 0 if int(equation.operands[0].shape[1]) == 1 and int(equation.operands[1].shape[1]) == 1 else 1


def _along_key(equation: Equation) -> Hashable:
    axis = equation.params["axis"]
    return int(equation.operands[0].shape[axis]), axis


def _along_plan(key: Any, indices: torch.Tensor) -> StepPlan:
    size, axis = key
    need_in_range("take_along", indices, size, f"indices into axis {axis}")
    return StepPlan({"index": indices.to(torch.int64)})


def _along(equation: Equation) -> Callable[..., torch.Tensor]:
    axis = equation.params["axis"]

    def run(x: torch.Tensor, indices: torch.Tensor, plan: StepPlan | None) -> torch.Tensor:
        return torch.gather(x, axis, indices.long() if plan is None else plan["index"])

    return run


def _table(equation: Equation) -> Mapping[int, Preparation]:
    return {0: rows_of_table()}


_EMBEDDING_PLAN = HostPlan((1,), _embedding_key, _embedding_plan, optional=True)

ROWS = (
    Capability(
        "embedding",
        "aclnn.embedding",
        ("aten::embedding",),
        _embedding,
        evidence=("op-plugin check",),
        packs=_table,
        plan=_EMBEDDING_PLAN,
    ),
    Capability(
        "embedding",
        "aclnn.embedding_unbound",
        ("aten::embedding",),
        _embedding,
        evidence=("op-plugin check",),
        tier="composed",
        plan=_EMBEDDING_PLAN,
    ),
    Capability(
        "take",
        "aclnn.index_select",
        ("aten::index_select",),
        _take,
        dtypes=None,
        evidence=("op-plugin check",),
        launches=_take_launches,
        plan=HostPlan((1,), _take_key, _take_plan, optional=True),
    ),
    Capability(
        "take_along",
        "aclnn.gather",
        ("aten::gather",),
        _along,
        dtypes=None,
        evidence=("op-plugin check",),
        plan=HostPlan((1,), _along_key, _along_plan, optional=True),
    ),
)
