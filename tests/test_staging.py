"""Staging: what is recorded, how it is labelled, and what is refused with the user's line."""

from __future__ import annotations

import contextvars
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_ops import ADD, NEG, PAIR, SCALE, SUM, WRITE, compiled, f32, ops_of, stage

from atbx.core import staging
from atbx.core.abstract import Abstract, Dim
from atbx.core.errors import BucketError, ShapeError, StagingError
from atbx.core.op import ReferenceInterpreter, ShapeInterpreter, has_interpreter, interpreter
from atbx.core.program import Literal
from atbx.core.staging import LARGEST_CONSTANT

HERE = Path(__file__).name


def test_ops_are_recorded_in_order_with_operands_params_and_results() -> None:
    program = stage(lambda x, y: ADD(SCALE(x, by=2), y), f32(3), f32(3))
    assert ops_of(program) == ["t_scale", "t_add"]
    scale, add = program.equations
    assert scale.params == {"by": 2}
    assert scale.inputs == (program.inputs[0],)
    assert add.inputs == (scale.outputs[0], program.inputs[1])
    assert program.outputs == add.outputs
    assert [v.path for v in program.inputs] == ["x0", "x1"]


def test_numbers_and_none_become_literals() -> None:
    program = stage(lambda x, y: (ADD(x, 2), ADD(x, 0.5), WRITE(x, y, None)), f32(3), f32(1))
    assert program.equations[0].inputs[1] == Literal(2)
    assert program.equations[1].inputs[1] == Literal(0.5)
    assert program.equations[2].inputs[2] == Literal(None)


def test_an_op_with_several_results_gives_a_tuple() -> None:
    program = stage(lambda x: PAIR(x)[1], f32(3))
    assert program.outputs == (program.equations[0].outputs[1],)


def test_scopes_nest_and_end_and_each_equation_knows_its_line() -> None:
    def function(x: Any) -> Any:
        with staging.scope("layers"):
            with staging.scope("0"):
                x = NEG(x)
            x = NEG(x)
        return NEG(x)

    equations = stage(function, f32(2)).equations
    assert [e.scope for e in equations] == ["layers/0", "layers", ""]
    lines = [int(e.source.split(":")[1].split(" ")[0]) for e in equations]
    first = function.__code__.co_firstlineno
    assert lines == [first + 3, first + 4, first + 5]
    assert all(HERE in e.source and e.source.endswith("in function") for e in equations)


def test_a_scope_ends_when_its_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), staging.scope("layers"):
        _ = 1 / 0
    assert stage(NEG, f32(2)).equations[0].scope == ""


def test_a_small_captured_tensor_is_a_constant_once_and_a_copy() -> None:
    captured = torch.tensor([1.0, 2.0])
    program = stage(lambda x: ADD(ADD(x, captured), captured), f32(2))
    assert len(program.constants) == 1
    captured.zero_()
    assert program.constants[0][1].tolist() == [1.0, 2.0]


def test_temporary_tensors_are_constants_of_their_own() -> None:
    # Each is freed before the next is made, so that the next may well lie at the same address.
    def function(x: Any) -> Any:
        for i in range(50):
            x = ADD(x, torch.tensor(float(i)))
        return x

    program = stage(function, f32(2))
    assert [value.item() for _, value in program.constants] == list(range(50))
    assert compiled(function)(torch.zeros(2)).tolist() == [1225.0] * 2


def test_the_largest_constant_is_taken_and_one_more_entry_is_refused() -> None:
    fits, too_large = torch.zeros(LARGEST_CONSTANT), torch.zeros(LARGEST_CONSTANT + 1)
    assert len(stage(lambda x: ADD(x, fits), f32(LARGEST_CONSTANT)).constants) == 1
    with pytest.raises(StagingError, match=rf"{HERE}.*t_add got a tensor \(1025,\).*captured.*argument"):
        stage(lambda x: ADD(x, too_large), f32(LARGEST_CONSTANT + 1))


