"""Options of `generate`: read, checked, and refused by name; nothing is accepted without effect."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from atbx.core.errors import OptionError
from atbx.sampling import Sampling

LARGEST_TOP = 100
"""Most alternatives of a token whose log-probabilities can be asked for."""


@dataclass(frozen=True)
class Options:
    """Everything `generate` takes besides parameters and tokens.

    max_new_tokens: tokens to generate at most; None goes to the context's end.
    min_new_tokens: EOS is suppressed, and stops are not looked for, before so many tokens.
    eos:            ids that end a row; None takes the model's. () never ends on a token.
    stop:           strings that end a row (needs a tokenizer). stop_tokens: token sequences that do.
    logprobs:       None, or how many alternatives to report beside each chosen token (0 = the chosen one only).
    prompt_logprobs: the same for the tokens of the prompt.
    logprobs_mode:  "raw" (of the model's logits, the default) or "processed" (of what was sampled from).
    cancel:         a callable, or an object with `is_set()`, asked once a step; true ends every row.
    sampling:       values and seed of the sampler.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    eos: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    cancel: Callable[[], bool] | None = None
    sampling: Sampling = field(default_factory=Sampling)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Options from keyword arguments.

        Raises:
            OptionError: an option is unknown, of the wrong type, or out of range.
        """
        own = {f.name for f in fields(cls)} - {"sampling"}
        sampler = {f.name for f in fields(Sampling)}
        for name in given:
            if name not in own | sampler:
                near = difflib.get_close_matches(name, sorted(own | sampler), 1)
                raise OptionError(
                    "unknown option",
                    where=name,
                    hint=f"Did you mean {near[0]}?" if near else "See atbx.Generator",
                )
        values = {name: given[name] for name in own if name in given}
        for name, lowest in (("max_new_tokens", 0), ("min_new_tokens", 0)):
            values[name] = _count(name, values.get(name), lowest, None)
        for name in ("logprobs", "prompt_logprobs"):
            values[name] = _count(name, values.get(name), 0, LARGEST_TOP)
        values["min_new_tokens"] = values["min_new_tokens"] or 0
        most, least = values["max_new_tokens"], values["min_new_tokens"]
        if most is not None and least > most:
            raise OptionError(
                "exceeds max_new_tokens", where="min_new_tokens", expected=f"at most {most}", found=least
            )
        if values.get("eos") is not None:
            # A set, so that a run's stages have the widths that were planned.
            values["eos"] = tuple(sorted(set(_ids("eos", values["eos"]))))
        values["stop"] = _strings(values.get("stop"))
        values["stop_tokens"] = _sequences(values.get("stop_tokens"))
        for i, sequence in enumerate(values["stop_tokens"]):
            if not sequence:
                raise OptionError("an empty sequence would end every row", where=f"stop_tokens[{i}]")
        if values.get("logprobs_mode", "raw") not in ("raw", "processed"):
            raise OptionError(
                "unknown mode",
                where="logprobs_mode",
                expected="'raw' or 'processed'",
                found=str(values["logprobs_mode"]),
            )
        values["cancel"] = _canceller(values.get("cancel"))
        sampling = Sampling.from_options(**{name: given[name] for name in sampler if name in given})
        return cls(sampling=sampling, **values)


def _count(name: str, value: Any, lowest: int, highest: int | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OptionError("must be a whole number", where=name, expected="an int or None", found=repr(value))
    count = int(value)
    if count < lowest or (highest is not None and count > highest):
        span = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        raise OptionError("out of range", where=name, expected=span, found=count)
    return count


def _ids(where: str, value: Any) -> tuple[int, ...]:
    items: Iterable[Any] = (value,) if isinstance(value, numbers.Integral) else value
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise OptionError("must be token ids", where=where, expected="ints", found=repr(value))
    found = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, numbers.Integral) or int(item) < 0:
            raise OptionError(
                "must be token ids", where=where, expected="ints of 0 or more", found=repr(item)
            )
        found.append(int(item))
    return tuple(found)


def _sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise OptionError(
            "must be sequences of token ids", where="stop_tokens", expected="lists of ints", found=repr(value)
        )
    return tuple(_ids(f"stop_tokens[{i}]", sequence) for i, sequence in enumerate(value))


def _strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise OptionError(
            "must be strings", where="stop", expected="a str or a list of str", found=repr(value)
        )
    strings = (value,) if isinstance(value, str) else tuple(value)
    for i, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise OptionError(
                "must be a string of at least one character", where=f"stop[{i}]", found=repr(string)
            )
    return strings


def _canceller(value: Any) -> Callable[[], bool] | None:
    if value is None or (callable(value) and not hasattr(value, "is_set")):
        return value
    if hasattr(value, "is_set"):
        return value.is_set
    raise OptionError(
        "cannot be asked", where="cancel", expected="a callable or an object with is_set()", found=repr(value)
    )
