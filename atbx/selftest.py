"""`atbx selftest`: what a user with an NPU runs to know whether an installation computes what it should.

Parts: every kernel for the chip against its op's reference rule, eagerly and by capture and replay; a model against
FP64 in every form; a model of the user's; the same tokens in several buckets; a speed table. The report is plain data,
made to be attached to a bug report.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import torch

import atbx
from atbx import doctor
from atbx.comparison import device_name
from atbx.compile import backend as backend_of
from atbx.core.backend import Backend
from atbx.core.errors import AtbxError, OptionError
from atbx.kernels.ascend import AscendBackend
from atbx.selftest_examples import examples
from atbx.selftest_model import Finding, run_buckets, run_file, run_model
from atbx.selftest_rows import FAILED, Row, run_rows
from atbx.selftest_speed import Speed, run_speed
from atbx.tolerance import RULE

PARTS = ("rows", "model", "buckets", "speed")

FORMAT = 1
"""Version of the report's form."""

_VARIABLES = (
    "ASCEND_",
    "TASK_QUEUE_ENABLE",
    "PYTORCH_NPU_",
    "PYTORCH_ALLOC_CONF",
    "HCCL_",
    "ACL_",
    "TORCH_DEVICE_",
)
"""Environment variables that are reported: those that CANN and torch_npu read. No others, for a report is shared."""


@dataclass
class Report:
    """What a self-test found. device: "npu", "cpu" or "software"."""

    device: str
    chip: str | None
    versions: dict[str, str | None]
    environment: dict[str, str]
    parts: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    speed: list[Speed] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    doctor: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every row and every other check passed, and every part ran to its end."""
        return (
            not self.errors
            and all(row.status != FAILED for row in self.rows)
            and all(finding.passed for finding in self.findings)
        )

    def as_data(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "selftest": FORMAT,
            "passed": self.passed,
            "device": self.device,
            "chip": self.chip,
            "versions": self.versions,
            "environment": self.environment,
            "doctor": self.doctor,
            "parts": list(self.parts),
            "tolerance": RULE,
            "rows": [row.as_data() for row in self.rows],
            "checks": [asdict(finding) for finding in self.findings],
            "speed": {
                "meaningful": self.device != "software",
                "measured": [asdict(one) for one in self.speed],
            },
            "errors": self.errors,
            "seconds": self.seconds,
        }


def selftest(
    device: str | Backend = "npu",
    *,
    parts: Sequence[str] = PARTS,
    model: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Test an installation.

    device: as in `atbx.jit`. parts: of `PARTS`. model: a model file to run too. progress: is told each line of results.

    Raises:
        OptionError: an unknown part. UnsupportedError: the device cannot be opened.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise OptionError(
            "unknown part of the self-test", where="parts", expected=f"of {', '.join(PARTS)}", found=unknown
        )
    chosen = backend_of(device)
    environment = chosen.environment if isinstance(chosen, AscendBackend) else None
    report = Report(
        device_name(chosen),
        None if environment is None else environment.chip.name,
        _versions(None if environment is None else environment.cann),
        {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        tuple(parts),
        doctor=doctor.report_data(),
    )

    def rows() -> None:
        for row in run_rows(chosen, examples()):
            report.rows.append(row)
            progress(_row_line(row))

    def findings(found: Iterable[Finding]) -> None:
        for finding in found:
            report.findings.append(finding)
            progress(_finding_line(finding))

    def speeds() -> None:
        for one in run_speed(chosen):
            report.speed.append(one)
            mark = " (means nothing: software)" if report.device == "software" else ""
            progress(f"  {one.name:<52} {one.value:10.3f} {one.unit}{mark}")

    steps: dict[str, Callable[[], None]] = {
        "rows": rows,
        "model": lambda: findings(run_model(chosen)),
        "buckets": lambda: findings(run_buckets(chosen)),
        "speed": speeds,
    }
    if model is not None:
        steps["file"] = lambda: findings(run_file(chosen, model))
    for name, step in steps.items():
        if name != "file" and name not in parts:
            continue
        progress(f"{name}:")
        start = perf_counter()
        try:
            step()
        except (AtbxError, RuntimeError) as error:
            # One part that cannot run must not cost the others: the report is what is wanted of a broken machine.
            report.errors.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:2000]}")
            progress(f"  STOPPED {report.errors[-1]}")
        report.seconds[name] = round(perf_counter() - start, 3)
    return report


def _versions(cann: str | None) -> dict[str, str | None]:
    """Versions of everything that a result can depend on."""
    found: dict[str, str | None] = {
        "atbx": atbx.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cann": cann,
    }
    for package in ("torch_npu", "triton-ascend"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _row_line(row: Row) -> str:
    worst = row.worst
    if not row.checks:
        return f"  {row.op:<18} {row.kernel:<30} {row.status}: {row.reason}"
    assert worst is not None
    failed = sum(not c.passed for c in row.checks)
    nearest = (
        ""
        if worst.judgement is None
        else f" worst {worst.judgement.units:.3g} of {worst.judgement.allowed:.3g}"
    )
    line = f"  {row.op:<18} {row.kernel:<30} {row.status}, {len(row.checks)} checks{nearest}"
    if failed:
        what = worst.error or (
            "replay differs from eager" if worst.same_in_graph is False else "past its tolerance"
        )
        line += f"\n      {failed} FAILED, such as {worst.example}, {worst.dtype}: {what[:200]}"
    return line


def _finding_line(finding: Finding) -> str:
    numbers = ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in finding.numbers.items()
    )
    return f"  {'passed' if finding.passed else 'FAILED'} {finding.name}: {numbers}"


def stderr_progress(line: str) -> None:
    """Print a line of results while more is to come."""
    print(line, file=sys.stderr, flush=True)
