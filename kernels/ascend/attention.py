"""Attention over KV arenas: FIA over blocks of the arena, IFA with a mask on 310P, and a composition for the rest.

Conversions to the operators' conventions happen here and nowhere else: True is masked, lengths count each row's slots,
the causal mode is the one aligned at the last key, the scale is always passed, accumulation is FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch

from atbx.core.backend import HostPlan
from atbx.core.program import Equation
from atbx.kernels.ascend.capability import HALVES, Capability, Limit
from atbx.kernels.ascend.plan import (
    BLOCK,
    CacheFacts,
    StepPlan,
    block_table,
    held_positions,
    hidden_slots,
    host_lists,
    live_slots,
)
from atbx.kernels.ascend.runtime import current

BOTTOM_RIGHT_CAUSAL, NO_MODE = 3, 0
"""Sparse modes of FIA. Mode 2 is aligned at the first key, which is wrong as soon as a cache holds earlier tokens."""

HIGH_PRECISION = 0
"""inner_precise: FP32 accumulation. IFA's own default is 1, high performance."""


def _facts(equation: Equation) -> CacheFacts:
    operands, params = equation.operands, equation.params
    return CacheFacts.of(operands[0].shape[1], operands[1], operands[3], params["window"], params["extent"])


def _key(equation: Equation) -> Hashable:
    return _facts(equation), bool(equation.params["causal"])


def _lengths_plan(key: Any, rows: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor) -> StepPlan:
    """Block table and lengths; a mask where a window hides live slots."""
    facts, causal = key
    _, old, new = host_lists(facts, rows, lengths, counts)
    arrays = {"table": block_table(facts, rows)}
    if facts.window is not None:
        arrays["hidden"] = hidden_slots(facts, lengths, counts, causal)
    return StepPlan(arrays, {"queries": new, "keys": live_slots(facts, old, new)})


def _mask_plan(key: Any, rows: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor) -> StepPlan:
    """Block table and a mask of everything that is not to be seen, so that no length is a host value."""
    facts, causal = key
    host_lists(facts, rows, lengths, counts)
    return StepPlan(
        {"table": block_table(facts, rows), "hidden": hidden_slots(facts, lengths, counts, causal)}
    )


def _composed_plan(key: Any, rows: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor) -> StepPlan:
    facts, causal = key
    host_lists(facts, rows, lengths, counts)
    held = held_positions(facts, lengths, counts)
    query = lengths.view(-1, 1) + torch.arange(facts.tokens)
    return StepPlan(
        {
            "table": block_table(facts, rows),
            "hidden": hidden_slots(facts, lengths, counts, causal, held),
            "unused": held < 0,
            "held": held.float(),
            "query": query.float(),
        }
    )


def blocks_of(arena: torch.Tensor, block: int) -> torch.Tensor:
    """An arena [R,S,K,D] as blocks [R*S/block, block, K*D]: the form of a paged cache that BSND queries take."""
    return arena.view(-1, block, arena.shape[2] * arena.shape[3])


