"""Run a script on the software NPU: `python -m atbx.testing.software_npu [--chip NAME] SCRIPT [ARGUMENTS]`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

from atbx.core.errors import AtbxError
from atbx.testing.software_npu import CHIPS, software_npu


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script as `__main__`; with --summary, print what happened at the ACL boundary to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m atbx.testing.software_npu",
        description="Run a Python script with the real torch_npu on a software NPU.",
    )
    parser.add_argument("--chip", default="Ascend910B3", choices=CHIPS)
    parser.add_argument("--cann", default="9.1.0", help="CANN release that the device says it has")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--memory", type=int, default=None, help="bytes of memory a device")
    parser.add_argument("--streams", type=int, default=None, help="streams that captured graphs may take")
    parser.add_argument("--summary", action="store_true", help="print launches and counts at the end")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    try:
        with software_npu(given.chip, given.cann, given.devices, given.memory, given.streams) as device:
            sys.argv = [given.script, *given.arguments]
            runpy.run_path(given.script, run_name="__main__")
            if given.summary:
                print(device.counts(), file=sys.stderr)
    except AtbxError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
