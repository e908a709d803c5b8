"""Launches of the kernel: no allocation, no host wait, and a grid that follows from shapes alone, as capture needs.

The first launch of a variant compiles it, which a captured graph cannot wait for: warm up before capture.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from atbx.core.errors import DTypeError, ShapeError, UnsupportedError
from atbx.kernels.ascend.triton.variants import DTYPES, LAYOUTS, Variant, need

INTERPRETER_PROGRAMS = 3
"""Programs of the interpreter, which has no cores: more than one, so that the stride over items is exercised."""


@functools.cache
def load_kernel() -> Any:
    """The kernel as Triton holds it.

    Raises:
        UnsupportedError: Triton is not installed.
    """
    try:
        return importlib.import_module(
            "atbx.kernels.ascend.triton.qkv_rotary_write_kernel"
        ).qkv_rotary_write_kernel
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UnsupportedError(
            "our Ascend kernels need Triton, which is not installed",
            where="atbx::qkv_rotary_write",
            expected="the module triton",
            hint="On an NPU: pip install 'triton-ascend>=3.2.0'. For the interpreter on a CPU: "
            "pip install 'atbx[triton]'. The two are the same module and cannot stand side by side",
        ) from error


def interpreted() -> Callable[..., None] | None:
    """The launch, where Triton is installed and told to interpret (TRITON_INTERPRET=1): it takes CPU tensors then."""
    is_told = os.environ.get("TRITON_INTERPRET") == "1"
    return launch if is_told and importlib.util.find_spec("triton") is not None else None


@functools.cache
def vector_cores(device: int) -> int:
    """Vector cores of an NPU as Triton's driver reports them: the most programs worth starting."""
    driver = importlib.import_module("triton.runtime").driver
    return int(driver.active.utils.get_device_properties(device)["num_vectorcore"])


def _programs(tensor: torch.Tensor) -> int:
    return vector_cores(tensor.device.index or 0) if tensor.device.type == "npu" else INTERPRETER_PROGRAMS


def _need_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ShapeError(
            f"qkv_rotary_write: {name} does not fit",
            expected=f"contiguous {list(shape)}",
            found=f"{list(tensor.shape)}, strides {list(tensor.stride())}",
        )


def _need_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise DTypeError(
            f"qkv_rotary_write: {name} has the wrong dtype",
            expected=" or ".join(str(d) for d in dtypes),
            found=str(tensor.dtype),
        )


def variant_of(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_dim: int,
    style: str = "half",
    eps: float = 0.0,
    layout: str = "slots",
) -> Variant:
    """The variant that serves a call; arguments as `launch` takes them.

    Raises:
        UnsupportedError: there is none. ShapeError, DTypeError: an argument does not fit.
    """
    if layout not in LAYOUTS:
        raise UnsupportedError("qkv_rotary_write: unknown cache layout", expected=str(LAYOUTS), found=layout)
    page = int(k_arena.shape[2]) if layout == "BNSD" and k_arena.ndim == 4 else 0
    norms = (q_norm is not None, k_norm is not None)
    variant = need(Variant(heads, kv_heads, head_size, rotary_dim, style, *norms, float(eps), page))
    N = int(qkv.shape[0])
    _need_dtype("qkv", qkv, *DTYPES)
    _need_dtype("slots", slots, torch.int32, torch.int64)
    _need_shape("qkv", qkv, (N, (heads + 2 * kv_heads) * head_size))
    _need_shape("slots", slots, (N,))
    _need_shape("q_out", q_out, (N, heads, head_size))
    for name, table in (("cos", cos), ("sin", sin)):
        _need_dtype(name, table, torch.float32)
        _need_shape(name, table, (N, rotary_dim // 2))
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            _need_shape(name, weight, (head_size,))
            _need_dtype(name, weight, qkv.dtype, torch.float32)
    for name, arena in (("k_arena", k_arena), ("v_arena", v_arena), ("q_out", q_out)):
        _need_dtype(name, arena, qkv.dtype)
    per_slot = kv_heads * head_size
    for name, arena in (("k_arena", k_arena), ("v_arena", v_arena)):
        if layout == "BNSD":
            _need_shape(name, arena, (int(k_arena.shape[0]), kv_heads, page, head_size))
        elif not arena.is_contiguous() or arena.ndim < 2 or arena.numel() % per_slot:
            _need_shape(name, arena, (arena.numel() // per_slot, kv_heads, head_size))
    return variant


def launch(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_dim: int,
    style: str = "half",
    eps: float = 0.0,
    layout: str = "slots",
) -> None:
    """Split, norm where asked for, turn, and write keys and values; one kernel launch for any number of tokens.

    qkv:       [N, (H+2K)*D], query heads first, then keys, then values; FP16 or BF16.
    cos, sin:  [N, rotary_dim/2] FP32, the row of each token. Rows and not a table with positions: they are worked
               out once a step for all layers, and scalings by length give each row a table of its own.
    slots:     [N] int32 or int64, flat slot of each token; a negative one writes no key and no value.
    k_arena, v_arena: written in place. "slots": contiguous, [slots,K,D] however viewed ([R,S,K,D],
               [blocks,block,K*D]); "BNSD": [blocks,K,block,D]. Slots must be unique and inside: nothing checks them.
    q_out:     [N,H,D], written for every token, dropped or not.
    q_norm, k_norm: [D] weights of an RMS norm of each head before it turns, with `eps`; None for no norm.

    Arithmetic is FP32 throughout and every result is rounded once.

    Raises:
        UnsupportedError: Triton is not installed, or no variant serves the call.
        ShapeError, DTypeError: an argument does not fit.
    """
    tensors = (qkv, cos, sin, slots, k_arena, v_arena, q_out)
    variant = variant_of(
        *tensors, q_norm, k_norm, heads=heads, kv_heads=kv_heads, head_size=head_size,
        rotary_dim=rotary_dim, style=style, eps=eps, layout=layout,
    )  # fmt: skip
    N = int(qkv.shape[0])
    if not N:
        return
    grid = (min(N * variant.items, _programs(qkv)),)
    # A norm that is left out is compiled away; its pointer only has to be one.
    weights = (qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm)
    by_hand = qkv.device.type == "cpu" and qkv.dtype == torch.bfloat16
    load_kernel()[grid](*tensors, *weights, N, **variant.constants(by_hand))
