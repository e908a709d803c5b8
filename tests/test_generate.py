"""`generate`: ragged batches, ends, streams, threads, and that a row never depends on its neighbours."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from small_models import random_params, small_llama

import atbx
from atbx.core.errors import CapacityError
from atbx.generate import Generator
from atbx.models import llama
from atbx.schedule import Policy

CONFIG = small_llama()
PARAMS = random_params(CONFIG)


def make(**options: Any) -> Generator:
    """A generator over the small model."""
    return atbx.generator(llama.forward, CONFIG, **options)


def naive_greedy(prompt: list[int], new: int, config: Any = CONFIG, params: Any = PARAMS) -> list[int]:
    """Greedy tokens by the reference rules, the whole sequence anew for each token: no cache, padding or variants."""
    from atbx.models.step import Step
    from atbx.ops import kv_cache

    tokens = list(prompt)
    for _ in range(new):
        T = len(tokens)
        cache = kv_cache.init(config.cache_spec, batch=1, capacity=T, dtype=torch.float32)
        index = torch.arange(T).view(1, T)
        step = Step(
            torch.tensor([tokens]), torch.tensor([T]), index, torch.tensor([[T - 1]]), torch.tensor([T])
        )
        logits, _ = atbx.reference(llama.forward, params, step, cache, config)
        tokens.append(int(logits[0, 0].argmax()))
    return tokens[len(prompt) :]


PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3], [11, 12, 13], [40, 2, 40], [1] * 20, [33, 60, 0]]
WANTED = {tuple(p): naive_greedy(p, 12) for p in PROMPTS}


def test_a_prompt_alone_gives_the_tokens_of_the_plain_model() -> None:
    generate = make()
    for prompt in PROMPTS:
        result = generate(PARAMS, prompt, max_new_tokens=12)
        assert result.tokens == [WANTED[tuple(prompt)]]
        assert result.finish == ["length"]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6])
def test_a_ragged_batch_gives_each_row_its_solo_tokens(rows: int) -> None:
    result = make()(PARAMS, PROMPTS[:rows], max_new_tokens=12)
    assert result.tokens == [WANTED[tuple(p)] for p in PROMPTS[:rows]]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16])
def test_chunk_boundaries_are_invisible(chunk: int) -> None:
    generate = make(policy=Policy(CONFIG.context, chunk=chunk, score_chunk=chunk))
    assert generate(PARAMS, PROMPTS, max_new_tokens=12).tokens == [WANTED[tuple(p)] for p in PROMPTS]


def test_prompts_may_be_lists_arrays_or_tensors() -> None:
    generate = make()
    import numpy as np

    wanted = [WANTED[11, 12, 13], WANTED[40, 2, 40]]
    for tokens in (
        [[11, 12, 13], [40, 2, 40]],
        np.array([[11, 12, 13], [40, 2, 40]], dtype=np.int32),
        torch.tensor([[11, 12, 13], [40, 2, 40]]),
        [np.array([11, 12, 13]), torch.tensor([40, 2, 40])],
    ):
        assert generate(PARAMS, tokens, max_new_tokens=12).tokens == wanted


def test_any_id_of_the_eos_set_ends_its_row_and_is_included() -> None:
    first, second = WANTED[5,][2], WANTED[11, 12, 13][4]
    result = make(eos=[first, second])(PARAMS, [[5], [11, 12, 13], [40, 2, 40]], max_new_tokens=12)
    for row, prompt in enumerate(((5,), (11, 12, 13), (40, 2, 40))):
        whole = WANTED[prompt]
        ends = [i for i, t in enumerate(whole) if t in (first, second)]
        expected = whole[: ends[0] + 1] if ends else whole
        assert result.tokens[row] == expected
        assert result.finish[row] == ("eos" if ends else "length")


def test_eos_in_the_prompt_does_not_stop() -> None:
    result = make(eos=[9])(PARAMS, [9, 8, 7, 6, 5, 4, 3], max_new_tokens=1)
    assert result.tokens[0] == WANTED[9, 8, 7, 6, 5, 4, 3][:1]


def test_min_new_tokens_suppresses_eos() -> None:
    eos = WANTED[5,][0]
    result = make(eos=[eos])(PARAMS, [5], max_new_tokens=8, min_new_tokens=4)
    assert len(result.tokens[0]) >= 4
    assert eos not in result.tokens[0][:4]


def test_stop_sequences_end_a_row_where_they_complete() -> None:
    whole = WANTED[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    result = make()(PARAMS, [1] * 20, max_new_tokens=12, stop_tokens=[whole[3:5]])
    first = next(i for i in range(11) if whole[i : i + 2] == whole[3:5])
    assert result.tokens == [whole[: first + 2]]
    assert result.finish == ["stop"]


def test_a_row_without_a_limit_goes_to_the_end_of_the_context() -> None:
    generate = atbx.generator(llama.forward, small_llama(context=16))
    result = generate(PARAMS, [[5], [11, 12, 13]])
    assert [len(t) for t in result.tokens] == [15, 13]
    assert result.finish == ["cache_full", "cache_full"]
    assert result.tokens[0][:12] == WANTED[5,]


def test_exactly_full_runs_and_one_more_is_refused_before_anything_runs() -> None:
    generate = atbx.generator(llama.forward, small_llama(context=16))
    assert len(generate(PARAMS, [5] * 6, max_new_tokens=10).tokens[0]) == 10
    steps = generate.cache_info().steps
    with pytest.raises(CapacityError, match=r"tokens\[0\].*at most 16.*6 \+ 11"):
        generate(PARAMS, [5] * 6, max_new_tokens=11)
    assert generate.cache_info().steps == steps


def test_nothing_is_generated_for_zero_new_tokens() -> None:
    result = make()(PARAMS, [[5], [6, 7]], max_new_tokens=0)
    assert (result.tokens, result.finish) == ([[], []], ["length", "length"])


def test_a_request_that_cannot_fit_into_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"memory.*weights.*cache.*activation"):
        make(memory_limit=1000)(PARAMS, [5], max_new_tokens=4)


def test_streamed_events_are_the_tokens_in_order() -> None:
    events = list(make().stream(PARAMS, [[5], [11, 12, 13]], max_new_tokens=12))
    for row, prompt in enumerate(((5,), (11, 12, 13))):
        assert [e.token for e in events if e.row == row] == WANTED[prompt]
        assert [e.finish for e in events if e.row == row] == [None] * 11 + ["length"]


def test_interleaved_streams_give_solo_results() -> None:
    generate = make()
    streams = [generate.stream(PARAMS, p, max_new_tokens=12) for p in PROMPTS[:4]]
    tokens: list[list[int]] = [[] for _ in streams]
    for _ in range(12):
        for row, stream in enumerate(streams):
            token = next(stream).token
            assert token is not None
            tokens[row].append(token)
    assert tokens == [WANTED[tuple(p)] for p in PROMPTS[:4]]


def test_two_threads_give_solo_results() -> None:
    generate = make()
    found: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        found[index] = [
            generate(PARAMS, PROMPTS[(index + i) % 6], max_new_tokens=12).tokens[0] for i in range(6)
        ]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for index in range(2):
        assert found[index] == [WANTED[tuple(PROMPTS[(index + i) % 6])] for i in range(6)]


def test_a_stream_closed_early_leaves_the_generator_usable() -> None:
    generate = make()
    stream = generate.stream(PARAMS, PROMPTS[1], max_new_tokens=12)
    next(stream)
    stream.close()
    assert generate(PARAMS, PROMPTS[1], max_new_tokens=12).tokens == [WANTED[tuple(PROMPTS[1])]]


def test_cancel_ends_every_row_within_one_step() -> None:
    event = threading.Event()
    seen = []
    for item in make().stream(PARAMS, [[5], [6, 7]], max_new_tokens=12, cancel=event):
        seen.append(item)
        if len(seen) == 4:
            event.set()
    assert len([e for e in seen if e.token is not None]) == 4
    assert [e.finish for e in seen if e.token is None] == ["cancelled", "cancelled"]


def test_ctrl_c_leaves_the_generator_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = make()
    generate(PARAMS, [5], max_new_tokens=12)
    # The decode step's executable: the one used last, and most.
    variant = max(generate.engine.forward.variants, key=lambda v: v.hits)
    executable = next(iter(variant.executables.values()))
    original = executable.calls
    calls = 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original[-1].run(*args)

    import dataclasses

    broken = (*original[:-1], dataclasses.replace(original[-1], run=interrupted))
    monkeypatch.setattr(executable, "calls", broken)
    with pytest.raises(KeyboardInterrupt):
        generate(PARAMS, [5], max_new_tokens=12)
    monkeypatch.setattr(executable, "calls", original)
    assert generate(PARAMS, [5], max_new_tokens=12).tokens == [WANTED[5,]]


def test_nan_in_unused_slots_and_padding_rows_changes_no_bit() -> None:
    def run(poison: bool) -> tuple[list[list[int]], list[Any]]:
        generate = make()
        binding = generate.bind(PARAMS)
        pool = generate.engine.pool(binding)
        original = pool.take

        def take(*shape: int) -> Any:
            arena = original(*shape)
            for leaf in arena.tensors:
                leaf.fill_(float("nan") if poison else 0.0)
            return arena

        pool.take = take  # type: ignore[method-assign]
        result = generate(PARAMS, PROMPTS[:5], max_new_tokens=12, logprobs=3)
        return result.tokens, [[(e.logprob, e.top) for e in row] for row in result.logprobs or []]

    assert run(poison=True) == run(poison=False)


def test_changed_parameters_are_never_served_from_an_old_binding() -> None:
    generate = make()
    params = random_params(CONFIG)
    assert generate(params, [5], max_new_tokens=12).tokens == [WANTED[5,]]
    params["layers"][0]["q"] = params["layers"][0]["q"] * 3
    replaced = generate(params, [5], max_new_tokens=12).tokens
    params["layers"][0]["q"].mul_(1 / 3)
    restored = generate(params, [5], max_new_tokens=12).tokens
    assert replaced == [naive_greedy([5], 12, params={**params, "layers": _tripled(params)})]
    assert restored == [WANTED[5,]]


def _tripled(params: Any) -> Any:
    first = {**params["layers"][0], "q": params["layers"][0]["q"] * 3}
    return [first, *params["layers"][1:]]


def test_results_never_alias_the_buffers_of_a_step() -> None:
    generate = make()
    first = generate(PARAMS, PROMPTS[2], max_new_tokens=3, logprobs=2)
    kept = [(e.token, e.logprob, e.top) for e in (first.logprobs or [[]])[0]]
    generate(PARAMS, PROMPTS[3], max_new_tokens=3, logprobs=2)
    assert [(e.token, e.logprob, e.top) for e in (first.logprobs or [[]])[0]] == kept


def test_a_bound_tree_serves_as_well_as_the_tree() -> None:
    generate = make()
    assert generate(generate.bind(PARAMS), [5], max_new_tokens=12).tokens == [WANTED[5,]]


def test_a_windowed_model_generates_past_its_window() -> None:
    config = small_llama(window=6)
    generate = atbx.generator(llama.forward, config, policy=Policy(config.context, chunk=4))
    for prompt in ([5] * 3, [7, 3, 9, 1, 4, 4, 2, 8, 8, 1, 0, 3]):
        result = generate(PARAMS, prompt, max_new_tokens=20)
        assert result.tokens == [naive_greedy(prompt, 20, config)]
