"""Qwen2 and Qwen3 in files: folders of transformers converted and generated from, GGUF files of the gguf package, and
folders written for transformers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from qwen_models import PROMPTS, SIZES, Case, case_of, greedy_of_transformers, reference_logits
from small_chat_model import json_of, text_of
from small_checkpoints import assert_same, flat
from small_models import random_params
from small_tokenizers import byte_level_fields

from atbx import checkpoints
from atbx.core.errors import CheckpointError, TreeError, UnsupportedError
from atbx.models.qwen import QwenConfig
from atbx.ops.rope import Rope

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.oracle

# Heads of 128: transformers takes that for every GGUF file of a qwen3, whatever its key_length says.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3_tied": {"head_dim": 128, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen2_tied": {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A kind of Qwen, saved by transformers and loaded here."""
    kinds = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    config = kinds[request.param[:5]](**{**SIZES, **KINDS[request.param]})
    return case_of(config, tmp_path_factory.mktemp(request.param))


# --- Hugging Face folders ------------------------------------------------------------------------------------------


def test_a_converted_folder_generates_what_transformers_does(capsys: Any, tmp_path: Path, case: Case) -> None:
    converted = tmp_path / "model.msgpack"
    text_of(capsys, "convert", case.folder, converted)
    for prompt, wanted in zip(PROMPTS[1:3], greedy_of_transformers(case.fp32, PROMPTS[1:3], 10), strict=True):
        ids = ",".join(map(str, prompt))
        found = json_of(
            capsys, "generate", converted, "--prompt-ids", ids, "--max-new-tokens", 10, "--dtype", "float32", "--json"
        )  # fmt: skip
        assert found["tokens"] == [wanted]


def test_a_converted_folder_is_the_folder(tmp_path: Path, case: Case) -> None:
    checkpoints.convert(case.folder, tmp_path / "model.msgpack", progress=False)
    again = checkpoints.load(tmp_path / "model.msgpack", progress=False)
    assert again.config == case.loaded.config
    assert_same(again.params, case.loaded.params)


def test_a_missing_head_norm_is_named_as_the_checkpoint_names_it(tmp_path: Path, case: Case) -> None:
    from safetensors.torch import load_file, save_file

    held = load_file(case.folder / "model.safetensors")
    dropped = next(
        name for name in held if "layers.1.self_attn.k_" in name and name.endswith(("norm.weight", "bias"))
    )
    del held[dropped]
    (tmp_path / "config.json").write_bytes((case.folder / "config.json").read_bytes())
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(TreeError, match=rf"layers/1/k_(norm|bias): .*\({dropped}\)"):
        checkpoints.load(tmp_path, progress=False)


# --- GGUF files ----------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: Any, *, drop: str | None = None, **more: Any) -> Path:
    """The file of a model of transformers, its names and keys by the gguf package as llama.cpp's converter has them."""
    config = model.config
    arch = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in more.items():
        writer.add_uint32(f"{config.model_type}.{key.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.asarray(tensor.float()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_the_folder(tmp_path: Path, case: Case) -> None:
    found = checkpoints.load(write_gguf(tmp_path / "model.gguf", case.fp32), progress=False)
    # The file keeps epsilon in single precision.
    eps = float(np.float32(case.loaded.config.eps))
    assert found.config == dataclasses.replace(case.loaded.config, eps=eps)
    assert_same(found.params, case.loaded.params)


def test_a_gguf_file_means_what_transformers_reads_in_it(tmp_path: Path, case: Case) -> None:
    path = write_gguf(tmp_path / "model.gguf", case.fp32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert theirs.config.model_type == case.fp32.config.model_type
    for found, expected in zip(
        reference_logits(theirs, PROMPTS), reference_logits(case.fp32, PROMPTS), strict=True
    ):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_gguf_file_that_states_a_window_or_experts_is_refused(tmp_path: Path, case: Case) -> None:
    for key in ("attention__sliding_window", "expert_count"):
        path = write_gguf(tmp_path / f"{key}.gguf", case.fp32, **{key: 8})
        with pytest.raises(UnsupportedError, match=rf"qwen\d\.{key.replace('__', '.')} may change"):
            checkpoints.load(path, progress=False)


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-r1-qwen"])
def test_the_cut_of_text_is_that_of_the_published_tokenizer(pre: str) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    fields = byte_level_fields(pre, add_bos_token=False)
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    published = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        unk_token=None,
        extra_special_tokens=["<|im_start|>", "<|im_end|>", "<think>"],
    )
    ours = checkpoints.Text.from_gguf_metadata(fields)
    samples = (
        "it's 1234567 apples",
        "The  the\n\n  cab, IT'LL 12 \t12!?",
        "日本 😀é12ab34",
        "   x",
        "a\r\n\r\n 77",
    )
    for sample in samples:
        assert ours.encode(sample) == published.encode(sample, add_special_tokens=False), sample
    assert len(ours.encode("121212")) == 6  # "12" is a merge, and every digit stands alone


# --- folders for transformers --------------------------------------------------------------------------------------

BASE = QwenConfig(
    vocab=33, width=32, layers=3, heads=4, kv_heads=2, head_size=16, ff=48, rope=Rope(16, theta=1e6), context=64,
    eps=1e-6,
)  # fmt: skip
WRITTEN = {
    "qwen3": dataclasses.replace(BASE, qk_norm=True),
    "qwen3_tied_biased": dataclasses.replace(BASE, qk_norm=True, tied=True, qkv_bias=True, out_bias=True),
    "qwen3_windowed": dataclasses.replace(BASE, qk_norm=True, window=5),
    "qwen3_windowed_late": dataclasses.replace(BASE, qk_norm=True, window=5, full_layers=2),
    "qwen2": dataclasses.replace(BASE, qkv_bias=True),
    "qwen2_windowed_late": dataclasses.replace(BASE, qkv_bias=True, window=5, full_layers=1),
    "qwen2_yarn": dataclasses.replace(
        BASE, qkv_bias=True, rope=Rope(16, theta=1e6, scaling="yarn", factor=4.0, original_context=16)
    ),
}


@pytest.mark.parametrize("config", WRITTEN.values(), ids=WRITTEN.keys())
def test_an_exported_folder_is_the_same_model_here_and_in_transformers(
    tmp_path: Path, config: QwenConfig
) -> None:
    params = random_params(config)
    checkpoints.export_safetensors(params, config, tmp_path, progress=False)
    again = checkpoints.load(tmp_path, progress=False)
    assert again.config == config
    assert_same(again.params, params)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if config.qk_norm else "Qwen2ForCausalLM")
    attention = theirs.model.layers[2].self_attn
    held = flat(params)
    assert torch.equal(attention.q_proj.weight, held["layers/2/q"])
    if config.qk_norm:
        assert torch.equal(attention.k_norm.weight, held["layers/2/k_norm"])
    windows = [config.window if kind == "sliding_attention" else None for kind in theirs.config.layer_types]
    assert windows == [layer.window for layer in config.cache_spec.layers]


def test_a_file_whose_configuration_contradicts_itself_is_refused(tmp_path: Path) -> None:
    config = WRITTEN["qwen3_windowed_late"]
    metadata = {"family": "qwen", "config": {**dataclasses.asdict(config), "full_layers": 3}}
    checkpoints.write_tree(tmp_path / "bad.msgpack", random_params(config), metadata=metadata)
    with pytest.raises(CheckpointError, match=r"full_layers must leave a layer to the window; found 3 of 3"):
        checkpoints.load(tmp_path / "bad.msgpack", progress=False)
