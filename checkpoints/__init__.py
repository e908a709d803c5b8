"""Checkpoints: weight trees in msgpack, import of public checkpoints, export; tokenizers that travel with weights.

Names are loaded on first use (PEP 562), so that `import atbx` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not lazily: importing the module `check` for the first time later would put the module in the function's place.
from atbx.checkpoints.check import check

if not __name__.startswith("atbx."):
    raise ImportError("this folder is the package atbx.checkpoints: import it by that name")

if TYPE_CHECKING:
    from atbx.checkpoints.conversion import convert
    from atbx.checkpoints.export import export_safetensors
    from atbx.checkpoints.generation import Generation
    from atbx.checkpoints.leaves import Lazy, release
    from atbx.checkpoints.loading import Model, load
    from atbx.checkpoints.msgpack_reader import WeightFile, inspect, read_tree
    from atbx.checkpoints.msgpack_writer import write_tree
    from atbx.checkpoints.sources import Source, open_source
    from atbx.checkpoints.tokenizer import Text

_WHERE = {
    "Generation": "generation",
    "Lazy": "leaves",
    "Model": "loading",
    "Source": "sources",
    "Text": "tokenizer",
    "WeightFile": "msgpack_reader",
    "convert": "conversion",
    "export_safetensors": "export",
    "inspect": "msgpack_reader",
    "load": "loading",
    "open_source": "sources",
    "read_tree": "msgpack_reader",
    "release": "leaves",
    "write_tree": "msgpack_writer",
}

__all__ = [
    "Generation",
    "Lazy",
    "Model",
    "Source",
    "Text",
    "WeightFile",
    "check",
    "convert",
    "export_safetensors",
    "inspect",
    "load",
    "open_source",
    "read_tree",
    "release",
    "write_tree",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
