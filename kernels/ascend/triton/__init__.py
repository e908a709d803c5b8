"""Kernels of our own in Triton for Ascend, for stretches that no stock operator serves in one launch.

Importing this package needs no Triton; what launches a kernel imports it then. One kernel source serves the Ascend
compiler and Triton's interpreter, so numerics are tested on a CPU and compilation by the real compiler without an NPU.
"""

from __future__ import annotations

from atbx.kernels.ascend.triton.launcher import interpreted, launch, load_kernel
from atbx.kernels.ascend.triton.operator import OPERATOR, SCHEMA, register
from atbx.kernels.ascend.triton.variants import UB_BYTES, Variant, refuses

__all__ = [
    "OPERATOR",
    "SCHEMA",
    "UB_BYTES",
    "Variant",
    "interpreted",
    "launch",
    "load_kernel",
    "refuses",
    "register",
]
