"""Options and prompts: what is read, in which forms, and that everything else is refused by name, place and value."""

from __future__ import annotations

import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level_fields

from atbx.checkpoints.tokenizer import Text
from atbx.core.errors import OptionError
from atbx.options import LARGEST_TOP, Options
from atbx.prompts import read_prompts
from atbx.sampling import LARGEST, LARGEST_INT, RANGES

TEXT = Text.from_gguf_metadata(byte_level_fields())
NAN, INF = float("nan"), float("inf")


def refused(where: str, **given: Any) -> OptionError:
    """The error that these options raise; it names `where`."""
    with pytest.raises(OptionError) as caught:
        Options.read(given)
    assert caught.value.where == where
    assert str(caught.value).startswith(f"{where}: ")
    return caught.value


# --- the sampler's numbers -----------------------------------------------------------------------------------------

NUMBERS = (*RANGES, "seed")
WHOLE = ("top_k", "seed")
BELOW = {"temperature": -0.5, "top_k": -1, "top_p": -0.1, "min_p": -1e-9, "repetition_penalty": -1.0,
         "presence_penalty": -1e39, "frequency_penalty": -1e39, "seed": -(2**63) - 1}  # fmt: skip
ABOVE = {"temperature": 1e39, "top_k": 2**63, "top_p": 1.0001, "min_p": 2, "repetition_penalty": 1e300,
         "presence_penalty": 1e39, "frequency_penalty": 10**400, "seed": 2**63}  # fmt: skip
NOT_NUMBERS = ["1", b"1", None, True, False, NAN, INF, -INF, 1j, {}, {1}, torch.ones(()), np.ones(2)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused_by_option_and_row(name: str, value: Any) -> None:
    if name == "seed" and value is None:
        assert Options.read({"seed": None}).sampling.seed is None
        return
    expected = "a whole number" if name in WHOLE else "a finite number"
    error = refused(name, **{name: value})
    assert (error.expected, error.found) == (expected, repr(value))
    good = 1 if name in WHOLE else 0.5
    error = refused(f"{name}[1]", **{name: [good, value, good]})
    assert (error.expected, error.found) == (expected, repr(value))


@pytest.mark.parametrize("name", WHOLE)
def test_fractions_are_refused_where_whole_numbers_are_meant(name: str) -> None:
    for value in (1.5, 2.0, Fraction(1, 2)):
        assert refused(name, **{name: value}).found == repr(value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("table", [BELOW, ABOVE], ids=["below", "above"])
def test_values_out_of_range_are_refused_with_the_range(name: str, table: dict[str, Any]) -> None:
    value = table[name]
    error = refused(name, **{name: value})
    assert (error.what, error.found) == ("out of range", value)
    assert " to " in str(error.expected)
    assert refused(f"{name}[0]", **{name: (value, 1)}).found == value


def test_zero_is_no_repetition_penalty() -> None:
    for zero in (0, 0.0, -0.0):
        assert "above 0" in str(refused("repetition_penalty", repetition_penalty=zero))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "temperature",
            [0, 0.0, 1e-45, 1e-300, 2, LARGEST, np.float32(0.5), np.float64(0.5), Fraction(1, 2)],
        ),
        ("top_k", [0, 1, LARGEST_INT, np.int32(3)]),
        ("top_p", [0, 0.0, 1, 1.0, 1e-12]),
        ("min_p", [0, 0.0, 1, 1.0]),
        ("repetition_penalty", [1e-9, 1, LARGEST]),
        ("presence_penalty", [-LARGEST, -1, 0, LARGEST]),
        ("frequency_penalty", [-LARGEST, -1, 0, LARGEST]),
        ("seed", [0, -1, LARGEST_INT, -LARGEST_INT - 1, np.int64(4)]),
    ],
)
def test_the_ends_of_every_range_are_allowed(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(Options.read({name: value}).sampling, name) == value
        assert getattr(Options.read({name: [value, value]}).sampling, name) == [value, value]


@pytest.mark.parametrize("bias", [None, 5, "x", [(1, 2.0)], [1, 2]], ids=repr)
def test_a_bias_that_is_no_mapping_is_refused(bias: Any) -> None:
    assert refused("logit_bias", logit_bias=bias).found == repr(bias)


@pytest.mark.parametrize("token", [-1, 1.0, "1", True, None, (1,)], ids=repr)
def test_a_bias_of_no_token_is_refused(token: Any) -> None:
    assert refused(f"logit_bias[{token!r}]", logit_bias={0: 1.0, token: 2.0}).found == repr(token)


@pytest.mark.parametrize(
    "value", [NAN, INF, 1e39, 10**400, "1", None, True, [1.0]], ids=lambda v: repr(v)[:9]
)
def test_a_bias_that_is_no_number_is_refused(value: Any) -> None:
    error = refused("logit_bias[3]", logit_bias={2: 1.0, 3: value})
    assert (error.expected, error.found) == ("a number or -inf", repr(value))


def test_a_bias_may_ban() -> None:
    bias = {0: -INF, np.int64(3): 5, 7: LARGEST}
    assert Options.read({"logit_bias": bias}).sampling.logit_bias == bias


@given(st.sampled_from([*RANGES]), st.one_of(st.floats(), st.integers(), st.text(max_size=3), st.booleans()))
def test_any_value_is_read_or_refused_by_name(name: str, value: Any) -> None:
    lowest, highest, _ = RANGES[name]
    places: list[str | None] = []
    try:
        places.append(
            None if lowest <= Options.read({name: value}).sampling.column(name, 1)[0] <= highest else ""
        )
    except OptionError as error:
        places.append(error.where)
    is_number = type(value) is int or (type(value) is float and name not in WHOLE)
    is_good = is_number and lowest <= value <= highest and (value != 0 or name != "repetition_penalty")
    assert places == [None if is_good else name]


# --- the other options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("max_tokens", "max_new_tokens"),
        ("topk", "top_k"),
        ("repetition_penality", "repetition_penalty"),
        ("logit_biases", "logit_bias"),
        ("seeds", "seed"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, near: str) -> None:
    assert refused(name, **{name: 1}).hint == f"Did you mean {near}?"


@pytest.mark.parametrize("name", ["no_repeat_ngram_size", "num_beams", "sampling", "zzz", "do_sample"])
def test_an_option_that_does_not_exist_is_never_taken_in_silence(name: str) -> None:
    assert refused(name, **{name: 0}).what == "unknown option"


@pytest.mark.parametrize("name", ["max_new_tokens", "min_new_tokens", "logprobs", "prompt_logprobs"])
def test_counts_are_whole_numbers_in_their_range(name: str) -> None:
    for value in (1.0, "1", True, NAN, [1]):
        assert refused(name, **{name: value}).found == repr(value)
    assert refused(name, **{name: -1}).found == -1
    assert getattr(Options.read({name: np.int64(3)}), name) == 3
    assert getattr(Options.read({name: None}), name) == (0 if name == "min_new_tokens" else None)
    if "logprobs" in name:
        assert refused(name, **{name: LARGEST_TOP + 1}).expected == "0 to 100"


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    error = refused("min_new_tokens", min_new_tokens=4, max_new_tokens=3)
    assert (error.expected, error.found) == ("at most 3", 4)
    assert Options.read({"min_new_tokens": 4, "max_new_tokens": 4}).min_new_tokens == 4


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (7, (7,)),
        ((), ()),
        ([7, 3, 7], (3, 7)),
        ({3, 7}, (3, 7)),
        (np.array([3, 7]), (3, 7)),
        (np.int32(7), (7,)),
        (None, None),
    ],
    ids=repr,
)
def test_end_tokens_are_read_as_a_set(value: Any, read: tuple[int, ...] | None) -> None:
    assert Options.read({"eos": value}).eos == read


