"""Tables of bad calls: each case is a call, the error it raises, and a pattern of what the error names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from atbx.core import errors

Case = tuple[str, Callable[[], Any], type[Exception], str]


def check(call: Callable[[], Any], kind: type[Exception], pattern: str) -> None:
    """`call` raises exactly this error of atbx, and its text matches."""
    with pytest.raises(errors.AtbxError) as caught:
        call()
    assert type(caught.value) is kind
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


def cases(*items: Case) -> Any:
    """Parametrise over named cases."""
    assert len({name for name, *_ in items}) == len(items)
    return pytest.mark.parametrize(("call", "kind", "pattern"), [pytest.param(*c, id=n) for n, *c in items])
