"""Checks of environment variables: paths that do not exist or disagree, and switches that change how atbx runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from atbx.doctor.findings import Finding, error, note, warning
from atbx.doctor.installation import Installation, is_folder
from atbx.doctor.packages import source_nnal, source_toolkit

ALLOCATOR_KEYS = {
    *("expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "base_addr_aligned_kb"),
    *("page_size", "segment_size_mb", "large_segment_size_mb", "pin_memory_expandable_segments"),
    *("roundup_power2_divisions", "max_non_split_rounding_mb", "pinned_use_background_threads"),
    *("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"),
}
"""Keys of PYTORCH_NPU_ALLOC_CONF that torch_npu 2.13 reads."""


def check_variables(found: Installation) -> Iterator[Finding]:
    """Every variable that matters; nothing where the environment is not known."""
    if found.environ is None:
        yield note(
            "environment.not_known",
            "the environment of the examined folder is not known",
            found.shown(found.root / "etc/environment"),
            "variables and library paths were not checked",
        )
        return
    yield from _check_paths(found)
    yield from _check_visible(found)
    yield from _check_switches(found)


def _check_paths(found: Installation) -> Iterator[Finding]:
    environ = found.environ or {}
    for name, mend in (
        ("ASCEND_HOME_PATH", source_toolkit(found) if found.toolkit is not None else None),
        ("ASCEND_TOOLKIT_HOME", source_toolkit(found) if found.toolkit is not None else None),
        ("ASCEND_OPP_PATH", source_toolkit(found) if found.toolkit is not None else None),
        ("ATB_HOME_PATH", source_nnal(found) if found.nnal is not None else None),
    ):
        value = environ.get(name)
        if value and not is_folder(found.below(value)):
            yield error(
                "environment.no_folder",
                f"{name} names a folder that does not exist",
                name,
                "libraries and kernels are looked for where there are none",
                found=value,
                mend=mend or f"unset {name}",
            )
    home, toolkit = environ.get("ASCEND_HOME_PATH"), environ.get("ASCEND_TOOLKIT_HOME")
    if home and toolkit and _real(found, home) != _real(found, toolkit):
        yield warning(
            "environment.two_toolkits",
            "ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME name different toolkits",
            "ASCEND_TOOLKIT_HOME",
            "libraries of one release load kernels of another",
            expected=home,
            found=toolkit,
            mend=source_toolkit(found) if found.toolkit is not None else "unset ASCEND_TOOLKIT_HOME",
        )
    opp = environ.get("ASCEND_OPP_PATH")
    if (
        opp
        and home
        and is_folder(found.below(opp))
        and not _real(found, opp).startswith(_real(found, home).rstrip("/") + "/")
    ):
        yield warning(
            "environment.other_opp",
            "ASCEND_OPP_PATH lies outside the toolkit",
            "ASCEND_OPP_PATH",
            "kernels may be of another release: 561002, 561003",
            expected=f"{home}/opp",
            found=opp,
            mend=source_toolkit(found) if found.toolkit is not None else "unset ASCEND_OPP_PATH",
        )


def _real(found: Installation, path: str) -> str:
    return os.path.realpath(found.below(path))


def _check_visible(found: Installation) -> Iterator[Finding]:
    name = "ASCEND_RT_VISIBLE_DEVICES"
    value = (found.environ or {}).get(name)
    if value is None:
        return
    breaks = "EE1001, 107001: device indices are counted within this list"
    if not re.fullmatch(r"\d+(,\d+)*", value.strip()):
        yield error(
            "environment.visible_devices",
            f"{name} is no list of device numbers",
            name,
            breaks,
            expected="such as 0,1",
            found=repr(value),
            mend=f"export {name}=0",
        )
        return
    numbers = [int(part) for part in value.split(",")]
    if numbers != sorted(set(numbers)):
        yield error(
            "environment.visible_devices",
            f"{name} must be in ascending order, without repeats",
            name,
            breaks,
            expected=",".join(map(str, sorted(set(numbers)))),
            found=value,
            mend=f"export {name}={','.join(map(str, sorted(set(numbers))))}",
        )
    # Inside a container devices are numbered anew, so only a number past their count is surely wrong.
    elif found.devices and numbers[-1] > max(max(found.devices), len(found.devices) - 1):
        yield error(
            "environment.visible_devices",
            f"{name} names a device that is not there",
            name,
            breaks,
            expected=f"of {', '.join(map(str, found.devices))}",
            found=value,
            mend=f"export {name}={','.join(map(str, found.devices))}",
        )


def _check_switches(found: Installation) -> Iterator[Finding]:
    environ = found.environ or {}
    if environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield warning(
            "environment.blocking",
            "every launch waits for the one before",
            "ASCEND_LAUNCH_BLOCKING",
            "graphs are not captured with it, and eager steps are slow; it is for finding a failing op",
            expected="unset",
            found="1",
            mend="unset ASCEND_LAUNCH_BLOCKING",
        )
    queue = environ.get("TASK_QUEUE_ENABLE")
    if queue == "0":
        yield note(
            "environment.task_queue",
            "launches are not queued: errors are precise, eager steps slower",
            "TASK_QUEUE_ENABLE",
            "nothing in captured graphs",
            expected="1 (default) or 2",
            found="0",
            mend="unset TASK_QUEUE_ENABLE",
        )
    elif queue is not None and queue not in ("1", "2"):
        yield warning(
            "environment.task_queue",
            "this is no setting of the task queue",
            "TASK_QUEUE_ENABLE",
            "torch_npu refuses it or takes its default",
            expected="0, 1 or 2",
            found=repr(queue),
            mend="unset TASK_QUEUE_ENABLE",
        )
    yield from _check_allocator(environ.get("PYTORCH_NPU_ALLOC_CONF"))
    deterministic = environ.get("HCCL_DETERMINISTIC")
    if deterministic is not None and deterministic.lower() not in ("true", "false", "strict"):
        yield warning(
            "environment.deterministic",
            "this is no setting of HCCL",
            "HCCL_DETERMINISTIC",
            "collectives may add in another order from run to run",
            expected="true, false or strict",
            found=repr(deterministic),
            mend="export HCCL_DETERMINISTIC=true",
        )


def _check_allocator(value: str | None) -> Iterator[Finding]:
    name = "PYTORCH_NPU_ALLOC_CONF"
    if not value:
        return
    keys = [part.partition(":") for part in value.split(",") if part]
    wrong = [
        key for key, colon, setting in keys if key.strip() not in ALLOCATOR_KEYS or not colon or not setting
    ]
    if wrong:
        yield error(
            "environment.allocator",
            f"{name} has a part that torch_npu does not read",
            name,
            "torch_npu raises an error at its first allocation",
            expected="KEY:VALUE of " + ", ".join(sorted(ALLOCATOR_KEYS)),
            found=", ".join(wrong),
            mend=f"export {name}=expandable_segments:True",
        )
    settings = {key.strip(): setting.strip() for key, _, setting in keys}
    if settings.get("expandable_segments", "").lower() == "true" and "max_split_size_mb" in settings:
        yield warning(
            "environment.allocator",
            "expandable_segments and max_split_size_mb are for opposite ways to split blocks",
            name,
            "the second has no effect on expandable segments",
            found=value,
            mend=f"export {name}=expandable_segments:True",
        )
