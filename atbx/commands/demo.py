"""`atbx demo`: the whole way on the real model: get it, check it, convert it, answer a prompt while it is made."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter

from atbx.commands.generate import stream
from atbx.commands.opening import open_to_run, threads
from atbx.core.errors import UnsupportedError
from atbx.demo_weights import cache_folder, demo_model

PROMPT = "What is the capital of France, and what is it known for?"


def run(args: argparse.Namespace) -> None:
    """Answer the prompt."""
    prompt = PROMPT if args.prompt is None else args.prompt
    model = demo_model(cache_folder() if args.folder is None else Path(args.folder))
    print(f"model: {model}\nprompt: {prompt}", file=sys.stderr)
    with threads(args.threads):
        opened = open_to_run(str(model), None)
        if opened.text is None:
            raise UnsupportedError("the model has no tokenizer", where=str(model))
        start = perf_counter()
        made = stream(opened, opened.text.chat(prompt), {"max_new_tokens": args.max_new_tokens})
        seconds = perf_counter() - start
    print(f"{made} tokens in {seconds:.1f} s, compiling included", file=sys.stderr)
