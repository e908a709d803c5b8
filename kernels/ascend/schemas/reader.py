"""Reads the schema data files: which operators a torch_npu release has, with which arguments.

The operators follow the release of op-plugin, which torch_npu builds of several torch versions share: a data file
stands for every release with the same operators, and `same_operators.json` says which those are. Both are made by
`extract` and never edited by hand. Operators are named as the dispatcher names them,
`npu::npu_mrope` or `atb::npu_ring_mla.out`; a name without overload means the default overload, and where an
operator has none (several `atb::` operators), any of its overloads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from atbx.core.errors import OptionError

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class OperatorSchema:
    """One overload of an operator in one release.

    name: qualified name with overload. text: the schema as registered, with namespace. evidence: where it was read:
    `wheel string` (registration string in a library) or `wheel python` (defined by a Python file of the wheel).
    meta: whether a meta (shape) function is registered by the wheel's Python files.
    """

    version: str
    name: str
    text: str
    evidence: str
    meta: bool

    @property
    def parsed(self) -> torch._C.FunctionSchema:
        """The schema as torch parses it."""
        return _parse(self.text)


@dataclass(frozen=True)
class GraphUpdate:
    """How a captured graph records an operator, and what `NPUGraph.update` can change in the record.

    records: the overload that is captured. positional: update key to the index of a positional argument.
    keywords: keyword-only arguments of that overload; each can be updated by its own name if it was passed at
    capture (a value equal to its default is not recorded).
    """

    version: str
    operator: str
    records: str
    positional: Mapping[str, int]
    keywords: tuple[str, ...]

    @property
    def keys(self) -> frozenset[str]:
        """Every key that can have an effect in `update`."""
        return frozenset(self.positional) | frozenset(self.keywords)


@cache
def versions() -> tuple[str, ...]:
    """The releases of torch_npu with a data file, oldest first; no two of them have the same operators."""
    found = [path.stem.removeprefix("torch_npu-") for path in _FOLDER.glob("torch_npu-*.json")]
    return tuple(sorted(found, key=_release_order))


@cache
def releases() -> dict[str, str]:
    """Every release that was read, with the release whose data file holds its operators, oldest first."""
    same: dict[str, str] = json.loads((_FOLDER / "same_operators.json").read_text())
    known = same | {version: version for version in versions()}
    return {release: known[release] for release in sorted(known, key=_release_order)}


def _release_order(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def schema(version: str, operator: str) -> OperatorSchema:
    """The schema of an operator in a release; OptionError if the release or the operator is not there."""
    return overloads(version, operator)[0]


def overloads(version: str, operator: str) -> tuple[OperatorSchema, ...]:
    """The overloads that a call of `operator` may bind to, the default one first.

    A name with overload (`npu::npu_x.out`; `.default` is the unnamed one) stands for itself alone.
    Raises OptionError if the release or the operator is not there.
    """
    found = _overloads(version, operator)
    if not found:
        elsewhere = [other for other in versions() if _overloads(other, operator)]
        raise OptionError(
            f"torch_npu {version} has no operator {operator}",
            expected=f"a release that has it: {', '.join(elsewhere)}"
            if elsewhere
            else "an operator of npu:: or atb::",
            found=operator,
        )
    return found


@cache
def _overloads(version: str, operator: str) -> tuple[OperatorSchema, ...]:
    names = _data(version)["operators"]
    if operator.endswith(".default"):
        exact = [operator.removesuffix(".default")]
    elif "." in operator:
        exact = [operator]
    else:
        exact = [operator, *sorted(name for name in names if name.startswith(f"{operator}."))]
    return tuple(_read(version, name, names[name]) for name in exact if name in names)


def _read(version: str, name: str, entry: dict[str, Any]) -> OperatorSchema:
    text = f"{name.split('::')[0]}::{entry['schema']}"
    return OperatorSchema(version, name, text, entry["evidence"], entry["meta"])


def operators(version: str) -> tuple[OperatorSchema, ...]:
    """Every operator of `npu::` and `atb::` in a release, with overloads, sorted by name."""
    return tuple(_read(version, name, entry) for name, entry in sorted(_data(version)["operators"].items()))


def in_versions(operator: str) -> tuple[str, ...]:
    """Those of `versions()` that have an operator (any overload, if none is named); empty if none has it."""
    return tuple(version for version in versions() if _overloads(version, operator))


def has_meta(version: str, operator: str) -> bool:
    """Whether the wheel registers a meta function for the operator: without one, tracing needs one of ours."""
    return schema(version, operator).meta


def graph_update_operators(version: str) -> tuple[str, ...]:
    """The operators that a capture with `auto_dispatch_capture=True` records for updating, with overload."""
    return tuple(sorted(_qualified(version, name) for name in _data(version)["graph_updates"]))


def graph_update(version: str, operator: str) -> GraphUpdate | None:
    """How a captured graph updates an operator; None if it is captured with its values fixed.

    operator: with overload or without (the default overload, else the one that is recorded). Places that a handler
    states beyond the positional arguments of the recorded overload have no effect and are left out.
    """
    short = operator.split("::")[-1]
    table = _data(version)["graph_updates"]
    names = [short] if "." in short else [f"{short}.default", f"{short}.out"]
    for name in names:
        if name in table and operator.split("::")[0] == _qualified(version, name).split("::")[0]:
            records = _qualified(version, table[name]["records"])
            arguments = schema(version, records).parsed.arguments
            count = sum(not argument.kwarg_only for argument in arguments)
            positional = {
                key: place for key, place in sorted(table[name]["positions"].items()) if place < count
            }
            keywords = tuple(argument.name for argument in arguments if argument.kwarg_only)
            return GraphUpdate(version, _qualified(version, name), records, positional, keywords)
    return None


def _qualified(version: str, dispatch_name: str) -> str:
    """`npu_x.default` of the handler tables as `npu::npu_x.default`, in the namespace that has it."""
    for space in ("npu", "atb"):
        if _overloads(version, f"{space}::{dispatch_name}"):
            return f"{space}::{dispatch_name}"
    raise OptionError(
        "a graph handler names an unknown operator", where=f"torch_npu {version}", found=dispatch_name
    )


def _data(version: str) -> dict[str, Any]:
    """The data file of a release, with or without a file of its own."""
    if version not in releases():
        raise OptionError(
            "no operator schemas are held for this release of torch_npu",
            expected=f"one of {', '.join(releases())}",
            found=version,
        )
    return _content(releases()[version])


@cache
def _content(version: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((_FOLDER / f"torch_npu-{version}.json").read_text())
    return content


def type_as_written(kind: torch._C.JitType) -> str:
    """A type of torch's schema parser as a schema writes it: `SymInt[]?` where it prints `Optional[List[int]]`."""
    if isinstance(kind, torch.OptionalType):
        return f"{type_as_written(kind.getElementType())}?"
    if isinstance(kind, torch.ListType):
        return f"{type_as_written(kind.getElementType())}[]"
    return "SymInt" if kind.kind() == "SymIntType" else "Scalar" if kind.kind() == "NumberType" else str(kind)


@cache
def _parse(text: str) -> torch._C.FunctionSchema:
    return torch._C.parse_schema(text)
