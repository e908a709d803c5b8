"""The CPU backend: torch's own kernels, oneDNN matmuls over packed weights, fused attention over live slots only."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points

import torch

import atbx.kernels.cpu.attention as attention
import atbx.kernels.cpu.blocks as blocks
import atbx.kernels.cpu.matmul as matmul
import atbx.kernels.cpu.pointwise as pointwise
import atbx.kernels.cpu.stock as stock
from atbx.core.backend import Backend
from atbx.kernels.cpu.rules import RULES

ENTRY_POINT = "atbx.kernels.cpu"
"""Entry point group by which other packages add kernels: each names a function that takes the `Backend`."""


@functools.cache
def backend() -> Backend:
    """The CPU backend, with the kernels that installed packages add through entry points."""
    made = Backend("cpu", torch.device("cpu"), rules=list(RULES))
    for room in (matmul, attention, pointwise, blocks, stock):
        for kernel in room.KERNELS:
            made.add(kernel)
    for entry in entry_points(group=ENTRY_POINT):
        entry.load()(made)
    return made
