"""Opening MODEL for a command: loaded to run, or described by abstract values where no weights are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from atbx.checkpoints.gguf_reader import MAGIC
from atbx.checkpoints.loading import cast, load
from atbx.checkpoints.sources import open_source
from atbx.checkpoints.tokenizer import Text
from atbx.core.backend import Backend
from atbx.core.trees import leaves
from atbx.generate import Generator, generator
from atbx.memory import MemoryNeeds
from atbx.models.registry import family_named


@dataclass(frozen=True, eq=False)
class Opened:
    """A model ready for a command. params: tensors, or `Abstract` leaves where it was opened to plan."""

    params: Any
    text: Text | None
    generator: Generator


def dtype_named(name: str | None) -> torch.dtype | None:
    """The torch dtype that --dtype names."""
    return None if name is None else getattr(torch, name)


def open_to_run(path: str, dtype: str | None, device: str | Backend = "cpu") -> Opened:
    """Load a model and make its generator."""
    wanted = dtype_named(dtype)
    # What is computed at load is computed in the wanted dtype at once. What is mapped is cast when it is bound, which
    # gives its pages back: loading it in the wanted dtype would keep a whole copy beside what kernels pack.
    model = load(path, dtype=wanted if _is_gguf(path) else None)
    made = generator(
        family_named(model.family, path).forward,
        model.config,
        text=model.text,
        eos=model.generation.eos,
        dtype=wanted,
        device=device,
    )
    return Opened(model.params, model.text, made)


def open_to_plan(
    path: str, dtype: str | None, device: str | Backend = "cpu", fallback: str | None = None
) -> Opened:
    """The same without reading weights: `params` are abstract, enough to plan and to explain."""
    source, wanted = open_source(path), dtype_named(dtype)
    text = source.text()
    made = generator(
        source.family.forward,
        source.config,
        text=text,
        eos=source.generation().eos,
        device=device,
        fallback=fallback,
    )
    return Opened(source.tree(lambda _, lazy: cast(lazy, wanted).abstract), text, made)


def memory_needs(opened: Opened, rows: int, tokens: int) -> MemoryNeeds:
    """Bytes for a run of `rows` rows of at most `tokens` tokens, at the sizes that the policy gives them."""
    engine = opened.generator.engine
    binding = engine.planning_binding(opened.params)
    batch, capacity = engine.policy.batch(rows), engine.policy.capacity(tokens)
    return MemoryNeeds(
        sum(leaf.nbytes for leaf in leaves(opened.params)),
        engine.pool(binding).nbytes(batch, capacity, engine.policy.chunk),
        engine.activation_bytes(binding),
    )


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run the block with so many CPU threads; None leaves torch's choice."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_gguf(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # a folder, or something that `load` names with its reason
