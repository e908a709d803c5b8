"""The names of the Qwen family's parameters in public checkpoints: those of the Llama block, all in published order."""

from __future__ import annotations

from atbx.models import llama_names
from atbx.models.name_map import Naming

HF = llama_names.HF
FLAX = llama_names.FLAX
GGUF = Naming(llama_names.gguf_names_in_halves, llama_names.is_gguf_table)
