"""reshape: the same entries, in row-major order, under another shape; bucket tags are followed through it.

The sizes of both shapes are walked side by side into the smallest groups of equal products. A tagged axis may stand
alone in its group or be merged with others (its new tag says with what: "B*T"), but it is never split and its tag is
never lost, since an op that mixes along it could then not be refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from atbx.core.abstract import Abstract, Dim, tag_of
from atbx.core.errors import BucketError, ShapeError
from atbx.core.op import Op, register_op
from atbx.ops.operands import need_tensor, shape_text
from atbx.ops.structural import view_cost


def _filled(x: Abstract, shape: tuple[int, ...]) -> list[int]:
    """`shape` with its one -1 worked out."""
    holes = [i for i, n in enumerate(shape) if n == -1]
    if len(holes) > 1 or any(n < -1 for n in shape):
        raise ShapeError("reshape: sizes are positive, and at most one is -1", found=shape_text(shape))
    sizes = list(shape)
    if holes:
        rest = math.prod(n for n in shape if n != -1)
        if rest == 0 or x.numel % rest:
            raise ShapeError("reshape: -1 cannot be worked out", expected=shape_text(shape), found=x)
        sizes[holes[0]] = x.numel // rest
    if math.prod(sizes) != x.numel:
        raise ShapeError(
            "reshape: the numbers of entries differ", expected=f"{x.numel} in {x}", found=shape_text(shape)
        )
    return sizes


def _joined(sizes: Sequence[int]) -> str:
    """The tag of several axes merged, each by its tag or its size."""
    return "*".join(tag_of(n) or str(int(n)) for n in sizes if tag_of(n) or n != 1)


def _segments(source: Sequence[int], target: Sequence[int]) -> list[tuple[range, range]]:
    """Both shapes cut around each tagged axis that stands in both with as many entries before it.

    The tag tells which of several axes of one entry is which, where sizes do not.
    """
    cuts: list[tuple[range, range]] = []
    i = j = 0
    for there, size in enumerate(target):
        for here in range(i, len(source)):
            same = tag_of(size) is not None and tag_of(size) == tag_of(source[here]) and size == source[here]
            if same and math.prod(source[:here]) == math.prod(target[:there]):
                cuts += [(range(i, here), range(j, there)), (range(here, here + 1), range(there, there + 1))]
                i, j = here + 1, there + 1
                break
    return [*cuts, (range(i, len(source)), range(j, len(target)))]


def _groups(
    source: Sequence[int], target: Sequence[int], ins_of: range, outs_of: range
) -> list[tuple[list[int], list[int]]]:
    """Axes of one segment of both shapes in the smallest groups of equal products: (source axes, target axes)."""
    groups: list[tuple[list[int], list[int]]] = []
    i, i_end, j, j_end = ins_of.start, ins_of.stop, outs_of.start, outs_of.stop
    while i < i_end or j < j_end:
        # An axis of one entry without a partner was merged with the axes before it, or split off them.
        lone_in = i < i_end and source[i] == 1 and (j >= j_end or target[j] != 1)
        lone_out = j < j_end and target[j] == 1 and (i >= i_end or source[i] != 1)
        if groups and (lone_in or lone_out):
            groups[-1][0].extend([i] * lone_in)
            groups[-1][1].extend([j] * lone_out)
            i, j = i + lone_in, j + lone_out
            continue
        ins: list[int] = []
        outs: list[int] = []
        have = want = 1
        while not ins or not outs or have != want:
            if i < i_end and (not ins or have < want or j >= j_end):
                ins.append(i)
                have *= int(source[i])
                i += 1
            elif j < j_end:
                outs.append(j)
                want *= int(target[j])
                j += 1
            else:
                break
        groups.append((ins, outs))
    return groups


def _tagged(x: Abstract, sizes: list[int], ins: list[int], outs: list[int]) -> None:
    """Put the tags of one group's source axes into `sizes`; BucketError where they cannot be placed."""
    before = [x.shape[i] for i in ins]
    if not any(tag_of(n) for n in before):
        return
    tag = _joined(before)
    after = [sizes[j] for j in outs if sizes[j] != 1 or tag_of(sizes[j])] or [sizes[j] for j in outs[:1]]
    if _joined(after) == tag:
        return
    if len(after) == 1 and tag_of(after[0]) in (None, tag):
        place = next(j for j in outs if sizes[j] is after[0])
        sizes[place] = Dim(int(after[0]), tag)
        return
    raise BucketError(
        f"reshape: bucketed axis {tag!r} would be split or lost",
        expected=f"{shape_text(before)} kept, or merged into one axis",
        found=f"{shape_text(after)} of {shape_text(sizes)}",
        hint="Pass the sizes of bucketed axes as x.shape gives them",
    )


def _reshape_shape(x: Any, *, shape: tuple[int, ...]) -> Abstract:
    tensor = need_tensor("reshape", "x", x)
    sizes = _filled(tensor, shape)
    if any(tag_of(n) for n in tensor.shape):
        for segment in _segments(tensor.shape, sizes):
            for ins, outs in _groups(tensor.shape, sizes, *segment):
                _tagged(tensor, sizes, ins, outs)
    return Abstract(tuple(sizes), tensor.dtype)


def _reshape_reference(x: torch.Tensor, *, shape: tuple[int, ...]) -> torch.Tensor:
    return x.reshape([int(n) for n in shape])


RESHAPE = register_op(Op("reshape", _reshape_shape, _reshape_reference, view_cost, views=True))


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """x under another shape of as many entries; one size may be -1.

    A bucketed axis keeps its tag where it stands alone or is merged: [B,T,M] to [B*T,M], or to [B,T,H,D].

    Raises:
        ShapeError: the numbers of entries differ.
        BucketError: a bucketed axis would be split, or could not be found again.
    """
    return RESHAPE(x, shape=tuple(shape))
