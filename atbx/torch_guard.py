"""Importing torch where torch_npu is installed but CANN is not.

torch loads every installed backend by itself, and torch_npu without CANN then makes plain `import torch` fail
(libhccl.so is missing). The autoload is switched off for that one import, and only in that case.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def cann_is_missing() -> bool:
    """Whether torch_npu is installed and the CANN libraries that it links to cannot be loaded."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        ctypes.CDLL("libhccl.so")
    except OSError:
        return True
    return False


def is_doctor() -> bool:
    """Whether this process is `atbx doctor`, which examines installations whose torch may not be importable."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    is_command = name == "atbx" or (name == "-m" and "atbx.command_line" in sys.orig_argv)
    return is_command and next((word for word in sys.argv[1:] if not word.startswith("-")), None) == "doctor"


def import_torch() -> None:
    """Import torch, without its backends where torch_npu could not load."""
    if "torch" in sys.modules or not cann_is_missing():
        import torch

        return
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        import torch  # noqa: F401
    finally:
        if before is None:
            del os.environ[AUTOLOAD]
        else:
            os.environ[AUTOLOAD] = before
