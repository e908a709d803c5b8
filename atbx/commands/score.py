"""`atbx score`: how probable a model finds given texts or tokens."""

from __future__ import annotations

import argparse

from atbx.commands.opening import open_to_run, threads
from atbx.commands.output import print_json
from atbx.commands.prompts import read_rows
from atbx.core.errors import OptionError


def run(args: argparse.Namespace) -> None:
    """Score and print: one line a row, or JSON with one entry a row."""
    if args.logprobs and not args.json:
        raise OptionError("are printed as JSON only", where="--logprobs", hint="Add --json")
    with threads(args.threads):
        opened = open_to_run(args.model, args.dtype, args.device)
        score = opened.generator.score(opened.params, read_rows(args, opened.text))
    if args.json:
        totals = [float(row) for row in score.total]
        data = {"log_likelihood": totals, "tokens": score.tokens, "perplexity": score.perplexity}
        print_json({**data, "logprobs": score.logprobs} if args.logprobs else data)
        return
    for total, tokens, perplexity in zip(score.total, score.tokens, score.perplexity, strict=True):
        print(f"log-likelihood {total:.4f}  tokens {tokens}  perplexity {perplexity:.4f}")
