"""A tiny model with a byte-level tokenizer and a chat template, for tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from small_checkpoints import changed, tiny_gguf
from small_models import random_params
from small_tokenizers import byte_level_fields

import atbx
from atbx import checkpoints
from atbx.command_line import main
from atbx.models import llama

VOCAB = 272
"""Tokens of `byte_level_fields`."""


def chat_gguf(path: Path, seed: int = 0) -> Path:
    """The model as a GGUF file; its context is 600 tokens."""
    config = changed(vocab=VOCAB)
    keys = {**byte_level_fields(), "llama.vocab_size": VOCAB, "llama.context_length": 600}
    return tiny_gguf(path, config, random_params(config, seed=seed), metadata=keys)


def chat_model(folder: Path) -> Path:
    """The model as a converted file."""
    path = folder / "chat.msgpack"
    checkpoints.convert(chat_gguf(folder / "chat.gguf"), path, progress=False)
    return path


def generator_of(path: Path) -> tuple[Any, Any, Any]:
    """(generator, params, text) of a model, by the Python API."""
    model = checkpoints.load(path, progress=False)
    return (
        atbx.generator(llama.forward, model.config, text=model.text, eos=model.generation.eos),
        model.params,
        model.text,
    )


def json_of(capsys: Any, *argv: object) -> Any:
    """Run a command that prints JSON; what it printed, one line and nothing else."""
    assert main([str(arg) for arg in argv]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    return json.loads(printed.out)


def text_of(capsys: Any, *argv: object) -> str:
    """Run a command; what it printed to stdout."""
    assert main([str(arg) for arg in argv]) == 0
    out: str = capsys.readouterr().out
    return out


def error_of(capsys: Any, *argv: object, code: int = 2) -> str:
    """Run a command that fails with `code`; the one line that it printed, less its beginning."""
    assert main([str(arg) for arg in argv]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("atbx: error: ")
    assert printed.err.count("\n") == 1, printed.err
    line: str = printed.err.removeprefix("atbx: error: ").rstrip("\n")
    return line
