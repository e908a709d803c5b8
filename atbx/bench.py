"""Measuring a model on this machine: tokens a second of prefill and decode, first call, load time, peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from atbx.core.errors import OptionError, UnsupportedError
from atbx.generate import Generator

STATUS = "/proc/self/status"


@dataclass(frozen=True)
class Measured:
    """What `measure` found. Rates are over all rows of the batch; seconds of the first call include compiling.

    peak_resident_bytes is of the whole process since it began, torch's own share included.
    """

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    first_call_seconds: float
    load_seconds: float
    peak_resident_bytes: int
    variants: int


def measure(
    load: Callable[[], tuple[Any, Generator]], *, batch: int, prompt: int, new: int, repeats: int
) -> Measured:
    """Load a model, then generate `new` tokens from `batch` random prompts of `prompt` tokens, `repeats` times.

    load: makes parameters and generator; its time is `load_seconds`. End tokens are ignored, so every row makes
    `new` tokens. A call that makes one token is a prefill; what a call that makes `new` takes longer is decoding.

    Raises:
        OptionError: a number is out of range, or decoding is too short to be told from prefill.
        CapacityError: the request does not fit the context or memory.
    """
    for name, value, lowest in (
        ("batch", batch, 1),
        ("prompt", prompt, 1),
        ("new", new, 2),
        ("repeats", repeats, 1),
    ):
        if value < lowest:
            raise OptionError(
                "is too small to be measured", where=name, expected=f"{lowest} or more", found=value
            )
    start = perf_counter()
    params, generate = load()
    load_seconds = perf_counter() - start
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(generate.vocab, (batch, prompt), generator=draw).tolist()

    def seconds(count: int) -> float:
        begin = perf_counter()
        generate(params, rows, max_new_tokens=count, eos=())
        return perf_counter() - begin

    short, long = [], []
    with tqdm(total=2 * repeats + 2, desc="Measuring", unit="call", disable=None) as bar:
        first = seconds(new)
        bar.update()
        seconds(1)
        bar.update()
        # In turns, so that a machine that slows down does so for both.
        for _ in range(repeats):
            short.append(seconds(1))
            bar.update()
            long.append(seconds(new))
            bar.update()
    prefill, both = statistics.median(short), statistics.median(long)
    if both <= prefill:
        raise OptionError(
            "decoding is too short to be told from prefill",
            where="new",
            found=f"{new} tokens in {both:.4f} s, one in {prefill:.4f} s",
            hint="Ask for more new tokens or more repeats",
        )
    return Measured(
        batch * prompt / prefill,
        batch * (new - 1) / (both - prefill),
        first,
        load_seconds,
        peak_resident_bytes(),
        generate.cache_info().variants,
    )


def peak_resident_bytes() -> int:
    """The most memory that was resident in this process since it began.

    Raises:
        UnsupportedError: the system does not tell.
    """
    with open(STATUS, encoding="ascii") as lines:
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise UnsupportedError(
        "this system does not tell the peak of resident memory", where=STATUS, expected="VmHWM"
    )
