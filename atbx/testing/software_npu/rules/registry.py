"""The two tables that a software NPU reads: what each operator computes, and what it refuses.

A rule fills an operator's bytes; a limit refuses a call before anything runs. Both are kept by the name under
which the dispatcher knows the operator ("npu::npu_rms_norm", "atb::_npu_paged_attention"), take the operator's
own arguments in the operator's own conventions, and are written from that operator's documents alone, as a
second opinion on whoever calls it. Nothing here imports torch_npu or a kernel of this project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

STATUSES = ("upstream golden ran", "golden skipped upstream", "document only", "disputed")

PARAMETER = 161002  # aclnn: a parameter check failed (EZ1001)
TILING = 561002  # aclnn: tiling refused the shapes (EZ9999)
NO_KERNEL = 561003  # aclnn: no kernel binary for this chip or this CANN (EZ9999)
DEVICE_FAULT = 507015  # runtime: AI-core exception, an address out of range among its causes
ATB_PARAMETER = 1  # ATB: invalid parameter; the numbers are those of atb/types.h
ATB_DTYPE = 6  # ATB: invalid tensor dtype
ATB_DIM = 8  # ATB: invalid tensor dim
ATB_SIZE = 9  # ATB: invalid tensor size

ND, NZ = 2, 29

ANY = "*"

F = TypeVar("F", bound=Callable)


class NotModelledError(NotImplementedError):
    """A rule was given arguments, valid on hardware, whose meaning is not modelled here."""


@dataclass(frozen=True)
class Rule:
    """How one operator fills its results.

    name: dispatcher name without the overload. function: takes the schema's arguments (defaults filled, tensors
    as CPU views), writes arguments marked as written, returns what the schema returns; None for a schema that
    returns a tensor whose bytes mean nothing (a workspace), where torch_npu's own result stands. source: where
    the meaning was read. status: how far anyone proved it, one of STATUSES.
    """

    name: str
    function: Callable
    source: str
    status: str


@dataclass(frozen=True)
class Call:
    """One call as a limit sees it, before anything is launched.

    arguments: by schema name, defaults filled; tensors as CPU views, so strides and values can be read.
    formats: NPU storage format of a tensor argument (2 ND, 29 NZ), absent for ND. host: tensor arguments that
    live in host memory. chip: "Ascend910B3", "Ascend910_9392", "Ascend310P3", "Ascend910A". cann: "9.1.0".
    """

    name: str
    arguments: dict[str, Any]
    formats: dict[str, int]
    host: frozenset[str]
    chip: str
    cann: str

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Name and value of every tensor argument that was given, lists of tensors unfolded."""
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, (list, tuple)):
                for place, item in enumerate(value):
                    if isinstance(item, torch.Tensor):
                        yield f"{name}[{place}]", item


@dataclass(frozen=True)
class Limit:
    """One documented limit of one operator (or of every operator: operator "*").

    check: None if the call is allowed, else the message in the manner of the real log line. when: "launch" is
    refused at once by the call that asks for the workspace; "execution" surfaces as a device fault when the
    stream runs, because the real device checks nothing before.
    """

    operator: str
    name: str
    code: int
    check: Callable[[Call], str | None]
    source: str
    when: str


RULES: dict[str, Rule] = {}
LIMITS: dict[str, list[Limit]] = {}


def rule(*names: str, source: str, status: str) -> Callable[[F], F]:
    """Register a function as the rule of one operator, or of several with the same arguments."""
    if status not in STATUSES:
        raise ValueError(f"rule {names}: status {status!r}; expected one of {STATUSES}")

    def register(function: F) -> F:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = Rule(name, function, source, status)
        return function

    return register


def limit(
    *operators: str, code: int, source: str, when: str = "launch", name: str | None = None
) -> Callable[[F], F]:
    """Register a check as a limit of one operator, or of several; it is named after the function."""
    if when not in ("launch", "execution"):
        raise ValueError(f"limit of {operators}: when={when!r}; expected 'launch' or 'execution'")

    def register(check: F) -> F:
        for operator in operators:
            known = LIMITS.setdefault(operator, [])
            entry = Limit(operator, name or check.__name__, code, check, source, when)
            if any(one.name == entry.name for one in known):
                raise ValueError(f"two limits {entry.name} of {operator}")
            known.append(entry)
        return check

    return register


