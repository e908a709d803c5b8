"""Where `Text` comes from and goes to: Hugging Face folders, stored metadata, and junk in either."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_tokenizers import CHATML, byte_level_fields, sentence_piece_fields, varied_strings

from atbx.checkpoints.tokenizer import Text
from atbx.core.errors import AtbxError, CheckpointError, OptionError, UnsupportedError

BYTES = Text.from_gguf_metadata(byte_level_fields())
PIECES = Text.from_gguf_metadata(sentence_piece_fields())


# --- stored with a checkpoint


@pytest.mark.parametrize("text", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_metadata_goes_through_msgpack_and_back(text: Text) -> None:
    back = Text.from_metadata(msgpack.unpackb(msgpack.packb(text.to_metadata())))
    assert back.to_metadata() == text.to_metadata()
    assert (back.vocab_size, back.bos, back.eos, back.special_ids) == (
        text.vocab_size,
        text.bos,
        text.eos,
        text.special_ids,
    )
    for sample in varied_strings(50):
        assert back.encode(sample) == text.encode(sample)
        assert back.decode(text.encode(sample)) == text.decode(text.encode(sample))
    everything = range(text.vocab_size)
    assert [back.token_bytes(i) for i in everything] == [text.token_bytes(i) for i in everything]


@pytest.mark.parametrize(
    ("key", "value"), [("format", 2), ("tokenizer", None), ("eos", 3), ("vocab_size", "9")]
)
def test_malformed_stored_metadata_is_named_by_key(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"^{key}: "):
        Text.from_metadata(BYTES.to_metadata() | {key: value})


# --- Hugging Face folders


def write_folder(folder: Path, text: Text, config: dict[str, Any] | None = None, **files: Any) -> Path:
    (folder / "tokenizer.json").write_text(text.backend.to_str())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_a_folder_gives_the_tokenizer_its_named_tokens_and_template(tmp_path: Path) -> None:
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|endoftext|>", "lstrip": False},
        "chat_template": CHATML,
    }
    text = Text.from_hf_folder(write_folder(tmp_path, BYTES, config))
    assert (text.bos, text.eos, text.vocab_size, text.add_bos) == (1, (0, 2), BYTES.vocab_size, False)
    assert text.encode("the 12é") == BYTES.encode("the 12é")
    assert text.chat("the") == BYTES.chat("the")


def test_a_config_wins_over_the_special_tokens_map(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        BYTES,
        {"eos_token": "<|im_end|>"},
        special_tokens_map={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    )
    text = Text.from_hf_folder(folder)
    assert (text.eos, text.pad) == ((2,), 0)


def test_template_files_and_named_templates_are_read(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]
    folder = write_folder(tmp_path, BYTES, {"chat_template": listed})
    text = Text.from_hf_folder(folder)
    assert text.render_chat("x") == "listed"
    assert text.render_chat("x", template="tool_use") == "tools"
    with pytest.raises(OptionError, match=r"template: .*\['default', 'tool_use'\], found rag"):
        text.render_chat("x", template="rag")
    (folder / "chat_template.jinja").write_text("from the file")
    assert Text.from_hf_folder(folder).render_chat("x") == "from the file"


def test_the_begin_token_of_a_post_processor_is_added(tmp_path: Path) -> None:
    document = json.loads(BYTES.backend.to_str())
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    document["post_processor"] = {"type": "Sequence", "processors": [template]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"bos_token": "<|im_start|>"}')
    text = Text.from_hf_folder(tmp_path)
    assert text.encode("a") == [1, *BYTES.encode("a")] == text.backend.encode("a").ids
    config.write_text('{"bos_token": "<|im_start|>", "add_bos_token": false}')
    assert Text.from_hf_folder(tmp_path).encode("a") == BYTES.encode("a")
    config.write_text('{"bos_token": "<|im_end|>"}')
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json: the tokenizer adds <\|im_start\|>"):
        Text.from_hf_folder(tmp_path)


def test_tokens_that_only_the_config_knows_are_added_with_their_ids(tmp_path: Path) -> None:
    size = BYTES.vocab_size
    decoder = {str(size): {"content": "<|new|>", "special": True}}
    text = Text.from_hf_folder(
        write_folder(tmp_path, BYTES, {"added_tokens_decoder": decoder, "eos_token": "ab"})
    )
    assert text.vocab_size == size + 1
    assert text.encode("the<|new|>")[-1] == size
    assert size in text.special_ids
    assert (
        text.eos[0] in text.special_ids
    )  # a named token is special even where tokenizer.json lists it as a word


def test_padding_and_truncation_saved_in_a_file_are_not_applied(tmp_path: Path) -> None:
    document = json.loads(BYTES.backend.to_str())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert len(Text.from_hf_folder(tmp_path).encode("xyzxyz")) == 6


def test_a_folder_without_a_tokenizer_names_itself_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path}: .*no tokenizer\.json; found tokenizer\.model\. .*save_pretr"
    ):
        Text.from_hf_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model": ', r"tokenizer\.json at byte 10: not JSON"),
        ("[]", "found list"),
        ('{"model": {}}', r"model\.vocab"),
    ],
)
def test_a_malformed_tokenizer_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Text.from_hf_folder(tmp_path)
    assert "tokenizer.json" in str(caught.value)


def test_a_decoder_that_works_on_whole_lists_is_refused_by_name(tmp_path: Path) -> None:
    document = json.loads(BYTES.backend.to_str()) | {
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedError, match=r"decoder: .*ByteLevel.*found WordPiece"):
        Text.from_hf_folder(tmp_path).decode([5])


@pytest.mark.oracle
def test_a_folder_saved_by_transformers_encodes_and_decodes_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=BYTES.backend, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=CHATML
    )
    saved.save_pretrained(tmp_path)
    other, text = transformers.AutoTokenizer.from_pretrained(tmp_path), Text.from_hf_folder(tmp_path)
    assert (text.bos, text.eos, text.vocab_size) == (other.bos_token_id, (other.eos_token_id,), len(other))
    for sample in varied_strings(100):
        assert text.encode(sample) == other.encode(sample), sample
        assert text.decode(text.encode(sample), skip_special=True) == other.decode(
            other.encode(sample), skip_special_tokens=True
        )
    assert (
        text.chat("the")
        == other.apply_chat_template([{"role": "user", "content": "the"}], add_generation_prompt=True)[
            "input_ids"
        ]
    )


# --- junk

JUNK = st.sampled_from(
    [None, True, -1, 2**70, 0.5, "x", b"x", [], [None], ["a", 3], {"a": 1}, [[]], "▁", float("nan")]
)


@given(st.sampled_from(sorted(byte_level_fields())), JUNK, st.booleans())
def test_any_junk_in_gguf_metadata_is_refused_or_works(key: str, value: object, is_bytes: bool) -> None:
    fields = byte_level_fields() if is_bytes else sentence_piece_fields()
    with contextlib.suppress(AtbxError):
        text = Text.from_gguf_metadata(fields | {key: value})
        assert isinstance(text.decode(text.encode("a b")), str)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document, large tables cut short."""
    items = list(document.items() if isinstance(document, dict) else enumerate(document))[:20]
    return [
        place
        for key, value in items
        for place in [(document, key), *(places(value) if isinstance(value, dict | list) else [])]
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.integers(0, 10**6), JUNK.filter(lambda value: not isinstance(value, bytes)))
def test_any_junk_in_a_folder_is_refused_or_works(tmp_path: Path, pick: int, value: object) -> None:
    document = json.loads(PIECES.backend.to_str())
    config = {
        "bos_token": "<s>",
        "added_tokens_decoder": {"0": {"content": "<unk>"}},
        "chat_template": [{"name": "default", "template": "x"}],
    }
    everywhere = places(document) + places(config)
    container, key = everywhere[pick % len(everywhere)]
    container[key] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with contextlib.suppress(AtbxError):
        text = Text.from_hf_folder(tmp_path)
        assert isinstance(text.decode(text.encode("a b")), str)


def test_a_panic_of_the_tokenizers_package_is_an_error_of_the_file() -> None:
    document = json.loads(PIECES.backend.to_str())
    document["model"]["continuing_subword_prefix"] = "▁"  # longer than the shortest token that is merged
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the tokenizer cannot be built: .*"):
        Text(source=json.dumps(document), vocab_size=PIECES.vocab_size).encode("a")
