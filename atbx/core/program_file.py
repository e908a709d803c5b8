"""Saving programs: a `Program` as plain data that JSON holds, and back, equal to the bit.

Values are numbered in the order in which they appear. Everything that JSON has no form for (tuples, dtypes, frozen
dataclasses, bucketed sizes, numbers that are not finite) is a map with one telling key; classes are named and must be
handed to the reader, so that a file never decides what is imported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from atbx.core.abstract import Abstract, Dim
from atbx.core.errors import AtbxError
from atbx.core.op import Op
from atbx.core.program import Atom, Equation, Literal, Program, Var

FORMAT = 1
"""Number of this form; a reader refuses every other."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes the integers that stand for a constant's entries."""


def to_data(program: Program) -> dict[str, Any]:
    """`program` as maps, lists, strings and numbers.

    Raises:
        AtbxError: a param is of a kind that cannot be saved (a function, say); names its place.
    """
    numbers: dict[Var, int] = {}

    def made(var: Var, where: str) -> dict[str, Any]:
        numbers[var] = len(numbers)
        abstract = {
            "shape": [_saved(n, f"{where}/shape") for n in var.abstract.shape],
            "dtype": _dtype_name(var.abstract.dtype),
            "axes": None if var.abstract.axes is None else list(var.abstract.axes),
            "layout": var.abstract.layout,
            "init": var.abstract.init,
        }
        return {**abstract, "path": var.path} if var.path else abstract

    def atom(value: Atom, where: str) -> dict[str, Any]:
        if isinstance(value, Var):
            return {"value": numbers[value]}
        return {"literal": _saved(value.value, where)}

    return {
        "format": FORMAT,
        "inputs": [made(var, f"inputs/{i}") for i, var in enumerate(program.inputs)],
        "constants": [
            {**made(var, f"constants/{i}"), "bits": _bits(tensor)}
            for i, (var, tensor) in enumerate(program.constants)
        ],
        "equations": [
            {
                "op": e.op.name,
                "inputs": [atom(x, f"equations/{i}/inputs/{j}") for j, x in enumerate(e.inputs)],
                "outputs": [made(v, f"equations/{i}/outputs/{j}") for j, v in enumerate(e.outputs)],
                "params": {k: _saved(v, f"equations/{i}/params/{k}") for k, v in e.params.items()},
                "scope": e.scope,
                "source": e.source,
            }
            for i, e in enumerate(program.equations)
        ],
        "outputs": [atom(x, f"outputs/{i}") for i, x in enumerate(program.outputs)],
    }


def from_data(data: Mapping[str, Any], ops: Mapping[str, Op], classes: Iterable[type] = ()) -> Program:
    """The program that `to_data` gave `data` for.

    ops:     ops by name, e.g. `registered_ops()`.
    classes: frozen dataclasses that params may be of.

    Raises:
        AtbxError: `data` is no saved program, or names an op or class that was not given; names the place.
    """
    reader = _Reader(ops, {cls.__qualname__: cls for cls in classes})
    found = reader.field(data, "format", int, "")
    if found != FORMAT:
        raise AtbxError("a saved program of another format", where="format", expected=FORMAT, found=found)
    inputs = tuple(reader.made(x, f"inputs/{i}") for i, x in enumerate(reader.items(data, "inputs", "")))
    constants = tuple(
        reader.constant(x, f"constants/{i}") for i, x in enumerate(reader.items(data, "constants", ""))
    )
    equations = tuple(
        reader.equation(x, f"equations/{i}") for i, x in enumerate(reader.items(data, "equations", ""))
    )
    outputs = tuple(reader.atom(x, f"outputs/{i}") for i, x in enumerate(reader.items(data, "outputs", "")))
    return Program(inputs, equations, outputs, constants)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bits(tensor: torch.Tensor) -> list[int]:
    words = _WORDS[min(tensor.dtype.itemsize, 8)]
    bits: list[int] = tensor.detach().cpu().contiguous().reshape(-1).view(words).tolist()
    return bits