class FusedInfer:
    """`npu_fused_infer_attention_score` over blocks, version 2 or 1; lengths are host lists where there are any."""

    def __init__(self, equation: Equation, version: int) -> None:
        q, k_arena = equation.operands[:2]
        facts = _facts(equation)
        self._block = facts.block
        # With a mask the lengths are those of the blocks: they never change, so a graph may keep them.
        rows = int(q.shape[0])
        self._whole = {"keys": [facts.reach] * rows, "queries": [facts.tokens] * rows}
        names = _NAMES[version]
        self._names = names
        self._default = getattr(torch.ops.npu, names["operator"])
        self._workspace = getattr(torch.ops.npu, f"_{names['operator']}_get_max_workspace")
        has_mask = equation.params["window"] is not None or (
            int(q.shape[1]) > 1 and bool(equation.params["causal"])
        )
        is_compressed = has_mask and equation.params["window"] is None
        self._is_compressed = is_compressed
        self._static = {
            names["heads"]: int(q.shape[2]),
            "num_key_value_heads": int(k_arena.shape[2]),
            # The default of 1.0 is wrong for every model.
            names["scale"]: float(equation.params["scale"]),
            "input_layout": "BSND",
            "sparse_mode": BOTTOM_RIGHT_CAUSAL if is_compressed else NO_MODE,
            "inner_precise": HIGH_PRECISION,
            "block_size": self._block,
        }

    def _arguments(self, k_arena: Any, v_arena: Any, plan: StepPlan) -> tuple[Any, Any, dict[str, Any]]:
        mask = plan.arrays.get("hidden")
        if mask is None and self._is_compressed:
            mask = current().causal_mask()
        arguments = {**self._static, "block_table": plan["table"], "atten_mask": mask}
        if "hidden" in plan.arrays:
            arguments["sparse_mode"] = NO_MODE
        return blocks_of(k_arena, self._block), blocks_of(v_arena, self._block), arguments

    def _lengths(self, lists: Mapping[str, list[int]], tokens: int) -> dict[str, Any]:
        lists = lists or self._whole
        # Each row's own counts: this layout does not accumulate them.
        found = {self._names["keys"]: lists["keys"]}
        if tokens > 1:
            found[self._names["queries"]] = lists["queries"]
        return found

    def __call__(
        self,
        q: Any,
        k_arena: Any,
        v_arena: Any,
        rows: Any,
        lengths: Any,
        counts: Any,
        s: Any,
        z: Any,
        plan: Any,
    ) -> torch.Tensor:
        keys, values, arguments = self._arguments(k_arena, v_arena, plan)
        out: torch.Tensor = self._default(
            q, keys, values, **arguments, **self._lengths(plan.lists, q.shape[1])
        )[0]
        return out

    def prepare(
        self,
        q: Any,
        k_arena: Any,
        v_arena: Any,
        rows: Any,
        lengths: Any,
        counts: Any,
        s: Any,
        z: Any,
        plan: Any,
    ) -> tuple[torch.Tensor, Callable[[Mapping[str, list[int]]], None]]:
        """The result's buffer, and a launch into it that can be repeated with other lengths."""
        keys, values, arguments = self._arguments(k_arena, v_arena, plan)
        tokens = q.shape[1]
        most = self._lengths(plan.lists, tokens)
        workspace = self._workspace(q, keys, values, **arguments, **most)
        # No sums of exponentials are asked for, so the second result is empty.
        out, sums = torch.empty_like(q), torch.empty(0, dtype=torch.float32, device=q.device)

        def launch(lists: Mapping[str, list[int]]) -> None:
            self._default.out(
                q,
                keys,
                values,
                **arguments,
                **self._lengths(lists, tokens),
                workspace=workspace,
                out=[out, sums],
            )

        return out, launch


_NAMES = {
    1: {
        "operator": "npu_fused_infer_attention_score",
        "heads": "num_heads",
        "scale": "scale",
        "queries": "actual_seq_lengths",
        "keys": "actual_seq_lengths_kv",
    },
    2: {
        "operator": "npu_fused_infer_attention_score_v2",
        "heads": "num_query_heads",
        "scale": "softmax_scale",
        "queries": "actual_seq_qlen",
        "keys": "actual_seq_kvlen",
    },
}


def _incremental(equation: Equation) -> Callable[..., torch.Tensor]:
    q, k_arena = equation.operands[:2]
    B, T, H, D = map(int, q.shape)
    facts = _facts(equation)
    block = facts.block
    arguments = {
        # Paged keys want a length; the mask hides what is not live of it.
        "actual_seq_lengths": [facts.reach] * B,
        "num_heads": H,
        "num_key_value_heads": int(k_arena.shape[2]),
        "scale_value": float(equation.params["scale"]),
        "input_layout": "BSH",
        "block_size": block,
        "inner_precise": HIGH_PRECISION,
    }

    def run(
        q: Any,
        k_arena: Any,
        v_arena: Any,
        rows: Any,
        lengths: Any,
        counts: Any,
        s: Any,
        z: Any,
        plan: StepPlan,
    ) -> torch.Tensor:
        # It has no form that writes to a given buffer, so its lengths could not be updated in a graph: a mask serves.
        out = torch.ops.npu.npu_incre_flash_attention(
            q.view(B, T, H * D),
            blocks_of(k_arena, block),
            blocks_of(v_arena, block),
            atten_mask=plan["hidden"],
            block_table=plan["table"],
            **arguments,
        )
        return out.view(B, T, H, D)

    return run


def _gathered(arena: torch.Tensor, table: torch.Tensor, block: int, batch: int) -> torch.Tensor:
    """Slots of each row in order of its block table, [B, K, reach, D]."""
    found = arena.view(-1, block, *arena.shape[2:]).index_select(0, table.view(-1))
    return found.view(batch, -1, *arena.shape[2:]).transpose(1, 2)


