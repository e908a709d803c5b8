"""Versions of the Ascend stack: their order, and the matrix of what goes together."""

from __future__ import annotations

import itertools

import pytest

from atbx.core.errors import OptionError
from atbx.doctor.matrix import (
    RELEASES,
    Pair,
    cann_for,
    judge,
    ops_go_with,
    release_of,
    torch_npu_for,
    wants_numpy_1,
)
from atbx.doctor.versions import parse, parsed
from atbx.kernels.ascend.versions import version_key

ORDERED = [
    "7.0.0",
    "8.0.T3",
    "8.0.T63.B020",
    "8.0.RC1.alpha001",
    "8.0.RC1",
    "8.0.RC2",
    "8.0.RC10",
    "8.0.0",
    "8.2.RC1.alpha002",
    "8.2.RC1.alpha003",
    "8.2.RC1",
    "8.5.0.alpha003",
    "8.5.0-beta.1",
    "8.5.0",
    "8.5.1",
    "9.0.0-alpha.2",
    "9.0.0-beta.1",
    "9.0.0-beta.2",
    "9.0.0",
]


@pytest.mark.parametrize(("lower", "higher"), list(itertools.pairwise(ORDERED)))
def test_releases_are_ordered(lower: str, higher: str) -> None:
    assert parse(lower) < parse(higher)
    assert not parse(higher) < parse(lower)


def test_post_releases_and_drivers_are_ordered() -> None:
    posts = ["2.9.0rc1", "2.9.0", "2.9.0.post1", "2.9.0.post2", "2.9.0.post10", "2.9.1", "2.10.0"]
    assert all(parse(low) < parse(high) for low, high in itertools.pairwise(posts))
    drivers = ["24.1.rc3", "24.1.0", "25.0.rc1", "25.0.rc1.1", "25.0.RC1.3", "25.2.0", "25.5.1", "26.0.RC1"]
    assert all(parse(low) < parse(high) for low, high in itertools.pairwise(drivers))


def test_build_marks_do_not_count() -> None:
    assert parse("2.13.0+cpu") == parse("2.13.0")
    assert parse("2.9.0.post1+git4c901a4") == parse("2.9.0.post1")
    assert parse("8.1.RC1.B110") == parse("8.1.RC1")
    assert hash(parse("2.13.0+cpu")) == hash(parse("2.13.0"))


@pytest.mark.parametrize("text", ["", "latest", "8.2.RC", "8..1", "[8.1.RC1]", "8.1 RC1"])
def test_what_is_no_version_is_named(text: str) -> None:
    with pytest.raises(OptionError, match="no version"):
        parse(text)
    assert parsed(text) is None


def test_the_order_agrees_with_that_of_the_capability_table() -> None:
    both = [v for v in ORDERED if ".T" not in v and "-" not in v]
    assert [parse(a) < parse(b) for a in both for b in both] == [
        version_key(a) < version_key(b) for a in both for b in both
    ]


def test_the_matrix_is_newest_first_and_all_of_it_parses() -> None:
    cann = [parse(row.cann) for row in RELEASES]
    assert cann == sorted(cann, reverse=True)
    for row in RELEASES:
        versions = [parse(v) for v in row.torch_npu]
        assert versions == sorted(versions, reverse=True)
        assert all(judge(v, parse(row.cann)).pair is Pair.RELEASED for v in versions)


@pytest.mark.parametrize(
    ("torch_npu", "cann", "pair"),
    [
        ("2.9.0", "8.5.0", Pair.RELEASED),
        ("2.9.0", "8.5.2", Pair.RELEASED),
        ("2.7.1.post1", "8.3.RC2", Pair.RELEASED),
        ("2.9.0", "9.1.0", Pair.OTHER),
        ("2.9.0.post2", "8.5.0", Pair.OLD_CANN),
        ("2.7.1", "8.1.RC1", Pair.ACROSS),
        ("2.7.1", "8.0.RC1", Pair.OLD_CANN),
        ("2.5.1", "8.5.0", Pair.OTHER),
        ("2.9.0", "9.2.0", Pair.NEW),
        ("2.13.0", "9.1.0", Pair.NEW),
        ("2.13.0", "8.5.0", Pair.OLD_CANN),
        ("2.9.0.post3", "9.0.0", Pair.UNLISTED),
    ],
)
def test_pairs(torch_npu: str, cann: str, pair: Pair) -> None:
    assert judge(parse(torch_npu), parse(cann)).pair is pair


def test_what_to_install() -> None:
    assert torch_npu_for(parse("8.5.0"), parse("2.8.0+cpu")) == "2.8.0.post2"
    assert torch_npu_for(parse("8.5.1"), parse("2.13.0")) == "2.9.0.post1"
    assert torch_npu_for(parse("9.9.0"), None) is None
    assert cann_for(parse("2.8.0.post2")) == "8.5.0"
    assert cann_for(parse("2.13.0")) == "9.1.0"
    assert release_of(parse("8.3.RC2")) is next(row for row in RELEASES if row.cann == "8.3.RC1")


def test_operator_packages_go_with_toolkits_as_the_notes_say() -> None:
    go = {("9.1.0", "8.5.2"), ("8.5.2", "9.0.0"), ("9.0.0", "9.1.0"), ("8.3.RC1", "8.3.RC1")}
    go_not = {("8.5.0", "9.0.0"), ("8.3.RC1", "8.5.0"), ("8.5.2", "9.2.0")}
    assert all(ops_go_with(parse(a), parse(b)) for a, b in go)
    assert not any(ops_go_with(parse(a), parse(b)) for a, b in go_not)


def test_numpy_2_from_cann_9_or_with_python_3_13() -> None:
    assert wants_numpy_1(parse("8.3.RC1"), parse("3.13"))
    assert wants_numpy_1(parse("8.5.0"), parse("3.12"))
    assert not wants_numpy_1(parse("8.5.0"), parse("3.13"))
    assert not wants_numpy_1(parse("9.0.0"), parse("3.9"))
