"""`atbx generate` and `atbx score`: the fixed JSON form, every source of prompts, options, and what they refuse."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_chat_model import chat_model, error_of, generator_of, json_of, text_of
from small_checkpoints import TINY, tiny_params

from atbx import checkpoints
from atbx.checkpoints.config_metadata import config_to_metadata
from atbx.command_line import main
from atbx.generate import Generator

IDS = ("--prompt-ids", "5,6,7")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted tiny model."""
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def api(model: Path) -> tuple[Any, Any, Any]:
    """Generator, parameters and tokenizer of the model, by the Python API."""
    return generator_of(model)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model without a tokenizer."""
    path = tmp_path_factory.mktemp("bare") / "bare.msgpack"
    metadata = {"family": "llama", "config": config_to_metadata(TINY)}
    checkpoints.write_tree(path, tiny_params(), metadata=metadata)
    return path


def give_stdin(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    """Make `raw` what stdin holds."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_ids_and_json_print_exactly_tokens_and_finish(capsys: Any, model: Path, api: Any) -> None:
    generate, params, _ = api
    found = json_of(capsys, "generate", model, *IDS, "--max-new-tokens", 4, "--dtype", "float32", "--json")
    expected = generate(params, [[5, 6, 7]], max_new_tokens=4)
    assert found == {"tokens": expected.tokens, "finish": expected.finish}


def test_the_json_line_is_spelled_as_scripts_expect(capsys: Any, model: Path, api: Any) -> None:
    generate, params, _ = api
    rows = generate(params, [[5, 6, 7]], max_new_tokens=2).tokens
    out = text_of(capsys, "generate", model, *IDS, "--max-new-tokens", 2, "--json")
    assert out == f'{{"tokens": {rows}, "finish": ["length"]}}\n'


def test_repeated_ids_are_a_ragged_batch(capsys: Any, model: Path, api: Any) -> None:
    generate, params, _ = api
    found = json_of(capsys, "generate", model, *IDS, "--prompt-ids", "9", "-n", 5, "--json")
    assert found["tokens"] == generate(params, [[5, 6, 7], [9]], max_new_tokens=5).tokens
    assert found["tokens"][1] == generate(params, [[9]], max_new_tokens=5).tokens[0]


def test_the_end_token_is_included(capsys: Any, model: Path, api: Any) -> None:
    generate = api[0]
    options = ("--temperature", 1, "--seed", 4, "-n", 500)
    found = json_of(capsys, "generate", model, *IDS, *options, "--json")
    assert found["finish"] == ["eos"]
    assert found["tokens"][0][-1] in generate.eos


def test_every_form_of_a_model_gives_the_same_tokens(capsys: Any, model: Path) -> None:
    from_gguf = json_of(capsys, "generate", model.with_name("chat.gguf"), *IDS, "-n", 6, "--json")
    assert from_gguf == json_of(capsys, "generate", model, *IDS, "-n", 6, "--json")


@pytest.mark.parametrize("form", ["chat.msgpack", "chat.gguf"])
def test_dtype_is_that_of_the_run(capsys: Any, model: Path, api: Any, form: str) -> None:
    generate, params, _ = api
    found = json_of(
        capsys, "generate", model.with_name(form), *IDS, "-n", 1, "--dtype", "bfloat16", "--logprobs", 0, "--json"
    )  # fmt: skip
    narrow = found["logprobs"][0][0]["logprob"]
    full = generate(params, [[5, 6, 7]], max_new_tokens=1, logprobs=0).logprobs[0][0].logprob
    assert narrow != full
    assert narrow == pytest.approx(full, abs=0.1)


def test_text_prompts_also_print_their_text(capsys: Any, model: Path, api: Any) -> None:
    generate, params, text = api
    found = json_of(capsys, "generate", model, "-p", "hello", "--no-chat", "-n", 4, "--json")
    expected = generate(params, [text.encode("hello")], max_new_tokens=4)
    assert found == {"tokens": expected.tokens, "finish": expected.finish, "text": expected.text}


def test_text_is_a_message_where_the_model_has_a_chat_template(capsys: Any, model: Path, api: Any) -> None:
    generate, params, text = api
    found = json_of(capsys, "generate", model, "-p", "hello", "-n", 4, "--json")
    assert found["tokens"] == generate(params, [text.chat("hello")], max_new_tokens=4).tokens
    assert found == json_of(capsys, "generate", model, "-p", "hello", "-n", 4, "--json", "--chat")
    plain = json_of(capsys, "generate", model, "-p", "hello", "-n", 4, "--json", "--no-chat")
    assert found["tokens"] != plain["tokens"]


def test_a_system_message_goes_first(capsys: Any, model: Path, api: Any) -> None:
    generate, params, text = api
    found = json_of(capsys, "generate", model, "-p", "ab", "--system", "the", "-n", 4, "--json")
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": "ab"}]
    assert found["tokens"] == generate(params, [text.chat(messages)], max_new_tokens=4).tokens


