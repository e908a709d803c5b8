"""The doctor's report: all checks over one installation, as text, as JSON, and as an exit code."""

from __future__ import annotations

import functools
import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atbx.doctor.findings import Finding, Severity, note
from atbx.doctor.hardware import check_chip, check_devices, check_driver
from atbx.doctor.installation import Installation
from atbx.doctor.matrix import cann_for
from atbx.doctor.python_packages import (
    check_modules,
    check_pair,
    check_python,
    check_torch,
    check_torch_npu,
)
from atbx.doctor.software import check_kernels, check_libraries, check_nnal, check_toolkit
from atbx.doctor.variables import check_variables

WIDTH = 110


@dataclass(frozen=True)
class Report:
    """Findings, worst first, and what is installed by name (None: not there)."""

    findings: tuple[Finding, ...]
    installed: dict[str, str | None]
    chips: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 for nothing or notes, 1 for warnings, 2 for errors."""
        return int(max((f.severity for f in self.findings), default=Severity.NOTE))

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "exit_code": self.exit_code,
            "installed": self.installed,
            "chips": list(self.chips),
            "findings": [finding.as_data() for finding in self.findings],
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        for name, version in self.installed.items():
            yield f"  {name:<12} {version or '-'}"
        if self.chips:
            yield f"  {'chip':<12} {', '.join(self.chips)}"
        for finding in self.findings:
            yield ""
            yield f"{finding.severity.word}: {finding.what}  [{finding.id}]"
            for label in ("where", "expected", "found", "breaks", "mend"):
                value = getattr(finding, label)
                if value is not None:
                    # A command stays on one line, so that it can be copied.
                    width = 10**6 if label == "mend" else WIDTH
                    yield textwrap.fill(f"  {label + ':':<10}{value}", width, subsequent_indent=" " * 12)
        yield ""
        counts = [sum(f.severity is s for f in self.findings) for s in reversed(Severity)]
        yield f"{counts[0]} errors, {counts[1]} warnings, {counts[2]} notes"


@functools.cache
def known_chips() -> dict[str, str]:
    """Family of every chip of the capability table."""
    # Read from its file: the package around it imports torch, which the doctor must not need.
    path = Path(__file__).resolve().parent.parent / "kernels/ascend/chips.py"
    spec = importlib.util.spec_from_file_location("atbx_doctor_chips", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return {name: chip.family for name, chip in module.CHIPS.items()}


def examine(found: Installation, chip: str | None = None) -> Report:
    """All checks. chip: its name, where files do not tell which of its family it is."""
    families = known_chips()
    family = families.get(chip or "") or (found.families[0] if len(found.families) == 1 else None)
    chips = (chip,) if chip else tuple(f"family {name}" for name in found.families)
    findings = sorted(_findings(found, chip, family, families), key=lambda f: -f.severity)
    return Report(tuple(findings), _installed(found), chips)


def _findings(
    found: Installation, chip: str | None, family: str | None, families: dict[str, str]
) -> Iterator[Finding]:
    torch_npu = found.package("torch_npu")
    parts = (found.toolkit, found.nnal, found.driver, torch_npu)
    if all(part is None for part in parts) and not found.devices and not found.families:
        yield note(
            "ascend.none",
            "no NPU and no Ascend software was found; the CPU backend works",
            found.shown(found.root),
            "nothing; device 'npu' needs CANN, torch_npu and an NPU",
            mend="atbx selftest --device npu --software  # tries the NPU backend without an NPU",
        )
        yield from check_torch(found)
        yield from check_chip(found, chip, families)
        return
    cann = found.toolkit.version if found.toolkit is not None else None
    wanted = str(cann) if cann is not None else cann_for(torch_npu)
    yield from check_chip(found, chip, families)
    # With torch_npu alone, a missing NPU is no fault of its own.
    if found.toolkit is not None or found.driver is not None or found.devices or found.families:
        yield from check_devices(found, family)
        yield from check_driver(found, family, cann)
    yield from check_toolkit(found, wanted)
    yield from check_kernels(found, family)
    yield from check_libraries(found)
    yield from check_nnal(found)
    yield from check_torch(found)
    yield from check_torch_npu(found)
    yield from check_pair(found)
    yield from check_python(found)
    yield from check_modules(found)
    yield from check_variables(found)


def _installed(found: Installation) -> dict[str, str | None]:
    components = {
        "driver": found.driver,
        "firmware": found.firmware,
        "toolkit": found.toolkit,
        "kernels": found.kernels,
        "nnal": found.nnal,
    }
    versions = {
        name: None if part is None else f"{part.version or 'version not known'} in {found.shown(part.path)}"
        for name, part in components.items()
    }
    packages = {name: found.packages(name) for name in ("torch", "torch_npu")}
    return {**versions, **packages, "python": str(found.python)}
