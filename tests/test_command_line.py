"""How the command line ends: usage, errors of every kind in one line, exit codes, pipes, interrupts."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from small_chat_model import chat_model, error_of, text_of

from atbx import command_line
from atbx.commands import generate as generate_command
from atbx.commands.arguments import size
from atbx.core.errors import TreeError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted tiny model."""
    return chat_model(tmp_path_factory.mktemp("model"))


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `atbx generate` raise `error`."""

    def run(args: Any) -> None:
        raise error

    monkeypatch.setattr(generate_command, "run", run)


def test_help_lists_every_command_and_each_command_has_its_own(capsys: Any) -> None:
    listed = text_of(capsys, "--help")
    for name in ("demo", "convert", "inspect", "generate", "score", "plan", "explain", "bench"):
        assert f"\n    {name} " in listed
        assert text_of(capsys, name, "--help").startswith(f"usage: atbx {name} ")


def test_bench_help_says_how_decoding_is_measured(capsys: Any) -> None:
    assert "over the difference between" in text_of(capsys, "bench", "--help")


def test_version_is_the_package_version(capsys: Any) -> None:
    assert text_of(capsys, "--version") == "atbx 0.1.0\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["generate"], "the following arguments are required: MODEL. See atbx generate --help"),
        (["generate", "m", "--max-new-token", "3"], "unrecognized arguments: --max-new-token 3"),
        (["generate", "m", "-n", "-3"], "-n/--max-new-tokens: expected a whole number of 0 or more, found '-3'"),
        (["generate", "m", "-n", "x"], "expected a whole number of 0 or more, found 'x'"),
        (["generate", "m", "--prompt-ids", "1,,2"], "expected token ids such as 1,2,3, found '1,,2'"),
        (["generate", "m", "--prompt-ids", ""], "expected token ids such as 1,2,3, found ''"),
        (["generate", "m", "--prompt-ids", "1", "-p", "x"], "not allowed with argument"),
        (["generate", "m", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["generate", "m", "--threads", "0"], "argument --threads: expected a whole number of 1 or more, found '0'"),
        (["generate", "m", "--top-p", "half"], "argument --top-p: invalid float value: 'half'"),
        (["plan", "m"], "the following arguments are required: --prompt-lengths"),
        (["plan", "m", "--prompt-lengths", "5,0"], "expected lengths of 1 or more such as 5,17,300, found '5,0'"),
        (["convert", "a", "b", "--shard-size", "3 ells"], "expected a size such as 2GiB or 500MB, found '3 ells'"),
        (["convert", "a", "b", "--shard-size", "0"], "expected a size such as 2GiB or 500MB, found '0'"),
        (["bench", "m", "--batch", "0"], "argument --batch: expected a whole number of 1 or more"),
        (["explain", "m", "--prompt", "0"], "argument --prompt: expected a whole number of 1 or more"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_code_2(capsys: Any, argv: list[str], said: str) -> None:
    assert said in error_of(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2GiB", 2**31), ("500MB", 500_000_000), ("1.5 kib", 1536), ("1048576", 2**20), ("7b", 7)],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize("command", ["generate", "score", "inspect", "explain", "bench"])
def test_a_model_that_is_not_there_is_named(capsys: Any, tmp_path: Path, command: str) -> None:
    missing = tmp_path / "missing.msgpack"
    assert error_of(capsys, command, missing) == f"{missing}: there is no such file"


def test_a_file_that_is_no_model_is_told_by_what_it_is(capsys: Any, tmp_path: Path) -> None:
    page = tmp_path / "model.gguf"
    page.write_bytes(b"<!DOCTYPE html><html>sign in</html>")
    assert "found an HTML page" in error_of(capsys, "generate", page, "--prompt-ids", "1")
    assert "an HTML page" in error_of(capsys, "inspect", page)


@pytest.mark.parametrize("command", ["generate", "explain", "bench"])
def test_a_device_without_backend_is_refused(capsys: Any, model: Path, command: str) -> None:
    said = error_of(capsys, command, model, "--device", "tpu")
    assert said.startswith("device: no backend for this device")
    assert said.endswith("found tpu")


def test_what_is_not_expected_ends_with_1_and_a_hint(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyError("layers"))
    said = error_of(capsys, "generate", "m", code=1)
    assert said == "unexpected KeyError: 'layers' (--debug shows where)"


@pytest.mark.parametrize("argv", [["--debug", "generate", "m"], ["generate", "m", "--debug"]])
def test_debug_shows_the_traceback_and_keeps_the_code(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    fails_with(monkeypatch, ZeroDivisionError("oh"))
    assert command_line.main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("atbx: error: unexpected ZeroDivisionError: oh\n")


def test_an_interrupt_ends_with_130(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())
    assert error_of(capsys, "generate", "m", code=130) == "interrupted"


def test_a_long_report_is_cut_unless_debugging(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tuple(f"layers/{i}/q: missing" for i in range(40))
    fails_with(monkeypatch, TreeError("does not fit:", mismatches=lines))
    assert command_line.main(["generate", "m"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "atbx: error: does not fit:"
    assert said[1] == "  layers/0/q: missing"
    assert said[-2:] == ["  ... 29 more (--debug shows all)", "  layers/39/q: missing"]
    assert command_line.main(["generate", "m", "--debug"]) == 2
    assert "layers/30/q: missing" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_command_quietly(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert command_line.main(["inspect", str(model), "--json"]) == 0
        stdout.write("goes nowhere")
    assert capsys.readouterr().err == ""


def test_a_full_disk_under_stdout_is_an_error(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert command_line.main(["inspect", str(model), "--json"]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_a_stdout_without_a_file_survives_a_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, BrokenPipeError())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert command_line.main(["generate", "m"]) == 0
