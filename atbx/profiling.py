"""Profiling: the time of every equation of the steps that run inside a block, on any backend.

An observed executable hands each call to the observer, so equation, kernel and cost rule are at hand when its time is
taken; a step that nobody observes pays one look at a context variable. On the CPU times are the host's; on an NPU, in
eager execution, they are the device's own, taken by events, and every equation is an mstx range, so that what msprof or
torch_npu's profiler shows carries the names that `atbx explain` prints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from atbx.core.errors import OptionError
from atbx.core.executable import Call, observed
from atbx.kernels.ascend.tracing import ranges

VERSION = 1
"""Version of the summary in a trace file."""

PLAN = "host plan"
"""What calls are named that make host plans: they serve several equations."""


@dataclass(frozen=True)
class Timed:
    """One call. start, duration: nanoseconds, from the profile's beginning. phase: what the profile was told."""

    call: Call
    phase: str
    start: float
    duration: float

    @property
    def op(self) -> str:
        """The op's name; `PLAN` for a host plan."""
        return PLAN if self.call.choice is None else self.call.choice.equation.op.name

    @property
    def scope(self) -> str:
        """Where the model was; "" outside the layers."""
        return "" if self.call.choice is None else self.call.choice.equation.scope

    @property
    def kernel(self) -> str:
        """The kernel's name; "" for a host plan."""
        return "" if self.call.choice is None else self.call.choice.kernel.name


@dataclass(frozen=True)
class HotSpot:
    """Calls of a phase taken together.

    name:    the op, or the scope. kernel: its kernel ("" for a scope).
    share:   of the phase's time in steps.
    flops, nbytes: of all calls together, by the ops' cost rules.
    """

    phase: str
    name: str
    kernel: str
    calls: int
    seconds: float
    share: float
    flops: float
    nbytes: float

    @property
    def flops_per_second(self) -> float | None:
        """FLOP/s reached; None where the cost rule counts none."""
        return self.flops / self.seconds if self.flops and self.seconds else None

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes a second reached; None where the cost rule counts none."""
        return self.nbytes / self.seconds if self.nbytes and self.seconds else None


@dataclass
class Profile:
    """What was recorded; complete once the block of `profile` is left.

    phase:   name given to the steps that follow; set it to tell prefill from decoding, say.
    timed:   every call, in order.
    steps:   walks over a call list: (phase, start, duration), in nanoseconds.
    units:   how many prompts or tokens a phase stands for; where not told, times are compared by the step.
    seconds: of the whole block, on the host's clock. begin: the host's clock, in nanoseconds, that starts count from.
    """

    phase: str = ""
    timed: list[Timed] = field(default_factory=list)
    steps: list[tuple[str, float, float]] = field(default_factory=list)
    units: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    begin: int = field(default_factory=perf_counter_ns)

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases with steps, in order of their first step."""
        return tuple(dict.fromkeys(phase for phase, _, _ in self.steps))

    def step_seconds(self, phase: str) -> float:
        """Time inside the steps of a phase."""
        return sum(duration for found, _, duration in self.steps if found == phase) / 1e9

    def hot_spots(self, by: str = "op") -> tuple[HotSpot, ...]:
        """Calls by phase and op and kernel (by="op"), or by phase and scope (by="scope"); the longest first.

        Raises:
            OptionError: `by` is neither.
        """
        if by not in ("op", "scope"):
            raise OptionError("unknown grouping", where="by", expected="'op' or 'scope'", found=repr(by))
        groups: dict[tuple[str, str, str], list[Timed]] = {}
        for timed in self.timed:
            name, kernel = (timed.op, timed.kernel) if by == "op" else (timed.scope, "")
            groups.setdefault((timed.phase, name, kernel), []).append(timed)
        found = [self._hot_spot(*key, group) for key, group in groups.items()]
        order = {phase: index for index, phase in enumerate(self.phases)}
        return tuple(sorted(found, key=lambda spot: (order[spot.phase], -spot.seconds)))

    def _hot_spot(self, phase: str, name: str, kernel: str, group: Sequence[Timed]) -> HotSpot:
        seconds = sum(timed.duration for timed in group) / 1e9
        whole = self.step_seconds(phase)
        costs = [timed.call.choice.equation.cost() for timed in group if timed.call.choice is not None]
        return HotSpot(
            phase,
            name,
            kernel,
            len(group),
            seconds,
            seconds / whole if whole else 0.0,
            sum(cost.flops for cost in costs),
            sum(cost.bytes for cost in costs),
        )

    def summary(self) -> dict[str, Any]:
        """Phases and hot spots as plain data: what `compare` reads."""
        return {
            "version": VERSION,
            "seconds": self.seconds,
            "phases": {
                phase: {
                    "steps": (steps := sum(found == phase for found, _, _ in self.steps)),
                    "units": self.units.get(phase, steps),
                    "seconds": self.step_seconds(phase),
                }
                for phase in self.phases
            },
            "hot_spots": [
                {
                    "phase": spot.phase,
                    "op": spot.name,
                    "kernel": spot.kernel,
                    "calls": spot.calls,
                    "seconds": spot.seconds,
                    "share": spot.share,
                    "flops": spot.flops,
                    "bytes": spot.nbytes,
                }
                for spot in self.hot_spots()
            ],
        }

    def trace(self) -> dict[str, Any]:
        """The profile in Chrome's trace format (chrome://tracing, Perfetto): times in microseconds.

        Steps and their equations are complete events that nest; an event of an equation carries its kernel, shapes
        and cost.
        """
        process = os.getpid()
        common = {"ph": "X", "pid": process, "tid": 1}
        events: list[dict[str, Any]] = [
            {"name": f"{phase or 'step'}", "cat": "step", "ts": start / 1e3, "dur": duration / 1e3, **common}
            for phase, start, duration in self.steps
        ]
        for timed in self.timed:
            event = {
                "name": timed.call.label,
                "cat": timed.op,
                "ts": timed.start / 1e3,
                "dur": timed.duration / 1e3,
                **common,
            }
            choice = timed.call.choice
            if choice is not None:
                cost = choice.equation.cost()
                event["args"] = {
                    "kernel": choice.kernel.name,
                    "tier": choice.kernel.tier,
                    "phase": timed.phase,
                    "results": [str(abstract) for abstract in choice.equation.results],
                    "flops": cost.flops,
                    "bytes": cost.bytes,
                }
            events.append(event)
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        return {"traceEvents": events, "displayTimeUnit": "ms", "atbx": self.summary()}

    def write_trace(self, path: str | Path, **more: Any) -> None:
        """Write the trace as JSON; `more` is added to its summary.

        Raises:
            OptionError: the file cannot be written.
        """
        trace = self.trace()
        trace["atbx"].update(more)
        try:
            Path(path).write_text(json.dumps(trace), encoding="utf-8")
        except OSError as error:
            raise OptionError(
                "the trace cannot be written", where=str(path), found=error.strerror or str(error)
            ) from error


