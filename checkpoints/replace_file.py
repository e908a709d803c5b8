"""Write a file under a temporary name and rename it: the old file stays whole until the new one is."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from atbx.core.errors import CheckpointError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends well, and vanishes when it does not.

    It is written in the folder of `path` (a rename works within one file system only) and synced before the
    rename. A process that is killed leaves the old file whole, and a file named `.NAME.XXXX.tmp`.

    Raises:
        CheckpointError: the operating system refused (no space, no permission, no such folder).
    """
    target = Path(os.path.realpath(path))  # a link keeps pointing at the file it names
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise CheckpointError(f"the file cannot be written: {error.strerror}", path=path) from error
    try:
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"the file cannot be written: {error.strerror or error}", path=path) from error
    finally:
        temporary.unlink(missing_ok=True)  # gone already where the rename succeeded


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, on file systems that can."""
    # Some network file systems refuse to sync a folder; the rename has happened all the same.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
