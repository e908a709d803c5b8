"""`generator`: the object behind `generate(params, tokens)`. It owns variants, bindings and cache arenas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atbx.checkpoints.tokenizer import Text
from atbx.core.backend import Backend
from atbx.core.binding import Binding
from atbx.core.errors import DTypeError, OptionError
from atbx.core.jit import Explanation, Jit, Planned
from atbx.core.variants import CacheInfo
from atbx.engine import Cache, Engine
from atbx.memory import MemoryNeeds, refuse_if_too_large
from atbx.options import Options
from atbx.prompts import read_prompts
from atbx.results import Event, Generation, Score
from atbx.run import Run
from atbx.sampler import SamplerPrograms
from atbx.schedule import Policy, Request, decode_extents, prefill, row_limits
from atbx.scoring import Scorer


@dataclass(frozen=True)
class GeneratorInfo:
    """Variant caches of the model's program, the sampler's and the scorer's, and how much was padding.

    decode: on an NPU the step of one token that also chooses the next; None elsewhere.
    """

    model: CacheInfo
    sampler: CacheInfo
    scorer: CacheInfo
    real_tokens: int
    padded_tokens: int
    steps: int
    decode: CacheInfo | None = None

    @property
    def padding(self) -> float:
        """Padded over real tokens; 1.0 when nothing is padded."""
        return self.padded_tokens / self.real_tokens if self.real_tokens else 1.0

    @property
    def variants(self) -> int:
        """Compiled variants of all programs."""
        decode = 0 if self.decode is None else self.decode.variants
        return self.model.variants + self.sampler.variants + self.scorer.variants + decode

    def __str__(self) -> str:
        tokens = f"{self.real_tokens} tokens in {self.steps} steps, padded to {self.padded_tokens} ({self.padding:.2f})"
        parts = [("model", self.model), ("sampler", self.sampler), ("scorer", self.scorer)]
        parts += [("decode", self.decode)] if self.decode is not None else []
        return "\n".join([tokens, *(f"{name}: {info}" for name, info in parts)])


class Generator:
    """Generates text with one model. Made by `generator`; safe to use from several threads.

    Call it as `generate(params, tokens, **options)`; see `Options` for the options.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        config: Any,
        *,
        text: Text | None = None,
        eos: Iterable[int] | None = None,
        policy: Policy | None = None,
        dtype: torch.dtype | None = None,
        device: str | Backend = "cpu",
        numerics: str = "fast",
        fallback: str | None = None,
        variants: int = 512,
        memory_limit: int | None = None,
        block_size: int | None = None,
    ) -> None:
        _check_setup(config, policy, dtype, memory_limit)
        self.config, self.text = config, text
        self.eos = tuple(sorted(set(eos if eos is not None else (text.eos if text is not None else ()))))
        # Ids that the weights have and the tokenizer has not are padding and must never be sampled.
        self.vocab = min(config.vocab, text.vocab_size) if text is not None else config.vocab
        self.engine = Engine(
            forward,
            config,
            policy or Policy(config.context),
            dtype=dtype,
            device=device,
            numerics=numerics,
            fallback=fallback,
            variants=variants,
            block_size=block_size,
        )
        self.sampler = SamplerPrograms(self.engine.policy, device=self.engine.backend, capacity=variants)
        self.scorer = Scorer(self.engine.policy, device=self.engine.backend, capacity=variants)
        self._memory_limit = memory_limit

    def bind(self, params: Any) -> Binding:
        """Bind parameters for repeated use; `generate` takes the result in place of the tree."""
        return self.engine.bind(params)

    def __call__(self, params: Any, tokens: Any, **options: Any) -> Generation:
        """Generate from every row of `tokens`.

        params: the parameter tree, or what `bind` made of it.
        tokens: a row of ids, a (ragged) list of rows, an integer array [T] or [B, T], a string or a list of strings.
        options: see `Options` (max_new_tokens, temperature, top_k, top_p, seed, stop, logprobs, ...). Greedy is the
            default; without max_new_tokens a row goes on to EOS or the context's end.

        Raises:
            OptionError: an option or a prompt is not valid. CapacityError: the request cannot fit the context or
            memory; nothing has run then.
        """
        with self._open(params, tokens, options) as run:
            for _ in run.events():
                pass
            return run.result()

    def stream(self, params: Any, tokens: Any, **options: Any) -> Iterator[Event]:
        """The same, as an iterator of events: one a token, each with the text it makes certain.

        Arguments are checked at once, before the first event is asked for. Closing the iterator ends the run.
        """
        return _events(self._open(params, tokens, options))

    def _open(self, params: Any, tokens: Any, options: dict[str, Any]) -> Run:
        read = Options.read(options)
        if read.stop and self.text is None:
            raise OptionError(
                "stop strings need a tokenizer", where="stop", hint="Pass text= to atbx.generator"
            )
        prompts = read_prompts(tokens, self.vocab, self.text)
        return Run(self, self.engine.bind(params), prompts, read)

    def score(self, params: Any, tokens: Any) -> Score:
        """Log-likelihoods of the rows of `tokens` (see `__call__`) under the model."""
        run_options = {"max_new_tokens": 0, "prompt_logprobs": 0}
        result = self(params, tokens, **run_options)
        rows = [[entry.logprob for entry in row] for row in result.prompt_logprobs or []]
        return Score(rows, [sum(row) for row in rows], [len(row) for row in rows])

    def refuse_if_too_large(self, binding: Binding, rows: int, capacity: int, chunk: int) -> None:
        """Raise CapacityError, with the numbers, if a run of this shape cannot fit."""
        weights = sum(a.nbytes for a in binding.abstracts)
        missing = max(0, weights - binding.prepared_bytes)
        cache = self.engine.pool(binding).nbytes(rows, capacity, chunk)
        activation = self.engine.activation_bytes(binding)
        limit, free = self._memory_limit, self.engine.backend.free_bytes
        if limit is None and free is not None:
            limit = free()
        refuse_if_too_large(MemoryNeeds(missing, cache, activation), limit)

    def plan(self, params: Any, workload: Iterable[Request | Sequence[int]]) -> tuple[Planned, ...]:
        """Every variant that these requests can need; nothing is compiled. A list of prompt lengths is a request."""
        planned = self._planned(params, workload)
        return tuple(one for program, calls in planned for one in program.plan(calls))

    def warm(self, params: Any, workload: Iterable[Request | Sequence[int]]) -> int:
        """Compile every variant that these requests can need; returns how many were compiled."""
        planned = self._planned(params, workload)
        self.engine.activation_bytes(self.engine.planning_binding(params))
        return sum(program.warm(calls) for program, calls in planned)

    def _planned(
        self, params: Any, workload: Iterable[Request | Sequence[int]]
    ) -> list[tuple[Jit, list[Any]]]:
        """Every program with the abstract arguments that it will be called with."""
        binding = self.engine.planning_binding(params)
        engine, policy = self.engine, self.engine.policy
        model: list[Any] = []
        decode: list[Any] = []
        sampler: list[Any] = []
        scorer: list[Any] = []
        for index, item in enumerate(workload):
            request = item if isinstance(item, Request) else Request(tuple(item))
            _check_lengths(request.prompt_lengths, f"workload[{index}]")
            options = Options.read({**request.options, "max_new_tokens": request.max_new_tokens})
            lengths = request.prompt_lengths
            limits = row_limits(lengths, options.max_new_tokens, policy.context)
            capacity = policy.capacity(max(limits))
            cache = engine.abstract_cache(binding, policy.batch(len(lengths)), capacity)
            wants_all = options.prompt_logprobs is not None
            width = policy.score_chunk if wants_all else None
            for chunk in prefill(lengths, policy, chunk=width):
                model.append(engine.planned_prefill(chunk, cache, binding, wants_all))
            for extent in decode_extents(lengths, limits, policy, capacity):
                step = engine.planned_decode(len(lengths), extent, cache, binding)
                if engine.sampled_decode is None:
                    model.append(step)
                else:
                    values, counts, choice, *static = self.sampler.planned_choice(self, options, len(lengths))
                    *given, config = step
                    decode.append((*given, values, counts, choice, config, *static))
            if options.max_new_tokens != 0:
                sampler += self.sampler.planned(self, options, len(lengths), engine.cache_dtype(binding))
            if wants_all:
                scorer += self.scorer.planned(
                    options.prompt_logprobs or 0,
                    lengths,
                    self.config.vocab,
                    self.vocab,
                    engine.cache_dtype(binding),
                )
        planned = [(engine.forward, model), (self.sampler.program, sampler), (self.scorer.program, scorer)]
        return planned if engine.sampled_decode is None else [*planned, (engine.sampled_decode, decode)]

    @property
    def _programs(self) -> tuple[Jit, ...]:
        return (*self.engine.programs, self.sampler.program, self.scorer.program)

    def freeze(self) -> None:
        """From now on a shape or stage that is not compiled raises FrozenCacheError."""
        for program in self._programs:
            program.freeze()

    def unfreeze(self) -> None:
        """Let misses compile again."""
        for program in self._programs:
            program.unfreeze()

    def explain(
        self, params: Any, *, prompt: int = 1, batch: int = 1, new: int = 1
    ) -> tuple[Explanation, Explanation]:
        """Kernels, fusions and cache state of a prefill step of `prompt` tokens and of the decode step after it."""
        _check_lengths((prompt,) * batch, "prompt, batch")
        binding = self.engine.planning_binding(params)
        policy, engine = self.engine.policy, self.engine
        limits = row_limits((prompt,) * batch, new, policy.context)
        capacity = policy.capacity(max(limits))
        cache = engine.abstract_cache(binding, policy.batch(batch), capacity)
        chunk = next(iter(prefill((prompt,) * batch, policy)))
        extent = policy.extent(min(prompt + 1, capacity), capacity)
        return (
            engine.forward.explain(*engine.planned_prefill(chunk, cache, binding, False)),
            self._explain_decode(batch, extent, cache, binding),
        )

    def _explain_decode(self, batch: int, extent: int, cache: Cache, binding: Binding) -> Explanation:
        """The decode step; on an NPU with the greedy choice of the token, which is part of it."""
        engine = self.engine
        step = engine.planned_decode(batch, extent, cache, binding)
        if engine.sampled_decode is None:
            return engine.forward.explain(*step)
        *given, config = step
        values, counts, choice, *static = self.sampler.planned_choice(self, Options.read({}), batch)
        return engine.sampled_decode.explain(*given, values, counts, choice, config, *static)

    def cache_info(self) -> GeneratorInfo:
        """Which compiled variants exist, what they cost and served, and how much was padding."""
        tally = self.engine.tally
        return GeneratorInfo(
            self.engine.forward.cache_info(),
            self.sampler.program.cache_info(),
            self.scorer.program.cache_info(),
            tally.real,
            tally.padded,
            tally.steps,
            None if self.engine.sampled_decode is None else self.engine.sampled_decode.cache_info(),
        )


