"""The capability table: which kernel serves an op on which chip, under which limits, and on what evidence.

Dispatch, explanations, the doctor, the self-test and the tests read these rows; nothing else decides what applies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from atbx.core.backend import HostPlan, Kernel, Preparation
from atbx.core.program import Equation
from atbx.kernels.ascend import schemas
from atbx.kernels.ascend.chips import FAMILIES, Chip
from atbx.kernels.ascend.versions import version_key

EVIDENCE = ("schema", "op-plugin check", "document", "upstream golden", "own", "hardware")
"""What a row rests on: the operator's schema; argument checks in op-plugin's C++; its document; a golden test published
with the operator; our own kernel or composition, tested here; a run on hardware (none so far)."""

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

CHIP_DTYPE = "bfloat16 does not exist on this chip"


@dataclass(frozen=True)
class Limit:
    """A documented limit: `refuses(equation)` is the reason why it is exceeded, or None."""

    name: str
    refuses: Callable[[Equation], str | None]
    source: str


@dataclass(frozen=True)
class Environment:
    """What a choice of kernels depends on: the chip, and the versions installed (None: not known, taken as new)."""

    chip: Chip
    torch_npu: str | None = None
    cann: str | None = None


@dataclass(frozen=True)
class Capability:
    """One row of the table.

    op, kernel: the op's name, and what explanations call the kernel.
    operators:  what it launches: "npu::npu_rms_norm", "aten::mm", "atbx::qkv_rotary_write" (ours).
    make:       as in `Kernel`.
    families:   chip families that it is documented for.
    dtypes:     dtypes of the first floating operand.
    layout:     layout of activations, caches or weights that it wants, in the operator's own words.
    limits:     documented limits, each of which refuses with its reason.
    cann:       lowest version; None is any. Which torch_npu has the operators is read from their schemas.
    evidence:   of `EVIDENCE`.
    launches:   kernels launched at the ACL boundary, a number or a function of the equation.
    calls:      for each operator the keywords that we pass, so that schemas of every version can be checked.
    """

    op: str
    kernel: str
    operators: tuple[str, ...]
    make: Callable[[Equation], Callable[..., Any]]
    families: tuple[str, ...] = FAMILIES
    dtypes: tuple[torch.dtype, ...] | None = FLOATS
    layout: str = "ND"
    limits: tuple[Limit, ...] = ()
    cann: str | None = None
    evidence: tuple[str, ...] = ("schema",)
    tier: str = "fused"
    launches: int | Callable[[Equation], int] = 1
    plan: HostPlan | None = None
    packs: Callable[[Equation], Mapping[int, Preparation]] = lambda equation: {}
    calls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def refuses(self, equation: Equation, environment: Environment) -> str | None:
        """Why the row does not apply to an equation in an environment, or None."""
        chip = environment.chip
        if chip.family not in self.families:
            return f"documented for {', '.join(self.families)}, and {chip.name} is {chip.family}"
        installed = environment.cann
        if (
            self.cann is not None
            and installed is not None
            and version_key(installed) < version_key(self.cann)
        ):
            return f"needs CANN {self.cann} or newer, found {installed}"
        for operator, names in self.calls.items():
            problem = _does_not_bind(operator, names, operators_of(environment.torch_npu))
            if problem is not None:
                return problem
        dtype = floating_dtype(equation)
        if dtype == torch.bfloat16 and not chip.has_bf16:
            return f"{CHIP_DTYPE} ({chip.name})"
        if dtype is not None and self.dtypes is not None and dtype not in self.dtypes:
            return f"takes {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}, found {dtype}"
        for limit in self.limits:
            reason = limit.refuses(equation)
            if reason is not None:
                return f"{reason} ({limit.source})"
        return None

    def kernel_for(self, environment: Environment) -> Kernel:
        """The row as a kernel of a backend in this environment."""
        return Kernel(
            self.kernel,
            self.op,
            self.make,
            refuses=lambda equation: self.refuses(equation, environment),
            packs=self.packs,
            plan=self.plan,
            tier=self.tier,
            launches=self.launches,
        )


@functools.cache
def operators_of(torch_npu: str | None) -> str:
    """The release whose operators an installed torch_npu has; the newest that was read where it is not known."""
    if torch_npu is not None:
        found = schemas.releases().get(torch_npu.partition("+")[0])
        if found is not None:
            return found
    return schemas.versions()[-1]


@functools.cache
def _does_not_bind(operator: str, names: tuple[str, ...], release: str) -> str | None:
    """Why a call of ours does not fit the operator of a release, or None."""
    problems = schemas.check_keywords(operator, names, release)
    return problems[0] if problems else None


def floating_dtype(equation: Equation) -> torch.dtype | None:
    """Dtype of the first floating operand of an equation, or of its first floating result."""
    for value in (*equation.operands, *equation.results):
        dtype = getattr(value, "dtype", None)
        if dtype is not None and dtype.is_floating_point:
            return dtype
    return None
