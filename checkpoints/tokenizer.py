"""`Text`: everything that turns text into token ids and back, as one value that travels with the weights.

It holds plain data (where the tokenizer comes from, its named ids, its chat templates) and builds the actual
tokenizer on first use, so that opening a checkpoint costs nothing. Ids become text through the bytes of each
token, never through a decoder that looks at a whole list: that is what lets `atbx.text_stream` show text token
by token and still agree with `decode` to the character.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atbx.checkpoints import chat, gguf_tokenizer, hf_tokenizer
from atbx.checkpoints.token_spelling import Spelling, read_spelling
from atbx.checkpoints.tokenizers_package import blaming, import_tokenizers
from atbx.core.errors import CheckpointError, OptionError, UnsupportedError

# Spellings by which model families end a turn (ChatML, Llama 3 and its tool calls, Gemma, Phi-3, OpenChat).
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>")

_FORMAT = 1


@dataclass(frozen=True, eq=False, repr=False)
class Text:
    """A tokenizer with its special tokens and chat templates.

    source: the text of a `tokenizer.json`, or the checked vocabulary of a GGUF file.
    vocab_size: one more than the highest id that the tokenizer knows; ids from there on are padding of the
        weights and must never be sampled.
    eos: the ids at which generation ends. First the end-of-sequence token, then each end-of-turn token
        (`TURN_ENDS`) that is a special token of this vocabulary and that the chat template writes, or that the
        GGUF file names as its own (`eot_token_id`, `eom_token_id`). A spelling that is only reserved in the
        vocabulary, or that is ordinary text, does not count.
    add_bos, add_eos: whether `encode` adds them where the caller does not say.
    """

    source: str | gguf_tokenizer.GgufVocabulary
    vocab_size: int
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    unk: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_spellings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_gguf_metadata(cls, fields: Mapping[str, Any]) -> Text:
        """From a GGUF file's metadata: keys such as `tokenizer.ggml.tokens` to their values.

        Raises CheckpointError naming the malformed key, UnsupportedError naming an unknown tokenizer or cut rule.
        """
        vocabulary = gguf_tokenizer.read_vocabulary(fields)
        special = {vocabulary.tokens[i]: i for i in vocabulary.special_ids()}
        templates: dict[str, str] = {}
        for key, value in fields.items():
            if key == "tokenizer.chat_template":
                templates["default"] = str(value)
            elif key.startswith("tokenizer.chat_template."):
                templates[key.removeprefix("tokenizer.chat_template.")] = str(value)
        named = vocabulary.special
        ends = [named[name] for name in ("eos", "eot", "eom") if name in named]
        return cls(
            source=vocabulary,
            vocab_size=len(vocabulary.tokens),
            bos=named.get("bos"),
            eos=_end_ids(ends, special, templates),
            pad=named.get("pad"),
            unk=named.get("unk"),
            add_bos=vocabulary.add_bos,
            add_eos=vocabulary.add_eos,
            chat_templates=templates,
            special_spellings={
                f"{name}_token": vocabulary.tokens[named[name]]
                for name in hf_tokenizer.NAMED
                if name in named
            },
        )

    @classmethod
    def from_hf_folder(cls, path: str | Path) -> Text:
        """From a Hugging Face model folder with a `tokenizer.json`.

        Raises CheckpointError naming the folder or the file that is missing or malformed.
        """
        found = hf_tokenizer.read_folder(path)
        named = {name: found.ids.get(found.spellings.get(f"{name}_token", "")) for name in hf_tokenizer.NAMED}
        ends = [] if named["eos"] is None else [named["eos"]]
        return cls(
            source=found.tokenizer_json,
            vocab_size=found.vocab_size,
            bos=named["bos"],
            eos=_end_ids(ends, found.special, found.chat_templates),
            pad=named["pad"],
            unk=named["unk"],
            add_bos=found.add_bos,
            add_eos=found.add_eos,
            chat_templates=found.chat_templates,
            special_spellings=found.spellings,
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Text:
        """From what `to_metadata` returned. Raises CheckpointError naming the missing or malformed key."""
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(
                "tokenizer metadata of an unknown format",
                where="format",
                expected=_FORMAT,
                found=metadata.get("format"),
            )
        kinds: dict[str, Any] = {"tokenizer": str, "vocab_size": int, "eos": (list, tuple), "chat_templates": dict,
                 "special_spellings": dict, "add_bos": bool, "add_eos": bool}  # fmt: skip
        for key, kind in kinds.items():
            if not isinstance(metadata.get(key), kind):
                raise CheckpointError(
                    "tokenizer metadata is malformed",
                    where=key,
                    expected=getattr(kind, "__name__", "a list"),
                    found=type(metadata.get(key)).__name__,
                )
        return cls(
            source=metadata["tokenizer"],
            vocab_size=metadata["vocab_size"],
            bos=metadata.get("bos"),
            eos=tuple(metadata["eos"]),
            pad=metadata.get("pad"),
            unk=metadata.get("unk"),
            add_bos=metadata["add_bos"],
            add_eos=metadata["add_eos"],
            chat_templates=dict(metadata["chat_templates"]),
            special_spellings=dict(metadata["special_spellings"]),
        )

    def to_metadata(self) -> dict[str, Any]:
        """Everything as plain data that msgpack can write; `from_metadata` takes it back."""
        return {
            "format": _FORMAT,
            "tokenizer": self.source if isinstance(self.source, str) else self.backend.to_str(),
            "vocab_size": self.vocab_size,
            "bos": self.bos,
            "eos": list(self.eos),
            "pad": self.pad,
            "unk": self.unk,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "chat_templates": dict(self.chat_templates),
            "special_spellings": dict(self.special_spellings),
        }

    def encode(self, text: str, *, special: bool = True, bos: bool | None = None) -> list[int]:
        """The token ids of a text.

        special: a special token spelled out in the text becomes its id; False makes it ordinary text, for
            input that is not to be trusted.
        bos: True and False force or forbid the begin token (and add no end token); None does what the
            tokenizer says for both.
        """
        if not isinstance(text, str):
            raise OptionError("not a text", where="text", expected="str", found=type(text).__name__)
        if bos and self.bos is None:
            raise OptionError("this tokenizer has no begin token", where="bos", found=True)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise OptionError(
                "the text has a lone surrogate, which is no character",
                where=f"text[{error.start}]",
                expected="valid Unicode",
                found=ascii(text[error.start]),
            ) from error
        backend = self.backend if special else self._literal_backend
        with blaming("tokenizer", "the tokenizer fails on this text"):
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if (self.add_bos if bos is None else bos) and self.bos is not None:
            ids = [self.bos, *ids]
        if bos is None and self.add_eos and self.eos:
            ids = [*ids, self.eos[0]]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD. Spaces are never tidied up.

        Raises OptionError naming the position, the id and the vocabulary size.
        """
        skipped = self.special_ids if skip_special else frozenset()
        pieces = [b"" if i in skipped else self._bytes(i, f"ids[{at}]") for at, i in enumerate(ids)]
        return self.strip_start(b"".join(pieces).decode("utf-8", errors="replace"))

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, which need not be whole characters; empty for an id in a gap of the
        vocabulary. A begin-of-text space is kept: see `start_spaces`."""
        return self._bytes(token_id, "token_id")

    @property
    def start_spaces(self) -> int:
        """How many spaces `decode` drops at the very start: the prefix that SentencePiece encoding added."""
        return self._spelling.start_spaces

    def strip_start(self, text: str) -> str:
        """Drop at most `start_spaces` spaces from the start of a decoded text."""
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.start_spaces) :]

    def render_chat(
        self,
        messages: Sequence[chat.Message] | str,
        *,
        add_generation_prompt: bool = True,
        template: str = "default",
        **variables: Any,
    ) -> str:
        """The conversation as the model's chat template writes it; a string is one message of the user.

        template: the name of one of `chat_templates`. variables: what the template reads besides (`tools`, ...).
        Raises OptionError (message index and key, template name), ChatTemplateError (template line).
        """
        if template not in self.chat_templates:
            if not self.has_chat_template:
                raise UnsupportedError(
                    "this tokenizer has no chat template",
                    where="messages",
                    hint="Write the prompt as plain text and use encode",
                )
            raise OptionError(
                "no such chat template",
                where="template",
                expected=f"one of {sorted(self.chat_templates)}",
                found=template,
            )
        return chat.render_chat(
            self.chat_templates[template],
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_spellings,
            variables=variables,
        )

    def chat(
        self, messages: Sequence[chat.Message] | str, *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """The token ids of a conversation: `render_chat`, encoded as it stands.

        The template writes its own begin token, so none is added. Special tokens spelled inside a message are
        read as such, as everywhere with chat templates: clean input that is not to be trusted.
        """
        rendered = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **options)
        return self.encode(rendered, bos=False)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` and `render_chat` can be used."""
        return bool(self.chat_templates)

    @functools.cached_property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer`, built on first use. Treat it as read-only: it is shared."""
        if isinstance(self.source, str):
            return _parse(self.source)
        return gguf_tokenizer.build_tokenizer(self.source)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special` leaves out."""
        return frozenset(i for i, token in self._added.items() if token.special)

    def __repr__(self) -> str:
        return f"Text(vocab_size={self.vocab_size}, bos={self.bos}, eos={self.eos}, chat={self.has_chat_template})"

    @functools.cached_property
    def _literal_backend(self) -> Any:
        # A copy, because the flag is a setting of the whole tokenizer and other threads may be encoding.
        backend = _parse(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @functools.cached_property
    def _added(self) -> dict[int, Any]:
        added: dict[int, Any] = self.backend.get_added_tokens_decoder()
        return added

    @functools.cached_property
    def _spelling(self) -> Spelling:
        decoder = self.backend.decoder
        # The state that a decoder is pickled by is its part of tokenizer.json.
        return read_spelling(None if decoder is None else json.loads(decoder.__getstate__()))

    def _bytes(self, token_id: int, where: str) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise OptionError(
                "no such token",
                where=where,
                expected=f"an id from 0 to {self.vocab_size - 1} (the vocabulary has {self.vocab_size})",
                found=token_id,
            )
        added = self._added.get(token_id)
        token: str | None = self.backend.id_to_token(token_id) if added is None else added.content
        return b"" if token is None else self._spelling.to_bytes(token, is_added=added is not None)


def _end_ids(
    named: Sequence[int | None], special: Mapping[str, int], templates: Mapping[str, str]
) -> tuple[int, ...]:
    written = [s for s in TURN_ENDS if s in special and any(s in text for text in templates.values())]
    ends = [i for i in named if i is not None] + [special[s] for s in written]
    return tuple(dict.fromkeys(ends))


def _parse(document: str) -> Any:
    tokenizers = import_tokenizers()
    with blaming("tokenizer.json", "the tokenizer cannot be built"):
        backend = tokenizers.Tokenizer.from_str(document)
    # A file may have been saved with the padding and the cut length of some training run.
    backend.no_padding()
    backend.no_truncation()
    return backend
