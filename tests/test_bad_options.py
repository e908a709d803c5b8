"""Bad options, prompts, caches and settings: each is refused by name, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from refusals import cases, check
from small_models import random_params, small_llama

import atbx
from atbx import ops
from atbx.core import errors
from atbx.models import llama
from atbx.ops import kv_cache
from atbx.ops.kv_cache import CacheSpec, KVCache, LayerCache
from atbx.schedule import Policy, Request

CONFIG = small_llama()
PARAMS = random_params(CONFIG)
GENERATE = atbx.generator(llama.forward, CONFIG)

# --- attention and caches ------------------------------------------------------------------------------------------

SPEC = CacheSpec((LayerCache(2, 4), LayerCache(2, 4, window=3)))


def cache(**changes: Any) -> KVCache:
    sizes: dict[str, Any] = {"batch": 2, "capacity": 8, "dtype": torch.float32, "chunk": 4}
    return kv_cache.init(SPEC, **{**sizes, **changes})


def attend(**changes: Any) -> Callable[[], Any]:
    """A call of attention with some operands changed."""
    tensors: dict[str, Any] = {
        "q": torch.ones(2, 3, 4, 4),
        "k": torch.ones(2, 3, 2, 4),
        "v": torch.ones(2, 3, 2, 4),
        "counts": torch.tensor([3, 2]),
        "slopes": None,
        "sinks": None,
    }
    options = {"layer": 0, "scale": 0.5, **{n: v for n, v in changes.items() if n not in tensors}}
    given = {n: changes.get(n, v) for n, v in tensors.items()}

    def layer(q: Any, k: Any, v: Any, counts: Any, slopes: Any, sinks: Any, cache: KVCache) -> Any:
        return ops.attend(q, k, v, cache, counts=counts, slopes=slopes, sinks=sinks, **options)

    return lambda: atbx.jit(layer)(*given.values(), cache())


def saved(**changes: Any) -> dict[str, Any]:
    return {**kv_cache.save(cache()), **changes}


@cases(
    ("heads", attend(q=torch.ones(2, 3, 3, 4)), errors.ShapeError, "query heads.*multiple of 2, found 3"),
    ("head-size", attend(q=torch.ones(2, 3, 4, 8)), errors.ShapeError, "q does not fit its arena"),
    ("kv-heads", attend(k=torch.ones(2, 3, 1, 4)), errors.ShapeError, "k does not fit its arena"),
    ("kv-dtype", attend(v=torch.ones(2, 3, 2, 4).half()), errors.DTypeError, "v and its arena"),
    ("q-dtype", attend(q=torch.ones(2, 3, 4, 4).half()), errors.DTypeError, "q, k and v differ"),
    (
        "counts-length",
        attend(counts=torch.tensor([3])),
        errors.ShapeError,
        r"counts.*i64\[2\], found i64\[1\]",
    ),
    ("counts-dtype", attend(counts=torch.tensor([3, 2]).int()), errors.ShapeError, r"counts.*found i32\[2\]"),
    (
        "counts-negative",
        attend(counts=torch.tensor([3, -1])),
        errors.CapacityError,
        "^batch row 1: .*count -1",
    ),
    ("slopes", attend(slopes=torch.ones(3)), errors.ShapeError, r"slopes.*expected \[4\], found f32\[3\]"),
    ("sinks", attend(sinks=torch.ones(2)), errors.ShapeError, r"sinks.*expected \[4\], found f32\[2\]"),
    ("layer", attend(layer=2), errors.OptionError, "^layer: .*0 to 1, found 2"),
    ("layer-negative", attend(layer=-1), errors.OptionError, "^layer: .*0 to 1, found -1"),
    ("scale-none", attend(scale=None), errors.OptionError, "^scale: .*found None"),
    ("scale-nan", attend(scale=float("nan")), errors.OptionError, "^scale: .*found nan"),
    ("soft-cap", attend(soft_cap=0.0), errors.OptionError, "^soft_cap: .*found 0.0"),
    ("batch-size", lambda: cache(batch=0), errors.OptionError, "^batch: .*found 0"),
    ("chunk-size", lambda: cache(chunk=0), errors.OptionError, "^chunk: .*found 0"),
    ("cache-dtype", lambda: cache(dtype=torch.int64), errors.DTypeError, "^dtype: .*found torch.int64"),
    ("window-size", lambda: LayerCache(1, 4, window=0), errors.OptionError, "^LayerCache.window: .*found 0"),
    ("head-count", lambda: LayerCache(0, 4), errors.OptionError, "^LayerCache.kv_heads: .*found 0"),
    (
        "no-layers",
        lambda: kv_cache.init(CacheSpec(()), batch=1, capacity=1, dtype=torch.float32),
        errors.OptionError,
        "^spec.layers: ",
    ),
    ("extent", lambda: cache().with_extent(9), errors.CapacityError, "extent.*1 to 8, found 9"),
    (
        "truncate-rows",
        lambda: kv_cache.truncate(cache(), [0]),
        errors.CapacityError,
        r"expected \(2,\), found \(1,\)",
    ),
    (
        "truncate-more",
        lambda: kv_cache.truncate(cache(), [0, 1]),
        errors.CapacityError,
        "^row 1: .*0 to 0, found 1",
    ),
    ("select", lambda: kv_cache.select(cache(), [0, -1]), errors.CapacityError, r"^indices\[1\]: .*found -1"),
    (
        "load-nothing",
        lambda: kv_cache.load({}, SPEC),
        errors.TreeError,
        "k: missing.*v: missing.*lengths.*sizes",
    ),
    (
        "load-layers",
        lambda: kv_cache.load(saved(k=[]), SPEC),
        errors.TreeError,
        "k: expected 2 layers, found 0",
    ),
    (
        "load-dtype",
        lambda: kv_cache.load(saved(v=[t.half() for t in saved()["v"]]), SPEC),
        errors.TreeError,
        r"v/0: expected .*float32, found .*float16.*v/1: ",
    ),
    (
        "load-lengths",
        lambda: kv_cache.load(saved(lengths=torch.tensor([1, 99])), SPEC),
        errors.TreeError,
        "lengths/1: expected 0 to 8, found 99",
    ),
)
def test_attention_and_caches_refuse_by_name(call: Any, kind: Any, pattern: str) -> None:
    check(call, kind, pattern)


# --- generate ------------------------------------------------------------------------------------------------------


def generate(tokens: Any = (5, 6), **options: Any) -> Callable[[], Any]:
    return lambda: GENERATE(PARAMS, tokens, **{"max_new_tokens": 2, **options})


@cases(
    (
        "unknown",
        generate(no_repeat_ngram_size=2),
        errors.OptionError,
        "^no_repeat_ngram_size: unknown option",
    ),
    ("beams", generate(num_beams=4), errors.OptionError, "^num_beams: unknown option"),
    ("draft", generate(draft=None), errors.OptionError, "^draft: unknown option"),
    ("misspelt", generate(temprature=1.0), errors.OptionError, "^temprature: .*mean temperature"),
    ("max-negative", generate(max_new_tokens=-1), errors.OptionError, "^max_new_tokens: .*found -1"),
    ("max-fraction", generate(max_new_tokens=1.5), errors.OptionError, "^max_new_tokens: .*found 1.5"),
    ("max-bool", generate(max_new_tokens=True), errors.OptionError, "^max_new_tokens: .*found True"),
    (
        "min-above-max",
        generate(min_new_tokens=5),
        errors.OptionError,
        "^min_new_tokens: .*at most 2, found 5",
    ),
    ("temperature-negative", generate(temperature=-1), errors.OptionError, "^temperature: .*found -1"),
    ("temperature-nan", generate(temperature=float("nan")), errors.OptionError, "^temperature: .*found nan"),
    ("temperature-text", generate(temperature="hot"), errors.OptionError, "^temperature: .*found 'hot'"),
    (
        "temperature-rows",
        generate(temperature=[1.0, 0.5]),
        errors.OptionError,
        "^temperature: .*expected 1, found 2",
    ),
    ("top-k-fraction", generate(top_k=1.5), errors.OptionError, "^top_k: .*found 1.5"),
    ("top-k-row", generate(top_k=[-5]), errors.OptionError, r"^top_k\[0\]: .*found -5"),
    ("top-p", generate(top_p=2), errors.OptionError, "^top_p: .*0.0 to 1.0, found 2"),
    ("min-p", generate(min_p=-0.1), errors.OptionError, "^min_p: .*found -0.1"),
    ("repetition", generate(repetition_penalty=0), errors.OptionError, "^repetition_penalty: .*above 0.0"),
    (
        "presence",
        generate(presence_penalty=float("inf")),
        errors.OptionError,
        "^presence_penalty: .*found inf",
    ),
    ("seed-text", generate(seed="x"), errors.OptionError, "^seed: .*found 'x'"),
    ("seed-large", generate(seed=2**70), errors.OptionError, "^seed: out of range"),
    ("bias-token", generate(logit_bias={61: 1.0}), errors.OptionError, r"^logit_bias\[61\]: .*under 61"),
    (
        "bias-value",
        generate(logit_bias={1: float("nan")}),
        errors.OptionError,
        r"^logit_bias\[1\]: .*found nan",
    ),
    ("logprobs", generate(logprobs=101), errors.OptionError, "^logprobs: .*0 to 100, found 101"),
    ("logprobs-mode", generate(logprobs_mode="cooked"), errors.OptionError, "^logprobs_mode: .*found cooked"),
    ("prompt-logprobs", generate(prompt_logprobs=-1), errors.OptionError, "^prompt_logprobs: .*found -1"),
    ("eos", generate(eos="</s>"), errors.OptionError, "^eos: .*found '</s>'"),
    ("stop-without-text", generate(stop=["a"]), errors.OptionError, "^stop: .*tokenizer"),
    ("stop-empty", generate(stop=["a", ""]), errors.OptionError, r"^stop\[1\]: "),
    ("stop-tokens-empty", generate(stop_tokens=[[1], []]), errors.OptionError, r"^stop_tokens\[1\]: "),
    ("cancel", generate(cancel=5), errors.OptionError, "^cancel: .*found 5"),
    ("no-tokens", generate(None), errors.OptionError, "^tokens: .*found NoneType"),
    ("no-prompt", generate([]), errors.OptionError, "^tokens: holds no prompt"),
    ("empty-row", generate([[1], []]), errors.OptionError, r"^tokens\[1\]: is an empty prompt"),
    ("outside", generate([[1], [2, 61]]), errors.OptionError, r"^tokens\[1\]\[1\]: .*0 to 60, found 61"),
    ("negative", generate([-1]), errors.OptionError, r"^tokens\[0\]: .*found -1"),
    ("floats", generate(torch.ones(2)), errors.OptionError, "^tokens: .*torch.float32"),
    ("three-axes", generate(torch.ones(1, 1, 1).long()), errors.OptionError, "^tokens: .*3 axes"),
    ("nested", generate([[[1]]]), errors.OptionError, r"^tokens\[0\]\[0\]: .*found \[1\]"),
    ("too-long", generate([1] * 599), errors.CapacityError, r"^tokens\[0\]: .*at most 600, found 599 \+ 2"),
    (
        "full",
        generate([[1], [1] * 600], max_new_tokens=None),
        errors.CapacityError,
        r"^tokens\[1\]: .*found 600",
    ),
    ("rows", generate([[1]] * 257), errors.BucketError, "'batch rows'.*at most 256, found 257"),
    ("stream", lambda: GENERATE.stream(PARAMS, [1], top_p=3), errors.OptionError, "^top_p: .*found 3"),
    ("score-nothing", lambda: GENERATE.score(PARAMS, []), errors.OptionError, "^tokens: holds no prompt"),
    ("score-outside", lambda: GENERATE.score(PARAMS, [[1, 99]]), errors.OptionError, r"^tokens\[0\]\[1\]: "),
    (
        "score-long",
        lambda: GENERATE.score(PARAMS, [1] * 601),
        errors.CapacityError,
        r"^tokens\[0\]: .*at most 600",
    ),
    (
        "plan-option",
        lambda: GENERATE.plan(PARAMS, [Request((3,), 2, {"top_q": 1})]),
        errors.OptionError,
        "^top_q: .*top_",
    ),
    ("plan-empty", lambda: GENERATE.plan(PARAMS, [[3], []]), errors.OptionError, r"^workload\[1\]: "),
    (
        "plan-zero",
        lambda: GENERATE.plan(PARAMS, [[0]]),
        errors.OptionError,
        r"^workload\[0\]: .*found \(0,\)",
    ),
    ("warm-long", lambda: GENERATE.warm(PARAMS, [Request((600,), 2)]), errors.CapacityError, r"600 \+ 2"),
    ("explain", lambda: GENERATE.explain(PARAMS, prompt=0), errors.OptionError, "^prompt, batch: "),
)
def test_generate_refuses_by_option_and_place(call: Any, kind: Any, pattern: str) -> None:
    steps = GENERATE.cache_info().steps
    check(call, kind, pattern)
    assert GENERATE.cache_info().steps == steps


def generator(config: Any = CONFIG, **options: Any) -> Callable[[], Any]:
    return lambda: atbx.generator(llama.forward, config, **options)


@cases(
    ("config", generator(object()), errors.OptionError, "^config.vocab: .*found object"),
    ("policy", generator(policy=5), errors.OptionError, "^policy: .*found 5"),
    ("chunk", lambda: Policy(600, chunk=0), errors.OptionError, "^chunk: .*found 0"),
    ("batch", lambda: Policy(600, max_batch=0), errors.OptionError, "^max_batch: .*found 0"),
    ("dtype-integer", generator(dtype=torch.int8), errors.DTypeError, "^dtype: .*found torch.int8"),
    ("dtype-text", generator(dtype="bfloat16"), errors.DTypeError, "^dtype: .*found 'bfloat16'"),
    ("limit-text", generator(memory_limit="1G"), errors.OptionError, "^memory_limit: .*found '1G'"),
    ("device", generator(device="tpu"), errors.UnsupportedError, "^device: .*found tpu"),
    ("numerics", generator(numerics="strict"), errors.UnsupportedError, "^numerics: .*found strict"),
    (
        "memory",
        lambda: generator(memory_limit=1000)()(PARAMS, [5], max_new_tokens=4),
        errors.CapacityError,
        "memory; expected at most 0.0 MiB, found .*weights.*cache.*activation",
    ),
    (
        "memory-dtype",
        lambda: atbx.plan_memory(CONFIG, 1, 8, torch.int8),
        errors.DTypeError,
        "floating point",
    ),
    (
        "public-name",
        lambda: atbx.define_op("no name", lambda x: x, lambda x: x),
        errors.OptionError,
        "^name: ",
    ),
)
def test_a_generator_is_refused_by_option(call: Any, kind: Any, pattern: str) -> None:
    check(call, kind, pattern)