def _saved(value: Any, where: str) -> Any:
    """A param or literal as data."""
    if isinstance(value, Dim):
        return {"dim": int(value), "tag": value.tag}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is tuple:
        return {"tuple": [_saved(item, f"{where}/{i}") for i, item in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": _dtype_name(value)}
    params: Any = getattr(value, "__dataclass_params__", None)
    if params is not None and params.frozen and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {
            "class": type(value).__qualname__,
            "fields": {name: _saved(item, f"{where}/{name}") for name, item in fields.items()},
        }
    raise AtbxError(
        "a value that cannot be saved",
        where=where,
        expected="None, numbers, strings, tuples, dtypes or frozen dataclasses",
        found=type(value).__name__,
    )


def _damaged(where: str, expected: object, found: object) -> NoReturn:
    raise AtbxError("a damaged saved program", where=where, expected=expected, found=repr(found))


class _Reader:
    """Reads the parts of one saved program; numbers its values as they appear."""

    def __init__(self, ops: Mapping[str, Op], classes: Mapping[str, type]) -> None:
        self._ops, self._classes = ops, classes
        self._values: list[Var] = []

    def field(self, data: Any, name: str, kind: type, where: str) -> Any:
        """The entry `name` of a map, which must be of this kind."""
        place = f"{where}/{name}".lstrip("/")
        if not isinstance(data, Mapping):
            _damaged(where or "the whole", "a map", data)
        if name not in data or not isinstance(data[name], kind):
            _damaged(place, f"{name} as a {kind.__name__}", data.get(name))
        return data[name]

    def items(self, data: Any, name: str, where: str) -> list[Any]:
        """The list `name` of a map."""
        found: list[Any] = self.field(data, name, list, where)
        return found

    def dtype(self, name: Any, where: str) -> torch.dtype:
        """A dtype by name."""
        found = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(found, torch.dtype):
            _damaged(where, "the name of a torch dtype", name)
        return found

    def made(self, data: Any, where: str) -> Var:
        """A value where it first appears."""
        sizes = [self.value(n, f"{where}/shape/{i}") for i, n in enumerate(self.items(data, "shape", where))]
        if not all(isinstance(n, int) and n >= 0 for n in sizes):
            _damaged(f"{where}/shape", "sizes", data["shape"])
        axes = data.get("axes")
        if axes is not None and not isinstance(axes, list):
            _damaged(f"{where}/axes", "a list of names", axes)
        dtype = self.dtype(self.field(data, "dtype", str, where), f"{where}/dtype")
        abstract = Abstract(
            tuple(sizes),
            dtype,
            None if axes is None else tuple(axes),
            data.get("layout"),
            self.field(data, "init", str, where),
        )
        var = Var(abstract, data.get("path", ""))
        self._values.append(var)
        return var

    def constant(self, data: Any, where: str) -> tuple[Var, torch.Tensor]:
        """A constant and its entries."""
        var = self.made(data, where)
        bits = self.items(data, "bits", where)
        words = _WORDS[min(var.abstract.dtype.itemsize, 8)]
        try:
            flat = torch.tensor(bits, dtype=words).view(var.abstract.dtype)
            return var, flat.reshape(tuple(map(int, var.abstract.shape)))
        except (RuntimeError, TypeError, ValueError, OverflowError):
            _damaged(f"{where}/bits", f"{var.abstract.numel} entries of {var.abstract.dtype}", bits)

    def atom(self, data: Any, where: str) -> Atom:
        """An operand: a value that appeared before, or a literal."""
        if isinstance(data, Mapping) and "literal" in data:
            value = self.value(data["literal"], where)
            if value is not None and not isinstance(value, (bool, int, float)):
                _damaged(where, "a number or None", value)
            return Literal(value)
        number = self.field(data, "value", int, where)
        if not 0 <= number < len(self._values):
            _damaged(where, f"one of the {len(self._values)} values before it", number)
        return self._values[number]

    def equation(self, data: Any, where: str) -> Equation:
        """One equation."""
        name = self.field(data, "op", str, where)
        if name not in self._ops:
            raise AtbxError(
                f"a saved program needs the op {name!r}, which is not registered",
                where=f"{where}/op",
                hint="Import the module that defines it before loading",
            )
        inputs = tuple(
            self.atom(x, f"{where}/inputs/{i}") for i, x in enumerate(self.items(data, "inputs", where))
        )
        params = {
            key: self.value(value, f"{where}/params/{key}")
            for key, value in self.field(data, "params", dict, where).items()
        }
        outputs = tuple(
            self.made(x, f"{where}/outputs/{i}") for i, x in enumerate(self.items(data, "outputs", where))
        )
        scope, source = self.field(data, "scope", str, where), self.field(data, "source", str, where)
        return Equation(self._ops[name], inputs, outputs, params, scope, source)

    def value(self, data: Any, where: str) -> Any:
        """A param or literal."""
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if isinstance(data, Mapping):
            if "dim" in data:
                return Dim(self.field(data, "dim", int, where), self.field(data, "tag", str, where))
            if data.get("float") in ("inf", "-inf", "nan"):
                return float(data["float"])
            if "tuple" in data:
                found = self.items(data, "tuple", where)
                return tuple(self.value(item, f"{where}/{i}") for i, item in enumerate(found))
            if "dtype" in data:
                return self.dtype(data["dtype"], where)
            if "class" in data:
                return self._instance(data, where)
        _damaged(where, "a value as to_data writes it", data)

    def _instance(self, data: Any, where: str) -> Any:
        name = self.field(data, "class", str, where)
        if name not in self._classes:
            raise AtbxError(
                f"a saved program holds a {name}, and no such class was given",
                where=where,
                expected=f"one of {sorted(self._classes)}",
                hint="Pass it in classes=(...)",
            )
        fields = self.field(data, "fields", dict, where)
        cls: Any = self._classes[name]
        names = {f.name for f in dataclasses.fields(cls)}
        if set(fields) != names:
            _damaged(f"{where}/fields", sorted(names), sorted(fields))
        # Not through __init__, which may compute fields or refuse what an older release accepted.
        value = object.__new__(cls)
        for key, item in fields.items():
            object.__setattr__(value, key, self.value(item, f"{where}/{key}"))
        return value
