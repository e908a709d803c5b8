"""Chat templates: the conventions they rely on, what they may not do, and errors that name their place."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import pytest
from small_tokenizers import CHATML, byte_level_fields

from atbx.checkpoints import chat
from atbx.checkpoints.chat import check_messages, render_chat
from atbx.checkpoints.tokenizer import Text
from atbx.core.errors import ChatTemplateError, MissingExtraError, OptionError, UnsupportedError

HELLO = [{"role": "user", "content": "Hello"}]

ALTERNATING = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

LOOPS = """\
{%- set found = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set found.last = loop.index0 %}
        {%- break %}
    {%- endif %}
    {%- continue %}
{%- endfor %}
last={{ found.last }} {{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}
{% if tools is not none %}
    {{ tools | tojson }}
{% endif %}
{%- generation %}
said
{% endgeneration %}
end
"""


def test_chatml_is_written_with_and_without_the_start_of_an_answer() -> None:
    assert render_chat(CHATML, HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(CHATML, HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_a_string_is_one_message_of_the_user() -> None:
    assert render_chat(CHATML, "Hello") == render_chat(CHATML, HELLO)


def test_special_tokens_are_variables_and_absent_ones_print_nothing() -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Hi"}]
    assert render_chat(ALTERNATING, talk, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}) == (
        "<s> [INST] Hello [/INST] Hi</s>"
    )
    assert render_chat(ALTERNATING, HELLO) == " [INST] Hello [/INST]"
    with pytest.raises(ChatTemplateError, match=r"line 9: .*'eos_token' is undefined"):
        render_chat(ALTERNATING, talk)


def test_block_lines_are_trimmed_and_loops_can_break() -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Hi <&> é"}]
    text = render_chat(LOOPS, talk, variables={"tools": [{"name": "f"}]})
    assert text.startswith(
        'last=1 [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi <&> é"}]'
    )
    assert '{\n  "role": "user",\n  "content": "Hello"\n}' in text
    assert text.endswith('    [{"name": "f"}]\nsaid\nend')


def test_the_date_is_todays() -> None:
    before = datetime.datetime.now().strftime("%d %b %Y")
    text = render_chat("{{ strftime_now('%d %b %Y') }}", HELLO)
    assert text in (before, datetime.datetime.now().strftime("%d %b %Y"))


def test_variables_reach_the_template() -> None:
    assert render_chat("{{ enable_thinking }}", HELLO, variables={"enable_thinking": False}) == "False"
    assert render_chat("{{ tools is none }}", HELLO) == "True"


def test_a_key_that_is_none_counts_as_absent() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert check_messages([message]) == [{"role": "assistant", "tool_calls": [{"name": "f"}]}]


# --- errors


def test_a_refusal_of_the_template_names_its_line_and_its_words() -> None:
    with pytest.raises(ChatTemplateError, match=r"chat template, line 4: .*refuses.*Roles must alternate"):
        render_chat(ALTERNATING, [*HELLO, *HELLO])


def test_a_template_that_does_not_parse_names_its_line() -> None:
    with pytest.raises(ChatTemplateError, match=r"chat template, line 3: .*does not parse"):
        render_chat("a\nb\n{% if %}", HELLO)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("\n{{ 1 + 'a' }}", r"line 2: .*TypeError"),
        ("\n\n{{ messages[0].missing.deeper }}", r"line 3: .*UndefinedError.*missing"),
        ("{% macro f() %}\n{{ 1 // 0 }}{% endmacro %}{{ f() }}", r"line 2: .*ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_names_its_line(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(template, HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% set x = messages.append(1) %}",
        "{{ messages[0].update({'a': 1}) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_refuses_what_a_template_needs_not_do(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        render_chat(template, HELLO)


def test_rendering_leaves_the_callers_messages_alone() -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    checked = check_messages(talk)
    checked[0]["content"][0]["text"] = "b"
    assert talk == [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (7, r"messages: not a conversation; .*found int"),
        ([], r"messages: the conversation is empty"),
        ([*HELLO, "Hi"], r"messages\[1\]: not a message; .*found str"),
        ([{"content": "a"}], r"messages\[0\]\['role'\]: the role is missing; .*\['content'\]"),
        ([{"role": 3, "content": "a"}], r"messages\[0\]\['role'\]: wrong type; .*found int"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]\['content'\]: the content is missing"),
        ([*HELLO, {"role": "user", "content": None}], r"messages\[1\]\['content'\]: the content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\['content'\]: wrong type; .*found int"),
        (
            [{"role": "user", "content": ["a"]}],
            r"messages\[0\]\['content'\]\[0\]: not a content part; .*found str",
        ),
        (
            [{"role": "user", "content": "a", "x": {"y": object()}}],
            r"messages\[0\]\['x'\]\['y'\]: .*found object",
        ),
    ],
)
def test_a_bad_message_is_named_by_index_and_key(messages: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        render_chat(CHATML, messages)


def test_without_jinja_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    chat._compile.cache_clear()
    for name in ("jinja2", "jinja2.ext", "jinja2.sandbox"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"jinja2.*atbx\[text\]"):
        render_chat(CHATML, HELLO)


# --- as part of Text


def test_a_conversation_is_encoded_with_its_special_tokens() -> None:
    text = Text.from_gguf_metadata(byte_level_fields(add_bos_token=True))
    ids = text.chat("the")
    assert ids == text.encode("<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n", bos=False)
    assert [i for i in ids if i in text.special_ids] == [1, 2, 1]


def test_a_tokenizer_without_a_template_says_so() -> None:
    fields = byte_level_fields()
    del fields["tokenizer.chat_template"]
    text = Text.from_gguf_metadata(fields)
    assert not text.has_chat_template
    with pytest.raises(UnsupportedError, match="messages: this tokenizer has no chat template"):
        text.chat("the")


@pytest.mark.oracle
@pytest.mark.parametrize("template", [CHATML, ALTERNATING, LOOPS], ids=["chatml", "alternating", "loops"])
def test_templates_render_as_in_transformers(template: str) -> None:
    other = pytest.importorskip("transformers.utils.chat_template_utils")
    talk = [
        {"role": "user", "content": "  Why? <b>é</b> 😀\n"},
        {"role": "assistant", "content": "Because\n\n  of that."},
        {"role": "user", "content": "Go on", "name": None},
    ]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for start in (True, False):
        expected, _ = other.render_jinja_template(
            [other._normalize_chat_messages(talk)],
            chat_template=template,
            add_generation_prompt=start,
            **tokens,
        )
        assert render_chat(template, talk, add_generation_prompt=start, special_tokens=tokens) == expected[0]
