"""`atbx inspect`: what a model file holds, without reading a weight: tree, form, configuration, metadata, memory.

A msgpack tree by others that does not say which model it belongs to is shown all the same, as a tree.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atbx.checkpoints import msgpack_reader
from atbx.checkpoints.config_metadata import config_to_metadata
from atbx.checkpoints.gguf_reader import GgufFile
from atbx.checkpoints.recognise import recognise
from atbx.checkpoints.sources import Source, open_source
from atbx.commands.opening import dtype_named
from atbx.commands.output import dtype_name, fold, print_json, shape_in_words, size_in_words
from atbx.core.errors import AtbxError
from atbx.memory import MemoryNeeds, plan_memory

_OWN_KEYS = ("tokenizer", "checksums", "layouts", "nodes", "config", "generation")
"""Metadata of a converted file that is shown elsewhere, or is too long to show."""


@dataclass(frozen=True)
class Leaf:
    """A parameter: tree path, shape, dtype, bytes."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def run(args: argparse.Namespace) -> None:
    """Show a model."""
    path = Path(args.model)
    bare = _tree_without_model(path)
    data = _of_tree(path, bare) if bare is not None else _of_model(open_source(path), args)
    if args.json:
        print_json(data)
    else:
        _print(data)


def _tree_without_model(path: Path) -> msgpack_reader.WeightFile | None:
    """A msgpack tree that does not say which model it belongs to; None for anything else."""
    if (path / "config.json").exists():
        return None
    if path.is_file():
        with open(path, "rb") as file:
            form = recognise(file.read(1024), path.stat().st_size)
        if form not in (None, "a JSON text"):
            return None  # `open_source` reads it, or says what it is
    file_ = msgpack_reader.read_tree(path)
    return None if file_.metadata is not None and "config" in file_.metadata else file_


def _of_tree(path: Path, file: msgpack_reader.WeightFile) -> dict[str, Any]:
    entries = [Leaf(e.path, e.shape, e.dtype, e.nbytes) for e in msgpack_reader.inspect(path)]
    return {
        "path": str(file.path),
        "form": file.form,
        "family": None,
        "config": None,
        "generation": None,
        "tokenizer": None,
        "metadata": _own_metadata(file.metadata),
        "memory": None,
        **_described(entries),
    }


def _of_model(source: Source, args: argparse.Namespace) -> dict[str, Any]:
    entries = [
        Leaf(path, lazy.abstract.shape, lazy.abstract.dtype, lazy.abstract.nbytes)
        for path, lazy in source.leaves.items()
    ]
    text = source.text()
    tokenizer = None
    if text is not None:
        tokenizer = {
            "vocab_size": text.vocab_size,
            "eos": list(text.eos),
            "chat_template": text.has_chat_template,
        }
    return {
        "path": str(source.path),
        "form": source.form,
        "family": source.family.name,
        "config": config_to_metadata(source.config),
        "generation": source.generation().to_metadata(),
        "tokenizer": tokenizer,
        "metadata": _metadata(source),
        "memory": _memory(source, args),
        **_described(entries),
    }


def _described(entries: Sequence[Leaf]) -> dict[str, Any]:
    return {
        "tensors": len(entries),
        "parameters": sum(torch.Size(leaf.shape).numel() for leaf in entries),
        "bytes": sum(leaf.nbytes for leaf in entries),
        "leaves": [
            {
                "path": leaf.path,
                "shape": [int(size) for size in leaf.shape],
                "dtype": dtype_name(leaf.dtype),
                "bytes": leaf.nbytes,
            }
            for leaf in entries
        ],
    }


def _metadata(source: Source) -> dict[str, Any]:
    """What the file says besides; lists (vocabularies are long) by their length."""
    if source.form == "gguf":
        return {key: _brief(value) for key, value in GgufFile(source.path).metadata.items()}
    if source.form == "atbx":
        return _own_metadata(msgpack_reader.read_tree(source.path).metadata)
    return {}


def _own_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: _brief(value) for key, value in (metadata or {}).items() if key not in _OWN_KEYS}


def _brief(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return f"{len(value)} values"
    if isinstance(value, str) and len(value) > 200:
        return f"{value[:200]}... ({len(value)} characters)"
    return value


def _memory(source: Source, args: argparse.Namespace) -> dict[str, Any]:
    dtype = dtype_named(args.dtype) or _matrix_dtype(source)
    capacity = args.capacity or source.config.context
    needs: MemoryNeeds = plan_memory(
        source.config,
        args.batch,
        capacity,
        dtype,
        forward=source.family.forward,
        abstract=source.family.abstract,
    )
    return {
        "batch": args.batch,
        "capacity": capacity,
        "dtype": dtype_name(dtype),
        "weights": needs.weights,
        "cache": needs.cache,
        "activation": needs.activation,
        "total": needs.total,
    }


def _matrix_dtype(source: Source) -> torch.dtype:
    """The dtype of the weights' matrices, in which the model runs unless told otherwise."""
    for lazy in source.leaves.values():
        if lazy.abstract.dtype.is_floating_point and len(lazy.abstract.shape) > 1:
            return lazy.abstract.dtype
    raise AtbxError("the weights hold no floating-point matrix", where=str(source.path))


def _print(data: dict[str, Any]) -> None:
    what = f"{data['family']} model" if data["family"] else "weight tree without a model's configuration"
    print(f"{data['path']}: {what} ({data['form']})")
    print(f"{data['tensors']} tensors, {data['parameters']:,} parameters, {size_in_words(data['bytes'])}")
    for title in ("config", "generation", "tokenizer", "metadata"):
        if data[title]:
            print(f"{title}:")
            for key, value in data[title].items():
                print(f"  {key} = {_one_line(value)}")
    print("tree:")
    for scope, times, rows in fold(_by_layer(data["leaves"])):
        if scope:
            print(f"  {scope}{f' ({times} alike)' if times > 1 else ''}")
        for name, shape, dtype, nbytes in rows:
            print(f"  {'  ' if scope else ''}{name:<20} {shape:<16} {dtype:<10} {size_in_words(nbytes)}")
    if data["memory"]:
        plan = data["memory"]
        parts = ", ".join(
            f"{name} {size_in_words(plan[name])}" for name in ("weights", "cache", "activation")
        )
        run_ = (
            f"{plan['batch']} row{'s' * (plan['batch'] > 1)} of {plan['capacity']} tokens in {plan['dtype']}"
        )
        print(f"memory for {run_}: {size_in_words(plan['total'])} ({parts})")


def _one_line(value: Any) -> str:
    return str(value).replace("\n", "\\n")


def _by_layer(leaves: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str, str, int]]]]:
    """Leaves by their numbered ancestor (layers/3), those outside one under ''; neighbours together."""
    groups: list[tuple[str, list[tuple[str, str, str, int]]]] = []
    for leaf in leaves:
        keys = leaf["path"].split("/")
        at = next((i for i, key in enumerate(keys[:-1]) if key.isdigit()), None)
        scope, name = (
            ("", leaf["path"]) if at is None else ("/".join(keys[: at + 1]), "/".join(keys[at + 1 :]))
        )
        row = (name, shape_in_words(leaf["shape"]), leaf["dtype"], leaf["bytes"])
        if groups and groups[-1][0] == scope:
            groups[-1][1].append(row)
        else:
            groups.append((scope, [row]))
    return groups
