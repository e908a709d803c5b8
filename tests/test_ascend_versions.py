"""Order of CANN and torch_npu versions: alpha, release candidate, release, post-release."""

from __future__ import annotations

import itertools

import pytest

from atbx.core.errors import OptionError
from atbx.kernels.ascend.versions import version_key

ORDERED = [
    "7.0.0",
    "8.0.RC1",
    "8.0.RC3",
    "8.0.0",
    "8.2.RC1.alpha002",
    "8.2.RC1.alpha003",
    "8.2.RC1",
    "8.2.RC2",
    "8.5.0.alpha003",
    "8.5.0",
    "8.5.1",
    "9.0.0",
    "9.1.0",
]


@pytest.mark.parametrize(("lower", "higher"), list(itertools.pairwise(ORDERED)))
def test_releases_of_cann_are_ordered(lower: str, higher: str) -> None:
    assert version_key(lower) < version_key(higher)


def test_post_releases_are_newer_than_their_release_and_older_than_the_next() -> None:
    found = ["2.9.0", "2.9.0.post1", "2.9.0.post2", "2.9.0.post10", "2.9.1", "2.10.0", "2.10.0.post4"]
    assert sorted(set(found), key=version_key) == found
    assert version_key("2.9.0.post1+git4c901a4") == version_key("2.9.0.post1")


@pytest.mark.parametrize("text", ["", "latest", "8.2.RC", "8..1", "v8.0.0"])
def test_what_is_no_version_is_named(text: str) -> None:
    with pytest.raises(OptionError, match="no version"):
        version_key(text)
