"""Donation of plain tensors: a donated tensor is marked, and every entry point refuses it from then on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from atbx.core.errors import DonationError

_MARK = "_atbx_donated"
"""Attribute that marks a tensor whose buffer was given to a compiled step; its value says to which."""

taking = threading.Lock()
"""Held while a call checks and marks what it donates, so that of two calls in two threads one is refused."""


def is_donated(value: Any) -> bool:
    """Whether a tensor's buffer was given to a compiled step."""
    return getattr(value, _MARK, None) is not None


def mark_donated(tensor: torch.Tensor, by: str) -> None:
    """Mark `tensor` as given to a compiled step; `by` says to which."""
    setattr(tensor, _MARK, by)


def refuse_donated(tensor: Any, path: str) -> None:
    """Raise DonationError if `tensor` was donated before."""
    mark = getattr(tensor, _MARK, None)
    if mark is not None:
        raise DonationError(
            f"this tensor was donated as {mark} and its buffer was updated in place",
            where=path,
            hint="Use the value that the call returned, or do not donate it",
        )


def memory_end(tensor: torch.Tensor, start: int) -> int:
    """The byte after the last that a tensor's entries occupy, where the first is at `start`."""
    if tensor.is_contiguous():
        return start + tensor.nbytes
    if tensor.numel() == 0:
        return start
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start + (last + 1) * tensor.element_size()


def refuse_shared_buffers(
    leaves: Sequence[tuple[torch.Tensor, str, bool]], owners: Sequence[tuple[str, dict[int, str]]]
) -> None:
    """Raise DonationError if what a call donates shares memory with another of its leaves.

    leaves: (tensor, path, whether it is donated) of the plain tensors.
    owners: (name, paths of tensors by address) of what else the call holds: donated arenas, a binding.
    """
    spans = []
    for number, (tensor, path, _) in enumerate(leaves):
        start = tensor.data_ptr()
        end = memory_end(tensor, start)
        if start == end:
            continue  # an empty tensor has no buffer to share
        for owner, addresses in owners:
            if start in addresses:
                refuse_pair(path, f"{owner}/{addresses[start]}")
        spans.append((start, end, number))
    spans.sort()
    for index, (_, end, number) in enumerate(spans, 1):
        while index < len(spans) and spans[index][0] < end:
            first, second = sorted((number, spans[index][2]))
            if leaves[first][2] or leaves[second][2]:
                refuse_pair(leaves[first][1], leaves[second][1])
            index += 1


def refuse_pair(path: str, other: str) -> None:
    """Raise DonationError for one buffer at two leaves."""
    raise DonationError(
        "one buffer is passed at two leaves of a call that donates it",
        where=f"{path} and {other}",
        hint="Pass a copy at one of them",
    )