@pytest.mark.parametrize(
    "value", ["</s>", b"</s>", 1.5, [1.5], [True], True, [-1], -1, ["a"], [[1]]], ids=repr
)
def test_what_is_no_end_token_is_refused(value: Any) -> None:
    error = refused("eos", eos=value)
    first = value[0] if isinstance(value, list) else value
    assert error.found == repr(first)
    assert "ints" in str(error.expected)


def test_stop_strings_and_sequences_are_read() -> None:
    assert Options.read({"stop": "a"}).stop == ("a",)
    assert Options.read({"stop": ["a", "bc"]}).stop == ("a", "bc")
    assert Options.read({"stop": None, "stop_tokens": None}) == Options.read({})
    assert Options.read({"stop_tokens": [[1, 2], (3,), np.array([4, 5])]}).stop_tokens == (
        (1, 2),
        (3,),
        (4, 5),
    )


@pytest.mark.parametrize(
    ("where", "given"),
    [
        ("stop", {"stop": 5}),
        ("stop", {"stop": b"ab"}),
        ("stop[0]", {"stop": ""}),
        ("stop[1]", {"stop": ["a", ""]}),
        ("stop[1]", {"stop": ["a", 5]}),
        ("stop_tokens", {"stop_tokens": 5}),
        ("stop_tokens", {"stop_tokens": "ab"}),
        ("stop_tokens[1]", {"stop_tokens": [[1], []]}),
        ("stop_tokens[1]", {"stop_tokens": [[1], "ab"]}),
        ("stop_tokens[0]", {"stop_tokens": [[1, -2]]}),
        ("stop_tokens[0]", {"stop_tokens": [[1, True]]}),
        ("cancel", {"cancel": 5}),
        ("cancel", {"cancel": "now"}),
        ("logprobs_mode", {"logprobs_mode": "cooked"}),
        ("logprobs_mode", {"logprobs_mode": None}),
    ],
    ids=repr,
)
def test_bad_ends_and_modes_are_refused_by_place(where: str, given: dict[str, Any]) -> None:
    error = refused(where, **given)
    assert error.found is not None or "empty" in error.what


