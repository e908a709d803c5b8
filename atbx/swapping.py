"""Stepwise adoption: a CPU run in which only some groups of ops run by another backend's kernels.

The other backend's fused program is run, but every equation outside the chosen groups by the CPU's kernels, so that
what a group does to the logits is seen alone. Groups are parts of a transformer block, found by the ops and by what
feeds what: the projections of q, k and v belong to attention, those around a gated activation to the feed-forward
network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from atbx.comparison import AGAINST, device_name, eager, run_kernels
from atbx.core.backend import Backend
from atbx.core.errors import OptionError
from atbx.core.memory import storage_roots
from atbx.core.program import Equation, Program, Var
from atbx.kernels import cpu
from atbx.recording import Recorded, exact_values, record, reference_values
from atbx.tolerance import RULE, Judgement, allowed_units, judge

GROUPS = ("attention", "mlp", "norm", "embedding", "head", "other")
"""Groups of ops that can be swapped. head: the projection to logits; other: elementwise ops, sampling and the rest."""

_BY_OP = {
    "attention": "attention",
    "attend_project": "attention",
    "kv_write": "attention",
    "rotary_write": "attention",
    "qkv_rotary_write": "attention",
    "rotary": "attention",
    "rotary_angles": "attention",
    "norm_qkv": "attention",
    "gated": "mlp",
    "gated_packed": "mlp",
    "norm_gated_mlp": "mlp",
    "silu": "mlp",
    "gelu": "mlp",
    "gelu_tanh": "mlp",
    "relu": "mlp",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "layer_norm": "norm",
    "embedding": "embedding",
}
_SHAPES_ONLY = ("reshape", "split", "transpose", "expand_dims", "squeeze", "getitem", "cast", "copy")


def groups_of(program: Program) -> dict[int, str]:
    """The group of every equation of a program, by its `id`."""
    maker = {v: e for e in program.equations for v in e.outputs}
    readers: dict[Var, list[Equation]] = {}
    for equation in program.equations:
        for var in equation.input_vars():
            readers.setdefault(var, []).append(equation)

    def near(equation: Equation, forward: bool) -> str | None:
        """Group of the op that gives a linear its input, or takes its result, shape changes passed over."""
        first = equation.inputs[0]
        atoms = equation.outputs if forward else ((first,) if isinstance(first, Var) else ())
        for var in atoms:
            found = readers.get(var, []) if forward else [maker[var]] if var in maker else []
            for other in found:
                if other.op.name in _SHAPES_ONLY:
                    group = near(other, forward)
                else:
                    group = _BY_OP.get(other.op.name)
                if group in ("attention", "mlp"):
                    return group
        return None

    found: dict[int, str] = {}
    for equation in program.equations:
        group = _BY_OP.get(equation.op.name)
        if group is None and equation.op.name in ("linear", "matmul"):
            group = near(equation, True) or near(equation, False) or ("other" if equation.scope else "head")
        found[id(equation)] = group or "other"
    return found


@dataclass(frozen=True)
class Swapped:
    """What a run with these groups swapped gives for one result of the function (its logits).

    kernels: equations that the other backend's kernels ran. judgement: against an FP64 run of the whole, accumulated.
    agreement: share of rows whose largest entry is that of the FP64 run. divergence: largest KL divergence of a row's
    softmax from that of the FP64 run, in nats.
    """

    groups: tuple[str, ...]
    kernels: int
    judgement: Judgement
    agreement: float
    divergence: float

    @property
    def passed(self) -> bool:
        """Whether the result is within its tolerance."""
        return self.judgement.passed


@dataclass(frozen=True)
class SwapTable:
    """The rows of a stepwise adoption: none, each group alone, all of them."""

    device: str
    backend: str
    against: str
    rows: tuple[Swapped, ...]

    @property
    def passed(self) -> bool:
        """Whether every run is within its tolerance."""
        return all(row.passed for row in self.rows)

    def as_data(self) -> dict[str, Any]:
        """The table for JSON."""
        return {
            "device": self.device,
            "backend": self.backend,
            "against": self.against,
            "tolerance": RULE,
            "passed": self.passed,
            "rows": [{**asdict(row), "passed": row.passed} for row in self.rows],
        }


def swap(
    function: Callable[..., Any],
    *args: Any,
    groups: Sequence[str],
    device: str | Backend = "npu",
    against: str = "cpu",
    static: Sequence[str] = (),
    donate: Sequence[str] = (),
    **kwargs: Any,
) -> SwapTable:
    """What the first result of `function` becomes when only `groups` run by the device's kernels.

    groups:  of `GROUPS`. against: what runs the rest, "cpu" (the CPU backend's kernels) or "reference" (the rules).

    Raises:
        OptionError: an unknown group or side.
    """
    unknown = [g for g in groups if g not in GROUPS]
    if unknown or not groups:
        raise OptionError(
            "unknown group of ops", where="swap", expected=f"of {', '.join(GROUPS)}", found=unknown or "none"
        )
    if against not in AGAINST:
        raise OptionError("unknown side to compare with", where="against", expected=AGAINST, found=against)
    chosen = eager(device)
    recorded = record(function, args, kwargs, chosen, static=static, donate=donate)
    rest = cpu.backend() if against == "cpu" else None
    wanted = tuple(dict.fromkeys(groups))
    sets: list[tuple[str, ...]] = [(), *((g,) for g in wanted)]
    if len(wanted) > 1:
        sets.append(wanted)
    with torch.no_grad():
        rounded = reference_values(recorded.written, recorded.inputs)
        exact = exact_values(recorded.written, recorded.inputs)
        rows = tuple(_run(recorded, chosen, rest, part, rounded, exact) for part in sets)
    return SwapTable(device_name(chosen), chosen.name, against, rows)


def _run(
    recorded: Recorded,
    chosen: Backend,
    rest: Backend | None,
    groups: tuple[str, ...],
    rounded: dict[Var, torch.Tensor],
    exact: dict[Var, torch.Tensor],
) -> Swapped:
    program = recorded.lowered.program
    group = groups_of(program)
    wanted = _result(recorded)

    def backend_for(equation: Equation) -> Backend | None:
        return chosen if group[id(equation)] in groups else rest

    found: torch.Tensor | None = None
    kernels = 0
    for _, equation, kernel, _, results in run_kernels(recorded, backend_for):
        kernels += group[id(equation)] in groups and kernel != "on the host"
        if wanted in equation.outputs:
            found = results[equation.outputs.index(wanted)]
    assert found is not None
    old = recorded.origin[wanted]
    judgement = judge(found, rounded[old], exact[old], allowed_units(found.dtype, 1))
    truth = exact[old].double()
    agreement = float((found.double().argmax(-1) == truth.argmax(-1)).double().mean())
    logs = torch.log_softmax(truth, -1)
    divergence = (logs.exp() * (logs - torch.log_softmax(found.double(), -1))).nan_to_num(nan=0.0).sum(-1)
    return Swapped(groups, kernels, judgement, agreement, max(0.0, float(divergence.max())))


def _result(recorded: Recorded) -> Var:
    """The first floating result of the function that is no arena."""
    program = recorded.lowered.program
    roots = storage_roots(program)
    made = {v for e in program.equations for v in e.outputs}
    for atom in program.outputs:
        if not isinstance(atom, Var) or roots.get(atom, atom) in recorded.lowered.fixed:
            continue
        if atom in made and atom in recorded.origin and atom.abstract.dtype.is_floating_point:
            return atom
    raise OptionError(
        "a swap is judged by the function's first floating result, and it has none", where="function"
    )