@pytest.mark.parametrize("raw", [b"hello", b"hello\n", b"hello\r\n"])
def test_stdin_files_and_arguments_are_the_same_prompt(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, raw: bytes
) -> None:
    expected = json_of(capsys, "generate", model, "-p", "hello", "-n", 3, "--json")
    (tmp_path / "prompt.txt").write_bytes(raw)
    file = ("--prompt-file", tmp_path / "prompt.txt")
    assert json_of(capsys, "generate", model, *file, "-n", 3, "--json") == expected
    for source in ((), ("--prompt-file", "-")):
        give_stdin(monkeypatch, raw)
        assert json_of(capsys, "generate", model, *source, "-n", 3, "--json") == expected


def test_only_one_line_end_is_dropped(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, model: Path, api: Any
) -> None:
    generate, params, text = api
    give_stdin(monkeypatch, b"ab\n\n")
    found = json_of(capsys, "generate", model, "--no-chat", "-n", 3, "--json")
    assert found["tokens"] == generate(params, [text.encode("ab\n")], max_new_tokens=3).tokens


def test_one_prompt_is_streamed_and_reads_as_the_whole_text(capsys: Any, model: Path, api: Any) -> None:
    generate, params, text = api
    expected = generate(params, [text.chat("the")], max_new_tokens=12).text[0]
    for streaming in ((), ("--stream",), ("--no-stream",)):
        out = text_of(capsys, "generate", model, "-p", "the", "-n", 12, *streaming)
        assert out == expected + ("" if expected.endswith("\n") and streaming != ("--no-stream",) else "\n")


def test_several_prompts_print_under_headings(capsys: Any, model: Path, api: Any) -> None:
    generate, params, text = api
    expected = generate(params, [text.encode("ab"), text.encode("the")], max_new_tokens=3).text
    out = text_of(capsys, "generate", model, "-p", "ab", "-p", "the", "--no-chat", "-n", 3)
    assert out == f"== 0 (length)\n{expected[0]}\n== 1 (length)\n{expected[1]}\n"


def test_a_model_without_tokenizer_prints_ids(capsys: Any, bare: Path) -> None:
    tokens = json_of(capsys, "generate", bare, *IDS, "-n", 3, "--json")["tokens"][0]
    assert text_of(capsys, "generate", bare, *IDS, "-n", 3) == ",".join(map(str, tokens)) + "\n"


def test_logprobs_are_those_of_the_api(capsys: Any, model: Path, api: Any) -> None:
    generate, params, _ = api
    found = json_of(capsys, "generate", model, *IDS, "-n", 2, "--logprobs", 2, "--json")
    entry = generate(params, [[5, 6, 7]], max_new_tokens=2, logprobs=2).logprobs[0][1]
    assert set(found) == {"tokens", "finish", "logprobs"}
    assert found["logprobs"][0][1] == {
        "token": entry.token,
        "logprob": entry.logprob,
        "top": [list(pair) for pair in entry.top],
    }


def test_sampling_options_reach_the_sampler(capsys: Any, model: Path, api: Any) -> None:
    generate, params, _ = api
    given = {
        "temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 7, "min_new_tokens": 3,
    }  # fmt: skip
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    found = json_of(capsys, "generate", model, *IDS, "-n", 20, *flags, "--json")
    expected = generate(params, [[5, 6, 7]], max_new_tokens=20, **given)
    assert found == {"tokens": expected.tokens, "finish": expected.finish}


def test_a_seed_that_was_not_given_is_told_and_repeats_the_tokens(capsys: Any, model: Path) -> None:
    options = ("generate", model, *IDS, "-n", 8, "--temperature", 2, "--json")
    first = json_of(capsys, *options)
    again = json_of(capsys, *options, "--seed", first["seed"])
    assert again == {"tokens": first["tokens"], "finish": first["finish"]}


def test_stop_strings_end_a_row(capsys: Any, model: Path, api: Any) -> None:
    generate, params, text = api
    whole = generate(params, [text.chat("the")], max_new_tokens=12).text[0]
    stop = whole[5:7]
    found = json_of(capsys, "generate", model, "-p", "the", "-n", 12, "--stop", stop, "--json")
    assert found["finish"] == ["stop"]
    assert found["text"] == [whole[: whole.index(stop)]]


def test_threads_are_set_for_the_run_and_restored(capsys: Any, model: Path) -> None:
    before = torch.get_num_threads()
    json_of(capsys, "generate", model, *IDS, "-n", 1, "--threads", before + 1, "--json")
    assert torch.get_num_threads() == before


