"""Gated activations: one launch over a packed projection whose first half is the gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from atbx.core.program import Equation
from atbx.kernels.ascend.capability import FLOATS, HALVES, Capability, Limit


def _swiglu(equation: Equation) -> Callable[[torch.Tensor], torch.Tensor]:
    # silu(first half) * second half: fusion rules pack the gate first.
    return lambda both: torch.ops.npu.npu_swiglu(both, -1)


def _geglu(equation: Equation) -> Callable[[torch.Tensor], torch.Tensor]:
    tanh = 1 if equation.params["activation"] == "gelu_tanh" else 0

    def run(both: torch.Tensor) -> torch.Tensor:
        # By default the operator activates the second half, and approximates by tanh.
        out: torch.Tensor = torch.ops.npu.npu_geglu(both, -1, tanh, True)[0]
        return out

    return run


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    # F.gelu ignores `approximate` on an NPU (it is always tanh there); this operator does not.
    "gelu": lambda x: torch.ops.npu.npu_gelu(x, approximate="none"),
    "gelu_tanh": lambda x: torch.ops.npu.npu_gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def _packed_by_parts(equation: Equation) -> Callable[[torch.Tensor], torch.Tensor]:
    activate = _FUNCTIONS[equation.params["activation"]]

    def run(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return (activate(gate.float()) * up.float()).to(both.dtype)

    return run


def _gated(equation: Equation) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    activate = _FUNCTIONS[equation.params["activation"]]
    return lambda gate, up: (activate(gate.float()) * up.float()).to(gate.dtype)


def _activation(equation: Equation) -> Callable[[torch.Tensor], torch.Tensor]:
    return _FUNCTIONS[equation.op.name]


def _refuses_other_than_silu(equation: Equation) -> str | None:
    activation = equation.params["activation"]
    return None if activation == "silu" else f"swiglu activates by silu, not {activation}"


def _refuses_other_than_gelu(equation: Equation) -> str | None:
    activation = equation.params["activation"]
    return None if activation.startswith("gelu") else f"geglu activates by gelu, not {activation}"


def _refuses_width_310p(equation: Equation) -> str | None:
    width = int(equation.operands[0].shape[-1])
    return f"the last axis, {width}, is no multiple of 32" if width % 32 else None


SILU = Limit("silu", _refuses_other_than_silu, "facts 1.6")
GELU = Limit("gelu", _refuses_other_than_gelu, "facts 1.6")
WIDTH = Limit("width_32", _refuses_width_310p, "facts 1.6: where vllm-ascend calls it on 310P")

_SWIGLU_CALL = {"npu::npu_swiglu": ("input", "dim")}
_GELU_CALL = {"npu::npu_gelu": ("input", "approximate")}

ROWS = (
    Capability(
        "gated_packed",
        "npu.swiglu",
        ("npu::npu_swiglu",),
        _swiglu,
        families=("A2", "A3", "310P"),
        layout="[gate | up]",
        limits=(SILU, WIDTH),
        evidence=("schema", "document", "upstream golden"),
        calls=_SWIGLU_CALL,
    ),
    Capability(
        "gated_packed",
        "npu.geglu",
        ("npu::npu_geglu",),
        _geglu,
        families=("A2", "A3"),
        dtypes=HALVES,
        layout="[gate | up], activate_left",
        limits=(GELU,),
        evidence=("schema", "document"),
        calls={"npu::npu_geglu": ("input", "dim", "approximate", "activate_left")},
    ),
    Capability(
        "gated_packed",
        "composed.gated_packed",
        ("aten::silu", "npu::npu_gelu", "aten::mul"),
        _packed_by_parts,
        dtypes=FLOATS,
        evidence=("own",),
        tier="composed",
        launches=5,
        calls=_GELU_CALL,
    ),
    Capability(
        "gated",
        "composed.gated",
        ("aten::silu", "npu::npu_gelu", "aten::mul"),
        _gated,
        dtypes=FLOATS,
        evidence=("own",),
        tier="composed",
        launches=5,
        calls=_GELU_CALL,
    ),
    *(
        Capability(
            name,
            f"npu.{name}" if name.startswith("gelu") else f"aclnn.{name}",
            ("npu::npu_gelu",) if name.startswith("gelu") else (f"aten::{name}",),
            _activation,
            evidence=("schema", "document"),
            calls=_GELU_CALL if name.startswith("gelu") else {},
        )
        for name in ("silu", "gelu", "gelu_tanh", "relu")
    ),
)
