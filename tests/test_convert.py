"""Conversion keeps every bit, the description, and what the publisher says about generating."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import (
    TINY,
    assert_same,
    changed,
    flat,
    flax_folder,
    hf_folder,
    tiny_gguf,
    tiny_params,
)
from small_tokenizers import byte_level_fields

from atbx import checkpoints
from atbx.checkpoints.config_metadata import config_from_metadata, config_to_metadata
from atbx.checkpoints.generation import Generation, from_gguf, from_hf, from_metadata
from atbx.checkpoints.leaves import is_mapped
from atbx.core.errors import CheckpointError, TreeError, UnsupportedError
from atbx.models.llama import LlamaConfig
from atbx.ops.rope import Rope

# --- converting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gguf", "safetensors", "flax"])
def test_a_converted_file_has_the_bits_and_the_description_of_its_source(tmp_path: Path, form: str) -> None:
    params = tiny_params()
    metadata = byte_level_fields()
    source = {
        "gguf": lambda: tiny_gguf(tmp_path / "m.gguf", params=params, metadata=metadata),
        "safetensors": lambda: hf_folder(tmp_path / "hf", params),
        "flax": lambda: flax_folder(tmp_path / "flax", params),
    }[form]()
    checkpoints.convert(source, tmp_path / "out.msgpack")
    before, after = checkpoints.load(source), checkpoints.load(tmp_path / "out.msgpack")
    assert_same(after.params, params)
    assert all(is_mapped(leaf) for leaf in flat(after.params).values())
    assert (after.config, after.family, after.form) == (before.config, "llama", "atbx")
    assert after.generation == before.generation
    if form == "gguf":
        assert before.text is not None
        assert after.text is not None
        assert after.text.encode("the the ab 12") == before.text.encode("the the ab 12")
    kept = checkpoints.read_tree(tmp_path / "out.msgpack").metadata
    assert kept is not None
    assert kept["source"] == {"name": source.name, "form": form}
    assert kept["layouts"]["layers/0/q"] == "out_in"
    assert "embed" not in kept["layouts"]


def test_mixed_precision_is_kept_unless_a_dtype_is_given(tmp_path: Path) -> None:
    params = tiny_params()
    params["layers"][0]["up"] = params["layers"][0]["up"].bfloat16()
    folder = hf_folder(tmp_path / "hf", params)
    checkpoints.convert(folder, tmp_path / "kept.msgpack")
    assert_same(checkpoints.load(tmp_path / "kept.msgpack").params, params)
    checkpoints.convert(folder, tmp_path / "cast.msgpack", dtype=torch.float16)
    cast = flat(checkpoints.load(tmp_path / "cast.msgpack").params)
    assert all(torch.equal(cast[where], leaf.half()) for where, leaf in flat(params).items())


def test_a_converted_file_converts_again_and_splits_into_shards(tmp_path: Path) -> None:
    params = tiny_params()
    checkpoints.convert(hf_folder(tmp_path / "hf", params), tmp_path / "one.msgpack")
    checkpoints.convert(tmp_path / "one.msgpack", tmp_path / "many.msgpack", shard_bytes=20000)
    assert len(list(tmp_path.glob("many-*.msgpack"))) > 1
    assert_same(checkpoints.load(tmp_path / "many.msgpack").params, params)


@pytest.mark.parametrize("name", ["m.gguf", "link.gguf"])
def test_a_source_is_never_overwritten_with_itself(tmp_path: Path, name: str) -> None:
    source = tiny_gguf(tmp_path / "m.gguf")
    os.symlink(source, tmp_path / "link.gguf")
    before = source.read_bytes()
    with pytest.raises(CheckpointError, match=f"{name}: the destination is the source"):
        checkpoints.convert(source, tmp_path / name)
    assert source.read_bytes() == before
    folder = hf_folder(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the destination is the source"):
        checkpoints.convert(folder, folder / "model.safetensors")


def test_nothing_is_written_when_the_source_does_not_fit(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", intermediate_size=65)
    with pytest.raises(TreeError):
        checkpoints.convert(folder, tmp_path / "out.msgpack")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf"]


# --- end tokens and defaults ---------------------------------------------------------------------------------------


def test_end_tokens_of_all_sources_are_united(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", eos_token_id=5)
    defaults = {"eos_token_id": [7, 5, 9], "temperature": 0.6, "top_p": 0.9, "top_k": 40, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    generation = checkpoints.load(folder).generation
    assert generation == Generation((5, 7, 9), sample=True, temperature=0.6, top_k=40, top_p=0.9)
    checkpoints.convert(folder, tmp_path / "out.msgpack")
    assert checkpoints.load(tmp_path / "out.msgpack").generation == generation


@pytest.mark.oracle
def test_the_tokenizers_end_token_counts_too(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = hf_folder(tmp_path / "hf", eos_token_id=5)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert checkpoints.load(folder).generation.eos == (5, 2)


def test_sampling_defaults_of_a_gguf_file_are_read() -> None:
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    assert from_gguf(metadata, "m.gguf") == Generation(temperature=0.5, top_k=20)


@pytest.mark.parametrize(
    ("config", "generation", "named"),
    [
        ({"eos_token_id": "two"}, {}, "config.json: eos_token_id"),
        ({}, {"eos_token_id": [1, -2]}, "generation_config.json: eos_token_id"),
        ({}, {"temperature": "hot"}, "temperature"),
        ({}, {"top_k": 1.5}, "top_k"),
        ({}, {"do_sample": 1}, "do_sample"),
    ],
)
def test_a_malformed_default_is_named(config: dict[str, Any], generation: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"folder: {named} is malformed"):
        from_hf(config, generation, "folder")


def test_stored_defaults_are_checked() -> None:
    assert from_metadata(Generation((1, 2), top_p=0.5).to_metadata(), "f") == Generation((1, 2), top_p=0.5)
    for stored, named in (
        ({"eos": "x"}, r"generation\.eos"),
        ({"beams": 2}, r"generation\.beams"),
        (3, "generation"),
    ):
        with pytest.raises(CheckpointError, match=named):
            from_metadata(stored, "f")


# --- the configuration in a file's metadata ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        changed(window=5, tied=True),
        changed(
            rope=Rope(dims=8, scaling="longrope", factor=2.0, original_context=32, short_factor=(1.0,) * 4,
                      long_factor=(1.5, 2.0, 3.0, 4.0), attention_factor=1.25)
        ),
    ],
)  # fmt: skip
def test_a_configuration_survives_json(config: LlamaConfig) -> None:
    stored = json.loads(json.dumps(config_to_metadata(config)))
    assert config_from_metadata(LlamaConfig, stored, "f") == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab": None}, "config/vocab is malformed; expected int, found None"),
        ({"vocab": True}, "config/vocab is malformed"),
        ({"logit_cap": True}, "config/logit_cap is unknown"),
        ({"rope": 3}, "config/rope is malformed"),
        ({"rope": {"dims": 7}}, "config/rope contradicts itself: Rope.dims"),
        ({"rope": {}}, "config/rope/dims is missing"),
        ({"heads": 5}, "config contradicts itself"),
    ],
)
def test_a_malformed_configuration_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"file: {said}"):
        config_from_metadata(LlamaConfig, {**config_to_metadata(TINY), **change}, "file")


def test_a_converted_file_that_does_not_fit_its_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.msgpack"
    config = config_to_metadata(TINY)
    params = tiny_params()
    checkpoints.write_tree(path, params, metadata={"family": "llama", "config": {**config, "ff": 65}})
    with pytest.raises(TreeError, match=r"m\.msgpack: the file does not fit its own configuration") as caught:
        checkpoints.load(path)
    assert len(caught.value.mismatches) == 6
    checkpoints.write_tree(
        path, params, metadata={"family": "llama", "config": config, "layouts": {"layers/0/q": "in_out"}}
    )
    with pytest.raises(TreeError, match=r"layers/0/q: expected layout out_in"):  # square: no shape shows it
        checkpoints.load(path)
    checkpoints.write_tree(path, params, metadata={"family": "gpt", "config": config})
    with pytest.raises(
        UnsupportedError, match=r"m\.msgpack: model family is not supported; expected one of llama"
    ):
        checkpoints.load(path)
    checkpoints.write_tree(path, params)
    with pytest.raises(CheckpointError, match="does not say which model"):
        checkpoints.load(path)
