"""What a decode step costs, counted at the ACL boundary of the software device, beside transformers' eager model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from npu_models import params_of
from small_models import small_llama

import atbx
from atbx.core.errors import CacheStateError
from atbx.kernels import ascend
from atbx.kernels.ascend.lengths import LengthUpdates
from atbx.models import llama

LAYERS = 3


def config_of(layers: int = LAYERS) -> llama.LlamaConfig:
    return small_llama(
        width=64, ff=96, heads=4, kv_heads=2, head_size=64, layers=layers, rope=atbx.ops.Rope(64)
    )


def decode_launches(npu: Any, layers: int, rows: int, dtype: torch.dtype) -> Counter[str]:
    """Kernels that one decode step launches, eager."""
    config = config_of(layers)
    generate = atbx.generator(llama.forward, config, device=ascend.backend(execution="eager"))
    params = params_of(config, dtype)
    found: list[Counter[str]] = []
    for new in (3, 4):
        generate(params, [[1, 2, 3]] * rows, max_new_tokens=new, eos=())
        npu.reset()
        generate(params, [[1, 2, 3]] * rows, max_new_tokens=new, eos=())
        found.append(Counter(kernel for kernel, _ in npu.launches))
    return found[1] - found[0]


@pytest.mark.parametrize(("rows", "most"), [(1, 10), (4, 11)])
def test_launches_of_a_decode_layer_are_those_that_the_table_says(
    npu: Any, played: Any, rows: int, most: int
) -> None:
    if played.family not in ("A2", "A3"):
        pytest.skip("310P has kernels of its own")
    layer = decode_launches(npu, 3, rows, torch.bfloat16) - decode_launches(npu, 2, rows, torch.bfloat16)
    expected = Counter(
        {
            "aclnnMatmulWeightNz": 4,
            "aclnnAddRmsNorm": 2,
            "aclnnRopeWithSinCosCacheV2": 1,
            "aclnnScatterPaKvCache": 1,
            "aclnnFusedInferAttentionScoreV4": 1,
            "aclnnSwiGlu": 1,
        }
    )
    if rows > 1:
        expected["aclnnInplaceCopy"] = 1
    assert layer == expected
    assert layer.total() == most


@pytest.mark.every_chip
def test_launches_of_a_decode_layer_on_310p(npu: Any, played: Any) -> None:
    if played.family != "310P":
        pytest.skip("for 310P")
    layer = decode_launches(npu, 3, 1, torch.float16) - decode_launches(npu, 2, 1, torch.float16)
    assert layer.total() <= 12, layer


@pytest.mark.every_chip
def test_a_token_is_one_replay_one_wait_and_three_copies(npu: Any, half: torch.dtype) -> None:
    config = config_of()
    params = params_of(config, half)
    generate = atbx.generator(llama.forward, config, device="npu")
    prompts = [[1, 2, 3], [4, 5, 6]]
    found = []
    for new in (10, 20):
        generate(params, prompts, max_new_tokens=new, eos=())
        npu.reset()
        generate(params, prompts, max_new_tokens=new, eos=())
        found.append(npu.counts())
    short, long = found
    assert long.replays - short.replays == 10
    assert long.host_syncs - short.host_syncs == 10
    copies = [sum(c.h2d_copies.values()) + sum(c.d2h_copies.values()) for c in (short, long)]
    assert copies[1] - copies[0] == 30
    assert set(long.h2d_copies) == {"pinned_async"}
    assert set(long.d2h_copies) == {"pinned_async"}
    assert long.device_allocations == 0


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_transformers_eager_launches_many_times_as_much(npu: Any, played: Any) -> None:
    if played.family not in ("A2", "A3"):
        pytest.skip("the comparison is made on A2")
    transformers = pytest.importorskip("transformers")
    ours = decode_launches(npu, LAYERS, 1, torch.bfloat16)
    settings = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(settings).to(torch.bfloat16).eval().to("npu:0")
    with torch.no_grad():
        past = model(torch.tensor([[1, 2, 3]]).to("npu:0"), use_cache=True).past_key_values
        token = torch.tensor([[4]]).to("npu:0")
        npu.reset()
        model(token, past_key_values=past, use_cache=True)
        theirs = len(npu.launches)
    print(f"launches of a decode step of {LAYERS} layers: atbx {ours.total()}, transformers eager {theirs}")
    assert theirs > 3 * ours.total()


def test_an_update_that_is_skipped_never_yields_a_token(
    npu: Any, played: Any, half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if played.family not in ("A2", "A3"):
        pytest.skip("attention takes a mask on 310P, and nothing is updated")
    config = config_of()
    params = params_of(config, half)
    generate = atbx.generator(llama.forward, config, device="npu")
    generate(params, [[1, 2, 3]], max_new_tokens=4, eos=())
    monkeypatch.setattr(LengthUpdates, "update", lambda self, plans: None)
    with pytest.raises(CacheStateError, match="lengths of an earlier step"):
        generate(params, [[1, 2, 3]], max_new_tokens=4, eos=())
    # And were that check gone as well, the graph waits for an event that nobody records.
    monkeypatch.setattr(LengthUpdates, "use", lambda self: None)
    with pytest.raises(RuntimeError, match="507046"):
        generate(params, [[1, 2, 3]], max_new_tokens=4, eos=())


def test_an_update_with_other_names_or_sizes_is_refused(npu: Any, played: Any, half: torch.dtype) -> None:
    if played.family not in ("A2", "A3"):
        pytest.skip("attention takes a mask on 310P, and nothing is updated")
    config = config_of()
    params = params_of(config, half)
    generate = atbx.generator(llama.forward, config, device="npu")
    generate(params, [[1, 2, 3]], max_new_tokens=4, eos=())
    original = LengthUpdates.update

    def renamed(self: LengthUpdates, plans: Any) -> None:
        changed = [type(p)(p.arrays, {f"{n}s": v for n, v in p.lists.items()}) for p in plans]
        original(self, changed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LengthUpdates, "update", renamed)
        with pytest.raises(CacheStateError, match="does not fit the captured launch"):
            generate(params, [[1, 2, 3]], max_new_tokens=4, eos=())
    assert generate(params, [[1, 2, 3]], max_new_tokens=4, eos=()).tokens


def test_a_new_arena_is_not_touched_by_the_step_before(npu: Any) -> None:
    from atbx.core.arena import Arena
    from atbx.ops.logits import count_tokens

    def step(table: Any, tokens: Any, active: Any) -> Any:
        return table.replaced({"counts": count_tokens(table.tree["counts"], tokens, active)})

    compiled = atbx.jit(step, donate=("table",), device="npu")
    tokens = [torch.tensor(t).to("npu:0") for t in ([1, 3], [2, 2])]
    active = torch.tensor([True, True]).to("npu:0")
    found = []
    for given in tokens:
        arena = Arena({"counts": torch.zeros(2, 4, dtype=torch.int32, device="npu:0")})
        found.append(compiled(arena.value(), given, active).tree["counts"].cpu().tolist())
    assert found == [[[0, 1, 0, 0], [0, 0, 0, 1]], [[0, 0, 1, 0], [0, 0, 1, 0]]]


def test_reductions_with_counts_and_scalars_are_captured(npu: Any, half: torch.dtype) -> None:
    ops = atbx.ops

    def function(x: Any, counts: Any) -> Any:
        return (
            ops.sum(ops.clip(x, -0.5, 0.5), 1, counts=counts),
            ops.softmax(x, 1, counts=counts),
            ops.power(x * x, 1.5),
        )

    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(half).to("npu:0")
    counts = torch.tensor([3, 32, 1]).to("npu:0")
    found = atbx.jit(function, device="npu", host_results=True)(x, counts)
    expected = atbx.reference(function, x.cpu(), counts.cpu())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
