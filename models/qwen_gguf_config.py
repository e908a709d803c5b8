"""The configuration of a dense Qwen model from the metadata of a GGUF file (architectures "qwen2" and "qwen3").

llama.cpp computes these two without a window, whatever the published model says, so a file that states one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from atbx.models.llama_gguf_config import read_sizes, refuse_rest, values_of
from atbx.models.qwen import QwenConfig

ARCHITECTURES = ("qwen2", "qwen3")


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Collection[str],
    read: Callable[[str], torch.Tensor],
    where: str = "the file",
) -> QwenConfig:
    """The configuration that a GGUF file describes.

    metadata: its keys. tensors: the names of its tensors. read: the values of one (for rotary tables).

    Raises:
        CheckpointError: a key is missing or malformed; names it.
        UnsupportedError: a key or tensor asks for a computation that this family does not have; names it.
    """
    values = values_of(metadata, ARCHITECTURES, where)
    sizes = read_sizes(values, metadata, tensors, read)
    config = QwenConfig(**sizes, qk_norm=metadata["general.architecture"] == "qwen3")
    refuse_rest(values)
    return config
