"""GGUF metadata of two small vocabularies, byte-level and SentencePiece, written out by rule for the tests."""

from __future__ import annotations

import random
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """GPT-2's letter of each byte, in byte order (the table of the GPT-2 paper's encoder)."""
    kept = [b for b in range(256) if chr(b).isprintable() and b != 0x20 and b != 0xAD]
    others = [b for b in range(256) if b not in kept]
    letters = {b: chr(b) for b in kept} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    return [letters[b] for b in range(256)]


BYTE_MERGES = ("Ġ t", "h e", "Ġt he", "l l", "Ġ Ġ", "a b", "ð Ł", "ðŁ ĺ", "Ã ©", "1 2", "ĠĠ ĠĠ", "e r")


def byte_level_fields(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """Three control tokens, one user-defined token, 256 bytes, a few merges."""
    merged = [merge.replace(" ", "") for merge in BYTE_MERGES]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", *byte_letters(), *merged]
    types = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(BYTE_MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHATML,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


PIECES = (
    *(
        "▁t",
        "he",
        "▁the",
        "ll",
        "▁a",
        "in",
        "▁th",
        "an",
        "nd",
        "▁and",
        "▁▁",
        "▁▁▁▁",
        "él",
        "日本",
        "hell",
        "hello",
    ),
    *("▁hello", "lo"),
    *("▁", "e", "t", "a", "o", "n", "h", "l", "i", "d", "é", "日", "本", "x", "\t"),
)


def sentence_piece_fields(**more: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 byte tokens, then pieces with falling scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def varied_strings(count: int) -> list[str]:
    parts = [
        "hello",
        "World",
        "l'été",
        "naïve",
        "日本語",
        "😀",
        "👩‍👩‍👧",
        "\n",
        "\n\n",
        "\t",
        " ",
        "  ",
        "     ",
    ]
    parts += [
        "123",
        "4",
        "٣٤",
        "½",
        "don't",
        "I'LL",
        "def f(x):\n    return x",
        "<|im_end|>",
        "{}",
        "...",
        "—",
    ]
    parts += [
        "e\u0301",
        "\u200d",
        "\r\n",
        "\x00",
        "ﷺ",
        "1,234.5",
        "a_b",
        "http://x.y/z?q=1",
        "\u00a0",
        "ß",
        "İ",
    ]
    draw = random.Random(0)
    return ["".join(draw.choices(parts, k=draw.randrange(1, 8))) for _ in range(count)]
