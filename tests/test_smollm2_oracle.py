"""SmolLM2-135M-Instruct from its GGUF file against transformers on the same file: FP32, BF16, and greedy text.

Twelve prompts of 1 to 400 tokens and 64 new tokens each, alone, batched ragged together, and in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from model_logits import all_logits, engine_of

import atbx
from atbx import checkpoints
from atbx.models import llama
from atbx.schedule import Policy

transformers = pytest.importorskip("transformers")
# The FP64 runs take minutes on a machine without wide vector units.
pytestmark = [pytest.mark.oracle, pytest.mark.weights, pytest.mark.timeout(2400)]

LENGTHS = (1, 2, 5, 17, 33, 64, 100, 150, 200, 256, 333, 400)
NEW = 64
MODES = {"alone": (512, False), "batched": (512, True), "chunked": (64, True)}


@dataclass
class Oracle:
    """What transformers says: greedy tokens in FP32, and logits of prompt + tokens in three precisions."""

    prompts: list[list[int]]
    greedy: list[list[int]]
    sequences: list[list[int]]
    fp64: list[torch.Tensor]
    fp32_error: list[torch.Tensor]
    bf16_error: torch.Tensor
    fp32_norm: list[torch.Tensor]
    fp32: list[torch.Tensor]


def prompts_of(text: Any) -> list[list[int]]:
    """Prompts of the given lengths out of running English and code, each cut at another place."""
    story = (
        "The harbour of the old town lies behind a wall of grey stone. Ships from the north bring timber and salt, "
        "and take away wool, tin and cheese. In 1742 a fire destroyed the customs house; it was rebuilt in 3 years. "
        "def area(radius):\n    return 3.14159 * radius ** 2\n\n"
        "What do you get if you add twelve and thirty? Explain step by step. The answer is forty-two. "
    )
    ids = text.encode(story * 12)
    return [ids[17 * i : 17 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Any:
    """The model loaded here."""
    return checkpoints.load(smollm2_path, progress=False)


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path, model: Any) -> Oracle:
    """transformers on the same GGUF file."""
    prompts = prompts_of(model.text)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    greedy = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        greedy.append(out[0, len(prompt) :].tolist())
    sequences = [p + g for p, g in zip(prompts, greedy, strict=True)]

    def logits() -> list[torch.Tensor]:
        with torch.no_grad():
            return [theirs(torch.tensor([s]), use_cache=False).logits[0] for s in sequences]

    fp32 = logits()
    theirs.to(torch.bfloat16)
    bf16_error = torch.cat([relative(b, f) for b, f in zip(logits(), fp32, strict=True)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    theirs.to(torch.float64)
    fp64 = logits()
    fp32_error = [(f.double() - e).norm(dim=-1) for f, e in zip(fp32, fp64, strict=True)]
    return Oracle(
        prompts, greedy, sequences, fp64, fp32_error, bf16_error, [f.norm(dim=-1) for f in fp32], fp32
    )


def relative(found: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative L2 distance at each position: [T, V] and [T, V] to [T]."""
    return (found.float() - reference.float()).norm(dim=-1) / reference.float().norm(dim=-1)


def ours(model: Any, oracle: Oracle, dtype: torch.dtype, mode: str) -> list[torch.Tensor]:
    """Our logits of every sequence, prompts prefilled and the new tokens fed one by one (alone: all prefilled)."""
    chunk, together = MODES[mode]
    engine = engine_of(llama.forward, model.config, dtype=dtype, chunk=chunk)
    if together:
        return all_logits(engine, model.params, oracle.sequences, decode=NEW)
    return [all_logits(engine, model.params, [s])[0] for s in oracle.sequences]


@pytest.mark.parametrize("mode", MODES)
def test_fp32_logits_are_as_close_to_fp64_as_those_of_transformers(
    model: Any, oracle: Oracle, mode: str
) -> None:
    # Over a sequence. A single position, the worst one too, proves little either way: transformers' own two attention
    # implementations differ there by up to 4.2 in this ratio, and by more than 1.5 at one in eight; on a machine with
    # AVX2 alone the worst position of a sequence was seen at 3.2. So it has that wider bound.
    found = ours(model, oracle, torch.float32, mode)
    for exact, allowed, logits in zip(oracle.fp64, oracle.fp32_error, found, strict=True):
        error = (logits.double() - exact).norm(dim=-1)
        assert error.norm() <= 1.5 * allowed.norm()
        assert error.max() <= 4.2 * allowed.max()


@pytest.mark.parametrize("mode", MODES)
def test_bf16_logits_are_as_close_to_fp32_as_those_of_transformers(
    model: Any, oracle: Oracle, mode: str
) -> None:
    found = ours(model, oracle, torch.bfloat16, mode)
    error = torch.cat([relative(b, f) for b, f in zip(found, oracle.fp32, strict=True)])
    assert error.mean() <= 1.2 * oracle.bf16_error.mean()
    assert error.max() <= 1.2 * oracle.bf16_error.max()


@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_is_that_of_transformers(model: Any, oracle: Oracle, mode: str) -> None:
    chunk, together = MODES[mode]
    generate = atbx.generator(
        llama.forward, model.config, dtype=torch.float32, policy=Policy(model.config.context, chunk=chunk)
    )
    if together:
        tokens = generate(model.params, oracle.prompts, max_new_tokens=NEW).tokens
    else:
        tokens = [generate(model.params, p, max_new_tokens=NEW).tokens[0] for p in oracle.prompts]
    excused = 0
    for prompt, wanted, found, exact in zip(oracle.prompts, oracle.greedy, tokens, oracle.fp64, strict=True):
        if found == wanted:
            continue
        first = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
        best, second = exact[len(prompt) + first - 1].topk(2).values.tolist()
        assert best - second <= 1e-3, f"prompt of {len(prompt)} tokens differs at new token {first}"
        excused += 1
    assert excused <= 2
