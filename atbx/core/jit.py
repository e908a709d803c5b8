"""`jit`: a pure function compiled per static shape, with padded buckets, donation, and a cache that explains itself.

A call becomes a key; a known key runs its executable, an unknown one is staged, fused and lowered first. Everything
that decides the key happens in `read_arguments`, which planning and warm-up share with calls.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from atbx.core.abstract import tag_of
from atbx.core.arena import Arena, StagedArena
from atbx.core.backend import Backend, Choice
from atbx.core.binding import Binding, Preparer
from atbx.core.buckets import Bucket
from atbx.core.call import Arguments, read_arguments
from atbx.core.call_signature import Signature
from atbx.core.donation import is_donated
from atbx.core.errors import BucketError, DonationError, OptionError, StagingError, UnsupportedError
from atbx.core.executable import Executable, Lowered, lower
from atbx.core.memory import storage_roots
from atbx.core.op import has_interpreter, interpreter
from atbx.core.program import Program, Var
from atbx.core.rewrite import Applied, drop_dead, fuse, share_common
from atbx.core.staging import Staged, Trace
from atbx.core.trees import TreeDef, flatten_with_paths, unflatten
from atbx.core.variants import CacheInfo, Miss, Variant, VariantCache, describe_key

NUMERICS = ("fast",)
FALLBACKS = ("report", "error")


@dataclass(frozen=True)
class OutputLeaf:
    """How one leaf of the result is made: a value, a number, or an arena (`origin` when updated in place)."""

    path: str
    count: int
    arena_treedef: TreeDef | None = None
    origin: int | None = None
    cuts: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Outputs:
    """Structure of a result and how each leaf is made."""

    treedef: TreeDef
    leaves: tuple[OutputLeaf, ...]


@dataclass(frozen=True)
class Planned:
    """A variant that a workload needs: its name, and whether it is compiled already."""

    name: str
    compiled: bool


@dataclass(frozen=True)
class Explanation:
    """What a call would run and why: variant, hit or miss (with the nearest variant), fusions and kernels."""

    name: str
    hit: bool
    miss: Miss | None
    variant: Variant

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Kernel, reason and refusals of each equation."""
        return self.variant.choices

    def __str__(self) -> str:
        lines = [f"variant {self.name}", "cached" if self.hit else f"not cached: {self.miss}"]
        for choice in self.choices:
            cost = choice.equation.cost()
            where = choice.equation.scope or "-"
            lines.append(
                f"  {where:<14} {choice.equation.op.name:<22} {choice.kernel.name:<28} "
                f"{choice.kernel.tier:<9} {cost.flops / 1e6:10.2f} MFLOP {cost.bytes / 1e6:9.2f} MB  {choice.why}"
            )
            lines += [f"  {'':<14} refused {r.kernel}: {r.reason}" for r in choice.refused]
        for applied in self.variant.fusions:
            if applied.refused:
                lines.append(f"  {applied.scope or '-':<14} fusion {applied.rule} refused: {applied.refused}")
        lines += [f"  copy inserted: {note}" for note in self.variant.lowered.copies]
        return "\n".join(lines)


