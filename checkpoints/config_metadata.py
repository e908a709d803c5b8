"""Model configurations (frozen dataclasses, nested ones too) to and from the plain data in a file's metadata."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from atbx.core.errors import CheckpointError


def config_to_metadata(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts of numbers, texts and lists."""
    written: dict[str, Any] = dataclasses.asdict(config)
    return written


def config_from_metadata(kind: type, values: Any, where: str, place: str = "config") -> Any:
    """The configuration of class `kind` that `config_to_metadata` wrote.

    A field with a default may be missing (the file is older than the field); an unknown one is refused, because it
    may change the computation.

    Raises:
        CheckpointError: a key is missing, unknown or malformed; names it.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{place} is malformed", where=where, expected="an object", found=repr(values)[:80]
        )
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in known:
            raise CheckpointError(
                f"{place}/{key} is unknown",
                where=where,
                hint="The file was written by a newer version, or edited",
            )
    arguments: dict[str, Any] = {}
    for name, field in known.items():
        if name in values:
            arguments[name] = _read(hints[name], values[name], where, f"{place}/{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise CheckpointError(f"{place}/{name} is missing", where=where)
    try:
        return kind(**arguments)
    except ValueError as error:
        raise CheckpointError(f"{place} contradicts itself: {error}", where=where) from error


def _read(hint: Any, value: Any, where: str, place: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        hint = next(option for option in options if option is not type(None))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return config_from_metadata(hint, value, where, place)
    if typing.get_origin(hint) is tuple:
        if isinstance(value, (list, tuple)):
            of = typing.get_args(hint)[0]
            return tuple(_read(of, item, where, f"{place}/{index}") for index, item in enumerate(value))
    elif hint is float and type(value) is int:
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise CheckpointError(
        f"{place} is malformed",
        where=where,
        expected=getattr(hint, "__name__", str(hint)),
        found=repr(value)[:80],
    )
