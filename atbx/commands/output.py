"""How commands print: JSON that every parser reads, sizes in words, and lists where layers that are alike fold."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Row = TypeVar("Row", bound=Hashable)


def print_json(value: Any) -> None:
    """One line of JSON. Numbers that JSON does not have (NaN, infinities) become null."""
    print(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


def size_in_words(nbytes: float) -> str:
    """Bytes for people: 513.1 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def dtype_name(dtype: Any) -> str:
    """A torch dtype without its module: float32."""
    return str(dtype).removeprefix("torch.")


def shape_in_words(shape: Sequence[int]) -> str:
    """[49152, 576]."""
    return f"[{', '.join(str(int(size)) for size in shape)}]"


def fold(groups: Iterable[tuple[str, Sequence[Row]]]) -> Iterator[tuple[str, int, tuple[Row, ...]]]:
    """Neighbours with the same rows as one group: its name (layers/0 to layers/29), how many it stands for, rows."""
    first = last = ""
    rows: tuple[Row, ...] = ()
    times = 0
    for name, found in groups:
        if times and tuple(found) == rows:
            last, times = name, times + 1
            continue
        if times:
            yield (first if times == 1 else f"{first} to {last}"), times, rows
        first, last, rows, times = name, name, tuple(found), 1
    if times:
        yield (first if times == 1 else f"{first} to {last}"), times, rows
