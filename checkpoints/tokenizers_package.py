"""The optional package `tokenizers`: imported where it is first needed, its failures told as errors of ours.

The package raises bare `Exception` for data that it refuses, and a Rust panic (which is no `Exception` at all)
for some that it does not check; both say what is wrong with the data and become a CheckpointError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from atbx.core.errors import CheckpointError, MissingExtraError


def import_tokenizers() -> Any:
    """The package, or MissingExtraError naming the extra that brings it."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "text", "a tokenizer") from error
    return tokenizers


@contextlib.contextmanager
def blaming(where: str, what: str) -> Iterator[None]:
    """Turn a failure of the package inside the block into a CheckpointError that names its place."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {error}", where=where) from error