def _check_setup(config: Any, policy: Any, dtype: Any, memory_limit: Any) -> None:
    """Raise OptionError or DTypeError unless a generator can be made of these."""
    for name in ("vocab", "context", "cache_spec"):
        if not hasattr(config, name):
            raise OptionError("a generator needs it", where=f"config.{name}", found=type(config).__name__)
    if policy is not None and not isinstance(policy, Policy):
        raise OptionError("must be a Policy", where="policy", found=repr(policy))
    if policy is not None and policy.context > config.context:
        raise OptionError(
            "exceeds the model's context",
            where="policy.context",
            expected=f"at most {config.context}",
            found=policy.context,
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise DTypeError("must be a floating-point dtype", where="dtype", found=repr(dtype))
    if memory_limit is not None and (isinstance(memory_limit, bool) or not isinstance(memory_limit, int)):
        raise OptionError("must be bytes", where="memory_limit", expected="an int", found=repr(memory_limit))


def _check_lengths(lengths: Sequence[int], where: str) -> None:
    """Raise OptionError unless there is a prompt and none is empty."""
    if not lengths or min(lengths) < 1:
        raise OptionError(
            "needs rows of at least one token", where=where, expected="1 or more", found=tuple(lengths)
        )


def _events(run: Run) -> Iterator[Event]:
    try:
        yield from run.events()
    finally:
        run.close()


def generator(forward: Callable[..., Any], config: Any, **options: Any) -> Generator:
    """A `Generator` for a model given as a pure function.

    forward: `forward(params, step, cache, config)` to logits [B, W, V] and the next cache.
    config:  frozen and hashable; has `vocab`, `context` and `cache_spec`.

    Options:
        text:     tokenizer, for prompts and results as strings.
        eos:      ids that end a row; default: the tokenizer's. `model.generation.eos` is the union of all sources.
        policy:   sizes that steps may have (`atbx.schedule.Policy`).
        dtype:    cast floating parameters to it; default: as they are.
        device, numerics, fallback: as in `atbx.jit`.
        variants: compiled forms kept at most. memory_limit: bytes a request may need; default: what is available.
    """
    return Generator(forward, config, **options)
