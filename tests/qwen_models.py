"""Tiny random Qwen models of transformers, and how close to FP64 its own FP32 logits are: the oracle of the family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model_logits import all_logits, engine_of

import atbx
from atbx import checkpoints
from atbx.models import qwen
from atbx.schedule import Policy

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
PROMPTS = [
    [(7 * i * i + 3 * i + row) % VOCAB for i in range(length)]
    for row, length in enumerate((1, 5, 23, 40, 64, 9))
]
PATHS = ((512, False, 0), (512, True, 0), (5, True, 0), (512, True, 1), (16, True, 1), (4, True, 30))
"""Ways that tokens can take: prefill chunk, whether the prompts are one ragged batch, tokens fed one at a time."""


@dataclass
class Case:
    """A model of transformers in FP32 and FP64, its folder, and the same model loaded here."""

    fp32: Any
    fp64: Any
    folder: Path
    loaded: Any


def make(config: Any, seed: int = 3) -> Any:
    """A random model of a configuration of transformers; norms and biases differ from their plain start."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def case_of(config: Any, folder: Path) -> Case:
    """A model saved by transformers into `folder` and loaded from there."""
    import transformers

    fp32 = make(config)
    fp64 = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    fp64.load_state_dict(fp32.state_dict())
    fp32.save_pretrained(folder)
    return Case(fp32, fp64, folder, checkpoints.load(folder, progress=False))


def reference_logits(model: Any, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """transformers' logits of each prompt, alone and without a cache."""
    with torch.no_grad():
        return [model(torch.tensor([p]), use_cache=False).logits[0] for p in prompts]


def assert_as_close_as_transformers(case: Case, chunk: int, together: bool, decode: int) -> None:
    """Our FP32 logits are as close to FP64 as those of transformers, as tests of the Llama family ask."""
    prompts = [p for p in PROMPTS if len(p) > decode]
    truth, theirs = reference_logits(case.fp64, prompts), reference_logits(case.fp32, prompts)
    engine = engine_of(qwen.forward, case.loaded.config, dtype=None, chunk=chunk)
    if together:
        ours = all_logits(engine, case.loaded.params, prompts, decode=decode)
    else:
        ours = [all_logits(engine, case.loaded.params, [p], decode=decode)[0] for p in prompts]
    for exact, reference, found in zip(truth, theirs, ours, strict=True):
        allowed = 1.5 * (reference.double() - exact).norm()
        # One rounding of the result: below that no FP32 implementation can be told from another.
        floor = torch.finfo(torch.float32).eps * exact.norm()
        assert (found.double() - exact).norm() <= allowed + floor


def greedy(case: Case, chunk: int, new: int) -> list[list[int]]:
    """`new` greedy tokens for each prompt, as one ragged batch of the generator, end tokens not stopping."""
    config = case.loaded.config
    policy = Policy(config.context, chunk=chunk)
    generate = atbx.generator(qwen.forward, config, dtype=torch.float32, policy=policy)
    tokens: list[list[int]] = generate(case.loaded.params, PROMPTS, max_new_tokens=new, eos=()).tokens
    return tokens


def greedy_of_transformers(model: Any, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    """`new` greedy tokens for each prompt, alone."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found
