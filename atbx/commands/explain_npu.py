"""`atbx explain --device npu`: what serves each op on a chip, what a token costs there, and what graphs take.

It only plans, so every report says "device": "planned"; a named chip needs neither torch_npu nor an NPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from atbx.commands.opening import Opened, open_to_plan
from atbx.commands.output import fold, print_json, size_in_words
from atbx.core.errors import OptionError
from atbx.core.executable import Lowered
from atbx.core.jit import Explanation
from atbx.kernels import ascend
from atbx.kernels.ascend import AscendBackend
from atbx.kernels.ascend.budget import RULE, streams_of_graph, usable_streams
from atbx.kernels.ascend.chips import CHIPS
from atbx.kernels.ascend.report import Placed, StepReport, floor_ms, report, updates_of
from atbx.kernels.ascend.runtime import is_installed
from atbx.kernels.ascend.switches import Switch, switches
from atbx.schedule import Request, prefill

DEVICE = "planned"


@dataclass(frozen=True)
class Step:
    """A step as it is told: its explanation, what it costs, and the real tokens that it serves."""

    explanation: Explanation
    report: StepReport
    tokens: int


@dataclass(frozen=True)
class Graphs:
    """Captured graphs of a request that goes on to the context's end, and the streams that they take.

    count, streams: of one set of KV arenas. usable: streams that the chip spares for graphs.
    most_streams: of the largest graph.
    """

    count: int
    streams: int
    usable: int
    most_streams: int
    rule: str = RULE

    @property
    def fits(self) -> bool:
        """Whether all can be kept at once."""
        return self.streams <= self.usable


def run(args: argparse.Namespace) -> None:
    """Explain both steps of a generation on an NPU."""
    backend = _backend(args)
    opened = open_to_plan(args.model, args.dtype, backend, args.fallback)
    explained = opened.generator.explain(opened.params, prompt=args.prompt, batch=args.batch)
    chunk = next(iter(prefill((args.prompt,) * args.batch, opened.generator.engine.policy)))
    tokens = (sum(chunk.counts), args.batch)
    steps = [Step(e, report(e.variant.lowered, backend), n) for e, n in zip(explained, tokens, strict=True)]
    is_served = all(p.tier != "reference" for step in steps for p in step.report.equations)
    graphs = _graphs(args, backend) if is_served else None
    decode = steps[1].report
    found = switches(os.environ, backend.execution, decode.launches, decode.graph_updates)
    if args.json:
        print_json(_as_data(backend, steps, graphs, found))
        return
    _print_chip(backend)
    for name, step in zip(("Prefill", "Decode"), steps, strict=True):
        _print_step(name, step)
    _print_graphs(backend, graphs)
    _print_switches(found)


def _backend(args: argparse.Namespace) -> AscendBackend:
    """The backend to plan with: of the chip named, or of the NPU that the device names."""
    if args.chip is None:
        for name in ("torch_npu", "cann"):
            if getattr(args, name):
                raise OptionError(
                    "is what the machine has; only for a named chip it can be chosen",
                    where=f"--{name.replace('_', '-')}",
                    expected="--chip NAME",
                )
        if not is_installed():
            raise OptionError(
                "torch_npu is not installed here, so the chip to plan for must be named",
                where="--chip",
                expected=", ".join(CHIPS),
            )
    index = args.device.partition(":")[2]
    if index and not index.isdigit():
        raise OptionError("unknown device", where="--device", expected="npu or npu:INDEX", found=args.device)
    made = ascend.backend(
        args.chip,
        index=int(index or 0),
        execution="eager" if args.eager else "graph",
        lengths=args.lengths or "update",
        torch_npu=args.torch_npu,
        cann=args.cann,
    )
    assert isinstance(made, AscendBackend)
    return made


def _graphs(args: argparse.Namespace, backend: AscendBackend) -> Graphs:
    """Every variant that the request needs up to the context's end, lowered and counted; nothing is captured."""
    usable = usable_streams(backend.environment.chip)
    if backend.execution == "eager":
        return Graphs(0, 0, usable, 0)
    lowered: list[Lowered] = []

    def record(one: Lowered, preparer: Any) -> Lowered:
        lowered.append(one)
        return one

    opened: Opened = open_to_plan(
        args.model, args.dtype, replace(backend, executable=record, accepts=("cpu", "meta")), args.fallback
    )
    opened.generator.warm(opened.params, [Request((args.prompt,) * args.batch)])
    streams = [streams_of_graph(updates_of(one)) for one in lowered]
    return Graphs(len(streams), sum(streams), usable, max(streams))


