"""tests/faults.toml is complete and true: each row names tests that exist, or the reason why there is none."""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

import pytest
from conftest import ROOT

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")

LISTED = """
1 2 3 4 5 6 8 9 10 11 12 14 15 17 18 19 20 21 22 23 24 25 27 28 29 30 31 32 33 34 35 37 38 39 40 41 42 43 44 46 47
48 49 50 52 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 72 73 74 75 76 77 78 79 80 82 84 85 86 87 88 89 90 92
93 95 96 97 98 99 100
U1 U3 U4 U5 U6 U7 U8 U9 U10 U11 U13 U14 U15 U16 U17 U19 U20 U21 U22 U23 U24 U26 U27 U29 U30 U31 U32 U33 U34 U35 U36
U38 U39 U40 U41 U42 U43 U44 U46 U48 U49 U50 U51 U52 U53 U55 U56 U58 U59 U61 U62 U63 U64 U65 U66 U68 U70 U71 U73 U74
U75
"""
ROWS = LISTED.split()
"""Rows of the list of public reports; the gaps are in the list itself."""

FAULTS: dict[str, Any] = tomllib.loads((ROOT / "tests" / "faults.toml").read_text(encoding="utf-8"))
SOURCE = ROOT.parent / "shared" / "faults.md"


@functools.cache
def functions_in(file: str) -> frozenset[str]:
    """Names of the test functions that a file defines."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(
        n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
    )


def test_every_row_is_answered_once_and_in_order() -> None:
    assert list(FAULTS) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_tests_that_exist_or_a_reason(row: str) -> None:
    entry = FAULTS[row]
    assert entry["kind"]
    assert set(entry) in ({"kind", "tests"}, {"kind", "reason"})
    if "reason" in entry:
        assert len(entry["reason"]) > 20
        return
    assert entry["tests"]
    for name in entry["tests"]:
        file, _, function = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert function in functions_in(file), name


@pytest.mark.skipif(not SOURCE.exists(), reason="the list of public reports is not here")
def test_no_row_of_the_list_is_forgotten() -> None:
    listed = re.findall(r"^\| (U?\d+) \|", SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == ROWS
