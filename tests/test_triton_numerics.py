"""Our Triton kernel in Triton's interpreter against the reference rules of the ops it stands for.

Needs the module triton (the extra `triton`, or triton-ascend), in an environment of its own if torch_npu is there.
"""

from __future__ import annotations

import importlib.util
import os
import random

import pytest
import torch

from atbx.kernels.ascend.triton import launch
from atbx.ops.packed import QKV_ROTARY_WRITE
from atbx.ops.rotary import ROTARY

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (extra `triton`)", allow_module_level=True)
# Triton reads it when the kernel is defined, which the first launch does.
os.environ["TRITON_INTERPRET"] = "1"

# The interpreter of triton-ascend 3.2.0 makes scalars of arrays as NumPy from 1.25 on warns of (and 2.4 refuses).
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

HALVES = (torch.float16, torch.bfloat16)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


class Case:
    """Inputs of one call: arenas are poisoned with NaN, slots are unique, some are dropped."""

    def __init__(
        self,
        N: int,
        H: int,
        K: int,
        D: int,
        dims: int,
        dtype: torch.dtype,
        *,
        slots: int = 40,
        dropped: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(N * 1000 + H * 100 + D)
        self.N, self.H, self.K, self.D, self.dims, self.dtype = N, H, K, D, dims, dtype
        self.qkv = torch.randn(N, (H + 2 * K) * D, generator=self.generator).to(dtype)
        angles = torch.randn(N, dims // 2, generator=self.generator) * 3
        self.cos, self.sin = angles.cos(), angles.sin()
        shuffled = random.Random(N).sample(range(slots), N)
        for place in random.Random(N + 1).sample(range(N), dropped):
            shuffled[place] = -1
        self.slots = torch.tensor(shuffled, dtype=torch.int32)
        self.k_arena, self.v_arena = (torch.full((slots, K, D), torch.nan, dtype=dtype) for _ in "kv")
        self.q_out = torch.full((N, H, D), torch.nan, dtype=dtype)

    def sizes(self, style: str = "half") -> dict:
        return {
            "heads": self.H, "kv_heads": self.K, "head_size": self.D, "rotary_dim": self.dims, "style": style,
        }  # fmt: skip

    def run(self, style: str = "half", **changed: object) -> None:
        tensors = {
            name: getattr(self, name)
            for name in ("qkv", "cos", "sin", "slots", "k_arena", "v_arena", "q_out")
        }
        launch(**(tensors | self.sizes(style) | changed))

    def expected(self, style: str = "half") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_out and both arenas as the rule of `rotary` and an indexed write give them."""
        H, K, D = self.H, self.K, self.D
        q, k, v = self.qkv.view(1, self.N, H + 2 * K, D).split([H, K, K], dim=2)
        q, k = ROTARY.reference(q, k, self.cos[None], self.sin[None], style=style)
        keys, values = (torch.full_like(self.k_arena, torch.nan) for _ in "kv")
        real = self.slots >= 0
        keys[self.slots[real].long()] = k[0][real]
        values[self.slots[real].long()] = v[0][real]
        return q[0], keys, values

    def check(self, style: str = "half") -> None:
        """Every bit as the rule has it, untouched slots included."""
        for name, found, wanted in zip(
            "qkv", (self.q_out, self.k_arena, self.v_arena), self.expected(style), strict=True
        ):
            assert torch.equal(_bits(found).flatten(), _bits(wanted).flatten()), name


def test_a_quarter_turn_by_hand() -> None:
    # One query head and one KV head of 16 channels, of which 4 turn by 90 degrees: (a, b) to (-b, a).
    case = Case(1, 1, 1, 16, 4, torch.float16, slots=3)
    case.qkv = torch.arange(48, dtype=torch.float16).view(1, 48)
    case.cos, case.sin = torch.zeros(1, 2), torch.ones(1, 2)
    case.slots = torch.tensor([2], dtype=torch.int32)
    case.run("half")
    assert case.q_out[0, 0].tolist() == [-2, -3, 0, 1, *range(4, 16)]
    assert case.k_arena[2, 0].tolist() == [-18, -19, 16, 17, *range(20, 32)]
    assert case.v_arena[2, 0].tolist() == list(range(32, 48))
    assert case.k_arena[:2].isnan().all()
    assert case.v_arena[:2].isnan().all()
    case.run("interleaved")
    assert case.q_out[0, 0].tolist() == [-1, 0, -3, 2, *range(4, 16)]
    assert case.k_arena[2, 0].tolist() == [-17, 16, -19, 18, *range(20, 32)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("N", range(1, 18))
def test_any_number_of_tokens(N: int, dtype: torch.dtype) -> None:
    case = Case(N, 4, 1, 16, 16, dtype, dropped=N // 3)
    case.run()
    case.check()


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("H", "K"), [(4, 4), (12, 3), (8, 1)])
def test_head_sizes_groups_styles_and_partial_rotary(H: int, K: int, D: int, part: float, style: str) -> None:
    for dtype in HALVES:
        case = Case(3, H, K, D, int(D * part), dtype, dropped=1)
        case.run(style)
        case.check(style)


def test_many_heads_take_several_tiles() -> None:
    case = Case(2, 40, 20, 128, 128, torch.bfloat16)
    case.run()
    case.check()


def test_all_dropped_writes_queries_only() -> None:
    case = Case(5, 4, 2, 64, 64, torch.float16, dropped=5)
    case.run()
    assert case.k_arena.isnan().all()
    assert case.v_arena.isnan().all()
    case.check()


def test_slots_of_64_bits_and_no_tokens() -> None:
    case = Case(4, 4, 2, 64, 64, torch.float16, dropped=1)
    case.run(slots=case.slots.long())
    case.check()
    before = _bits(case.k_arena).clone()
    empty = {name: getattr(case, name)[:0] for name in ("qkv", "cos", "sin", "slots", "q_out")}
    case.run(**empty)
    assert torch.equal(_bits(case.k_arena), before)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", HALVES)
def test_views_of_an_arena_name_the_same_slots(dtype: torch.dtype, style: str) -> None:
    # [R,S,K,D], [blocks,block,K*D] and, its bytes in another order, [blocks,K,block,D].
    case = Case(7, 8, 2, 64, 32, dtype, dropped=2)
    keys, values = (x.view(5, 8, 2, 64) for x in (case.k_arena, case.v_arena))
    case.run(style, k_arena=keys, v_arena=values)
    case.check(style)
    paged = [torch.full((10, 4, 128), torch.nan, dtype=dtype) for _ in "kv"]
    case.run(style, k_arena=paged[0], v_arena=paged[1])
    assert torch.equal(_bits(paged[0]).flatten(), _bits(case.k_arena).flatten())
    turned = [torch.full((10, 2, 4, 64), torch.nan, dtype=dtype) for _ in "kv"]
    case.run(style, k_arena=turned[0], v_arena=turned[1], layout="BNSD")
    for found, wanted in zip(turned, (case.k_arena, case.v_arena), strict=True):
        assert torch.equal(_bits(found.transpose(1, 2).reshape(40, 2, 64)), _bits(wanted))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("window", [None, 5])
def test_the_fused_op_over_ragged_rows(style: str, window: int | None) -> None:
    # The op's own operands: rows, lengths, counts; a ring of 8 slots where there is a window.
    B, T, H, K, D, S = 3, 4, 8, 2, 64, 8
    case = Case(B * T, H, K, D, D, torch.bfloat16, slots=B * S)
    rows, lengths, counts = (torch.tensor(x) for x in ([2, 0, 1], [3, 0, 6 if window else 4], [4, 0, 2]))
    arenas = [torch.randn(B, S, K, D, generator=case.generator).bfloat16() for _ in "kv"]
    position = lengths[:, None] + torch.arange(T)
    flat = rows[:, None] * S + position % S
    slots = flat.masked_fill(torch.arange(T) >= counts[:, None], -1).flatten()
    extent = 16 if window else S
    q, keys, values = QKV_ROTARY_WRITE.reference(
        case.qkv.view(B, T, -1), None, None, case.cos.view(B, T, -1), case.sin.view(B, T, -1), *arenas,
        rows, lengths, counts, heads=(H, K, K), head_size=D, eps=0.0, style=style, window=window, extent=extent,
    )  # fmt: skip
    mine = [a.clone() for a in arenas]
    case.run(style, k_arena=mine[0], v_arena=mine[1], slots=slots)
    assert torch.equal(_bits(mine[0]), _bits(keys))
    assert torch.equal(_bits(mine[1]), _bits(values))
    assert torch.equal(_bits(case.q_out), _bits(q.reshape(B * T, H, D)))


@pytest.mark.parametrize("weights", [torch.float32, None])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("D", "dims", "style"), [(128, 128, "half"), (80, 32, "half"), (96, 96, "interleaved")]
)
def test_norms_of_query_and_key_heads(
    D: int, dims: int, style: str, dtype: torch.dtype, weights: torch.dtype | None
) -> None:
    case = Case(5, 8, 2, D, dims, dtype, dropped=1)
    norms = [torch.randn(D, generator=case.generator).to(weights or dtype) for _ in "qk"]
    case.run(style, q_norm=norms[0], k_norm=norms[1], eps=1e-6)
    # The same in FP64, rounded once; the kernel computes in FP32, so a result may be one step of its dtype off.
    wide = case.qkv.double().view(5, 12, D)
    q, k = wide[:, :8], wide[:, 8:10]
    q, k = (
        x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
        for x, w in zip((q, k), norms, strict=True)
    )
    q, k = ROTARY.reference(q[None], k[None], case.cos[None].double(), case.sin[None].double(), style=style)
    real = case.slots >= 0
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(case.q_out.double(), q[0], rtol=0.51 * step, atol=1e-6)
    found = case.k_arena[case.slots[real].long()].double()
    torch.testing.assert_close(found, k[0][real], rtol=0.51 * step, atol=1e-6)
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[case.slots[real].long()] = False
    assert case.k_arena[untouched].isnan().all()
    assert not case.k_arena[~untouched].isnan().any()
    assert torch.equal(_bits(case.v_arena), _bits(case.expected(style)[2]))


def test_one_norm_alone() -> None:
    case = Case(2, 4, 2, 64, 64, torch.float16)
    case.run(k_norm=torch.ones(64, dtype=torch.float16), eps=1e-6)
    plain = Case(2, 4, 2, 64, 64, torch.float16)
    assert torch.equal(_bits(case.q_out), _bits(plain.expected()[0]))
    rms = case.k_arena[case.slots.long()].float().square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones(2, 2), rtol=1e-3, atol=0)
