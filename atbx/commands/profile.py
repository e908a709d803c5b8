"""`atbx profile`: the hot spots of prefill and decoding, a trace, and the same beside an earlier trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from atbx.commands.opening import Opened, open_to_run, threads
from atbx.commands.output import dtype_name, print_json
from atbx.core.backend import Backend
from atbx.core.errors import OptionError
from atbx.kernels import ascend
from atbx.profiling import Change, HotSpot, Profile, compare, profile, read_summary

PREFILL, DECODE = "prefill", "decode"
UNITS = {PREFILL: "prompt", DECODE: "token"}
SETUP = ("device", "dtype", "prompt", "new", "batch", "threads")
"""What two profiles must have in common to be compared at face value."""


def run(args: argparse.Namespace) -> None:
    """Profile, print, write."""
    if args.new < 2:
        raise OptionError(
            "too few tokens to see decoding", where="--new", expected="2 or more", found=args.new
        )
    earlier = None if args.compare is None else read_summary(args.compare)
    with threads(args.threads):
        opened = open_to_run(args.model, args.dtype, _backend(args.device))
        found, plain = _measure(opened, args)
        setup = {
            "model": args.model,
            "device": _device_name(args.device),
            "dtype": dtype_name(opened.generator.engine.cache_dtype(opened.generator.bind(opened.params))),
            "prompt": args.prompt,
            "new": args.new,
            "batch": args.batch,
            "repeats": args.repeats,
            "threads": torch.get_num_threads(),
            "unprofiled_seconds": plain,
        }
    if args.output is not None:
        found.write_trace(args.output, **setup)
    summary = {**found.summary(), **setup}
    changes = None if earlier is None else compare(earlier, summary)
    if args.json:
        print_json(_as_data(summary, changes))
        return
    _print(found, summary, args.top)
    if earlier is not None and changes is not None:
        _print_changes(earlier, summary, changes, args.top)
    if args.output is not None:
        print(f"\ntrace: {args.output} (chrome://tracing, ui.perfetto.dev)")


def _backend(device: str) -> str | Backend:
    """The device's backend; an NPU runs eagerly, so that equations can be told apart."""
    kind, _, index = device.partition(":")
    if kind == "npu" and (not index or index.isdigit()):
        return ascend.backend(index=int(index or 0), execution="eager")
    return device


def _device_name(device: str) -> str:
    """What the times are of: a CPU, an NPU run eagerly, or the software device, which has no time."""
    if not device.startswith("npu"):
        return device
    software = sys.modules.get("atbx.testing.software_npu")
    is_software = software is not None and software._process.get("entered", False)
    return "software" if is_software else f"{device}, eager"


