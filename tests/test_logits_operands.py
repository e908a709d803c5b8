"""Operands of the ops on logits: what fits gives what the shape rule says, and what does not is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_checks import run, shapes

import atbx
from atbx.core.abstract import abstract_of
from atbx.core.errors import DTypeError, ShapeError
from atbx.ops.logits import (
    bias_logits,
    draw,
    filter_logits,
    is_unusable,
    penalize,
    suppress,
    token_logprobs,
)

F, I32, I64, BOOL = torch.float32, torch.int32, torch.int64, torch.bool
OPERANDS: dict[Any, dict[str, torch.dtype | tuple[torch.dtype, int]]] = {
    penalize: {"seen": (BOOL, 5), "counts": (I32, 5), "repetition": F, "presence": F, "frequency": F},
    bias_logits: {"ids": (I64, 4), "values": (F, 4)},
    suppress: {"ids": (I64, 4), "active": BOOL},
    filter_logits: {"temperature": F, "top_k": I64, "top_p": F, "min_p": F},
    draw: {"u": F},
    is_unusable: {},
    token_logprobs: {"tokens": I64},
}
ONE_OPERAND = [(op, name) for op, names in OPERANDS.items() for name in names]


def operands(op: Any) -> dict[str, torch.Tensor]:
    found = {"logits": torch.zeros(2, 5)}
    for name, kind in OPERANDS[op].items():
        dtype, width = kind if isinstance(kind, tuple) else (kind, 0)
        found[name] = torch.ones((2, width) if width else (2,), dtype=dtype)
    return found


@pytest.mark.parametrize("op", OPERANDS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_compiled_ops_give_the_bits_of_their_reference_rules(op: Any, batch: int, dtype: torch.dtype) -> None:
    given = [x[:1].expand(batch, *x.shape[1:]).contiguous() for x in operands(op).values()]
    given[0] = torch.randn(batch, 5).to(dtype)
    found, expected = atbx.jit(op)(*given), run(op, *given)
    assert torch.equal(found, expected)
    shape = shapes(op, *(abstract_of(x) for x in given))
    assert (tuple(shape.shape), shape.dtype) == (tuple(found.shape), found.dtype)


@pytest.mark.parametrize(("op", "name"), ONE_OPERAND, ids=[f"{op.__name__}-{n}" for op, n in ONE_OPERAND])
def test_operands_of_another_shape_or_dtype_are_refused_by_name(op: Any, name: str) -> None:
    given = operands(op)
    for wrong in (given[name][:1], given[name].unsqueeze(-1), given[name].double()):
        attempt = {**given, name: wrong}
        if op is bias_logits and name == "ids" and wrong.ndim == 3:
            continue
        with pytest.raises(
            (ShapeError, DTypeError), match=rf"^{op.__name__}: {name} .*; expected .*, found "
        ):
            shapes(op, *(abstract_of(x) for x in attempt.values()))


@pytest.mark.parametrize("op", OPERANDS, ids=lambda op: op.__name__)
def test_logits_that_are_no_table_of_floats_are_refused(op: Any) -> None:
    given = operands(op)
    for wrong in (torch.zeros(5), torch.zeros(2, 1, 5), torch.zeros(2, 5, dtype=torch.int64)):
        with pytest.raises(
            ShapeError, match=rf"^{op.__name__}: logits do not fit; expected floats \[B,V\], found "
        ):
            shapes(op, *(abstract_of(x) for x in {**given, "logits": wrong}.values()))
