"""Text that appears token by token, and the strings and token sequences that end it.

A token may end inside a character, and a few characters may turn out to be the start of a stop string; both are
held back until it is certain what they are. What is shown is never taken back: all pushes and the finish,
joined, are what `Text.decode` gives for all ids, cut before the earliest stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atbx.checkpoints.tokenizer import Text
from atbx.core.errors import AtbxError, OptionError


class TextStream:
    """Decodes one row's tokens as they come.

    text: the tokenizer. skip_special: leave special tokens out of the text.
    stop: strings that end the text. The one that starts earliest in the text wins, of those that start at the
        same place the shortest; the text is cut before it.

    `stopped` is the stop string that was found, or None. While a string is found but another one that started
    earlier may still be completed, the stream waits for the tokens that decide.
    Raises OptionError naming the element of `stop` that is empty or no string.
    """

    def __init__(self, text: Text, *, skip_special: bool = True, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            raise OptionError("a lone string", where="stop", expected="a list of strings", found=repr(stop))
        for i, string in enumerate(stop):
            if not isinstance(string, str):
                raise OptionError(
                    "not a string", where=f"stop[{i}]", expected="str", found=type(string).__name__
                )
            if not string:
                raise OptionError("an empty stop string would end every text", where=f"stop[{i}]")
        self.stopped: str | None = None
        self._text = text
        self._skipped = text.special_ids if skip_special else frozenset()
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._start_spaces = text.start_spaces
        self._held = ""
        self._is_finished = False

    def push(self, token_id: int) -> str:
        """Take one token; return the characters that are now certain. After a stop string: nothing."""
        if self._is_finished:
            raise AtbxError(
                "the stream is finished", where="push", hint="Open a new TextStream for another text"
            )
        piece = self._text.token_bytes(token_id)
        if self.stopped is not None or token_id in self._skipped:
            return ""
        return self._show(self._decoder.decode(piece), is_last=False)

    def finish(self) -> str:
        """Return what was still held; bytes that never became a character appear as U+FFFD."""
        if self._is_finished:
            return ""
        self._is_finished = True
        if self.stopped is not None:
            return ""
        return self._show(self._decoder.decode(b"", final=True), is_last=True)

    def _show(self, characters: str, *, is_last: bool) -> str:
        while self._start_spaces and characters:
            if characters[0] != " ":
                self._start_spaces = 0
            else:
                self._start_spaces -= 1
                characters = characters[1:]
        # What was shown can belong to no stop string, so searching what is held finds every match.
        buffer = self._held + characters
        matches = [(at, len(string), string) for string in self._stop if (at := buffer.find(string)) >= 0]
        first = min(matches, default=None)
        undecided = (
            len(buffer) if is_last else min((_open_start(buffer, s) for s in self._stop), default=len(buffer))
        )
        if first is not None and first[0] <= undecided:
            self.stopped, self._held = first[2], ""
            return buffer[: first[0]]
        self._held = buffer[undecided:]
        return buffer[:undecided]


def _open_start(buffer: str, string: str) -> int:
    """Where the longest end of `buffer` starts that more characters could make into `string`."""
    for size in range(min(len(string) - 1, len(buffer)), 0, -1):
        if buffer.endswith(string[:size]):
            return len(buffer) - size
    return len(buffer)


@dataclass(frozen=True)
class _Pattern:
    """A token sequence with its Knuth-Morris-Pratt table: `back[n]` is the longest proper start of the first n
    tokens that is also their end."""

    tokens: tuple[int, ...]
    back: tuple[int, ...]


class TokenStop:
    """Finds stop sequences in the generated tokens of one row; the prompt is never pushed, so never matched.

    `matched` is the index of the sequence found first (of several at once the earliest in `sequences`), or None.
    Raises OptionError naming the sequence that is empty or holds something that is no token id.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.matched: int | None = None
        self._patterns = tuple(_pattern(i, sequence) for i, sequence in enumerate(sequences))
        self._states = [0] * len(self._patterns)

    def push(self, token_id: int) -> bool:
        """Take one generated token; True when a sequence ends with it, or has been found before."""
        for i, pattern in enumerate(self._patterns):
            state = self._states[i]
            while state and (state == len(pattern.tokens) or pattern.tokens[state] != token_id):
                state = pattern.back[state]
            if pattern.tokens[state] == token_id:
                state += 1
            self._states[i] = state
            if state == len(pattern.tokens) and self.matched is None:
                self.matched = i
        return self.matched is not None


def _pattern(index: int, sequence: Iterable[int]) -> _Pattern:
    where = f"sequences[{index}]"
    if isinstance(sequence, str | bytes) or not isinstance(sequence, Iterable):
        raise OptionError("not a token sequence", where=where, expected="ids", found=type(sequence).__name__)
    tokens = tuple(sequence)
    if not tokens:
        raise OptionError("an empty stop sequence would end every row", where=where)
    for at, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise OptionError(
                "not a token id", where=f"{where}[{at}]", expected="an int from 0", found=repr(token)
            )
    back = [0, 0]
    for token in tokens[1:]:
        size = back[-1]
        while size and tokens[size] != token:
            size = back[size]
        back.append(size + 1 if tokens[size] == token else 0)
    return _Pattern(tokens, tuple(back))
