"""Every op compiled on the CPU backend against its reference rule: the same result in both modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import atbx
from atbx import ops
from atbx.kernels import cpu
from atbx.ops import logits
from atbx.ops.philox import uniform
from atbx.ops.rope import Rope

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}

TUNED = {"linear", "matmul", "embedding", "rms_norm", "add_rms_norm", "rotary", "gated"}
"""Ops with kernels of their own; the kernels of all others are their reference rules."""
ELSEWHERE = {
    "attention", "kv_write", "norm_qkv", "rotary_write", "attend_project", "norm_gated_mlp"
}  # fmt: skip
"""Covered by test_attention and test_fusion."""


def draw(*shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return low + (high - low) * torch.rand(
        shape, generator=torch.Generator().manual_seed(len(shape) * 7 + shape[0])
    )


X, Y, P = draw(3, 5), draw(3, 5, low=-1.0), draw(3, 5, low=0.1)
HEADS = draw(2, 3, 4, 8)
Q, K = HEADS, HEADS[:, :, :2].contiguous()
IDS = torch.tensor([[2, 0], [1, 1], [4, 3]])
POSITIONS = torch.tensor([[0, 1, 700], [5, 6, 7]])
COUNTS = torch.tensor([5, 2, 1])
ROWS = torch.tensor([0.5, 1.0, 2.0])
SEEN, TIMES = X > 0.5, (X > 0).int()


def over(name: str, **options: Any) -> Callable[..., Any]:
    """A reduction over axis 1, with the counts of its rows if they are given."""
    reduce = getattr(ops, name)
    return lambda x, counts=None: reduce(x, axis=1, counts=counts, **options)


def unary(name: str, x: torch.Tensor = X) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
    return name, getattr(ops, name), (x,)


CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    *(unary(n) for n in ("negative", "exp", "tanh", "sigmoid", "erf", "sin", "cos", "silu", "gelu", "relu")),
    *(unary(n, P) for n in ("log", "sqrt", "rsqrt")),
    *((n, getattr(ops, n), (X, P)) for n in ("add", "subtract", "multiply", "divide", "maximum", "minimum")),
    *((n, getattr(ops, n), (X, Y)) for n in ("less", "less_equal", "equal", "not_equal")),
    *((n, getattr(ops, n), (X > 0, Y > 0)) for n in ("logical_and", "logical_or")),
    *((n, over(n), (X,)) for n in ("sum", "mean", "max", "min", "cumsum", "argmax")),
    *((n, over(n), (X, COUNTS)) for n in ("softmax", "logsumexp")),
    ("logical_not", ops.logical_not, (X > 0,)),
    ("gelu_tanh", lambda x: ops.gelu(x, "tanh"), (X,)),
    ("power", lambda x: ops.power(x, 1.5), (P,)),
    ("where", ops.where, (X > 0, X, Y)),
    ("clip", lambda x: ops.clip(x, -0.5, 0.5), (X,)),
    ("top_k", lambda x: ops.top_k(x, 3), (X,)),
    ("reshape", lambda x: ops.reshape(x, (5, 3)), (X,)),
    ("transpose", lambda x: ops.transpose(x, (1, 0)), (X,)),
    ("expand_dims", lambda x: ops.expand_dims(x, 1), (X,)),
    ("squeeze", lambda x: ops.squeeze(x, 0), (X[:1],)),
    ("broadcast_to", lambda x: ops.broadcast_to(x, (2, 3, 5)), (X,)),
    ("cast", lambda x: ops.cast(x, torch.bfloat16), (X,)),
    ("concat", lambda x, y: ops.concat([x, y], axis=1), (X, Y)),
    ("split", lambda x: ops.split(x, (2, 3)), (X,)),
    ("arange", lambda x: x[0, 0] + ops.cast(ops.arange(4), x.dtype), (X,)),
    ("getitem", lambda x: x[1:, ::2], (X,)),
    ("take", ops.take, (draw(3, 5, 4), IDS)),
    ("take_along", lambda x, i: ops.take_along(x, i, axis=1), (X, IDS)),
    ("embedding", ops.embedding, (draw(5, 4), IDS)),
    ("linear", ops.linear, (draw(2, 3, 16), draw(7, 16))),
    ("linear", ops.linear, (draw(2, 3, 16), draw(7, 16), draw(7))),
    ("linear", ops.linear, (draw(1, 1, 360), draw(33, 360))),
    ("matmul", ops.matmul, (draw(2, 3, 5), draw(5, 4))),
    ("rms_norm", lambda x, w: ops.rms_norm(x, w, eps=1e-5), (X, draw(5))),
    ("rms_norm", lambda x, w: ops.rms_norm(x, w, eps=1e-5, offset=1.0), (X, draw(5))),
    ("layer_norm", lambda x, w, b: ops.layer_norm(x, w, b, eps=1e-5), (X, draw(5), draw(5))),
    ("add_rms_norm", lambda x, y, w: ops.add_rms_norm(x, y, w, eps=1e-5), (X, Y, draw(5))),
    ("gated", lambda x, y: ops.gated(x, y, activation="silu"), (X, Y)),
    ("gated", lambda x, y: ops.gated(x, y, activation="gelu_tanh"), (torch.zeros(3, 5), Y)),
    ("rotary", lambda q, k, p: ops.rotary(q, k, p, Rope(8)), (Q, K, POSITIONS)),
    ("rotary", lambda q, k, p: ops.rotary(q, k, p, Rope(4, style="interleaved")), (Q, K, POSITIONS)),
    ("rotary_angles", lambda p: ops.rotary_angles(p, Rope(8)), (POSITIONS,)),
    ("penalize", logits.penalize, (X, SEEN, TIMES, ROWS, ROWS, ROWS)),
    ("bias_logits", logits.bias_logits, (X, IDS, draw(3, 2))),
    ("suppress", logits.suppress, (X, IDS, ROWS > 0.7)),
    ("filter_logits", logits.filter_logits, (X, ROWS, COUNTS, 0.4 * ROWS, 0.1 * ROWS)),
    ("draw", logits.draw, (X, 0.4 * ROWS)),
    ("is_unusable", logits.is_unusable, (X.log(),)),
    ("token_logprobs", logits.token_logprobs, (X, IDS[:, 0])),
    ("top_logprobs", lambda x: logits.top_logprobs(x, 2), (X,)),
    ("count_tokens", logits.count_tokens, (TIMES, IDS[:, 0], ROWS > 0.7)),
    ("uniform", uniform, (IDS[:, 0], IDS[:, 1], COUNTS)),
]


def flat(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def agree(found: Any, expected: Any, *, exactly: bool) -> None:
    """Equal dtypes and shapes, and equal or (where rounding may differ) close values."""
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        bound = 0.0 if exactly or not a.is_floating_point() else TOLERANCE[a.dtype]
        torch.testing.assert_close(a, b, atol=bound, rtol=bound, equal_nan=True)


NAMED = [pytest.param(*case, id=f"{case[0]}-{index}") for index, case in enumerate(CASES)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "call", "operands"), NAMED)
def test_compiled_ops_are_their_reference_rules(
    name: str, call: Callable[..., Any], operands: tuple[Any, ...], dtype: torch.dtype
) -> None:
    if dtype != torch.float32 and name in ("draw", "penalize", "bias_logits", "filter_logits"):
        pytest.skip("these ops take FP32 options")
    cast = tuple(x.to(dtype) if x.is_floating_point() else x for x in operands)
    expected = atbx.reference(call, *cast)
    compiled = atbx.jit(lambda values: call(*values))
    choices = compiled.explain(cast).choices
    assert name in {c.equation.op.name for c in choices}
    assert all(c.kernel.tier != "reference" for c in choices)
    agree(compiled(cast), expected, exactly=name not in TUNED)


def test_every_op_of_the_backend_is_here_or_named_elsewhere() -> None:
    assert {name for name, *_ in CASES} | ELSEWHERE | {"copy"} == set(cpu.backend().table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 360, 33), (2, 3, 64, 128), (1, 130, 24, 8)])
def test_packed_weights_agree_with_an_fp64_product(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    B, T, M, N = shape
    x, weight = draw(B, T, M).to(dtype), draw(N, M).to(dtype)
    found = atbx.jit(lambda w, x: ops.linear(x, w))(atbx.bind(weight), x)
    exact = x.double() @ weight.double().T
    assert (
        float((found.double() - exact).norm() / exact.norm())
        < {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    )
