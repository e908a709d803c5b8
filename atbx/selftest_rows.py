"""The rows part of the self-test: every kernel that the backend's table has, forced, against its op's reference rule.

A kernel is given the table to itself, so that rows which a better one hides run too. On an NPU each also runs inside a
captured graph: a first replay on other values, then one on these, whose bits must be those of the eager run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from atbx.core.backend import Backend, Choice, Kernel
from atbx.core.errors import AtbxError
from atbx.core.program import Var
from atbx.kernels import ascend
from atbx.kernels.ascend import AscendBackend
from atbx.kernels.ascend.capability import Capability
from atbx.one_equation import OneEquation
from atbx.selftest_examples import Case, Example, case
from atbx.tolerance import (
    Judgement,
    allowed_units,
    as_tuple,
    exact_result,
    judge,
    real_entries,
    reduction_length,
)

PASSED, FAILED, NOT_HERE = "passed", "failed", "not for this installation"


@dataclass(frozen=True)
class Check:
    """One example run by one kernel in one dtype.

    judgement: the result that is furthest in its tolerance. same_in_graph: bits of a replay are those of the eager run;
    None where there are no graphs. error: what was raised instead.
    """

    example: str
    dtype: str
    judgement: Judgement | None
    same_in_graph: bool | None = None
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the result is within its tolerance, and the same by capture and replay."""
        fits = self.judgement is not None and self.judgement.passed
        return self.error is None and fits and self.same_in_graph is not False


