"""Examining an installation before anything runs: driver, CANN, torch_npu, their versions and the environment.

Everything is read from files; neither torch nor torch_npu is imported, since a broken installation breaks that very
import. `atbx doctor` prints what `report_data` returns.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from atbx.doctor.installation import environment_below, packages_below, read
from atbx.doctor.report import Report, examine


def diagnose(root: str | Path = "/", chip: str | None = None) -> Report:
    """The report on this machine, or on the folder that another one's root lies in (a container image, a mount).

    chip: its name, such as Ascend910B3, where files do not tell.
    """
    base = Path(root)
    if base.resolve() == Path("/"):
        return examine(read("/", dict(os.environ)), chip)
    packages, torch_folder, python = packages_below(base)
    found = read(base, environment_below(base), packages, python=python, torch_folder=torch_folder)
    return examine(found, chip)


def report_data() -> dict[str, Any]:
    """The report on this machine, as data; for self-tests and bug reports."""
    return diagnose().as_data()
