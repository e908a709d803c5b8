"""Executables: calls over slots, workspaces, drops, host plans, and outputs that own their memory."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from core_ops import ADD, NEG, PAIR, SCALE, VIEW, WRITE, compiled, make_backend

import atbx.core.backend as core_backend
from atbx.core.backend import HostPlan, Kernel, RunInterpreter
from atbx.core.binding import bind
from atbx.core.errors import CapacityError, FallbackError
from atbx.core.executable import Executable
from atbx.core.op import interpreter


def executable_of(jit: Any, *args: Any) -> Executable:
    """The executable behind a call without a binding."""
    jit(*args)
    variant = jit.explain(*args).variant
    assert variant.unbound is not None
    return variant.unbound


def pointers(executable: Executable) -> set[int]:
    """Addresses of the storages that the executable keeps."""
    values = [v for v in executable._template if isinstance(v, torch.Tensor)]
    return {v.untyped_storage().data_ptr() for v in values}


def test_a_kernel_that_writes_out_uses_the_workspace_and_agrees() -> None:
    backend, counts = make_backend()
    jit = compiled(lambda x: NEG(ADD(ADD(x, 1.0), 2.0)), backend=backend)
    x = torch.randn(100)
    assert torch.equal(jit(x), -((x + 1.0) + 2.0))
    assert counts.launched == ["t_add", "t_add", "t_neg"]
    memory = jit.explain(x).variant.lowered.memory
    assert len(memory.offsets) == 2
    assert jit.cache_info().workspace_bytes == memory.size == 2 * 448


def test_outputs_never_alias_the_workspace_the_inputs_or_each_other() -> None:
    def function(x: Any) -> Any:
        a = ADD(x, 1.0)
        b = ADD(a, 1.0)
        return {"add": a, "view": VIEW(b, shape=(2, 2)), "same": b, "input": x, "seen": VIEW(x, shape=(2, 2))}

    jit = compiled(function)
    x = torch.arange(4.0)
    first = jit(x)
    kept = {k: v.clone() for k, v in first.items()}
    places = [v.untyped_storage().data_ptr() for v in first.values()]
    assert len(set(places)) == len(places)
    assert x.untyped_storage().data_ptr() not in places
    assert not pointers(executable_of(jit, x)) & set(places)
    second = jit(x + 10)
    assert not {v.untyped_storage().data_ptr() for v in second.values()} & set(places)
    for name, value in kept.items():
        assert torch.equal(first[name], value)
        first[name].fill_(-1)
    again = jit(torch.arange(4.0))
    for name, value in kept.items():
        assert torch.equal(again[name], value)


def test_outputs_never_alias_constants_or_what_a_binding_keeps() -> None:
    constant = torch.tensor([5.0, 6.0])

    def function(params: Any, x: Any) -> Any:
        return (
            params["w"],
            SCALE(params["w"], by=2.0),
            ADD(ADD(x, constant), 0.0),
            VIEW(params["w"], shape=(2, 1)),
        )

    jit = compiled(function)
    w = torch.tensor([1.0, 2.0])
    binding = bind({"w": w})
    for _ in range(3):
        results = jit(binding, torch.zeros(2))
        assert [r.flatten().tolist() for r in results] == [[1.0, 2.0], [2.0, 4.0], [5.0, 6.0], [1.0, 2.0]]
        for r in results:
            r.fill_(-7)
    assert w.tolist() == [1.0, 2.0]


def test_an_update_of_what_was_prepared_leaves_the_store_as_it_is() -> None:
    def function(params: Any, x: Any) -> Any:
        return WRITE(SCALE(params["w"], by=2.0), x, 0), WRITE(params["w"], x, 1)

    jit = compiled(function)
    w = torch.tensor([1.0, 2.0, 3.0])
    binding = bind({"w": w})
    for value in (10.0, 20.0, 30.0):
        scaled, plain = jit(binding, torch.tensor([value]))
        assert scaled.tolist() == [value, 4.0, 6.0]
        assert plain.tolist() == [1.0, value, 3.0]
    assert w.tolist() == [1.0, 2.0, 3.0]


def test_an_argument_that_was_not_donated_is_never_changed() -> None:
    jit = compiled(lambda cache, x: WRITE(WRITE(cache, x, 0), x, 2))
    cache = torch.zeros(4)
    assert jit(cache, torch.ones(1)).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert cache.tolist() == [0.0] * 4
    assert [c.equation.op.name for c in jit.explain(cache, torch.ones(1)).choices] == [
        "copy",
        "t_write",
        "t_write",
    ]


def test_a_value_is_dropped_where_it_is_read_last() -> None:
    alive: list[list[bool]] = []
    made: list[weakref.ref[torch.Tensor]] = []
    backend, _ = make_backend()

    def watch(equation: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            alive.append([r() is not None for r in made])
            result = -x
            made.append(weakref.ref(result))
            return result

        return run

    backend.add(Kernel("watch", "t_neg", watch), preferred=True)
    jit = compiled(lambda x: NEG(NEG(NEG(NEG(x)))), backend=backend)
    jit(torch.ones(2))
    gc.collect()
    assert alive == [[], [True], [False, True], [False, False, True]]
    assert [r() is not None for r in made] == [False] * 4


def test_a_result_that_nobody_reads_is_dropped_at_once() -> None:
    jit = compiled(lambda x: PAIR(x)[0])
    executable = executable_of(jit, torch.ones(2))
    (call,) = executable.calls
    assert len(call.outs) == 2
    assert call.drops == (call.outs[1],)


# --- host plans ----------------------------------------------------------------------------------------------------


def test_equal_equations_share_one_host_plan_made_before_any_launch() -> None:
    backend, counts = make_backend()
    order: list[str] = []
    (write,) = backend.table["t_write"]
    assert write.plan is not None
    original = write.plan.make

    def make(*args: Any) -> Any:
        order.append(f"plan after {len(counts.launched)} launches")
        return original(*args)

    backend.table["t_write"] = [dataclasses.replace(write, plan=dataclasses.replace(write.plan, make=make))]

    def function(a: Any, b: Any, x: Any, at: Any) -> Any:
        x = NEG(x)
        return WRITE(a, x, at), WRITE(b, x, at)

    jit = compiled(function, backend=backend)
    args = (torch.zeros(4), torch.zeros(4), torch.ones(1), torch.tensor(2))
    one, two = jit(*args)
    assert one.tolist() == two.tolist() == [0.0, 0.0, -1.0, 0.0]
    assert order == ["plan after 0 launches"]
    assert counts.plans == [(4, 1)]
    jit(*args[:3], torch.tensor(1))
    assert len(counts.plans) == 2


def test_plans_of_other_keys_or_operands_are_not_shared() -> None:
    backend, counts = make_backend()

    def function(a: Any, b: Any, x: Any, i: Any, j: Any) -> Any:
        return WRITE(a, x, i), WRITE(b, x, i), WRITE(a, x, j)

    jit = compiled(function, backend=backend)
    jit(torch.zeros(4), torch.zeros(5), torch.ones(1), torch.tensor(0), torch.tensor(3))
    assert sorted(counts.plans) == [(4, 1), (4, 1), (5, 1)]


@pytest.mark.parametrize("at", [None, 2])
def test_a_plan_without_tensors_is_made_before_any_launch_too(at: int | None) -> None:
    backend, counts = make_backend()
    jit = compiled(lambda cache, x: WRITE(cache, NEG(x), 9 if at else None), backend=backend)
    if at is None:
        assert jit(torch.zeros(2), torch.ones(2)).tolist() == [-1.0, -1.0]
        counts.launched.clear()
    with pytest.raises(CapacityError, match="past the end"):
        jit(torch.zeros(2), torch.ones(3))
    assert counts.launched == []


def test_a_plan_of_a_computed_operand_is_made_when_the_operand_is_there() -> None:
    backend, _ = make_backend()
    jit = compiled(lambda cache, x, at: WRITE(cache, x, ADD(at, 1)), backend=backend)
    assert jit(torch.zeros(4), torch.ones(1), torch.tensor(1)).tolist() == [0.0, 0.0, 1.0, 0.0]
    with pytest.raises(CapacityError):
        jit(torch.zeros(4), torch.ones(1), torch.tensor(3))
    assert jit(torch.zeros(4), torch.ones(1), torch.tensor(2)).tolist() == [0.0, 0.0, 0.0, 1.0]


# --- the choice of kernels -----------------------------------------------------------------------------------------


def test_a_kernel_that_refuses_says_why_and_the_reference_rule_runs() -> None:
    jit = compiled(lambda cache, x: WRITE(cache, x))
    explanation = jit.explain(torch.zeros(3), torch.ones(1))
    write = explanation.choices[-1]
    assert write.is_fallback
    assert [(r.kernel, r.reason) for r in write.refused] == [("test.write", "needs an offset")]
    assert "refused test.write: needs an offset" in str(explanation)
    assert jit(torch.zeros(3), torch.ones(1)).tolist() == [1.0, 0.0, 0.0]


def test_fallback_error_names_the_op_its_line_and_every_refusal() -> None:
    jit = compiled(lambda cache, x: WRITE(NEG(cache), x), fallback="error")
    with pytest.raises(
        FallbackError, match=r"test_executable\.py.*t_write.*test\.write refused: needs an offset"
    ):
        jit(torch.zeros(3), torch.ones(1))
    assert jit.cache_info().variants == 0


def test_the_first_kernel_that_applies_is_taken_and_preferred_ones_stand_before() -> None:
    backend, _ = make_backend()
    backend.add(
        Kernel("never", "t_neg", lambda e: lambda x: x, refuses=lambda e: "not today"), preferred=True
    )
    choice = compiled(NEG_FUNCTION, backend=backend).explain(torch.ones(2)).choices[0]
    assert choice.kernel.name == "test.neg"
    assert choice.why == "first kernel of the table that applies"
    assert [r.kernel for r in choice.refused] == ["never"]


def NEG_FUNCTION(x: Any) -> Any:  # noqa: N802
    return NEG(x)


@pytest.mark.parametrize("op", [VIEW, WRITE])
def test_a_kernel_cannot_write_elsewhere_what_shares_memory(op: Any) -> None:
    backend, _ = make_backend()
    backend.table[op.name] = [Kernel("out", op.name, lambda e: lambda *xs: xs[-1], writes_out=True)]
    if op is VIEW:
        choice = (
            compiled(lambda x: NEG(VIEW(x, shape=(2, 2))), backend=backend).explain(torch.ones(4)).choices[0]
        )
    else:
        choice = (
            compiled(lambda c, x: WRITE(c, x, 0), backend=backend)
            .explain(torch.ones(4), torch.ones(1))
            .choices[-1]
        )
    assert choice.is_fallback
    assert "shares memory" in choice.refused[0].reason


def test_running_an_op_at_once_gives_kernels_their_plan_and_their_results() -> None:
    backend, counts = make_backend()

    def make(equation: Any) -> Any:
        return lambda x, plan, out: torch.add(x, plan, out=out)

    plan = HostPlan((0,), lambda e: "key", lambda key, x: float(x.sum()))
    backend.add(Kernel("both", "t_neg", make, plan=plan, writes_out=True), preferred=True)
    with interpreter(RunInterpreter(backend)):
        assert NEG(torch.tensor([1.0, 2.0])).tolist() == [4.0, 5.0]
        assert ADD(torch.tensor([1.0]), 2.0).tolist() == [3.0]
        cache = torch.zeros(2)
        assert WRITE(cache, torch.ones(1), torch.tensor(1)).tolist() == [0.0, 1.0]
        assert cache.tolist() == [0.0, 0.0]
    assert counts.launched == ["t_add"]
    assert compiled(NEG_FUNCTION, backend=backend)(torch.tensor([1.0, 2.0])).tolist() == [4.0, 5.0]


def test_the_tiers_are_told() -> None:
    def function(x: Any, w: Any) -> Any:
        return SCALE(NEG(x), by=2.0)

    choices = compiled(function).explain(torch.ones(2), torch.ones(2)).choices
    assert [(c.kernel.name, c.kernel.tier, c.why) for c in choices] == [
        ("test.neg", "composed", "preferred kernel"),
        ("reference.t_scale", "reference", "no kernel is registered"),
    ]
    assert core_backend.TIERS == ("fused", "composed", "reference")


def test_a_step_records_no_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    y = compiled(lambda x: ADD(NEG(x), 1.0))(x)
    assert not y.requires_grad
    assert y.tolist() == [0.0, 0.0]
