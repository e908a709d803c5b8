"""Builds a tokenizer from the vocabulary that a GGUF file carries in its metadata.

A GGUF file holds no tokenizer program, only its data: tokens, merges or scores, token types, and a name
for the rule that cuts text before merging (`tokenizer.ggml.pre`). The meaning of those names is llama.cpp's
(`src/llama-vocab.cpp`); this module writes the same rules as a `tokenizers.Tokenizer`. A name that is not in
the table is refused, because a wrong cut gives ids that look plausible and are wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atbx.checkpoints.token_spelling import SPACE_MARK
from atbx.checkpoints.tokenizers_package import blaming, import_tokenizers
from atbx.core.errors import CheckpointError, UnsupportedError

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CUT = _LLAMA3_CUT.replace("{1,3}", "")  # every digit by itself
_TEKKEN_CUT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class CutRule:
    """How byte-level BPE text is cut before merging: each expression cuts what the one before left whole.

    `whole_words`: a piece that is itself a token is taken without merging. `adds_bos`: BOS is added where
    the file does not say.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = CutRule((_GPT2_CUT,))
_SMOLLM = CutRule((r"\p{N}", _GPT2_CUT))
_LLAMA3 = CutRule((_LLAMA3_CUT,), whole_words=True, adds_bos=True)
_QWEN2 = CutRule((_QWEN2_CUT,))
_DEFAULT = CutRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_CUT, r"\p{N}+", r"[0-9][0-9][0-9]"))

CUT_RULES: Mapping[str, CutRule] = {
    "deepseek-r1-qwen": _QWEN2,
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "refact": _SMOLLM,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "tekken": CutRule((_TEKKEN_CUT,), whole_words=True, adds_bos=True),
}
MODELS = ("gpt2", "llama")


@dataclass(frozen=True)
class GgufVocabulary:
    """The checked tokenizer data of a GGUF file; `special` are the named ids (bos, eos, unk, pad, eot, eom)."""

    model: str
    rule: CutRule
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    scores: tuple[float, ...]
    special: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    def special_ids(self) -> frozenset[int]:
        """The ids that steer the model and are no text: control tokens and the unknown token."""
        return frozenset(i for i, kind in enumerate(self.types) if kind in (CONTROL, UNKNOWN))


_NAMED_IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
}


def read_vocabulary(fields: Mapping[str, Any]) -> GgufVocabulary:
    """Check the `tokenizer.*` keys of a GGUF file and gather them.

    Raises CheckpointError naming the key (and the element) that is missing or malformed, and
    UnsupportedError for a tokenizer model or a cut rule that is not known.
    """
    model = fields.get("tokenizer.ggml.model")
    if model is None:
        raise _bad("model", "the file has no tokenizer", expected=" or ".join(MODELS))
    if not isinstance(model, str) or model not in MODELS:
        raise UnsupportedError(
            "tokenizer model",
            where="tokenizer.ggml.model",
            expected=f"one of {', '.join(MODELS)}",
            found=model,
        )
    pre = fields.get("tokenizer.ggml.pre", "default")
    if model == "gpt2" and (not isinstance(pre, str) or pre not in CUT_RULES):
        raise UnsupportedError(
            "pre-tokenizer", where="tokenizer.ggml.pre", expected=f"one of {', '.join(CUT_RULES)}", found=pre
        )
    tokens = _strings(fields, "tokens")
    _refuse_duplicates(tokens)
    types = [_integer(f"token_type[{i}]", kind) for i, kind in enumerate(_types(fields, len(tokens)))]
    merges: tuple[tuple[str, str], ...] = ()
    scores: tuple[float, ...] = ()
    if model == "gpt2" or "tokenizer.ggml.merges" in fields:
        merges = tuple(_pair(i, text) for i, text in enumerate(_strings(fields, "merges")))
    else:
        scores = tuple(_real(f"scores[{i}]", s) for i, s in enumerate(_array(fields, "scores", len(tokens))))
    rule = CUT_RULES[pre] if model == "gpt2" else CutRule((), adds_bos=True)
    special = {
        name: _checked_id(key, fields[f"tokenizer.ggml.{key}"], len(tokens))
        for name, key in _NAMED_IDS.items()
        if f"tokenizer.ggml.{key}" in fields
    }
    if "tokenizer.ggml.token_type" not in fields:
        for i in special.values():
            types[i] = CONTROL
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", rule.adds_bos))
    add_eos = bool(fields.get("tokenizer.ggml.add_eos_token", False))
    for name, wanted in (("bos", add_bos), ("eos", add_eos)):
        if wanted and name not in special:
            raise _bad(
                f"add_{name}_token",
                "a token is to be added that the file does not name",
                expected=f"tokenizer.ggml.{name}_token_id",
            )
    return GgufVocabulary(
        model=model,
        rule=rule,
        tokens=tokens,
        types=tuple(types),
        merges=merges,
        scores=scores,
        special=special,
        add_bos=add_bos,
        add_eos=add_eos,
        # llama.cpp reads the prefix for SentencePiece vocabularies only, and adds it unless told otherwise.
        add_space_prefix=model == "llama" and bool(fields.get("tokenizer.ggml.add_space_prefix", True)),
    )


