"""Every operator of the device: torch_npu's own kernel first, then the bytes.

The kernels that torch_npu registered with the dispatcher are wrapped, whichever thread calls them. A wrapper runs the
real kernel (its checks, its allocations, its launches), then queues a *step* on the stream: a rule, or for aten
operators torch's own CPU kernel, on views of device memory. Steps run when the stream does, so an operator's result
is there when the device would have it and not before.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atbx.testing.software_npu.boundary import Boundary
from atbx.testing.software_npu.plans import Plan, is_left_alone
from atbx.testing.software_npu.views import NZ, NzView, nz_view, raw_view

KERNEL_FAULT = 507015
RULE_FAULT = 507899
_tensor = torch.Tensor


class _Place(threading.local):
    """How deep this thread is inside wrapped kernels."""

    depth = 0


class Kernels:
    """The wrapped kernels of the process, and the steps that wait on streams."""

    def __init__(self, boundary: Boundary, torch_npu: Any) -> None:
        self.boundary = boundary
        self.chip, self.cann = "", ""
        self.active = False
        self.nz_seen = False
        self._npu = torch_npu
        self._stream_of = torch_npu._C._npu_getCurrentRawStreamNoWait
        self._steps: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._place = _Place()
        self._devices: set[int] = set()
        self._library: list[Any] = []
        boundary.connect(self._run_step, self._release_step)

    # --- registration ---------------------------------------------------------------------------------------------

    def install(self) -> int:
        """Wrap every kernel that torch_npu registered; the number of them."""
        libraries: dict[tuple[str, str], Any] = {}
        wrapped = 0
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        for name in torch._C._dispatch_get_all_op_names():
            if not has(name, "PrivateUse1") or is_left_alone(name):
                continue
            # Composite operators of torch that torch_npu runs as one kernel stand under the autograd key too.
            composite = has(name, "CompositeImplicitAutograd") and has(name, "AutogradPrivateUse1")
            for key in ("PrivateUse1", "AutogradPrivateUse1") if composite else ("PrivateUse1",):
                try:
                    kernel = torch.library.get_kernel(name, key)
                except RuntimeError:  # torch_npu registers kernels of some operators that have no schema
                    continue
                place = (name.split("::")[0], key)
                if place not in libraries:
                    libraries[place] = torch._C._dispatch_library("IMPL", *place)
                wrapper = self._wrapper(name, kernel, differentiable=key != "PrivateUse1")
                libraries[place].impl(name, key, wrapper, True)
                wrapped += 1
        self._library = list(libraries.values())
        return wrapped

    def _wrapper(self, name: str, kernel: Any, differentiable: bool) -> Callable:
        place, call = self._place, kernel.call_boxed
        plan: Plan | None = None

        def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal plan
            if plan is None:
                plan = Plan(name)
            if place.depth or not self.active:
                return call(keyset, *plan.with_tensors(args), **kwargs)
            # What autograd records, and views that may copy (contiguous): the operators that they call compute.
            if plan.is_metadata or (differentiable and plan.wants_gradient(args)):
                return call(keyset, *plan.with_tensors(args), **kwargs)
            return self._execute(plan, call, keyset, args, kwargs)

        return run

    # --- one call ---------------------------------------------------------------------------------------------------

    def _execute(self, plan: Plan, call: Callable, keyset: Any, args: tuple, kwargs: dict) -> Any:
        device = plan.device_of(args, kwargs)
        if device is None:
            device = self._npu.npu.current_device()
        if device != self._npu.npu.current_device():
            with self._npu.npu.device(device):
                return self._execute_there(plan, call, keyset, args, kwargs, device)
        return self._execute_there(plan, call, keyset, args, kwargs, device)

    def _execute_there(
        self, plan: Plan, call: Callable, keyset: Any, args: tuple, kwargs: dict, device: int
    ) -> Any:
        stream = self._stream_of(device)
        if plan.has_dynamic_shape(args):
            return self._execute_dynamic(plan, args, kwargs, device, stream)
        values = plan.bind(args, kwargs)
        seed = self._random_state(device) if plan.is_random else None
        views: dict[int, torch.Tensor] = {}
        refusal = plan.refusal(values, views, self._is_nz, self.chip, self.cann) if plan.limits else None
        if refusal is not None:
            self.boundary.arm(*refusal)
        if plan.changes_format:
            self.nz_seen = True
        place = self._place
        place.depth += 1
        try:
            result = call(keyset, *plan.with_tensors(args), **kwargs)
        finally:
            place.depth -= 1
            if refusal is not None:
                self.boundary.disarm()
        if refusal is not None:
            self._report_refusal(plan, stream, device, *refusal)
        if plan.needs_rule and plan.rule is None:
            self.boundary.mark(0, self.boundary.name(plan.name), stream, False)
            self._refuse_without_rule(plan, device)
            return result
        return self._queue(plan, values, views, result, device, stream, seed)

    def _report_refusal(self, plan: Plan, stream: int, device: int, code: int, message: str) -> None:
        """A refusal that this thread did not meet: met in torch_npu's queue, which then says so, or by no call."""
        self.boundary.mark(0, self.boundary.name(plan.name), stream, False)
        self._settle(device)
        raise RuntimeError(
            f"{plan.name}: refused with error code {code}"
            + ("" if self.boundary.refusals() else " (the operator launched nothing)")
            + f"\n{message}"
        )

    def _settle(self, device: int) -> None:
        """Wait until torch_npu's own queue has reached the boundary; raises what failed in it."""
        self._npu._C._npu_getCurrentRawStream(device)

    def _refuse_without_rule(self, plan: Plan, device: int) -> None:
        self._settle(device)
        kernels = [kernel for kernel, operation in self.boundary.launches() if operation == plan.name]
        if kernels:
            raise NotImplementedError(
                f"{plan.name}: the software NPU has no rule for this operator, which launches {kernels[-1]}; "
                "its results would not be computed. Add one in atbx.testing.software_npu.rules"
            )

    def _queue(
        self, plan: Plan, values: dict, views: dict, result: Any, device: int, stream: int, seed: int | None
    ) -> Any:
        pinned_copy = plan.is_copy and bool(values.get("non_blocking"))
        now = False
        arguments: dict[str, Any] = {}
        formats: dict[str, int] = {}
        written: list[tuple[Any, torch.Tensor]] = []
        owners: list[torch.Tensor] = []  # host tensors that the step writes
        for name, value in values.items():
            if isinstance(value, _tensor):
                if value.device.type == "npu":
                    view = None if self.nz_seen or name in plan.written else views.get(id(value))
                    if view is None:
                        view = self._open(name, value, name in plan.written, formats, written)
                    arguments[name] = view
                elif name in plan.written:  # a copy to the host
                    arguments[name] = raw_view(value)
                    owners.append(value)
                    now = not (pinned_copy and value.is_pinned())
                elif plan.is_copy and not pinned_copy:
                    arguments[name] = value
                    now = True
                else:
                    pinned = pinned_copy and self.boundary.is_pinned(value.untyped_storage().data_ptr())
                    arguments[name] = value if pinned else value.clone()
            elif isinstance(value, (list, tuple)) and any(isinstance(one, _tensor) for one in value):
                arguments[name] = [
                    self._open(f"{name}[{place}]", one, name in plan.written, formats, written)
                    if isinstance(one, _tensor) and one.device.type == "npu"
                    else one.clone() if isinstance(one, _tensor) else one
                    for place, one in enumerate(value)
                ]  # fmt: skip
            elif isinstance(value, torch.device):
                arguments[name] = torch.device("cpu")
            elif isinstance(value, torch.Generator):
                arguments[name] = None
            else:
                arguments[name] = value
        if seed is not None and "generator" in arguments:
            arguments["generator"] = torch.Generator().manual_seed(seed)
        if "pin_memory" in arguments:
            arguments["pin_memory"] = None
        if plan.is_copy and "non_blocking" in arguments:
            arguments["non_blocking"] = False
        if plan.returns_values:
            return self._value_now(plan, arguments, stream)
        outputs = plan.new_outputs(result)
        targets: list[tuple[torch.Tensor, NzView | None] | None] = []
        for one in outputs:
            if one is None:
                targets.append(None)
            elif one.device.type == "npu":
                targets.append((raw_view(one), nz_view(one) if self._is_nz(one) else None))
            else:
                targets.append((raw_view(one), None))
                owners.append(one)
                now = now or not (pinned_copy and one.is_pinned())
        step = plan.step(arguments, formats, targets, written, owners, self.chip, self.cann)
        self._devices.add(device)
        number = next(self._numbers)
        self._steps[number] = step
        try:
            self.boundary.mark(number, self.boundary.name(plan.name), stream, True)
        except RuntimeError:
            self._steps.pop(number, None)
            raise
        if now and not self.boundary.is_capturing(stream):
            self._wait_for(stream, device)
        return result

    def _open(
        self, name: str, tensor: torch.Tensor, is_written: bool, formats: dict[str, int], written: list
    ) -> Any:
        """A device tensor as a rule will see it; NZ tensors are put together when the step runs."""
        if self.nz_seen and self._is_nz(tensor):
            formats[name] = NZ
            view = nz_view(tensor)
            if view is not None:
                if is_written:
                    written.append((view, tensor))
                return view
        return raw_view(tensor)

    def _is_nz(self, tensor: torch.Tensor) -> bool:
        return self.nz_seen and self._npu.get_npu_format(tensor) == NZ

    def _value_now(self, plan: Plan, arguments: dict, stream: int) -> Any:
        self.boundary.mark(0, self.boundary.name(plan.name), stream, True)
        self._wait_for(stream, -1)
        return plan.compute(arguments)

    def _wait_for(self, stream: int, device: int) -> None:
        """Have everything done that is queued on the stream, torch_npu's own queue included."""
        here = self._npu.npu.current_device()
        if not self.boundary.is_queue_alive(lambda: self._settle(here)):
            raise RuntimeError(
                "torch_npu's task queue stopped at an earlier failure and drops what it is given: on an NPU the "
                "process ends there. reset() of the software NPU starts it again"
            )
        code = self.boundary.run_stream(stream)
        if code:
            raise RuntimeError(f"the software NPU's stream failed with code {code}: {self.last_fault}")

    def settle_all(self, devices: int) -> None:
        """Wait until torch_npu's queues of all devices have reached the boundary."""
        if not self._npu.npu.is_initialized():
            return
        for device in range(devices):
            with self._npu.npu.device(device):
                self._settle(device)

    def restart_queues(self, devices: int) -> None:
        """Start torch_npu's queues again where a failure stopped them.

        Raises:
            RuntimeError: a queue's thread ended with the failure, which only another process mends.
        """
        if not self._npu.npu.is_initialized():
            return
        for device in range(devices):
            with self._npu.npu.device(device):
                try:
                    alive = self.boundary.is_queue_alive(lambda: self._settle(device))  # noqa: B023
                except RuntimeError:  # a failure that nobody was told of yet
                    alive = False
                if alive:
                    continue
                time.sleep(0.3)  # its thread may be about to end; one that waits for work is kept
                if _queue_threads() < len(self._devices):
                    raise RuntimeError(
                        f"the thread of torch_npu's task queue of npu:{device} ended with a failure, as on an NPU; "
                        "run what makes it fail in a process of its own, or with TASK_QUEUE_ENABLE=0"
                    )
                self._npu._C._npu_restart_device(device)

    def _execute_dynamic(self, plan: Plan, args: tuple, kwargs: dict, device: int, stream: int) -> Any:
        """Operators whose result's shape depends on values: computed at once, as the device must too."""
        if self.boundary.is_capturing(stream) == 1:
            raise RuntimeError(
                f"{plan.name}: its result's shape depends on values, which a captured graph cannot wait for"
            )
        self._wait_for(stream, device)
        kernel = plan.likely_kernel()
        self.boundary.note_launch(kernel, stream)
        self.boundary.mark(0, self.boundary.name(plan.name), stream, False)
        values = plan.bind(args, kwargs)
        arguments = {
            name: value if not isinstance(value, _tensor) or value.device.type != "npu" else raw_view(value)
            for name, value in values.items()
        }
        for name, value in arguments.items():
            if isinstance(value, (list, tuple)):
                arguments[name] = [
                    raw_view(one) if isinstance(one, _tensor) and one.device.type == "npu" else one
                    for one in value
                ]
        computed = plan.compute(arguments)
        outputs = computed if isinstance(computed, (tuple, list)) else (computed,)
        made = []
        for one in outputs:
            fresh = torch.empty(one.shape, dtype=one.dtype, device=f"npu:{device}")
            raw_view(fresh).copy_(one)
            made.append(fresh)
        return made[0] if isinstance(computed, _tensor) else tuple(made)

    # --- limits -----------------------------------------------------------------------------------------------------

    def _random_state(self, device: int) -> int:
        state = self._npu.npu.default_generators[device].get_state()
        seed, offset = (int(word) for word in state[:16].view(torch.int64)) if state.numel() >= 16 else (0, 0)
        return (seed * 6364136223846793005 + offset * 1442695040888963407 + 1) & 0x7FFFFFFFFFFFFFFF

    # --- steps, called from streams -----------------------------------------------------------------------------------

    last_fault = ""

    def _run_step(self, number: int, keep: int) -> int:
        step = self._steps[number] if keep else self._steps.pop(number)
        grad = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                step()
        except DeviceFault as fault:
            self.last_fault = str(fault)
            self.boundary.set_error(str(fault))
            return fault.code
        except BaseException as error:
            self.last_fault = f"{type(error).__name__}: {error}"
            self.boundary.set_error(
                f"software NPU: {self.last_fault}\n{''.join(traceback.format_tb(error.__traceback__)[-2:])}"
            )
            return RULE_FAULT
        finally:
            torch._C._set_grad_enabled(grad)
        return 0

    def _release_step(self, number: int) -> None:
        self._steps.pop(number, None)


def _queue_threads() -> int:
    """How many threads of torch_npu run a task queue."""
    return sum(path.read_text().strip() == "acl_thread" for path in Path("/proc/self/task").glob("*/comm"))


class DeviceFault(Exception):  # noqa: N818  it is a fault of the device, as its logs call it
    """A fault that the device finds while a kernel runs."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
