"""Text token by token: whole characters, stop strings and stop sequences."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level_fields, sentence_piece_fields

from atbx.checkpoints.tokenizer import Text
from atbx.core.errors import AtbxError, OptionError
from atbx.text_stream import TextStream, TokenStop

BYTES = Text.from_gguf_metadata(byte_level_fields())
PIECES = Text.from_gguf_metadata(sentence_piece_fields())

texts = pytest.mark.parametrize("text", [BYTES, PIECES], ids=["bytes", "pieces"])
unicode = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.lists(st.integers(0, min(BYTES.vocab_size, PIECES.vocab_size) - 1), max_size=40)


def stream(text: Text, tokens: list[int], **options: Any) -> tuple[list[str], TextStream]:
    value = TextStream(text, **options)
    return [*(value.push(token) for token in tokens), value.finish()], value


def byte_tokens(text: Text, data: bytes) -> list[int]:
    """One token a byte: the finest way that a text can arrive."""
    first = 4 if text is BYTES else 3
    return [first + byte for byte in data]


def cut(text: str, stop: list[str]) -> str:
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


# --- whole characters


@texts
def test_a_character_split_over_tokens_appears_when_it_is_whole(text: Text) -> None:
    shown, _ = stream(text, byte_tokens(text, "a😀é".encode()))
    assert shown == ["a", "", "", "", "😀", "", "é", ""]


@texts
def test_an_unfinished_character_is_flushed_at_the_end(text: Text) -> None:
    shown, _ = stream(text, byte_tokens(text, b"a\xf0\x9f"))
    assert shown == ["a", "", "", "\ufffd"]


@texts
def test_bytes_that_cannot_be_a_character_are_replaced_at_once(text: Text) -> None:
    shown, _ = stream(text, byte_tokens(text, b"\xf0\x9fa"))
    assert shown == ["", "", "\ufffda", ""]


@texts
@given(tokens=ids, skip=st.booleans())
def test_any_tokens_streamed_are_the_text_decoded_at_once(text: Text, tokens: list[int], skip: bool) -> None:
    shown, _ = stream(text, tokens, skip_special=skip)
    assert "".join(shown) == text.decode(tokens, skip_special=skip)


@texts
@given(content=unicode)
def test_any_text_streamed_is_itself(text: Text, content: str) -> None:
    tokens = text.encode(content, special=False, bos=False)
    shown, _ = stream(text, tokens)
    assert "".join(shown) == text.decode(tokens)
    assert "\ufffd" not in "".join(shown) or "\ufffd" in content


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    tokens = [1, *BYTES.encode("the"), 2]
    assert "".join(stream(BYTES, tokens)[0]) == "the"
    assert "".join(stream(BYTES, tokens, skip_special=False)[0]) == "<|im_start|>the<|im_end|>"


def test_the_start_space_is_dropped_once_as_decode_does() -> None:
    hello = PIECES.encode("hello", bos=False)
    assert stream(PIECES, [1, *hello, *hello])[0] == ["", "hello", " hello", ""]
    spaces = PIECES.backend.token_to_id("▁▁")
    assert stream(PIECES, [spaces, spaces])[0] == [" ", "  ", ""]


# --- stop strings


def test_a_stop_string_over_several_tokens_is_never_shown() -> None:
    shown, value = stream(BYTES, byte_tokens(BYTES, b"abc\nUser: x"), stop=["\nUser:"])
    assert "".join(shown) == "abc"
    assert value.stopped == "\nUser:"


def test_what_may_become_a_stop_string_is_held_and_then_shown() -> None:
    shown, value = stream(BYTES, byte_tokens(BYTES, b"a##b##"), stop=["###"])
    assert shown == ["a", "", "", "##b", "", "", "##"]
    assert value.stopped is None


def test_a_stop_string_inside_one_token_cuts_the_token() -> None:
    shown, value = stream(BYTES, [*BYTES.encode("the"), *byte_tokens(BYTES, b"zz")], stop=["e"])
    assert "".join(shown) == "th"
    assert value.stopped == "e"


def test_the_string_that_starts_first_wins_and_then_the_shortest() -> None:
    tokens = byte_tokens(BYTES, b"xabcd")
    assert stream(BYTES, tokens, stop=["bc", "abcd"])[1].stopped == "abcd"
    assert stream(BYTES, tokens, stop=["bc", "abcX"])[1].stopped == "bc"
    assert stream(BYTES, tokens, stop=["abcd", "ab"])[1].stopped == "ab"
    assert "".join(stream(BYTES, tokens, stop=["bc", "abcX"])[0]) == "xa"
    assert "".join(stream(BYTES, byte_tokens(BYTES, b"xab"), stop=["b", "abc"])[0]) == "xa"


def test_tokens_after_a_stop_string_show_nothing() -> None:
    value = TextStream(BYTES, stop=["b"])
    assert [value.push(t) for t in byte_tokens(BYTES, b"abcb")] == ["a", "", "", ""]
    assert value.finish() == ""


def test_a_replacement_character_can_be_a_stop_string() -> None:
    shown, value = stream(BYTES, byte_tokens(BYTES, b"a\xf0"), stop=["\ufffd"])
    assert ("".join(shown), value.stopped) == ("a", "\ufffd")


@texts
@given(
    tokens=st.lists(st.sampled_from([*b"abc \n", *"é😀".encode()]), max_size=40),
    stop=st.lists(st.text(st.sampled_from("abc \né😀"), min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_cut_where_str_find_finds_them(text: Text, tokens: list[int], stop: list[str]) -> None:
    tokens = byte_tokens(text, bytes(tokens))
    shown, value = stream(text, tokens, stop=stop)
    whole = text.decode(tokens)
    assert "".join(shown) == cut(whole, stop)
    found = [s for s in stop if s in whole]
    assert value.stopped == (min(found, key=lambda s: (whole.find(s), len(s))) if found else None)


@texts
@given(
    tokens=ids, stop=st.lists(st.sampled_from(["the", "he", "e", "ab", "  ", "\ufffd", "l", "é"]), max_size=3)
)
def test_stop_strings_are_found_across_any_tokens(text: Text, tokens: list[int], stop: list[str]) -> None:
    shown, _ = stream(text, tokens, stop=stop)
    assert "".join(shown) == cut(text.decode(tokens, skip_special=True), stop)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["a", ""], r"stop\[1\]: an empty stop string"),
        (["a", 5], r"stop\[1\]: not a string; .*found int"),
        ("abc", r"stop: a lone string; .*found 'abc'"),
    ],
)
def test_bad_stop_strings_are_named(stop: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TextStream(BYTES, stop=stop)


def test_a_token_outside_the_vocabulary_and_a_push_after_the_end_are_errors() -> None:
    value = TextStream(BYTES)
    with pytest.raises(OptionError, match=f"token_id: .*found {BYTES.vocab_size}"):
        value.push(BYTES.vocab_size)
    value.finish()
    assert value.finish() == ""
    with pytest.raises(AtbxError, match="push: the stream is finished"):
        value.push(5)


# --- stop sequences


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=3),
    tokens=st.lists(st.integers(0, 2), max_size=30),
)
def test_a_stop_sequence_is_found_when_the_tokens_end_with_it(
    sequences: list[list[int]], tokens: list[int]
) -> None:
    value = TokenStop(sequences)
    expected = None
    for at, token in enumerate(tokens, 1):
        ending = [i for i, s in enumerate(sequences) if len(s) <= at and tokens[at - len(s) : at] == s]
        if expected is None and ending:
            expected = ending[0]
        assert value.push(token) == (expected is not None)
        assert value.matched == expected


def test_a_sequence_that_overlaps_itself_is_found() -> None:
    value = TokenStop([[1, 1, 2]])
    assert [value.push(t) for t in (1, 1, 1, 2)] == [False, False, False, True]


def test_without_sequences_nothing_stops() -> None:
    assert [TokenStop([]).push(t) for t in (1, 2)] == [False, False]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([[1], []], r"sequences\[1\]: an empty stop sequence"),
        ([[1, -2]], r"sequences\[0\]\[1\]: not a token id; .*found -2"),
        ([[True]], r"sequences\[0\]\[0\]: not a token id; .*found True"),
        ([[1], 2], r"sequences\[1\]: not a token sequence; .*found int"),
        (["ab"], r"sequences\[0\]: not a token sequence; .*found str"),
    ],
)
def test_bad_stop_sequences_are_named(sequences: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TokenStop(sequences)
