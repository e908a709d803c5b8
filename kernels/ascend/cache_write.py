"""Rotary embedding and the write of keys and values: stock operators one after the other, and our Triton kernel in one.

cos and sin come from the step's plan, so no operator keeps a table of its own; slots are unique and inside the arena,
because no operator checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from atbx.core.backend import HostPlan
from atbx.core.errors import CapacityError
from atbx.core.program import Equation
from atbx.kernels.ascend.capability import FLOATS, HALVES, Capability, Limit
from atbx.kernels.ascend.plan import CacheFacts, StepPlan, host_lists, slots_of

MODES = {"half": "half", "interleaved": "interleave"}
"""Styles of rotation as npu_mrope and npu_rotary_mul call them."""


def slots_view(arena: torch.Tensor, facts: CacheFacts, tokens: int) -> torch.Tensor:
    """An arena and the trash behind it as whole blocks [blocks, block, K, D].

    Raises:
        CapacityError: there is no room behind the arena for a step of `tokens` padding tokens.
    """
    K, D = arena.shape[2:]
    start = arena.storage_offset()
    total = (arena.untyped_storage().nbytes() // arena.element_size() - start) // (K * D)
    if total < facts.first_trash + tokens:
        raise CapacityError(
            "the KV cache keeps too few trash slots for the padding of a step",
            expected=f"{tokens} slots behind the arena",
            found=max(0, total - facts.first_trash),
            hint="Make the cache with atbx.ops.kv_cache.init on the NPU, or for longer chunks",
        )
    blocks = total // facts.block
    return arena.as_strided((blocks, facts.block, K, D), (facts.block * K * D, K * D, D, 1), start)


def _write_facts(equation: Equation, arena: int, rows: int, new: int) -> CacheFacts:
    operands, params = equation.operands, equation.params
    return CacheFacts.of(
        operands[new].shape[1], operands[arena], operands[rows], params["window"], params["extent"]
    )


def _slots(
    facts: CacheFacts, rows: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    host_lists(facts, rows, lengths, counts)
    return slots_of(facts, rows, lengths, counts)


def _write_plan(facts: Any, rows: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor) -> StepPlan:
    return StepPlan({"slots": _slots(facts, rows, lengths, counts)})


def _table(cos: torch.Tensor, sin: torch.Tensor, form: str, style: str, dtype: torch.dtype) -> dict[str, Any]:
    """cos and sin [B,T,dims/2] in the form that an operator takes.

    "rows": one row [dims] a token, cos then sin, and positions that number the rows. "full": cos and sin [1,N,1,dims],
    every angle twice, in the order of the channels it turns; "full fp32": the same unrounded. "fp32": cos and sin
    [N, dims/2] unrounded.
    """
    cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    if form == "fp32":
        return {"cos": cos, "sin": sin}
    if form == "rows":
        return {"table": torch.cat([cos, sin], dim=-1).to(dtype), "order": torch.arange(cos.shape[0])}

    to = torch.float32 if form == "full fp32" else dtype

    def full(x: torch.Tensor) -> torch.Tensor:
        twice = torch.cat([x, x], dim=-1) if style == "half" else x.repeat_interleave(2, dim=-1)
        return twice.to(to).view(1, x.shape[0], 1, -1)

    return {"cos": full(cos), "sin": full(sin)}


def _qkv_key(form: str, equation: Equation) -> Hashable:
    facts = _write_facts(equation, 5, 7, 0)
    return facts, form, equation.params["style"], equation.operands[0].dtype


def _qkv_plan(
    key: Any,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
) -> StepPlan:
    facts, form, style, dtype = key
    slots = _slots(facts, rows, lengths, counts)
    if form == "fp32":
        # Our kernel drops padding by itself.
        real = torch.arange(facts.tokens) < counts.view(-1, 1)
        slots = slots.masked_fill(~real.flatten(), -1)
    return StepPlan({"slots": slots, **_table(cos, sin, form, style, dtype)})


def _rotary_key(form: str, equation: Equation) -> Hashable:
    return form, equation.params["style"], equation.operands[0].dtype


def _rotary_plan(key: Any, cos: torch.Tensor, sin: torch.Tensor) -> StepPlan:
    form, style, dtype = key
    return StepPlan(_table(cos, sin, form, style, dtype))


Rotate = Callable[[torch.Tensor, torch.Tensor, StepPlan], tuple[torch.Tensor, torch.Tensor]]
Scatter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _mrope(style: str, head_size: int) -> Rotate:
    """q [N, H*D] and k [N, K*D], strided as they may be, to fresh rotated ones in one launch."""

    def rotate(q: torch.Tensor, k: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = torch.ops.npu.npu_mrope(
            plan["order"], q, k, plan["table"], head_size, mrope_section=[0, 0, 0], rotary_mode=MODES[style]
        )
        return found

    return rotate


def _rotary_mul(style: str, head_size: int) -> Rotate:
    """q [N, H*D] and k [N, K*D], a launch each; channels past the table's pass."""

    def turn(x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        heads = x.view(1, x.shape[0], -1, head_size)
        dims = plan["cos"].shape[-1]
        part = heads if dims == head_size else heads[..., :dims].contiguous()
        turned = torch.ops.npu.npu_rotary_mul(part, plan["cos"], plan["sin"], MODES[style])
        if dims != head_size:
            turned = torch.cat([turned, heads[..., dims:]], dim=-1)
        return turned.view(x.shape[0], -1)

    def rotate(q: torch.Tensor, k: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        return turn(q, plan), turn(k, plan)

    return rotate


def _apply_rotary(style: str, head_size: int) -> Rotate:
    """q [N, H*D] and k [N, K*D] in place, in one launch."""

    def rotate(q: torch.Tensor, k: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        heads = [x.view(1, x.shape[0], -1, head_size) for x in (q, k)]
        # The default layout differs between releases of torch_npu.
        torch.ops.npu.npu_apply_rotary_pos_emb(*heads, plan["cos"], plan["sin"], "BSND", MODES[style])
        return q, k

    return rotate


def _rotary_by_parts(style: str, head_size: int) -> Rotate:
    """q [N, H*D] and k [N, K*D] by plain arithmetic in FP32; channels past the table's pass."""

    def turn(x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        heads = x.reshape(1, x.shape[0], -1, head_size)
        dims = plan["cos"].shape[-1]
        part = heads[..., :dims].float()
        if style == "half":
            crossed = torch.cat([-part[..., dims // 2 :], part[..., : dims // 2]], dim=-1)
        else:
            crossed = torch.stack([-part[..., 1::2], part[..., 0::2]], dim=-1).flatten(-2)
        turned = (part * plan["cos"] + crossed * plan["sin"]).to(x.dtype)
        if dims != head_size:
            turned = torch.cat([turned, heads[..., dims:]], dim=-1)
        return turned.reshape(x.shape[0], -1)

    def rotate(q: torch.Tensor, k: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        return turn(q, plan), turn(k, plan)

    return rotate


def _scatter_pages(keys: Any, values: Any, k_slots: Any, v_slots: Any, slots: Any) -> None:
    """Write keys and values [N, K, D] to unique slots of blocks [blocks, block, K, D]."""
    # Its default mode is NZ, which would scramble a plain cache without a word.
    torch.ops.npu.npu_scatter_pa_kv_cache(keys, values, k_slots, v_slots, slots, cache_mode="Norm")


def _scatter_nd(keys: Any, values: Any, k_slots: Any, v_slots: Any, slots: Any) -> None:
    width = keys.shape[1] * keys.shape[2]
    for new, cache in ((keys, k_slots), (values, v_slots)):
        torch.ops.npu.npu_scatter_nd_update_(cache.view(-1, width), slots.view(-1, 1), new.view(-1, width))


def _qkv_write(
    equation: Equation, rotary: Callable[[str, int], Rotate], scatter: Scatter, contiguous: bool
) -> Callable[..., Any]:
    params = equation.params
    heads, size = params["heads"], int(params["head_size"])
    B, T = map(int, equation.operands[0].shape[:2])
    N = B * T
    facts = _write_facts(equation, 5, 7, 0)
    rotate = rotary(params["style"], size)
    widths = [n * size for n in heads]
    eps = float(params["eps"])

    def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        split = x.reshape(N, -1, size)
        return torch.ops.npu.npu_rms_norm(split, weight, eps)[0].view(N, -1)

    def run(
        packed: Any,
        q_norm: Any,
        k_norm: Any,
        cos: Any,
        sin: Any,
        k_arena: Any,
        v_arena: Any,
        rows: Any,
        lengths: Any,
        counts: Any,
        plan: StepPlan,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = packed.view(N, -1).split(widths, dim=1)
        if contiguous and N > 1:
            q, k = q.contiguous(), k.contiguous()
        q, k = rotate(normed(q, q_norm), normed(k, k_norm), plan)
        # The write wants whole rows; at one row a slice of the projection is whole already.
        values = v.reshape(N, heads[2], size) if N == 1 else v.contiguous().view(N, heads[2], size)
        k_slots, v_slots = (slots_view(a, facts, N) for a in (k_arena, v_arena))
        scatter(k.view(N, heads[1], size), values, k_slots, v_slots, plan["slots"])
        return q.view(B, T, heads[0], size), k_arena, v_arena

    return run


def _qkv_launches(base: int, per_row: int, is_copied: bool, equation: Equation) -> int:
    """base launches at one row, and per_row copies of slices of the projection at more.

    is_copied: q and k are among those copies; otherwise a norm of them copies its slice first.
    """
    B, T = map(int, equation.operands[0].shape[:2])
    norms = sum(equation.operands[i] is not None for i in (1, 2))
    if B * T == 1:
        return base + norms
    return base + norms + per_row + (0 if is_copied else norms)


def _kv_write(equation: Equation, scatter: Scatter) -> Callable[..., Any]:
    B, T, K, D = map(int, equation.operands[0].shape)
    facts = _write_facts(equation, 2, 4, 0)

    def run(
        k: Any, v: Any, k_arena: Any, v_arena: Any, rows: Any, lengths: Any, counts: Any, plan: StepPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (x.contiguous().view(B * T, K, D) for x in (k, v))
        k_slots, v_slots = (slots_view(a, facts, B * T) for a in (k_arena, v_arena))
        scatter(keys, values, k_slots, v_slots, plan["slots"])
        return k_arena, v_arena

    return run


def _rotary(equation: Equation, rotary: Callable[[str, int], Rotate]) -> Callable[..., Any]:
    q_shape, k_shape = (tuple(map(int, equation.operands[i].shape)) for i in (0, 1))
    size, N = q_shape[3], q_shape[0] * q_shape[1]
    rotate = rotary(equation.params["style"], size)

    def run(q: Any, k: Any, cos: Any, sin: Any, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        turned_q, turned_k = rotate(q.reshape(N, -1), k.reshape(N, -1), plan)
        return turned_q.view(q_shape), turned_k.view(k_shape)

    return run


def _head_size(equation: Equation) -> int:
    return int(equation.params.get("head_size") or equation.operands[0].shape[3])


def _rotary_dims(equation: Equation) -> int:
    """Channels of a head that turn: twice the angles of a token."""
    return 2 * int(equation.operands[3 if equation.op.name == "qkv_rotary_write" else 2].shape[2])


def _refuses_mrope_size(equation: Equation) -> str | None:
    size, dims = _head_size(equation), _rotary_dims(equation)
    if size % 32:
        return f"head size {size} is no multiple of 32"
    return f"{dims} channels turn, no multiple of 32" if dims % 32 else None


def _refuses_apply_rotary(equation: Equation) -> str | None:
    size, dims = _head_size(equation), _rotary_dims(equation)
    if size not in (64, 128):
        return f"head size {size} is neither 64 nor 128"
    if dims != size:
        return f"only {dims} of {size} channels turn"
    style = equation.params["style"]
    return None if style == "half" else f"it turns halves, not {style} pairs"


def _refuses_rotary_mul(equation: Equation) -> str | None:
    size = _head_size(equation)
    operands = equation.operands
    B, T = map(int, operands[0].shape[:2])
    if size % 2 or size >= 896:
        return f"head size {size} is odd or not under 896"
    if equation.op.name == "rotary":
        most = max(int(operands[i].shape[2]) for i in (0, 1))
    else:
        most = max(equation.params["heads"])
    return f"{max(B * T, most)} tokens or heads are not under 1000" if max(B * T, most) >= 1000 else None


MROPE_SIZE = Limit("mrope_head_size_32", _refuses_mrope_size, "facts, top: npu_mrope")
APPLY_ROTARY = Limit("apply_rotary", _refuses_apply_rotary, "facts 1.5")
ROTARY_MUL = Limit("rotary_mul_sizes", _refuses_rotary_mul, "facts 1.5")

_MROPE_CALL = {
    "npu::npu_mrope": (
        "positions",
        "query",
        "key",
        "cos_sin_cache",
        "head_size",
        "mrope_section",
        "rotary_mode",
    )
}
_ROTARY_MUL_CALL = {"npu::npu_rotary_mul": ("input", "r1", "r2", "rotary_mode")}
_APPLY_CALL = {"npu::npu_apply_rotary_pos_emb": ("query", "key", "cos", "sin", "layout", "rotary_mode")}
_PAGES_CALL = {
    "npu::npu_scatter_pa_kv_cache": (
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
        "cache_mode",
    )
}
_ND_CALL = {"npu::npu_scatter_nd_update_": ("input", "indices", "updates")}


def _qkv_host(form: str) -> HostPlan:
    return HostPlan((3, 4, 7, 8, 9), partial(_qkv_key, form), _qkv_plan)


def _rotary_host(form: str) -> HostPlan:
    return HostPlan((2, 3), partial(_rotary_key, form), _rotary_plan)


WRITE_PLAN = HostPlan((4, 5, 6), lambda equation: _write_facts(equation, 2, 4, 0), _write_plan)

STOCK = (
    Capability(
        "qkv_rotary_write",
        "npu.mrope+scatter_pa",
        ("npu::npu_mrope", "npu::npu_scatter_pa_kv_cache"),
        partial(_qkv_write, rotary=_mrope, scatter=_scatter_pages, contiguous=False),
        families=("A2", "A3"),
        dtypes=HALVES,
        layout="cache [blocks, block, K, D]",
        limits=(MROPE_SIZE,),
        evidence=("schema", "op-plugin check", "document"),
        launches=partial(_qkv_launches, 2, 1, False),
        plan=_qkv_host("rows"),
        calls={**_MROPE_CALL, **_PAGES_CALL},
    ),
    Capability(
        "qkv_rotary_write",
        "npu.rotary_mul+scatter_pa",
        ("npu::npu_rotary_mul", "npu::npu_scatter_pa_kv_cache"),
        partial(_qkv_write, rotary=_rotary_mul, scatter=_scatter_pages, contiguous=True),
        families=("A2", "A3"),
        dtypes=HALVES,
        layout="cache [blocks, block, K, D]",
        limits=(ROTARY_MUL,),
        evidence=("schema", "document", "upstream golden"),
        tier="composed",
        launches=partial(_qkv_launches, 3, 3, True),
        plan=_qkv_host("full"),
        calls={**_ROTARY_MUL_CALL, **_PAGES_CALL},
    ),
    Capability(
        "qkv_rotary_write",
        "npu.apply_rotary+scatter_nd",
        ("npu::npu_apply_rotary_pos_emb", "npu::npu_scatter_nd_update_"),
        partial(_qkv_write, rotary=_apply_rotary, scatter=_scatter_nd, contiguous=True),
        families=("310P",),
        dtypes=(torch.float16,),
        layout="cache [slots, K*D]",
        limits=(APPLY_ROTARY,),
        # Its page does not list 310P. op-plugin calls aclnn there; npu_rotary_mul is an aclop, which no graph takes.
        evidence=("schema", "op-plugin check"),
        launches=partial(_qkv_launches, 3, 3, True),
        plan=_qkv_host("full"),
        calls={**_APPLY_CALL, **_ND_CALL},
    ),
    Capability(
        "qkv_rotary_write",
        "npu.rotary_mul+scatter_nd",
        ("npu::npu_rotary_mul", "npu::npu_scatter_nd_update_"),
        partial(_qkv_write, rotary=_rotary_mul, scatter=_scatter_nd, contiguous=True),
        families=("A2", "A3"),
        dtypes=FLOATS,
        layout="cache [slots, K*D]",
        limits=(ROTARY_MUL,),
        evidence=("schema", "document", "upstream golden"),
        tier="composed",
        launches=partial(_qkv_launches, 4, 3, True),
        plan=_qkv_host("full"),
        calls={**_ROTARY_MUL_CALL, **_ND_CALL},
    ),
    Capability(
        "qkv_rotary_write",
        "composed.rotary+scatter_nd",
        ("aten::mul", "aten::cat", "npu::npu_scatter_nd_update_"),
        partial(_qkv_write, rotary=_rotary_by_parts, scatter=_scatter_nd, contiguous=False),
        dtypes=FLOATS,
        layout="cache [slots, K*D]",
        evidence=("own", "schema", "document"),
        tier="composed",
        launches=partial(_qkv_launches, 16, 1, False),
        plan=_qkv_host("full fp32"),
        calls=_ND_CALL,
    ),
)

ROWS = (
    *STOCK,
    Capability(
        "rotary",
        "npu.mrope",
        ("npu::npu_mrope",),
        partial(_rotary, rotary=_mrope),
        families=("A2", "A3"),
        dtypes=HALVES,
        limits=(MROPE_SIZE,),
        evidence=("schema", "document"),
        plan=_rotary_host("rows"),
        calls=_MROPE_CALL,
    ),
    Capability(
        "rotary",
        "npu.rotary_mul",
        ("npu::npu_rotary_mul",),
        partial(_rotary, rotary=_rotary_mul),
        families=("A2", "A3"),
        limits=(ROTARY_MUL,),
        evidence=("schema", "document", "upstream golden"),
        launches=2,
        plan=_rotary_host("full"),
        calls=_ROTARY_MUL_CALL,
    ),
    Capability(
        "rotary",
        "composed.rotary",
        ("aten::mul", "aten::cat"),
        partial(_rotary, rotary=_rotary_by_parts),
        evidence=("own",),
        tier="composed",
        launches=14,
        plan=_rotary_host("full fp32"),
    ),
    Capability(
        "kv_write",
        "npu.scatter_pa",
        ("npu::npu_scatter_pa_kv_cache",),
        partial(_kv_write, scatter=_scatter_pages),
        families=("A2", "A3"),
        dtypes=HALVES,
        layout="cache [blocks, block, K, D]",
        evidence=("schema", "op-plugin check", "document"),
        plan=WRITE_PLAN,
        calls=_PAGES_CALL,
    ),
    Capability(
        "kv_write",
        "npu.scatter_nd",
        ("npu::npu_scatter_nd_update_",),
        partial(_kv_write, scatter=_scatter_nd),
        dtypes=FLOATS,
        layout="cache [slots, K*D]",
        evidence=("schema", "document", "upstream golden"),
        launches=2,
        plan=WRITE_PLAN,
        calls=_ND_CALL,
    ),
)
