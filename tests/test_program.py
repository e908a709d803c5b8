"""Programs as data: printed, compared, counted, costed, saved."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from core_ops import ADD, LINEAR, NEG, PAIR, SCALE, SUM, VIEW, f32, ops_of, stage

from atbx.core import program_file, staging
from atbx.core.abstract import Abstract, Dim
from atbx.core.errors import AtbxError
from atbx.core.op import registered_ops
from atbx.core.program import Literal, Program


def example(by: Any = 2.0) -> Program:
    def function(x: Any, w: Any) -> Any:
        with staging.scope("layers/0"):
            y = SCALE(LINEAR(x, w), by=by)
        up, down = PAIR(y)
        return ADD(up, 1.5), ADD(down, torch.tensor([1.0, 2.0, 3.0, 4.0])[0])

    return stage(function, f32(3, 2), f32(4, 2))


def test_a_program_prints_one_equation_a_line_with_types_scopes_and_paths() -> None:
    assert str(example()) == "\n".join(
        [
            "{ program",
            "    in a:f32[3,2]  # x0",
            "    in b:f32[4,2]  # x1",
            "    const c:f32[]",
            "    d:f32[3,4] = t_linear a b  # layers/0",
            "    e:f32[3,4] = t_scale[by=2.0] d  # layers/0",
            "    f:f32[3,4] g:f32[3,4] = t_pair e",
            "    h:f32[3,4] = t_add f 1.5",
            "    i:f32[3,4] = t_add g c",
            "    out h i",
            "}",
        ]
    )


def test_more_than_26_values_print_with_names_of_their_own() -> None:
    def function(x: Any) -> Any:
        for _ in range(800):
            x = NEG(x)
        return x

    lines = str(stage(function, f32(2))).splitlines()
    names = [line.split(":")[0].strip() for line in lines if "t_neg" in line]
    assert len(set(names)) == 800
    assert names[:2] == ["b", "c"]
    assert names[24:27] == ["z", "aa", "ab"]


def test_programs_are_compared_by_structure_and_not_by_names_or_scopes() -> None:
    assert example() == example()
    assert hash(example()) == hash(example())
    unscoped = example().with_equations(
        dataclasses.replace(e, scope="", source="") for e in example().equations
    )
    assert str(unscoped) != str(example())
    renamed = stage(lambda a: NEG(a), f32(2))
    renamed = dataclasses.replace(renamed, inputs=renamed.inputs)
    assert renamed == stage(lambda b: NEG(b), f32(2))
    assert example() != example(by=3.0)
    assert example() != "a program"
    assert len({example(), example(), example(by=3.0)}) == 2


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ((1, 2), (1.0, 2)), ("1", 1), (None, 0)]
)
def test_params_that_python_calls_equal_make_different_programs(one: Any, other: Any) -> None:
    assert example(by=one) == example(by=one)
    assert example(by=one) != example(by=other)


def test_literals_are_compared_by_type_and_sign_and_nan_equals_itself() -> None:
    assert Literal(1) != Literal(True)
    assert Literal(1) != Literal(1.0)
    assert Literal(0.0) != Literal(-0.0)
    assert Literal(float("nan")) == Literal(float("nan"))
    assert len({Literal(1), Literal(1.0), Literal(True), Literal(1)}) == 3


def test_two_functions_of_one_name_are_two_params() -> None:
    def with_param(function: Any) -> Program:
        return stage(lambda x: SCALE(x, by=function), f32(2))

    one, other = (lambda x: x), (lambda x: -x)
    assert with_param(one) == with_param(one)
    assert with_param(one) != with_param(other)


def test_shapes_dtypes_tags_and_constants_count_in_a_comparison() -> None:
    base = stage(NEG, f32(4))
    assert base != stage(NEG, f32(5))
    assert base != stage(NEG, Abstract((4,), torch.float64))
    assert base != stage(NEG, Abstract((Dim(4, "T"),), torch.float32))

    def plus(constant: torch.Tensor) -> Program:
        return stage(lambda x: ADD(x, constant), f32(2))

    assert plus(torch.tensor(1.0)) == plus(torch.tensor(1.0))
    assert plus(torch.tensor(1.0)) != plus(torch.tensor(2.0))
    assert plus(torch.tensor(float("nan"))) == plus(torch.tensor(float("nan")))
    assert plus(torch.tensor(0.0)) != plus(torch.tensor(-0.0))


def test_operands_in_another_order_or_results_swapped_make_another_program() -> None:
    assert stage(lambda x, y: ADD(x, y), f32(2), f32(2)) != stage(lambda x, y: ADD(y, x), f32(2), f32(2))
    assert stage(lambda x: PAIR(x), f32(2)) != stage(lambda x: PAIR(x)[::-1], f32(2))


def test_equations_are_counted_by_op_and_scope() -> None:
    program = example()
    assert len(program) == 5
    assert program.count() == 5
    assert program.count("t_add") == 2
    assert program.count(scope="layers/0") == 2
    assert program.count("t_add", scope="layers/0") == 0


def test_the_cost_of_a_program_is_that_of_its_equations() -> None:
    program = example()
    linear = program.equations[0].cost()
    assert linear.flops == 2 * 3 * 2 * 4
    assert linear.bytes == 4 * (6 + 8 + 12)
    # Beside it: scale 2 values moved, pair 3, add with a number 2, add with a scalar tensor 2 and 4 bytes.
    assert program.cost().flops == linear.flops
    assert program.cost().bytes == linear.bytes + 48 * (2 + 3 + 2 + 2) + 4


def test_uses_list_the_readers_of_a_value_and_the_outputs_last() -> None:
    program = stage(lambda x: (ADD(NEG(x), x), x), f32(2))
    (x,) = program.inputs
    assert program.uses()[x] == [0, 1, 2]
    assert program.uses()[program.equations[0].outputs[0]] == [1]


# --- saved ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    kind: str
    scale: float = 1.0
    inner: Setting | None = None
    sizes: tuple[int, ...] = ()


def saved(program: Program, **options: Any) -> Program:
    text = json.dumps(program_file.to_data(program), allow_nan=False)
    return program_file.from_data(json.loads(text), registered_ops(), **options)


def test_a_saved_program_comes_back_equal_with_paths_scopes_and_sources() -> None:
    program = example()
    back = saved(program)
    assert back == program
    assert str(back) == str(program)
    assert [e.source for e in back.equations] == [e.source for e in program.equations]
    assert back.equations[0].op is LINEAR
    assert back.cost() == program.cost()


@pytest.mark.parametrize(
    "param",
    [
        None,
        True,
        7,
        0.1,
        -0.0,
        float("inf"),
        float("nan"),
        "text",
        (),
        (1, (2.0, "x"), None),
        torch.bfloat16,
        Dim(8, "T"),
    ],
    ids=repr,
)
def test_every_kind_of_param_comes_back_exact(param: Any) -> None:
    program = example(by=param)
    back = saved(program)
    assert back == program
    assert type(back.equations[1].params["by"]) is type(param)


def test_frozen_dataclasses_come_back_by_the_classes_that_are_named() -> None:
    setting = Setting("yarn", 4.0, Setting("inner", sizes=(1, 2)))
    program = example(by=setting)
    assert saved(program, classes=(Setting,)) == program
    with pytest.raises(AtbxError, match=r"equations/1/params/by.*Setting"):
        saved(program)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_constants_come_back_to_the_bit(dtype: torch.dtype) -> None:
    constant = torch.tensor([[0.0, 1.0], [3.0, -0.0]]).to(dtype)
    program = stage(lambda x: ADD(x, constant), Abstract((2, 2), dtype))
    back = saved(program)
    assert back == program
    assert back.constants[0][1].dtype == dtype
    assert back.constants[0][1].shape == (2, 2)


def test_tags_and_axes_of_values_come_back() -> None:
    tagged = Abstract((Dim(4, "T"), 3), torch.float32)
    program = stage(
        lambda x, w: VIEW(LINEAR(x, w), shape=(20,)),
        tagged,
        Abstract((5, 3), torch.float32, ("o", "i"), "out_in"),
    )
    back = saved(program)
    assert back == program
    assert back.inputs[0].abstract.shape[0].tag == "T"
    assert back.inputs[1].abstract == program.inputs[1].abstract


def test_nan_and_infinite_constants_and_literals_are_json() -> None:
    constant = torch.tensor([float("nan"), float("inf")])
    program = stage(lambda x: (ADD(ADD(x, constant), float("-inf")), 3, True), f32(2))
    assert saved(program) == program


def test_a_param_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(AtbxError, match=r"equations/1/params/by/1.*function"):
        program_file.to_data(example(by=(1, lambda x: x)))


def test_a_program_of_an_op_that_is_not_registered_is_refused_by_name() -> None:
    data = program_file.to_data(example())
    with pytest.raises(AtbxError, match="t_linear"):
        program_file.from_data(data, {})


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda d: d.pop("equations"), "equations"),
        (lambda d: d.update(format=99), "format"),
        (lambda d: d["equations"][0].update(inputs=[{"value": 99}]), "equations/0/inputs/0"),
        (lambda d: d["inputs"][0].update(dtype="float99"), "inputs/0/dtype"),
        (lambda d: d["equations"][2].update(outputs=[]), "outputs|value"),
        (lambda d: d["constants"][0].update(bits="xx"), "constants/0/bits"),
    ],
)
def test_damaged_data_is_refused_with_its_place(change: Any, where: str) -> None:
    data = json.loads(json.dumps(program_file.to_data(example())))
    change(data)
    with pytest.raises(AtbxError, match=where):
        program_file.from_data(data, registered_ops())


def test_a_rewritten_program_can_be_saved() -> None:
    program = stage(lambda x: SUM(ADD(x, x), axis=0), f32(3, 2))
    without = program.with_equations(program.equations)
    assert ops_of(saved(without)) == ["t_add", "t_sum"]
