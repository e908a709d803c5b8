"""Kinds of faults around compilation: buckets, growth of the variant cache, keys, misses, host syncs, the import.

The rows behind them, and the tests that hold the other rows, are in tests/faults.toml.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import plain_model
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import random_params, small_llama

import atbx
from atbx.core.buckets import Bucket, choose, ladder
from atbx.core.errors import FrozenCacheError
from atbx.core.executable import Executable
from atbx.models import llama
from atbx.schedule import Request
from atbx.torch_guard import AUTOLOAD

CONFIG = small_llama()
PARAMS = random_params(CONFIG)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(CONFIG.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# --- buckets -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 4), st.data())
def test_a_bucket_is_the_smallest_that_holds_a_size_and_wastes_little(
    capacity: int, steps: int, data: Any
) -> None:
    sizes = ladder(capacity, steps=steps)
    assert sizes[-1] == capacity
    assert list(sizes) == sorted(set(sizes))
    size, other = sorted(data.draw(st.tuples(*[st.integers(1, capacity)] * 2)))
    chosen = choose(sizes, size, "T")
    assert chosen >= size
    assert all(bucket < size for bucket in sizes if bucket < chosen)
    assert chosen <= choose(sizes, other, "T")
    if size >= 8:
        assert chosen <= size * (1 + 1 / steps)


def test_the_last_bucket_is_the_capacity_and_what_ran_is_what_was_planned() -> None:
    config = small_llama(context=317)
    generate = atbx.generator(llama.forward, config)
    planned = generate.plan(PARAMS, [Request((300,), 17)])
    assert generate.cache_info().variants == 0
    assert not any(p.compiled for p in planned)
    assert generate.warm(PARAMS, [Request((300,), 17)]) == len(planned)
    generate.freeze()
    prompt = tokens(300)
    found = generate(PARAMS, prompt, max_new_tokens=17).tokens[0]
    assert len(found) == 17
    assert found[0] == int(plain_model.logits(PARAMS, prompt, config)[-1].argmax())
    assert generate.cache_info().variants == len(planned)
    assert generate.engine.policy.extents[-1] == 317
    assert generate.engine.policy.tokens[-1] == 317


def test_a_single_row_is_never_padded_to_more() -> None:
    generate = atbx.generator(llama.forward, CONFIG)
    generate(PARAMS, [5], max_new_tokens=3)
    info = generate.cache_info()
    assert generate.engine.policy.batch(1) == 1
    assert all("step/ids:i64[1, 1]" in name for name in info.model.names)
    assert (info.real_tokens, info.padded_tokens) == (3, 3)


def test_padding_is_told_as_a_number() -> None:
    generate = atbx.generator(llama.forward, CONFIG)
    generate(PARAMS, tokens(9), max_new_tokens=1)
    info = generate.cache_info()
    assert (info.real_tokens, info.padded_tokens) == (9, 12)
    assert info.padding == pytest.approx(12 / 9)
    assert "padded to 12 (1.33)" in str(info)


# --- how many variants there are -----------------------------------------------------------------------------------


def counted(sizes: tuple[int, ...] | None, capacity: int = 256) -> tuple[Any, list[int]]:
    """A compiled doubling of x, and the sizes for which it was traced."""
    traced: list[int] = []

    def double(x: Any) -> Any:
        traced.append(int(x.shape[0]))
        return x + x

    buckets = {"N": Bucket((("x", 0),), sizes)} if sizes else None
    return atbx.jit(double, buckets=buckets, capacity=capacity), traced


def test_lengths_1_to_256_are_traced_once_a_bucket() -> None:
    sizes = ladder(256)
    double, traced = counted(sizes)
    for length in range(1, 257):
        assert torch.equal(double(torch.ones(length)), torch.full((length,), 2.0))
    assert traced == list(sizes)
    info = double.cache_info()
    assert (info.variants, info.misses, info.hits) == (len(sizes), len(sizes), 256 - len(sizes))


def test_a_thousand_shapes_stay_within_the_capacity_and_evictions_are_counted() -> None:
    double, traced = counted(None, capacity=8)
    for length in range(1, 1001):
        assert double(torch.ones(length)).shape == (length,)
    info = double.cache_info()
    assert (info.variants, info.misses, info.evictions) == (8, 1000, 992)
    assert len(traced) == 1000
    # The least recently used goes first: what is left are the last eight.
    for length in range(993, 1001):
        double(torch.ones(length))
    assert len(traced) == 1000
    double.clear()
    assert double.cache_info().variants == 0


def test_a_reference_run_compiles_nothing() -> None:
    double, traced = counted(None)
    x = torch.ones(3)
    assert torch.equal(atbx.reference(double, x), x + x)
    assert double.cache_info().variants == 0
    assert traced == [3]


def test_a_number_and_an_array_of_it_are_one_key_and_another_dtype_is_named() -> None:
    plus = atbx.jit(lambda x, n: x + n)
    x = torch.tensor([1, 2])
    for three in (3, np.int64(3), np.array(3), torch.tensor(3)):
        assert plus(x, three).tolist() == [4, 5]
    assert plus.cache_info().variants == 1
    miss = plus.explain(torch.tensor([1, 2], dtype=torch.int32), np.int32(3)).miss
    assert miss is not None
    assert {(d.component, d.where) for d in miss.differences} == {("dtype", "x"), ("dtype", "n")}


def test_a_miss_names_the_memory_layout_where_nothing_else_differs() -> None:
    double, _ = counted(None)
    double(torch.ones(3, 2))
    explanation = double.explain(torch.ones(2, 3).T)
    assert not explanation.hit
    assert [(d.component, d.where) for d in explanation.miss.differences] == [("layout", "x")]


def test_a_frozen_miss_names_the_shape_and_the_nearest_variant() -> None:
    double, _ = counted((4, 8))
    double(torch.ones(3))
    double.freeze()
    assert double(torch.ones(4)).tolist() == [2.0] * 4
    with pytest.raises(
        FrozenCacheError, match=r"double is frozen.*x:f32\[8\].*nearest variant x:f32\[4\].*shape of x"
    ):
        double(torch.ones(5))
    assert double.cache_info().variants == 1


def test_options_that_were_planned_compile_nothing_when_they_are_used() -> None:
    flags: list[dict[str, Any]] = [
        {},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
        {"temperature": 0.7, "seed": 1},
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}},
        {"min_new_tokens": 2},
    ]
    lengths = [1 + 3 * i for i in range(20)]
    generate = atbx.generator(llama.forward, CONFIG, eos=[0])
    workload = [Request((n,), 3, flag) for n in lengths for flag in flags]
    planned = generate.plan(PARAMS, workload)
    assert generate.cache_info().variants == 0
    assert generate.warm(PARAMS, workload) == len(planned)
    generate.freeze()
    for index, length in enumerate(lengths):
        for flag in (flags[index % len(flags)], flags[2]):
            result = generate(PARAMS, tokens(length), max_new_tokens=3, **flag)
            assert 1 <= len(result.tokens[0]) <= 3
            if result.prompt_logprobs is not None:
                # One number a token, not a row over the vocabulary.
                assert [len(entry.top) for entry in result.prompt_logprobs[0]] == [2] * (length - 1)
    assert generate.cache_info().variants == len(planned)


def test_the_model_is_never_entered_once_it_is_warm() -> None:
    entered = 0

    def forward(params: Any, step: Any, cache: Any, config: Any) -> Any:
        nonlocal entered
        entered += 1
        return llama.forward(params, step, cache, config)

    generate = atbx.generator(forward, CONFIG)
    prompt = tokens(5)
    first = generate(PARAMS, prompt, max_new_tokens=4).tokens
    after = entered
    assert generate(PARAMS, prompt, max_new_tokens=4).tokens == first
    assert entered == after


# --- host and device -----------------------------------------------------------------------------------------------

READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "__array__", "nonzero")


class Reads:
    """Counts what the host reads of the results of compiled steps: where, and after how many waits.

    A wait is a read that follows a launch; further reads of the same results find them finished.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sites: collections.Counter[str] = collections.Counter()
        self.waits = 0
        self._made: dict[int, torch.Tensor] = {}
        self._is_running = False
        finish = Executable.finish

        def finished(executable: Executable, slots: list[Any]) -> list[Any]:
            values = finish(executable, slots)
            self._made |= {v.data_ptr(): v for v in values if isinstance(v, torch.Tensor)}
            self._is_running = True
            return values

        monkeypatch.setattr(Executable, "finish", finished)
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def _counting(self, name: str, original: Any) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.data_ptr() in self._made:
                code = sys._getframe(1).f_code
                self.sites[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1
                self.waits += self._is_running
                self._is_running = False
            return original(tensor, *args, **kwargs)

        return read


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"temperature": 0.8, "seed": 3}])
def test_the_host_waits_for_a_step_once(
    rows: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = atbx.generator(llama.forward, CONFIG)
    prompts = [tokens(4, i) for i in range(rows)]
    generate(PARAMS, prompts, max_new_tokens=12, **options)
    stream = generate.stream(PARAMS, prompts, max_new_tokens=12, **options)
    for _ in range(2 * rows):
        next(stream)
    reads = Reads(monkeypatch)
    for _ in range(8 * rows):
        next(stream)
    stream.close()
    assert reads.waits == 8
    # Both read the sampler's results of the same step, which are there together.
    assert set(reads.sites) == {"sampler.take", "run._take"}
    assert reads.sites["run._take"] == 8


# --- the import ----------------------------------------------------------------------------------------------------


def test_atbx_imports_and_runs_where_torch_npu_is_installed_without_cann(tmp_path: Path) -> None:
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    info = tmp_path / "torch_npu-2.7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.7.1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop(AUTOLOAD, None)

    def run(code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path
        )

    alone = run("import torch")
    assert alone.returncode == 1
    assert "libhccl.so" in alone.stderr
    ours = run(
        "import atbx, os, torch\n"
        "double = atbx.jit(lambda x: x + x)\n"
        f"print(double(torch.ones(2)).tolist(), os.environ.get({AUTOLOAD!r}))"
    )
    assert (ours.stdout, ours.returncode) == ("[2.0, 2.0] None\n", 0), ours.stderr
