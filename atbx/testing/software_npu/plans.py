"""What is known about an operator once: how it computes, what it writes, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from atbx.testing.software_npu.rules import RULES
from atbx.testing.software_npu.rules.registry import LIMITS, Call, first_refusal, limits_of
from atbx.testing.software_npu.views import NZ, NzView, raw_view

# Operators that only make, name or describe memory: nothing of theirs is computed.
_LEFT_ALONE = frozenset(
    [
        "aten::empty",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::as_strided",
        "aten::as_strided_",
        "aten::view",
        "aten::set_",
        "aten::resize_",
        "aten::_resize_output_",
        "aten::record_stream",
        "aten::_local_scalar_dense",
        "aten::is_pinned",
        "aten::_pin_memory",
        "aten::_reshape_alias",
        "aten::unfold",
        "aten::alias",
        "aten::t",
        "aten::detach",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::_has_same_storage_numel",
        "aten::is_set_to",
        "aten::resize_as_",
        "npu::empty_with_swapped_memory",
        "npu::npu_change_data_ptr",
        "npu::get_npu_format",
        "npu::get_storage_size",
        "npu::_npu_get_storage_size",
        "npu::npu_change_data_ptr",
        "npu::npu_format",
        "npu::_npu_storage_resize",
        "npu::copy_memory_",
        "npu::print_npugraph_tensor",
        "npu::save_npugraph_tensor",
        "npu::super_kernel_scope_begin",
        "npu::super_kernel_scope_end",
        "npu::empty_with_format",
        "npu::unsafe_empty_with_format",
    ]
)
_COPIES = frozenset(
    {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::to"}
)
_DYNAMIC = {
    "aten::nonzero": "aclnnNonzero",
    "aten::masked_select": "aclnnMaskedSelect",
    "aten::_unique": "aclnnUnique",
    "aten::_unique2": "aclnnUnique2",
    "aten::unique_consecutive": "aclnnUniqueConsecutive",
    "aten::unique_dim": "aclnnUniqueDim",
    "aten::repeat_interleave": "aclnnRepeatInterleave",
    "aten::index": "aclnnIndex",
    "aten::bincount": "aclnnBincount",
}
_DYNAMIC_OVERLOADS = {"aten::repeat_interleave": ("Tensor", "self_Tensor"), "aten::index": ("Tensor",)}


def is_left_alone(name: str) -> bool:
    """Whether an operator (with its overload) has no bytes to fill."""
    return name.split(".")[0] in _LEFT_ALONE


def _leaves(value: Any) -> list:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _leaves(one)]
    return []


class Plan:
    """One operator overload."""

    def __init__(self, full_name: str) -> None:
        space, rest = full_name.split("::")
        base, _, overload = rest.partition(".")
        self.name = f"{space}::{base}"
        self.overload = overload or "default"
        self.operator = getattr(getattr(getattr(torch.ops, space), base), self.overload)
        self.schema = self.operator._schema
        self.rule = RULES.get(self.name)
        self.needs_rule = space != "aten" and not _has_cpu_kernel(full_name)
        self.limits = bool(limits_of(self.name))
        self._fails_late = any(one.when == "execution" for one in limits_of(self.name))
        self.changes_format = "format" in base
        self.is_copy = self.name in _COPIES
        self.is_random = torch.Tag.nondeterministic_seeded in self.operator.tags
        self.written = frozenset(
            argument.name
            for argument in self.schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        aliases = [one.alias_info for one in self.schema.returns]
        self.is_metadata = bool(aliases) and not self.written and all(one is not None for one in aliases)
        self._returns_new = [one is None for one in aliases]
        self.returns_values = bool(self.schema.returns) and not any(
            "Tensor" in str(one.type) for one in self.schema.returns
        )
        self._names = [argument.name for argument in self.schema.arguments]
        self._tensors = tuple(
            place
            for place, one in enumerate(self.schema.arguments)
            if str(one.type) in ("Tensor", "Optional[Tensor]") and not one.kwarg_only
        )
        self._keyword_only = frozenset(one.name for one in self.schema.arguments if one.kwarg_only)
        self._defaults = {
            one.name: one.default_value for one in self.schema.arguments if one.has_default_value()
        }

    # --- arguments --------------------------------------------------------------------------------------------------

    def bind(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """The call's arguments by schema name, defaults filled, in the schema's order."""
        values = dict(zip(self._names, args, strict=False))
        for name in self._names[len(args) :]:
            values[name] = kwargs[name] if name in kwargs else self._defaults.get(name)
        return values

    def with_tensors(self, args: tuple) -> tuple:
        """The positional arguments with tensors where the dispatcher had turned a number into one.

        It hands such a tensor on as the number again; the real kernel wants a tensor of no axes whose dtype does not
        change that of the result.
        """
        numbers = [
            place
            for place in self._tensors
            if place < len(args) and isinstance(args[place], (int, float, complex))
        ]
        if not numbers:
            return args
        other = next((one for one in args if isinstance(one, torch.Tensor)), None)
        changed = list(args)
        for place in numbers:
            dtype = None if other is None else torch.result_type(other, args[place])
            changed[place] = torch.tensor(args[place], dtype=dtype, device="cpu")
        return tuple(changed)

    def wants_gradient(self, args: tuple) -> bool:
        """Whether autograd would record the call."""
        return torch.is_grad_enabled() and any(
            leaf.requires_grad for value in args for leaf in _leaves(value)
        )

    def device_of(self, args: tuple, kwargs: dict) -> int | None:
        """Index of the device of the call's tensors, or of its argument `device`.

        Raises:
            RuntimeError: tensors of two devices, in the words of torch.
        """
        found: int | None = None
        for value in (*args, *kwargs.values()):
            for leaf in _leaves(value):
                if leaf.device.type != "npu":
                    continue
                if found is None:
                    found = leaf.device.index
                elif found != leaf.device.index and not self.is_copy:
                    raise RuntimeError(
                        f"Expected all tensors to be on the same device, but found at least two devices, "
                        f"npu:{found} and npu:{leaf.device.index}! (when calling {self.name})"
                    )
                elif self.is_copy and leaf.device.index != found:
                    found = min(found, leaf.device.index) if value is not args[0] else found
        if found is None and isinstance(kwargs.get("device"), torch.device):
            found = kwargs["device"].index
        return found

    def has_dynamic_shape(self, args: tuple) -> bool:
        """Whether the shape of the result depends on values."""
        if self.name not in _DYNAMIC:
            return False
        if self.overload not in _DYNAMIC_OVERLOADS.get(self.name, ("default",)):
            return False
        if self.name == "aten::index":
            return any(
                isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
            )
        return True

    def likely_kernel(self) -> str:
        """The aclnn kernel of an operator with a shape that depends on values."""
        return _DYNAMIC[self.name]

    # --- computing --------------------------------------------------------------------------------------------------

    def compute(self, arguments: dict[str, Any]) -> Any:
        """Run the rule, or torch's CPU kernel, on CPU tensors bound by name."""
        positional = [value for name, value in arguments.items() if name not in self._keyword_only]
        keyword = {name: value for name, value in arguments.items() if name in self._keyword_only}
        if self.rule is not None:
            return self.rule.function(*positional, **keyword)
        return self.operator(*positional, **keyword)

    def new_outputs(self, result: Any) -> list[torch.Tensor | None]:
        """The result's tensors in order, None where the schema says that an argument was written."""
        if not self._returns_new:
            return []
        if len(self._returns_new) == 1:
            return _leaves(result) if self._returns_new[0] else []
        found: list[torch.Tensor | None] = []
        for new, one in zip(self._returns_new, result, strict=True):
            found.extend(_leaves(one) if new and _leaves(one) else [None])
        return found

    def step(
        self,
        arguments: dict[str, Any],
        formats: dict[str, int],
        targets: list,
        written: list,
        owners: list[torch.Tensor],
        chip: str,
        cann: str,
    ) -> Callable[[], None]:
        """A function that computes and puts the bytes where torch_npu allocated them; it keeps `owners` alive."""
        opened = {name for name, value in arguments.items() if isinstance(value, NzView)}
        listed = {
            name
            for name, value in arguments.items()
            if isinstance(value, list) and any(isinstance(one, NzView) for one in value)
        }

        def run() -> None:
            present = arguments
            if opened or listed:
                present = dict(arguments)
                for name in opened:
                    present[name] = arguments[name].read()
                for name in listed:
                    present[name] = [
                        one.read() if isinstance(one, NzView) else one for one in arguments[name]
                    ]
            if self._fails_late:
                self._check_execution(present, formats, chip, cann)
            computed = self.compute(present)
            if targets:
                self._store(computed, targets)
            for view, _ in written:
                for name in opened:
                    if arguments[name] is view:
                        view.write(present[name])

        run.owners = owners  # type: ignore[attr-defined]
        return run

    def _check_execution(self, arguments: dict, formats: dict, chip: str, cann: str) -> None:
        from atbx.testing.software_npu.kernels import DeviceFault

        call = Call(self.name, arguments, formats, frozenset(), chip, cann)
        refusal = first_refusal(call, when="execution")
        if refusal is not None:
            raise DeviceFault(refusal[0].code, refusal[1])

    def _store(self, computed: Any, targets: list) -> None:
        if computed is None and self.rule is not None:
            return
        if len(self._returns_new) == 1:
            values = _leaves(computed)
        else:
            values = []
            for new, one in zip(self._returns_new, computed, strict=True):
                values.extend(_leaves(one) if new and _leaves(one) else [None])
        if len(values) != len(targets):
            raise AssertionError(
                f"{self.name}: the rule returned {len(values)} tensors, torch_npu {len(targets)}"
            )
        for value, target in zip(values, targets, strict=True):
            if target is None or value is None:
                continue
            view, nz = target
            if self.rule is None and value.dtype == torch.float64 and view.dtype == torch.float32:
                value = value.float()  # torch_npu says that the device has no double and makes it a float
            if tuple(value.shape) != tuple(view.shape) or value.dtype != view.dtype:
                raise AssertionError(
                    f"{self.name}: the rule gives {tuple(value.shape)} {value.dtype}, "
                    f"torch_npu allocated {tuple(view.shape)} {view.dtype}"
                )
            if nz is not None:
                nz.write(value)
            else:
                view.copy_(value)

    # --- limits -----------------------------------------------------------------------------------------------------

    def refusal(
        self,
        values: dict[str, Any],
        views: dict[int, torch.Tensor],
        is_nz: Callable[[torch.Tensor], bool],
        chip: str,
        cann: str,
    ) -> tuple[int, str] | None:
        """Code and message of the first documented limit that refuses the call, None if it is allowed.

        `views` takes the views that were made, by the identity of their tensors. Limits of every operator look at
        dtypes only and are shown the tensors as they are.
        """
        look = self._see if self.name in LIMITS else lambda tensor, _: tensor
        arguments: dict[str, Any] = {}
        formats: dict[str, int] = {}
        host = set()
        for name, value in values.items():
            arguments[name] = value
            if isinstance(value, torch.Tensor):
                if value.device.type == "npu":
                    arguments[name] = look(value, views)
                    if is_nz(value):
                        formats[name] = NZ
                else:
                    host.add(name)
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                arguments[name] = [look(one, views) for one in value]
        found = first_refusal(Call(self.name, arguments, formats, frozenset(host), chip, cann))
        return None if found is None else (found[0].code, found[1])

    @staticmethod
    def _see(tensor: Any, views: dict[int, torch.Tensor]) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "npu":
            return tensor
        view = views[id(tensor)] = raw_view(tensor)
        return view


def _has_cpu_kernel(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        has(name, "CPU") or has(name, "CompositeImplicitAutograd") or has(name, "CompositeExplicitAutograd")
    )
