"""Load a model: weights, configuration, tokenizer and generation defaults, from any form that is read."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from atbx.checkpoints.generation import Generation
from atbx.checkpoints.leaves import Lazy, release
from atbx.checkpoints.sources import Source, open_source
from atbx.checkpoints.tokenizer import Text
from atbx.core.abstract import Abstract
from atbx.core.errors import OptionError


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A loaded model.

    config: the frozen configuration of its family.
    params: the parameter tree; views of the mapped file where the source's values can be used as they stand.
    family: the name of its family.
    form:   of the source: "atbx", "gguf", "safetensors" or "flax".
    source: the file or folder it was loaded from.

    `text` and `generation` are made when they are first asked for.
    """

    config: Any
    params: Any
    family: str
    form: str
    source: Path
    _text: Callable[[], Text | None] = field(repr=False)
    _generation: Callable[[], Generation] = field(repr=False)

    @functools.cached_property
    def text(self) -> Text | None:
        """The tokenizer with its chat templates; None where the source has none.

        Raises:
            CheckpointError, UnsupportedError: it is malformed, or of a kind that is not read.
        """
        return self._text()

    @functools.cached_property
    def generation(self) -> Generation:
        """The end tokens and the publisher's sampling defaults.

        Raises:
            CheckpointError, UnsupportedError: as `text`, whose end tokens it includes.
        """
        return self._generation()

    def __repr__(self) -> str:
        return f"Model({self.family}, {self.config}, from {self.source})"


def load(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, progress: bool = True) -> Model:
    """Load a converted msgpack file, a GGUF file or a Hugging Face folder.

    Converted files and safetensors are mapped, not copied. Quantised GGUF tensors become float32 (or `dtype`) one
    after the other, so that one tensor is in memory twice at most.

    dtype:    cast floating-point parameters to this dtype; None keeps the source's.
    progress: show a bar on stderr where that is a terminal and values have to be computed.

    Raises:
        CheckpointError: it is no model, or is damaged; names file, offset or key.
        UnsupportedError: a family, type or option that is not supported; names it.
        TreeError: parameters are missing, unexpected or of another shape; lists every one.
        OptionError: `dtype` is no floating-point dtype.
    """
    check_dtype(dtype)
    source = open_source(path)
    return Model(
        config=source.config,
        params=_materialised(source, dtype, progress),
        family=source.family.name,
        form=source.form,
        source=source.path,
        _text=source.text,
        _generation=source.generation,
    )


def _materialised(source: Source, dtype: torch.dtype | None, progress: bool) -> Any:
    computes = source.form == "gguf" or any(
        _cast_dtype(leaf, dtype) != leaf.abstract.dtype for leaf in source.leaves.values()
    )
    with tqdm(
        total=sum(leaf.abstract.nbytes for leaf in source.leaves.values()),
        desc=f"Loading {source.path.name}",
        unit="B",
        unit_scale=True,
        disable=None if progress and computes else True,  # None: only where stderr is a terminal
    ) as bar:

        def leaf(path: str, lazy: Lazy) -> torch.Tensor:
            tensor = cast(lazy, dtype).load()
            bar.update(lazy.abstract.nbytes)
            return tensor

        return source.tree(leaf)


def check_dtype(dtype: object) -> None:
    """Raise `OptionError` for anything but None and a floating-point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(
            "not a dtype for weights", where="dtype", expected="a floating-point torch.dtype", found=dtype
        )


def cast(lazy: Lazy, dtype: torch.dtype | None) -> Lazy:
    """The leaf in another floating-point dtype; itself where nothing changes."""
    wanted = _cast_dtype(lazy, dtype)
    if wanted == lazy.abstract.dtype:
        return lazy

    def loaded() -> torch.Tensor:
        tensor = lazy.load()
        result = tensor.to(wanted)
        release(tensor)
        return result

    return Lazy(Abstract(lazy.abstract.shape, wanted), loaded)


def _cast_dtype(lazy: Lazy, dtype: torch.dtype | None) -> torch.dtype:
    own = lazy.abstract.dtype
    return own if dtype is None or not own.is_floating_point else dtype
