"""The configuration of a dense Qwen model from and to Hugging Face's `config.json` (model types qwen2 and qwen3).

What is Qwen's own is the window: a size that counts only where `use_sliding_window` says so, and which layers it is
for, stated as a list (`layer_types`) or as the number of leading layers without it (`max_window_layers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atbx.models.config_values import Values
from atbx.models.llama_hf_config import (
    defaults_of,
    not_in_transformers,
    read_sizes,
    refuse_rest,
    write_sizes,
)
from atbx.models.qwen import QwenConfig

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"kv_heads": 32, "context": 32768, "window": 4096, "full_layers": 28},
    "qwen3": {"kv_heads": 32, "context": 32768, "window": 4096, "full_layers": 28, "head_size": 128},
}
"""By model type: what transformers takes where config.json has no such key."""

_FULL, _WINDOWED = "full_attention", "sliding_attention"


def config_from_hf(description: Mapping[str, Any], where: str = "config.json") -> QwenConfig:
    """The configuration that a `config.json` of model type qwen2 or qwen3 describes.

    Raises:
        CheckpointError: a key is missing or malformed; names it.
        UnsupportedError: a key asks for a computation that this family does not have; names it.
    """
    values = Values(description, where)
    defaults = defaults_of(values, DEFAULTS)
    is_qwen3 = values.text("model_type") == "qwen3"
    sizes = read_sizes(values, defaults)
    window, full_layers = _read_window(values, sizes["layers"], defaults)
    # transformers reads this key for qwen3 only; for qwen2 it falls to refuse_rest.
    biased = is_qwen3 and values.flag("attention_bias")
    config = QwenConfig(
        **sizes,
        window=window,
        full_layers=full_layers,
        qkv_bias=biased or not is_qwen3,
        out_bias=biased,
        qk_norm=is_qwen3,
    )
    refuse_rest(values)
    return config


def _read_window(values: Values, layers: int, defaults: Mapping[str, Any]) -> tuple[int | None, int]:
    """The window and the number of leading layers without it; (None, 0) where no layer has one."""
    window = None
    if values.flag("use_sliding_window"):
        absent = None if "sliding_window" in values.values else defaults["window"]
        if values.any("sliding_window", absent) is not None:
            window = values.count("sliding_window", absent)
    full_layers = _read_full_layers(values, defaults["full_layers"])
    values.read |= {"sliding_window", "max_window_layers"}
    if values.has("layer_types"):
        full_layers = _read_layer_types(values, layers, window)
    return (None, 0) if window is None or full_layers >= layers else (window, full_layers)


def _read_full_layers(values: Values, absent: int) -> int:
    found = values.any("max_window_layers", absent)
    return 0 if type(found) is int and found == 0 else values.count("max_window_layers", absent)


def _read_layer_types(values: Values, layers: int, window: int | None) -> int:
    """The number of leading full layers that the list states."""
    found = values.any("layer_types")
    if not isinstance(found, (list, tuple)) or len(found) != layers:
        raise values.malformed("layer_types", f"a list of {layers}, one a layer", found)
    for kind in found:
        if kind not in (_FULL, _WINDOWED):
            raise values.unsupported("layer_types", f"{_FULL} and {_WINDOWED}", kind)
    full = next((index for index, kind in enumerate(found) if kind == _WINDOWED), layers)
    if full < layers and window is None:
        raise values.unsupported("layer_types", f"{_FULL} alone, as there is no window in use", _WINDOWED)
    if _FULL in found[full:]:
        at = full + list(found[full:]).index(_FULL)
        raise values.unsupported("layer_types", f"no {_FULL} after {_WINDOWED}", f"{_FULL} at layer {at}")
    return full


def config_to_hf(config: QwenConfig) -> dict[str, Any]:
    """The `config.json` of a model, as transformers reads it (4 and 5): head norms make it a qwen3, else a qwen2.

    Raises:
        UnsupportedError: transformers has no model with this combination; names the fields.
    """
    models = "dense Qwen2 or Qwen3"
    if config.mlp_bias:
        raise not_in_transformers(models, "mlp_bias", True)
    if config.out_bias and not config.qk_norm:
        raise not_in_transformers(models, "out_bias", "True without qk_norm")
    name = "qwen3" if config.qk_norm else "qwen2"
    written = write_sizes(config, name, f"{name.capitalize()}ForCausalLM", models)
    written |= {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": config.layers if config.window is None else config.full_layers,
    }
    return written | ({"attention_bias": config.qkv_bias or config.out_bias} if config.qk_norm else {})