def _as_data(
    backend: AscendBackend, steps: Sequence[Step], graphs: Graphs | None, found: Sequence[Switch]
) -> dict[str, Any]:
    environment = backend.environment
    return {
        "device": DEVICE,
        "chip": asdict(environment.chip),
        "torch_npu": environment.torch_npu,
        "cann": environment.cann,
        "execution": backend.execution,
        **{name: _step(step) for name, step in zip(("prefill", "decode"), steps, strict=True)},
        "graphs": None if graphs is None else {**asdict(graphs), "fits": graphs.fits},
        "environment": [asdict(switch) for switch in found],
    }


def _step(step: Step) -> dict[str, Any]:
    explanation, costs = step.explanation, step.report
    return {
        "variant": explanation.name,
        "cached": explanation.hit,
        "miss": None if explanation.miss is None else str(explanation.miss),
        "device": DEVICE,
        "tokens": step.tokens,
        "launches": costs.launches,
        "launches_per_layer": costs.launches_per_layer,
        "launches_by_layer": costs.launches_by_layer,
        "device_copies": costs.device_copies,
        "graph_replays": costs.graph_replays,
        "graph_updates": costs.graph_updates,
        # Only a device can tell; it is filled in where one measured it.
        "update_ms": None,
        "host_syncs": costs.host_syncs,
        "h2d_copies": costs.h2d_copies,
        "upload_bytes": costs.upload_bytes,
        "d2h_copies": costs.readbacks,
        "bytes": costs.cost.bytes,
        "flops": costs.cost.flops,
        "memory_ms": costs.memory_ms,
        "compute_ms": costs.compute_ms,
        "floor_ms": costs.floor_ms,
        "equations": [_equation(placed, costs) for placed in costs.equations],
        "fusions": [
            {"rule": applied.rule, "scope": applied.scope, "refused": applied.refused}
            for applied in explanation.variant.fusions
        ],
        "copies": list(explanation.variant.lowered.copies),
        "totals": {
            "equations": len(costs.equations),
            "flops": costs.cost.flops,
            "bytes": costs.cost.bytes,
            "launches": costs.launches,
            "tiers": dict(Counter(placed.tier for placed in costs.equations)),
            "workspace_bytes": explanation.variant.lowered.memory.size,
        },
    }


def _equation(placed: Placed, costs: StepReport) -> dict[str, Any]:
    equation = placed.equation
    return {
        "scope": equation.scope,
        "op": equation.op.name,
        "results": [str(var.abstract) for var in equation.outputs],
        "runs": placed.runs,
        "kernel": placed.kernel,
        "tier": placed.tier,
        "why": placed.why,
        "refused": [asdict(refused) for refused in placed.refused],
        "behind": [{"kernel": kernel, "refused": reason} for kernel, reason in placed.behind],
        "evidence": list(placed.evidence),
        "launches": placed.launches,
        "launched": None if placed.launched is None else list(placed.launched),
        "updated": placed.updated,
        "flops": placed.cost.flops,
        "bytes": placed.cost.bytes,
        "floor_ms": floor_ms(placed.cost, costs.chip) if placed.runs == "device" else 0.0,
        "source": equation.source,
    }


def _print_chip(backend: AscendBackend) -> None:
    environment, chip = backend.environment, backend.environment.chip
    versions = ", ".join(
        f"{name} {version or 'any'}"
        for name, version in (("torch_npu", environment.torch_npu), ("CANN", environment.cann))
    )
    print(
        f"{chip.name} ({chip.family}): {chip.tflops:g} TFLOP/s, {chip.bandwidth:g} GB/s, {chip.memory} GiB; "
        f"{versions}; {'one graph a step' if backend.execution == 'graph' else 'eager'}; planned, nothing was run"
    )


@dataclass(frozen=True)
class Line:
    """An equation in the text form, equal to that of another layer which does the same."""

    runs: str
    op: str
    kernel: str
    why: str
    launches: int
    launched: tuple[str, ...] | None
    updated: bool
    refused: tuple[tuple[str, str, str], ...]
    nbytes: float
    flops: float
    evidence: tuple[str, ...]


def _line(placed: Placed) -> Line:
    return Line(
        placed.runs,
        placed.equation.op.name,
        placed.kernel,
        placed.why,
        placed.launches,
        placed.launched,
        placed.updated,
        tuple((r.kernel, r.rule, r.reason) for r in placed.refused),
        placed.cost.bytes,
        placed.cost.flops,
        placed.evidence,
    )