class Jit:
    """A compiled function. Made by `jit`; call it like the function it wraps."""

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
        buckets: Mapping[str, Bucket] | None = None,
        numerics: str = "fast",
        fallback: str = "report",
        capacity: int = 256,
        host_results: bool = False,
    ) -> None:
        if numerics not in NUMERICS:
            raise UnsupportedError(
                "this numerics mode does not exist in this version",
                where="numerics",
                expected=NUMERICS,
                found=numerics,
            )
        if fallback not in FALLBACKS:
            raise UnsupportedError("unknown fallback", where="fallback", expected=FALLBACKS, found=fallback)
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise OptionError(
                "a variant cache holds at least one",
                where="capacity",
                expected="1 or more",
                found=repr(capacity),
            )
        functools.update_wrapper(self, function)
        self._function = function
        self._name = getattr(function, "__name__", repr(function))
        self.backend = backend
        mode = (("backend", backend.name), ("numerics", numerics), ("fallback", fallback))
        self._fallback = fallback
        self._host_results = host_results
        self._signature = Signature.of(function, tuple(static), tuple(donate), dict(buckets or {}), mode)
        self.variants = VariantCache(capacity)
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if has_interpreter():
            # Inside another staging (or shaping, or a reference run) a compiled function is just its function.
            return self._function(*args, **kwargs)
        call = read_arguments(self._signature, args, kwargs)
        if call.abstract_path is not None:
            raise StagingError(
                f"{self._name} was called with an Abstract, which has no value to compute with",
                where=call.abstract_path,
                hint="Use stage, plan, warm or explain for a call without values",
            )
        variant = self._find(call)
        executable = self._executable(variant, call.binding)
        return self._run(call, variant, executable)

    def _find(self, call: Arguments) -> Variant:
        with self._lock:
            variant = self.variants.get(call.key)
            if variant is None:
                variant = self._compile_missing(call)
            return variant

    def _compile_missing(self, call: Arguments) -> Variant:
        self.variants.refuse_if_frozen(call.key, call.paths, self._name)
        call.refuse_other_devices((self.backend.device.type, *self.backend.accepts))
        variant = self._compile(call)
        self.variants.put(variant)
        return variant

    def _executable(self, variant: Variant, binding: Binding | None) -> Executable:
        with self._lock:
            executable = variant.unbound if binding is None else variant.executables.get(binding)
            if executable is None:
                if binding is None:
                    executable = self._make_executable(variant.lowered, None)
                    variant.unbound = executable
                else:
                    preparer = binding.preparer(variant.lowered.bound, variant.lowered.prepared)
                    executable = self._make_executable(variant.lowered, preparer)
                    variant.executables[binding] = executable
            return executable

    def _make_executable(self, lowered: Lowered, preparer: Preparer | None) -> Any:
        if self.backend.executable is not None:
            return self.backend.executable(lowered, preparer)
        return Executable(lowered, preparer, self.backend.device)

    def _run(self, call: Arguments, variant: Variant, executable: Executable) -> Any:
        # The host plans check bounds first: a refused step has changed nothing and donated nothing.
        slots = executable.begin(call.values)
        donated = call.take_donated(self._name)
        try:
            values = executable.finish(slots)
        except BaseException:
            call.interrupt(donated)
            raise
        return self._assemble(call, variant.outputs, values)

    def _assemble(self, call: Arguments, outputs: Outputs, values: list[Any]) -> Any:
        leaves: list[Any] = []
        position = 0
        for leaf in outputs.leaves:
            if leaf.arena_treedef is None:
                value = values[position]
                if is_donated(value):
                    # Updated in place: the buffer lives on under a new object, the old one stays marked.
                    value = value.detach()
                for axis, tag in leaf.cuts:
                    real = call.sizes[tag]
                    if real != value.shape[axis]:
                        value = value.narrow(axis, 0, real)
                leaves.append(value)
            elif leaf.origin is not None:
                leaves.append(call.arenas[leaf.origin].arena.value())
            else:
                tree = unflatten(leaf.arena_treedef, values[position : position + leaf.count])
                leaves.append(Arena(tree).value())
            position += leaf.count
        return unflatten(outputs.treedef, leaves)

    def _stage(self, call: Arguments) -> tuple[Program, Any]:
        trace = Trace()
        inputs = [trace.input(a, p) for a, p in zip(call.abstracts, call.input_paths, strict=True)]
        bound = [trace.input(a, f"{call.binding_name}/{p}") for a, p in call.bound_leaves()]
        args = call.rebuild(inputs, bound)
        with interpreter(trace):
            result = self._signature.call_function(args)
        paths, leaves, treedef = flatten_with_paths(result)
        flat: list[Any] = []
        flat_paths: list[str] = []
        described: list[Any] = []
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, StagedArena):
                inner_paths, inner, inner_def = flatten_with_paths(leaf.tree)
                flat += inner
                flat_paths += [f"{path}/{p}" for p in inner_paths]
                described.append((path, leaf, inner_def, len(inner)))
            else:
                flat.append(leaf)
                flat_paths.append(path)
                described.append((path, leaf, None, 1))
        program = trace.finish([*inputs, *bound], flat, flat_paths)
        return program, (treedef, described)

    def _outputs(self, call: Arguments, program: Program, described: Any) -> Outputs:
        treedef, leaves = described
        roots = storage_roots(program)
        arena_inputs = call.arena_inputs(program.inputs)
        found: list[OutputLeaf] = []
        position = 0
        for path, leaf, arena_def, count in leaves:
            atoms = program.outputs[position : position + count]
            position += count
            if arena_def is None:
                cuts = self._cuts(path, leaf) if isinstance(leaf, Staged) else ()
                found.append(OutputLeaf(path, 1, cuts=cuts))
                continue
            origin = leaf.origin
            in_place = call.is_donated_arena(origin) and all(
                isinstance(a, Var) and roots.get(a, a) is v
                for a, v in zip(atoms, arena_inputs[origin], strict=True)
            )
            found.append(OutputLeaf(path, count, arena_def, origin if in_place else None))
        return Outputs(treedef, tuple(found))

    def _cuts(self, path: str, leaf: Staged) -> tuple[tuple[int, str], ...]:
        cuts = []
        for axis, size in enumerate(leaf.shape):
            tag = tag_of(size)
            if tag is None:
                continue
            if tag not in self._signature.buckets:
                raise BucketError(
                    f"axis {axis} of output {path or 'result'} merges bucketed axes ({tag}), so it cannot be cut",
                    hint="Reshape it back to one axis a bucket before returning it",
                )
            cuts.append((axis, tag))
        return tuple(cuts)

    def _compile(self, call: Arguments) -> Variant:
        start = perf_counter()
        program, described = self._stage(call)
        self._refuse_useless_donation(call, program)
        bound = program.inputs[len(call.abstracts) :]
        fused, fusions = self._fuse(program, bound)
        owned = [fused.inputs[i] for i in call.donated_indices]
        lowered = lower(fused, self.backend, bound, owned, self._fallback, call.binding is not None)
        lowered = replace(
            lowered,
            host=frozenset(fused.inputs[i] for i in call.host_indices),
            fixed=frozenset(v for inputs in call.arena_inputs(fused.inputs) for v in inputs),
            host_results=self._host_results,
        )
        # From the lowered program: only there it shows which results are updated in place and which are copies.
        outputs = self._outputs(call, lowered.program, described)
        return Variant(
            call.key,
            call.paths,
            program,
            fused,
            fusions,
            lowered,
            perf_counter() - start,
            outputs,
        )

    def _refuse_useless_donation(self, call: Arguments, program: Program) -> None:
        """A donated argument of which no leaf is updated would be destroyed for nothing."""
        roots = storage_roots(program)
        operands = [e.inputs[i] for e in program.equations for i, _ in e.op.updates]
        updated = {roots.get(v, v) for v in operands if isinstance(v, Var)}
        for name in self._signature.donate:
            indices = [i for i in call.donated_indices if call.input_paths[i].split("/")[0] == name]
            if indices and not any(program.inputs[i] in updated for i in indices):
                raise DonationError(
                    f"argument {name!r} is donated, but {self._name} updates no leaf of it",
                    where=f"donate={self._signature.donate}",
                    hint="Donate only what the function updates (a KV cache, a table of counts)",
                )

    def stage(self, *args: Any, fused: bool = False, **kwargs: Any) -> Program:
        """The program of a call, as the user wrote it, or after fusion. Arguments may be Abstract."""
        call = read_arguments(self._signature, args, kwargs)
        program, _ = self._stage(call)
        if not fused:
            return program
        bound = program.inputs[len(call.abstracts) :]
        return self._fuse(program, bound)[0]

    def _fuse(self, program: Program, bound: Sequence[Var]) -> tuple[Program, tuple[Applied, ...]]:
        """The program after fusion; what rules bring in once a layer (a table, say) is shared like anything else."""
        fused, applied = fuse(drop_dead(share_common(program)), self.backend.rules, bound)
        return drop_dead(share_common(fused)), applied

    def plan(self, workload: Iterable[Sequence[Any]]) -> tuple[Planned, ...]:
        """The distinct variants that calls with these argument tuples need; nothing is compiled.

        Arguments may be tensors or Abstract values.
        """
        found: dict[Any, Planned] = {}
        for args in workload:
            call = read_arguments(self._signature, tuple(args), {})
            if call.key not in found:
                found[call.key] = Planned(describe_key(call.key, call.paths), call.key in self.variants)
        return tuple(found.values())

    def warm(self, workload: Iterable[Sequence[Any]]) -> int:
        """Compile what calls with these argument tuples need, and pack the parameters they bind.

        The largest goes first: captured graphs share one memory pool, which the largest then sizes.
        Returns how many variants were compiled.
        """
        compiled = 0
        calls = [read_arguments(self._signature, tuple(args), {}) for args in workload]
        for call in sorted(calls, key=lambda call: -sum(a.numel for a in call.abstracts)):
            with self._lock:
                variant = self.variants.peek(call.key)
                if variant is None:
                    variant = self._compile_missing(call)
                    compiled += 1
            self._executable(variant, call.binding)
        return compiled

    def freeze(self) -> None:
        """From now on a miss raises FrozenCacheError instead of compiling."""
        self.variants.frozen = True

    def unfreeze(self) -> None:
        """Let misses compile again."""
        self.variants.frozen = False

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Which variant a call would use, why it is a hit or a miss, and the kernel of every equation.

        Nothing is run, and nothing enters the cache. Arguments may be Abstract.
        """
        call = read_arguments(self._signature, args, kwargs)
        with self._lock:
            variant = self.variants.peek(call.key)
            miss = None if variant is not None else self.variants.explain_miss(call.key, call.paths)
            hit = variant is not None
            if variant is None:
                variant = self._compile(call)
        return Explanation(describe_key(call.key, call.paths), hit, miss, variant)

    def cache_info(self) -> CacheInfo:
        """Counters of the variant cache and the names of its variants."""
        return self.variants.info()

    def clear(self) -> None:
        """Forget every variant."""
        with self._lock:
            self.variants.clear()


def jit(function: Callable[..., Any], backend: Backend, **options: Any) -> Jit:
    """Compile `function` per static shape on `backend`.

    Options:
        static:   names of arguments that are part of the key: frozen and hashable, compared by value.
        donate:   names of arguments whose buffers the function may update in place.
        buckets:  name to `Bucket`: axes that are padded; outputs are cut back.
        numerics: "fast".
        fallback: "report", or "error" to refuse ops that only the reference rule serves.
        capacity: variants kept at most; the least recently used goes first.
        host_results: results come back in host memory, read together with one wait for the device.

    Raises:
        StaticArgumentError, BucketError, DonationError: an option names no argument, or contradicts another.
    """
    return Jit(function, backend, **options)
