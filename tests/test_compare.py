"""`atbx compare`: the tolerance by hand, kernels and fusions that are wrong are found where they are, swaps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_chat_model import chat_model, error_of, json_of, text_of
from small_models import random_params, small_llama

import atbx
from atbx.command_line import main
from atbx.commands import compare as compare_command
from atbx.comparison import Comparison, compare
from atbx.core.backend import Backend, Kernel
from atbx.core.errors import OptionError
from atbx.core.rewrite import Builder, FusionRule, Match
from atbx.kernels import cpu
from atbx.model_step import random_ids, teacher_forced
from atbx.models import llama
from atbx.ops.packed import GATED_PACKED
from atbx.recording import record, reference_values
from atbx.swapping import groups_of, swap
from atbx.tolerance import allowed_units, judge, unit_roundoff

STEP = {"static": ("config",), "donate": ("cache",)}


def step_of(dtype: torch.dtype = torch.float32, decode: int = 1, **changes: Any) -> tuple[Any, ...]:
    """Arguments of a decode step after a prompt of 7 tokens (of the prefill, with decode=0)."""
    config = small_llama(**changes)
    binding = atbx.bind(random_params(config, dtype))
    ids = random_ids(8, config.vocab)
    *_, step = teacher_forced(llama.forward, binding, config, ids, cpu.backend(), dtype, decode=decode)
    return step.arguments


def broken(op: str, factor: float = 1.02, scope: str = "") -> Backend:
    """The CPU backend with a kernel of `op` that is wrong by a factor, in one scope or everywhere."""
    real = cpu.backend()

    def make(equation: Any) -> Any:
        run = next(k for k in real.table[op] if k.refuses(equation) is None and not k.writes_out).make(
            equation
        )

        def wrong(*operands: Any) -> Any:
            result = run(*operands)
            return tuple(x * factor for x in result) if isinstance(result, tuple) else result * factor

        return wrong

    kernel = Kernel(
        f"broken.{op}", op, make, refuses=lambda e: None if e.scope.startswith(scope) else "elsewhere"
    )
    return replace(real, table={**real.table, op: [kernel, *real.table[op]]})


# --- the tolerance -------------------------------------------------------------------------------------------------


def test_units_and_what_is_allowed() -> None:
    assert [unit_roundoff(d) for d in (torch.float32, torch.float16, torch.bfloat16)] == [
        2**-24,
        2**-11,
        2**-8,
    ]
    assert allowed_units(torch.float32, 4096) == 4 + 64
    assert allowed_units(torch.bfloat16, 4096) == 4 + 64 * 2**-16
    assert allowed_units(torch.float64, 100) == 4 + 10


def test_an_error_is_counted_in_units_of_its_own_row() -> None:
    exact = torch.tensor([[1.0, -2.0], [1024.0, 0.0]], dtype=torch.float64)
    reference = exact.float()
    found = reference.clone()
    found[1, 1] = 3 * 1024 * 2**-24
    assert judge(found, reference, exact, 4.0).units == 3.0
    found[0, 0] += 10 * 2**-23  # the row's largest is 2, so a unit is 2^-23
    judgement = judge(found, reference, exact, 4.0)
    assert (judgement.units, judgement.place, judgement.passed) == (10.0, (0, 0), False)
    assert judgement.scale == 1024.0


def test_the_rounding_of_the_reference_rule_widens_the_unit() -> None:
    exact = torch.tensor([1.0, 1.0], dtype=torch.float64)
    reference = torch.tensor([1.0, 1.25])
    found = torch.tensor([1.5, 1.0])
    assert judge(found, reference, exact, 4.0).units == 2.0


def test_what_is_not_finite_must_be_the_same() -> None:
    reference = torch.tensor([-math.inf, math.nan, 1.0])
    exact = reference.double()
    assert judge(reference.clone(), reference, exact, 4.0).passed
    for place, value in ((0, -1e30), (1, 0.0), (2, math.nan), (2, math.inf)):
        found = reference.clone()
        found[place] = value
        judgement = judge(found, reference, exact, 4.0)
        assert not judgement.passed
        assert judgement.place == (place,)


def test_an_overflow_of_the_dtype_is_what_its_rule_says() -> None:
    exact = torch.tensor([70000.0], dtype=torch.float64)
    assert judge(torch.tensor([math.inf]).half(), exact.half(), exact, 4.0).passed


def test_integers_are_equal_and_padding_does_not_count() -> None:
    reference = torch.tensor([[1, 2], [3, 4]])
    found = torch.tensor([[1, 2], [3, 5]])
    judgement = judge(found, reference, reference, 0.0)
    assert (judgement.passed, judgement.error, judgement.place) == (False, 1, (1, 1))
    real = torch.tensor([[True], [False]])
    assert judge(found, reference, reference, 0.0, real=real).passed


def test_another_dtype_or_shape_is_named() -> None:
    reference = torch.zeros(2, 3)
    judgement = judge(torch.zeros(2, 3).half(), reference, reference.double(), 4.0)
    assert not judgement.passed
    assert judgement.problem is not None
    assert "torch.float32 (2, 3)" in judgement.problem
    assert "torch.float16" in judgement.problem


# --- comparisons ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("end_to_end", [False, True])
@pytest.mark.parametrize("decode", [0, 1])
def test_the_cpu_backend_is_within_the_tolerance(dtype: torch.dtype, end_to_end: bool, decode: int) -> None:
    found = compare(llama.forward, *step_of(dtype, decode), end_to_end=end_to_end, **STEP)
    assert found.passed, found.first
    assert found.first is None
    assert [m.scope for m in found.modules()] == ["", "layers/0", "layers/1"]
    judged = [e for e in found.entries if e.judgement is not None]
    assert len(judged) > 15
    assert any(e.judgement is not None and e.judgement.error > 0 for e in judged), (
        "nothing was rounded anywhere"
    )


def test_parameters_that_are_not_bound_and_other_functions() -> None:
    ops = atbx.ops

    def function(x: Any, w: Any) -> Any:
        return ops.softmax(ops.linear(x, w), axis=-1), ops.argmax(x, axis=-1)

    x, w = torch.randn(3, 16), torch.randn(8, 16)
    found = compare(function, x, w)
    assert [e.op for e in found.entries] == ["linear", "softmax", "argmax"]
    assert found.passed
    assert [e.length for e in found.entries] == [16, 8, 16]


def scopes_past(found: Comparison) -> list[tuple[str, str]]:
    return [(e.scope, e.op) for e in found.entries if not e.passed]


def test_a_wrong_kernel_is_found_alone_because_errors_are_not_passed_on() -> None:
    found = compare(llama.forward, *step_of(), device=broken("norm_gated_mlp", scope="layers/1"), **STEP)
    assert scopes_past(found) == [("layers/1", "norm_gated_mlp")]
    first = found.first
    assert first is not None
    assert first.kernel == "broken.norm_gated_mlp"
    assert first.judgement is not None
    assert first.judgement.error == pytest.approx(0.02 * first.judgement.scale, rel=0.01)
    (module,) = [m for m in found.modules() if m.failed]
    assert (module.scope, module.failed, module.worst.op) == ("layers/1", 1, "norm_gated_mlp")


def test_end_to_end_the_first_is_the_wrong_kernel_and_what_follows_is_off_too() -> None:
    device = broken("norm_gated_mlp", scope="layers/0")
    found = compare(llama.forward, *step_of(), device=device, end_to_end=True, **STEP)
    past = scopes_past(found)
    assert past[0] == ("layers/0", "norm_gated_mlp")
    assert ("layers/1", "norm_gated_mlp") in past


def wrong_mlp(match: Match, builder: Builder) -> None:
    """gated(up, gate): the halves packed in the wrong order."""
    from atbx.ops.structural import CONCAT

    (both,) = builder.apply(CONCAT, (match.atoms["up"], match.atoms["gate"]), {"axis": -1})
    (out,) = builder.apply(GATED_PACKED, (both,), match.params(0))
    builder.bind("hidden", out)


def test_a_wrong_fusion_is_found_though_its_kernels_are_right() -> None:
    from atbx.core.rewrite import Pattern

    pattern = (Pattern("gated", ("gate", "up"), ("hidden",)),)
    rule = FusionRule("wrong", pattern, ("hidden",), wrong_mlp)
    real = cpu.backend()
    found = compare(llama.forward, *step_of(), device=replace(real, rules=[rule]), **STEP)
    past = [e for e in found.entries if not e.passed]
    assert [(e.scope, e.op) for e in past] == [("layers/0", "gated_packed"), ("layers/1", "gated_packed")]
    for entry in past:
        assert entry.judgement is not None
        assert entry.judgement.passed
        assert entry.fusion is not None
        assert not entry.fusion.passed


def test_values_that_both_programs_keep_are_known() -> None:
    recorded = record(llama.forward, step_of(), {}, cpu.backend(), **STEP)
    written = reference_values(recorded.written, recorded.inputs)
    fused = reference_values(recorded.lowered.program, recorded.inputs)
    shared = [
        v for e in recorded.lowered.program.equations for v in e.outputs if recorded.origin_of(v) is not None
    ]
    names = {e.op.name for e in recorded.lowered.program.equations}
    assert {"norm_qkv", "attend_project", "norm_gated_mlp"} <= names
    assert len(shared) >= 20
    for var in shared:
        torch.testing.assert_close(fused[var], written[recorded.origin[var]], rtol=1e-4, atol=1e-5)


def test_against_the_kernels_of_the_cpu() -> None:
    found = compare(llama.forward, *step_of(), against="cpu", **STEP)
    assert found.passed
    assert all(e.judgement is not None and e.judgement.error == 0 for e in found.entries)
    assert {e.against.partition(": ")[0] for e in found.entries} == {"cpu"}
    other = compare(llama.forward, *step_of(), device=broken("linear"), against="cpu", **STEP)
    assert {op for _, op in scopes_past(other)} == {"linear"}


def test_nothing_that_is_passed_is_changed() -> None:
    arguments = step_of()
    cache = arguments[2]
    before = [t.clone() for t in cache.arena.arena.tensors]
    compare(llama.forward, *arguments, **STEP)
    compare(llama.forward, *arguments, end_to_end=True, **STEP)
    cache.arena.check()
    assert all(torch.equal(a, b) for a, b in zip(before, cache.arena.arena.tensors, strict=True))


def test_options_that_do_not_exist() -> None:
    with pytest.raises(OptionError, match=r"against.*'cpu'.*found gpu"):
        compare(llama.forward, *step_of(), against="gpu", **STEP)
    with pytest.raises(OptionError, match="FP64 run"):
        compare(llama.forward, *step_of(), against="cpu", end_to_end=True, **STEP)
    with pytest.raises(OptionError, match=r"swap.*attention, mlp.*found \['brain'\]"):
        swap(llama.forward, *step_of(), groups=["brain"], device="cpu", **STEP)


# --- swaps ---------------------------------------------------------------------------------------------------------


def test_groups_of_a_llama_block() -> None:
    program = record(llama.forward, step_of(), {}, replace(cpu.backend(), rules=[]), **STEP).written
    group = groups_of(program)
    found: dict[str, list[str]] = {}
    for equation in program.equations:
        found.setdefault(group[id(equation)], []).append(equation.op.name)
    # Two layers: q, k, v and the output projection; gate, up and down; one projection to logits.
    assert found["attention"].count("linear") == 8
    assert found["mlp"].count("linear") == 6
    assert found["head"] == ["linear"]
    assert found["norm"] == ["rms_norm"] * 5
    assert found["embedding"] == ["embedding"]


def test_a_swap_shows_which_group_is_wrong() -> None:
    groups = ["attention", "mlp", "norm"]
    table = swap(llama.forward, *step_of(), groups=groups, device=broken("norm_gated_mlp"), **STEP)
    assert {row.groups: row.passed for row in table.rows} == {
        (): True,
        ("attention",): True,
        ("mlp",): False,
        ("norm",): True,
        ("attention", "mlp", "norm"): False,
    }
    kernels = {row.groups: row.kernels for row in table.rows}
    assert kernels[()] == 0
    assert kernels["mlp",] == 2
    by_group = {row.groups: row for row in table.rows}
    assert by_group["mlp",].divergence > 1000 * by_group[()].divergence


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted tiny model."""
    return chat_model(tmp_path_factory.mktemp("model"))


