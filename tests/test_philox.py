"""`uniform`: the published Philox vectors, and one number in [0, 1) per seed, sequence and position, in any batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from op_checks import run, shapes, stage, strided

import atbx
from atbx.core.abstract import Abstract, abstract_of
from atbx.core.errors import ShapeError
from atbx.ops.philox import MASK, philox, uniform

ONES = (MASK,) * 4


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


def draws(seed: Sequence[int], sequence: Sequence[int], position: Sequence[int]) -> torch.Tensor:
    """`uniform` by its reference rule."""
    return run(uniform, *(torch.tensor(x, dtype=torch.int64) for x in (seed, sequence, position)))


def plain_uniform(seed: int, sequence: int, position: int) -> float:
    """The same with Python's unbounded integers: Philox-4x32-10 from its paper's definition."""
    c = [position & MASK, position >> 32 & MASK, sequence & MASK, sequence >> 32 & MASK]
    k = [seed & MASK, seed >> 32 & MASK]
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [right >> 32 ^ c[1] ^ k[0], right & MASK, left >> 32 ^ c[3] ^ k[1], left & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return (c[0] >> 8) / 2**24


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ONES, ONES[:2], (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_vectors_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == expected


def test_a_uniform_is_the_upper_24_bits_of_the_first_word() -> None:
    # Counter and key of all zeros, and of all ones: the first words of two of the vectors above.
    assert draws([0, -1], [0, -1], [0, -1]).tolist() == [0x6627E8 / 2**24, 0x408F27 / 2**24]


def test_every_64_bit_seed_sequence_and_position_counts_whole() -> None:
    edges = [0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63)]
    triples = list(itertools.product(edges, edges, edges))
    found = draws(*zip(*triples, strict=True)).tolist()
    assert found == [plain_uniform(*triple) for triple in triples]
    # 729 numbers of 24 bits: two that agree by chance are expected once in 63 such tables.
    assert len(set(found)) == len(triples)


def test_exchanging_seed_sequence_and_position_gives_other_numbers() -> None:
    found = draws(*zip(*itertools.permutations((1, 2, 3)), strict=True))
    assert len(set(found.tolist())) == 6


def test_uniforms_lie_in_zero_to_one_and_are_exact_in_24_bits() -> None:
    count = 100_000
    u = draws([5] * count, [0] * count, range(count))
    assert u.dtype == torch.float32
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0
    steps = u.double() * 2**24
    assert torch.equal(steps, steps.round())
    # Odd multiples of 2**-24 occur near one too, so no bit was lost to rounding.
    assert bool((steps[u > 0.5] % 2 == 1).any())


@pytest.mark.parametrize("axis", ["seed", "sequence", "position"])
def test_uniforms_fill_the_interval_evenly_along_each_axis(axis: str) -> None:
    count, bins = 50_000, 100
    fixed, moving = [9] * count, list(range(count))
    u = draws(*(moving if name == axis else fixed for name in ("seed", "sequence", "position")))
    found = torch.histc(u, bins, 0.0, 1.0).double()
    expected = count / bins
    # Percentiles 0.01 and 99.99 of chi-square with 99 degrees of freedom are 54.7 and 159.7.
    assert 54.7 < float(((found - expected) ** 2 / expected).sum()) < 159.7


@pytest.mark.parametrize("axis", ["seed", "sequence", "position"])
def test_neighbouring_numbers_are_not_correlated(axis: str) -> None:
    count = 50_000
    fixed, moving = [3] * count, list(range(count))
    u = (
        draws(*(moving if name == axis else fixed for name in ("seed", "sequence", "position"))).double()
        - 0.5
    )
    correlation = float((u[1:] * u[:-1]).mean() / u.pow(2).mean())
    assert abs(correlation) < 4 / count**0.5


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 9, 11, 64])
def test_a_row_draws_the_same_bits_in_any_batch_and_place(batch: int) -> None:
    rows = [(7 * i - 20, i % 3, 100 + i) for i in range(batch)]
    together = draws(*zip(*rows, strict=True))
    alone = torch.cat([draws(*([x] for x in row)) for row in rows])
    assert torch.equal(together, alone)
    assert torch.equal(draws(*zip(*rows[::-1], strict=True)), together.flip(0))


@pytest.mark.parametrize("batch", [1, 9])
def test_the_compiled_op_draws_the_bits_of_the_reference_rule(batch: int) -> None:
    operands = [torch.arange(batch) * step - 3 for step in (2**40, 1, 5)]
    assert torch.equal(atbx.jit(uniform)(*operands), run(uniform, *operands))
    assert torch.equal(run(uniform, *(strided(x) for x in operands)), run(uniform, *operands))


def test_the_shape_rule_gives_one_fp32_number_a_row() -> None:
    operand = Abstract((5,), torch.int64)
    found = shapes(uniform, operand, operand, operand)
    assert (tuple(found.shape), found.dtype) == ((5,), torch.float32)
    program = stage(uniform, operand, operand, operand)
    assert len(program) == 1
    assert program.cost().flops > 0


@pytest.mark.parametrize("name", ["seed", "sequence", "position"])
@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, dtype=torch.int32), torch.zeros(4).long(), torch.zeros(3, 1).long()]
)
def test_operands_that_do_not_fit_are_refused(name: str, wrong: torch.Tensor) -> None:
    if name == "seed" and wrong.shape == (4,):
        name = "sequence"  # The seed's length is what the others are held against.
    operands = {n: torch.zeros(3).long() for n in ("seed", "sequence", "position")}
    operands[name] = wrong
    with pytest.raises(ShapeError, match=rf"uniform: {name} does not fit; expected i64 .*, found "):
        shapes(uniform, *(abstract_of(x) for x in operands.values()))
