"""How a model's publisher says it should be sampled, and the tokens that end its output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from atbx.core.errors import CheckpointError

_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True)
class Generation:
    """Defaults for generating; None where the source says nothing.

    eos:    ids of the tokens that end generation: of the model's configuration, its generation configuration and
            its tokenizer together, because publishers keep only one of the three up to date.
    sample: whether the publisher samples (True) or takes the most probable token (False).
    """

    eos: tuple[int, ...] = ()
    sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def with_eos(self, more: Iterable[int]) -> Generation:
        """The same with these ends added."""
        return Generation(**{**asdict(self), "eos": tuple(dict.fromkeys((*self.eos, *more)))})

    def to_metadata(self) -> dict[str, Any]:
        """As plain data; what is None is left out."""
        return {"eos": list(self.eos)} | {
            k: v for k, v in asdict(self).items() if k != "eos" and v is not None
        }


def from_metadata(metadata: Any, where: str) -> Generation:
    """From what `Generation.to_metadata` returned.

    Raises:
        CheckpointError: a key is unknown or its value malformed; names it.
    """
    if not isinstance(metadata, Mapping):
        raise CheckpointError(
            "generation is malformed", where=where, expected="an object", found=repr(metadata)[:80]
        )
    unknown = sorted(set(metadata) - {f.name for f in fields(Generation)})
    if unknown:
        raise CheckpointError(f"generation.{unknown[0]} is unknown", where=where)
    return _read(metadata, {f.name: f.name for f in fields(Generation)}, where).with_eos(
        _ids(metadata.get("eos"), "generation.eos", where)
    )


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> Generation:
    """From a `config.json` and a `generation_config.json` ({} where there is none).

    Raises:
        CheckpointError: a value is malformed; names its key.
    """
    keys = {name: name for name in _GGUF_KEYS} | {"sample": "do_sample"}
    ends = [
        token
        for file, values in (("config.json", config), ("generation_config.json", generation))
        for token in _ids(values.get("eos_token_id"), f"{file}: eos_token_id", where)
    ]
    return _read(generation, keys, where).with_eos(ends)


def from_gguf(metadata: Mapping[str, Any], where: str) -> Generation:
    """From the metadata of a GGUF file; the ends come from its tokenizer.

    Raises:
        CheckpointError: a value is malformed; names its key.
    """
    return _read(metadata, _GGUF_KEYS, where)


def _read(values: Mapping[str, Any], keys: Mapping[str, str], where: str) -> Generation:
    found: dict[str, Any] = {}
    for name, key in keys.items():
        value = values.get(key)
        if value is None or name == "eos":
            continue
        if name == "sample":
            fits, expected = isinstance(value, bool), "true or false"
        elif name == "top_k":
            fits, expected = type(value) is int, "a whole number"
        else:
            fits, expected = type(value) in (int, float) and value >= 0, "a number of at least 0"
        if not fits:
            raise CheckpointError(
                f"{key} is malformed", where=where, expected=expected, found=repr(value)[:80]
            )
        found[name] = value if name in ("sample", "top_k") else float(value)
    return Generation(**found)


def _ids(value: Any, what: str, where: str) -> list[int]:
    ids = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    for token in ids:
        if type(token) is not int or token < 0:
            raise CheckpointError(
                f"{what} is malformed",
                where=where,
                expected="a token id or a list of them",
                found=repr(value)[:80],
            )
    return list(ids)
