"""Staging: run a function once on staged values and record what its ops would do, as a `Program`.

A staged value knows its shape and dtype and nothing else, so whatever needs more (a torch function, a Python branch,
a captured tensor) is an error that names the user's line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

import torch

from atbx.core import trees
from atbx.core.abstract import Abstract, Dim, tag_of
from atbx.core.donation import refuse_donated
from atbx.core.errors import BucketError, StagingError
from atbx.core.op import Op, interpreter
from atbx.core.program import Atom, Equation, Literal, Program, Var

LARGEST_CONSTANT = 1024
"""Elements that a captured tensor may have to become a constant of the program; a larger one must be an argument."""

operators: dict[str, Callable[..., Any]] = {}
"""Functions behind the operators of staged values ("add", "getitem", ...), entered by the room of the ops."""

_scope: ContextVar[str] = ContextVar("atbx_scope", default="")


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Label what is staged inside the block, e.g. `scope("layers/3")`; explanations and profiles group by it."""
    outer = _scope.get()
    token = _scope.set(f"{outer}/{name}" if outer else name)
    try:
        yield
    finally:
        _scope.reset(token)


def user_line() -> str:
    """File, line and function of the innermost frame outside atbx's core and ops."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("atbx.core", "atbx.ops", "optree", "contextlib", "torch.")):
            code = frame.f_code
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "<unknown>"


def _refuse(what: str, hint: str) -> NoReturn:
    raise StagingError(what, where=user_line(), hint=hint)


def _binary(name: str, reflected: bool = False) -> Callable[[Staged, Any], Any]:
    def operate(self: Staged, other: Any) -> Any:
        function = operators[name]
        return function(other, self) if reflected else function(self, other)

    return operate


class Staged:
    """A value while a function is staged: a shape and a dtype, and the operators `+ - * / @ [] < <= > >= == !=`."""

    __slots__ = ("trace", "var")

    def __init__(self, var: Var, trace: Trace) -> None:
        self.var, self.trace = var, trace

    @property
    def abstract(self) -> Abstract:
        """Shape and dtype."""
        return self.var.abstract

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.var.abstract.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.var.abstract.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"Staged({self.abstract})"

    __add__, __radd__ = _binary("add"), _binary("add", reflected=True)
    __sub__, __rsub__ = _binary("subtract"), _binary("subtract", reflected=True)
    __mul__, __rmul__ = _binary("multiply"), _binary("multiply", reflected=True)
    __truediv__, __rtruediv__ = _binary("divide"), _binary("divide", reflected=True)
    __matmul__, __rmatmul__ = _binary("matmul"), _binary("matmul", reflected=True)
    __getitem__ = _binary("getitem")
    __lt__, __le__ = _binary("less"), _binary("less_equal")
    __gt__, __ge__ = _binary("less", reflected=True), _binary("less_equal", reflected=True)
    __eq__, __ne__ = _binary("equal"), _binary("not_equal")
    __hash__ = object.__hash__

    def __neg__(self) -> Any:
        return operators["multiply"](self, -1)

    def __bool__(self) -> NoReturn:
        _refuse(
            f"a Python branch needs the value of {self!r}, which is not known while staging",
            "Use ops.where, or make what the branch depends on a static argument",
        )

    def __iter__(self) -> NoReturn:
        _refuse(f"{self!r} cannot be iterated while staging", "Use ops.split, or index it")

    def __len__(self) -> int:
        return int(self.shape[0])

    def _no_value(self, *args: Any) -> NoReturn:
        _refuse(f"the value of {self!r} is not known while staging", "Keep it a value, or pass it as static")

    __int__ = __float__ = __index__ = __complex__ = __array__ = item = tolist = _no_value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(func, "__name__", str(func))
        _refuse(f"torch.{name} was applied to a staged value", "Use the op of atbx.ops, or atbx.define_op")

    def __getattr__(self, name: str) -> NoReturn:
        # Attribute probes of Python itself must see AttributeError, not a staging error.
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"a staged value has no attribute {name!r} ({user_line()}); it has shape, dtype, ndim and operators"
        )


class Trace:
    """The staging interpreter: records each op as an equation."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.constants: dict[int, tuple[Var, torch.Tensor]] = {}
        self._captured: list[torch.Tensor] = []

    def atom(self, value: Any, op: Op) -> Atom:
        """The atom of an operand."""
        if isinstance(value, Staged):
            if value.trace is not self:
                _refuse(
                    f"{op.name} got a value that was staged by another call",
                    "A value must not outlive the function that made it",
                )
            return value.var
        if isinstance(value, Dim):
            raise BucketError(
                f"{op.name} got the padded size {int(value)} of bucketed axis {value.tag!r} as a number",
                where=user_line(),
                hint="Use the count argument: the size depends on the bucket, so the result would too",
            )
        if value is None or isinstance(value, (bool, int, float)):
            return Literal(value)
        if isinstance(value, torch.Tensor):
            return self.constant(value, op)
        _refuse(f"{op.name} got a {type(value).__name__}", "Operands are values, tensors, numbers or None")

    def constant(self, tensor: torch.Tensor, op: Op) -> Var:
        """A small captured tensor as a constant; a large one is refused."""
        refuse_donated(tensor, f"a tensor captured at {user_line()}")
        if tensor.numel() > LARGEST_CONSTANT:
            _refuse(
                f"{op.name} got a tensor {tuple(tensor.shape)} that the function captured",
                "Pass it as an argument: a captured tensor would be copied into every compiled variant",
            )
        if id(tensor) not in self.constants:
            # A copy, so that a later change of the tensor cannot change one variant and not another.
            self.constants[id(tensor)] = (Var(Abstract(tuple(tensor.shape), tensor.dtype)), tensor.clone())
            # Kept alive while staging: the next temporary tensor could otherwise be given the same id.
            self._captured.append(tensor)
        return self.constants[id(tensor)][0]

    def apply(self, op: Op, operands: tuple[Any, ...], params: dict[str, Any]) -> Any:
        inputs = tuple(self.atom(x, op) for x in operands)
        abstracts: tuple[Any, ...] = tuple(x.abstract if isinstance(x, Var) else x.value for x in inputs)
        source = user_line()
        try:
            shapes = op.shape(*abstracts, **params)
        except (ValueError, TypeError) as error:
            # The traceback ends in a shape rule; the user wants the line that called the op.
            error.add_note(f"while staging {op.name} at {source}") if hasattr(error, "add_note") else None
            raise
        for operand, axis in op.mixes(*abstracts, **params):
            tag = tag_of(abstracts[operand].shape[axis])
            if tag is not None:
                raise BucketError(
                    f"{op.name} mixes along axis {axis} of operand {operand}, which is padded to bucket {tag!r}",
                    where=source,
                    hint="Give the op the count of real entries (counts=...), or keep that axis out of the buckets",
                )
        several = isinstance(shapes, tuple)
        outputs = tuple(Var(a) for a in (shapes if isinstance(shapes, tuple) else (shapes,)))
        self.equations.append(Equation(op, inputs, outputs, params, _scope.get(), source))
        staged = tuple(Staged(v, self) for v in outputs)
        return staged if several else staged[0]

    def input(self, abstract: Abstract, path: str) -> Staged:
        """A staged program input."""
        return Staged(Var(abstract, path), self)

    def finish(self, inputs: Sequence[Staged], outputs: Sequence[Any], paths: Sequence[str]) -> Program:
        """The program, given its inputs and its flat outputs (with paths for error messages)."""
        atoms: list[Atom] = []
        for value, path in zip(outputs, paths, strict=True):
            if isinstance(value, Staged):
                if value.trace is not self:
                    raise StagingError(
                        f"output {path or 'result'} was staged by another call",
                        hint="A value must not outlive the function that made it",
                    )
                atoms.append(value.var)
            elif isinstance(value, (bool, int, float)):
                atoms.append(Literal(value))
            elif isinstance(value, torch.Tensor):
                raise StagingError(
                    f"output {path} is a torch tensor, not a value computed from the arguments",
                    hint="Return values that come from ops",
                )
            else:
                raise StagingError(f"output {path} is a {type(value).__name__}, not a value or a number")
        constants = tuple(self.constants.values())
        return Program(tuple(s.var for s in inputs), tuple(self.equations), tuple(atoms), constants)


def stage_flat(
    function: Callable[[list[Staged]], Any], abstracts: Sequence[Abstract], paths: Sequence[str]
) -> tuple[Program, trees.TreeDef]:
    """Stage a function of a list of values; returns the program and the structure of its result."""
    trace = Trace()
    inputs = [trace.input(a, p) for a, p in zip(abstracts, paths, strict=True)]
    with interpreter(trace):
        result = function(inputs)
    out_paths, outputs, treedef = trees.flatten_with_paths(result)
    return trace.finish(inputs, outputs, out_paths), treedef
