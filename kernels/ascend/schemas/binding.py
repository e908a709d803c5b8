"""Checks a call of an operator against its schemas in several torch_npu releases, by the kinds of its arguments.

The rules are those of torch's own argument parser with the readings left out that it allows and nobody means: a
tensor taken for a number (read back from the device), None for a required tensor, numbers and truth values for each
other. What passes here binds in torch; what is refused here is refused there or is one of those.

A kind is written like a type in a schema: `Tensor`, `int`, `float`, `bool`, `str`, `None`, `dtype`, `device`,
`layout`, `memory_format`, `generator`; `int[]` is a list of ints, `[]` an empty list, `Tensor?` may also be None;
`any` is not checked (the names alone are).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from atbx.core.errors import OptionError
from atbx.kernels.ascend.schemas import reader

# The kinds that each type of a schema takes; `int` takes a dtype because torch stores one as its number.
_TAKES = {
    "Tensor": {"Tensor"},
    "int": {"int", "dtype"},
    "SymInt": {"int"},
    "float": {"float", "int"},
    "bool": {"bool"},
    "str": {"str"},
    "Scalar": {"float", "int", "bool"},
    "ScalarType": {"dtype", "int"},
    "Device": {"device"},
    "Layout": {"layout"},
    "MemoryFormat": {"memory_format"},
    "Generator": {"generator"},
}
_KIND = re.compile(
    r"None|any|(?:(?:Tensor|int|float|bool|str|dtype|device|layout|memory_format|generator)\??(?:\[\])?|\[\])\??"
)
_VALUE_KINDS = (  # in this order: a bool is an int too
    (torch.Tensor, "Tensor"),
    (bool, "bool"),
    (int, "int"),
    (float, "float"),
    (str, "str"),
    (torch.dtype, "dtype"),
    (torch.device, "device"),
    (torch.layout, "layout"),
    (torch.memory_format, "memory_format"),
    (torch.Generator, "generator"),
)


def check_call(
    operator: str, args: Sequence[str], kwargs: Mapping[str, str], versions: str | Iterable[str]
) -> list[str]:
    """What keeps a call from binding in each of the releases; empty if it binds in all and means the same in all.

    operator: `npu::npu_x`, `atb::npu_x.out`; without overload, the call may bind to any of them. `aten::` operators
    are checked against the installed torch. args, kwargs: the kinds of the arguments. A call that relies on a default
    which differs between the given releases, or fills a place whose name differs, is reported as well.
    Raises OptionError for a malformed kind or a release without a data file.
    """
    for kind in (*args, *kwargs.values()):
        if _KIND.fullmatch(kind) is None:
            raise OptionError(
                "not a kind of argument",
                where=operator,
                expected="a kind such as Tensor, int, int[], str?",
                found=kind,
            )
    asked = [versions] if isinstance(versions, str) else list(versions)
    if operator.startswith("aten::"):
        return _problems(f"torch {torch.__version__}", _aten_overloads(operator), operator, args, kwargs)
    problems = []
    bound: dict[str, torch._C.FunctionSchema] = {}
    for version in asked:
        if not _has(version, operator):
            problems.append(_absent(version, operator))
            continue
        candidates = [overload.parsed for overload in reader.overloads(version, operator)]
        found = _problems(f"torch_npu {version}", candidates, operator, args, kwargs)
        problems += found
        if not found:
            bound[version] = next(schema for schema in candidates if not _mismatches(schema, args, kwargs))
    return problems + _changes_of_meaning(operator, args, kwargs, bound)


def check_keywords(operator: str, keywords: Iterable[str], versions: str | Iterable[str]) -> list[str]:
    """Which of these argument names the operator lacks in each of the releases; nothing else is checked."""
    asked = [versions] if isinstance(versions, str) else list(versions)
    wanted = list(keywords)
    found = []
    for version in asked:
        if not _has(version, operator):
            found.append(_absent(version, operator))
            continue
        names = [
            {a.name for a in overload.parsed.arguments} for overload in reader.overloads(version, operator)
        ]
        lacking = min(([name for name in wanted if name not in held] for held in names), key=len)
        found += [f"torch_npu {version}: {operator}: has no argument '{name}'" for name in lacking]
    return found


def kind_of(value: object) -> str:
    """The kind of a value as `check_call` takes it; OptionError if no operator takes such a value."""
    if value is None:
        return "None"
    for kind_type, kind in _VALUE_KINDS:
        if isinstance(value, kind_type):
            return kind
    if isinstance(value, list | tuple):
        kinds = {kind_of(item) for item in value}
        optional = "?" if "None" in kinds else ""
        kinds -= {"None"}
        if kinds == {"int", "float"}:
            kinds = {"float"}
        if len(kinds) == 1 and (kind := kinds.pop()) and not kind.endswith("]"):
            return f"{kind}{optional}[]"
        if not value:
            return "[]"
    raise OptionError(
        "no operator takes such an argument",
        expected="a tensor, number, string, dtype or list",
        found=repr(value)[:80],
    )


def _has(version: str, operator: str) -> bool:
    try:
        return bool(reader.overloads(version, operator))
    except OptionError:
        if version not in reader.releases():
            raise
        return False


def _absent(version: str, operator: str) -> str:
    have = ", ".join(reader.in_versions(operator)) or "no release known here"
    return f"torch_npu {version}: no operator {operator} (it is in {have})"


def _aten_overloads(operator: str) -> list[torch._C.FunctionSchema]:
    base, _, overload = operator.partition(".")
    found: list[torch._C.FunctionSchema] = torch._C._jit_get_schemas_for_operator(base)
    wanted = "" if overload == "default" else overload
    return [schema for schema in found if not overload or schema.overload_name == wanted]


def _problems(
    where: str,
    candidates: Sequence[torch._C.FunctionSchema],
    operator: str,
    args: Sequence[str],
    kwargs: Mapping[str, str],
) -> list[str]:
    """Nothing if one of the overloads takes the call; otherwise what the overload that is nearest refuses."""
    if not candidates:
        return [f"{where}: no operator {operator}"]
    refused = [(_mismatches(schema, args, kwargs), schema) for schema in candidates]
    mismatches, nearest = min(refused, key=lambda pair: len(pair[0]))
    name = nearest.name + (f".{nearest.overload_name}" if nearest.overload_name else "")
    return [f"{where}: {name}: {mismatch}" for mismatch in mismatches]


def _mismatches(schema: torch._C.FunctionSchema, args: Sequence[str], kwargs: Mapping[str, str]) -> list[str]:
    """Why the call does not bind to this overload, one line a reason."""
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    by_name = {argument.name: argument for argument in schema.arguments}
    found = []
    if len(args) > len(positional):
        extra = len(args) - len(positional)
        next_names = ", ".join(argument.name for argument in schema.arguments[len(positional) :][:extra])
        found.append(
            f"takes {len(positional)} positional arguments, {len(args)} are given"
            + (f" (by keyword only: {next_names})" if next_names else "")
        )
    given = dict(zip((argument.name for argument in positional), args, strict=False))
    for name, kind in kwargs.items():
        if name not in by_name:
            found.append(f"has no argument '{name}'; it has {', '.join(by_name)}")
        elif name in given:
            found.append(f"argument '{name}' is given by position and by keyword")
        else:
            given[name] = kind
    for argument in schema.arguments:
        if argument.name in given:
            written, kind = reader.type_as_written(argument.real_type), given[argument.name]
            if not _takes(written, kind, _fixed_length(argument)):
                found.append(f"argument '{argument.name}' is {written}, given {kind}")
        elif not argument.has_default_value():
            found.append(f"argument '{argument.name}' is missing")
    return found


def _fixed_length(argument: torch._C.Argument) -> int | None:
    """The N of a type such as `int[N]`; torch's own declaration of `Argument` leaves it out."""
    length: int | None = argument.N  # type: ignore[attr-defined]
    return length


