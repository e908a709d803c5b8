"""Where a parameter stands in a public checkpoint, and what must be done to its values to make it ours.

A name map is data: tree path to `Foreign`. Loading, the report of mismatches and the tests all read the same map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

AS_IS, TRANSPOSED, ROTARY_PAIRS = "as_is", "transposed", "rotary_pairs"


@dataclass(frozen=True, slots=True)
class Foreign:
    """A tensor of a public checkpoint.

    name:    its name there.
    storage: AS_IS; TRANSPOSED, [in, out] where ours is [out, in]; or ROTARY_PAIRS, the rows of each head ordered so
             that the two channels of a rotated pair are neighbours (llama.cpp's order for the architecture "llama"),
             where ours has the first channels of all pairs before the second ones.
    heads:   the number of heads that the rows of ROTARY_PAIRS belong to.
    """

    name: str
    storage: str = AS_IS
    heads: int = 1

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that it has in the checkpoint, given ours."""
        return shape[::-1] if self.storage == TRANSPOSED else shape

    def to_ours(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its values in our layout; a view where that is possible."""
        if self.storage == TRANSPOSED:
            return tensor.t()
        if self.storage == ROTARY_PAIRS:
            return pairs_to_halves(tensor, self.heads)
        return tensor


NameMap = Mapping[str, Foreign]


@dataclass(frozen=True)
class Naming:
    """How one kind of public checkpoint names the parameters of a family.

    names:      `names(config)` gives the map of tree paths.
    is_ignored: whether a name is that of something that is no parameter (a stored frequency table).
    """

    names: Callable[[Any], dict[str, Foreign]]
    is_ignored: Callable[[str], bool] = lambda name: False


def pairs_to_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pair order (0a 0b 1a 1b ...) to half order (0a 1a ... 0b 1b ...); [heads * D, ...]."""
    rest = tensor.shape[1:]
    return tensor.reshape(heads, -1, 2, *rest).transpose(1, 2).reshape(-1, *rest)


def halves_to_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `pairs_to_halves`: what llama.cpp's converter does to Q and K."""
    rest = tensor.shape[1:]
    return tensor.reshape(heads, 2, -1, *rest).transpose(1, 2).reshape(-1, *rest)
