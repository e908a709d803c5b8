"""Convert a model of any form that is read into one msgpack file: mapped at load, self-describing, checksummed.

Tensors stream: each is read, dequantised or transposed, written and dropped before the next, so converting takes the
memory of the largest tensor and not of the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from atbx.checkpoints.config_metadata import config_to_metadata
from atbx.checkpoints.loading import cast, check_dtype
from atbx.checkpoints.msgpack_writer import write_tree
from atbx.checkpoints.sources import Source, open_source
from atbx.core import trees
from atbx.core.errors import CheckpointError


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    progress: bool = True,
) -> None:
    """Write the model at `source` as a msgpack file that `load` maps.

    The source's precision is kept (what is quantised becomes float32) unless `dtype` says otherwise. Beside the
    weights the file keeps configuration, layouts, source, tokenizer and generation defaults.

    source:      a GGUF file, a Hugging Face folder, or a converted file.
    destination: the file to write; one that exists is replaced when the new one is complete.
    dtype:       cast floating-point parameters to this dtype.
    shard_bytes: split into files of at most about this size.
    progress:    show a bar on stderr where that is a terminal.

    Raises:
        CheckpointError: the source is damaged, the destination cannot be written, or is a file of the source.
        UnsupportedError: a family, type or option that is not supported; names it.
        TreeError: parameters are missing, unexpected or of another shape; lists every one.
    """
    check_dtype(dtype)
    _refuse_overwriting(Path(source), Path(destination))
    opened = open_source(source)
    tree = opened.tree(lambda path, lazy: cast(lazy, dtype))
    write_tree(destination, tree, metadata=metadata_of(opened), shard_bytes=shard_bytes, progress=progress)


def metadata_of(source: Source) -> dict[str, Any]:
    """What a converted file keeps beside the weights."""
    text = source.text()
    return {
        "family": source.family.name,
        "config": config_to_metadata(source.config),
        "layouts": layouts_of(source.family.abstract(source.config)),
        "source": {"name": source.path.name, "form": source.form},
        "tokenizer": None if text is None else text.to_metadata(),
        "generation": source.generation().to_metadata(),
    }


def layouts_of(abstract: Any) -> dict[str, str]:
    """Tree path to layout, for the leaves of an abstract tree that have one."""
    paths, leaves, _ = trees.flatten_with_paths(abstract)
    return {path: leaf.layout for path, leaf in zip(paths, leaves, strict=True) if leaf.layout is not None}


def _refuse_overwriting(source: Path, destination: Path) -> None:
    target = Path(os.path.realpath(destination))
    for file in _files(source):
        if Path(os.path.realpath(file)) == target:
            raise CheckpointError(
                "the destination is the source itself, or a file of it",
                path=destination,
                hint="Give another name: the source stays as it is",
            )


def _files(source: Path) -> Iterator[Path]:
    yield source
    if source.is_dir():
        yield from source.iterdir()
