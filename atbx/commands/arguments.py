"""Arguments that commands share, and how their values are read. Nothing here needs torch, so usage errors are quick."""

from __future__ import annotations

import argparse
import re

DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def count(text: str) -> int:
    """A whole number of 0 or more."""
    if not re.fullmatch(r"[0-9]+", text):
        raise argparse.ArgumentTypeError(f"expected a whole number of 0 or more, found {text!r}")
    return int(text)


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return int(text)


def size(text: str) -> int:
    """Bytes, such as 2GiB, 500MB or 1048576."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text.strip().lower())
    unit = _UNITS.get(found[2]) if found else None
    nbytes = int(float(found[1]) * unit) if found and unit else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 2GiB or 500MB, found {text!r}")
    return nbytes


def ids(text: str) -> list[int]:
    """Token ids with commas between them."""
    return _numbers(text, 0, "token ids such as 1,2,3")


def names(text: str) -> list[str]:
    """Names with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"expected names with commas between them, found {text!r}")
    return parts


def lengths(text: str) -> list[int]:
    """Lengths with commas between them."""
    return _numbers(text, 1, "lengths of 1 or more such as 5,17,300")


def _numbers(text: str, lowest: int, expected: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]+", part) and int(part) >= lowest for part in parts):
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
    return [int(part) for part in parts]


def add_model(command: argparse.ArgumentParser) -> None:
    """MODEL."""
    command.add_argument(
        "model", metavar="MODEL", help="a converted file, a GGUF file or a Hugging Face folder"
    )


def add_json(command: argparse.ArgumentParser) -> None:
    """--json."""
    command.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_dtype(command: argparse.ArgumentParser, text: str) -> None:
    """--dtype."""
    command.add_argument("--dtype", choices=DTYPES, help=text)


def add_threads(command: argparse.ArgumentParser) -> None:
    """--threads."""
    command.add_argument(
        "--threads", type=positive, metavar="T", help="CPU threads (default: torch's choice)"
    )


def add_runtime(command: argparse.ArgumentParser, threads: bool = True) -> None:
    """--dtype, --device, --threads: how the model runs."""
    add_dtype(command, "run in it (default: the weights' own)")
    command.add_argument("--device", default="cpu", help="default: %(default)s")
    if threads:
        add_threads(command)


def add_npu(command: argparse.ArgumentParser) -> None:
    """How to plan for an NPU."""
    group = command.add_argument_group("with --device npu")
    group.add_argument(
        "--chip", metavar="NAME", help="plan for it, without a device: Ascend910B3, Ascend310P3, ..."
    )
    group.add_argument(
        "--torch-npu", metavar="V", help="plan for this release, with --chip (default: what is installed)"
    )
    group.add_argument("--cann", metavar="V", help="plan for this release, with --chip (default: any)")
    group.add_argument(
        "--lengths", choices=("update", "mask"), help="how graphs are told lengths (default: update)"
    )
    group.add_argument("--eager", action="store_true", help="launch every kernel in every step, no graphs")


def add_software(command: argparse.ArgumentParser) -> None:
    """--software, --chip, --cann: an NPU played in software."""
    group = command.add_argument_group("with --device npu")
    group.add_argument(
        "--software", action="store_true", help="on the software device: no NPU, no CANN; times mean nothing"
    )
    group.add_argument("--chip", metavar="NAME", help="play it, with --software (default: Ascend910B3)")
    group.add_argument("--cann", metavar="V", help="play this release, with --software")


def add_prompts(command: argparse.ArgumentParser) -> None:
    """The sources of prompts; stdin where none is given."""
    group = command.add_mutually_exclusive_group()
    group.add_argument(
        "-p", "--prompt", action="append", metavar="TEXT", help="a prompt (repeat for a batch)"
    )
    group.add_argument(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="a file that is a prompt, - for stdin (repeat: batch)",
    )
    group.add_argument(
        "--prompt-ids",
        action="append",
        type=ids,
        metavar="1,2,3",
        help="a prompt as token ids (repeat for a batch)",
    )


def add_chat(command: argparse.ArgumentParser) -> None:
    """--chat and --system."""
    command.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="text prompts are messages of a user (default: yes where the model has a chat template)",
    )
    command.add_argument("--system", metavar="TEXT", help="the system message of the chat")


def add_options(command: argparse.ArgumentParser) -> None:
    """Options of `generate`; `options_of` leaves out those that are not given."""
    group = command.add_argument_group("generation")
    group.add_argument(
        "-n",
        "--max-new-tokens",
        type=count,
        metavar="N",
        help="tokens to make (default: to the context's end)",
    )
    group.add_argument("--min-new-tokens", type=count, metavar="N", help="no end before so many")
    group.add_argument(
        "--temperature", type=float, metavar="X", help="0 takes the most probable token (default)"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable; 0 is off")
    group.add_argument("--top-p", type=float, metavar="X", help="draw from the fewest that hold X; 1 is off")
    group.add_argument("--min-p", type=float, metavar="X", help="drop those below X times the best; 0 is off")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="1 is off")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="0 is off")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="0 is off")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends a row (repeat for several)"
    )
    group.add_argument("--logprobs", type=count, metavar="N", help="with --json: and N alternatives a token")


_OPTIONS = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "stop", "logprobs"),
)


def options_of(args: argparse.Namespace) -> dict[str, object]:
    """The options of `add_options` that were given, by their names in `atbx.options.Options`."""
    return {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
