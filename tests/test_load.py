"""Models load from every form with the same values, and are checked as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import (
    GGUF_TINY,
    TINY,
    assert_same,
    changed,
    f32,
    flat,
    flax_folder,
    gguf_bytes,
    hf_folder,
    llama_cpp_permute,
    tiny_gguf,
    tiny_params,
)
from small_tokenizers import byte_level_fields

from atbx import checkpoints
from atbx.checkpoints.leaves import is_mapped
from atbx.core.errors import CheckpointError, OptionError, TreeError, UnsupportedError
from atbx.models.llama import LlamaConfig

BIASED = changed(qkv_bias=True, out_bias=True, mlp_bias=True)
BIAS_KEYS = {"attention_bias": True, "mlp_bias": True}


# --- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "keys"), [(TINY, {}), (BIASED, BIAS_KEYS)])
def test_every_form_gives_the_same_parameters(
    tmp_path: Path, config: LlamaConfig, keys: dict[str, Any]
) -> None:
    params = tiny_params(config)
    gguf = checkpoints.load(tiny_gguf(tmp_path / "m.gguf", config, params))
    folder = checkpoints.load(hf_folder(tmp_path / "hf", params, **keys))
    flax = checkpoints.load(flax_folder(tmp_path / "flax", params, **keys))
    wrapped = checkpoints.load(flax_folder(tmp_path / "wrapped", params, wrap=True, **keys))
    for model in (gguf, folder, flax, wrapped):
        assert_same(model.params, params)
        assert model.family == "llama"
    assert [m.form for m in (gguf, folder, flax)] == ["gguf", "safetensors", "flax"]
    assert folder.config == flax.config == config
    assert gguf.config == LlamaConfig(**{**vars(config), "eps": 0.5})


def test_unquantised_weights_are_mapped_and_permuted_ones_copied(tmp_path: Path) -> None:
    folder = flat(checkpoints.load(hf_folder(tmp_path / "hf")).params)
    assert all(is_mapped(leaf) for leaf in folder.values())
    gguf = flat(checkpoints.load(tiny_gguf(tmp_path / "m.gguf")).params)
    assert {path.split("/")[-1] for path, leaf in gguf.items() if not is_mapped(leaf)} == {"q", "k"}


def test_a_dtype_casts_every_parameter(tmp_path: Path) -> None:
    params = tiny_params()
    for path in (hf_folder(tmp_path / "hf", params), tiny_gguf(tmp_path / "m.gguf", params=params)):
        found = flat(checkpoints.load(path, dtype=torch.bfloat16).params)
        expected = {where: leaf.bfloat16() for where, leaf in flat(params).items()}
        assert all(torch.equal(found[where], expected[where]) for where in expected)


@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16", 3])
def test_anything_but_a_floating_point_dtype_is_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(OptionError, match=r"dtype: .*floating-point"):
        checkpoints.load(tmp_path, dtype=dtype)
    with pytest.raises(OptionError, match=r"dtype: .*floating-point"):
        checkpoints.convert(tmp_path, tmp_path / "out", dtype=dtype)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantised_weights_load_as_the_gguf_package_dequantises_them(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    packed = gguf.quants.quantize(tiny_params()["layers"][1]["up"].numpy(), gguf.GGMLQuantizationType[kind])
    entry = {"blk.1.ffn_up.weight": ((64, 32), kind, packed.tobytes())}
    model = checkpoints.load(tiny_gguf(tmp_path / "m.gguf", tensors=entry))
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    assert torch.equal(model.params["layers"][1]["up"], torch.from_numpy(expected))


def test_tokenizer_and_ends_are_made_when_they_are_asked_for(tmp_path: Path) -> None:
    metadata = byte_level_fields()
    model = checkpoints.load(tiny_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert "text" not in vars(model)
    assert model.text is not None
    assert model.text is model.text
    assert model.generation.eos == model.text.eos
    assert set(model.generation.eos) == {0, 2}
    broken = {**metadata, "tokenizer.ggml.pre": "strange"}
    model = checkpoints.load(tiny_gguf(tmp_path / "b.gguf", metadata=broken))
    assert model.params["norm"].shape == (32,)
    with pytest.raises(UnsupportedError, match="strange"):
        _ = model.text


def test_a_source_without_tokenizer_has_no_text(tmp_path: Path) -> None:
    assert checkpoints.load(tiny_gguf(tmp_path / "m.gguf")).text is None
    assert checkpoints.load(hf_folder(tmp_path / "hf")).text is None


# --- one report of every mismatch ----------------------------------------------------------------------------------


def test_every_mismatch_is_in_one_report_with_the_names_of_the_source(tmp_path: Path) -> None:
    params = tiny_params()
    del params["layers"][1]["up"]
    params["norm"] = torch.ones(31)
    folder = hf_folder(tmp_path / "hf", params)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors") | {
        "model.layers.0.self_attn.q_norm.weight": torch.ones(8)
    }
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # what old files carry along
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TreeError, match="3 mismatches") as caught:
        checkpoints.load(folder)
    found = sorted(caught.value.mismatches)
    assert found[0].startswith("layers/1/up: missing")
    assert "(model.layers.1.mlp.up_proj.weight)" in found[0]
    assert found[1].startswith("model.layers.0.self_attn.q_norm.weight: unexpected")
    assert found[2].startswith("norm: expected shape [32], found [31]")
    assert "(model.norm.weight)" in found[2]
    assert str(folder) in str(caught.value)


def test_a_gguf_tensor_of_the_wrong_shape_is_named_in_both_tongues(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", tensors={"blk.0.attn_v.weight": f32(torch.ones(32, 16))})
    with pytest.raises(
        TreeError, match=r"layers/0/v: expected shape \[16, 32\], found \[32, 16\].*blk\.0\.attn_v"
    ):
        checkpoints.load(path)


@pytest.mark.parametrize(("key", "value"), [("llama.block_count", 1 << 30), ("llama.block_count", 99)])
def test_more_layers_than_tensors_are_refused_before_a_tree_is_made(
    tmp_path: Path, key: str, value: int
) -> None:
    with pytest.raises(CheckpointError, match=f"more layers than there are tensors.*found {value}"):
        checkpoints.load(tiny_gguf(tmp_path / "m.gguf", metadata={key: value}))


def test_a_type_that_cannot_be_read_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    # A row of Q2_K has 256 values, so the model is widened until one fits.
    wide = {"blk.0.ffn_down.weight": ((32, 256), "Q2_K", b"\0" * (32 * 84))}
    path = tiny_gguf(
        tmp_path / "m.gguf", changed(ff=256), tensors=wide, metadata={"llama.feed_forward_length": 256}
    )
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_down\.weight \(Q2_K\)"):
        checkpoints.load(path)


# --- tied embeddings: flag times projection ------------------------------------------------------------------------


def tied_case(folder: Path, tied: bool, head: str) -> Path:
    params = tiny_params()
    if head == "absent":
        del params["lm_head"]
    elif head == "equal":
        params["lm_head"] = params["embed"].clone()
    return hf_folder(folder, params, tie_word_embeddings=tied)


def test_tied_without_a_projection_is_tied(tmp_path: Path) -> None:
    model = checkpoints.load(tied_case(tmp_path / "hf", True, "absent"))
    assert model.config.tied
    assert "lm_head" not in model.params


def test_tied_with_an_equal_projection_is_tied_and_drops_it(tmp_path: Path) -> None:
    model = checkpoints.load(tied_case(tmp_path / "hf", True, "equal"))
    assert model.config.tied
    assert "lm_head" not in model.params


def test_tied_with_another_projection_is_an_error_that_names_both(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        checkpoints.load(tied_case(tmp_path / "hf", True, "other"))


def test_tied_with_only_the_projection_saved_takes_it_for_the_embedding(tmp_path: Path) -> None:
    params = tiny_params()
    expected = params["lm_head"]
    folder = hf_folder(tmp_path / "hf", params, tie_word_embeddings=True)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(checkpoints.load(folder).params["embed"], expected)


@pytest.mark.parametrize("head", ["equal", "other"])
def test_untied_with_a_projection_keeps_it(tmp_path: Path, head: str) -> None:
    model = checkpoints.load(tied_case(tmp_path / "hf", False, head))
    assert not model.config.tied
    assert torch.equal(model.params["lm_head"], model.params["embed"]) == (head == "equal")


def test_untied_without_a_projection_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match=r"lm_head: missing.*\(lm_head\.weight\)(.|\n)*does not tie"):
        checkpoints.load(tied_case(tmp_path / "hf", False, "absent"))


def test_a_gguf_without_output_is_tied(tmp_path: Path) -> None:
    params = tiny_params(changed(tied=True))
    model = checkpoints.load(tiny_gguf(tmp_path / "m.gguf", changed(tied=True), params))
    assert model.config.tied
    assert_same(model.params, params)


# --- what is no model ----------------------------------------------------------------------------------------------


def test_what_is_no_model_is_named_with_what_to_do(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    cases: list[tuple[Path, str]] = [
        (folder / "model.safetensors", "alone does not describe a model.*folder"),
        (tmp_path / "none", "no such file"),
        (tmp_path / "lfs", "Git LFS pointer"),
        (tmp_path / "zip", "zip archive"),
    ]
    (tmp_path / "lfs").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "zip").write_bytes(b"PK\x03\x04.....")
    for path, said in cases:
        with pytest.raises(CheckpointError, match=f"{path}.*{said}"):
            checkpoints.load(path)


def test_a_folder_with_other_weights_says_what_to_do(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        checkpoints.load(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.Q4_0.gguf")
    with pytest.raises(CheckpointError, match=r"model\.Q4_0\.gguf.*path of the GGUF file"):
        checkpoints.load(folder)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "expected an object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"<!DOCTYPE html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    ],
)
def test_a_damaged_config_json_is_named(tmp_path: Path, raw: bytes, said: str) -> None:
    folder = hf_folder(tmp_path / "hf")
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{said}"):
        checkpoints.load(folder)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("split.count", 3, "split.count"),
        ("general.type", "adapter", "general.type"),
        ("general.architecture", "phi3", "general.architecture.*one of llama.*'phi3'"),
    ],
)
def test_a_gguf_file_that_is_no_whole_model_is_unsupported(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({**GGUF_TINY, key: value}, {}))
    with pytest.raises(UnsupportedError, match=f"m.gguf: {said}"):
        checkpoints.load(path)


# --- the real model ------------------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.weights
def test_the_real_model_loads_as_transformers_loads_it(smollm2_path: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    model = checkpoints.load(smollm2_path)
    named = theirs.state_dict()
    assert model.config.tied
    for path, leaf in (
        ("layers/0/q", "self_attn.q_proj"),
        ("layers/0/k", "self_attn.k_proj"),
        ("layers/0/up", "mlp.up_proj"),
    ):
        ours = flat(model.params)[path]
        assert torch.equal(ours, named[f"model.layers.0.{leaf}.weight"]), path
    assert torch.equal(model.params["embed"], named["model.embed_tokens.weight"])
    assert torch.equal(model.params["norm"], named["model.norm.weight"])
    assert model.config.eps == theirs.config.rms_norm_eps
    assert model.config.rope.theta == theirs.config.rope_parameters["rope_theta"]


def test_q_and_k_of_a_gguf_file_are_unpermuted(tmp_path: Path) -> None:
    params = tiny_params()
    path = tiny_gguf(tmp_path / "m.gguf", params=params)
    stored = checkpoints.open_source(path)
    q = params["layers"][0]["q"]
    assert not torch.equal(q, torch.from_numpy(llama_cpp_permute(q.numpy(), 4)))
    assert torch.equal(stored.leaves["layers/0/q"].load(), q)
    assert torch.equal(stored.leaves["layers/0/k"].load(), params["layers"][0]["k"])
