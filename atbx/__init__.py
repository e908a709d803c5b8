"""atbx: a JAX-style functional inference runtime for transformer language models, for Ascend NPUs and CPUs.

Models are pure functions over parameter trees and explicit KV caches; see `jit`, `bind`, `generator`, `ops`.
Everything but the torch guard is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from atbx.torch_guard import import_torch, is_doctor

# The doctor says why torch cannot be imported, so it does without.
if not is_doctor():
    import_torch()

    from atbx.core.op import set_default_interpreter

    # Outside every context an op runs at once on the CPU backend, which is loaded when the first one does.
    set_default_interpreter(lambda: importlib.import_module("atbx.compile").run_interpreter())

_PUBLIC = {
    "Bucket": "atbx.core.buckets",
    "ladder": "atbx.core.buckets",
    "Abstract": "atbx.core.abstract",
    "errors": "atbx.core",
    "trees": "atbx.core",
    "scope": "atbx.core.staging",
    "bind": "atbx.compile",
    "jit": "atbx.compile",
    "eval_shape": "atbx.compile",
    "reference": "atbx.compile",
    "compare": "atbx.comparison",
    "define_op": "atbx.ops.define",
    "generator": "atbx.generate",
    "Generator": "atbx.generate",
    "Request": "atbx.schedule",
    "plan_memory": "atbx.memory",
    "Sampling": "atbx.sampling",
    "ops": "atbx",
    "models": "atbx",
    "kernels": "atbx",
    "checkpoints": "atbx",
}

__version__ = "0.1.0"
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'atbx' has no attribute {name!r}")
    if home in ("atbx", "atbx.core"):
        value = importlib.import_module(f"{home}.{name}")
    else:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from atbx import checkpoints as checkpoints
    from atbx import kernels as kernels
    from atbx import models as models
    from atbx import ops as ops
    from atbx.comparison import compare as compare
    from atbx.compile import bind as bind
    from atbx.compile import eval_shape as eval_shape
    from atbx.compile import jit as jit
    from atbx.compile import reference as reference
    from atbx.core import errors as errors
    from atbx.core import trees as trees
    from atbx.core.abstract import Abstract as Abstract
    from atbx.core.buckets import Bucket as Bucket
    from atbx.core.buckets import ladder as ladder
    from atbx.core.staging import scope as scope
    from atbx.generate import Generator as Generator
    from atbx.generate import generator as generator
    from atbx.memory import plan_memory as plan_memory
    from atbx.ops.define import define_op as define_op
    from atbx.sampling import Sampling as Sampling
    from atbx.schedule import Request as Request
