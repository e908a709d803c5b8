"""The software device's rule for our Triton kernel: by hand, against the interpreted kernel, and its limits."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from atbx.kernels.ascend.triton import interpreted, launch
from atbx.testing.software_npu.rules.registry import LIMITS, RULES, Call, first_refusal

if importlib.util.find_spec("triton") is not None:
    # Triton reads it when the kernel is defined, which the first launch of the process does.
    os.environ["TRITON_INTERPRET"] = "1"

NAME = "atbx::qkv_rotary_write"
SIZES = {"heads": 4, "kv_heads": 2, "head_size": 32, "rotary_dim": 32}
OPTIONS = {"style": "half", "eps": 0.0, "layout": "slots"}

# See tests/test_triton_numerics.py.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(scope="module", name="rules")
def _rules() -> Iterator[ModuleType]:
    """The module of the rule; where the package did not import it, the tables are left as they were found."""
    name = "atbx.testing.software_npu.rules.atbx_triton"
    was_there = NAME in RULES
    yield importlib.import_module(name)
    if not was_there:
        del RULES[NAME], LIMITS[NAME], sys.modules[name]


def _inputs(
    dtype: torch.dtype = torch.float16, dims: int = 32, bnsd: bool = False
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(5, dims // 2, generator=generator)
    shape = (3, 2, 4, 32) if bnsd else (3, 4, 2, 32)
    return {
        "qkv": torch.randn(5, 8 * 32, generator=generator).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "slots": torch.tensor([7, -1, 0, 11, 5], dtype=torch.int32),
        "k_arena": torch.full(shape, torch.nan, dtype=dtype),
        "v_arena": torch.full(shape, torch.nan, dtype=dtype),
        "q_out": torch.full((5, 4, 32), torch.nan, dtype=dtype),
    }


@pytest.mark.parametrize(
    ("style", "query", "key"),
    [
        ("half", [-2, -3, 0, 1, 4, 5], [-8, -9, 6, 7, 10, 11]),
        ("interleaved", [-1, 0, -3, 2, 4, 5], [-7, 6, -9, 8, 10, 11]),
    ],
)
def test_a_quarter_turn_by_hand(rules: ModuleType, style: str, query: list[int], key: list[int]) -> None:
    qkv = torch.arange(18, dtype=torch.float16).view(1, 18)
    keys, values = torch.zeros(2, 1, 6).half(), torch.zeros(2, 1, 6).half()
    out = torch.zeros(1, 1, 6).half()
    sizes = {"heads": 1, "kv_heads": 1, "head_size": 6, "rotary_dim": 4}
    turn = torch.zeros(1, 2), torch.ones(1, 2)
    rules.plainly(
        qkv, *turn, torch.tensor([1]), keys, values, out, **sizes, style=style, eps=0.0, layout="slots"
    )
    assert out.flatten().tolist() == query
    assert keys.tolist() == [[[0.0] * 6], [key]]
    assert values.tolist() == [[[0.0] * 6], [[12.0, 13.0, 14.0, 15.0, 16.0, 17.0]]]


def test_nothing_is_interpreted_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert interpreted() is None


def test_it_stands_in_the_table(rules: ModuleType) -> None:
    assert RULES[NAME].function is rules.qkv_rotary_write
    assert len(LIMITS[NAME]) == 6


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("bnsd", [False, True])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("dims", [32, 16])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rule_and_interpreted_kernel_agree(
    rules: ModuleType,
    dtype: torch.dtype,
    style: str,
    dims: int,
    is_normed: bool,
    bnsd: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when the kernel is defined, by the first launch of the process
    )
    norms = {"q_norm": torch.linspace(-1, 2, 32).to(dtype), "k_norm": torch.linspace(2, 1, 32).to(dtype)}
    options = SIZES | {
        "rotary_dim": dims, "style": style, "eps": 1e-6, "layout": "BNSD" if bnsd else "slots",
        **(norms if is_normed else {}),
    }  # fmt: skip
    kernel, plain = _inputs(dtype, dims, bnsd), _inputs(dtype, dims, bnsd)
    found = interpreted()
    assert found is launch
    rules.run_instead(found)
    monkeypatch.setattr(rules, "plainly", None)  # the rule must run the kernel now
    try:
        rules.qkv_rotary_write(**kernel, **options)
    finally:
        rules.run_instead(None)
        monkeypatch.undo()
    rules.qkv_rotary_write(**plain, **options)
    step = torch.finfo(dtype).eps if is_normed else 0.0
    for name in ("q_out", "k_arena", "v_arena"):
        torch.testing.assert_close(
            kernel[name].float(), plain[name].float(), rtol=step, atol=step / 100, equal_nan=True
        )


def _call(chip: str = "Ascend910B3", **changed: object) -> Call:
    return Call(NAME, _inputs() | SIZES | OPTIONS | changed, {}, frozenset(), chip, "9.1.0")


@pytest.mark.parametrize(
    ("chip", "changed", "name", "when"),
    [
        ("Ascend910B3", {"cos": torch.zeros(5, 16, dtype=torch.float16)}, "halves_and_fp32_tables", "launch"),
        ("Ascend910B3", {"slots": torch.zeros(5, dtype=torch.int16)}, "halves_and_fp32_tables", "launch"),
        ("Ascend910B3", {"qkv": torch.zeros(256, 5).half().t()}, "everything_contiguous", "launch"),
        ("Ascend910B3", {"head_size": 72}, "head_size_multiple_of_16_up_to_256", "launch"),
        ("Ascend310P3", {}, "a2_and_a3_only", "launch"),
        ("Ascend910B3", {"slots": torch.tensor([12, 0, 1, 2, 3])}, "slots_inside", "execution"),
        ("Ascend910B3", {"slots": torch.tensor([3, 0, 1, 2, 3])}, "slots_unique", "execution"),
    ],
)
def test_limits(rules: ModuleType, chip: str, changed: dict, name: str, when: str) -> None:
    found = first_refusal(_call(chip, **changed), when)
    assert found is not None
    assert found[0].name == name


def test_a_good_call_is_allowed(rules: ModuleType) -> None:
    for chip in ("Ascend910B3", "Ascend910_9392"):
        for when in ("launch", "execution"):
            assert first_refusal(_call(chip), when) is None
    dropped = torch.full((5,), -1, dtype=torch.int32)
    assert first_refusal(_call(slots=dropped), "execution") is None
