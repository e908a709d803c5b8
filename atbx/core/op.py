"""Ops and the interpreter in force: calling an op asks the interpreter of the current context to apply it.

As in JAX's autodidax2 the interpreter is found by context (a context variable), never by operand types:
the same model function runs, is staged, is shaped, or runs by its reference rules, and none of them is a special case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from atbx.core.abstract import Abstract
from atbx.core.donation import refuse_donated
from atbx.core.errors import AtbxError, StagingError

Shapes = Abstract | tuple[Abstract, ...]


@dataclass(frozen=True)
class Cost:
    """Work of one equation: floating point operations, and bytes read and written."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def traffic(operands: Iterable[Any], results: Iterable[Abstract]) -> int:
    """Bytes of every operand read once and every result written once."""
    read = sum(a.nbytes for a in operands if isinstance(a, Abstract))
    return read + sum(a.nbytes for a in results)


def _traffic_only(operands: tuple[Any, ...], results: tuple[Abstract, ...], **params: Any) -> Cost:
    return Cost(0.0, traffic(operands, results))


def _copy_shape(x: Abstract) -> Abstract:
    return Abstract(x.shape, x.dtype)


def _mixes_nothing(*operands: Any, **params: Any) -> Iterable[tuple[int, int]]:
    return ()


@dataclass(frozen=True, eq=False)
class Op:
    """A functional op: one meaning, given by its reference rule.

    name:      unique name; what a program prints.
    shape:     shape rule, `shape(*operands, **params)` over Abstract operands (None and Python scalars pass
               through as they are) to an Abstract, or to a tuple of them for an op with several results.
               Raises ShapeError or DTypeError for operands that do not fit.
    reference: reference rule in plain torch, same signature over tensors. It states accumulation and result
               dtype. It never writes to its operands.
    cost:      cost rule, `cost(operands, results, **params)` to a `Cost`.
    updates:   pairs (operand index, result index): that result is the operand's value after an update, so a
               backend may write it in place when nothing else needs the old value.
    views:     results may share the memory of operand 0 (reshape, slices, a cast to the dtype it has).
    mixes:     `mixes(*operands, **params)` yields (operand index, axis) for each axis along which entries
               influence each other; a bucketed axis must not be among them.
    """

    name: str
    shape: Callable[..., Shapes]
    reference: Callable[..., Any]
    cost: Callable[..., Cost] = _traffic_only
    updates: tuple[tuple[int, int], ...] = ()
    views: bool = False
    mixes: Callable[..., Iterable[tuple[int, int]]] = _mixes_nothing
    doc: str = field(default="", compare=False)

    def __call__(self, *operands: Any, **params: Any) -> Any:
        return current_interpreter().apply(self, operands, params)

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def results(self, *operands: Any, **params: Any) -> tuple[Abstract, ...]:
        """The results of the shape rule, always as a tuple."""
        shapes = self.shape(*operands, **params)
        return shapes if isinstance(shapes, tuple) else (shapes,)


class Interpreter(Protocol):
    """What gives an op its effect in a context."""

    def apply(self, op: Op, operands: tuple[Any, ...], params: dict[str, Any]) -> Any:
        """Apply `op`; returns one value, or a tuple where the op has several results."""


_interpreter: ContextVar[Interpreter | None] = ContextVar("atbx_interpreter", default=None)
_default: list[Callable[[], Interpreter]] = []


def set_default_interpreter(factory: Callable[[], Interpreter]) -> None:
    """Name the factory of the interpreter that runs ops outside every context (the backend in use)."""
    _default[:] = [factory]


def current_interpreter() -> Interpreter:
    """The interpreter in force in this context."""
    found = _interpreter.get()
    if found is not None:
        return found
    if not _default:
        raise AtbxError("no backend is loaded, so an op cannot run", hint="import atbx before its parts")
    return _default[0]()


def has_interpreter() -> bool:
    """Whether an interpreter was put in force, so that this is not a plain run."""
    return _interpreter.get() is not None


@contextmanager
def interpreter(which: Interpreter) -> Iterator[Interpreter]:
    """Make `which` the interpreter in force inside a `with` block."""
    token = _interpreter.set(which)
    try:
        yield which
    finally:
        _interpreter.reset(token)


class ShapeInterpreter:
    """Applies shape rules only: values are `Abstract`."""

    def apply(self, op: Op, operands: tuple[Any, ...], params: dict[str, Any]) -> Any:
        return op.shape(*operands, **params)


class ReferenceInterpreter:
    """Applies reference rules to tensors: the meaning of a function, slowly."""

    def apply(self, op: Op, operands: tuple[Any, ...], params: dict[str, Any]) -> Any:
        op.shape(*abstract_operands(op, operands), **params)
        return op.reference(*operands, **params)


def abstract_operand(value: Any) -> Any:
    """An operand as shape rules see it: `Abstract` for tensors, Python scalars and None as they are."""
    if value is None or isinstance(value, (bool, int, float, Abstract)):
        return value
    return Abstract(tuple(value.shape), value.dtype)


def abstract_operands(op: Op, operands: Iterable[Any]) -> tuple[Any, ...]:
    """Operands of an op that runs at once, as shape rules see them.

    Raises:
        DonationError: a tensor was donated to a compiled step.
        StagingError: an operand is of another kind, such as a staged value that outlived its function.
    """
    found: list[Any] = []
    for index, value in enumerate(operands):
        if isinstance(value, torch.Tensor):
            refuse_donated(value, f"operand {index} of {op.name}")
        elif value is not None and not isinstance(value, (bool, int, float, Abstract)):
            raise StagingError(
                f"{op.name} got a {type(value).__name__}",
                where=f"operand {index}",
                expected="a tensor, a number or None",
                found=repr(value),
                hint="A staged value must not outlive the function that made it",
            )
        found.append(abstract_operand(value))
    return tuple(found)


_registry: dict[str, Op] = {}
_registry_lock = threading.Lock()


def register_op(op: Op) -> Op:
    """Enter `op` in the table of ops by name; a second op of one name is refused."""
    with _registry_lock:
        if op.name in _registry:
            raise AtbxError(f"an op named {op.name!r} exists already", where="define_op(name)")
        _registry[op.name] = op
    return op


def registered_ops() -> Mapping[str, Op]:
    """All ops by name."""
    return dict(_registry)


COPY = register_op(
    Op("copy", _copy_shape, lambda x: x.clone(), doc="A visible copy that a plan inserts before an update.")
)