@dataclass
class Row:
    """A kernel with its checks. refused: examples that it declined, by reason, so that none is silently left out."""

    op: str
    kernel: str
    status: str = PASSED
    checks: list[Check] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    reason: str | None = None

    @property
    def worst(self) -> Check | None:
        """The check furthest in its tolerance."""
        return max(
            self.checks,
            key=lambda c: (not c.passed, c.judgement.margin if c.judgement is not None else float("inf")),
            default=None,
        )

    def as_data(self) -> dict[str, Any]:
        """The row for JSON, with the checks that failed and the worst of those that passed."""
        worst = self.worst
        return {
            "op": self.op,
            "kernel": self.kernel,
            "status": self.status,
            "checks": len(self.checks),
            "failed": [asdict(c) for c in self.checks if not c.passed],
            "worst": None if worst is None else asdict(worst),
            "refused": self.refused,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Tested:
    """A kernel under test: alone in the table of a backend that launches it, and of one that captures it."""

    kernel: Kernel
    eager: Backend
    graph: Backend | None
    capability: Capability | None


def kernels_of(chosen: Backend) -> list[Tested]:
    """Every kernel of a backend's table; on an NPU those of both forms in which attention is told lengths."""
    if not isinstance(chosen, AscendBackend):
        return [
            Tested(kernel, alone(chosen, kernel), None, None)
            for kernels in chosen.table.values()
            for kernel in kernels
        ]
    index = chosen.device.index or 0
    found: dict[tuple[str, str], Tested] = {}
    for form in ("update", "mask"):
        eager, graph = (
            ascend.backend(index=index, execution=how, lengths=form) for how in ("eager", "graph")
        )
        assert isinstance(eager, AscendBackend)
        for kernels in eager.table.values():
            for kernel in kernels:
                name = kernel.op, kernel.name
                if name not in found:
                    row = eager.capability(*name)
                    found[name] = Tested(kernel, alone(eager, kernel), alone(graph, kernel), row)
    return list(found.values())


def alone(chosen: Backend, kernel: Kernel) -> Backend:
    """The backend with this kernel and no other, and without fusions."""
    return replace(chosen, table={kernel.op: [kernel]}, rules=[])


def run_rows(chosen: Backend, examples: Sequence[Example]) -> Iterator[Row]:
    """Check every kernel of a backend on every example of its op, in every dtype of the example."""
    made: dict[tuple[int, torch.dtype], Case] = {}
    for tested in kernels_of(chosen):
        row = Row(tested.kernel.op, tested.kernel.name)
        reasons: list[str] = []
        for number, example in enumerate(examples):
            if example.op != tested.kernel.op:
                continue
            for dtype in example.dtypes:
                key = number, dtype
                if key not in made:
                    made[key] = case(example, dtype)
                choice = tested.eager.choose(made[key].equation, made[key].bound)
                if choice.is_fallback:
                    reason = choice.refused[0].reason
                    row.refused[reason] = row.refused.get(reason, 0) + 1
                    reasons.append(_of_installation(tested, choice))
                    continue
                row.checks.append(check(tested, made[key]))
        if not all(c.passed for c in row.checks):
            row.status = FAILED
        elif not row.checks:
            row.status, row.reason = _unrun(row, reasons)
        yield row


def _of_installation(tested: Tested, choice: Choice) -> str:
    """Why chip or versions exclude the kernel from an equation, whatever its sizes and dtype; "" if they do not."""
    row = tested.capability
    environment = getattr(tested.eager, "environment", None)
    if row is None or environment is None:
        reason = choice.refused[0].reason
        return reason if reason.endswith("on this machine") else ""
    return replace(row, limits=(), dtypes=None).refuses(choice.equation, environment) or ""


def _unrun(row: Row, reasons: Sequence[str]) -> tuple[str, str]:
    """Status and reason of a kernel that ran on no example: excluded here, or missed by the examples."""
    if reasons and all(reasons):
        return NOT_HERE, reasons[0]
    declined = "; ".join(row.refused) or "there is no example of its op"
    return FAILED, f"no example that this kernel accepts, so it was not tested: {declined}"


def check(tested: Tested, one: Case) -> Check:
    """Run one case by one kernel, eagerly and (where there are graphs) by capture and replay."""
    name, dtype = one.example.name, str(one.dtype).removeprefix("torch.")
    equation, operands = one.equation, one.operands
    with torch.no_grad():
        reference = as_tuple(equation.op.reference(*operands, **equation.params))
        exact = exact_result(equation.op, operands, equation.params)
        try:
            found = (
                OneEquation(equation, tested.eager, one.values, one.bound, one.host).run(one.values).results
            )
            again = None if tested.graph is None else _replayed(tested.graph, one)
        except (AtbxError, RuntimeError) as error:
            return Check(
                name, dtype, None, error=f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
            )
    length, reals = reduction_length(equation), real_entries(equation, operands)
    judgements = [
        judge(
            result,
            reference[i],
            exact[i],
            allowed_units(result.dtype, length) if result.is_floating_point() else 0.0,
            real=reals[i],
        )
        for i, result in enumerate(found)
    ]
    worst = max(judgements, key=lambda j: (not j.passed, j.margin))
    same = None
    if again is not None:
        same = all(_same(a, b, real) for a, b, real in zip(found, again, reals, strict=True))
    return Check(name, dtype, worst, same)


def _replayed(graph: Backend, one: Case) -> tuple[torch.Tensor, ...]:
    """The results of a captured graph that was replayed on other values before: nothing of these may be left."""
    captured = OneEquation(one.equation, graph, one.values, one.bound, one.host)
    captured.run({**one.values, **_others(captured, one)})
    return captured.run(one.values).results


def _others(captured: OneEquation, one: Case) -> dict[Var, torch.Tensor]:
    """Other values of the operands: half of each floating one, and rows that hold nothing yet."""
    found = {}
    names = _LENGTHS.get(one.equation.op.name)
    for var in captured.free:
        value = one.values[var]
        if value.is_floating_point():
            found[var] = value * 0.5
        elif names is not None and one.equation.inputs[names] is var:
            found[var] = torch.zeros_like(value)
    return found


_LENGTHS = {"attention": 4, "attend_project": 4, "kv_write": 5, "rotary_write": 8, "qkv_rotary_write": 8}
"""Operand number of the lengths."""


def _same(a: torch.Tensor, b: torch.Tensor, real: torch.Tensor | None) -> bool:
    """Whether two results have the same bits where they mean something."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if real is not None:
        zero = torch.zeros((), dtype=a.dtype)
        a, b = torch.where(real, a, zero), torch.where(real, b, zero)
    return torch.equal(_bits(a), _bits(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)
