"""`atbx doctor`: examine an installation, print findings, and end with a code that says how bad they are."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from atbx.commands.output import print_json
from atbx.core.errors import OptionError
from atbx.doctor import diagnose
from atbx.doctor.findings import Finding, error, note
from atbx.doctor.report import Report

IMPORT_SECONDS = 120


def run(args: argparse.Namespace) -> None:
    """Examine, print, and end with code 1 for warnings and 2 for errors."""
    root = Path(args.root)
    if not root.is_dir():
        raise OptionError("is no folder", where="--root", found=args.root)
    report = diagnose(root, args.chip)
    if args.try_import:
        if root.resolve() != Path("/"):
            raise OptionError("imports on this machine only", where="--import", expected="without --root")
        report = Report((*report.findings, try_import()), report.installed, report.chips)
    if args.json:
        print_json(report.as_data())
    else:
        for line in report.lines():
            print(line)
    if report.exit_code:
        sys.stdout.flush()
        raise SystemExit(report.exit_code)


def try_import() -> Finding:
    """Import torch and torch_npu in a process of their own, and tell the first thing that went wrong."""
    command = [sys.executable, "-c", "import torch_npu, torch; print(torch.npu.is_available())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return error(
            "import.timeout",
            f"importing torch_npu took more than {IMPORT_SECONDS} s",
            "package torch_npu",
            "every program that uses the NPU hangs at its start",
            mend="npu-smi info",
        )
    if done.returncode:
        from atbx.doctor.codes import first_cause

        cause = first_cause(done.stderr)
        return error(
            "import.failed",
            "importing torch_npu fails",
            "package torch_npu",
            "device 'npu' cannot be used",
            found=cause.text,
            mend=cause.advice,
        )
    is_available = done.stdout.strip().endswith("True")
    state = "sees an NPU" if is_available else "sees no NPU"
    return note("import.done", f"torch_npu can be imported and {state}", "package torch_npu")
