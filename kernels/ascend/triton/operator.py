"""The kernel as an operator of torch, `atbx::qkv_rotary_write`: what graph capture and the software device see.

Registered once a process; on an NPU it is the launch, on the meta device it checks shapes and writes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from atbx.kernels.ascend.triton.launcher import launch, variant_of

OPERATOR = "atbx::qkv_rotary_write"
SCHEMA = (
    "qkv_rotary_write(Tensor qkv, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) k_arena, Tensor(b!) v_arena, "
    "Tensor(c!) q_out, Tensor? q_norm=None, Tensor? k_norm=None, *, int heads, int kv_heads, int head_size, "
    'int rotary_dim, str style="half", float eps=0., str layout="slots") -> ()'
)

_library: list[Any] = []


def _check(*tensors: torch.Tensor | None, **parameters: Any) -> None:
    variant_of(*tensors, **parameters)  # type: ignore[arg-type]


def register() -> Any:
    """The operator, registered with torch at the first call; the kernel itself is only loaded when it is launched."""
    if not _library:
        library = torch.library.Library("atbx", "FRAGMENT")
        library.define(SCHEMA)
        library.impl("qkv_rotary_write", launch, "PrivateUse1")
        library.impl("qkv_rotary_write", _check, "Meta")
        _library.append(library)
    return torch.ops.atbx.qkv_rotary_write.default
