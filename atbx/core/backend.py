"""Backends: a table of kernels, the fusion rules that make them worth it, and the choice of one kernel an equation.

A kernel says which op it implements, when it applies, and what it needs: packed parameters, a host plan made once a
step. Every kernel that refuses says why, so that a choice can be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import FallbackError
from atbx.core.op import Op, abstract_operands
from atbx.core.program import Equation, Literal, Var
from atbx.core.rewrite import FusionRule

TIERS = ("fused", "composed", "reference")
"""fused: a kernel tuned for the op; composed: the backend's stock ops one after the other, a deliberate choice;
reference: the op's reference rule, because nothing else applies."""


@dataclass(frozen=True)
class Preparation:
    """How a kernel wants a parameter packed: done once a binding, shared by every variant that wants the same.

    name:        identifies the packing; part of its key in the binding's store.
    pack:        `pack(tensor, abstract)`; abstract is the value as the program knows it.
    from_source: hand `pack` the parameter as it was bound, before the cast to the program's dtype (an
                 embedding table is read by rows, so casting all of it would only cost memory).
    """

    name: str
    pack: Callable[[torch.Tensor, Abstract], Any]
    from_source: bool = False


@dataclass(frozen=True)
class HostPlan:
    """What a kernel works out on the host once a step from small integer operands (rows, lengths, counts).

    Equations with equal `key` over the same operands share one plan, so no list is rebuilt a layer. A plan whose
    operands are program inputs is made before anything is launched, so it is also where bounds are checked.

    operands: indices of the operands it reads.
    key:      static facts of the equation it needs (shapes, window), hashable.
    make:     `make(key, *tensors)`.
    optional: leave the plan out (None is passed) where an operand is known only to the device.
    """

    operands: tuple[int, ...]
    key: Callable[[Equation], Hashable]
    make: Callable[..., Any]
    optional: bool = False


@dataclass(frozen=True)
class Kernel:
    """An implementation of one op on one backend.

    name, op: what explanations print, and the op's name.
    make:     `make(equation)` returns a function of the operands (packed where `packs` says so; the host plan
              last if there is one) that returns the result or a tuple of results. Operands that the op
              updates are updated in place and returned.
    refuses:  the reason why the kernel does not apply to an equation, or None.
    packs:    `packs(equation)`: operand index to `Preparation`; such operands must be bound parameters.
    plan:     the host plan, if the kernel needs one.
    tier:     one of `TIERS`.
    launches: kernel launches it costs: a number, or a function of the equation.
    writes_out: the function takes preallocated result tensors as its last arguments, after the host plan.
    """

    name: str
    op: str
    make: Callable[[Equation], Callable[..., Any]]
    refuses: Callable[[Equation], str | None] = lambda equation: None
    packs: Callable[[Equation], Mapping[int, Preparation]] = lambda equation: {}
    plan: HostPlan | None = None
    tier: str = "composed"
    launches: int | Callable[[Equation], int] = 1
    writes_out: bool = False

    def launches_of(self, equation: Equation) -> int:
        """Kernel launches that `equation` costs."""
        return self.launches(equation) if callable(self.launches) else self.launches


def reference_kernel(op: Op) -> Kernel:
    """The kernel that runs an op's reference rule."""
    return Kernel(
        f"reference.{op.name}",
        op.name,
        lambda equation: partial(op.reference, **equation.params) if equation.params else op.reference,
        tier="reference",
    )


@dataclass(frozen=True)
class Refusal:
    """A kernel that was not chosen, and the rule that refused it."""

    kernel: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """The kernel chosen for an equation and those that were refused before it."""

    equation: Equation
    kernel: Kernel
    refused: tuple[Refusal, ...]

    @property
    def launches(self) -> int:
        """Kernel launches of the equation."""
        return self.kernel.launches_of(self.equation)

    @property
    def is_fallback(self) -> bool:
        """Whether the reference rule runs because nothing else applies."""
        return self.kernel.tier == "reference"

    @property
    def why(self) -> str:
        """The choice in words."""
        if self.is_fallback:
            return "no kernel applies: the reference rule runs" if self.refused else "no kernel is registered"
        return "first kernel of the table that applies" if self.refused else "preferred kernel"


