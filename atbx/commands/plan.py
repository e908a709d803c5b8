"""`atbx plan`: which compiled variants and how much memory a workload needs, before anything is compiled."""

from __future__ import annotations

import argparse
from typing import Any

from atbx.commands.arguments import options_of
from atbx.commands.opening import memory_needs, open_to_plan
from atbx.commands.output import print_json
from atbx.schedule import Request, row_limits


def run(args: argparse.Namespace) -> None:
    """List the variants, and the memory of the request that needs most."""
    opened = open_to_plan(args.model, args.dtype, args.device)
    options: dict[str, Any] = options_of(args)
    new = options.pop("max_new_tokens", None)
    width = args.batch or len(args.prompt_lengths)
    batches = [
        tuple(args.prompt_lengths[start : start + width])
        for start in range(0, len(args.prompt_lengths), width)
    ]
    planned = opened.generator.plan(opened.params, [Request(batch, new, options) for batch in batches])
    context = opened.generator.config.context
    needs = max(
        (memory_needs(opened, len(batch), max(row_limits(batch, new, context))) for batch in batches),
        key=lambda need: need.total,
    )
    if args.json:
        memory = {name: getattr(needs, name) for name in ("weights", "cache", "activation", "total")}
        print_json({"count": len(planned), "variants": [entry.name for entry in planned], "memory": memory})
        return
    print(f"{len(planned)} variants for {len(batches)} request{'s' * (len(batches) > 1)}")
    for entry in planned:
        print(f"  {entry.name}")
    print(f"memory: {needs}")
