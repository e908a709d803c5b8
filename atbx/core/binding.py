"""Bindings: a parameter tree flattened once, and the store of what kernels made of it.

Casts, concatenations and packings are done once a binding, one parameter at a time, and shared by every variant that
wants the same; a step compares one token instead of hundreds of leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from atbx.core import trees
from atbx.core.abstract import Abstract
from atbx.core.backend import Preparation
from atbx.core.donation import refuse_donated
from atbx.core.errors import BindingError
from atbx.core.exact import exact_params
from atbx.core.interning import intern_signature
from atbx.core.program import Equation, Literal, Var

Release = Callable[[torch.Tensor], bool]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


class Binding:
    """Parameters bound for compiled use.

    tree:  the parameter tree, of torch tensors.
    dtype: cast floating parameters to it (lazily, where a kernel needs them); None keeps each as it is.
    """

    def __init__(
        self, tree: Any, *, dtype: torch.dtype | None = None, release: Release | None = None
    ) -> None:
        paths, leaves, self.treedef = trees.flatten_with_paths(tree)
        for path, leaf in zip(paths, leaves, strict=True):
            if not isinstance(leaf, torch.Tensor):
                raise BindingError("a parameter is no tensor", where=path, found=type(leaf).__name__)
            refuse_donated(leaf, path)
        if not leaves:
            raise BindingError("the parameter tree has no leaves")
        self.paths, self.leaves, self.dtype = tuple(paths), tuple(leaves), dtype
        self.abstracts = tuple(self._abstract(leaf) for leaf in leaves)
        self.versions = tuple(map(version_of, leaves))
        pairs = zip(self.abstracts, leaves, strict=True)
        described = tuple((a.shape, a.dtype, leaf.device.type) for a, leaf in pairs)
        self.signature = intern_signature((self.treedef, described), self.paths)
        self.addresses = {leaf.data_ptr(): path for path, leaf in zip(paths, leaves, strict=True)}
        self._release = release
        self._store: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def _abstract(self, leaf: torch.Tensor) -> Abstract:
        cast = self.dtype is not None and leaf.dtype.is_floating_point
        return Abstract(tuple(leaf.shape), self.dtype if cast and self.dtype else leaf.dtype)

    def is_current(self, tree: Any) -> bool:
        """Whether `tree` still holds exactly these tensors, none of them changed in place since."""
        leaves, treedef = trees.flatten(tree)
        return (
            len(leaves) == len(self.leaves)
            and all(a is b for a, b in zip(leaves, self.leaves, strict=True))
            and treedef == self.treedef
            and self.changed_leaf() is None
        )

    def changed_leaf(self) -> str | None:
        """Path of a parameter that was changed in place since it was bound."""
        for path, leaf, version in zip(self.paths, self.leaves, self.versions, strict=True):
            if version_of(leaf) != version:
                return path
        return None

    @property
    def prepared_bytes(self) -> int:
        """Bytes of everything that was made from the parameters and is kept."""
        sources = {leaf.data_ptr() for leaf in self.leaves}
        return sum(
            value.numel() * value.element_size()
            for value in self._store.values()
            if isinstance(value, torch.Tensor) and (value.is_mkldnn or value.data_ptr() not in sources)
        )

    def preparer(self, bound: Sequence[Var], prepared: Sequence[Equation]) -> Preparer:
        """What evaluates one program's prepare equations against this binding."""
        return Preparer(self, bound, prepared)

    def stored(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value under `key`, made on first use."""
        with self._lock, torch.no_grad():
            if key not in self._store:
                self._store[key] = make()
            return self._store[key]

    def finished(self, indices: set[int]) -> None:
        """Tell the system that the mapped pages behind these leaves are not needed for now."""
        if self._release is not None:
            for index in indices:
                self._release(self.leaves[index])


class Preparer:
    """Evaluates the part of a program that only parameters feed."""

    def __init__(self, binding: Binding, bound: Sequence[Var], prepared: Sequence[Equation]) -> None:
        self.binding = binding
        self._leaf = {var: index for index, var in enumerate(bound)}
        self._maker = {var: (e, i) for e in prepared for i, var in enumerate(e.outputs)}

    def key(self, var: Var) -> Hashable:
        """What identifies the value of `var` across programs over the same binding."""
        if var in self._leaf:
            return "leaf", self._leaf[var], var.abstract.dtype
        equation, index = self._maker[var]
        inputs = tuple(self.key(x) if isinstance(x, Var) else x for x in equation.inputs)
        return equation.op.name, exact_params(equation.params), inputs, index

    def _leaves_of(self, var: Var) -> set[int]:
        if var in self._leaf:
            return {self._leaf[var]}
        return set().union(*(self._leaves_of(x) for x in self._maker[var][0].input_vars()))

    def _compute(self, var: Var) -> torch.Tensor:
        """The value of `var`, not kept."""
        if var in self._leaf:
            index = self._leaf[var]
            leaf = self.binding.leaves[index]
            value = leaf.to(var.abstract.dtype)
            if value is not leaf:
                self.binding.finished({index})
            return value
        equation, place = self._maker[var]
        operands = [x.value if isinstance(x, Literal) else self._compute(x) for x in equation.inputs]
        result = equation.op.reference(*operands, **equation.params)
        return result[place] if isinstance(result, tuple) else result

    def value(self, var: Var) -> torch.Tensor:
        """The value of `var` as the program knows it, kept in the store."""

        def make() -> torch.Tensor:
            value = self._compute(var)
            if var not in self._leaf or value.dtype != self.binding.leaves[self._leaf[var]].dtype:
                self.binding.finished(self._leaves_of(var))
            return value

        return self.binding.stored(self.key(var), make)

    def placed(self, var: Var, device: torch.device) -> torch.Tensor:
        """The value of `var` on `device`, contiguous, kept in the store."""

        def make() -> torch.Tensor:
            value = self._compute(var).contiguous().to(device)
            self.binding.finished(self._leaves_of(var))
            return value

        return self.binding.stored(("placed", str(device), self.key(var)), make)

    def packed(self, var: Var, preparation: Preparation) -> Any:
        """The value of `var` packed by `preparation`, kept in the store."""

        def make() -> Any:
            if preparation.from_source and var in self._leaf:
                return preparation.pack(self.binding.leaves[self._leaf[var]], var.abstract)
            source = self._compute(var)
            value = preparation.pack(source, var.abstract)
            if value is not source or var not in self._leaf:
                self.binding.finished(self._leaves_of(var))
            return value

        return self.binding.stored(("packed", preparation.name, self.key(var)), make)


def bind(params: Any, *, dtype: torch.dtype | None = None, release: Release | None = None) -> Binding:
    """Bind a parameter tree: flatten it once, and let kernels keep what they pack of it.

    dtype casts floating parameters where they are used. `release` is called with a mapped parameter whose pages
    are no longer needed once it is packed.

    Raises:
        BindingError: a leaf is not a tensor, or there are none.
    """
    return Binding(params, dtype=dtype, release=release)