class _HostClock:
    """Time of the host: a call has run when it returns."""

    def now(self) -> int:
        return perf_counter_ns()

    def resolve(self, mark: Any) -> float:
        return float(mark)


class _DeviceClock:
    """Time of a device: events on its stream, told apart once everything has run."""

    def __init__(self, device: Any) -> None:
        self._npu = device.npu
        self._origin = self.now()
        self._npu.synchronize(device.device)
        # The first event has just happened: this moment of the host's clock is the device's.
        self._host = perf_counter_ns()
        self._device = device.device
        self._is_done = False

    def now(self) -> Any:
        event = self._npu.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, mark: Any) -> float:
        if not self._is_done:
            self._npu.synchronize(self._device)
            self._is_done = True
        return self._host + self._origin.elapsed_time(mark) * 1e6


class _Recorder:
    """The observer behind `profile`: takes marks while calls run, and tells times at the end."""

    def __init__(self, found: Profile) -> None:
        self._found = found
        self._clocks: dict[int, _DeviceClock] = {}
        self._clock: Any = _HostClock()
        self._calls: list[tuple[Call, str, Any, Any, Any]] = []
        self._walks: list[tuple[str, Any, Any, Any]] = []
        self._begin = perf_counter_ns()

    @contextmanager
    def walk(self, calls: Sequence[Call], device: Any) -> Iterator[None]:
        if not calls:
            yield
            return
        before, phase = self._clock, self._found.phase
        if device is not None:
            clock = self._clocks.get(id(device))
            self._clock = clock or self._clocks.setdefault(id(device), _DeviceClock(device))
        start = self._clock.now()
        try:
            yield
        finally:
            self._walks.append((phase, self._clock, start, self._clock.now()))
            self._clock = before

    def run(self, call: Call, operands: Sequence[Any]) -> Any:
        clock = self._clock
        start = clock.now()
        result = call.run(*operands)
        self._calls.append((call, self._found.phase, clock, start, clock.now()))
        return result

    def finish(self) -> None:
        """Fill the profile."""
        self._found.seconds += (perf_counter_ns() - self._begin) / 1e9
        begin = self._found.begin
        for call, phase, clock, first, last in self._calls:
            start, end = clock.resolve(first), clock.resolve(last)
            self._found.timed.append(Timed(call, phase, start - begin, end - start))
        for phase, clock, first, last in self._walks:
            start, end = clock.resolve(first), clock.resolve(last)
            self._found.steps.append((phase, start - begin, end - start))