def _prompt(equation: Equation) -> Callable[..., torch.Tensor]:
    q, k_arena = equation.operands[:2]
    B, H = int(q.shape[0]), int(q.shape[2])
    group = H // int(k_arena.shape[2])
    block = _facts(equation).block
    scale = float(equation.params["scale"])

    def run(
        q: Any,
        k_arena: Any,
        v_arena: Any,
        rows: Any,
        lengths: Any,
        counts: Any,
        s: Any,
        z: Any,
        plan: StepPlan,
    ) -> torch.Tensor:
        keys, values = (_gathered(a, plan["table"], block, B) for a in (k_arena, v_arena))
        if group > 1:
            # No grouped heads on 310P: head h reads KV head h // group.
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        out = torch.ops.npu.npu_prompt_flash_attention(
            q.transpose(1, 2).contiguous(),
            keys.contiguous(),
            values.contiguous(),
            atten_mask=plan["hidden"],
            num_heads=H,
            scale_value=scale,
            # Its default of 0 would cut a mask at the first key's diagonal.
            next_tokens=2147483647,
            input_layout="BNSD",
            sparse_mode=NO_MODE,
        )
        return out.transpose(1, 2).contiguous()

    return run


def _composed(equation: Equation) -> Callable[..., torch.Tensor]:
    q, k_arena = equation.operands[:2]
    B, T, H, D = map(int, q.shape)
    K = int(k_arena.shape[2])
    G = H // K
    block = _facts(equation).block
    scale, cap = float(equation.params["scale"]), equation.params["soft_cap"]

    def run(
        q: Any,
        k_arena: Any,
        v_arena: Any,
        rows: Any,
        lengths: Any,
        counts: Any,
        slopes: Any,
        sinks: Any,
        plan: StepPlan,
    ) -> torch.Tensor:
        unused = plan["unused"].view(B, 1, -1, 1)
        keys, values = (
            # Whatever an unused slot holds, NaN included, must meet no weight: 0 times NaN is NaN.
            _gathered(a, plan["table"], block, B).float().masked_fill(unused, 0.0)
            for a in (k_arena, v_arena)
        )
        queries = q.float().view(B, T, K, G, D).permute(0, 2, 3, 1, 4).reshape(B, K, G * T, D)
        scores = (queries @ keys.transpose(2, 3)).view(B, K, G, T, -1) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if slopes is not None:
            distance = plan["held"].view(B, 1, 1, 1, -1) - plan["query"].view(B, 1, 1, T, 1)
            scores = scores + slopes.float().view(1, K, G, 1, 1) * distance
        scores = scores.masked_fill(plan["hidden"].view(B, 1, 1, T, -1), -torch.inf)
        if sinks is not None:
            extra = sinks.float().view(1, K, G, 1, 1).expand(B, K, G, T, 1)
            weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        out = weights.reshape(B, K, G * T, -1) @ values
        out = out.view(B, K, G, T, -1).permute(0, 3, 1, 2, 4).reshape(B, T, H, -1)
        return out.to(q.dtype)

    return run


def _refuses_extras(equation: Equation) -> str | None:
    for name, value in (
        ("a soft cap", equation.params["soft_cap"]),
        ("ALiBi slopes", equation.operands[6]),
        ("sinks", equation.operands[7]),
    ):
        if value is not None:
            return f"the operator has no {name.removeprefix('a ')}"
    return None


def _refuses_head_size(most: int, equation: Equation) -> str | None:
    size, values = (int(equation.operands[i].shape[3]) for i in (0, 2))
    if size != values:
        return f"keys and values have different head sizes, {size} and {values}"
    if size % 16:
        return f"head size {size} is no multiple of 16"
    return f"head size {size} exceeds {most}" if size > most else None


def _refuses_block(equation: Equation) -> str | None:
    facts = _facts(equation)
    if facts.is_paged:
        if facts.tokens > 1 and (facts.block % 128 or not 128 <= facts.block <= 512):
            return f"blocks of {facts.block} slots; several query tokens want 128, 256, 384 or 512"
        if facts.tokens == 1 and (facts.block % 16 or facts.block > 512):
            return f"blocks of {facts.block} slots; one query token wants a multiple of 16 up to 512"
        return None
    return f"a row of {facts.slots} slots is no multiple of {BLOCK}" if facts.slots % BLOCK else None


def _refuses_sizes(equation: Equation) -> str | None:
    q, k_arena = equation.operands[:2]
    B, T, H, D = map(int, q.shape)
    K = int(k_arena.shape[2])
    if H * D >= 65535 or K * D > 65535:
        return f"{H} heads of {D} make rows of 65535 or more"
    if H > 256:
        return f"{H} heads exceed 256"
    if H // K > 64:
        return f"{H // K} query heads a KV head exceed 64"
    if B > 65536:
        return f"{B} rows exceed 65536"
    if D * 2 % 32 and B > 128:
        return f"heads of {D} are not aligned to 32 bytes, so at most 128 rows, found {B}"
    if T == 1 and _facts(equation).reach > 262144:
        return f"{_facts(equation).reach} KV slots exceed 262144"
    return None


