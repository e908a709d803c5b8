"""The software device for a command: entered before torch_npu is imported, and left at the end."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator

from atbx.core.errors import OptionError

DEFAULT_CHIP = "Ascend910B3"


@contextlib.contextmanager
def device_of(args: argparse.Namespace) -> Iterator[None]:
    """Around a command with --device, --software, --chip and --cann.

    Raises:
        OptionError: options that contradict each other. UnsupportedError: the software device cannot start here.
    """
    is_npu = args.device.partition(":")[0] == "npu"
    if args.software and not is_npu:
        raise OptionError("plays an NPU", where="--software", expected="--device npu", found=args.device)
    for name in ("chip", "cann"):
        if getattr(args, name, None) is not None and not args.software:
            raise OptionError(
                "names what the software device plays", where=f"--{name}", expected="with --software"
            )
    if not args.software:
        yield
        return
    from atbx.testing.software_npu import software_npu

    chosen = {"cann": args.cann} if getattr(args, "cann", None) is not None else {}
    with contextlib.ExitStack() as stack:
        # What torch_npu warns of while it is imported is not the user's; it prints some of it to stdout.
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            stack.enter_context(software_npu(chip=args.chip or DEFAULT_CHIP, **chosen))
        yield