def test_a_run_is_cancelled_by_a_callable_or_an_event() -> None:
    event = threading.Event()
    cancel = Options.read({"cancel": event}).cancel
    assert cancel is not None
    assert not cancel()
    event.set()
    assert cancel()
    assert Options.read({"cancel": None}).cancel is None


# --- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "read"),
    [
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(3), [[0, 1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([np.int32(4), np.uint8(5)], [[4, 5]]),
        (np.array([1, 2], dtype=np.uint16), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), [[1, 2], [3, 4]]),
        ([torch.tensor([1]), np.array([2, 3]), (4,)], [[1], [2, 3], [4]]),
    ],
    ids=repr,
)
def test_ids_are_read_in_every_form(tokens: Any, read: list[list[int]]) -> None:
    found = read_prompts(tokens, 10, None)
    assert found == read
    assert all(type(token) is int for row in found for token in row)


def test_strings_are_read_with_a_tokenizer() -> None:
    vocab = TEXT.vocab_size
    assert read_prompts("hi", vocab, TEXT) == [TEXT.encode("hi")]
    assert read_prompts(["hi", [5], "the"], vocab, TEXT) == [TEXT.encode("hi"), [5], TEXT.encode("the")]


@pytest.mark.parametrize(
    ("where", "tokens"),
    [
        ("tokens", None),
        ("tokens", 5),
        ("tokens", b"ab"),
        ("tokens", {1, 2}),
        ("tokens", {0: [1]}),
        ("tokens", []),
        ("tokens", np.zeros((0, 3), dtype=np.int64)),
        ("tokens", torch.zeros(0, dtype=torch.int64)),
        ("tokens", torch.tensor(5)),
        ("tokens", np.ones(2)),
        ("tokens", torch.ones(2, dtype=torch.bfloat16)),
        ("tokens", torch.ones(2, dtype=torch.bool)),
        ("tokens", np.ones(2, dtype=bool)),
        ("tokens", np.array([1, None])),
        ("tokens", torch.ones(2, dtype=torch.complex64)),
        ("tokens", np.ones((1, 1, 1), dtype=np.int64)),
        ("tokens[1]", [[1], []]),
        ("tokens[0]", torch.zeros(2, 0, dtype=torch.int64)),
        ("tokens[1]", [1, 10]),
        ("tokens[1]", [1, -1]),
        ("tokens[1]", [1, 2.0]),
        ("tokens[1]", [1, True]),
        ("tokens[0]", [True, 1]),
        ("tokens[1]", [1, "a"]),
        ("tokens[1]", [1, [2]]),
        ("tokens[1]", [[1], 2]),
        ("tokens[1]", [[1], None]),
        ("tokens[1]", [[1], b"ab"]),
        ("tokens[0]", [torch.tensor(1), torch.tensor(2)]),
        ("tokens[1]", [[1], np.ones(2)]),
        ("tokens[1][1]", [[1], [2, 10]]),
        ("tokens[1][0]", [[1], [-1]]),
        ("tokens[1][0]", [[1], [False]]),
        ("tokens[1][0]", [[1], [np.True_]]),
        ("tokens[1][1]", [[1], [2, 3.0]]),
        ("tokens[1][0]", [[1], [[2]]]),
        ("tokens[0][0]", [["a"]]),
        ("tokens[1][2]", torch.tensor([[1, 2, 3], [4, 5, 10]])),
        ("tokens[0]", "hi"),
        ("tokens[1]", [[1], "hi"]),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused_by_row_and_position(where: str, tokens: Any) -> None:
    with pytest.raises(OptionError) as caught:
        read_prompts(tokens, 10, None)
    assert caught.value.where == where
    assert caught.value.expected is not None


def test_a_string_without_a_tokenizer_says_what_is_missing() -> None:
    with pytest.raises(
        OptionError, match=r"^tokens\[1\]: a string needs a tokenizer.*text= to atbx\.generator"
    ):
        read_prompts([[1], "hi"], 10, None)


def test_a_string_that_encodes_to_nothing_is_an_empty_prompt() -> None:
    with pytest.raises(OptionError, match=r"^tokens\[1\]: is an empty prompt"):
        read_prompts(["hi", ""], TEXT.vocab_size, TEXT)
