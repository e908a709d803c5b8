"""`jit`, `bind` and the other ways to run a function, over the backend that a device names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from atbx import npu_errors
from atbx.checkpoints.leaves import release
from atbx.core import binding as core_binding
from atbx.core import jit as core_jit
from atbx.core import trees
from atbx.core.abstract import abstract_of
from atbx.core.backend import Backend, RunInterpreter
from atbx.core.buckets import Bucket
from atbx.core.errors import StagingError, UnsupportedError
from atbx.core.op import Interpreter, Op, ReferenceInterpreter, ShapeInterpreter, interpreter
from atbx.kernels import ascend, cpu
from atbx.kernels.ascend.failures import set_teller
from atbx.kernels.ascend.interpreter import AscendInterpreter

set_teller(npu_errors)

DEVICES = ("cpu", "npu", "npu:INDEX")


def backend(device: str | Backend = "cpu") -> Backend:
    """The backend of a device; a `Backend` is given back as it is (see `atbx.kernels.ascend.backend` for its options).

    Raises:
        UnsupportedError: no such backend in this version, no torch_npu, or no such NPU.
    """
    if isinstance(device, Backend):
        return device
    kind, _, index = str(device).partition(":")
    if device == "cpu":
        return cpu.backend()
    if kind == "npu" and (not index or index.isdigit()):
        return ascend.backend(index=int(index or 0))
    raise UnsupportedError(
        "no backend for this device", where="device", expected=f"one of {DEVICES}", found=device
    )


def jit(
    function: Callable[..., Any] | None = None,
    *,
    static: Sequence[str] = (),
    donate: Sequence[str] = (),
    buckets: Mapping[str, Bucket] | None = None,
    device: str | Backend = "cpu",
    numerics: str = "fast",
    fallback: str | None = None,
    capacity: int = 256,
    host_results: bool = False,
) -> Any:
    """Compile a pure function once per static shape; usable as a decorator.

    Example:
        >>> tokens = Bucket((("ids", 1),), ladder(64))
        >>> f = atbx.jit(forward, static=("config",), donate=("cache",), buckets={"T": tokens})

    Arguments:
        static: names of arguments that are part of a variant's key: frozen, hashable, compared by value.
        donate: names of arguments whose buffers may be updated in place; using them again raises.
        buckets: name to `Bucket`, axes that are padded to a few sizes; outputs are cut back to the real size.
        device: "cpu", "npu" or "npu:INDEX", or a `Backend`.
        fallback: "report", or "error" to refuse what only a reference rule serves; by default "error" on an NPU, where
            such an op would be slow beyond use, and "report" on the CPU.
        host_results: results come back in host memory, read together with one wait for the device.
        capacity: variants kept at most (least recently used goes first).

    Returns a `Jit` with `.stage`, `.plan`, `.warm`, `.freeze`, `.explain` and `.cache_info`.

    Differs from jax.jit: nothing is differentiated, parameters are bound with `atbx.bind`, shapes are padded to
    buckets, and a miss says which component of the key differs.
    """
    if function is None:
        return functools.partial(
            jit,
            static=static,
            donate=donate,
            buckets=buckets,
            device=device,
            numerics=numerics,
            fallback=fallback,
            capacity=capacity,
            host_results=host_results,
        )
    found = backend(device)
    if fallback is None:
        fallback = "error" if found.name == "npu" else "report"
    return core_jit.Jit(
        function,
        found,
        static=static,
        donate=donate,
        buckets=buckets,
        numerics=numerics,
        fallback=fallback,
        capacity=capacity,
        host_results=host_results,
    )


def bind(params: Any, *, dtype: torch.dtype | None = None) -> core_binding.Binding:
    """Bind a parameter tree for compiled functions: flattened once, packed once, shared by every variant.

    dtype casts floating parameters where they are used. Pages of memory-mapped parameters are handed back to the
    system as soon as a packed copy serves instead.

    Raises:
        BindingError: a leaf is no tensor.
    """
    return core_binding.bind(params, dtype=dtype, release=release)


def eval_shape(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of `function` as a tree of `Abstract`, from arguments that are tensors or Abstract."""
    abstract_args, abstract_kwargs = trees.map_leaves(abstract_of, (args, kwargs))
    with interpreter(ShapeInterpreter()):
        return function(*abstract_args, **abstract_kwargs)


def reference(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of `function` by the reference rules of its ops: its meaning, slowly."""
    with interpreter(ReferenceInterpreter()), torch.no_grad():
        return function(*args, **kwargs)


class _RunWhereOperandsAre:
    """Runs an op on the NPU that one of its operands is on, and on the CPU where none is."""

    def apply(self, op: Op, operands: tuple[Any, ...], params: dict[str, Any]) -> Any:
        devices = {x.device for x in operands if isinstance(x, torch.Tensor) and x.device.type == "npu"}
        if not devices:
            return _on_cpu().apply(op, operands, params)
        if len(devices) > 1:
            raise StagingError(
                f"operands of {op.name} are on several devices",
                expected="one device",
                found=", ".join(sorted(map(str, devices))),
            )
        return _on_npu(devices.pop().index or 0).apply(op, operands, params)


@functools.cache
def _on_cpu() -> RunInterpreter:
    return RunInterpreter(cpu.backend())


@functools.cache
def _on_npu(index: int) -> AscendInterpreter:
    return AscendInterpreter(ascend.backend(index=index), index)


@functools.cache
def run_interpreter() -> Interpreter:
    """The interpreter that runs ops outside every context: on the device of their operands."""
    return _RunWhereOperandsAre()
