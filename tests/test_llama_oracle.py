"""The Llama family against transformers on tiny random models: FP32 logits by every path, windows included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_logits import all_logits, engine_of

from atbx import checkpoints
from atbx.models import llama

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def config(kind: str) -> Any:
    """A tiny configuration of a public kind."""
    llama_config, mistral_config = transformers.LlamaConfig, transformers.MistralConfig
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    made: dict[str, Any] = {
        "llama2": lambda: llama_config(**SIZES),
        "tied": lambda: llama_config(**SIZES, tie_word_embeddings=True),
        "biased": lambda: llama_config(**SIZES, attention_bias=True, mlp_bias=True),
        "wide_heads": lambda: llama_config(**SIZES, head_dim=16),
        "multi_query": lambda: llama_config(**{**SIZES, "num_key_value_heads": 1}),
        "multi_head": lambda: llama_config(**{**SIZES, "num_key_value_heads": 6}),
        "llama3_scaled": lambda: llama_config(
            **SIZES,
            rope_parameters={**scaled, "rope_theta": 5e5, "original_max_position_embeddings": 64},
        ),
        "linear": lambda: llama_config(
            **SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
        ),
        "yarn": lambda: llama_config(
            **SIZES,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
            },
        ),
        "mistral": lambda: mistral_config(**SIZES, sliding_window=7),
        "mistral_unwindowed": lambda: mistral_config(**SIZES, sliding_window=None),
    }
    return made[kind]()


KINDS = (
    "llama2", "tied", "biased", "wide_heads", "multi_query", "multi_head", "llama3_scaled", "linear", "yarn",
    "mistral", "mistral_unwindowed",
)  # fmt: skip


def reference_logits(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits of each prompt, alone and without a cache."""
    with torch.no_grad():
        return [model(torch.tensor([p]), use_cache=False).logits[0] for p in prompts]


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """transformers in FP32 and FP64, and the same model loaded here from its folder."""
    torch.manual_seed(3)
    kind = config(request.param)
    model = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    folder: Path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, _double(model, kind), checkpoints.load(folder)


def _double(model: Any, kind: Any) -> Any:
    twin = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager").double().eval()
    twin.load_state_dict(model.state_dict())
    return twin


PROMPTS = [
    [(7 * i * i + 3 * i + row) % 97 for i in range(length)]
    for row, length in enumerate((1, 5, 23, 40, 64, 9))
]


@pytest.mark.parametrize(
    ("chunk", "together", "decode"),
    [(512, False, 0), (512, True, 0), (5, False, 0), (5, True, 0), (512, True, 1), (16, True, 1)],
)
def test_fp32_logits_are_as_close_to_fp64_as_those_of_transformers(
    models: tuple[Any, Any, Any], chunk: int, together: bool, decode: int
) -> None:
    fp32, fp64, loaded = models
    prompts = [p for p in PROMPTS if len(p) > decode]
    truth, theirs = reference_logits(fp64, prompts), reference_logits(fp32, prompts)
    engine = engine_of(llama.forward, loaded.config, dtype=None, chunk=chunk)
    if together:
        ours = all_logits(engine, loaded.params, prompts, decode=decode)
    else:
        ours = [all_logits(engine, loaded.params, [p], decode=decode)[0] for p in prompts]
    for exact, reference, found in zip(truth, theirs, ours, strict=True):
        allowed = 1.5 * (reference.double() - exact).norm()
        # One rounding of the result: below that no FP32 implementation can be told from another.
        floor = torch.finfo(torch.float32).eps * exact.norm()
        assert (found.double() - exact).norm() <= allowed + floor


def test_many_decode_steps_across_the_window_agree(models: tuple[Any, Any, Any]) -> None:
    fp32, fp64, loaded = models
    prompts = [PROMPTS[4], PROMPTS[3]]
    truth, theirs = reference_logits(fp64, prompts), reference_logits(fp32, prompts)
    engine = engine_of(llama.forward, loaded.config, dtype=None, chunk=4)
    for exact, reference, found in zip(
        truth, theirs, all_logits(engine, loaded.params, prompts, decode=30), strict=True
    ):
        allowed = 1.5 * (reference.double() - exact).norm()
        assert (found.double() - exact).norm() <= allowed + torch.finfo(torch.float32).eps * exact.norm()
