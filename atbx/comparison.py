"""`atbx.compare`: a function on one backend against its meaning, or another backend, an equation at a time.

Every equation of the backend's own (fused) program is run by its kernel on inputs recorded from a run by reference
rules, so each kernel is judged on the same inputs and no error is passed on. The fused program itself is judged by the
values that it shares with the program as written. In the mode `end_to_end` each equation takes what the kernels before
it made, as in a real run, and is judged against an FP64 run of the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from atbx.compile import backend as backend_of
from atbx.core.backend import Backend
from atbx.core.errors import OptionError
from atbx.core.program import Equation, Var
from atbx.kernels import ascend, cpu
from atbx.one_equation import host_values, run_equation
from atbx.recording import Recorded, exact_values, operands_of, record, reference_values
from atbx.tolerance import (
    RULE,
    Judgement,
    allowed_units,
    as_tuple,
    exact_result,
    judge,
    real_entries,
    reduction_length,
)

AGAINST = ("reference", "cpu")


@dataclass(frozen=True)
class Entry:
    """One result of one equation.

    index: number of the equation in the backend's program. scope: the module (layers/3), "" outside.
    kernel, tier: what ran it. against: what it was compared with. length: terms of its reduction.
    judgement: None where nothing is known to compare with (a value that exists only inside a fusion, end to end).
    fusion: how the fused program's meaning differs from the program as written, None where it is the same equation.
    """

    index: int
    scope: str
    op: str
    result: int
    dtype: str
    shape: tuple[int, ...]
    kernel: str
    tier: str
    against: str
    length: int
    judgement: Judgement | None
    fusion: Judgement | None
    source: str

    @property
    def passed(self) -> bool:
        """Whether kernel and fusion are within the tolerance."""
        return all(j is None or j.passed for j in (self.judgement, self.fusion))

    @property
    def units(self) -> float:
        """The larger of the kernel's and the fusion's error, in units."""
        return max((j.units for j in (self.judgement, self.fusion) if j is not None), default=0.0)

    @property
    def margin(self) -> float:
        """Units over what is allowed; above 1 is past the tolerance."""
        found = [j for j in (self.judgement, self.fusion) if j is not None]
        return max((j.margin for j in found), default=0.0)


@dataclass(frozen=True)
class Module:
    """The equations of one scope together; `worst` is the one nearest to its tolerance or furthest past it."""

    scope: str
    results: int
    failed: int
    worst: Entry


@dataclass(frozen=True)
class Comparison:
    """What a comparison found. mode: "same inputs" or "end to end"; device: "cpu", "npu" or "software"."""

    device: str
    backend: str
    against: str
    mode: str
    entries: tuple[Entry, ...]

    @property
    def passed(self) -> bool:
        """Whether every result is within its tolerance."""
        return all(entry.passed for entry in self.entries)

    @property
    def first(self) -> Entry | None:
        """The first result past its tolerance, in the order of the program."""
        return next((entry for entry in self.entries if not entry.passed), None)

    def modules(self) -> tuple[Module, ...]:
        """The summary by module, in the order of the program; equations outside of modules together."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.scope, []).append(entry)
        return tuple(
            Module(
                scope, len(e), sum(not x.passed for x in e), max(e, key=lambda x: (not x.passed, x.margin))
            )
            for scope, e in found.items()
        )

    def as_data(self) -> dict[str, Any]:
        """The comparison for JSON."""
        return {
            "device": self.device,
            "backend": self.backend,
            "against": self.against,
            "mode": self.mode,
            "tolerance": RULE,
            "passed": self.passed,
            "first": None if self.first is None else _data(self.first),
            "modules": [
                {"scope": m.scope, "results": m.results, "failed": m.failed, "worst": _data(m.worst)}
                for m in self.modules()
            ],
            "equations": [_data(entry) for entry in self.entries],
        }


def _data(entry: Entry) -> dict[str, Any]:
    return {**asdict(entry), "passed": entry.passed}


