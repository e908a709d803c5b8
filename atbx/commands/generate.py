"""`atbx generate`: from prompts to new tokens, as text while it is made, as text at the end, or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from atbx.commands.arguments import options_of
from atbx.commands.opening import Opened, open_to_run, threads
from atbx.commands.output import print_json
from atbx.commands.prompts import has_text, read_rows
from atbx.core.errors import OptionError
from atbx.options import Options
from atbx.results import Generation, TokenLogprobs


def run(args: argparse.Namespace) -> None:
    """Generate and print.

    Raises:
        OptionError: an option or a prompt is not valid.
    """
    options = options_of(args)
    _check(args, options)
    with threads(args.threads):
        opened = open_to_run(args.model, args.dtype, args.device)
        rows = read_rows(args, opened.text, chat=args.chat, system=args.system)
        if args.stream and len(rows) > 1:
            raise OptionError("can show one row only", where="--stream", found=f"{len(rows)} prompts")
        if not args.json and args.stream is not False and len(rows) == 1 and opened.text is not None:
            stream(opened, rows[0], options)
            return
        result = opened.generator(opened.params, rows, **options)
    if args.json:
        print_json(_as_data(result, with_text=has_text(args), seed_is_given=args.seed is not None))
    else:
        _print(result)


def _check(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Refuse what is known to be wrong before a model is loaded."""
    if args.json and args.stream:
        raise OptionError("contradicts --json", where="--stream", hint="Leave one of them out")
    if "logprobs" in options and not args.json:
        raise OptionError("are printed as JSON only", where="--logprobs", hint="Add --json")
    Options.read(options)


def stream(opened: Opened, row: list[int], options: dict[str, Any]) -> int:
    """Print the text of one row while it is made; returns how many tokens were made."""
    made, ends_line = 0, True
    events: Any = opened.generator.stream(opened.params, [row], **options)
    # Closed at once when the reader of stdout is gone, or on Ctrl-C: the row must not go on.
    try:
        with contextlib.closing(events):
            for event in events:
                made += event.token is not None
                if event.text:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                    ends_line = event.text.endswith("\n")
    finally:
        if not ends_line:
            print(flush=True)
    return made


def _print(result: Generation) -> None:
    texts = result.text or [",".join(map(str, row)) for row in result.tokens]
    for index, (text, finish) in enumerate(zip(texts, result.finish, strict=True)):
        if len(texts) > 1:
            print(f"== {index} ({finish})")
        print(text)


def _as_data(result: Generation, *, with_text: bool, seed_is_given: bool) -> dict[str, Any]:
    data: dict[str, Any] = {"tokens": result.tokens, "finish": result.finish}
    if with_text:
        data["text"] = result.text
    if result.logprobs is not None:
        data["logprobs"] = [[_logprob(entry) for entry in row] for row in result.logprobs]
    if result.seed is not None and not seed_is_given:
        data["seed"] = result.seed
    return data


def _logprob(entry: TokenLogprobs) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