def _measure(opened: Opened, args: argparse.Namespace) -> tuple[Profile, dict[str, float]]:
    """The profile of `repeats` calls, and the seconds of as many that nobody watched, by phase."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(opened.generator.vocab, (args.batch, args.prompt), generator=draw).tolist()
    plain = dict.fromkeys(UNITS, 0.0)
    whole = Profile(units={PREFILL: args.repeats, DECODE: args.repeats * (args.new - 1)})
    with tqdm(total=2 * args.repeats + 1, desc="Profiling", unit="call", disable=None) as bar:
        _generate(opened, rows, args.new, Profile(), {})
        bar.update()
        # In turns, so that a machine that slows down does so for both.
        for _ in range(args.repeats):
            _generate(opened, rows, args.new, Profile(), plain)
            bar.update()
            with profile(PREFILL, into=whole):
                _generate(opened, rows, args.new, whole, {})
            bar.update()
    return whole, plain


def _generate(
    opened: Opened, rows: Sequence[Sequence[int]], new: int, found: Profile, seconds: dict[str, float]
) -> None:
    """One call. Up to its first event it prefills; from then on it decodes, which `found` and `seconds` are told."""
    begin = perf_counter()
    for _ in opened.generator.stream(opened.params, rows, max_new_tokens=new, eos=()):
        if found.phase != DECODE:
            found.phase = DECODE
            begin = _add(seconds, PREFILL, begin)
    _add(seconds, DECODE, begin)


def _add(seconds: dict[str, float], phase: str, begin: float) -> float:
    now = perf_counter()
    seconds[phase] = seconds.get(phase, 0.0) + now - begin
    return now


def _as_data(summary: dict[str, Any], changes: Sequence[Change] | None) -> dict[str, Any]:
    if changes is None:
        return summary
    return {
        **summary,
        "changes": [
            {
                "phase": change.phase,
                "op": change.op,
                "kernels_before": list(change.kernels_before),
                "kernels_after": list(change.kernels_after),
                "before_ms": change.before,
                "after_ms": change.after,
            }
            for change in changes
        ],
    }


def _print(found: Profile, summary: dict[str, Any], top: int) -> None:
    print(
        f"{summary['model']} on {summary['device']}, {summary['dtype']}, {summary['threads']} threads: "
        f"{summary['repeats']} x ({summary['batch']} x {summary['prompt']} prompt tokens, {summary['new']} new)"
    )
    by_op, by_scope = found.hot_spots(), found.hot_spots("scope")
    for phase in found.phases:
        facts = summary["phases"][phase]
        spots = [spot for spot in by_op if spot.phase == phase]
        inside, plain = facts["seconds"], summary["unprofiled_seconds"][phase]
        print(
            f"\n{phase.capitalize()}: {_ms(inside / facts['units'])} a {UNITS[phase]} in compiled steps; the whole "
            f"call takes {_ms(plain / facts['units'])} when nobody watches"
        )
        print(
            f"  {'op':<18} {'kernel':<30} {'calls':>6} {'ms':>9} {'share':>6} {'us a call':>10} {'GB/s':>8} "
            f"{'GFLOP/s':>9}"
        )
        for spot in spots[:top]:
            _print_spot(spot, f"{spot.name:<18} {spot.kernel:<30}")
        _print_rest(spots[top:], inside)
        between = inside - sum(spot.seconds for spot in spots)
        print(f"  {'between calls':<56} {between * 1e3:9.2f} {_share(between, inside):6.1%}")
        scopes = [spot for spot in by_scope if spot.phase == phase]
        print("  by scope")
        for spot in scopes[:top]:
            _print_spot(spot, f"{spot.name or 'outside the layers':<49}")
        _print_rest(scopes[top:], inside)


def _print_spot(spot: HotSpot, name: str) -> None:
    rates = [
        "" if rate is None else f"{rate / 1e9:.2f}" for rate in (spot.bytes_per_second, spot.flops_per_second)
    ]
    print(
        f"  {name} {spot.calls:6d} {spot.seconds * 1e3:9.2f} {spot.share:6.1%} "
        f"{spot.seconds / spot.calls * 1e6:10.1f} {rates[0]:>8} {rates[1]:>9}".rstrip()
    )


def _print_rest(spots: Sequence[HotSpot], whole: float) -> None:
    if spots:
        seconds = sum(spot.seconds for spot in spots)
        name = f"{len(spots)} more"
        calls = sum(spot.calls for spot in spots)
        print(f"  {name:<49} {calls:6d} {seconds * 1e3:9.2f} {_share(seconds, whole):6.1%}")


def _print_changes(
    earlier: dict[str, Any], summary: dict[str, Any], changes: Sequence[Change], top: int
) -> None:
    print("\nBefore and after")
    for name in SETUP:
        if earlier.get(name) != summary[name]:
            print(f"  not the same {name}: {earlier.get(name, 'not told')} before, {summary[name]} now")
    for phase in dict.fromkeys(change.phase for change in changes):
        rows = [change for change in changes if change.phase == phase]
        unit = UNITS.get(phase, "step")
        print(f"  {phase}: {'op':<20} {'before':>12} {'after':>12} {'change':>8}   ms a {unit}")
        before, after = (_total(one, phase) for one in (earlier, summary))
        _print_change("all steps", before, after, "")
        for change in rows[:top]:
            kernels = ""
            if change.before is not None and change.after is not None:
                old, new = ("+".join(sorted(set(k))) for k in (change.kernels_before, change.kernels_after))
                kernels = "" if old == new else f"{old} -> {new}"
            _print_change(change.op, change.before, change.after, kernels)
        if len(rows) > top:
            print(f"    {len(rows) - top} more changed by less")


def _total(summary: dict[str, Any], phase: str) -> float | None:
    facts = summary["phases"].get(phase)
    return None if facts is None else facts["seconds"] / facts["units"] * 1e3


def _print_change(name: str, before: float | None, after: float | None, kernels: str) -> None:
    shown = ["-" if value is None else f"{value:.4f}" for value in (before, after)]
    change = f"{after / before - 1:+.1%}" if before and after is not None else ""
    print(f"    {name:<25} {shown[0]:>12} {shown[1]:>12} {change:>8}   {kernels}".rstrip())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
