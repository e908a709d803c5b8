"""`atbx selftest`: run the self-test, write its report, and end with code 0 only if everything passed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from atbx.commands.opening import threads
from atbx.commands.output import print_json
from atbx.commands.software import device_of
from atbx.core.errors import OptionError
from atbx.selftest import PARTS, Report, selftest, stderr_progress

NOT_PASSED = 1


def run(args: argparse.Namespace) -> None:
    """Test, write the report, print a summary or the report itself."""
    parts = args.only or list(PARTS)
    with threads(args.threads), device_of(args):
        report = selftest(args.device, parts=parts, model=args.model, progress=stderr_progress)
    path = Path(args.output or f"atbx-selftest-{report.chip or report.device}.json")
    try:
        path.write_text(json.dumps(report.as_data(), indent=1) + "\n")
    except OSError as error:
        raise OptionError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
    if args.json:
        print_json(report.as_data())
    else:
        _print_summary(report, path)
    if not report.passed:
        sys.stdout.flush()
        raise SystemExit(NOT_PASSED)


def _print_summary(report: Report, path: Path) -> None:
    statuses = [row.status for row in report.rows]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
    passed = sum(f.passed for f in report.findings)
    where = report.chip or report.device
    print(f"{where} ({report.device}): {'passed' if report.passed else 'NOT PASSED'}")
    if report.rows:
        print(f"  kernels: {counts}; {sum(len(row.checks) for row in report.rows)} checks")
    if report.findings:
        print(f"  models and buckets: {passed} of {len(report.findings)} passed")
    for error in report.errors:
        print(f"  stopped: {error}")
    print(f"  report: {path}")
