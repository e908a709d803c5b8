"""Running the sampler: its compiled programs, and the state of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from atbx.compile import jit
from atbx.core.abstract import Abstract, abstract_of
from atbx.core.backend import Backend
from atbx.core.buckets import Bucket
from atbx.core.errors import AtbxError
from atbx.core.jit import Jit
from atbx.core.trees import map_leaves
from atbx.options import Options
from atbx.results import TokenLogprobs
from atbx.sampling import Sampled, SamplerArguments, SamplerStep, SamplerValues, Stages, sample_step
from atbx.schedule import Policy

if TYPE_CHECKING:
    from atbx.generate import Generator


class SamplerPrograms:
    """The compiled sampler: one program, with a variant for each batch bucket and set of stages."""

    def __init__(self, policy: Policy, *, device: Backend, capacity: int) -> None:
        self.device = device
        rows = (("logits", 0), ("values/*", 0), ("counts", 0), ("step/*", 0))
        self.program: Jit = jit(
            sample_step,
            static=("stages", "vocab"),
            donate=("counts",),
            buckets={"B": Bucket(rows, policy.batches)},
            device=device,
            capacity=capacity,
            host_results=True,
        )

    def planned(
        self, owner: Generator, options: Options, batch: int, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        """Abstract arguments of a run's steps."""
        logits = Abstract((batch, owner.config.vocab), dtype, device=self.device.name)
        return [(logits, *self.planned_choice(owner, options, batch))]

    def planned_choice(self, owner: Generator, options: Options, batch: int) -> tuple[Any, ...]:
        """Abstract arguments of the choice of a token, less the logits."""
        eos = owner.eos if options.eos is None else options.eos
        run = SamplerRun(owner, options, [[0]] * batch, eos)
        args = (run.values, run.counts, run.step_values([True] * batch))
        return (*map_leaves(abstract_of, args), run.stages, owner.vocab)


class SamplerRun:
    """The sampler's side of one run: option values, what was generated, and the last step's result."""

    def __init__(
        self, owner: Generator, options: Options, prompts: Sequence[Sequence[int]], eos: Sequence[int]
    ) -> None:
        suppressed = len(eos) if options.min_new_tokens else 0
        self.stages = Stages.of(
            options.sampling,
            eos=suppressed,
            logprobs=options.logprobs,
            processed=options.logprobs_mode == "processed",
        )
        self._program, self._vocab, self._options = owner.sampler.program, owner.vocab, options
        self.values, self.seed = SamplerValues.of(options.sampling, self.stages, prompts, owner.vocab, eos)
        self.counts: Any = None
        if self.stages.penalties:
            # Tables as wide as the vocabulary stay where the kernels run; the rest is a few numbers a row.
            place = owner.sampler.device.device if owner.sampler.device.name != "cpu" else torch.device("cpu")
            self.counts = torch.zeros(len(prompts), owner.vocab, dtype=torch.int32, device=place)
            self.values = replace(self.values, seen=self.values.seen.to(place))
        self._lengths = [len(p) for p in prompts]
        self._generated = 0
        self._result: Sampled | None = None
        self._host: tuple[list[bool], list[float], list[list[int]], list[list[float]]] = ([], [], [], [])

    def step_values(self, active: Sequence[bool]) -> SamplerStep:
        """What this step's program is given besides logits and option values."""
        batch = len(self._lengths)
        position = torch.tensor([n + self._generated for n in self._lengths], dtype=torch.int64)
        unfinished = self._generated < self._options.min_new_tokens
        return SamplerStep(position, torch.tensor(active), torch.full((batch,), unfinished))

    def step(self, logits: torch.Tensor, active: Sequence[bool]) -> torch.Tensor:
        """Choose a token for every row of logits [B, V]; rows that ended get one too, which means nothing."""
        return self.take(self._program(logits, *self.arguments(active)))

    def arguments(self, active: Sequence[bool]) -> SamplerArguments:
        """What `sample_step` takes after the logits in this step."""
        return self.values, self.counts, self.step_values(active), self.stages, self._vocab

    def take(self, result: Sampled) -> torch.Tensor:
        """Keep what a step gave, and give its tokens."""
        self.counts = result.counts
        self._generated += 1
        self._host = (
            result.unusable.tolist(),
            [] if result.logprob is None else result.logprob.tolist(),
            [] if result.top_ids is None else result.top_ids.tolist(),
            [] if result.top_values is None else result.top_values.tolist(),
        )
        return result.tokens

    def refuse_bad_rows(self, active: Sequence[bool]) -> None:
        """Raise if an active row's logits were NaN, infinite or all -inf: no token of them would mean anything."""
        for row, (is_bad, goes_on) in enumerate(zip(self._host[0], active, strict=True)):
            if is_bad and goes_on:
                raise AtbxError(
                    "the model's logits hold NaN or infinity, or every token is banned, so no token can be chosen",
                    where=f"row {row}, new token {self._generated - 1}",
                )

    def logprobs(self, row: int, token: int) -> TokenLogprobs | None:
        """Log-probabilities of the token that a row was given, where asked for."""
        if self.stages.logprobs is None or self._options.logprobs is None:
            return None
        _, chosen, ids, values = self._host
        pairs = list(zip(ids[row], values[row], strict=True)) if ids else []
        # A filter may leave fewer tokens than alternatives were asked for.
        top = tuple((i, v) for i, v in pairs[: self._options.logprobs] if v > float("-inf"))
        return TokenLogprobs(token, chosen[row], top)
