"""A model of transformers, which knows nothing of the software NPU, gives there what it gives on a CPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from atbx.testing.software_npu import SoftwareNpu

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_llama_of_transformers_runs_in_eager_mode(npu: SoftwareNpu, attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.LlamaForCausalLM(config).half().eval()
        ids = torch.randint(0, 100, (2, 7))
        mask = torch.ones_like(ids)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            logits = model(ids, attention_mask=mask).logits
            tokens = model.generate(ids, attention_mask=mask, **options)
            model.to("npu")
            npu.reset()
            found = model(ids.npu(), attention_mask=mask.npu()).logits
            assert torch.equal(found.cpu(), logits)
            launches = npu.counts().launches
            assert torch.equal(model.generate(ids.npu(), attention_mask=mask.npu(), **options).cpu(), tokens)
    assert launches["aclnnSilu"] == 3
    assert launches["aclnnRsqrt"] == 7  # two norms a layer and one at the end
    assert ("aclnnFlashAttentionScore" in launches) is (attention == "sdpa")
