"""Example equations for the self-test: a few for every op, over the shapes, caches and options at which kernels differ.

An example is a small function that calls the op, with arguments; the equation is what staging makes of it. Arguments
may be parameters (kernels pack them) or host values (rows, lengths, indices), and floats are cast to the dtype tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atbx import ops
from atbx.core.backend import Backend
from atbx.core.jit import Jit
from atbx.core.op import COPY
from atbx.core.program import Equation, Var
from atbx.kernels import cpu
from atbx.ops import logits
from atbx.ops.attention import ATTENTION, KV_WRITE
from atbx.ops.fused import ATTEND_PROJECT, NORM_GATED_MLP, NORM_QKV, ROTARY_WRITE
from atbx.ops.packed import GATED_PACKED, QKV_ROTARY_WRITE
from atbx.ops.philox import uniform
from atbx.ops.rope import Rope
from atbx.ops.rotary import ROTARY
from atbx.recording import reference_values

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
ONLY_FP32 = (torch.float32,)


@dataclass(frozen=True)
class Example:
    """A call of one op. `call(*arguments)` makes the equation.

    name: what it shows. bound, host, wide: indices of arguments that are parameters, that lie in host memory, and that
    stay FP32 whatever the dtype. dtypes: those that it is tried in.
    """

    op: str
    name: str
    call: Callable[..., Any]
    arguments: tuple[torch.Tensor, ...]
    bound: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    wide: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS


@dataclass(frozen=True)
class Case:
    """An example in one dtype: the equation, the values of its operands, which are parameters and which on the host."""

    example: Example
    dtype: torch.dtype
    equation: Equation
    values: dict[Var, torch.Tensor]
    bound: frozenset[Var]
    host: frozenset[Var]

    @property
    def operands(self) -> tuple[Any, ...]:
        """Operands as values."""
        return tuple(self.values[x] if isinstance(x, Var) else x.value for x in self.equation.inputs)


def case(example: Example, dtype: torch.dtype) -> Case:
    """The example in a dtype."""
    arguments = tuple(
        x.to(dtype) if x.is_floating_point() and i not in example.wide else x
        for i, x in enumerate(example.arguments)
    )
    program = Jit(lambda values: example.call(*values), _staging()).stage(arguments)
    inputs = {**dict(program.constants), **dict(zip(program.inputs, arguments, strict=True))}
    values = reference_values(program, inputs)
    equation = next(e for e in program.equations if e.op.name == example.op)
    bound = {program.inputs[i] for i in example.bound}
    host = {v for i, v in enumerate(program.inputs) if i in example.host}
    for made in program.equations:
        operands = list(made.input_vars())
        if all(v in host for v in operands):
            host.update(made.outputs)
    return Case(example, dtype, equation, values, frozenset(bound), frozenset(host - bound))


def _staging() -> Backend:
    return cpu.backend()


def draw(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> torch.Tensor:
    """Random numbers between low and high, the same in every run."""
    generator = torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape))
    return low + (high - low) * torch.rand(shape, generator=generator)


def examples() -> tuple[Example, ...]:
    """Every example, ops in alphabetical order."""
    found = [
        *_elementwise(),
        *_shapes(),
        *_reductions(),
        *_lookups(),
        *_matmuls(),
        *_norms(),
        *_activations(),
        *_rotary(),
        *_writes(),
        *_attention(),
        *_fused(),
        *_sampling(),
    ]
    return tuple(sorted(found, key=lambda e: e.op))


X, Y, P = draw(3, 32), draw(3, 32, seed=1), draw(3, 32, low=0.1)


def _elementwise() -> Iterator[Example]:
    for name in ("negative", "exp", "tanh", "sigmoid", "erf", "sin", "cos"):
        yield Example(name, "[3,32]", getattr(ops, name), (X,))
    for name in ("log", "sqrt", "rsqrt"):
        yield Example(name, "[3,32]", getattr(ops, name), (P,))
    for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum"):
        yield Example(name, "[3,32]", getattr(ops, name), (X, P))
    for name in ("less", "less_equal", "equal", "not_equal"):
        yield Example(name, "[3,32]", getattr(ops, name), (X, Y))
    for name in ("logical_and", "logical_or"):
        yield Example(name, "[3,32]", getattr(ops, name), (X > 0, Y > 0), dtypes=ONLY_FP32)
    yield Example("logical_not", "[3,32]", ops.logical_not, (X > 0,), dtypes=ONLY_FP32)
    yield Example("power", "[3,32] to 1.5", lambda x: ops.power(x, 1.5), (P,))
    yield Example("where", "[3,32]", ops.where, (X > 0, X, Y))
    yield Example("clip", "[3,32]", lambda x: ops.clip(x, -0.5, 0.5), (X,))
    yield Example("copy", "[3,32]", COPY, (X,))


def _shapes() -> Iterator[Example]:
    yield Example("reshape", "[3,32] to [32,3]", lambda x: ops.reshape(x, (32, 3)), (X,))
    yield Example("transpose", "[3,32]", lambda x: ops.transpose(x, (1, 0)), (X,))
    yield Example("expand_dims", "[3,32]", lambda x: ops.expand_dims(x, 1), (X,))
    yield Example("squeeze", "[1,32]", lambda x: ops.squeeze(x, 0), (X[:1],))
    yield Example("broadcast_to", "[3,32] to [2,3,32]", lambda x: ops.broadcast_to(x, (2, 3, 32)), (X,))
    yield Example("cast", "to FP32", lambda x: ops.cast(x, torch.float32), (X,), dtypes=HALVES)
    yield Example("cast", "to FP16", lambda x: ops.cast(x, torch.float16), (X,), dtypes=ONLY_FP32)
    yield Example("concat", "last axis", lambda x, y: ops.concat([x, y], axis=1), (X, Y))
    yield Example("split", "[3,32] in 12 and 20", lambda x: ops.split(x, (12, 20)), (X,))
    yield Example("getitem", "[1:, ::2]", lambda x: x[1:, ::2], (X,))
    yield Example(
        "arange", "4", lambda x: x[0, :4] + ops.cast(ops.arange(4), x.dtype), (X,), dtypes=ONLY_FP32
    )


COUNTS = torch.tensor([32, 9, 1])


def _reductions() -> Iterator[Example]:
    for name in ("sum", "mean", "max", "min", "cumsum", "argmax", "softmax", "logsumexp"):
        yield Example(name, "[3,32] over the last axis", _over(name), (X,))
    for name in ("sum", "mean", "max", "softmax", "logsumexp", "argmax"):
        yield Example(name, "with counts", _over(name), (X, COUNTS), host=(1,))
    yield Example("top_k", "3 of 32", lambda x: ops.top_k(x, 3), (X,))


def _over(name: str) -> Callable[..., Any]:
    reduce = getattr(ops, name)
    return lambda x, counts=None: reduce(x, axis=1, counts=counts)


IDS = torch.tensor([[2, 0], [1, 1], [4, 3]])


def _lookups() -> Iterator[Example]:
    table = draw(40, 64)
    yield Example("embedding", "a parameter [40,64]", ops.embedding, (table, IDS), bound=(0,), host=(1,))
    yield Example("embedding", "a value [40,64]", ops.embedding, (table, IDS), host=(1,))
    yield Example("take", "tokens of [3,5,32]", ops.take, (draw(3, 5, 32), IDS), host=(1,))
    yield Example(
        "take", "the one token", ops.take, (draw(3, 1, 32), torch.zeros(3, 1, dtype=torch.int64)), host=(1,)
    )
    yield Example("take_along", "[3,32]", lambda x, i: ops.take_along(x, i, axis=1), (X, IDS), host=(1,))


def _matmuls() -> Iterator[Example]:
    for rows in (1, 5):
        for inner, outer in ((64, 96), (64, 33), (256, 128)):
            x, w = draw(1, rows, inner), draw(outer, inner, low=-0.3, high=0.3)
            yield Example("linear", f"{rows} rows, [{outer},{inner}]", ops.linear, (x, w), bound=(1,))
        bias = draw(96)
        x, w = draw(1, rows, 64), draw(96, 64, low=-0.3, high=0.3)
        yield Example("linear", f"{rows} rows, with bias", ops.linear, (x, w, bias), bound=(1, 2))
    yield Example("linear", "the weight a value", ops.linear, (draw(1, 3, 64), draw(32, 64)))
    yield Example("matmul", "[2,3,32] by [32,16]", ops.matmul, (draw(2, 3, 32), draw(32, 16)))


def _norms() -> Iterator[Example]:
    for width in (64, 80, 256):
        x, w = draw(2, 3, width), draw(width, low=0.5, high=1.5)
        yield Example(
            "rms_norm", f"width {width}", lambda x, w: ops.rms_norm(x, w, eps=1e-5), (x, w), bound=(1,)
        )
        yield Example(
            "rms_norm",
            f"width {width}, weight + 1",
            lambda x, w: ops.rms_norm(x, w, eps=1e-6, offset=1.0),
            (x, w - 1),
            bound=(1,),
        )
        yield Example(
            "add_rms_norm",
            f"width {width}",
            lambda x, y, w: ops.add_rms_norm(x, y, w, eps=1e-5),
            (x, draw(2, 3, width, seed=1), w),
            bound=(2,),
        )
        yield Example(
            "add_rms_norm",
            f"width {width}, weight + 1",
            lambda x, y, w: ops.add_rms_norm(x, y, w, eps=1e-6, offset=1.0),
            (x, draw(2, 3, width, seed=1), w - 1),
            bound=(2,),
        )
    yield Example(
        "layer_norm",
        "width 64",
        lambda x, w, b: ops.layer_norm(x, w, b, eps=1e-5),
        (draw(2, 3, 64), draw(64), draw(64, seed=1)),
    )


def _activations() -> Iterator[Example]:
    for name in ("silu", "gelu", "relu"):
        yield Example(name, "[3,32]", getattr(ops, name), (X,))
    yield Example("gelu_tanh", "[3,32]", lambda x: ops.gelu(x, "tanh"), (X,))
    for kind in ops.ACTIVATIONS:
        yield Example("gated", kind, lambda x, y, kind=kind: ops.gated(x, y, activation=kind), (X, Y))
        yield Example(
            "gated_packed", kind, lambda x, kind=kind: GATED_PACKED(x, activation=kind), (draw(2, 3, 128),)
        )


HEADS = ((4, 4, 64), (4, 1, 80), (8, 1, 96), (4, 1, 128), (2, 2, 256), (8, 1, 64), (8, 1, 128))
"""(query heads, KV heads, head size): 64, 80, 96, 128 and 256; 1, 4 and 8 query heads a KV head."""


def _angles(batch: int, tokens: int, dims: int, start: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.tensor(start).view(batch, 1) + torch.arange(tokens)
    frequency = 10000.0 ** (-torch.arange(0, dims, 2) / dims)
    angle = position.unsqueeze(-1) * frequency
    return angle.cos(), angle.sin()


def _rotary() -> Iterator[Example]:
    yield Example(
        "rotary_angles",
        "64 channels",
        lambda p: ops.rotary_angles(p, Rope(64)),
        (IDS,),
        host=(0,),
        dtypes=ONLY_FP32,
    )
    for H, K, D in HEADS:
        for style, dims in (("half", D), ("half", D // 2), ("interleaved", D)):
            cos, sin = _angles(2, 3, dims, (0, 700))
            yield Example(
                "rotary",
                f"{H} and {K} heads of {D}, {style}, {dims} channels",
                lambda q, k, c, s, style=style: ROTARY(q, k, c, s, style=style),
                (draw(2, 3, H, D), draw(2, 3, K, D), cos, sin),
                host=(2, 3),
                wide=(2, 3),
            )


@dataclass(frozen=True)
class Cache:
    """A small KV cache: arenas, places of the rows, lengths and new tokens of a step.

    kind: "dense", "unaligned" (rows of 40 slots), "paged" (blocks of 128), "pages of 16", "ring" (a wrapped window).
    """

    kind: str
    tokens: int
    window: int | None = None

    @property
    def name(self) -> str:
        """In words."""
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.kind}, {self.tokens} token{'s' * (self.tokens > 1)}{window}"

    def arguments(self, heads: int, size: int) -> tuple[tuple[torch.Tensor, ...], int]:
        """(k_arena, v_arena, rows, lengths, counts), and the extent; unused slots hold zeros."""
        lengths, counts = [30, 0, 11], [self.tokens, self.tokens, max(1, self.tokens - 2)]
        extent, slots, arena_rows = 128, 128, 4
        rows = torch.tensor([2, 0, 3])
        if self.kind == "unaligned":
            extent = slots = 40
        if self.kind == "ring":
            lengths, extent, slots = [300, 0, 11], 512, 128
        if self.kind.startswith("page"):
            slots = 16 if self.kind == "pages of 16" else 128
            entries = extent // slots
            rows = torch.randperm(3 * entries, generator=torch.Generator().manual_seed(1)).view(3, entries)
            arena_rows = 3 * entries + 1
        arenas = []
        for seed in (0, 1):
            arena = torch.zeros(arena_rows, slots, heads, size)
            content = draw(3, max(lengths), heads, size, seed=seed)
            for b, length in enumerate(lengths):
                for position in range(max(0, length - slots), length):
                    row = rows[b] if rows.ndim == 1 else rows[b, position // slots]
                    arena[int(row), position % slots] = content[b, position]
            arenas.append(arena)
        return (*arenas, rows, torch.tensor(lengths), torch.tensor(counts)), extent


CACHES = (
    Cache("dense", 1),
    Cache("dense", 6),
    Cache("paged", 1),
    Cache("paged", 6),
)
OTHER_CACHES = (
    Cache("pages of 16", 1),
    Cache("pages of 16", 6),
    Cache("unaligned", 1),
    Cache("unaligned", 6),
    Cache("dense", 1, 8),
    Cache("dense", 6, 8),
    Cache("paged", 1, 8),
    Cache("paged", 6, 8),
    Cache("ring", 1, 64),
    Cache("ring", 6, 64),
)


def _caches() -> Iterator[tuple[Cache, int, int, int]]:
    for H, K, D in HEADS:
        yield from ((cache, H, K, D) for cache in CACHES)
    yield from ((cache, 4, 1, 64) for cache in OTHER_CACHES)


def _writes() -> Iterator[Example]:
    for cache, H, K, D in _caches():
        arguments, extent = cache.arguments(K, D)
        T, starts = cache.tokens, arguments[3].tolist()
        options = {"window": cache.window, "extent": extent}
        yield Example(
            "kv_write",
            f"{cache.name}, {K} heads of {D}",
            lambda *x, options=options: KV_WRITE(*x, **options),
            (draw(3, T, K, D), draw(3, T, K, D, seed=1), *arguments),
            host=(4, 5, 6),
        )
        for style, dims, normed in (
            ("half", D, False),
            ("half", D, True),
            ("interleaved", D, False),
            ("half", D // 2, False),
        ):
            if (style, dims, normed) != ("half", D, False) and (cache.kind, D) not in (
                ("dense", 64),
                ("dense", 128),
            ):
                continue
            cos, sin = _angles(3, T, dims, starts)
            yield _qkv(cache, (H, K, D), style, normed, cos, sin, arguments, options)
        if D in (64, 80):
            cos, sin = _angles(3, T, D, starts)
            yield Example(
                "rotary_write",
                f"{cache.name}, {H} and {K} heads of {D}",
                lambda *x, options=options: ROTARY_WRITE(*x, style="half", **options),
                (draw(3, T, H, D), draw(3, T, K, D), draw(3, T, K, D, seed=1), cos, sin, *arguments),
                host=(3, 4, 7, 8, 9),
                wide=(3, 4),
            )


def _qkv(
    cache: Cache,
    heads: tuple[int, int, int],
    style: str,
    normed: bool,
    cos: torch.Tensor,
    sin: torch.Tensor,
    arguments: tuple[torch.Tensor, ...],
    options: dict[str, Any],
) -> Example:
    H, K, D = heads
    params = {"heads": (H, K, K), "head_size": D, "eps": 1e-6 if normed else 0.0, "style": style, **options}
    packed = draw(3, cache.tokens, (H + 2 * K) * D)
    name = f"{cache.name}, {H} and {K} heads of {D}, {style}, {2 * cos.shape[-1]} channels"
    if not normed:
        return Example(
            "qkv_rotary_write",
            name,
            lambda packed, *x: QKV_ROTARY_WRITE(packed, None, None, *x, **params),
            (packed, cos, sin, *arguments),
            host=(1, 2, 5, 6, 7),
            wide=(1, 2),
        )
    return Example(
        "qkv_rotary_write",
        f"{name}, q and k normed",
        lambda *x: QKV_ROTARY_WRITE(*x, **params),
        (packed, draw(D, low=0.5), draw(D, low=0.5, seed=1), cos, sin, *arguments),
        bound=(1, 2),
        host=(3, 4, 7, 8, 9),
        wide=(3, 4),
    )


def _attention() -> Iterator[Example]:
    for cache, H, K, D in _caches():
        arguments, extent = cache.arguments(K, D)
        # As after the step's write, so that new tokens see themselves.
        lengths, counts = arguments[3], arguments[4]
        held = (lengths - counts).clamp(min=0)
        params = {
            "scale": D**-0.5,
            "extent": extent,
            "window": cache.window,
            "soft_cap": None,
            "causal": True,
        }
        counts = torch.minimum(counts, lengths)
        q = draw(3, cache.tokens, H, D)
        yield Example(
            "attention",
            f"{cache.name}, {H} and {K} heads of {D}",
            lambda q, k, v, r, n, c, params=params: ATTENTION(q, k, v, r, n, c, None, None, **params),
            (q, *arguments[:3], held, counts),
            host=(3, 4, 5),
        )
        if (D, cache.window) == (64, None):
            yield Example(
                "attend_project",
                f"{cache.name}, {H} and {K} heads of {D}",
                lambda q, k, v, r, n, c, w, x, params=params: ATTEND_PROJECT(
                    q, k, v, r, n, c, None, None, w, None, x, **params
                ),
                (
                    q,
                    *arguments[:3],
                    held,
                    counts,
                    draw(48, H * D, low=-0.2, high=0.2),
                    draw(3, cache.tokens, 48),
                ),
                bound=(6,),
                host=(3, 4, 5),
            )
    for cache in CACHES:
        arguments, extent = cache.arguments(1, 64)
        held = (arguments[3] - arguments[4]).clamp(min=0)
        counts = torch.minimum(arguments[4], arguments[3])
        params = {"scale": 0.125, "extent": extent, "window": None, "causal": True}
        yield Example(
            "attention",
            f"{cache.name}, soft cap, ALiBi and sinks",
            lambda q, k, v, r, n, c, a, s, params=params: ATTENTION(
                q, k, v, r, n, c, a, s, soft_cap=5.0, **params
            ),
            (draw(3, cache.tokens, 4, 64), *arguments[:3], held, counts, ops.alibi_slopes(4), draw(4)),
            host=(3, 4, 5),
            wide=(6, 7),
        )


def _fused() -> Iterator[Example]:
    for rows in (1, 5):
        x, norm = draw(1, rows, 64), draw(64, low=0.5, high=1.5)
        w = draw(4 * 16 + 2 * 2 * 16, 64, low=-0.3, high=0.3)
        params = {"eps": 1e-5, "offset": 0.0, "heads": (4, 2, 2), "head_size": 16}
        yield Example(
            "norm_qkv",
            f"{rows} rows",
            lambda x, n, w, params=params: NORM_QKV(x, n, w, None, **params),
            (x, norm, w),
            bound=(1, 2),
        )
        yield Example(
            "norm_gated_mlp",
            f"{rows} rows",
            lambda x, n, w, d: NORM_GATED_MLP(
                x, n, w, None, d, None, eps=1e-5, offset=0.0, activation="silu"
            ),
            (x, norm, draw(192, 64, low=-0.3, high=0.3), draw(64, 96, low=-0.3, high=0.3)),
            bound=(1, 2, 3),
        )


def _sampling() -> Iterator[Example]:
    some = torch.tensor([0.5, 1.0, 2.0])
    tokens = torch.tensor([2, 1, 4])
    seen, times = X > 0.5, (X > 0).int()
    top_k = torch.tensor([5, 2, 0])

    def options(op: str, call: Callable[..., Any], *arguments: torch.Tensor) -> Example:
        return Example(op, "[3,32]", call, arguments, dtypes=ONLY_FP32)

    yield options("penalize", logits.penalize, X, seen, times, some, some, some)
    yield options("bias_logits", logits.bias_logits, X, IDS, draw(3, 2))
    yield options(
        "filter_logits", logits.filter_logits, X, torch.tensor([0.5, 0.0, 2.0]), top_k, 0.4 * some, 0.1 * some
    )
    yield options("draw", logits.draw, X, 0.4 * some)
    yield options("count_tokens", logits.count_tokens, times, tokens, some > 0.7)
    yield Example("suppress", "[3,32]", logits.suppress, (X, IDS, some > 0.7))
    yield Example("is_unusable", "[3,32]", logits.is_unusable, (torch.where(X > 1.5, torch.nan, X),))
    yield Example("token_logprobs", "[3,32]", logits.token_logprobs, (X, tokens))
    yield Example("top_logprobs", "2 of 32", lambda x: logits.top_logprobs(x, 2), (X,))
    yield Example(
        "uniform", "3 draws", uniform, (tokens, tokens + 7, torch.tensor([5, 2, 1])), dtypes=ONLY_FP32
    )
