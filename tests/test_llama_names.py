"""Configurations and parameter names of the Llama family, from Hugging Face and GGUF and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from small_checkpoints import GGUF_TINY, HF_TINY, TINY, changed, llama_cpp_permute

from atbx.core import trees
from atbx.core.errors import CheckpointError, UnsupportedError
from atbx.models import llama, llama_names
from atbx.models.llama3_factors import divisors_of, recover_llama3
from atbx.models.llama_gguf_config import config_from_gguf
from atbx.models.llama_hf_config import config_from_hf
from atbx.models.name_map import Foreign, halves_to_pairs, pairs_to_halves
from atbx.models.registry import FAMILIES, family_named, family_of_config, family_of_gguf, family_of_hf
from atbx.ops.rope import Rope


def hf(**keys: Any) -> dict[str, Any]:
    return {**HF_TINY, **keys}


def from_gguf(tensors: dict[str, torch.Tensor] | None = None, **keys: Any) -> Any:
    held = {"output.weight": torch.zeros(1), **(tensors or {})}
    metadata = {**GGUF_TINY, **{f"llama.{key.replace('__', '.')}": value for key, value in keys.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return config_from_gguf(metadata, held, held.__getitem__, "model.gguf")


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("naming", [llama_names.HF, llama_names.FLAX, llama_names.GGUF])
@pytest.mark.parametrize(
    "config",
    [TINY, changed(tied=True), changed(qkv_bias=True, out_bias=True), changed(qkv_bias=True, mlp_bias=True)],
)
def test_every_parameter_has_one_name_and_no_name_is_used_twice(naming: Any, config: Any) -> None:
    names = naming.names(config)
    paths, _, _ = trees.flatten_with_paths(llama.abstract(config))
    assert sorted(names) == sorted(paths)
    assert len({foreign.name for foreign in names.values()}) == len(names)
    assert not any(naming.is_ignored(foreign.name) for foreign in names.values())


@pytest.mark.oracle
@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_hugging_face_names_and_shapes_are_those_of_transformers(options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf(**options))).state_dict()
    config = config_from_hf(hf(**options))
    paths, leaves, _ = trees.flatten_with_paths(llama.abstract(config))
    names = llama_names.hf_names(config)
    ours = {names[path].name: leaf.shape for path, leaf in zip(paths, leaves, strict=True)}
    if config.tied:
        theirs.pop("lm_head.weight", None)
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.items()}


@pytest.mark.oracle
def test_gguf_names_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, TINY.layers)
    hf_names, gguf_names = llama_names.hf_names(TINY), llama_names.gguf_names(TINY)
    for path, foreign in hf_names.items():
        assert table.get_name(foreign.name, try_suffixes=(".weight", ".bias")) == gguf_names[path].name


def test_tables_of_frequencies_are_no_parameters() -> None:
    assert llama_names.HF.is_ignored("model.layers.11.self_attn.rotary_emb.inv_freq")
    assert llama_names.GGUF.is_ignored("rope_freqs.weight")
    assert llama_names.GGUF.is_ignored("blk.3.attn_rot_embd.weight")
    assert not llama_names.GGUF.is_ignored("blk.3.attn_q.weight")


def rotate(x: np.ndarray, position: int, style: str) -> np.ndarray:
    """One head x [D] rotated by the published formula of a style, in FP64."""
    half = len(x) // 2
    angle = position * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = (x[:half], x[half:]) if style == "half" else (x[0::2], x[1::2])
    turned = (first * cos - second * sin, second * cos + first * sin)
    return np.concatenate(turned) if style == "half" else np.stack(turned, 1).ravel()


@pytest.mark.parametrize("heads", [1, 3])
def test_undoing_the_permutation_turns_pair_rotation_into_half_rotation(heads: int) -> None:
    rng = np.random.default_rng(0)
    size, width = 8, 8 * heads  # square for one head: no shape tells the two orders apart
    weight, x = rng.normal(size=(heads * size, width)), rng.normal(size=width)
    stored = llama_cpp_permute(weight, heads)
    restored = pairs_to_halves(torch.from_numpy(stored), heads).numpy()
    assert np.array_equal(restored, weight)
    assert not np.array_equal(stored, weight)
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        in_pairs = rotate(stored[rows] @ x, 3, "interleaved")
        in_halves = rotate(restored[rows] @ x, 3, "half")
        # The same rotated channels in another order, hence the same scores.
        assert np.allclose(in_pairs[0::2], in_halves[: size // 2])
        assert np.allclose(in_pairs[1::2], in_halves[size // 2 :])
        assert not np.allclose(rotate(stored[rows] @ x, 3, "half"), in_halves)


def test_permuting_and_undoing_are_inverse_for_weights_and_biases() -> None:
    for shape in ((12, 5), (12,)):
        tensor = torch.arange(math.prod(shape)).reshape(shape)
        assert torch.equal(pairs_to_halves(halves_to_pairs(tensor, 3), 3), tensor)
        assert torch.equal(halves_to_pairs(tensor, 3), torch.from_numpy(llama_cpp_permute(tensor.numpy(), 3)))


def test_gguf_undoes_the_permutation_for_q_and_k_with_their_own_heads() -> None:
    names = llama_names.gguf_names(changed(qkv_bias=True))
    assert names["layers/0/q"] == Foreign("blk.0.attn_q.weight", "rotary_pairs", 4)
    assert names["layers/0/k_bias"] == Foreign("blk.0.attn_k.bias", "rotary_pairs", 2)
    assert names["layers/0/v"] == Foreign("blk.0.attn_v.weight")


def test_flax_kernels_are_transposed_even_where_they_are_square() -> None:
    foreign = llama_names.flax_names(TINY)["layers/1/q"]
    kernel = torch.arange(9.0).reshape(3, 3)
    assert foreign.name == "model/layers/1/self_attn/q_proj/kernel"
    assert foreign.to_ours(kernel).tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert llama_names.flax_names(TINY)["embed"].to_ours(kernel) is kernel


# --- Llama 3's table -----------------------------------------------------------------------------------------------


def published_table(
    dims: int, theta: float, factor: float, original: int, low: float, high: float
) -> list[float]:
    """The divisors that llama.cpp's converter writes, by the published formula, as float32."""
    table = []
    for pair in range(dims // 2):
        frequency = theta ** (-2 * pair / dims)
        wave = 2 * math.pi / frequency
        if wave < original / high:
            table.append(1.0)
        elif wave > original / low:
            table.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32).tolist()