@dataclass
class Backend:
    """A device's kernels by op (preferred first) and its fusion rules (applied in order).

    executable: `executable(lowered, preparer or None)` makes what runs a lowered program; None is the call list
                of `core.executable`, which runs where the operands are.
    accepts:    kinds of device whose tensors a call may pass; small host values are uploaded by the executable.
    free_bytes: bytes of the device's memory that are free; None where that is the host's own.
    """

    name: str
    device: torch.device
    table: dict[str, list[Kernel]] = field(default_factory=dict)
    rules: list[FusionRule] = field(default_factory=list)
    executable: Callable[[Any, Any], Any] | None = None
    accepts: tuple[str, ...] = ()
    free_bytes: Callable[[], int] | None = None

    def add(self, kernel: Kernel, *, preferred: bool = False) -> Kernel:
        """Enter a kernel, last in preference unless `preferred`."""
        entries = self.table.setdefault(kernel.op, [])
        entries.insert(0 if preferred else len(entries), kernel)
        return kernel

    def choose(self, equation: Equation, bound: frozenset[Var], fallback: str = "report") -> Choice:
        """The first kernel that applies to `equation`; `bound` are the values that only parameters feed.

        Raises:
            FallbackError: nothing but the reference rule applies and `fallback` is "error".
        """
        refused: list[Refusal] = []
        for kernel in self.table.get(equation.op.name, ()):
            reason = kernel.refuses(equation)
            if reason is None and kernel.writes_out and (equation.op.views or equation.op.updates):
                reason = "a result that shares memory with an operand cannot be written elsewhere"
            if reason is None:
                for operand in kernel.packs(equation):
                    atom = equation.inputs[operand]
                    if not (isinstance(atom, Var) and atom in bound):
                        reason = f"operand {operand} must be a bound parameter to be packed (use atbx.bind)"
                        break
            if reason is None:
                return Choice(equation, kernel, tuple(refused))
            refused.append(Refusal(kernel.name, reason))
        choice = Choice(equation, reference_kernel(equation.op), tuple(refused))
        if fallback == "error":
            reasons = (
                "; ".join(f"{r.kernel} refused: {r.reason}" for r in refused) or "no kernel is registered"
            )
            raise FallbackError(
                f"no kernel of backend {self.name!r} applies to {equation.op.name} "
                f"({', '.join(map(str, equation.operands))})",
                where=equation.source or None,
                found=reasons,
                hint='Pass fallback="report" to run the reference rule instead',
            )
        return choice


class RunInterpreter:
    """Runs each op at once, with the kernel that the backend's table gives for it.

    Values stay pure: an op that updates an operand runs by its reference rule, which writes to nothing.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def apply(self, op: Op, operands: tuple[Any, ...], params: dict[str, Any]) -> Any:
        abstracts = abstract_operands(op, operands)
        results = op.results(*abstracts, **params)
        if op.updates:
            return op.reference(*operands, **params)
        inputs = tuple(Var(a) if isinstance(a, Abstract) else Literal(a) for a in abstracts)
        equation = Equation(op, inputs, tuple(Var(a) for a in results), params)
        kernel = self.backend.choose(equation, frozenset()).kernel
        reads = list(operands)
        if kernel.plan is not None:
            planned = (operands[i] for i in kernel.plan.operands)
            reads.append(kernel.plan.make(kernel.plan.key(equation), *planned))
        if kernel.writes_out:
            device = self.backend.device
            reads += [torch.empty(a.shape, dtype=a.dtype, device=device) for a in results]
        return kernel.make(equation)(*reads)