@pytest.mark.parametrize(
    ("misuse", "what"),
    [
        (lambda x: NEG(x) if x else x, "Python branch"),
        (lambda x: [NEG(v) for v in x], "iterated"),
        (lambda x: int(x), "not known"),
        (lambda x: float(x), "not known"),
        (lambda x: [1, 2][x], "not known"),
        (lambda x: np.asarray(x), "not known"),
        (lambda x: x.item(), "not known"),
        (lambda x: x.tolist(), "not known"),
        (lambda x: torch.neg(x), r"torch\.neg was applied"),
        (lambda x: torch.zeros(2).add(x), r"torch\.add was applied"),
        (lambda x: ADD(x, "text"), "got a str"),
        (lambda x: ADD(x, [1.0]), "got a list"),
    ],
)
def test_what_needs_a_value_is_refused_at_the_users_line(misuse: Any, what: str) -> None:
    with pytest.raises(StagingError, match=what) as caught:
        stage(misuse, f32(2))
    assert f"{HERE}:{misuse.__code__.co_firstlineno}" in str(caught.value)


def test_a_missing_attribute_says_what_a_staged_value_has() -> None:
    with pytest.raises(AttributeError, match=rf"no attribute 'sum' .*{HERE}.*shape, dtype, ndim"):
        stage(lambda x: x.sum(), f32(2))


def test_a_value_of_another_trace_is_refused() -> None:
    escaped: list[Any] = []

    def leaky(x: Any) -> Any:
        escaped.append(x)
        return NEG(x)

    stage(leaky, f32(2))
    with pytest.raises(StagingError, match=r"t_add got a value that was staged by another call"):
        stage(lambda x: ADD(x, escaped[0]), f32(2))
    with pytest.raises(StagingError, match=r"output result was staged by another call.*outlive"):
        compiled(lambda x: escaped[0])(torch.ones(2))


@pytest.mark.parametrize("kind", [ShapeError])
def test_an_error_of_a_shape_rule_carries_the_line_that_called_the_op(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        stage(lambda x, y: ADD(x, y), f32(2), f32(3))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "t_add" in text
    assert HERE in text


def test_mixing_along_a_bucketed_axis_without_a_count_is_refused() -> None:
    padded = Abstract((Dim(4, "T"), 2), torch.float32)
    count = Abstract((), torch.int64)
    with pytest.raises(BucketError, match=rf"{HERE}.*t_sum mixes along axis 0.*bucket 'T'.*count"):
        stage(lambda x: SUM(x, axis=0), padded)
    assert ops_of(stage(lambda x: SUM(x, axis=1), padded)) == ["t_sum"]
    assert ops_of(stage(lambda x, n: SUM(x, n, axis=0), padded, count)) == ["t_sum"]


def test_a_padded_size_as_an_operand_is_refused() -> None:
    padded = Abstract((Dim(4, "T"),), torch.float32)
    with pytest.raises(BucketError, match=r"padded size 4 of bucketed axis 'T'"):
        stage(lambda x: ADD(x, x.shape[0]), padded)


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (torch.zeros(1), "output out is a torch tensor"),
        ("text", "output out is a str"),
        (np.zeros(1), "output out is a ndarray"),
    ],
)
def test_an_output_that_was_not_computed_is_refused_by_its_path(result: Any, what: str) -> None:
    with pytest.raises(StagingError, match=what):
        stage(lambda x: {"out": result}, f32(2))


def test_the_interpreter_belongs_to_its_context_and_thread() -> None:
    seen: list[bool] = []
    with interpreter(ShapeInterpreter()):
        thread = threading.Thread(target=lambda: seen.append(has_interpreter()))
        thread.start()
        thread.join()
        assert NEG(f32(2)) == f32(2)
        copied = contextvars.copy_context()
    assert seen == [False]
    assert not has_interpreter()
    assert copied.run(has_interpreter)


def test_the_reference_interpreter_checks_shapes_before_it_computes() -> None:
    with interpreter(ReferenceInterpreter()):
        assert ADD(torch.ones(2), 1.0).tolist() == [2.0, 2.0]
        with pytest.raises(ShapeError, match="differ in shape"):
            ADD(torch.ones(2, 3), torch.ones(3))


def test_staging_leaves_no_interpreter_behind_when_the_function_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        stage(lambda x: 1 / 0, f32(2))
    assert not has_interpreter()
