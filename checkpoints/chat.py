"""Renders chat messages to text with the template that a model carries.

Templates are Jinja programs written for the conventions of Hugging Face's `apply_chat_template`: the variables
`messages`, `add_generation_prompt`, `tools`, `documents` and the special tokens by name, the functions
`raise_exception` and `strftime_now`, a `tojson` that escapes no HTML, block lines trimmed, `break` and
`continue` in loops. They come with downloaded weights, so they run in Jinja's immutable sandbox and see plain
data only.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from atbx.core.errors import ChatTemplateError, MissingExtraError, OptionError

Message = Mapping[str, Any]


def render_chat(
    template: str,
    messages: Sequence[Message] | str,
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, as `template` writes it.

    A plain string stands for one message of the user. `special_tokens` maps names such as `bos_token` to their
    spelling; `variables` are further ones that the template reads (`tools`, `enable_thinking`, ...).
    Raises OptionError naming the message and its key, and ChatTemplateError naming the template's line.
    """
    conversation = check_messages(messages)
    compiled = _compile(template)
    import jinja2

    names: dict[str, Any] = {"tools": None, "documents": None, **(special_tokens or {})}
    for name, value in (variables or {}).items():
        names[name] = _plain(value, name)
    names.update(messages=conversation, add_generation_prompt=add_generation_prompt)
    try:
        return str(compiled.render(**names))
    except Exception as error:  # whatever the template's own expressions raise: TypeError, KeyError, ...
        # `raise_exception` raises the base class itself; Jinja's own failures are of its subclasses.
        if type(error) is jinja2.TemplateError:
            what = f"the chat template refuses these messages: {error}"
        else:
            what = f"the chat template fails: {type(error).__name__}: {error}"
        raise ChatTemplateError(what, where=_place(error.__traceback__)) from error


def check_messages(messages: Sequence[Message] | str) -> list[dict[str, Any]]:
    """The messages as plain dictionaries without empty keys, or an OptionError naming index and key."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence):
        raise OptionError(
            "not a conversation",
            where="messages",
            expected="a list of messages or a string",
            found=type(messages).__name__,
        )
    if not messages:
        raise OptionError("the conversation is empty", where="messages", expected="at least one message")
    return [_checked(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise OptionError(
            "not a message",
            where=where,
            expected="a mapping with role and content",
            found=type(message).__name__,
        )
    # A key that is None counts as absent: many templates would print "None".
    present = {key: _plain(value, f"{where}[{key!r}]") for key, value in message.items() if value is not None}
    if "role" not in present:
        raise OptionError(
            "the role is missing", where=f"{where}['role']", expected="a string", found=sorted(present)
        )
    if not isinstance(present["role"], str):
        raise OptionError(
            "wrong type", where=f"{where}['role']", expected="a string", found=type(present["role"]).__name__
        )
    if "content" not in present:
        if "tool_calls" in present:
            return present
        raise OptionError(
            "the content is missing", where=f"{where}['content']", expected="a string", found=sorted(present)
        )
    content = present["content"]
    if isinstance(content, list):
        for i, part in enumerate(content):
            if not isinstance(part, dict):
                raise OptionError(
                    "not a content part",
                    where=f"{where}['content'][{i}]",
                    expected="a mapping",
                    found=type(part).__name__,
                )
    elif not isinstance(content, str):
        raise OptionError(
            "wrong type",
            where=f"{where}['content']",
            expected="a string or a list of parts",
            found=type(content).__name__,
        )
    return present


def _plain(value: Any, where: str) -> Any:
    """Copy to plain JSON types, so that a template can reach no method of a caller's object."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise OptionError(
        "a chat template takes plain data only",
        where=where,
        expected="str, int, float, bool, None, list or dict",
        found=type(value).__name__,
    )


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> Any:
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise MissingExtraError("jinja2", "text", "a chat template") from error

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _generation_tag(jinja2)]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template does not parse: {error.message}", where=f"chat template, line {error.lineno}"
        ) from error


def _generation_tag(jinja2: Any) -> Any:
    class GenerationTag(jinja2.ext.Extension):  # type: ignore[misc]
        """`{% generation %}` marks the assistant's words for training; rendering passes its body through."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    return GenerationTag


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _place(trace: TracebackType | None) -> str:
    """The innermost template line of a traceback; Jinja gives template frames the name `<template>`."""
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "chat template" if line is None else f"chat template, line {line}"
