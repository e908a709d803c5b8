"""Which releases go together, as data: CANN with torch_npu, Python, driver, operator package and Python modules.

torch_npu carries a map of its own that ends at CANN 6.3, so it never warns. This one is open at the top: what is newer
than every row is "not known here", never wrong. Sources: COMPATIBILITY.en.md of Ascend/pytorch (pairs of CANN and
torch_npu), versioning_policy.md of vllm-ascend (patch releases), the release notes of CANN 8.5.0, 9.0.0 and 9.1.0 and
of MindIE 2.1.RC1 (drivers, operator packages), the release notes of the PyTorch adapter 7.2.0 (pairs across releases),
and the CANN installation guides of 8.0.RC2, 8.5.0, 9.0.0 and 9.1.0 (Python, numpy, modules).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from atbx.doctor.versions import Version, parse


@dataclass(frozen=True)
class Release:
    """A release series of CANN.

    cann: its first release. torch_npu: what was released for it, newest first. python: lowest and highest minor version
    that the guide names. driver: lowest driver (HDK) that the release notes name. None: no public table was found.
    """

    cann: str
    torch_npu: tuple[str, ...]
    python: tuple[str, str] | None = None
    driver: str | None = None


RELEASES = (
    Release(
        "9.1.0",
        ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
        ("3.7", "3.14"),
        "25.2",
    ),
    Release(
        "9.0.0",
        ("2.10.0.post2", "2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
        ("3.7", "3.13"),
        "25.0.RC1",
    ),
    Release(
        "8.5.0",
        ("2.9.0.post1", "2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
        ("3.7", "3.13"),
        "25.0.RC1",
    ),
    Release("8.3.RC1", ("2.8.0", "2.7.1.post1", "2.7.1", "2.6.0.post3", "2.1.0.post17")),
    Release("8.2.RC1", ("2.6.0", "2.5.1.post1", "2.1.0.post13"), driver="24.1.RC2"),
    Release("8.1.RC1", ("2.5.1", "2.4.0.post4", "2.3.1.post6")),
    Release("8.0.0", ("2.4.0.post2", "2.3.1.post4", "2.1.0.post10")),
    Release("8.0.RC3", ("2.4.0",)),
    Release("8.0.RC2", ("2.3.1",), ("3.7", "3.10")),
    Release("8.0.RC1", ("2.2.0",)),
    Release("7.0.0", ("2.1.0",)),
)
"""Newest first. A patch release (8.5.1, 8.3.RC2) belongs to the row of its series."""

ACROSS = ("8.0.RC2", "8.3.RC1")
"""Adapters released for CANN 8.0.0 to 8.3.RC1 are documented to run on every CANN of this range."""

OPS_INTERCHANGEABLE = ("8.5.2", "9.1.0")
"""From the first to the last of these, toolkit and operator package of different releases run together."""

NUMPY_2_FROM = "9.0.0"
"""Before it CANN needs numpy < 2; 8.5 makes an exception for Python 3.13."""

NUMPY_2_ON_PYTHON = "3.13"

MODULES = {
    "numpy": True,
    "decorator": True,
    "attrs": True,
    "psutil": True,
    "scipy": False,
    "sympy": False,
    "cffi": False,
    "protobuf": False,
    "pyyaml": False,
    "absl-py": False,
    "requests": False,
    "pathlib2": False,
    "cython": False,
}
"""Packages that every guide lists. True: without it the operator compiler fails at once (code 500001, E40020)."""


class Pair(Enum):
    """What is known of a torch_npu on a CANN."""

    RELEASED = "released together"
    ACROSS = "documented to run together"
    NEW = "newer than every row"
    UNLISTED = "not listed"
    OLD_CANN = "CANN is older than this torch_npu needs"
    OTHER = "released for another CANN"


@dataclass(frozen=True)
class Judgement:
    """A pair, and the CANN releases that this torch_npu was released for (empty: not listed)."""

    pair: Pair
    cann: tuple[str, ...]


def release_of(cann: Version) -> Release | None:
    """The row of a CANN release: the newest of its series that is not newer than it, else the series' first."""
    rows = [row for row in RELEASES if parse(row.cann).series == cann.series]
    for row in rows:
        if parse(row.cann) <= cann:
            return row
    return rows[-1] if rows else None


def is_newer_than_matrix(cann: Version) -> bool:
    """Whether a CANN is of a newer series than every row."""
    return cann.series > parse(RELEASES[0].cann).series


def judge(torch_npu: Version, cann: Version) -> Judgement:
    """What is known of this torch_npu on this CANN."""
    rows = [row for row in RELEASES if torch_npu in map(parse, row.torch_npu)]
    named = tuple(row.cann for row in rows)
    if not rows:
        floor = _floor(torch_npu)
        if floor is not None and cann < floor and release_of(cann) is not release_of(floor):
            return Judgement(Pair.OLD_CANN, (str(floor),))
        newest = max(parse(v) for row in RELEASES for v in row.torch_npu)
        return Judgement(Pair.NEW if torch_npu > newest else Pair.UNLISTED, ())
    if release_of(cann) in rows:
        return Judgement(Pair.RELEASED, named)
    if is_newer_than_matrix(cann):
        return Judgement(Pair.NEW, named)
    low, high = map(parse, ACROSS)
    adapters = [row for row in rows if parse("8.0.0") <= parse(row.cann) <= high]
    if adapters and low <= cann <= high:
        return Judgement(Pair.ACROSS, named)
    is_old = all(cann < parse(row.cann) for row in rows)
    return Judgement(Pair.OLD_CANN if is_old else Pair.OTHER, named)


def _floor(torch_npu: Version) -> Version | None:
    """The CANN that a torch_npu which is not listed needs at least: what the nearest older one was released for."""
    older = [(parse(v), parse(row.cann)) for row in RELEASES for v in row.torch_npu if parse(v) < torch_npu]
    nearest = max((v for v, _ in older), default=None)
    return min((cann for v, cann in older if v == nearest), default=None)


def cann_for(torch_npu: Version | None) -> str | None:
    """The newest CANN that a torch_npu was released for, or the least that it needs where it is not listed."""
    if torch_npu is None:
        return None
    rows = [row.cann for row in RELEASES if torch_npu in map(parse, row.torch_npu)]
    floor = _floor(torch_npu)
    return rows[0] if rows else (str(floor) if floor is not None else None)


def torch_npu_for(cann: Version, torch: Version | None) -> str | None:
    """The newest torch_npu released for a CANN: for that torch where there is one, else for any."""
    row = release_of(cann)
    if row is None:
        return None
    fitting = [v for v in row.torch_npu if torch is not None and parse(v).base == torch.base]
    return (fitting or list(row.torch_npu))[0]


def ops_go_with(ops: Version, toolkit: Version) -> bool:
    """Whether an operator package runs with a toolkit."""
    if ops == toolkit:
        return True
    low, high = map(parse, OPS_INTERCHANGEABLE)
    return min(ops, toolkit) >= low and (max(ops, toolkit) <= high or max(ops, toolkit).series == high.series)


def wants_numpy_1(cann: Version, python: Version) -> bool:
    """Whether this CANN needs numpy < 2 on this Python."""
    if cann >= parse(NUMPY_2_FROM):
        return False
    return not (cann >= parse("8.5.0") and python.series >= parse(NUMPY_2_ON_PYTHON).series)