def _refuses_many_tokens(equation: Equation) -> str | None:
    tokens = int(equation.operands[0].shape[1])
    return None if tokens == 1 else f"one query token a row, found {tokens}"


def _refuses_one_token(equation: Equation) -> str | None:
    return "several query tokens a row" if int(equation.operands[0].shape[1]) == 1 else None


def _refuses_large_310p(equation: Equation) -> str | None:
    B, reach = int(equation.operands[0].shape[0]), _facts(equation).reach
    if B > 128:
        return f"{B} rows exceed 128"
    return f"{reach} KV slots exceed 65535" if reach > 65535 else None


EXTRAS = Limit("plain_softmax_attention", _refuses_extras, "facts 1.1.1, schema")
HEAD_SIZE = Limit("head_size_16_to_512", partial(_refuses_head_size, 512), "facts 1.1.1, sizes")
BLOCKS = Limit("block_size", _refuses_block, "facts 1.1.1, paged")
SIZES = Limit("sizes", _refuses_sizes, "facts 1.1.1, sizes")

LENGTHS = HostPlan((3, 4, 5), _key, _lengths_plan)
MASKED = HostPlan((3, 4, 5), _key, _mask_plan)
COMPOSED = HostPlan((3, 4, 5), _key, _composed_plan)

_FIA_CALLS = {
    f"npu::{names['operator']}{overload}": (
        "query",
        "key",
        "value",
        names["heads"],
        "num_key_value_heads",
        names["scale"],
        "input_layout",
        "sparse_mode",
        "inner_precise",
        "block_size",
        "block_table",
        "atten_mask",
        names["queries"],
        names["keys"],
        *extra,
    )
    for names in _NAMES.values()
    for overload, extra in (("", ()), (".out", ("workspace", "out")))
}


def fused_infer_rows(plan: HostPlan, suffix: str) -> tuple[Capability, ...]:
    """Rows of FIA, with lengths from the host or with a mask alone."""
    return tuple(
        Capability(
            "attention",
            f"npu.fia_v{version}{suffix}",
            (f"npu::{_NAMES[version]['operator']}",),
            partial(FusedInfer, version=version),
            families=("A2", "A3"),
            dtypes=HALVES,
            layout="BSND, cache [blocks, block, K*D]",
            limits=(EXTRAS, HEAD_SIZE, BLOCKS, SIZES),
            evidence=("schema", "op-plugin check", "document"),
            plan=plan,
            calls={
                n: a
                for n, a in _FIA_CALLS.items()
                if n.split(".")[0] == f"npu::{_NAMES[version]['operator']}"
            },
        )
        for version in (2, 1)
    )


ROWS = (
    Capability(
        "attention",
        "npu.ifa_masked",
        ("npu::npu_incre_flash_attention",),
        _incremental,
        families=("A2", "310P"),
        dtypes=HALVES,
        layout="BSH, cache [blocks, block, K*D]",
        limits=(
            EXTRAS,
            HEAD_SIZE,
            BLOCKS,
            SIZES,
            Limit("one_token", _refuses_many_tokens, "facts 1.2.1"),
            Limit("sizes_310p", _refuses_large_310p, "facts 1.2.1"),
        ),
        evidence=("schema", "document"),
        plan=MASKED,
        calls={
            "npu::npu_incre_flash_attention": (
                "query",
                "key",
                "value",
                "atten_mask",
                "actual_seq_lengths",
                "block_table",
                "num_heads",
                "num_key_value_heads",
                "scale_value",
                "input_layout",
                "block_size",
                "inner_precise",
            )
        },
    ),
    Capability(
        "attention",
        "npu.pfa_gathered",
        ("npu::npu_prompt_flash_attention",),
        _prompt,
        families=("310P",),
        dtypes=(torch.float16,),
        layout="BNSD, keys and values gathered",
        limits=(
            EXTRAS,
            HEAD_SIZE,
            Limit("several_tokens", _refuses_one_token, "our own: IFA serves one token"),
            Limit("sizes_310p", _refuses_large_310p, "facts 1.1.2"),
        ),
        evidence=("schema", "document"),
        tier="composed",
        launches=7,
        plan=MASKED,
        calls={
            "npu::npu_prompt_flash_attention": (
                "query",
                "key",
                "value",
                "atten_mask",
                "num_heads",
                "scale_value",
                "next_tokens",
                "input_layout",
                "sparse_mode",
            )
        },
    ),
    Capability(
        "attention",
        "composed.attention",
        ("aten::index_select", "aten::matmul", "aten::masked_fill", "aten::softmax"),
        _composed,
        dtypes=None,
        evidence=("own",),
        tier="composed",
        launches=16,
        plan=COMPOSED,
    ),
)
