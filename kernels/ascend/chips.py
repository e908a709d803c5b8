"""The chips that the Ascend backend knows, with the figures that plans and floors are computed from.

Figures are those of CANN 8.1.RC1's platform files; peaks are cores x frequency x 8192 FLOP a cycle (FP16 cube). HBM
bandwidth comes from a public performance model's configuration, not from a data sheet. None was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from atbx.core.errors import UnsupportedError


@dataclass(frozen=True)
class Chip:
    """One SoC.

    name:         as `torch.npu.get_device_name()` gives it.
    family:       "A2" (Atlas A2), "A3", "310P" or "910A"; what documents call support by.
    tflops:       FP16 cube peak in TFLOP/s.
    bandwidth:    memory bandwidth in GB/s.
    memory:       device memory in GiB.
    vector_cores: AI vector cores, the most programs that a Triton kernel should start.
    streams:      streams of a device; graph capture takes from them.
    has_bf16:     whether kernels compute in bfloat16.
    """

    name: str
    family: str
    tflops: float
    bandwidth: float
    memory: int
    vector_cores: int
    streams: int
    has_bf16: bool = True


RESERVED_STREAMS = 248
"""Streams left to the runtime: of the 2048 of an Atlas A2, 1800 are used for captures (vllm-ascend's rule)."""

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("Ascend910B1", "A2", 363.7, 1600.0, 64, 48, 2048),
        Chip("Ascend910B2", "A2", 353.9, 1600.0, 64, 48, 2048),
        Chip("Ascend910B2C", "A2", 353.9, 1600.0, 64, 48, 2048),
        Chip("Ascend910B3", "A2", 294.9, 1600.0, 64, 40, 2048),
        Chip("Ascend910B4", "A2", 245.8, 800.0, 32, 40, 2048),
        Chip("Ascend910_9391", "A3", 363.7, 1600.0, 64, 48, 2048),
        Chip("Ascend910_9392", "A3", 363.7, 1600.0, 64, 48, 2048),
        Chip("Ascend910_9381", "A3", 353.9, 1600.0, 64, 48, 2048),
        Chip("Ascend910_9382", "A3", 353.9, 1600.0, 64, 48, 2048),
        Chip("Ascend910_9362", "A3", 245.8, 800.0, 32, 40, 2048),
        Chip("Ascend310P1", "310P", 86.8, 204.0, 24, 8, 1024, has_bf16=False),
        Chip("Ascend310P3", "310P", 69.5, 204.0, 24, 7, 1024, has_bf16=False),
        Chip("Ascend910A", "910A", 256.0, 1200.0, 32, 32, 1024, has_bf16=False),
    )
}

FAMILIES = ("A2", "A3", "310P", "910A")


def chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
        UnsupportedError: no such chip is known.
    """
    if name not in CHIPS:
        raise UnsupportedError(
            "this chip is not in the capability table", where="chip", expected=", ".join(CHIPS), found=name
        )
    return CHIPS[name]
