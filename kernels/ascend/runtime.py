"""The device behind the Ascend backend: torch_npu opened where it is used, and what all executables of a device share.

Process-wide switches of torch_npu (compile mode, internal formats) are set only around the calls that need them and
put back, so a program that uses torch_npu beside atbx finds them as it left them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from atbx.core.abstract import Abstract
from atbx.core.backend import Preparation
from atbx.core.errors import AtbxError, UnsupportedError
from atbx.core.program import Equation
from atbx.kernels.ascend.capability import Environment
from atbx.kernels.ascend.chips import chip

NZ, ND = 29, 2
"""Storage formats: FRACTAL_NZ (blocks of 16 columns, as the cube unit reads them) and plain rows."""

NZ_COLUMNS = 16
"""Columns and rows of an NZ block of 16-bit elements."""

MASK_SIZE = 2048
"""Side of the triangular mask that FIA's compressed causal modes take, whatever the lengths are."""


def torch_npu() -> Any:
    """The module torch_npu, imported.

    Raises:
        UnsupportedError: it is not installed, or its libraries cannot be loaded.
    """
    try:
        return importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "device 'npu' needs torch_npu",
            hint="pip install 'atbx[npu]' beside CANN, or try it without an NPU: atbx.testing.software_npu",
        ) from error
    except ImportError as error:
        raise UnsupportedError(
            "torch_npu is installed but cannot be loaded",
            found=str(error),
            hint="Source CANN's set_env.sh; `atbx doctor` names what is missing",
        ) from error


def npu_module() -> Any:
    """`torch.npu`, which exists once torch_npu is loaded."""
    return getattr(torch, "npu")  # noqa: B009  unknown to type checkers


def is_installed() -> bool:
    """Whether torch_npu is installed; it is not imported."""
    return importlib.util.find_spec("torch_npu") is not None


def installed_version() -> str | None:
    """Version of torch_npu, read from the package's metadata."""
    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return None


class AscendDevice:
    """One NPU: its environment, streams, graph pool and constant tensors."""

    def __init__(self, index: int) -> None:
        self.module = torch_npu()
        self.index = index
        self.device = torch.device("npu", index)
        self.npu = npu_module()
        if not self.npu.is_available() or index >= self.npu.device_count():
            raise UnsupportedError(
                "no such NPU",
                where="device",
                expected=f"npu:0 to npu:{self.npu.device_count() - 1}"
                if self.npu.is_available()
                else "an NPU",
                found=f"npu:{index}",
                hint="`atbx doctor` checks driver, devices and CANN",
            )
        self.npu.set_device(index)
        name = self.npu.get_device_name(index)
        self.environment = Environment(chip(name), self.module.__version__, self._cann())
        self.pool = self.npu.graph_pool_handle()
        self.update_stream = self.npu.Stream(device=self.device)
        self.capture_stream = self.npu.Stream(device=self.device)
        self._constants: dict[Any, torch.Tensor] = {}
        self.lock = threading.RLock()

    def _cann(self) -> str | None:
        # Older releases of torch_npu have no such function; then any CANN is taken for new.
        reader = getattr(self.module.npu.utils, "get_cann_version", None)
        return (reader("CANN") or None) if reader is not None else None

    def free_bytes(self) -> int:
        """Bytes that are free on the device, with those that torch_npu's allocator holds and nobody uses."""
        free, _ = self.npu.mem_get_info(self.device)
        held = self.npu.memory_reserved(self.device) - self.npu.memory_allocated(self.device)
        return int(free + held)

    def causal_mask(self) -> torch.Tensor:
        """Mask [2048, 2048] bool of ones above the diagonal: the form that FIA's causal modes take."""
        key = "causal"
        if key not in self._constants:
            ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool)
            self._constants[key] = ones.triu_(1).to(self.device)
        return self._constants[key]

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around the making of an executable: parameters are packed for this device."""
        token = _building.set(self)
        try:
            with self.npu.device(self.device):
                yield
        finally:
            _building.reset(token)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Around launches: kernels are not compiled anew for every shape, as 310P and 910A do by default.

        They also refuse capture in that mode. The mode from before is put back.
        """
        if self.npu.is_jit_compile_false():
            yield
            return
        self.npu.set_compile_mode(jit_compile=False)
        try:
            yield
        finally:
            self.npu.set_compile_mode(jit_compile=True)

    @contextmanager
    def _internal_format(self) -> Iterator[None]:
        """Allow private formats, which are off by default on A2 and A3; a cast to one is dropped while they are."""
        found = self.module._C._npu_getOption("ALLOW_INTERNAL_FORMAT")
        was_allowed = self.environment.chip.family not in ("A2", "A3") if not found else found == b"enable"
        self.npu.config.allow_internal_format = True
        try:
            yield
        finally:
            self.npu.config.allow_internal_format = was_allowed

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` on the device, contiguous."""
        return tensor.contiguous().to(self.device)

    def as_nz(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight in FRACTAL_NZ.

        Raises:
            UnsupportedError: torch_npu kept the plain format, as it does without a word where formats are off.
        """
        with self.lock, self._internal_format():
            cast = self.module.npu_format_cast(self.place(weight), NZ)
        found = self.module.get_npu_format(cast)
        if found != NZ:
            raise UnsupportedError(
                "torch_npu did not keep the weight's NZ format",
                expected=f"format {NZ}",
                found=f"format {found}",
            )
        return cast


@functools.cache
def open_device(index: int = 0) -> AscendDevice:
    """The NPU of that index, opened once a process.

    Raises:
        UnsupportedError: no torch_npu, no such device, or a chip that the capability table lacks.
    """
    return AscendDevice(index)


def current() -> AscendDevice:
    """The device that launches go to."""
    return open_device(npu_module().current_device())


def building_for() -> AscendDevice:
    """The device that an executable is being made for."""
    found = _building.get()
    if found is None:
        raise AtbxError("a parameter is packed only while an executable is made for a device")
    return found


def nz_weight(equation: Equation, operand: int) -> Preparation:
    """A weight [out, in] on the device: in FRACTAL_NZ where `refuses_nz` says nothing, in plain rows otherwise."""
    abstract = equation.operands[operand]
    is_nz = refuses_nz(abstract) is None
    return _preparation(
        "nz" if is_nz else "rows", lambda device, t: device.as_nz(t) if is_nz else device.place(t)
    )


def rows_of_table() -> Preparation:
    """A table on the device in plain rows, in the program's dtype."""
    return _preparation("rows", lambda device, t: device.place(t))


def device_mark() -> str:
    """What tells packings for one device from those for another in a binding's store."""
    device = _building.get()
    return "" if device is None else f":{device.index}"


def _preparation(name: str, place: Callable[[AscendDevice, torch.Tensor], torch.Tensor]) -> Preparation:
    return Preparation(
        f"ascend.{name}{device_mark()}",
        lambda tensor, abstract: place(building_for(), tensor.to(abstract.dtype)),
    )


def refuses_nz(weight: Abstract) -> str | None:
    """Why a weight [out, in] stays in plain rows, or None: a padded NZ block would be read as if it were whole."""
    unaligned = [int(n) for n in weight.shape if int(n) % NZ_COLUMNS]
    if unaligned:
        return f"NZ blocks are {NZ_COLUMNS} wide, and {unaligned[0]} is no multiple of it"
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return f"NZ weights are float16 or bfloat16, found {weight.dtype}"
    return None


_building: ContextVar[AscendDevice | None] = ContextVar("atbx_ascend_building", default=None)