def _print_step(name: str, step: Step) -> None:
    costs, explanation = step.report, step.explanation
    print(f"\n{name}: {explanation.name}")
    by_scope = itertools.groupby(costs.equations, key=lambda placed: placed.equation.scope)
    for scope, times, lines in fold((scope, [_line(p) for p in group]) for scope, group in by_scope):
        launches = sum(line.launches for line in lines)
        alike = f", {times} alike, costs of one" if times > 1 else ""
        print(f"  {scope or 'outside the layers'}: {launches} launch{'es' * (launches != 1)}{alike}")
        for line in lines:
            _print_line(line)
    for scope, times, rules in fold(
        (a.scope, [(a.rule, a.refused)]) for a in explanation.variant.fusions if a.refused
    ):
        for rule, reason in rules:
            where = f"{scope or 'the program'}{f' ({times})' * (times > 1)}"
            print(f"  fusion {rule} refused in {where}: {reason}")
    for note in explanation.variant.lowered.copies:
        print(f"  copy inserted: {note}")
    _print_totals(step)


def _print_line(line: Line) -> None:
    if line.runs == "host":
        print(f"    {line.op:<18} {'on the host':<27} no launch")
        return
    if line.launches == 0:
        cost = "no launch"
    else:
        cost = f"{line.launches:3d} x   {line.nbytes / 1e6:9.3f} MB {line.flops / 1e6:10.2f} MFLOP"
    updated = "  lengths updated" if line.updated else ""
    why = "" if line.why == "preferred kernel" else f"  {line.why}"
    print(f"    {line.op:<18} {line.kernel:<27} {cost}{updated}{why}".rstrip())
    if line.launches > 1:
        names = "known by number only" if line.launched is None else ", ".join(map(_short, line.launched))
        print(f"    {'':<18} launches {names}")
    for kernel, rule, reason in line.refused:
        print(f"    {'':<18} refused {kernel} by {rule}: {reason}")


def _short(operator: str) -> str:
    return operator.partition("::")[2] or operator


def _print_totals(step: Step) -> None:
    costs, tokens = step.report, step.tokens
    each = "" if tokens == 1 else f" ({tokens} tokens)"
    layer = f", {costs.launches_per_layer} a layer" if costs.launches_per_layer else ""
    copies = f", {costs.device_copies} of them copies around the graph" if costs.device_copies else ""
    print(f"  a step{each}: {costs.launches} launches{layer}{copies}")
    if costs.graph_replays:
        print(
            f"    {costs.graph_replays} graph replay, {costs.graph_updates} length updates before it "
            "(their time is known only to a device)"
        )
    print(
        f"    {costs.h2d_copies} copy to the device ({costs.uploads} arrays, "
        f"{size_in_words(costs.upload_bytes)}), {costs.readbacks} back, {costs.host_syncs} wait for the device"
    )
    print(
        f"    {costs.cost.bytes / 1e6:.3f} MB and {costs.cost.flops / 1e6:.2f} MFLOP: "
        f"at least {costs.memory_ms:.4f} ms for the bytes, {costs.compute_ms:.4f} ms for the FLOPs, "
        f"{costs.floor_ms:.4f} ms with kernels one after the other"
    )
    print(
        f"    a token: {costs.launches / tokens:.4g} launches, {costs.cost.bytes / tokens / 1e6:.3f} MB, "
        f"{costs.cost.flops / tokens / 1e6:.2f} MFLOP, {costs.floor_ms / tokens:.4f} ms at least"
    )


def _print_graphs(backend: AscendBackend, graphs: Graphs | None) -> None:
    chip = backend.environment.chip
    if graphs is None:
        print("\nGraphs: not counted, for a reference rule may look at values, which no graph can hold")
        return
    if backend.execution == "eager":
        print("\nGraphs: none, every kernel is launched in every step")
        return
    print(f"\nGraphs, up to the context's end: {graphs.count}, which take {graphs.streams} streams")
    verdict = (
        "all fit at once"
        if graphs.fits
        else "the least recently used are dropped and captured anew (fewer sizes, or --lengths mask, need fewer)"
    )
    print(
        f"  {chip.name} has {chip.streams} streams, {graphs.usable} of them for graphs: {verdict}\n"
        f"  counted by a rule of others: {RULE}"
    )


def _print_switches(found: Sequence[Switch]) -> None:
    print("\nEnvironment")
    for switch in found:
        value = "not set" if switch.value is None else switch.value
        mark = "" if switch.severity == "ok" else f" [{switch.severity}]"
        print(
            f"  {switch.name}={value}{mark}: {switch.effect}"
            if switch.value is not None
            else f"  {switch.name} {value}{mark}: {switch.effect}"
        )
