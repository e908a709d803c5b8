"""Buckets: which padded sizes an axis may have. One place decides, for warm-up and for run.

A small set of sizes bounds the number of compiled variants; the last bucket is the capacity itself, so nothing is
ever padded past it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from atbx.core.errors import BucketError


def ladder(capacity: int, *, smallest: int = 1, doubling_until: int = 8, steps: int = 2) -> tuple[int, ...]:
    """Bucket sizes up to and including `capacity`.

    Sizes double up to `doubling_until`; above it each power of two is divided in `steps`, so a length just past a
    bucket is padded to at most (1 + 1/steps) of itself. Example: ladder(64) = 1 2 4 8 12 16 24 32 48 64.

    Raises:
        BucketError: a number is not positive, or smallest exceeds capacity.
    """
    if capacity < 1 or smallest < 1 or smallest > capacity:
        raise BucketError(
            "a ladder of buckets needs 1 <= smallest <= capacity",
            found=f"smallest={smallest}, capacity={capacity}",
        )
    if doubling_until < 1 or steps < 1:
        raise BucketError(
            "a ladder of buckets needs positive steps",
            found=f"doubling_until={doubling_until}, steps={steps}",
        )
    sizes: list[int] = []
    size = smallest
    while size < capacity:
        sizes.append(size)
        if size < doubling_until:
            size = min(2 * size, max(doubling_until, size + 1))
        else:
            power = 1 << (size.bit_length() - 1)
            size += max(1, power // steps)
    return (*sizes, capacity)


@dataclass(frozen=True)
class Bucket:
    """A bucketed axis, shared by every argument leaf that has it.

    axes:  pairs (argument path, axis), e.g. (("step/ids", 1), ("step/positions", 1)); a path that ends in "/*"
           names every leaf below it.
    sizes: ascending padded sizes; the last is the capacity.
    count: path of the argument that holds how many entries are real; the function hands it to ops that mix
           along the axis. None for an axis that nothing mixes along (batch rows). Where the caller passes
           None for that argument, the real size is filled in as an int64 scalar.
    """

    axes: tuple[tuple[str, int], ...]
    sizes: tuple[int, ...]
    count: str | None = None

    def __post_init__(self) -> None:
        if not self.axes:
            raise BucketError("a bucket names no (argument path, axis)")
        for path, axis in self.axes:
            if axis < 0:
                raise BucketError("a bucket counts axes from the front", where=path, found=f"axis {axis}")
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise BucketError("bucket sizes must be positive and ascending", found=self.sizes)

    def choose(self, size: int, name: str) -> int:
        """The smallest bucket that holds `size`.

        Raises:
            BucketError: `size` exceeds the last bucket.
        """
        return choose(self.sizes, size, name)


def choose(sizes: tuple[int, ...], size: int, name: str) -> int:
    """The smallest of `sizes` (ascending) that holds `size`; BucketError past the last."""
    index = bisect_left(sizes, size)
    if index == len(sizes):
        raise BucketError(
            f"axis {name!r} does not fit its buckets", expected=f"at most {sizes[-1]}", found=size
        )
    return sizes[index]