def compare(
    function: Callable[..., Any],
    *args: Any,
    device: str | Backend = "cpu",
    against: str = "reference",
    end_to_end: bool = False,
    static: Sequence[str] = (),
    donate: Sequence[str] = (),
    **kwargs: Any,
) -> Comparison:
    """Run `function` on a backend equation by equation and judge every result.

    device:  "cpu", "npu", "npu:INDEX" or a `Backend`; an NPU named by a string runs eagerly, a kernel at a time.
    against: "reference" (what the ops mean, in FP64 on the same inputs) or "cpu" (what the CPU backend's kernels make
             of the same inputs, its reference rules where it has none; twice the tolerance, since both round).
    end_to_end: let errors accumulate, and judge against an FP64 run.
    static, donate: as in `atbx.jit`; nothing that is passed is changed.

    Returns a `Comparison`; `.passed`, `.first` and `.modules()` tell the outcome.

    Raises:
        OptionError: unknown `against`, or end_to_end against the CPU's kernels. Those of `atbx.jit`.
    """
    if against not in AGAINST:
        raise OptionError("unknown side to compare with", where="against", expected=AGAINST, found=against)
    if end_to_end and against != "reference":
        raise OptionError(
            "errors that accumulate are judged against an FP64 run alone",
            where="end_to_end",
            expected='against="reference"',
            found=against,
        )
    chosen = eager(device)
    recorded = record(function, args, kwargs, chosen, static=static, donate=donate)
    with torch.no_grad():
        entries = _accumulated(recorded) if end_to_end else _alone(recorded, against)
        found = tuple(entries)
    mode = "end to end" if end_to_end else "same inputs"
    return Comparison(device_name(chosen), chosen.name, against, mode, found)


def eager(device: str | Backend) -> Backend:
    """The backend of a device; one named by a string launches its kernels one at a time, for graphs cost streams."""
    if isinstance(device, str) and device.partition(":")[0] == "npu":
        index = device.partition(":")[2]
        if not index or index.isdigit():
            return ascend.backend(index=int(index or 0), execution="eager")
    return backend_of(device)


def device_name(chosen: Backend) -> str:
    """What a report calls the device: "cpu", "npu", or "software" for the software device."""
    return chosen.name if chosen.name != "npu" or not is_software() else "software"


def is_software() -> bool:
    """Whether the NPU of this process is the software device."""
    module = sys.modules.get("atbx.testing.software_npu")
    return module is not None and bool(module._process)


def _alone(recorded: Recorded, against: str) -> Iterator[Entry]:
    """Every equation on recorded inputs."""
    lowered, chosen = recorded.lowered, recorded.backend
    program = lowered.program
    written = reference_values(recorded.written, recorded.inputs)
    values: dict[Var, torch.Tensor] = {
        **recorded.inputs,
        **{new: written[old] for new, old in recorded.origin.items() if old in written},
    }
    host, on_host = host_values(lowered, chosen)
    choices = {id(c.equation): c for c in lowered.choices}
    for index, equation in enumerate(program.equations):
        operands = operands_of(equation, values)
        reference = as_tuple(equation.op.reference(*operands, **equation.params))
        # What no equation of the written program gives exists only here.
        missing = [(v, r) for v, r in zip(equation.outputs, reference, strict=True) if v not in values]
        fusions = _fusions(equation, recorded, reference, written)
        if id(equation) not in choices:
            values.update(missing)
            continue
        exact = exact_result(equation.op, operands, equation.params)
        if id(equation) in on_host:
            kernel, tier, found = "on the host", "reference", reference
        else:
            ran = run_equation(equation, chosen, values, recorded.fed, host)
            kernel, tier, found = ran.kernel, ran.choice.kernel.tier, ran.results
        targets: tuple[torch.Tensor | None, ...] = (None,) * len(found)
        other = "reference"
        if against == "cpu":
            beside = run_equation(equation, cpu.backend(), values, recorded.fed)
            targets, other = beside.results, f"cpu: {beside.kernel}"
        reals = real_entries(equation, operands)
        length = reduction_length(equation)
        for number, result in enumerate(found):
            allowed = allowed_units(result.dtype, length) if result.is_floating_point() else 0.0
            judgement = judge(
                result,
                reference[number],
                exact[number],
                allowed * (2 if against == "cpu" else 1),
                target=targets[number],
                real=reals[number],
            )
            yield _entry(index, equation, number, kernel, tier, other, length, judgement, fusions[number])
        values.update(missing)


