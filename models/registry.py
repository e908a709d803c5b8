"""The model families that checkpoints can be read into, found by what a checkpoint says it is.

A family is data: its configuration, abstract parameters, and for each kind of public checkpoint how to read the
configuration and what the parameters are called. Adding one means adding an entry to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atbx.core.errors import CheckpointError, UnsupportedError
from atbx.models import (
    llama,
    llama_gguf_config,
    llama_hf_config,
    llama_names,
    qwen,
    qwen_gguf_config,
    qwen_hf_config,
    qwen_names,
)
from atbx.models.name_map import Naming


@dataclass(frozen=True)
class Family:
    """A model family.

    name:             as kept in converted files.
    config_class:     its frozen configuration.
    abstract:         `abstract(config, dtype)`, the parameter tree.
    forward:          `forward(params, step, cache, config)`.
    hf_model_types, hf_architectures, gguf_architectures: what public checkpoints call it.
    hf, flax, gguf:   names of its parameters there.
    config_from_hf:   `config_from_hf(config_json, where)`.
    config_from_gguf: `config_from_gguf(metadata, tensor_names, read, where)`.
    config_to_hf:     `config_to_hf(config)`, the inverse of `config_from_hf`.
    """

    name: str
    config_class: type
    abstract: Callable[..., dict[str, Any]]
    forward: Callable[..., Any]
    hf_model_types: tuple[str, ...]
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    hf: Naming
    flax: Naming
    gguf: Naming
    config_from_hf: Callable[[Mapping[str, Any], str], Any]
    config_from_gguf: Callable[[Mapping[str, Any], Collection[str], Callable[[str], torch.Tensor], str], Any]
    config_to_hf: Callable[[Any], dict[str, Any]]


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        config_class=llama.LlamaConfig,
        abstract=llama.abstract,
        forward=llama.forward,
        hf_model_types=tuple(llama_hf_config.DEFAULTS),
        hf_architectures=(
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "FlaxLlamaForCausalLM",
            "FlaxMistralForCausalLM",
        ),
        gguf_architectures=llama_gguf_config.ARCHITECTURES,
        hf=llama_names.HF,
        flax=llama_names.FLAX,
        gguf=llama_names.GGUF,
        config_from_hf=llama_hf_config.config_from_hf,
        config_from_gguf=llama_gguf_config.config_from_gguf,
        config_to_hf=llama_hf_config.config_to_hf,
    ),
    Family(
        name="qwen",
        config_class=qwen.QwenConfig,
        abstract=qwen.abstract,
        forward=qwen.forward,
        hf_model_types=tuple(qwen_hf_config.DEFAULTS),
        hf_architectures=("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        gguf_architectures=qwen_gguf_config.ARCHITECTURES,
        hf=qwen_names.HF,
        flax=qwen_names.FLAX,
        gguf=qwen_names.GGUF,
        config_from_hf=qwen_hf_config.config_from_hf,
        config_from_gguf=qwen_gguf_config.config_from_gguf,
        config_to_hf=qwen_hf_config.config_to_hf,
    ),
)


def family_named(name: object, where: str) -> Family:
    """The family that a converted file names.

    Raises:
        UnsupportedError: there is none; lists those there are.
    """
    return _find(lambda family: (family.name,), name, "model family", where)


def family_of_config(config: object) -> Family:
    """The family of a configuration.

    Raises:
        UnsupportedError: it is of no family; lists those there are.
    """
    name = type(config).__name__
    return _find(lambda family: (family.config_class.__name__,), name, "configuration", "config")


def family_of_gguf(metadata: Mapping[str, Any], where: str) -> Family:
    """The family of a GGUF file, by `general.architecture`.

    Raises:
        CheckpointError: the key is missing.
        UnsupportedError: no family has this architecture; lists those that are supported.
    """
    architecture = metadata.get("general.architecture")
    if architecture is None:
        raise CheckpointError(
            "general.architecture is missing", where=where, expected="the name of an architecture"
        )
    return _find(lambda family: family.gguf_architectures, architecture, "general.architecture", where)


def family_of_hf(description: Mapping[str, Any], where: str) -> Family:
    """The family of a Hugging Face model, by `model_type`, and by `architectures` where it is stated.

    Raises:
        CheckpointError: `model_type` is missing.
        UnsupportedError: no family has it, or it is no model that generates text; lists those that are supported.
    """
    model_type = description.get("model_type")
    if model_type is None:
        raise CheckpointError("model_type is missing", where=where, expected="the name of a model type")
    family = _find(lambda family: family.hf_model_types, model_type, "model_type", where)
    stated = description.get("architectures")
    if isinstance(stated, list) and stated and not set(map(str, stated)) & set(family.hf_architectures):
        _find(lambda family: family.hf_architectures, stated[0], "architectures", where)
    return family


def _find(names: Callable[[Family], tuple[str, ...]], wanted: object, what: str, where: str) -> Family:
    for family in FAMILIES:
        if wanted in names(family):
            return family
    supported = [name for family in FAMILIES for name in names(family)]
    raise UnsupportedError(
        f"{what} is not supported",
        where=where,
        expected=f"one of {', '.join(supported)}",
        found=repr(wanted)[:80],
    )
