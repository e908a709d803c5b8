"""Exported folders load in transformers with the same weights and the same logits, and load here again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import TINY, changed, flat, tiny_params
from small_tokenizers import byte_level_fields, sentence_piece_fields

from atbx import checkpoints
from atbx.core.errors import OptionError, TreeError, UnsupportedError
from atbx.models.llama import LlamaConfig
from atbx.ops.rope import Rope

pytest.importorskip("safetensors")

LLAMA3 = Rope(dims=8, theta=5e5, scaling="llama3", factor=8.0, original_context=16)
YARN = Rope(dims=8, scaling="yarn", factor=4.0, original_context=16)
CONFIGS = {
    "plain": TINY,
    "tied": changed(tied=True),
    "biased": changed(qkv_bias=True, out_bias=True, mlp_bias=True),
    "query-biased": changed(qkv_bias=True),
    "window": changed(window=5),
    "wide heads": changed(head_size=16, rope=Rope(dims=16)),
    "llama3": changed(rope=LLAMA3),
    "yarn": changed(rope=YARN),
    "gelu": changed(activation="gelu_tanh"),
}


def export(folder: Path, config: LlamaConfig = TINY, **options: Any) -> Path:
    checkpoints.export_safetensors(tiny_params(config), config, folder, **options)
    return folder


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_an_exported_folder_loads_again_with_the_same_bits(tmp_path: Path, config: LlamaConfig) -> None:
    model = checkpoints.load(export(tmp_path / "out", config))
    expected, found = flat(tiny_params(config)), flat(model.params)
    added = found.keys() - expected.keys()
    assert all(torch.equal(found[path], leaf) for path, leaf in expected.items())
    assert all(not found[path].any() for path in added)
    assert bool(added) == (config.qkv_bias != config.out_bias)
    assert model.config == replace(config, out_bias=config.out_bias or config.qkv_bias)


@pytest.mark.oracle
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_transformers_loads_the_folder_with_nothing_missing(tmp_path: Path, config: LlamaConfig) -> None:
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        export(tmp_path / "out", config), output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    params = tiny_params(config)
    assert torch.equal(model.get_input_embeddings().weight, params["embed"])
    assert torch.equal(model.lm_head.weight, params["embed" if config.tied else "lm_head"])
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, params["layers"][1]["q"])
    assert type(model).__name__ == ("MistralForCausalLM" if config.window else "LlamaForCausalLM")
    assert getattr(model.config, "sliding_window", None) == config.window
    assert model.config.rope_parameters["rope_type"] == config.rope.scaling
    assert model(torch.arange(9)[None]).logits.isfinite().all()


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_saved_by_transformers_comes_back_to_it_with_the_same_logits(
    tmp_path: Path, tied: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=33, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    first = transformers.LlamaForCausalLM(config).eval()
    first.save_pretrained(tmp_path / "first")
    model = checkpoints.load(tmp_path / "first")
    assert model.config.tied == tied
    assert model.generation.eos == (2,)
    checkpoints.export_safetensors(
        model.params, model.config, tmp_path / "second", generation=model.generation
    )
    second = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second").eval()
    ids = torch.arange(12)[None]
    assert torch.equal(first(ids).logits, second(ids).logits)
    assert second.generation_config.eos_token_id == 2


@pytest.mark.oracle
def test_shards_saved_by_transformers_load(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=33, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6, max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.MistralForCausalLM(config)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = checkpoints.load(tmp_path)
    assert model.config.window == 6
    assert torch.equal(model.params["layers"][1]["down"], theirs.model.layers[1].mlp.down_proj.weight)


@pytest.mark.oracle
def test_a_tokenizer_from_a_gguf_file_encodes_the_same_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = checkpoints.Text.from_gguf_metadata(byte_level_fields())
    config = changed(vocab=text.vocab_size)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export(tmp_path / "out", config, text=text))
    for words in ("the ab 12", "l'été 😀", "<|im_start|>user\nab<|im_end|>"):
        assert tokenizer.encode(words, add_special_tokens=False) == text.encode(words, bos=False)
    messages = [{"role": "user", "content": "ab"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == text.render_chat(messages)
    assert tokenizer.bos_token_id == text.bos


@pytest.mark.oracle
@pytest.mark.parametrize("fields", [byte_level_fields, sentence_piece_fields])
@pytest.mark.parametrize("added", [(False, False), (True, False), (False, True), (True, True)])
def test_begin_and_end_tokens_are_added_in_transformers_as_here(
    tmp_path: Path, fields: Any, added: tuple[bool, bool]
) -> None:
    transformers = pytest.importorskip("transformers")
    text = checkpoints.Text.from_gguf_metadata(fields(add_bos_token=added[0], add_eos_token=added[1]))
    folder = export(tmp_path / "out", changed(vocab=text.vocab_size), text=text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("hello the") == text.encode("hello the")
    again = checkpoints.Text.from_hf_folder(folder)
    assert again.encode("hello the") == text.encode("hello the")
    assert again.eos == text.eos


def test_end_tokens_of_generation_and_tokenizer_are_written_together(tmp_path: Path) -> None:
    text = checkpoints.Text.from_gguf_metadata(byte_level_fields())
    generation = checkpoints.Generation(eos=(7,), temperature=0.5, sample=True)
    folder = export(tmp_path / "out", changed(vocab=text.vocab_size), text=text, generation=generation)
    written = json.loads((folder / "generation_config.json").read_text())
    assert written["eos_token_id"] == [7, *text.eos]
    assert (written["temperature"], written["do_sample"]) == (0.5, True)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [7, *text.eos]


def test_large_weights_go_into_shards_and_a_smaller_export_replaces_them(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", shard_bytes=20000)
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(names) > 1
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert flat(checkpoints.load(folder).params).keys() == flat(tiny_params()).keys()
    export(folder)
    assert not (folder / "model.safetensors.index.json").exists()
    assert torch.equal(checkpoints.load(folder).params["embed"], tiny_params()["embed"])


def test_dtypes_are_kept(tmp_path: Path) -> None:
    checkpoints.export_safetensors(tiny_params(dtype=torch.bfloat16), TINY, tmp_path)
    assert all(leaf.dtype == torch.bfloat16 for leaf in flat(checkpoints.load(tmp_path).params).values())
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_cannot_be_exported_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(TreeError, match="lm_head: missing"):
        checkpoints.export_safetensors(tiny_params(changed(tied=True)), TINY, folder)
    with pytest.raises(UnsupportedError, match=r"rope\.style"):
        export(folder, changed(rope=Rope(dims=8, style="interleaved")))
    with pytest.raises(UnsupportedError, match=r"window"):
        export(folder, changed(window=4, mlp_bias=True))
    with pytest.raises(OptionError, match="shard_bytes"):
        export(folder, shard_bytes=0)
    with pytest.raises(UnsupportedError, match="configuration is not supported"):
        checkpoints.export_safetensors({}, object(), folder)
    assert not folder.exists()