@pytest.mark.parametrize("dims", [8, 64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_published_parameters_are_recovered_exactly(dims: int, factor: float) -> None:
    found = recover_llama3(published_table(dims, 5e5, factor, 8192, 1.0, 4.0), 5e5)
    expected = {"scaling": "llama3", "factor": factor, "original_context": 8192}
    assert found == expected | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(("dims", "theta", "original", "low", "high"),
                         [(128, 1e4, 4096, 1.0, 32.0), (64, 1e6, 2048, 2.0, 3.0), (8, 1e4, 16, 1.0, 4.0)])  # fmt: skip
def test_other_parameters_are_recovered_to_the_same_frequencies(
    dims: int, theta: float, original: int, low: float, high: float
) -> None:
    table = published_table(dims, theta, 8.0, original, low, high)
    found = recover_llama3(table, theta)
    assert found is not None
    assert found["scaling"] == "llama3"
    frequencies = theta ** (-np.arange(0, dims, 2) / dims)
    again = divisors_of(
        frequencies,
        found["factor"],
        found["original_context"],
        found["low_freq_factor"],
        found["high_freq_factor"],
    )
    assert np.allclose(again, table, rtol=2e-5, atol=0)


def test_the_table_of_a_file_becomes_llama3_scaling() -> None:
    table = torch.tensor(published_table(8, 5e5, 8.0, 8192, 1.0, 4.0))
    rope = from_gguf({"rope_freqs.weight": table}, rope__freq_base=5e5).rope
    assert rope == Rope(dims=8, theta=5e5, scaling="llama3", factor=8.0, original_context=8192)


def test_tables_that_are_no_llama3_scaling_are_refused() -> None:
    assert recover_llama3([1.0, 8.0, 2.0, 8.0], 1e4) is None
    assert recover_llama3([1.0, 0.5], 1e4) is None
    assert recover_llama3([1.0, 1.0], 1e4) == {"scaling": "default"}
    assert recover_llama3([4.0, 4.0], 1e4) == {"scaling": "linear", "factor": 4.0}
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        from_gguf({"rope_freqs.weight": torch.tensor([1.0, 8.0, 2.0, 8.0])})
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight.*expected 4, found 3"):
        from_gguf({"rope_freqs.weight": torch.ones(3)})


# --- families ------------------------------------------------------------------------------------------------------


def test_families_are_found_by_every_name_and_refused_with_a_list() -> None:
    family = FAMILIES[0]
    assert family_named("llama", "f") is family
    assert family_of_config(TINY) is family
    assert family_of_hf(HF_TINY, "f") is family
    assert family_of_gguf(GGUF_TINY, "f") is family
    for call, said in (
        (lambda: family_named("gpt", "f"), "model family"),
        (lambda: family_of_config(object()), "configuration"),
        (lambda: family_of_hf({"model_type": "gpt2"}, "f"), "model_type.*llama, mistral.*'gpt2'"),
        (
            lambda: family_of_hf(hf(architectures=["LlamaForSequenceClassification"]), "f"),
            "architectures.*LlamaForC",
        ),
        (
            lambda: family_of_gguf({"general.architecture": "phi3"}, "f"),
            "general.architecture.*llama.*'phi3'",
        ),
    ):
        with pytest.raises(UnsupportedError, match=said):
            call()
    with pytest.raises(CheckpointError, match="model_type is missing"):
        family_of_hf({}, "f")
    with pytest.raises(CheckpointError, match=r"general\.architecture is missing"):
        family_of_gguf({}, "f")
