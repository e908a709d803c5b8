"""One run of a generator: a batch of rows from their prompts to their ends, a step at a time.

A run owns an arena and a sampler state, so runs on one generator (two threads, interleaved streams) never see each
other. Host and device meet once a step, when the sampled tokens are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from atbx.core.binding import Binding
from atbx.core.errors import AtbxError
from atbx.ops.kv_cache import KVCache, PagedCache, reserve
from atbx.options import Options
from atbx.results import Event, Generation, TokenLogprobs
from atbx.sampler import SamplerRun
from atbx.schedule import prefill, row_limits
from atbx.text_stream import TextStream, TokenStop

if TYPE_CHECKING:
    from atbx.generate import Generator


@dataclass
class Row:
    """What a row has become so far."""

    prompt: list[int]
    limit: int
    stop: TokenStop | None
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def filled(self) -> int:
        """KV slots that the row fills: the newest token is not fed back yet."""
        return len(self.prompt) + max(0, len(self.tokens) - 1)


class Run:
    """A batch being generated. Use as a context manager, or close it: its arena goes back to the generator."""

    def __init__(
        self, owner: Generator, binding: Binding, prompts: Sequence[list[int]], options: Options
    ) -> None:
        self._owner, self._engine, self._binding, self._options = owner, owner.engine, binding, options
        policy = self._engine.policy
        limits = row_limits([len(p) for p in prompts], options.max_new_tokens, policy.context)
        self.rows = [self._row(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
        self._limits = torch.tensor(limits, dtype=torch.int64)
        self._shape = (policy.batch(len(prompts)), policy.capacity(max(limits)), policy.chunk)
        self._eos = frozenset(owner.eos if options.eos is None else options.eos)
        self.sampler = SamplerRun(owner, options, [row.prompt for row in self.rows], tuple(sorted(self._eos)))
        pool = self._engine.pool(binding)
        owner.refuse_if_too_large(binding, *self._shape)
        self._arena = pool.take(*self._shape)
        self._cache: KVCache | PagedCache | None = None
        self._is_open = True

    def _row(self, prompt: list[int], limit: int) -> Row:
        options = self._options
        stream = None
        if self._owner.text is not None:
            stream = TextStream(self._owner.text, stop=options.stop)
        return Row(prompt, limit, TokenStop(options.stop_tokens) if options.stop_tokens else None, stream)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the run: rows that go on are cancelled, and the arena is free again."""
        if self._is_open:
            self._is_open = False
            for row in self.rows:
                if row.finish is None:
                    row.finish = "cancelled"
            self._engine.pool(self._binding).give_back(self._arena, *self._shape)

    def events(self) -> Iterator[Event]:
        """Run to the end, yielding each token as it is sampled."""
        logits = self._prefill()
        if self._options.max_new_tokens == 0:
            for index, row in enumerate(self.rows):
                row.finish = "length"
                yield Event(index, None, "" if row.stream else None, "length")
            return
        tokens = self.sampler.step(logits, [row.finish is None for row in self.rows])
        while True:
            if self._is_cancelled():
                yield from self._cancel()
                return
            yield from self._take(tokens)
            active = [row.finish is None for row in self.rows]
            if not any(active):
                return
            if self._is_cancelled():
                yield from self._cancel()
                return
            tokens = self._next(tokens, active)

    def _is_cancelled(self) -> bool:
        return self._options.cancel is not None and bool(self._options.cancel())

    def _cancel(self) -> Iterator[Event]:
        for index, row in enumerate(self.rows):
            if row.finish is None:
                yield self._end(index, row, None, "cancelled", None)

    def _prefill(self) -> torch.Tensor:
        """Fill the cache with the prompts; logits [B,V] of each row's last token."""
        engine, policy = self._engine, self._engine.policy
        prompts = [row.prompt for row in self.rows]
        opened: Any = engine.open_cache(self._arena, len(prompts), self._shape[1])
        cache = reserve(opened, self._limits)
        wants_all = self._options.prompt_logprobs is not None
        last: list[torch.Tensor | None] = [None] * len(prompts)
        width = policy.score_chunk if wants_all else None
        for chunk in prefill([len(p) for p in prompts], policy, chunk=width):
            logits, cache = engine.prefill_chunk(
                self._binding, prompts, self._limits, chunk, cache, wants_all
            )
            for index, (row, count) in enumerate(zip(chunk.rows, chunk.counts, strict=True)):
                if wants_all:
                    self._score_prompt(row, chunk.start, count, logits[index, :count])
                if chunk.start + count == len(prompts[row]):
                    last[row] = logits[index, count - 1 if wants_all else 0]
        lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int64)
        self._cache = replace(cache, lengths=lengths)
        found = [row for row in last if row is not None]
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)

    def _score_prompt(self, row: int, start: int, count: int, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow the chunk's; logits [count, V]."""
        prompt = self.rows[row].prompt
        targets = prompt[start + 1 : start + count + 1]
        if targets:
            top = self._options.prompt_logprobs or 0
            self.rows[row].prompt_logprobs += self._owner.scorer.logprobs(
                logits[: len(targets)], targets, top, self._owner.vocab
            )

    def _take(self, tokens: torch.Tensor) -> Iterator[Event]:
        """Give each active row its token."""
        host = tokens.tolist()
        self.sampler.refuse_bad_rows([row.finish is None for row in self.rows])
        for index, (row, token) in enumerate(zip(self.rows, host, strict=True)):
            if row.finish is not None:
                continue
            row.tokens.append(token)
            logprobs = self.sampler.logprobs(index, token)
            if logprobs is not None:
                row.logprobs.append(logprobs)
            text = row.stream.push(token) if row.stream is not None and token not in self._eos else ""
            finish = self._finish_reason(row, token)
            if finish is not None:
                yield self._end(index, row, token, finish, logprobs, text)
            else:
                row.text += text
                yield Event(index, token, text if row.stream is not None else None, None, logprobs)

    def _finish_reason(self, row: Row, token: int) -> str | None:
        stopped = row.stop.push(token) if row.stop is not None else False
        if len(row.tokens) >= self._options.min_new_tokens:
            if token in self._eos:
                return "eos"
            if stopped or (row.stream is not None and row.stream.stopped is not None):
                return "stop"
        if len(row.prompt) + len(row.tokens) >= row.limit:
            return "cache_full" if self._options.max_new_tokens is None else "length"
        return None

    def _end(
        self,
        index: int,
        row: Row,
        token: int | None,
        finish: str,
        logprobs: TokenLogprobs | None,
        text: str = "",
    ) -> Event:
        row.finish = finish
        if row.stream is not None:
            text += row.stream.finish()
            row.text += text
        return Event(index, token, text if row.stream is not None else None, finish, logprobs)

    def _next(self, tokens: torch.Tensor, active: Sequence[bool]) -> torch.Tensor:
        """The tokens after `tokens`; where the engine's program chooses them itself, in that one program."""
        if self._cache is None:
            raise AtbxError("a run decodes only after its prompts were read")
        # Over ended rows too: the extent then only grows, through the steps that planning walks.
        longest = max(row.filled for row in self.rows)
        counts = torch.tensor(active, dtype=torch.int64)
        # Rows and lengths made anew: a step plans by them on the host, and reading what the last step handed back
        # would wait for the device once more.
        lengths = torch.tensor([row.filled for row in self.rows], dtype=torch.int64)
        cache = self._cache.part(range(len(self.rows)), lengths)
        engine = self._engine
        given = self._binding, tokens, counts, self._limits, cache, longest, sum(active)
        if engine.sampled_decode is not None:
            sampled, stepped = engine.decode_sampled(*given, self.sampler.arguments(active))
            self._cache = replace(self._cache, arena=stepped.arena)
            return self.sampler.take(sampled)
        logits, stepped = engine.decode(*given)
        self._cache = replace(self._cache, arena=stepped.arena)
        return self.sampler.step(logits, active)

    def result(self) -> Generation:
        """What every row has become."""
        wanted, prompt_wanted = self._options.logprobs is not None, self._options.prompt_logprobs is not None
        return Generation(
            [row.tokens for row in self.rows],
            [row.finish or "cancelled" for row in self.rows],
            [row.text for row in self.rows] if self._owner.text is not None else None,
            [row.logprobs for row in self.rows] if wanted else None,
            [row.prompt_logprobs for row in self.rows] if prompt_wanted else None,
            self.sampler.seed,
        )