def limits_of(operator: str) -> list[Limit]:
    """The limits that a call of `operator` meets, in order: those of every operator first."""
    return [*LIMITS.get(ANY, []), *LIMITS.get(operator, [])]


def first_refusal(call: Call, when: str = "launch") -> tuple[Limit, str] | None:
    """The first limit that refuses `call` at that time, and its message; None if the call is allowed."""
    for one in limits_of(call.name):
        if one.when == when:
            message = one.check(call)
            if message is not None:
                return one, message
    return None


# --- messages, in the manner of the lines that CANN logs --------------------------------------------------------

_DTYPE_NAMES = {
    torch.float16: "DT_FLOAT16",
    torch.bfloat16: "DT_BFLOAT16",
    torch.float32: "DT_FLOAT",
    torch.float64: "DT_DOUBLE",
    torch.int8: "DT_INT8",
    torch.uint8: "DT_UINT8",
    torch.int16: "DT_INT16",
    torch.int32: "DT_INT32",
    torch.int64: "DT_INT64",
    torch.bool: "DT_BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that CANN prints for a dtype."""
    return _DTYPE_NAMES.get(dtype, f"DT_{str(dtype).removeprefix('torch.').upper()}")


def op_type(operator: str) -> str:
    """The operator's type name as CANN prints it: "npu::npu_rms_norm" gives "RmsNorm"."""
    words = operator.split("::")[-1].strip("_").removeprefix("npu_").split("_")
    return "".join(word.capitalize() for word in words if word)


def refuse_parameter(call: Call, text: str) -> str:
    """A parameter check of an aclnn operator (161002, EZ1001)."""
    return f"EZ1001: aclnn{op_type(call.name)}: {text}"


def refuse_tiling(call: Call, text: str) -> str:
    """A refusal by an operator's tiling (561002, EZ9999)."""
    kind = op_type(call.name)
    return f"EZ9999: Inner Error! op[{kind}], {text}; Tiling failed, Get shape failed for op [{kind}]"


def refuse_kernel(call: Call, text: str) -> str:
    """A kernel that the chip or the CANN release lacks (561003, EZ9999)."""
    return f"EZ9999: Inner Error! Get kernel failed, op[{op_type(call.name)}] has no binary: {text}"


def device_fault(call: Call, text: str) -> str:
    """An access out of range, found by the hardware while the kernel runs (507015, EZ9999)."""
    return (
        "EZ9999: Inner Error! The error from device, aicore exception, kernel "
        f"{op_type(call.name)}: the DDR address of the MTE instruction is out of range ({text})"
    )


def refuse_atb(call: Call, text: str) -> str:
    """A check of an ATB operation; its setup fails."""
    return f"{op_type(call.name)} setup failed: {text}"


def dtype_refusal(
    call: Call,
    name: str,
    allowed: tuple[torch.dtype, ...],
    write: Callable[[Call, str], str] = refuse_parameter,
) -> str | None:
    """Refuse the tensor argument `name` if it is given and its dtype is not among `allowed`."""
    tensor = call[name]
    if tensor is None or tensor.dtype in allowed:
        return None
    support = ",".join(dtype_name(one) for one in allowed)
    return write(
        call,
        f"Tensor {name} not implemented for {dtype_name(tensor.dtype)}, should be in dtype support list [{support}].",
    )


def contiguity_refusal(
    call: Call, names: Iterable[str], write: Callable[[Call, str], str] = refuse_parameter
) -> str | None:
    """Refuse the first of the tensor arguments `names` that is given and not contiguous."""
    for name in names:
        tensor = call[name]
        if tensor is not None and not tensor.is_contiguous():
            return write(
                call, f"Tensor {name} should be contiguous, but its strides are {list(tensor.stride())}."
            )
    return None
