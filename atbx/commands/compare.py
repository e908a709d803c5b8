"""`atbx compare`: a model's steps on a backend, judged equation by equation; or with only some groups swapped in."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from atbx.commands.opening import dtype_named, threads
from atbx.commands.output import fold, print_json
from atbx.commands.software import device_of
from atbx.comparison import Comparison, Entry, compare, eager
from atbx.core.errors import OptionError
from atbx.core.trees import leaves
from atbx.swapping import SwapTable, swap
from atbx.tolerance import RULE

PAST_TOLERANCE = 1
"""Exit code where something is past its tolerance."""


def run(args: argparse.Namespace) -> None:
    """Compare, print, and end with code 1 where something is past its tolerance."""
    if args.swap is not None and args.end_to_end:
        raise OptionError("a swap is end to end already", where="--end-to-end", expected="without --swap")
    with threads(args.threads), device_of(args):
        steps = _steps(args)
    passed = all(found.passed for _, found in steps)
    if args.json:
        print_json({"passed": passed, "steps": [{"step": n, **found.as_data()} for n, found in steps]})
    else:
        for name, found in steps:
            if isinstance(found, SwapTable):
                _print_swaps(name, found)
            else:
                _print_comparison(name, found)
        print(f"\n{'within' if passed else 'PAST'} the tolerance: {RULE}")
    if not passed:
        sys.stdout.flush()
        raise SystemExit(PAST_TOLERANCE)


def _steps(args: argparse.Namespace) -> list[tuple[str, Comparison | SwapTable]]:
    from atbx.checkpoints.loading import load
    from atbx.compile import bind
    from atbx.model_step import random_ids, teacher_forced
    from atbx.models.registry import family_named

    model = load(args.model)
    forward = family_named(model.family, args.model).forward
    wanted = dtype_named(args.dtype)
    dtype = wanted or _dtype_of(model.params)
    binding = bind(model.params, dtype=wanted)
    ids = args.prompt_ids or random_ids(args.tokens, model.config.vocab)
    if len(ids) < 2:
        raise OptionError("a prefill and a decode step need", expected="2 tokens or more", found=len(ids))
    if len(ids) > model.config.context:
        raise OptionError(
            "exceeds the model's context",
            where="--tokens",
            expected=f"at most {model.config.context}",
            found=len(ids),
        )
    chosen = eager(args.device)
    options: dict[str, Any] = {"device": chosen, "static": ("config",), "donate": ("cache",)}
    found: list[tuple[str, Comparison | SwapTable]] = []
    for step in teacher_forced(forward, binding, model.config, ids, chosen, dtype):
        if args.swap is not None:
            against = args.against or "cpu"
            table = swap(forward, *step.arguments, groups=args.swap, against=against, **options)
            found.append((step.name, table))
        else:
            against = args.against or "reference"
            result = compare(forward, *step.arguments, against=against, end_to_end=args.end_to_end, **options)
            found.append((step.name, result))
    return found


def _dtype_of(params: Any) -> torch.dtype:
    return next(x.dtype for x in leaves(params) if x.dtype.is_floating_point and x.ndim > 1)


def _print_comparison(name: str, found: Comparison) -> None:
    print(f"\n{name}: {found.backend} ({found.device}) against {found.against}, {found.mode}")
    print(f"  {'op':<22} {'kernel':<28} {'error':>10} {'scale':>10} {'units':>9} {'allowed':>8}")
    groups: dict[str, list[Entry]] = {}
    for entry in found.entries:
        groups.setdefault(entry.scope, []).append(entry)
    for scope, entries in groups.items():
        print(f"  {scope or 'outside the layers'}")
        for entry in entries:
            _print_entry(entry)
    print("  by module: results, past tolerance, worst in its own tolerance")
    modules = (
        (m.scope, [(m.results, m.failed, m.worst.op, round(m.worst.margin, 3))]) for m in found.modules()
    )
    for scope, times, rows in fold(modules):
        for results, failed, op, margin in rows:
            alike = f" ({times} alike)" if times > 1 else ""
            print(f"    {scope or 'outside':<24} {results:4d} {failed:4d}   {op} at {margin:g}{alike}")
    first = found.first
    if first is not None:
        print(f"  first past tolerance: {_named(first)}")


def _print_entry(entry: Entry) -> None:
    what = entry.op if entry.result == 0 else f"{entry.op} #{entry.result + 1}"
    judgement = entry.judgement
    if judgement is None:
        print(f"    {what:<20} {entry.kernel:<28} exists only inside a fusion")
        return
    mark = "" if entry.passed else "  PAST"
    print(
        f"    {what:<20} {entry.kernel:<28} {judgement.error:10.3g} {judgement.scale:10.3g} "
        f"{judgement.units:9.3g} {judgement.allowed:8.3g}{mark}"
    )
    if judgement.problem is not None:
        print(f"    {'':<20} at {list(judgement.place)}: {judgement.problem}")
    if entry.fusion is not None and not entry.fusion.passed:
        print(f"    {'':<20} the fusion itself differs from the program by {entry.fusion.units:.3g} units")


def _named(entry: Entry) -> str:
    where = f" ({entry.source})" if entry.source else ""
    judgement = entry.judgement
    size = "" if judgement is None else f": {judgement.units:.3g} units of {judgement.allowed:.3g} allowed"
    return f"equation {entry.index}, {entry.scope or 'outside'}: {entry.op} by {entry.kernel}{size}{where}"


def _print_swaps(name: str, table: SwapTable) -> None:
    rest = "the CPU's kernels" if table.against == "cpu" else "reference rules"
    print(f"\n{name}: {rest}, with groups swapped for kernels of {table.backend} ({table.device})")
    print(
        f"  {'swapped':<24} {'equations':>9} {'error':>10} {'units':>9} {'same best':>10} {'KL (nats)':>10}"
    )
    for row in table.rows:
        mark = "" if row.passed else "  PAST"
        print(
            f"  {', '.join(row.groups) or 'nothing':<24} {row.kernels:9d} {row.judgement.error:10.3g} "
            f"{row.judgement.units:9.3g} {row.agreement:10.1%} {row.divergence:10.3g}{mark}"
        )