def test_an_interrupt_while_streaming_ends_the_line(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    stream = Generator.stream

    def interrupted(self: Generator, *args: Any, **options: Any) -> Any:
        events = stream(self, *args, **options)
        yield next(event for event in events if event.text)
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "stream", interrupted)
    assert main(["generate", str(model), "-p", "the", "-n", "20"]) == 130
    printed = capsys.readouterr()
    assert printed.out.endswith("\n")
    assert printed.err == "atbx: error: interrupted\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--prompt-ids", "1,999"], "tokens[0][1]: is outside the vocabulary; expected 0 to 271, found 999"),
        ([*IDS, "--temperature", "-1"], "temperature: out of range"),
        ([*IDS, "--top-k", "-1"], "top_k: "),
        ([*IDS, "-n", "2", "--min-new-tokens", "3"], "min_new_tokens: exceeds max_new_tokens; expected at most 2"),
        ([*IDS, "-n", "598"], "tokens[0]"),
        ([*IDS, "--stop", ""], "stop[0]: must be a string of at least one character"),
        ([*IDS, "--logprobs", "2"], "--logprobs: are printed as JSON only. Add --json"),
        ([*IDS, "--logprobs", "101", "--json"], "logprobs: out of range; expected 0 to 100, found 101"),
        ([*IDS, "--json", "--stream"], "--stream: contradicts --json"),
        ([*IDS, *IDS, "--stream", "-n", "1"], "--stream: can show one row only; found 2 prompts"),
        ([*IDS, "--chat"], "--chat: a chat template needs text; found --prompt-ids"),
        ([*IDS, "--system", "x"], "--system: a chat template needs text; found --prompt-ids"),
        (["-p", "x", "--no-chat", "--system", "x"], "--system: needs a chat template"),
        (["-p", "", "--no-chat"], "tokens[0]: is an empty prompt"),
        (["-p", "ok", "-p", "a\udcff"], "--prompt 2 at character 1: is no UTF-8 text; found '\\udcff'"),
        (["--prompt-file", "/no/such/file"], "/no/such/file: cannot be read: No such file or directory"),
        (["--prompt-file", "-", "--prompt-file", "-"], "--prompt-file: stdin can be read once"),
    ],
)  # fmt: skip
def test_what_generate_refuses_is_named(capsys: Any, model: Path, argv: list[str], said: str) -> None:
    assert said in error_of(capsys, "generate", model, *argv)


def test_bytes_that_are_no_text_are_refused_at_their_place(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    give_stdin(monkeypatch, b"abc\xff")
    assert error_of(capsys, "generate", model) == "stdin at byte 3: is no UTF-8 text; found 0xff"
    file = tmp_path / "latin.txt"
    file.write_bytes(b"\xe9t\xe9")
    said = error_of(capsys, "score", model, "--prompt-file", file)
    assert said == f"{file} at byte 0: is no UTF-8 text; found 0xe9"


def test_a_terminal_without_prompt_is_asked_for_one(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    give_stdin(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert error_of(capsys, "generate", model).startswith("there is no prompt; expected --prompt")


def test_text_for_a_model_without_tokenizer_is_refused(capsys: Any, bare: Path) -> None:
    said = error_of(capsys, "generate", bare, "-p", "hello")
    assert (
        said == f"{bare}: the model comes without a tokenizer, so it reads token ids only. Give --prompt-ids"
    )


def test_score_gives_log_likelihoods_and_perplexity(capsys: Any, model: Path, api: Any) -> None:
    generate, params, text = api
    found = json_of(capsys, "score", model, "-p", "the hello", "-p", "ab", "--logprobs", "--json")
    expected = generate.score(params, [text.encode("the hello"), text.encode("ab")])
    assert found["logprobs"] == expected.logprobs
    assert found["log_likelihood"] == [sum(row) for row in expected.logprobs]
    assert found["tokens"] == [len(row) for row in expected.logprobs]
    assert found["perplexity"][0] == pytest.approx(math.exp(-found["log_likelihood"][0] / found["tokens"][0]))


def test_score_prints_a_line_a_row(capsys: Any, model: Path) -> None:
    found = json_of(capsys, "score", model, *IDS, "--prompt-ids", "9,8", "--json")
    assert set(found) == {"log_likelihood", "tokens", "perplexity"}
    lines = text_of(capsys, "score", model, *IDS, "--prompt-ids", "9,8").splitlines()
    for line, total, perplexity, tokens in zip(
        lines, found["log_likelihood"], found["perplexity"], (2, 1), strict=True
    ):
        assert line == f"log-likelihood {total:.4f}  tokens {tokens}  perplexity {perplexity:.4f}"


def test_a_single_token_has_no_perplexity(capsys: Any, model: Path) -> None:
    found = json_of(capsys, "score", model, "--prompt-ids", "9", "--json")
    assert found == {"log_likelihood": [0.0], "tokens": [0], "perplexity": [None]}


def test_score_logprobs_need_json(capsys: Any, model: Path) -> None:
    assert error_of(capsys, "score", model, *IDS, "--logprobs").startswith("--logprobs: are printed as JSON")
