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
