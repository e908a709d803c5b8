"""A layer that no op of atbx covers: define the op, and give the CPU backend a kernel for it.

The op is a depthwise causal convolution over the tokens, as Mamba-like blocks use it. Its reference rule alone makes it
work everywhere; `explain` then says that the reference rule runs. The kernel below makes it a proper citizen.

Run it: python examples/custom_op.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import atbx
from atbx.core.abstract import Abstract
from atbx.core.backend import Kernel
from atbx.core.errors import ShapeError
from atbx.core.op import Cost
from atbx.kernels import cpu


def _shape(x: Abstract, weight: Abstract) -> Abstract:
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise ShapeError("causal_conv: weight does not fit", expected=f"[{x.shape[-1]}, taps]", found=weight)
    return Abstract(x.shape, x.dtype)


def _reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """out[b,t,c] = sum over i of weight[c,i] * x[b, t - taps + 1 + i, c], accumulated in FP32."""
    taps = weight.shape[1]
    padded = F.pad(x.float(), (0, 0, taps - 1, 0))
    out = sum(padded[:, i : i + x.shape[1]] * weight[:, i].float() for i in range(taps))
    assert isinstance(out, torch.Tensor)
    return out.to(x.dtype)


def _cost(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    x, weight = operands
    return Cost(2.0 * x.numel * weight.shape[1], x.nbytes + weight.nbytes + results[0].nbytes)


CAUSAL_CONV = atbx.define_op("causal_conv", shape=_shape, reference=_reference, cost=_cost)
"""(x [B,T,C], weight [C,taps]) to [B,T,C]."""


def _depthwise(equation: Any) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        taps = weight.shape[1]
        padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
        return F.conv1d(padded, weight.unsqueeze(1), groups=weight.shape[0]).transpose(1, 2)

    return run


KERNEL = Kernel("torch.depthwise_conv", "causal_conv", _depthwise, tier="fused")
"""A package of its own would name `lambda backend: backend.add(KERNEL)` under the entry point `atbx.kernels.cpu`."""


def layer(params: dict[str, Any], x: Any) -> Any:
    """A gated convolution block, staged like any other function."""
    return x + CAUSAL_CONV(x, params["conv"]) * atbx.ops.sigmoid(atbx.ops.linear(x, params["gate"]))


def main() -> None:
    """Run the layer by its reference rule, then with the kernel, and show the explanations."""
    params = {"conv": torch.randn(16, 4), "gate": torch.randn(16, 16)}
    x = torch.randn(2, 6, 16)
    by_reference = atbx.jit(layer)
    first = by_reference(params, x)
    print(by_reference.explain(params, x))
    cpu.backend().add(KERNEL, preferred=True)
    by_kernel = atbx.jit(layer)
    second = by_kernel(params, x)
    print(by_kernel.explain(params, x))
    print("largest difference", float((first - second).abs().max()))


if __name__ == "__main__":
    main()
