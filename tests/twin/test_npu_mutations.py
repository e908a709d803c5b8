"""Each conversion to the operators' conventions is needed: with it removed, a model's logits are wrong or refused.

The list is the mutation table of docs/ascend.md. A rule of the software device that were wrong in the same way would be
caught by the hand-computed literals of tests/test_software_rules_*.py, which know nothing of our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from model_logits import all_logits, engine_of
from npu_models import check_logits, params_of, reference
from small_models import small_llama

import atbx
from atbx.core.errors import AtbxError
from atbx.kernels import ascend
from atbx.kernels.ascend import attention, cache_write, norms, plan, rules, runtime, table
from atbx.models import llama

pytestmark = pytest.mark.usefixtures("npu")

PROMPTS = [[5, 9, 3, 22, 41, 7, 8, 11, 2, 50, 51, 52], [1, 2, 3]]

Patch = pytest.MonkeyPatch


def config_of(**changes: Any) -> llama.LlamaConfig:
    sizes = {"width": 64, "ff": 96, "heads": 4, "kv_heads": 2, "head_size": 64} | changes
    return small_llama(rope=atbx.ops.Rope(64, style=sizes.pop("style", "half")), **sizes)


def run(config: llama.LlamaConfig, params: Any, device: Any) -> list[torch.Tensor]:
    engine = engine_of(llama.forward, config, dtype=None, chunk=8, device=device)
    return all_logits(engine, params, PROMPTS, decode=2, unused=0.0)


def patched(patch: Patch, kernel: str, **changes: Any) -> None:
    """Change a row of the table."""
    made = table.rows

    def rows(lengths: str = "update") -> Any:
        return tuple(replace(r, **changes) if r.kernel == kernel else r for r in made(lengths))

    patch.setattr(ascend, "rows", rows)


def no_scale(patch: Patch) -> None:
    original = attention.FusedInfer.__init__

    def init(self: Any, equation: Any, version: int) -> None:
        original(self, equation, version)
        del self._static[attention._NAMES[version]["scale"]]

    patch.setattr(attention.FusedInfer, "__init__", init)


def no_kv_heads(patch: Patch) -> None:
    original = attention.FusedInfer.__init__

    def init(self: Any, equation: Any, version: int) -> None:
        original(self, equation, version)
        self._static["num_key_value_heads"] = 0

    patch.setattr(attention.FusedInfer, "__init__", init)


def top_left(patch: Patch) -> None:
    patch.setattr(attention, "BOTTOM_RIGHT_CAUSAL", 2)


def no_causal_mask(patch: Patch) -> None:
    patch.setattr(attention, "BOTTOM_RIGHT_CAUSAL", 0)


def inverted_mask(patch: Patch) -> None:
    original = plan.hidden_slots
    patch.setattr(attention, "hidden_slots", lambda *a, **k: ~original(*a, **k))


def wide_window(patch: Patch) -> None:
    original = plan.hidden_slots

    def wider(facts: Any, *rest: Any, **options: Any) -> torch.Tensor:
        return original(replace(facts, window=facts.window + 1), *rest, **options)

    patch.setattr(attention, "hidden_slots", wider)


def accumulated_lengths(patch: Patch) -> None:
    original = plan.live_slots

    def summed(*arguments: Any) -> list[int]:
        return torch.tensor(original(*arguments)).cumsum(0).tolist()

    patch.setattr(attention, "live_slots", summed)


def lengths_before_the_write(patch: Patch) -> None:
    patch.setattr(attention, "live_slots", lambda facts, old, new: [max(n, 1) for n in old])


def default_cache_mode(patch: Patch) -> None:
    def scatter(keys: Any, values: Any, k_slots: Any, v_slots: Any, slots: Any) -> None:
        torch.ops.npu.npu_scatter_pa_kv_cache(keys, values, k_slots, v_slots, slots)

    make = partial(cache_write._qkv_write, rotary=cache_write._mrope, scatter=scatter, contiguous=False)
    patched(patch, "npu.mrope+scatter_pa", make=make)


def same_slot_for_padding(patch: Patch) -> None:
    original = plan.slots_of

    def shared(facts: Any, rows: Any, lengths: Any, counts: Any) -> torch.Tensor:
        found = original(facts, rows, lengths, counts)
        return found.clamp(max=facts.first_trash)

    patch.setattr(cache_write, "slots_of", shared)


def other_rotary_style(patch: Patch) -> None:
    patch.setattr(cache_write, "MODES", {"half": "interleave", "interleaved": "half"})


def sin_before_cos(patch: Patch) -> None:
    original = cache_write._table
    patch.setattr(cache_write, "_table", lambda cos, sin, *rest: original(sin, cos, *rest))


def up_before_gate(patch: Patch) -> None:
    original = rules._concat

    def swapped(builder: Any, names: tuple[str, ...]) -> Any:
        return original(builder, names[::-1] if len(names) == 2 else names)

    patch.setattr(rules, "_concat", swapped)


def default_geglu(patch: Patch) -> None:
    patched(patch, "npu.geglu", make=lambda equation: lambda both: torch.ops.npu.npu_geglu(both)[0])


def norm_outputs_as_elsewhere(patch: Patch) -> None:
    def make(equation: Any) -> Callable[..., Any]:
        def add_norm(x: Any, residual: Any, weight: Any) -> Any:
            normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, equation.params["eps"])
            return total, normed

        return add_norm

    patched(patch, "npu.add_rms_norm", make=make)


def default_eps(patch: Patch) -> None:
    patched(patch, "npu.rms_norm", make=lambda equation: lambda x, w: torch.ops.npu.npu_rms_norm(x, w)[0])
    patched(patch, "npu.rms_norm", make=lambda equation: lambda x, w: torch.ops.npu.npu_rms_norm(x, w)[0])


def untransposed_weight(patch: Patch) -> None:
    def make(equation: Any) -> Callable[..., Any]:
        shape = tuple(map(int, equation.results[0].shape))

        def linear(x: Any, weight: Any, bias: Any) -> Any:
            return torch.mm(x.reshape(-1, x.shape[-1]), weight).view(shape)

        return linear

    patched(patch, "aclnn.mm_nz", make=make)


def formats_left_off(patch: Patch) -> None:
    from contextlib import nullcontext

    patch.setattr(runtime.AscendDevice, "_internal_format", lambda self: nullcontext())


SQUARE = {"width": 256, "heads": 4, "kv_heads": 4, "head_size": 64}

MUTATIONS: list[tuple[Callable[[Patch], None], dict[str, Any], dict[str, str]]] = [
    (no_scale, {}, {}),
    (no_kv_heads, {}, {}),
    (top_left, {}, {}),
    (no_causal_mask, {}, {}),
    (inverted_mask, {"window": 4}, {}),
    (inverted_mask, {}, {"lengths": "mask"}),
    (wide_window, {"window": 4}, {}),
    (accumulated_lengths, {}, {}),
    (lengths_before_the_write, {}, {}),
    (default_cache_mode, {}, {}),
    (same_slot_for_padding, {}, {}),
    (other_rotary_style, {}, {}),
    (other_rotary_style, {"style": "interleaved"}, {}),
    (sin_before_cos, {}, {}),
    (up_before_gate, {}, {}),
    (default_geglu, {"activation": "gelu"}, {}),
    (norm_outputs_as_elsewhere, {}, {}),
    (default_eps, {"eps": 0.05}, {}),
    (untransposed_weight, SQUARE, {}),
    (formats_left_off, {}, {}),
]


@pytest.mark.parametrize(
    ("mutate", "changes", "options"), MUTATIONS, ids=lambda x: getattr(x, "__name__", None) or str(x or "-")
)
def test_a_conversion_that_is_removed_is_noticed(
    mutate: Callable[[Patch], None],
    changes: dict[str, Any],
    options: dict[str, str],
    monkeypatch: Patch,
    half: torch.dtype,
) -> None:
    config = config_of(**changes)
    params = params_of(config, half)
    expected = reference(config, params, PROMPTS)
    check_logits(run(config, params, ascend.backend(**options)), expected)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, AtbxError, RuntimeError)):
        check_logits(run(config, params, ascend.backend(**options)), expected)


def test_the_names_patched_here_exist() -> None:
    for module, name in ((norms, "_rms_norm"), (attention, "live_slots"), (cache_write, "slots_of")):
        assert hasattr(module, name)