def _takes(written: str, kind: str, size: int | None) -> bool:
    """Whether an argument of a type (`SymInt[]?`) takes a value of a kind.

    size: the length of a list of fixed length; one of numbers also takes a single one for all its entries.
    """
    if kind == "any":
        return True
    optional = written.endswith("?")
    if kind == "None":
        return optional
    if kind.endswith("?"):
        return optional and _takes(written, kind[:-1], size)
    inner = written.removesuffix("?")
    if not inner.endswith("[]"):
        return kind in _TAKES.get(inner, {inner})
    if kind.endswith("[]"):
        return kind == "[]" or _takes(inner[:-2], kind[:-2], None)
    return size is not None and kind == inner[:-2] and kind in ("int", "float")


def _changes_of_meaning(
    operator: str,
    args: Sequence[str],
    kwargs: Mapping[str, str],
    bound: Mapping[str, torch._C.FunctionSchema],
) -> list[str]:
    """Defaults that the call relies on, and names of the places that it fills, where they differ by release."""
    found = []
    names = {version: [argument.name for argument in schema.arguments] for version, schema in bound.items()}
    for place in range(len(args)):
        by_version = {version: names[version][place] for version in bound}
        if len(set(by_version.values())) > 1:
            found.append(f"{operator}: argument {place} has different names: {_told(by_version)}")
    defaults: dict[str, dict[str, object]] = {}
    for version, schema in bound.items():
        for argument in schema.arguments[len(args) :]:
            if argument.name not in kwargs and argument.has_default_value():
                defaults.setdefault(argument.name, {})[version] = argument.default_value
    for name, values in defaults.items():
        if len({repr(value) for value in values.values()}) > 1:
            found.append(
                f"{operator}: the default of '{name}' differs, so it has to be given: {_told(values)}"
            )
    return found


def _told(by_version: Mapping[str, object]) -> str:
    return ", ".join(f"{value!r} in {version}" for version, value in by_version.items())
