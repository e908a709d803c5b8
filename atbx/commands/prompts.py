"""Prompts of a command: from arguments, files or stdin to rows of token ids."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from atbx.checkpoints.tokenizer import Text
from atbx.core.errors import OptionError


def has_text(args: argparse.Namespace) -> bool:
    """Whether the prompts are text (or stdin), and not token ids."""
    return args.prompt_ids is None


def read_rows(
    args: argparse.Namespace, text: Text | None, *, chat: bool | None = False, system: str | None = None
) -> list[list[int]]:
    """The prompts as rows of token ids.

    chat: make each a conversation by the model's chat template; None does where there is one. system: its system
    message.

    Raises:
        OptionError: no prompt, an unreadable one, or options that contradict each other.
    """
    if not has_text(args):
        if chat or system is not None:
            raise OptionError(
                "a chat template needs text", where="--chat" if chat else "--system", found="--prompt-ids"
            )
        return list(args.prompt_ids)
    prompts = _texts(args)
    if text is None:
        raise OptionError(
            "the model comes without a tokenizer, so it reads token ids only",
            where=args.model,
            hint="Give --prompt-ids",
        )
    if chat is None:
        chat = text.has_chat_template
    if not chat:
        if system is not None:
            raise OptionError(
                "needs a chat template", where="--system", expected="--chat", found="plain text"
            )
        return [text.encode(prompt) for prompt in prompts]
    first = [] if system is None else [{"role": "system", "content": system}]
    return [text.chat([*first, {"role": "user", "content": prompt}]) for prompt in prompts]


def _texts(args: argparse.Namespace) -> list[str]:
    if args.prompt is not None:
        return [_whole(prompt, f"--prompt {number}") for number, prompt in enumerate(args.prompt, 1)]
    if args.prompt_file is not None:
        if args.prompt_file.count("-") > 1:
            raise OptionError("stdin can be read once", where="--prompt-file", found="- more than once")
        return [_stdin() if name == "-" else _file(name) for name in args.prompt_file]
    if sys.stdin is None or sys.stdin.isatty():
        raise OptionError(
            "there is no prompt", expected="--prompt, --prompt-file, --prompt-ids, or text on stdin"
        )
    return [_stdin()]


def _whole(prompt: str, where: str) -> str:
    """The prompt, unless the shell handed over bytes that are no text (Python keeps them as lone surrogates)."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            "is no UTF-8 text", where=f"{where} at character {error.start}", found=ascii(prompt[error.start])
        ) from error
    return prompt


def _file(name: str) -> str:
    try:
        return _decoded(Path(name).read_bytes(), name)
    except OSError as error:
        raise OptionError(f"cannot be read: {error.strerror or error}", where=name) from error


def _stdin() -> str:
    return _decoded(sys.stdin.buffer.read(), "stdin")


def _decoded(raw: bytes, where: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise OptionError(
            "is no UTF-8 text", where=f"{where} at byte {error.start}", found=f"0x{raw[error.start]:02x}"
        ) from error
    # Editors and echo end a text with a line end that is no part of the prompt.
    return text.removesuffix("\n").removesuffix("\r")
