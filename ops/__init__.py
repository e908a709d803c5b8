"""The functional ops: plain functions over values, each with one meaning, given by the reference rule of its `Op`.

They run, are staged or only shaped according to the interpreter in force; none reads a value.
"""

from __future__ import annotations

if not __name__.startswith("atbx."):
    raise ImportError("this folder is the package atbx.ops: import it by that name")

from atbx.ops.activations import ACTIVATIONS, activate, gated, gated_mlp, gelu, mlp, relu, silu
from atbx.ops.attention import alibi_slopes
from atbx.ops.define import define_op
from atbx.ops.elementwise import (
    add,
    clip,
    cos,
    divide,
    equal,
    erf,
    exp,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    power,
    rsqrt,
    sigmoid,
    sin,
    sqrt,
    subtract,
    tanh,
    where,
)
from atbx.ops.indexing import getitem, take, take_along
from atbx.ops.kv_cache import attend
from atbx.ops.linear import embedding, linear, matmul
from atbx.ops.norms import add_rms_norm, layer_norm, rms_norm
from atbx.ops.reductions import argmax, cumsum, logsumexp, max, mean, min, softmax, sum, top_k
from atbx.ops.reshaping import reshape
from atbx.ops.rope import Rope
from atbx.ops.rotary import rotary, rotary_angles
from atbx.ops.structural import (
    arange,
    broadcast_to,
    cast,
    concat,
    expand_dims,
    split,
    squeeze,
    transpose,
)

__all__ = [
    "ACTIVATIONS",
    "Rope",
    "activate",
    "add",
    "add_rms_norm",
    "alibi_slopes",
    "arange",
    "argmax",
    "attend",
    "broadcast_to",
    "cast",
    "clip",
    "concat",
    "cos",
    "cumsum",
    "define_op",
    "divide",
    "embedding",
    "equal",
    "erf",
    "exp",
    "expand_dims",
    "gated",
    "gated_mlp",
    "gelu",
    "getitem",
    "layer_norm",
    "less",
    "less_equal",
    "linear",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logsumexp",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mlp",
    "multiply",
    "negative",
    "not_equal",
    "power",
    "relu",
    "reshape",
    "rms_norm",
    "rotary",
    "rotary_angles",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "softmax",
    "split",
    "sqrt",
    "squeeze",
    "subtract",
    "sum",
    "take",
    "take_along",
    "tanh",
    "top_k",
    "transpose",
    "where",
]
