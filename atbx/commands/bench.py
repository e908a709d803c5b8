"""`atbx bench`: prints what `atbx.bench` measures."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from atbx.bench import measure
from atbx.commands.opening import open_to_run, threads
from atbx.commands.output import print_json, size_in_words
from atbx.generate import Generator


def run(args: argparse.Namespace) -> None:
    """Measure and print."""

    def load() -> tuple[Any, Generator]:
        opened = open_to_run(args.model, args.dtype, args.device)
        return opened.params, opened.generator

    with threads(args.threads):
        found = measure(load, batch=args.batch, prompt=args.prompt, new=args.new, repeats=args.repeats)
    if args.json:
        print_json(asdict(found))
        return
    print(f"prefill     {found.prefill_tokens_per_second:.1f} tokens/s")
    print(f"decode      {found.decode_tokens_per_second:.1f} tokens/s")
    print(f"first call  {found.first_call_seconds:.2f} s")
    print(f"load        {found.load_seconds:.2f} s")
    print(f"peak        {size_in_words(found.peak_resident_bytes)} resident")
    print(f"variants    {found.variants}")