def _fusions(
    equation: Equation,
    recorded: Recorded,
    reference: tuple[torch.Tensor, ...],
    written: dict[Var, torch.Tensor],
) -> list[Judgement | None]:
    """For each result that stands for a value of the program as written: how far the fused op's meaning is from it."""
    found: list[Judgement | None] = []
    for var, value in zip(equation.outputs, reference, strict=True):
        old = recorded.origin_of(var)
        if old is None or old is var or old not in written:
            found.append(None)
            continue
        allowed = allowed_units(value.dtype, reduction_length(equation)) if value.is_floating_point() else 0.0
        found.append(judge(value, written[old], written[old], allowed))
    return found


def _accumulated(recorded: Recorded) -> Iterator[Entry]:
    """Every equation on what the kernels before it made."""
    chosen = recorded.backend
    rounded = reference_values(recorded.written, recorded.inputs)
    exact = exact_values(recorded.written, recorded.inputs)
    for index, equation, kernel, tier, results in run_kernels(recorded, lambda equation: chosen):
        length = reduction_length(equation)
        reals = real_entries(equation, tuple(rounded_operand(a, recorded, rounded) for a in equation.inputs))
        for number, (var, result) in enumerate(zip(equation.outputs, results, strict=True)):
            old = recorded.origin_of(var)
            judgement = None
            if old is not None and old in rounded:
                allowed = allowed_units(result.dtype, length) if result.is_floating_point() else 0.0
                judgement = judge(result, rounded[old], exact[old], allowed, real=reals[number])
            yield _entry(index, equation, number, kernel, tier, "FP64 run", length, judgement, None)


def rounded_operand(atom: Any, recorded: Recorded, values: dict[Var, torch.Tensor]) -> Any:
    """The value of an operand by the reference run, None where it exists only inside a fusion."""
    if not isinstance(atom, Var):
        return atom.value
    old = recorded.origin_of(atom)
    return recorded.inputs.get(atom) if old is None else values.get(old)


def run_kernels(
    recorded: Recorded, backend_for: Callable[[Equation], Backend | None]
) -> Iterator[tuple[int, Equation, str, str, tuple[torch.Tensor, ...]]]:
    """Run the lowered program, each equation by the backend named for it (None: its reference rule).

    Yields number, equation, kernel, tier and results of every equation that is part of a step.
    """
    lowered = recorded.lowered
    host, on_host = host_values(lowered, recorded.backend)
    once = set(map(id, lowered.prepared))
    values: dict[Var, torch.Tensor] = dict(recorded.inputs)
    for index, equation in enumerate(lowered.program.equations):
        chosen = backend_for(equation)
        if id(equation) in once or id(equation) in on_host or chosen is None:
            name = "on the host" if id(equation) in on_host else f"reference.{equation.op.name}"
            results = as_tuple(equation.op.reference(*operands_of(equation, values), **equation.params))
            kernel, tier = name, "reference"
        else:
            on_device = chosen.executable is not None
            ran = run_equation(equation, chosen, values, recorded.fed, host if on_device else frozenset())
            kernel, tier, results = ran.kernel, ran.choice.kernel.tier, ran.results
        values.update(zip(equation.outputs, results, strict=True))
        if id(equation) not in once:
            yield index, equation, kernel, tier, results


def _entry(
    index: int,
    equation: Equation,
    number: int,
    kernel: str,
    tier: str,
    against: str,
    length: int,
    judgement: Judgement | None,
    fusion: Judgement | None,
) -> Entry:
    abstract = equation.outputs[number].abstract
    return Entry(
        index,
        equation.scope,
        equation.op.name,
        number,
        str(abstract.dtype).removeprefix("torch."),
        tuple(map(int, abstract.shape)),
        kernel,
        tier,
        against,
        length,
        judgement,
        fusion,
        equation.source,
    )