def build_tokenizer(vocabulary: GgufVocabulary) -> Any:
    """The `tokenizers.Tokenizer` of a vocabulary, control and user-defined tokens added whole."""
    tokenizers = import_tokenizers()
    build = _byte_level if vocabulary.model == "gpt2" else _sentence_pieces
    with blaming("tokenizer.ggml.merges", "the vocabulary cannot be built"):
        tokenizer = build(tokenizers, vocabulary)
    special = vocabulary.special_ids()
    added = [
        tokenizers.AddedToken(vocabulary.tokens[i], normalized=False, special=True) for i in sorted(special)
    ]
    tokenizer.add_special_tokens(added)
    whole = [
        tokenizers.AddedToken(token, normalized=False, special=False)
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == USER_DEFINED and i not in special
    ]
    tokenizer.add_tokens(whole)
    return tokenizer


def _byte_level(tokenizers: Any, vocabulary: GgufVocabulary) -> Any:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    model = tokenizers.models.BPE(
        vocab=ids, merges=list(vocabulary.merges), ignore_merges=vocabulary.rule.whole_words
    )
    tokenizer = tokenizers.Tokenizer(model)
    cuts = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(expression), behavior="isolated")
        for expression in vocabulary.rule.expressions
    ]
    spell = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cuts, spell])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(tokenizers: Any, vocabulary: GgufVocabulary) -> Any:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.special.get("unk")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(UNKNOWN)
    model = tokenizers.models.BPE(
        vocab=ids,
        merges=list(vocabulary.merges) or merges_from_scores(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )
    tokenizer = tokenizers.Tokenizer(model)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    # The prefix goes before every stretch of text between special tokens, also one that starts with a space,
    # as SentencePiece and llama.cpp do.
    prefix = [normalizers.Prepend(SPACE_MARK)] if vocabulary.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(content=" ", left=1)] if vocabulary.add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_from_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies, best first.

    SentencePiece joins the two neighbours whose union is the piece with the highest score; as ranked merges
    that is every cut of every piece into two pieces, ordered by the score of the whole.
    """
    scores = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    merges: list[tuple[str, str]] = []
    # The sort is stable: equal scores keep the order of the file.
    for token in sorted(scores, key=lambda piece: -scores[piece]):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges.extend((left, right) for left, right in cuts if left in scores and right in scores)
    return merges


def _bad(key: str, what: str, **parts: Any) -> CheckpointError:
    return CheckpointError(what, where=f"tokenizer.ggml.{key}", **parts)


def _array(fields: Mapping[str, Any], key: str, count: int | None = None) -> Sequence[Any]:
    value = fields.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise _bad(key, "missing from the file's metadata", expected="an array")
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        raise _bad(key, "wrong type", expected="an array", found=type(value).__name__)
    if count is not None and len(value) != count:
        raise _bad(key, "wrong length", expected=f"{count}, one a token", found=len(value))
    return tuple(value)


def _types(fields: Mapping[str, Any], count: int) -> Sequence[Any]:
    return _array(fields, "token_type", count) if "tokenizer.ggml.token_type" in fields else (NORMAL,) * count


def _strings(fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = _array(fields, key)
    for i, item in enumerate(value):
        if not isinstance(item, str):
            raise _bad(f"{key}[{i}]", "wrong type", expected="a string", found=type(item).__name__)
    return tuple(value)


def _integer(key: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise _bad(key, "wrong type", expected="an integer", found=type(value).__name__) from error


def _real(key: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise _bad(key, "wrong type", expected="a number", found=repr(value)) from error


def _pair(index: int, text: str) -> tuple[str, str]:
    # A token may itself begin with a space in odd vocabularies, so the cut is sought after the first character.
    at = text.find(" ", 1)
    if at < 0 or at == len(text) - 1:
        raise _bad(
            f"merges[{index}]", "not a merge", expected="two tokens with a space between", found=repr(text)
        )
    return text[:at], text[at + 1 :]


def _refuse_duplicates(tokens: tuple[str, ...]) -> None:
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if token in seen:
            raise _bad(
                f"tokens[{i}]",
                f"the token {token!r} stands in the vocabulary twice",
                found=f"also at {seen[token]}",
            )
        seen[token] = i


def _checked_id(key: str, value: Any, count: int) -> int:
    number = _integer(key, value)
    if not 0 <= number < count:
        raise _bad(key, "no such token", expected=f"an id below {count}", found=number)
    return number
