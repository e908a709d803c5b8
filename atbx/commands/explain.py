"""`atbx explain`: the kernel of every equation, why it was chosen and what was refused, for prefill and decode."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from typing import Any

from atbx.commands import explain_npu
from atbx.commands.opening import open_to_plan
from atbx.commands.output import fold, print_json, size_in_words
from atbx.core.backend import Choice
from atbx.core.errors import OptionError
from atbx.core.jit import Explanation

NPU_OPTIONS = ("chip", "torch_npu", "cann", "lengths", "eager")
"""Arguments that mean something for an NPU alone."""


@dataclass(frozen=True)
class Line:
    """An equation in the text form, equal to that of another layer which does the same."""

    op: str
    kernel: str
    tier: str
    why: str
    refused: tuple[tuple[str, str], ...]
    flops: float
    nbytes: float


def run(args: argparse.Namespace) -> None:
    """Explain both steps of a generation."""
    if args.device.split(":")[0] == "npu":
        explain_npu.run(args)
        return
    _refuse_npu_options(args)
    opened = open_to_plan(args.model, args.dtype, args.device)
    steps = opened.generator.explain(opened.params, prompt=args.prompt, batch=args.batch)
    if args.json:
        print_json({name: _as_data(step) for name, step in zip(("prefill", "decode"), steps, strict=True)})
        return
    for name, step in zip(("Prefill", "Decode"), steps, strict=True):
        _print(name, step)


def _refuse_npu_options(args: argparse.Namespace) -> None:
    for name in NPU_OPTIONS:
        if getattr(args, name):
            raise OptionError(
                "belongs to an NPU",
                where=f"--{name.replace('_', '-')}",
                expected="--device npu",
                found=args.device,
            )


def _as_data(step: Explanation) -> dict[str, Any]:
    return {
        "variant": step.name,
        "cached": step.hit,
        "miss": None if step.miss is None else str(step.miss),
        "equations": [_equation(choice) for choice in step.choices],
        "fusions": [
            {"rule": applied.rule, "scope": applied.scope, "refused": applied.refused}
            for applied in step.variant.fusions
        ],
        "copies": list(step.variant.lowered.copies),
        "totals": _totals(step),
    }


def _equation(choice: Choice) -> dict[str, Any]:
    equation, cost = choice.equation, choice.equation.cost()
    return {
        "scope": equation.scope,
        "op": equation.op.name,
        "results": [str(var.abstract) for var in equation.outputs],
        "kernel": choice.kernel.name,
        "tier": choice.kernel.tier,
        "why": choice.why,
        "refused": [{"kernel": refusal.kernel, "reason": refusal.reason} for refusal in choice.refused],
        "flops": cost.flops,
        "bytes": cost.bytes,
        "source": equation.source,
    }


def _totals(step: Explanation) -> dict[str, Any]:
    costs = [choice.equation.cost() for choice in step.choices]
    tiers: dict[str, int] = {}
    for choice in step.choices:
        tiers[choice.kernel.tier] = tiers.get(choice.kernel.tier, 0) + 1
    return {
        "equations": len(costs),
        "flops": sum(cost.flops for cost in costs),
        "bytes": sum(cost.bytes for cost in costs),
        "launches": sum(choice.launches for choice in step.choices),
        "tiers": tiers,
        "workspace_bytes": step.variant.lowered.memory.size,
    }


def _print(name: str, step: Explanation) -> None:
    totals = _totals(step)
    print(f"{name}: {step.name}")
    print(f"  {'cached' if step.hit else f'not cached: {step.miss}'}")
    by_scope = itertools.groupby(step.choices, key=lambda choice: choice.equation.scope)
    for scope, times, lines in fold((scope, [_line(c) for c in choices]) for scope, choices in by_scope):
        print(f"  {scope or 'outside the layers'}{f' ({times} alike, costs of one)' if times > 1 else ''}")
        for line in lines:
            cost = f"{line.flops / 1e6:10.2f} MFLOP {line.nbytes / 1e6:9.2f} MB"
            print(f"    {line.op:<22} {line.kernel:<26} {line.tier:<9} {cost}  {line.why}")
            for kernel, reason in line.refused:
                print(f"    {'':<22} refused {kernel}: {reason}")
    refused = [(a.scope, [(a.rule, a.refused)]) for a in step.variant.fusions if a.refused]
    for scope, times, rules in fold(refused):
        for rule, reason in rules:
            print(
                f"  fusion {rule} refused in {scope or 'the program'}{f' ({times})' * (times > 1)}: {reason}"
            )
    for note in step.variant.lowered.copies:
        print(f"  copy inserted: {note}")
    tiers = ", ".join(f"{count} {tier}" for tier, count in sorted(totals["tiers"].items()))
    print(
        f"  total: {totals['equations']} equations ({tiers}), {totals['launches']} launches, "
        f"{totals['flops'] / 1e6:.2f} MFLOP, {totals['bytes'] / 1e6:.2f} MB moved, "
        f"{size_in_words(totals['workspace_bytes'])} of workspace"
    )


def _line(choice: Choice) -> Line:
    cost = choice.equation.cost()
    return Line(
        choice.equation.op.name,
        choice.kernel.name,
        choice.kernel.tier,
        choice.why,
        tuple((refusal.kernel, refusal.reason) for refusal in choice.refused),
        cost.flops,
        cost.bytes,
    )
