"""Bindings: flattened once, packed once, shared by variants, and never stale."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from core_ops import ADD, LINEAR, NEG, SCALE, WRITE, compiled, make_backend

from atbx.core.binding import bind
from atbx.core.errors import BindingError, DonationError


def layer(params: Any, x: Any) -> Any:
    return ADD(LINEAR(x, params["w"]), params["b"])


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(4, 3).to(dtype), "b": torch.tensor(0.5).to(dtype)}


def test_a_parameter_is_packed_once_for_all_variants() -> None:
    backend, counts = make_backend()
    jit = compiled(layer, backend=backend)
    params = weights()
    bound = bind(params)
    for rows in (1, 2, 5):
        x = torch.randn(rows, 3)
        assert torch.allclose(jit(bound, x), x @ params["w"].T + 0.5)
    assert jit.cache_info().variants == 3
    assert counts.packed == [(4, 3)]
    # Another function over the same binding shares it too; another binding packs its own.
    compiled(lambda p, x: LINEAR(x, p["w"]), backend=backend)(bound, torch.ones(1, 3))
    assert counts.packed == [(4, 3)]
    jit(bind(params), torch.ones(1, 3))
    assert counts.packed == [(4, 3)] * 2
    assert jit.cache_info().variants == 3


def test_two_layers_of_one_shape_are_packed_apart() -> None:
    backend, counts = make_backend()

    def two(params: Any, x: Any) -> Any:
        return LINEAR(LINEAR(x, params["w0"]), params["w1"])

    params = {"w0": torch.randn(3, 3), "w1": torch.randn(3, 3)}
    x = torch.randn(2, 3)
    found = compiled(two, backend=backend)(bind(params), x)
    assert torch.allclose(found, x @ params["w0"].T @ params["w1"].T, atol=1e-6)
    assert len(counts.packed) == 2


def test_what_only_parameters_feed_is_computed_once_a_binding() -> None:
    backend, _ = make_backend()
    jit = compiled(lambda p, x: ADD(SCALE(p["w"], by=2.0), x), backend=backend)
    bound = bind({"w": torch.ones(3)})
    assert bound.prepared_bytes == 0
    assert jit(bound, torch.ones(3)).tolist() == [3.0] * 3
    assert bound.prepared_bytes == 12
    assert jit(bound, torch.zeros(3)).tolist() == [2.0] * 3
    assert bound.prepared_bytes == 12
    assert [c.equation.op.name for c in jit.explain(bound, torch.ones(3)).choices] == ["t_add"]


def test_params_that_python_calls_equal_are_prepared_apart() -> None:
    jit = compiled(lambda p, x: (ADD(ADD(p["w"], 0.0), x), ADD(ADD(p["w"], -0.0), x)))
    plus, minus = jit(bind({"w": torch.tensor([-0.0])}), torch.tensor([-0.0]))
    assert not torch.signbit(plus).item()
    assert torch.signbit(minus).item()


def test_floats_are_cast_lazily_and_integers_are_kept() -> None:
    params = {"w": torch.ones(4, 3, dtype=torch.float64), "n": torch.ones(3, dtype=torch.int64)}
    bound = bind(params, dtype=torch.bfloat16)
    assert [str(a) for a in bound.abstracts] == ["i64[3]", "bf16[4,3]"]
    assert bound.prepared_bytes == 0
    result = compiled(lambda p, x: LINEAR(x, p["w"]))(bound, torch.ones(1, 3, dtype=torch.bfloat16))
    assert result.dtype == torch.bfloat16
    assert result.tolist() == [[3.0] * 4]
    assert bound.prepared_bytes == 4 * 3 * 2
    assert params["w"].dtype == torch.float64


def test_release_is_called_for_what_was_packed_and_only_then() -> None:
    released: list[tuple[int, ...]] = []
    params = weights()
    bound = bind(params, release=lambda leaf: released.append(tuple(leaf.shape)) is None)
    assert released == []
    compiled(layer)(bound, torch.ones(1, 3))
    compiled(layer)(bound, torch.ones(2, 3))
    assert released == [(4, 3)]


def test_a_binding_is_current_while_its_tensors_are_the_same_and_unchanged() -> None:
    params = weights()
    bound = bind(params)
    assert bound.is_current(params)
    assert bound.is_current(dict(params))
    assert not bound.is_current({**params, "w": params["w"].clone()})
    assert not bound.is_current({"w": params["w"]})
    assert not bound.is_current([params["b"], params["w"]])
    assert bound.changed_leaf() is None
    params["w"].mul_(2.0)
    assert bound.changed_leaf() == "w"
    assert not bound.is_current(params)
    assert bind(params).is_current(params)


def test_a_change_through_a_view_is_seen() -> None:
    params = weights()
    bound = bind(params)
    params["w"][0].zero_()
    assert bound.changed_leaf() == "w"


def test_inference_tensors_can_be_bound() -> None:
    with torch.inference_mode():
        w = torch.ones(2)
    bound = bind({"w": w})
    assert bound.is_current({"w": w})
    assert compiled(lambda p, x: ADD(x, p["w"]))(bound, torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("leaf", [1.0, "text", np.ones(2)])
def test_a_leaf_that_is_no_tensor_is_refused_by_its_path(leaf: Any) -> None:
    with pytest.raises(BindingError, match=r"layers/1/w: a parameter is no tensor.*found"):
        bind({"layers": [{"w": torch.ones(1)}, {"w": leaf}]})


def test_an_empty_tree_is_refused() -> None:
    with pytest.raises(BindingError, match="no leaves"):
        bind({"layers": []})


def test_a_donated_leaf_is_refused_by_its_path() -> None:
    jit = compiled(lambda cache, x: WRITE(cache, x, 0), donate=("cache",))
    cache = torch.zeros(3)
    after = jit(cache, torch.ones(1))
    with pytest.raises(DonationError, match=r"layers/0: .*donated as cache of <lambda>"):
        bind({"layers": [cache]})
    assert bind({"layers": [after]}).paths == ("layers/0",)


def test_a_bound_argument_or_its_tensors_cannot_be_donated() -> None:
    jit = compiled(lambda p, cache, x: ADD(WRITE(cache, x, 0), p["w"]), donate=("cache",))
    w = torch.zeros(3)
    bound = bind({"w": w})
    with pytest.raises(DonationError, match=r"one buffer.*|cache and p/w"):
        jit(bound, w, torch.ones(1))
    assert w.tolist() == [0.0] * 3
    with pytest.raises(DonationError, match="cache: bound parameters cannot be donated"):
        jit(torch.ones(1), bind({"w": w}), torch.ones(1))


def test_a_binding_that_is_gone_frees_what_was_packed() -> None:
    jit = compiled(layer)
    bound = bind(weights())
    jit(bound, torch.ones(1, 3))
    variant = jit.explain(bound, torch.ones(1, 3)).variant
    assert len(variant.executables) == 1
    gone = weakref.ref(bound)
    del bound
    gc.collect()
    assert gone() is None
    assert len(variant.executables) == 0


def test_a_call_without_a_binding_runs_what_would_be_prepared() -> None:
    params = weights()
    jit = compiled(layer)
    x = torch.randn(2, 3)
    assert torch.allclose(jit(params, x), jit(bind(params), x), atol=1e-6)
    plain = jit.explain(params, x)
    assert plain.choices[0].is_fallback
    assert "must be a bound parameter" in plain.choices[0].refused[0].reason
    assert not jit.explain(bind(params), x).choices[0].is_fallback


def test_a_binding_serves_two_functions_that_prepare_differently() -> None:
    bound = bind({"w": torch.tensor([1.0, 2.0])})
    assert compiled(lambda p, x: ADD(SCALE(p["w"], by=2.0), x))(bound, torch.zeros(2)).tolist() == [2.0, 4.0]
    assert compiled(lambda p, x: ADD(SCALE(p["w"], by=3.0), x))(bound, torch.zeros(2)).tolist() == [3.0, 6.0]
    assert compiled(lambda p, x: ADD(NEG(p["w"]), x))(bound, torch.zeros(2)).tolist() == [-1.0, -2.0]
