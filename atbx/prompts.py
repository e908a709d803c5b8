"""Reading prompts: token ids in every shape that users have them, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from atbx.checkpoints.tokenizer import Text
from atbx.core.errors import OptionError


def read_prompts(tokens: Any, vocab: int, text: Text | None, where: str = "tokens") -> list[list[int]]:
    """Prompts as lists of ids.

    tokens: a row of ids, a (ragged) list of rows, an integer array or tensor [T] or [B, T], a string, or a list of
    strings (with a tokenizer). vocab: V, ids lie below it.

    Raises:
        OptionError: no prompt, an empty one, an id outside the vocabulary, or something that is none of these.
    """
    if isinstance(tokens, (torch.Tensor, np.ndarray)):
        tokens = _array_rows(tokens, where)
    if isinstance(tokens, str):
        tokens = [tokens]
    if not isinstance(tokens, Sequence) or isinstance(tokens, bytes):
        raise OptionError(
            "cannot be read as prompts",
            where=where,
            expected="ids, lists of ids, an array, a string or strings",
            found=type(tokens).__name__,
        )
    if len(tokens) == 0:
        raise OptionError("holds no prompt", where=where, expected="at least one row of ids")
    if isinstance(tokens[0], (int, np.integer)) and not isinstance(tokens[0], bool):
        return [_row(tokens, vocab, where)]
    rows = []
    for index, row in enumerate(tokens):
        place = f"{where}[{index}]"
        if isinstance(row, str):
            rows.append(_row(_encode(row, text, place), vocab, place))
        elif isinstance(row, (torch.Tensor, np.ndarray)):
            rows.append(_row(_array_rows(row, place), vocab, place))
        elif isinstance(row, Sequence) and not isinstance(row, bytes):
            rows.append(_row(row, vocab, place))
        else:
            raise OptionError("is no row of ids", where=place, expected="a list of ints", found=repr(row))
    return rows


def _encode(string: str, text: Text | None, where: str) -> list[int]:
    if text is None:
        raise OptionError(
            "a string needs a tokenizer",
            where=where,
            expected="token ids",
            found=repr(string),
            hint="Pass text= to atbx.generator",
        )
    return text.encode(string)


def _array_rows(array: Any, where: str) -> Any:
    kind = array.dtype
    is_integer = (
        not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
        if isinstance(array, torch.Tensor)
        else np.issubdtype(kind, np.integer)
    )
    if not is_integer or array.ndim not in (1, 2):
        raise OptionError(
            "must hold integer ids in one or two axes",
            where=where,
            expected="integers [T] or [B,T]",
            found=f"{kind} with {array.ndim} axes",
        )
    return array.tolist()


def _row(row: Sequence[Any], vocab: int, where: str) -> list[int]:
    if len(row) == 0:
        raise OptionError("is an empty prompt", where=where, expected="at least one token")
    found = []
    for position, token in enumerate(row):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise OptionError(
                "is no token id", where=f"{where}[{position}]", expected="an int", found=repr(token)
            )
        if not 0 <= token < vocab:
            raise OptionError(
                "is outside the vocabulary",
                where=f"{where}[{position}]",
                expected=f"0 to {vocab - 1}",
                found=token,
            )
        found.append(int(token))
    return found
