"""Compare a tree of parameters with the abstract tree a model expects: one report with every mismatch, by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from atbx.core.abstract import Abstract
from atbx.core.errors import OptionError, TreeError

DTypeRule = Literal["family", "same", "any"]

_LAYOUT_WORDS = {"out_in": "[out, in]", "in_out": "[in, out]"}
_WRAPPERS = ("params", "model", "state", "variables")


def check(
    params: Any, abstract: Any, *, metadata: Mapping[str, Any] | None = None, dtype: DTypeRule = "family"
) -> None:
    """Raise one error that lists every way in which `params` differs from `abstract`; return if in none.

    params:   the tree of tensors.
    abstract: the expected tree of `Abstract` leaves.
    metadata: of the file; its `layouts` ({path: "out_in"}) are compared too, because a square matrix hides a
              transposition from its shape.
    dtype:    "family": floating point for floating point, integers for integers; "same": equal; "any".

    Raises:
        TreeError: `mismatches` has one line each: missing, unexpected, kind of node, shape, dtype, layout.
        OptionError: an unknown `dtype`.
    """
    if dtype not in ("family", "same", "any"):
        raise OptionError(
            "unknown dtype rule", where="check(dtype=)", expected="family, same or any", found=repr(dtype)
        )
    layouts = (metadata or {}).get("layouts", {})
    comparison = _Comparison(layouts if isinstance(layouts, Mapping) else {}, dtype)
    found: list[str] = []
    path: tuple[Any, ...] = ()
    # A level too many or too few is one mistake: named once, then the trees are compared below it.
    while (level := _misplaced_level(params, abstract)) is not None:
        side, name = level
        if side == "extra":
            found.append(f"{_join(path)}: there is an extra level {name!r}: pass tree[{name!r}]")
            params, path = params[name], (*path, name)
        else:
            found.append(f"{_join(path)}: the level {name!r} is missing: pass {{{name!r}: tree}}")
            abstract = abstract[name]
    found += comparison.nodes(params, abstract, path)
    if found:
        count = f"{len(found)} mismatch" + ("es" if len(found) > 1 else "")
        raise TreeError(f"the parameters do not fit the model ({count}):", mismatches=tuple(found))


def _misplaced_level(params: Any, abstract: Any) -> tuple[str, Any] | None:
    """("extra" or "missing", its key) where one tree is wrapped once more than the other; None where neither is."""
    for side, outer, inner in (("extra", params, abstract), ("missing", abstract, params)):
        if not isinstance(outer, Mapping) or not isinstance(inner, Mapping) or not inner:
            continue
        for name, below in outer.items():
            # Most keys must agree one level down; a whole second wrapper counts too ({"params": {"params": ...}}).
            fits = isinstance(below, Mapping) and (
                len(set(below) & set(inner)) * 2 > len(inner) or (name in below and name in _WRAPPERS)
            )
            if name not in inner and fits and (len(outer) == 1 or name in _WRAPPERS):
                return side, name
    return None


def _join(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path)) or "(root)"


class _Comparison:
    """Walks two trees side by side."""

    def __init__(self, layouts: Mapping[str, Any], dtype: DTypeRule) -> None:
        self.layouts, self.dtype = layouts, dtype

    def nodes(self, found: Any, expected: Any, path: tuple[Any, ...]) -> Iterator[str]:
        """One line per mismatch at or below `path`."""
        where = _join(path)
        kind, expected_kind = _kind(found), _kind(expected)
        if expected_kind == "leaf" and kind == "leaf":
            yield from self._leaves(found, expected, where)
        elif expected_kind == "leaf":
            yield f"{where}: expected {_show(expected)}, found a {kind} of {len(_children(found))}"
        elif kind == "leaf":
            yield f"{where}: expected a {expected_kind} of {len(_children(expected))}, found {_show(found)}"
        else:
            yield from self._inner(found, expected, path, where)

    def _inner(self, found: Any, expected: Any, path: tuple[Any, ...], where: str) -> Iterator[str]:
        kind, expected_kind = _kind(found), _kind(expected)
        has, wants = _children(found), _children(expected)
        if kind != expected_kind:
            hint = ""
            if (
                expected_kind in ("list", "tuple")
                and kind == "dict"
                and set(map(str, has)) == set(map(str, wants))
            ):
                hint = " with the same keys: read it with abstract=, which turns such a dict into a list"
            yield f"{where}: expected a {expected_kind}, found a {kind}{hint}"
            has = {str(k): v for k, v in has.items()}
            wants = {str(k): v for k, v in wants.items()}
        if expected_kind in ("list", "tuple") and len(has) != len(wants):
            yield f"{where}: expected {len(wants)} entries, found {len(has)}"
        for key in wants:
            if key in has:
                yield from self.nodes(has[key], wants[key], (*path, key))
                continue
            twin = next((k for k in has if str(k) == str(key)), None)
            note = f" (there is the key {twin!r} of type {type(twin).__name__})" if twin is not None else ""
            for below, leaf in _leaves_below(wants[key], (*path, key)):
                yield f"{below}: missing, expected {_show(leaf)}{note}"
        for key in has:
            if key not in wants:
                for below, leaf in _leaves_below(has[key], (*path, key)):
                    yield f"{below}: unexpected, found {_show(leaf)}"

    def _leaves(self, found: Any, expected: Any, where: str) -> Iterator[str]:
        if not isinstance(found, (torch.Tensor, Abstract)):
            if found != expected or type(found) is not type(expected):
                yield f"{where}: expected {_show(expected)}, found {_show(found)}"
            return
        if not isinstance(expected, (torch.Tensor, Abstract)):
            yield f"{where}: expected {_show(expected)}, found {_show(found)}"
            return
        shape, wanted = tuple(found.shape), tuple(int(n) for n in expected.shape)
        stored, layout = self.layouts.get(where), getattr(expected, "layout", None)
        if shape != wanted:
            yield f"{where}: expected shape {_sizes(wanted)}, found {_sizes(shape)}{_why(shape, wanted, layout)}"
        if self.dtype == "same" and found.dtype != expected.dtype:
            yield f"{where}: expected dtype {_name(expected.dtype)}, found {_name(found.dtype)}"
        elif self.dtype == "family" and _family(found.dtype) != _family(expected.dtype):
            family = _family(expected.dtype)
            yield f"{where}: expected {family} (like {_name(expected.dtype)}), found {_name(found.dtype)}"
        if stored is not None and layout is not None and stored != layout:
            transposed = (
                f": it is stored {_LAYOUT_WORDS[stored]}, transpose it" if stored in _LAYOUT_WORDS else ""
            )
            yield f"{where}: expected layout {layout}, the file's metadata says {stored}{transposed}"


def _why(shape: tuple[int, ...], wanted: tuple[int, ...], layout: str | None) -> str:
    """A guess at what makes two shapes differ."""
    if len(shape) >= 2 and shape == (*wanted[:-2], *wanted[:-3:-1]):
        words = f"; the model wants {layout} {_LAYOUT_WORDS[layout]}" if layout in _LAYOUT_WORDS else ""
        return f" (transposed{words})"
    if len(shape) == len(wanted) + 1 and shape[1:] == wanted:
        return f" (an extra first axis of {shape[0]}: layers stacked by a scan?)"
    if len(shape) == len(wanted) and shape[1:] == wanted[1:]:
        return f" (only the first axis differs: {shape[0] - wanted[0]:+d} rows)"
    count, expected = torch.Size(shape).numel(), torch.Size(wanted).numel()
    return " (the same number of elements in another shape)" if count == expected else ""


def _kind(node: Any) -> str:
    if isinstance(node, Mapping):
        return "dict"
    if isinstance(node, tuple):
        return "tuple"
    if isinstance(node, list):
        return "list"
    if dataclasses.is_dataclass(node) and not isinstance(node, (type, Abstract)):
        return type(node).__name__
    return "leaf"


def _children(node: Any) -> dict[Any, Any]:
    if isinstance(node, Mapping):
        return dict(node)
    if isinstance(node, (list, tuple)):
        return dict(enumerate(node))
    # Static fields belong to the structure, not to the parameters.
    return {f.name: getattr(node, f.name) for f in dataclasses.fields(node) if not f.metadata.get("static")}


def _leaves_below(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    if _kind(node) == "leaf" or not _children(node):
        yield "/".join(map(str, path)), node
        return
    for key, value in _children(node).items():
        yield from _leaves_below(value, (*path, key))


def _show(leaf: Any) -> str:
    if isinstance(leaf, (torch.Tensor, Abstract)):
        return f"{_name(leaf.dtype)} {_sizes(tuple(leaf.shape))}"
    return f"an empty {_kind(leaf)}" if _kind(leaf) != "leaf" else repr(leaf)[:80]


def _sizes(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(int(n)) for n in shape) + "]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _family(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex numbers"
    if dtype.is_floating_point:
        return "floating point"
    return "booleans" if dtype == torch.bool else "integers"
