"""Three hundred requests of random lengths and options: the variants they compile are the ones that were planned."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_models import random_params, small_llama

import atbx
from atbx import ops
from atbx.core.errors import FrozenCacheError
from atbx.core.op import Op
from atbx.generate import Generator
from atbx.models import llama

CONFIG = small_llama()
PARAMS = random_params(CONFIG)
EOS = [3, 9]


def random_request(chance: random.Random) -> atbx.Request:
    """One to four prompts of 1 to 500 tokens, and any options."""
    rows = chance.choice([1, 1, 1, 2, 3, 4])
    options: dict[str, Any] = {}
    if chance.random() < 0.5:
        options |= {"temperature": chance.random() + 0.1, "top_p": chance.choice([0.9, 1.0])}
        options |= {"top_k": chance.choice([0, 5]), "seed": chance.randrange(100)}
    if chance.random() < 0.3:
        options["repetition_penalty"] = 1.2
    if chance.random() < 0.3:
        options["logprobs"] = chance.choice([0, 1, 3])
    if chance.random() < 0.1:
        options["prompt_logprobs"] = chance.choice([0, 2])
    if chance.random() < 0.3:
        options["min_new_tokens"] = 2
    if chance.random() < 0.2:
        options["logit_bias"] = {chance.randrange(61): 1.5}
    lengths = tuple(chance.randint(1, 500) for _ in range(rows))
    return atbx.Request(lengths, chance.randint(2, 6), options)


def serve(generate: Generator, requests: list[atbx.Request], chance: random.Random) -> None:
    """Run the requests with random tokens."""
    for request in requests:
        prompts = [[chance.randrange(CONFIG.vocab) for _ in range(n)] for n in request.prompt_lengths]
        result = generate(PARAMS, prompts, max_new_tokens=request.max_new_tokens, **request.options)
        assert len(result.tokens) == len(prompts)


def resident_bytes() -> int:
    """Bytes that this process has resident."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_three_hundred_requests_need_what_was_planned_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random(11)
    requests = [random_request(chance) for _ in range(300)]
    generate = atbx.generator(llama.forward, CONFIG, eos=EOS)
    planned = generate.plan(PARAMS, requests)
    assert not any(p.compiled for p in planned)
    assert generate.warm(PARAMS, requests) == len(planned) == generate.cache_info().variants
    assert all(p.compiled for p in generate.plan(PARAMS, requests))
    generate.freeze()

    entered: list[str] = []

    def refuse(name: str) -> Any:
        return lambda *args, **kwargs: entered.append(name)

    monkeypatch.setattr(generate.engine.forward, "_function", refuse("forward"))
    monkeypatch.setattr(Op, "__call__", refuse("an op"))
    for name in ops.__all__:
        if callable(getattr(ops, name)) and name != "Rope":
            monkeypatch.setattr(ops, name, refuse(name))
    serve(generate, requests, chance)
    assert entered == []

    info = generate.cache_info()
    assert info.variants == len(planned) == info.model.misses + info.sampler.misses + info.scorer.misses
    assert info.padding <= 1.35
    before = resident_bytes()
    serve(generate, requests, chance)
    # One leaked logits row a request would be 300 x 244 bytes; one leaked arena 100 KiB or more each.
    assert resident_bytes() - before < 8 << 20
    assert generate.cache_info().variants == len(planned)


def test_a_frozen_generator_names_the_shape_it_lacks_and_the_nearest() -> None:
    generate = atbx.generator(llama.forward, CONFIG)
    generate.warm(PARAMS, [atbx.Request((5,), 3)])
    generate.freeze()
    assert len(generate(PARAMS, [1, 2, 3, 4, 5], max_new_tokens=3).tokens[0]) == 3
    with pytest.raises(
        FrozenCacheError, match=r"step/ids:i64\[1, 48\].*nearest variant step/ids:i64\[1, 1\].*\(1, 48\) here"
    ):
        generate(PARAMS, list(range(40)), max_new_tokens=3)
    with pytest.raises(FrozenCacheError, match="values"):
        generate(PARAMS, [1, 2, 3, 4, 5], max_new_tokens=3, temperature=1.0)
    generate.unfreeze()
    assert len(generate(PARAMS, list(range(40)), max_new_tokens=3).tokens[0]) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"presence_penalty": 0.5},
        {"min_new_tokens": 2},
    ],
)
def test_each_option_is_planned_as_it_is_run(options: dict[str, Any]) -> None:
    generate = atbx.generator(llama.forward, CONFIG, eos=EOS)
    generate.warm(PARAMS, [atbx.Request((17, 300), 4, options)])
    generate.freeze()
    result = generate(PARAMS, [[1] * 17, [2] * 300], max_new_tokens=4, **options)
    assert all(1 <= len(tokens) <= 4 for tokens in result.tokens)
    assert generate.cache_info().variants == len(generate.plan(PARAMS, [atbx.Request((17, 300), 4, options)]))


def test_values_of_options_are_never_part_of_a_key() -> None:
    generate = atbx.generator(llama.forward, CONFIG)
    for seed in range(5):
        generate(
            PARAMS,
            [4, 5],
            max_new_tokens=3,
            temperature=0.3 + seed,
            top_k=seed,
            top_p=0.9,
            seed=seed,
            stop_tokens=[[seed, 1]],
        )
    assert generate.cache_info().sampler.variants == 1


def test_a_long_row_that_ends_early_needs_no_unplanned_extent() -> None:
    generate = atbx.generator(llama.forward, CONFIG)
    prompts = [[7] * 300, [5]]
    first = generate(PARAMS, prompts, max_new_tokens=6).tokens
    long_end = first[0][0]
    generate = atbx.generator(llama.forward, CONFIG, eos=[long_end])
    request = atbx.Request((300, 1), 6)
    generate.warm(PARAMS, [request])
    generate.freeze()
    result = generate(PARAMS, prompts, max_new_tokens=6)
    assert result.finish[0] == "eos"
    assert len(result.tokens[0]) == 1
    assert len(generate.plan(PARAMS, [replace(request, max_new_tokens=6)])) == generate.cache_info().variants
