"""Options of `generate`: read, checked, and refused by name; nothing is accepted without effect."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
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
            _check_count(name, values.get(name), lowest, None)
        for name in ("logprobs", "prompt_logprobs"):
            _check_count(name, values.get(name), 0, LARGEST_TOP)
        if values.get("min_new_tokens") is None:
            values.pop("min_new_tokens", None)
        most, least = values.get("max_new_tokens"), values.get("min_new_tokens", 0)
        if most is not None and least > most:
            raise OptionError(
                "exceeds max_new_tokens", where="min_new_tokens", expected=f"at most {most}", found=least
            )
        if values.get("eos") is not None:
            values["eos"] = _ids("eos", values["eos"])
        values["stop"] = _strings(values.get("stop", ()))
        values["stop_tokens"] = tuple(
            _ids(f"stop_tokens[{i}]", sequence) for i, sequence in enumerate(values.get("stop_tokens", ()))
        )
        for i, sequence in enumerate(values["stop_tokens"]):
            if not sequence:
                raise OptionError("an empty sequence would end every row", where=f"stop_tokens[{i}]")
        if values.get("logprobs_mode", "raw") not in ("raw", "processed"):
            raise OptionError(
                "unknown mode",
                where="logprobs_mode",
                expected="'raw' or 'processed'",
                found=values["logprobs_mode"],
            )
        values["cancel"] = _canceller(values.get("cancel"))
        sampling = Sampling.from_options(**{name: given[name] for name in sampler if name in given})
        return cls(sampling=sampling, **values)


def _check_count(name: str, value: Any, lowest: int, highest: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError("must be a whole number", where=name, expected="an int or None", found=repr(value))
    if value < lowest or (highest is not None and value > highest):
        span = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        raise OptionError("out of range", where=name, expected=span, found=value)


def _ids(where: str, value: Any) -> tuple[int, ...]:
    items: Sequence[Any] = (value,) if isinstance(value, int) else value
    if isinstance(items, str) or not hasattr(items, "__iter__"):
        raise OptionError("must be token ids", where=where, expected="ints", found=repr(value))
    found = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise OptionError(
                "must be token ids", where=where, expected="ints of 0 or more", found=repr(item)
            )
        found.append(item)
    return tuple(found)


def _strings(value: Any) -> tuple[str, ...]:
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
