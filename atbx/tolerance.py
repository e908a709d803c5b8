"""How far a kernel's result may be from what its op means, in units of the rounding that the dtype makes unavoidable.

The truth is the reference rule in FP64 over the very inputs that the kernel had. A unit is what the reference rule in
the program's own dtype is allowed to be off: the dtype's unit roundoff times the largest value of the row (the last
axis), or that rule's own error against FP64 where it is larger (it rounds between the parts of a fused op). A kernel
may take ROUNDINGS units, and sqrt(n) roundings of the FP32 accumulator for a reduction over n terms, which is how the
error of a sum grows whatever its order. Whole numbers and bools must be equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from atbx.core.op import Op
from atbx.core.program import Equation

ROUNDINGS = 4.0
"""Units that a kernel may take: the rounding of its result, and those of cos, sin or weights of attention that stock
operators hold in the model's dtype where the reference rule holds them in FP32."""

RULE = (
    "error <= (4 + sqrt(n) * u_acc / u) * max(u * largest value of the row, the reference rule's own error), "
    "all against the reference rule in FP64 on the same inputs; u: unit roundoff of the dtype, u_acc: of FP32 "
    "(of FP64 for FP64), n: terms of the reduction; integers and bools are equal"
)
"""The tolerance in words, for reports."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next larger number: 2^-24 for FP32, 2^-11 for FP16, 2^-8 for BF16."""
    return torch.finfo(dtype).eps / 2


def allowed_units(dtype: torch.dtype, length: int) -> float:
    """Units that a result of `dtype` made by a reduction over `length` terms may be off."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return ROUNDINGS + math.sqrt(max(length, 1)) * unit_roundoff(wide) / unit_roundoff(dtype)


def reduction_length(equation: Equation) -> int:
    """Terms that a result of the equation is summed over; 1 where nothing is."""
    operands, params, name = equation.operands, equation.params, equation.op.name
    if name in ("linear", "matmul", "norm_qkv", "rms_norm", "add_rms_norm", "layer_norm"):
        return int(operands[0].shape[-1])
    if name in ("attention", "attend_project"):
        reach = int(params["extent"]) + int(operands[0].shape[3])
        return reach + (int(operands[8].shape[1]) if name == "attend_project" else 0)
    if name == "norm_gated_mlp":
        return int(operands[0].shape[-1]) + int(operands[4].shape[-1])
    if name == "qkv_rotary_write":
        return int(params["head_size"])
    if "axis" in params and equation.inputs and hasattr(operands[0], "shape"):
        axis = params["axis"]
        return int(operands[0].numel if axis is None else operands[0].shape[axis])
    return int(operands[0].shape[-1]) if name in _OVER_ROWS else 1


_OVER_ROWS = ("filter_logits", "draw", "token_logprobs", "top_logprobs")


@dataclass(frozen=True)
class Judgement:
    """One result against what it should be.

    error: largest absolute difference (for integers: how many differ). scale: largest absolute value expected.
    units: largest error in units of its row, infinite where a value is wrong in kind. allowed: units that it may be.
    place: index of the worst entry. problem: what is wrong apart from size, such as a NaN.
    """

    error: float
    scale: float
    units: float
    allowed: float
    place: tuple[int, ...] = ()
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it is within the tolerance."""
        return self.problem is None and self.units <= self.allowed

    @property
    def margin(self) -> float:
        """Units over what is allowed: above 1 is past the tolerance."""
        if not self.allowed:
            return math.inf if self.units else 0.0
        return self.units / self.allowed