@contextmanager
def profile(phase: str = "", into: Profile | None = None) -> Iterator[Profile]:
    """Record every equation that compiled functions run in this block, in this thread.

    phase: see `Profile`. into: an earlier profile to add to.

    Example:
        >>> from atbx.profiling import profile
        >>> with profile() as found:
        ...     generate(params, tokens, max_new_tokens=16)
        >>> found.hot_spots()[0].name, found.write_trace("trace.json")

    Run once before, so that compiling and packing are not part of it. On an NPU use eager execution
    (`atbx.kernels.ascend.backend(execution="eager")`): a captured graph is replayed as a whole, and the host cannot
    tell its kernels apart. Two readings of a clock a call are part of the times: far below a microsecond on a CPU.
    """
    found = Profile() if into is None else into
    found.phase = phase
    recorder = _Recorder(found)
    try:
        with observed(recorder), ranges():
            yield found
    finally:
        recorder.finish()


def read_summary(path: str | Path) -> dict[str, Any]:
    """The summary in a trace file that `Profile.write_trace` wrote.

    Raises:
        OptionError: no such file, or it is no trace of atbx.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            "the trace cannot be read", where=str(path), found=error.strerror or str(error)
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise OptionError("the trace is no JSON", where=str(path), found=str(error)) from error
    summary = data.get("atbx") if isinstance(data, dict) else None
    if not isinstance(summary, dict) or summary.get("version") != VERSION:
        version = summary.get("version") if isinstance(summary, dict) else "no summary"
        raise OptionError(
            "this is no trace of this version of atbx", where=str(path), expected=VERSION, found=version
        )
    return summary


@dataclass(frozen=True)
class Change:
    """An op of a phase in two profiles. before, after: milliseconds a unit (see `Profile.units`); None: not there."""

    phase: str
    op: str
    kernels_before: tuple[str, ...]
    kernels_after: tuple[str, ...]
    before: float | None
    after: float | None

    @property
    def difference(self) -> float:
        """Milliseconds a unit that it takes more (or less, below 0) than before."""
        return (self.after or 0.0) - (self.before or 0.0)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """The ops of two summaries side by side, by phase; within a phase the largest change first."""
    found = [_by_op(summary) for summary in (before, after)]
    keys = dict.fromkeys([*found[1], *found[0]])
    changes = []
    for phase, op in keys:
        (kernels_before, old), (kernels_after, new) = (one.get((phase, op), ((), None)) for one in found)
        changes.append(Change(phase, op, kernels_before, kernels_after, old, new))
    order = {phase: index for index, phase in enumerate(dict.fromkeys(phase for phase, _ in keys))}
    return tuple(sorted(changes, key=lambda change: (order[change.phase], -abs(change.difference))))


def _by_op(summary: Mapping[str, Any]) -> dict[tuple[str, str], tuple[tuple[str, ...], float]]:
    """Kernels and milliseconds a unit of each op of each phase."""
    found: dict[tuple[str, str], tuple[tuple[str, ...], float]] = {}
    for spot in summary["hot_spots"]:
        key = (spot["phase"], spot["op"])
        kernels, total = found.get(key, ((), 0.0))
        units = summary["phases"][spot["phase"]]["units"]
        found[key] = (*kernels, spot["kernel"]), total + spot["seconds"] / units * 1e3
    return found
