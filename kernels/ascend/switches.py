"""Environment variables of torch_npu that change how a plan runs, each with what its value does to this plan.

What is refused and what is merely slow was read in torch_npu 2.13.0 and in its documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SEVERITIES = ("ok", "slow", "refused")


@dataclass(frozen=True)
class Switch:
    """A variable, its value (None: not set), what that does to the plan, and how bad it is (of `SEVERITIES`)."""

    name: str
    value: str | None
    effect: str
    severity: str = "ok"


def switches(
    environment: Mapping[str, str], execution: str, launches: int, updates: int
) -> tuple[Switch, ...]:
    """The three variables as they are in `environment`.

    execution: "graph" or "eager". launches, updates: of one step of the plan.
    """
    blocking = _is_blocking(environment.get("ASCEND_LAUNCH_BLOCKING"))
    return (
        _task_queue(environment.get("TASK_QUEUE_ENABLE"), execution, launches, updates, blocking),
        _allocator(environment, execution),
        _launch_blocking(environment.get("ASCEND_LAUNCH_BLOCKING"), execution, launches),
    )


def _is_blocking(value: str | None) -> bool:
    return value is not None and value.strip() == "1"


def _task_queue(value: str | None, execution: str, launches: int, updates: int, is_blocking: bool) -> Switch:
    name = "TASK_QUEUE_ENABLE"
    level = "1" if value is None else value.strip()
    if level not in ("0", "1", "2"):
        return Switch(name, value, "torch_npu stops: it takes 0, 1 or 2", "refused")
    if is_blocking:
        return Switch(name, value, "has no effect: ASCEND_LAUNCH_BLOCKING=1 turns the queue off")
    if execution == "graph":
        if level == "2":
            return Switch(name, value, "torch_npu refuses graph capture at level 2: set 1", "refused")
        way = "without a queue" if level == "0" else "through a queue of a second thread"
        return Switch(
            name,
            value,
            f"a replay is one launch whatever it is; capture and {updates} length updates a step go {way}",
        )
    if level == "0":
        return Switch(
            name, value, f"off: Python waits for each of {launches} launches a step to be prepared", "slow"
        )
    more = ", their workspaces too (more memory at the peak)" if level == "2" else ""
    return Switch(name, value, f"{launches} launches a step are prepared by a second thread{more}")


def _allocator(environment: Mapping[str, str], execution: str) -> Switch:
    name = "PYTORCH_NPU_ALLOC_CONF"
    value = environment.get(name)
    if value is not None and environment.get("PYTORCH_ALLOC_CONF") is not None:
        return Switch(
            name, value, "torch_npu stops: PYTORCH_ALLOC_CONF is set too, and only one may be", "refused"
        )
    found = {
        key.strip(): setting.strip().lower()
        for key, colon, setting in (part.partition(":") for part in (value or "").split(","))
        if colon
    }
    grows = found.get("expandable_segments") == "true"
    if grows and ("max_split_size_mb" in found or "garbage_collection_threshold" in found):
        return Switch(
            name,
            value,
            "torch_npu stops: expandable_segments excludes max_split_size_mb and garbage_collection_threshold",
            "refused",
        )
    if execution == "graph" and found.get("pin_memory_expandable_segments") == "true":
        return Switch(
            name, value, "torch_npu refuses graph capture with pin_memory_expandable_segments", "refused"
        )
    where = (
        "graphs share one pool and a replay allocates nothing"
        if execution == "graph"
        else ("every step allocates its intermediate values from cached blocks")
    )
    how = (
        "segments grow, so buckets of many sizes leave fewer gaps"
        if grows
        else (
            "segments have fixed sizes: expandable_segments:True leaves fewer gaps where many sizes are captured"
            if execution == "graph"
            else "segments have fixed sizes"
        )
    )
    return Switch(name, value, f"{where}; {how}")


def _launch_blocking(value: str | None, execution: str, launches: int) -> Switch:
    name = "ASCEND_LAUNCH_BLOCKING"
    if value is not None and value.strip() not in ("0", "1"):
        return Switch(name, value, "torch_npu stops: it takes 0 or 1", "refused")
    if not _is_blocking(value):
        return Switch(name, value, "launches return at once, as this plan wants")
    if execution == "graph":
        return Switch(
            name,
            value,
            "graphs cannot be captured from launches that wait: unset it, or run eagerly",
            "refused",
        )
    return Switch(
        name, value, f"the host waits for the device after each of {launches} launches a step", "slow"
    )
