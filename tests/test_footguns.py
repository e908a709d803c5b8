"""Footguns, worst first: what would silently give wrong results elsewhere gives the right value here, or an error that
names the user's line; then what would be refused elsewhere in words that help nobody.

Written with the public face and the real ops, as a user meets them.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atbx
from atbx import ops
from atbx.core.errors import BucketError, DonationError, DTypeError, StagingError, StaticArgumentError

HERE = Path(__file__).name
X = torch.arange(4.0)


# --- silent and wrong elsewhere: stale values ----------------------------------------------------------------------


def test_the_result_of_a_call_is_never_overwritten_by_a_later_one() -> None:
    f = atbx.jit(lambda x: ops.add(x, 1.0))
    first = f(X)
    kept = first.clone()
    second = f(X + 10)
    assert torch.equal(first, kept)
    assert second.data_ptr() != first.data_ptr()


def test_the_result_may_be_changed_in_place_without_changing_a_later_one() -> None:
    f = atbx.jit(lambda x: (ops.add(x, 1.0), ops.reshape(x, (2, 2)), x))
    for result in f(X):
        result.fill_(-1.0)
    assert X.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [r.flatten().tolist() for r in f(X)] == [[1.0, 2.0, 3.0, 4.0], X.tolist(), X.tolist()]


def test_an_input_that_is_changed_in_place_between_calls_is_read_anew() -> None:
    x = X.clone()
    f = atbx.jit(lambda x: ops.multiply(x, 2.0))
    assert f(x).tolist() == [0.0, 2.0, 4.0, 6.0]
    x.add_(1.0)
    assert f(x).tolist() == [2.0, 4.0, 6.0, 8.0]


def test_a_number_is_an_argument_and_not_frozen_into_the_program() -> None:
    f = atbx.jit(lambda x, n: ops.multiply(x, n))
    assert [f(X, float(n)).tolist()[1] for n in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert f.cache_info().variants == 1


def test_a_static_number_is_part_of_the_key() -> None:
    f = atbx.jit(lambda x, n: ops.multiply(x, n), static=("n",))
    assert [f(X, float(n)).tolist()[1] for n in (1, 2, 1, 3)] == [1.0, 2.0, 1.0, 3.0]
    assert f.cache_info().variants == 3


def test_a_branch_on_a_static_argument_is_taken_anew_for_each_value() -> None:
    f = atbx.jit(lambda x, is_up: ops.add(x, 1.0) if is_up else ops.subtract(x, 1.0), static=("is_up",))
    assert f(X, True)[0].item() == 1.0
    assert f(X, False)[0].item() == -1.0
    assert f(X, True)[0].item() == 1.0


def test_a_branch_on_a_shape_is_taken_anew_for_each_shape() -> None:
    f = atbx.jit(lambda x: ops.add(x, 1.0) if x.shape[0] > 2 else ops.subtract(x, 1.0))
    assert f(torch.zeros(2))[0].item() == -1.0
    assert f(torch.zeros(3))[0].item() == 1.0
    assert f(torch.zeros(2))[0].item() == -1.0


def test_a_branch_on_a_missing_argument_is_taken_anew() -> None:
    f = atbx.jit(lambda x, bias=None: x if bias is None else ops.add(x, bias))
    assert f(X).tolist() == X.tolist()
    assert f(X, X).tolist() == (2 * X).tolist()
    assert f(X, None).tolist() == X.tolist()


@pytest.mark.parametrize(("one", "other"), [(1, True), (0.0, -0.0), (2, 2.0)])
def test_static_values_that_compare_equal_are_not_mixed_up(one: Any, other: Any) -> None:
    f = atbx.jit(lambda x, n: ops.cast(x, torch.float32) if isinstance(n, float) else x, static=("n",))
    one_by_one = [str(f.stage(X, n)) for n in (one, other)]
    f(X, one)
    f(X, other)
    assert f.cache_info().variants == 2
    assert [str(f.stage(X, n)) for n in (one, other)] == one_by_one


def test_zeros_of_both_signs_stay_apart_in_one_program() -> None:
    f = atbx.jit(lambda x: (ops.divide(x, 0.0), ops.divide(x, -0.0)))
    plus, minus = f(torch.ones(1))
    assert (plus.item(), minus.item()) == (float("inf"), float("-inf"))


def test_temporary_tensors_made_while_staging_are_not_mixed_up() -> None:
    def f(x: Any) -> Any:
        for i in range(20):
            x = ops.add(x, torch.full((4,), float(i)))
        return x

    assert atbx.jit(f)(torch.zeros(4)).tolist() == [190.0] * 4


def test_a_small_captured_tensor_is_what_it_was_when_the_variant_was_staged() -> None:
    captured = torch.ones(4)
    f = atbx.jit(lambda x: ops.add(x, captured))
    assert f(X).tolist() == [1.0, 2.0, 3.0, 4.0]
    captured.zero_()
    # As documented: a captured tensor is a constant. It is the same constant for every later call of that shape.
    assert f(X).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_same_tensor_may_be_passed_twice() -> None:
    f = atbx.jit(lambda x, y: ops.subtract(x, y))
    assert f(X, X).tolist() == [0.0] * 4
    assert f(X, X + 1).tolist() == [-1.0] * 4


def test_arguments_of_one_shape_in_another_order_are_not_mixed_up() -> None:
    f = atbx.jit(lambda a, b: ops.subtract(a, b))
    assert f(X, torch.ones(4)).tolist() == [-1.0, 0.0, 1.0, 2.0]
    assert f(b=X, a=torch.ones(4)).tolist() == [1.0, 0.0, -1.0, -2.0]
    assert f.cache_info().variants == 1


def test_keys_of_a_map_in_another_order_are_not_mixed_up() -> None:
    f = atbx.jit(lambda tree: ops.subtract(tree["a"], tree["b"]))
    assert f({"a": X, "b": torch.ones(4)}).tolist() == [-1.0, 0.0, 1.0, 2.0]
    assert f({"b": torch.ones(4), "a": X}).tolist() == [-1.0, 0.0, 1.0, 2.0]
    assert f.cache_info().variants == 1


def test_a_transposed_input_of_the_same_shape_gives_its_own_values() -> None:
    f = atbx.jit(lambda x: ops.add(ops.reshape(x, (9,)), 0.0))
    x = torch.arange(9.0).reshape(3, 3)
    assert f(x).tolist() == x.flatten().tolist()
    assert f(x.T).tolist() == x.T.flatten().tolist()
    assert f(x).tolist() == x.flatten().tolist()


def test_a_side_effect_happens_when_staging_and_never_when_a_variant_runs() -> None:
    seen: list[str] = []

    def f(x: Any) -> Any:
        seen.append(repr(x))
        return ops.add(x, 1.0)

    jit = atbx.jit(f)
    for _ in range(3):
        jit(X)
    assert seen == ["Staged(f32[4])"]


def test_a_function_that_draws_while_staging_draws_once_and_its_variants_agree() -> None:
    f = atbx.jit(lambda x: ops.add(x, torch.rand(4)))
    assert torch.equal(f(X), f(X))


def test_parameters_changed_in_place_are_noticed_by_their_binding() -> None:
    params = {"w": torch.eye(4)}
    bound = atbx.bind(params)
    assert atbx.jit(lambda p, x: ops.linear(x, p["w"]))(bound, X.reshape(1, 4)).tolist() == [X.tolist()]
    params["w"].mul_(2.0)
    assert not bound.is_current(params)
    assert bound.changed_leaf() == "w"


def test_threads_that_stage_at_the_same_time_record_into_their_own_programs() -> None:
    def chain(length: int) -> Any:
        def f(x: Any) -> Any:
            for _ in range(length):
                x = ops.add(x, 1.0)
            return x

        return f

    found: dict[int, int] = {}

    def work(length: int) -> None:
        found[length] = len(atbx.jit(chain(length)).stage(X).equations)

    threads = [threading.Thread(target=work, args=(50 * i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {50: 50, 100: 100, 150: 150, 200: 200}


# --- silent and wrong elsewhere: padding and donation --------------------------------------------------------------

TOKENS = {"T": atbx.Bucket((("x", 0),), (4, 8), count="n")}


def test_padding_never_reaches_a_sum_because_the_op_must_be_given_the_count() -> None:
    f = atbx.jit(lambda x, n: ops.softmax(x, axis=0), buckets=TOKENS)
    with pytest.raises(BucketError, match=rf"{HERE}.*softmax mixes along axis 0.*'T'"):
        f(torch.ones(3), None)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: ops.divide(x, x.shape[0]),
        lambda x, n: x * x.shape[0],
        lambda x, n: x / x.shape[0],
    ],
)
def test_the_padded_size_cannot_be_used_as_a_number(function: Any) -> None:
    with pytest.raises(BucketError, match=r"padded size 4 of bucketed axis 'T'.*count"):
        atbx.jit(function, buckets=TOKENS)(torch.ones(3), None)


def test_a_donated_value_cannot_be_read_again_by_any_way_in() -> None:
    table = torch.zeros(1, 8, dtype=torch.int32)
    counting = atbx.jit(
        lambda table, ids: ops.logits.count_tokens(table, ids, ops.equal(ids, ids)), donate=("table",)
    )
    counting(table, torch.tensor([3]))
    for use in (
        lambda: counting(table, torch.tensor([3])),
        lambda: counting.explain(table, torch.tensor([3])),
        lambda: atbx.jit(lambda t: ops.add(t, 1))(table),
        lambda: atbx.jit(lambda x: ops.add(x, table))(torch.zeros(1, 8, dtype=torch.int32)),
        lambda: ops.add(table, 1),
        lambda: atbx.bind({"t": table}),
        lambda: atbx.reference(lambda t: ops.add(t, 1), table),
    ):
        with pytest.raises(DonationError, match="donated"):
            use()


# --- refused elsewhere too, here with the line ---------------------------------------------------------------------


def line_of(function: Any) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno}"


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: x if x > 0 else ops.add(x, 1.0), "Python branch.*ops.where"),
        (lambda x: ops.add(x, 1.0) if x == x else x, "Python branch"),
        (lambda x: max(x, 0.0), "Python branch"),
        (lambda x: torch.relu(x), r"torch\.relu was applied"),
        (lambda x: torch.nn.functional.silu(x), r"torch\.silu was applied"),
        (lambda x: torch.rand(50, 50) @ x, r"got a tensor \(50, 50\)"),
        (lambda x: np.add(x, 1.0), "value of .* is not known"),
        (lambda x: ops.add(x, int(x[0])), "value of .* is not known"),
        (lambda x: [ops.add(v, 1.0) for v in x], "cannot be iterated"),
        (lambda x: ops.add(x, torch.zeros(5000)), r"got a tensor \(5000,\).*argument"),
        (lambda x: ops.add(x, "1"), "str"),
        (lambda x: f"{x:.2f}", "format"),
    ],
)
def test_what_cannot_be_staged_is_an_error_at_the_users_line(function: Any, what: str) -> None:
    with pytest.raises((StagingError, TypeError, atbx.errors.AtbxError), match=what) as caught:
        atbx.jit(function)(X)
    if isinstance(caught.value, StagingError):
        assert line_of(function) in str(caught.value)


def test_a_torch_method_on_a_staged_value_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=rf"no attribute 'view'.*{HERE}.*shape, dtype, ndim"):
        atbx.jit(lambda x: x.view(2, 2))(X)


def test_assignment_into_a_staged_value_is_an_error() -> None:
    def assign(x: Any) -> Any:
        x[0] = 1.0
        return x

    def add_in_place(x: Any) -> Any:
        y = x
        y += 1.0
        return ops.subtract(y, x)

    with pytest.raises((StagingError, TypeError), match="assign"):
        atbx.jit(assign)(X)
    # Not in place: `+=` on an immutable value makes a new one, as with Python's numbers.
    assert atbx.jit(add_in_place)(X).tolist() == [1.0] * 4
    assert X.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_value_that_escapes_is_refused_wherever_it_is_used() -> None:
    kept: list[Any] = []

    def leak(x: Any) -> Any:
        kept.append(ops.add(x, 1.0))
        return kept[-1]

    atbx.jit(leak)(X)
    for use in (
        lambda: atbx.jit(lambda x: ops.add(x, kept[0]))(X),
        lambda: atbx.jit(lambda x: kept[0])(X),
        lambda: ops.add(kept[0], 1.0),
        lambda: atbx.reference(lambda x: ops.add(x, kept[0]), X),
        lambda: atbx.jit(lambda x: ops.add(x, 1.0))(kept[0]),
    ):
        with pytest.raises(StagingError, match=r"(?i)staged"):
            use()


def test_mixed_dtypes_are_refused_and_numbers_are_weak() -> None:
    f = atbx.jit(lambda x, y: ops.add(x, y))
    with pytest.raises(DTypeError, match="add"):
        f(X, X.double())
    assert atbx.jit(lambda x: ops.add(x, 1))(X.bfloat16()).dtype == torch.bfloat16


def test_a_mutable_configuration_is_refused_at_the_first_call() -> None:
    f = atbx.jit(lambda x, config: ops.multiply(x, config["scale"]), static=("config",))
    with pytest.raises(StaticArgumentError, match=r"^config: .*frozen.*dict.*stale"):
        f(X, {"scale": 2.0})


def test_configuration_passed_as_a_value_says_to_name_it_static() -> None:
    f = atbx.jit(lambda x, mode: ops.add(x, 1.0) if mode == "up" else x)
    with pytest.raises(StagingError, match=r"^mode: .*found str.*static="):
        f(X, "up")


def test_a_function_that_returns_what_it_was_not_given_is_refused_by_path() -> None:
    with pytest.raises(StagingError, match="output out is a torch tensor"):
        atbx.jit(lambda x: {"out": torch.zeros(1)})(X)
    with pytest.raises(StagingError, match=r"output 1 is a str"):
        atbx.jit(lambda x: (ops.add(x, 1.0), "done"))(X)


def test_a_function_of_no_op_at_all_is_a_copy_of_its_argument() -> None:
    result = atbx.jit(lambda x: x)(X)
    assert result.tolist() == X.tolist()
    assert result.data_ptr() != X.data_ptr()


def test_a_compiled_function_of_no_argument_gives_its_constants() -> None:
    f = atbx.jit(lambda: ops.add(torch.ones(2), 1.0))
    assert f().tolist() == [2.0, 2.0]
    f().zero_()
    assert f().tolist() == [2.0, 2.0]


def test_a_compiled_method_reads_its_object_when_it_is_staged_only() -> None:
    class Model:
        def __init__(self) -> None:
            self.scale = 2.0
            self.run = atbx.jit(lambda x: ops.multiply(x, self.scale))

    model = Model()
    assert model.run(X)[1].item() == 2.0
    model.scale = 5.0
    # A known sharp edge, as in JAX: what the function closes over is read once. Pass it, or name it static.
    assert model.run(X)[1].item() == 2.0
    model.run.clear()
    assert model.run(X)[1].item() == 5.0