def test_the_command_prints_equations_and_modules(capsys: Any, model: Path) -> None:
    out = text_of(capsys, "compare", model, "--tokens", 6)
    assert "prefill of 5 tokens: cpu (cpu) against reference, same inputs" in out
    assert "decode at 5" in out
    assert "layers/1" in out
    assert "attend_project" in out
    assert "within the tolerance" in out


def test_the_command_as_json(capsys: Any, model: Path) -> None:
    found = json_of(capsys, "compare", model, "--prompt-ids", "5,3,9", "--json")
    assert found["passed"] is True
    assert [s["step"] for s in found["steps"]] == ["prefill of 2 tokens", "decode at 2"]
    entry = found["steps"][0]["equations"][0]
    assert entry["judgement"]["units"] <= entry["judgement"]["allowed"]
    swapped = json_of(capsys, "compare", model, "--tokens", 4, "--swap", "attention,mlp", "--json")
    assert [row["groups"] for row in swapped["steps"][0]["rows"]] == [
        [],
        ["attention"],
        ["mlp"],
        ["attention", "mlp"],
    ]


def test_past_the_tolerance_the_command_ends_with_1_and_names_the_first(
    capsys: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_command, "eager", lambda device: broken("rms_norm"))
    assert main(["compare", str(model), "--tokens", "4"]) == 1
    out = capsys.readouterr().out
    assert "first past tolerance: equation" in out
    assert "rms_norm by broken.rms_norm" in out
    assert "PAST the tolerance" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1"], "2 tokens or more"),
        (["--tokens", "100000"], "context"),
        (["--swap", "attention", "--end-to-end"], "end to end already"),
        (["--swap", "attention,,mlp"], "names with commas"),
        (["--software"], "--software: plays an NPU"),
        (["--chip", "Ascend910B3"], "with --software"),
    ],
)
def test_options_that_contradict_each_other(
    capsys: Any, model: Path, options: list[str], message: str
) -> None:
    assert message in error_of(capsys, "compare", model, *options)
