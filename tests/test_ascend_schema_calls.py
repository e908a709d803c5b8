"""Calls checked against the schemas of the releases; torch's own argument parser is the oracle of what binds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from refusals import cases, check

from atbx.core.errors import OptionError
from atbx.kernels.ascend.schemas import binding, check_call, check_keywords, kind_of, versions

TENSOR = torch.ones(2)
VALUES: dict[str, object] = {
    "Tensor": TENSOR,
    "int": 1,
    "float": 1.5,
    "bool": True,
    "str": "a",
    "None": None,
    "int[]": [1, 2],
    "[]": [],
    "float[]": [1.0, 2.0],
    "bool[]": [True, False],
    "str[]": ["a"],
    "Tensor[]": [TENSOR, TENSOR],
    "Tensor?[]": [TENSOR, None],
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "memory_format": torch.contiguous_format,
}
TYPES = [
    base + suffix for base in ("Tensor", "int", "float", "bool", "str") for suffix in ("", "?", "[]", "[]?")
]
TYPES += [
    "SymInt",
    "SymInt[]",
    "int[2]",
    "int[1]?",
    "bool[3]",
    "Tensor?[]",
    "ScalarType",
    "ScalarType?",
    "Device?",
]
TYPES += ["Layout?", "MemoryFormat?", "Scalar", "Scalar?", "Scalar[]"]

# Kinds that torch binds and the check refuses, for each kind of type: readings that nobody means.
STRICTER = {
    ("Tensor", "None"),  # an undefined tensor
    ("bool", "None"),
    ("bool", "int"),
    ("bool", "float"),
    ("int", "bool"),
    ("float", "bool"),
    ("int", "layout"),
    ("int", "memory_format"),
    ("ScalarType", "bool"),
    ("Layout", "int"),
    ("Layout", "bool"),
    ("MemoryFormat", "int"),
    ("MemoryFormat", "bool"),
    ("Scalar", "dtype"),
    ("Scalar", "layout"),
    ("int[]", "bool[]"),
    ("int[]", "bool"),  # one value for a list of fixed length
    ("float[]", "bool[]"),
    ("bool[]", "int[]"),
    ("bool[]", "float[]"),
    ("str[]", "str"),
    ("Tensor?[]", "Tensor"),
}


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("atbx_binding_probe", "DEF")
    yield library
    library._destroy()


def family(type_name: str) -> str:
    """`int[2]?` and `SymInt[]` as the entries of STRICTER name them."""
    bare = type_name.removesuffix("?").replace("SymInt", "int")
    return bare if "[" not in bare else bare[: bare.index("[")] + "[]"


def torch_binds(operator: object, value: object) -> bool:
    try:
        operator(value)  # type: ignore[operator]
    except (RuntimeError, TypeError):
        return False
    return True


def test_what_passes_binds_in_torch_and_what_is_refused_does_not(library: torch.library.Library) -> None:
    used = set()
    for place, type_name in enumerate(TYPES):
        library.define(f"take{place}({type_name} a) -> ()")
        library.impl(f"take{place}", lambda a: None, "CompositeExplicitAutograd")
        operator = getattr(torch.ops.atbx_binding_probe, f"take{place}").default
        for kind, value in VALUES.items():
            binds = torch_binds(operator, value)
            if not binding._mismatches(operator._schema, [kind], {}):
                assert binds, f"{kind} passes for {type_name} and torch refuses it"
            elif binds:
                used.add((family(type_name), kind))
    # Another torch may have fewer of these readings; a new one has to be looked at.
    assert used <= STRICTER
    assert {("Tensor", "None"), ("int", "bool"), ("str[]", "str")} <= used


def test_kinds_of_values() -> None:
    for kind, value in VALUES.items():
        assert kind_of(value) == kind
    assert kind_of((1, 2.5)) == "float[]"
    assert kind_of(torch.Size([2, 3])) == "int[]"


# Calls against the releases.


def test_a_call_that_binds_everywhere_is_silent() -> None:
    assert check_call("npu::npu_rms_norm", ["Tensor", "Tensor"], {"epsilon": "float"}, versions()) == []
    paged = ["Tensor"] * 3 + ["int", "int", "float"] + ["Tensor"] * 3
    assert check_call("atb::_npu_paged_attention", paged, {"workspace": "Tensor?"}, versions()) == []


def test_a_keyword_that_some_releases_lack_is_named_with_them() -> None:
    found = check_call("npu::npu_scatter_pa_kv_cache", ["Tensor"] * 5, {"cache_mode": "str"}, versions())
    assert len(found) == 2
    for version, line in zip(("2.7.1", "2.9.0"), found, strict=True):
        assert line.startswith(
            f"torch_npu {version}: npu::npu_scatter_pa_kv_cache: has no argument 'cache_mode'; it has key,"
        )


def test_a_default_that_differs_has_to_be_given() -> None:
    operator, tensors = "npu::npu_apply_rotary_pos_emb", ["Tensor"] * 4
    assert check_call(operator, tensors, {}, versions()) == [
        f"{operator}: the default of 'layout' differs, so it has to be given: "
        "'BSH' in 2.7.1, 'BSH' in 2.9.0, 'BSH' in 2.10.0, 'BSND' in 2.12.0, 'BSND' in 2.13.0"
    ]
    assert check_call(operator, tensors, {"layout": "str"}, versions()) == []
    assert check_call(operator, [*tensors, "str"], {}, versions()) == []
    assert check_call(operator, tensors, {}, "2.13.0") == []
    assert check_call(operator, tensors, {}, ["2.7.1.post8", "2.13.0"]) == []


def test_an_absent_operator_is_named_with_the_releases_that_have_it() -> None:
    assert check_call("npu::npu_add_rms_norm_v2", ["any"], {}, ["2.7.1"]) == [
        "torch_npu 2.7.1: no operator npu::npu_add_rms_norm_v2 (it is in 2.10.0, 2.12.0, 2.13.0)"
    ]
    assert check_call("npu::npu_nothing", [], {}, "2.13.0") == [
        "torch_npu 2.13.0: no operator npu::npu_nothing (it is in no release known here)"
    ]


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        (["Tensor"], {}, "argument 'gamma' is missing"),
        (["Tensor", "float"], {}, "argument 'gamma' is Tensor, given float"),
        (["Tensor", "Tensor?"], {}, "argument 'gamma' is Tensor, given Tensor?"),
        (["Tensor", "Tensor", "Tensor"], {}, "argument 'epsilon' is float, given Tensor"),
        (["Tensor", "Tensor"], {"gamma": "Tensor"}, "argument 'gamma' is given by position and by keyword"),
        (["Tensor", "Tensor"], {"eps": "float"}, "has no argument 'eps'; it has input, gamma, epsilon"),
        (["Tensor"] * 2 + ["float"] * 2, {}, "takes 3 positional arguments, 4 are given"),
    ],
)
def test_what_does_not_bind_is_told(args: list[str], kwargs: dict[str, str], told: str) -> None:
    assert check_call("npu::npu_rms_norm", args, kwargs, "2.13.0") == [
        f"torch_npu 2.13.0: npu::npu_rms_norm: {told}"
    ]


def test_keyword_only_arguments_are_not_positional() -> None:
    """FIA takes its mask by keyword: a fourth positional argument is refused, and told which it would have been."""
    found = check_call("npu::npu_fused_infer_attention_score_v2", ["Tensor"] * 4, {}, "2.13.0")
    assert found == [
        "torch_npu 2.13.0: npu::npu_fused_infer_attention_score_v2: takes 3 positional arguments, 4 are given "
        "(by keyword only: query_rope)"
    ]


def test_a_call_without_overload_may_bind_to_any_and_one_with_overload_to_that_alone() -> None:
    operator = "npu::npu_fused_infer_attention_score_v2"
    out = {"workspace": "Tensor", "out": "Tensor[]"}
    assert check_call(operator, ["Tensor"] * 3, out, ["2.10.0", "2.13.0"]) == []
    assert check_call(f"{operator}.out", ["Tensor"] * 3, out, ["2.10.0", "2.13.0"]) == []
    assert any(
        "no argument 'out'" in line
        for line in check_call(f"{operator}.default", ["Tensor"] * 3, out, "2.13.0")
    )


def test_names_alone_can_be_checked() -> None:
    assert check_keywords("npu::npu_mrope", ["rotary_mode", "cache_mode"], ["2.9.0", "2.10.0"]) == [
        "torch_npu 2.9.0: npu::npu_mrope: has no argument 'cache_mode'"
    ]
    assert check_keywords("npu::npu_add_rms_norm_v2", [], ["2.9.0"]) == [
        "torch_npu 2.9.0: no operator npu::npu_add_rms_norm_v2 (it is in 2.10.0, 2.12.0, 2.13.0)"
    ]
    assert check_call("npu::npu_rms_norm", ["any"] * 2, {"epsilon": "any"}, versions()) == []


def test_aten_operators_are_checked_against_the_installed_torch() -> None:
    assert check_call("aten::mm", ["Tensor", "Tensor"], {}, versions()) == []
    assert check_call("aten::mm.default", ["Tensor"], {}, versions()) == [
        f"torch {torch.__version__}: aten::mm: argument 'mat2' is missing"
    ]
    assert check_call("aten::no_such_operator", [], {}, versions()) == [
        f"torch {torch.__version__}: no operator aten::no_such_operator"
    ]


def test_names_of_filled_places_have_to_agree() -> None:
    one, two = (torch._C.parse_schema(f"x::f(Tensor {name}) -> ()") for name in ("cos", "sin"))
    assert binding._changes_of_meaning("x::f", ["Tensor"], {}, {"1": one, "2": two}) == [
        "x::f: argument 0 has different names: 'cos' in 1, 'sin' in 2"
    ]


@cases(
    (
        "a kind",
        lambda: check_call("npu::npu_rms_norm", ["tensor"], {}, "2.13.0"),
        OptionError,
        "not a kind.*found tensor",
    ),
    (
        "a release",
        lambda: check_call("npu::npu_rms_norm", [], {}, "3.0"),
        OptionError,
        "no operator schemas.*found 3.0",
    ),
    ("a value", lambda: kind_of(object()), OptionError, "no operator takes such an argument"),
    (
        "a mixed list",
        lambda: kind_of([1, "a"]),
        OptionError,
        r"no operator takes such an argument.*\[1, 'a'\]",
    ),
    ("a nested list", lambda: kind_of([[1], [2]]), OptionError, "no operator takes such an argument"),
)
def test_malformed_questions_are_refused(call, kind, pattern) -> None:
    check(call, kind, pattern)


def test_every_kind_of_value_is_a_kind() -> None:
    for kind, optional in itertools.product(VALUES, ("", "?")):
        if kind != "None":
            assert binding._KIND.fullmatch(kind + optional), kind
