"""Calls of Ascend operators as the limits of the software NPU see them: one that every limit allows, and changes.

A base is a valid call of one operator; `refused` says which limit turns away a changed one. Arguments that a base
does not name are absent (None), as an unset optional argument is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atbx.testing.software_npu.rules import LIMITS, Call, Limit, first_refusal

A2, A3, P310, A910 = "Ascend910B3", "Ascend910_9392", "Ascend310P3", "Ascend910A"


@dataclass(frozen=True)
class Base:
    """A valid call: the operator, a function that makes its arguments, and where it runs."""

    operator: str
    make: Callable[[], dict[str, Any]]
    chip: str = A2
    host: frozenset[str] = frozenset()
    formats: dict[str, int] = field(default_factory=dict)
    cann: str = "9.1.0"

    def call(self, **changes: Any) -> Call:
        """The call with some arguments, or `chip`, `host`, `formats`, `cann`, changed."""
        place = {name: changes.pop(name, getattr(self, name)) for name in ("chip", "host", "formats", "cann")}
        return Call(self.operator, {**self.make(), **changes}, place["formats"], frozenset(place["host"]),
                    place["chip"], place["cann"])  # fmt: skip


def limit_named(operator: str, name: str) -> Limit:
    """The limit of an operator, or of every operator, by name."""
    return next(one for one in [*LIMITS[operator], *LIMITS["*"]] if one.name == name)


def check_pair(base: Base, name: str, changes: dict[str, Any]) -> None:
    """The base is allowed in full; the changed call is refused by the limit of that name, at its time."""
    for when in ("launch", "execution"):
        assert first_refusal(base.call(), when) is None, first_refusal(base.call(), when)
    limit = limit_named(base.operator, name)
    message = limit.check(base.call(**changes))
    assert message is not None, f"{base.operator}: {name} allowed {sorted(changes)}"
    assert len(message) > 20
    assert limit.source
