"""Ordering of CANN and torch_npu versions: alpha before RC before release before post-release."""

from __future__ import annotations

import re

from atbx.core.errors import OptionError

_VERSION = re.compile(
    r"(?P<numbers>\d+(?:\.\d+)*)"
    r"(?:\.?(?P<stage>RC|rc|T)(?P<candidate>\d+))?"
    r"(?:\.?alpha(?P<alpha>\d+))?"
    r"(?:\.post(?P<post>\d+))?"
    r"(?:\+.*)?"
)


def version_key(version: str) -> tuple[tuple[int, ...], int, int, int, int]:
    """A key that orders versions such as 8.2.RC1.alpha003 < 8.2.RC1 < 8.2.0 < 8.2.0.post1.

    Raises:
        OptionError: the text is no version.
    """
    found = _VERSION.fullmatch(version.strip())
    if found is None:
        raise OptionError(
            "this is no version", expected="such as 8.5.0, 8.2.RC1 or 2.9.0.post2", found=version
        )
    numbers = tuple(int(n) for n in found["numbers"].split("."))
    numbers += (0,) * (3 - len(numbers))
    candidate, alpha = found["candidate"], found["alpha"]
    is_release = candidate is None and alpha is None
    return (
        numbers,
        1 if is_release else 0,
        int(candidate or 0) if candidate else (10**6 if not is_release else 0),
        int(alpha) if alpha else 10**6,
        int(found["post"] or 0),
    )