def exact_result(op: Op, operands: tuple[Any, ...], params: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The results of an op's reference rule with every floating operand in FP64.

    A rule that takes FP32 alone, as those of sampling do, gives what it gives in FP32.
    """
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in operands]
    try:
        return as_tuple(op.reference(*wide, **params))
    except RuntimeError:
        return as_tuple(op.reference(*operands, **params))


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """The results of an op, one or several, as a tuple."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def judge(
    found: torch.Tensor,
    reference: torch.Tensor,
    exact: torch.Tensor,
    allowed: float,
    *,
    target: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
) -> Judgement:
    """Judge a result.

    reference: the reference rule in the program's dtype; decides integers, bools and what is infinite.
    exact:     the same in FP64.
    target:    compare with it (another backend's result) instead of `exact`.
    real:      bool, broadcastable to the result: entries that mean something; padding does not.
    """
    if found.shape != reference.shape or found.dtype != reference.dtype:
        return Judgement(
            math.inf,
            0.0,
            math.inf,
            allowed,
            problem=f"expected {reference.dtype} {tuple(reference.shape)}, "
            f"found {found.dtype} {tuple(found.shape)}",
        )
    if not found.numel():
        return Judgement(0.0, 0.0, 0.0, allowed)
    counted = torch.ones_like(found, dtype=torch.bool) if real is None else real.expand_as(found)
    if not found.is_floating_point():
        wanted = reference if target is None else target
        wrong = (found != wanted) & counted
        count = int(wrong.sum())
        scale = float(wanted.abs().max()) if wanted.dtype != torch.bool else 1.0
        if not count:
            return Judgement(0.0, scale, 0.0, allowed)
        place = _place(wrong.to(torch.uint8))
        return Judgement(count, scale, math.inf, allowed, place, f"{count} of {found.numel()} entries differ")
    return _judge_floats(found, reference, exact, allowed, target, counted)


def _judge_floats(
    found: torch.Tensor,
    reference: torch.Tensor,
    exact: torch.Tensor,
    allowed: float,
    target: torch.Tensor | None,
    counted: torch.Tensor,
) -> Judgement:
    value, own = found.double(), reference.double()
    # Where FP64 and the dtype disagree on what is finite (an overflow), the dtype's own rule says what is right.
    truth = torch.where(own.isfinite() & exact.double().isfinite(), exact.double(), own)
    finite = counted & own.isfinite()
    same = (value == own) | (value.isnan() & own.isnan())
    odd = counted & ((~own.isfinite() & ~same) | (finite & ~value.isfinite()))
    wanted = truth if target is None else torch.where(finite, target.double(), own)
    zero = torch.zeros((), dtype=torch.float64)
    error = torch.where(finite & value.isfinite(), (value - wanted).abs(), zero)
    rounding = torch.where(finite, (own - truth).abs(), zero)
    size = torch.where(finite, truth.abs(), zero)
    info = torch.finfo(found.dtype)
    unit = torch.maximum(info.eps / 2 * _row_largest(size), _row_largest(rounding))
    unit = unit.clamp(min=info.smallest_normal * info.eps)
    units = error / unit
    scale = float(size.max())
    if bool(odd.any()):
        place = _place(odd.to(torch.uint8))
        return Judgement(
            float(error.max()),
            scale,
            math.inf,
            allowed,
            place,
            f"{float(value[place])} where {float(own[place])} is expected ({int(odd.sum())} such entries)",
        )
    return Judgement(float(error.max()), scale, float(units.max()), allowed, _place(units))


def _row_largest(x: torch.Tensor) -> torch.Tensor:
    """The largest entry of each row (the last axis); of the whole tensor where it has fewer than two axes."""
    return x.amax(dim=-1, keepdim=True) if x.ndim > 1 else x.max()


def _place(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape))


def real_entries(equation: Equation, operands: tuple[Any, ...]) -> tuple[torch.Tensor | None, ...]:
    """Which entries of each result of an equation over these operands mean something; None where all do.

    Attention leaves tokens past a row's count open, and a write may put them into a paged arena's last block.
    """
    name, count = equation.op.name, len(equation.outputs)
    if name in ("attention", "attend_project"):
        counts, tokens = operands[5], operands[0].shape[1]
        return ((torch.arange(tokens) < counts.view(-1, 1)).view(len(counts), tokens, 1, 1)
                if name == "attention"
                else (torch.arange(tokens) < counts.view(-1, 1)).unsqueeze(-1),)  # fmt: skip
    first = {"kv_write": 2, "rotary_write": 5, "qkv_rotary_write": 5}.get(name)
    if first is None or operands[first + 2].ndim == 1:
        return (None,) * count
    blocks = operands[first].shape[0]
    mine = (torch.arange(blocks) < blocks - 1).view(-1, 1, 1, 1)
    return tuple(mine if index >= count - 2 else None for index in range(count))
