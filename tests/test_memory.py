"""The memory plan: lifetimes, offsets, and which updates may be done in place."""

from __future__ import annotations

from typing import Any

import pytest
from core_ops import ADD, NEG, PAIR, SCALE, VIEW, WRITE, f32, ops_of, stage
from hypothesis import given, settings
from hypothesis import strategies as st

from atbx.core.executable import with_copies
from atbx.core.memory import ALIGNMENT, copies_needed, lifetimes, plan_memory, storage_roots
from atbx.core.program import Program, Var


@st.composite
def programs(draw: Any) -> Program:
    """A random program over vectors of several sizes, with views, pairs and updates."""
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    steps = draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=25
        )
    )

    def function(*inputs: Any) -> Any:
        values = list(inputs)
        for kind, one, other in steps:
            x, y = values[one % len(values)], values[other % len(values)]
            if kind == 0:
                values.append(NEG(x))
            elif kind == 1:
                values.append(VIEW(x, shape=(1, *x.shape) if x.ndim == 1 else x.shape[1:]))
            elif kind == 2:
                values += PAIR(x)
            elif kind == 3 and x.shape == y.shape:
                values.append(ADD(x, y))
            else:
                values.append(WRITE(x, y, 0))
        count = 1 + steps[0][1] % 3
        return tuple(values[-count:])

    return stage(function, *(f32(n) for n in sizes))


@given(programs(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_values_that_live_at_once_never_overlap_in_memory(program: Program, random: Any) -> None:
    made = [v for e in program.equations for v in e.outputs]
    skip = {v for v in made if random.random() < 0.2}
    plan = plan_memory(program, skip)
    spans = lifetimes(program)
    assert set(plan.offsets) == set(spans) - skip
    placed = [(offset, offset + var.abstract.nbytes, *spans[var]) for var, offset in plan.offsets.items()]
    for i, (start, end, first, last) in enumerate(placed):
        assert start % ALIGNMENT == 0
        assert end <= plan.size
        for other_start, other_end, other_first, other_last in placed[:i]:
            if first <= other_last and other_first <= last:
                assert end <= other_start or other_end <= start
    # Never more than every value side by side, never less than what lives at one time.
    padded = {v: -(-v.abstract.nbytes // ALIGNMENT) * ALIGNMENT for v in plan.offsets}
    assert plan.size <= sum(padded.values())
    for index in range(len(program.equations) + 1):
        assert plan.size >= sum(padded[v] for v in plan.offsets if spans[v][0] <= index <= spans[v][1])


def independent_reads(program: Program, root: Var) -> int:
    """The last equation that reads a value reached from `root` by views and updates, found without the planner."""
    reached, last = {root}, -1
    for index, equation in enumerate(program.equations):
        reads = [v for v in equation.input_vars() if v in reached]
        if reads:
            last = index
        for operand, result in equation.op.updates:
            if equation.inputs[operand] in reached:
                reached.add(equation.outputs[result])
        if equation.op.views and equation.inputs[0] in reached:
            reached.update(equation.outputs)
    return len(program.equations) if any(a in reached for a in program.outputs) else last


@given(programs())
@settings(max_examples=100, deadline=None)
def test_a_storage_lives_until_its_last_view_is_read(program: Program) -> None:
    for var, (first, last) in lifetimes(program).items():
        assert var in program.equations[first].outputs
        assert last == max(first, independent_reads(program, var))


def test_a_chain_needs_two_buffers_however_long_it_is() -> None:
    def chain(x: Any) -> Any:
        for _ in range(20):
            x = NEG(x)
        return x

    program = stage(chain, f32(256))
    assert plan_memory(program).size == 2 * 1024


def test_an_empty_value_takes_no_memory_and_nothing_planned_is_no_buffer() -> None:
    assert plan_memory(stage(NEG, f32(0))).size == 0
    assert plan_memory(stage(lambda x: x, f32(3))).size == 0


def test_views_and_updates_share_the_storage_of_their_operand() -> None:
    program = stage(lambda c, x: NEG(VIEW(WRITE(VIEW(c, shape=(4,)), x, 0), shape=(2, 2))), f32(2, 2), f32(1))
    roots = storage_roots(program)
    assert [roots[v] is program.inputs[0] for e in program.equations for v in e.outputs] == [
        True,
        True,
        True,
        False,
    ]


# --- updates in place ----------------------------------------------------------------------------------------------


def needed(function: Any, *abstracts: Any, owned: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    program = stage(function, *abstracts)
    return sorted(copies_needed(program, [program.inputs[i] for i in owned]))


CACHE, ROW = f32(8), f32(1)


def test_an_argument_is_updated_in_place_only_if_it_was_donated() -> None:
    assert needed(lambda c, x: WRITE(c, x, 0), CACHE, ROW) == [(0, 0)]
    assert needed(lambda c, x: WRITE(c, x, 0), CACHE, ROW, owned=(0,)) == []


def test_a_value_that_the_program_made_is_updated_in_place() -> None:
    assert needed(lambda c, x: WRITE(NEG(c), x, 0), CACHE, ROW) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda c, x: (WRITE(c, x, 0), NEG(c)),
        lambda c, x: (WRITE(c, x, 0), c),
        lambda c, x: (v := VIEW(c, shape=(2, 4)), WRITE(c, x, 0), NEG(v))[1:],
        lambda c, x: (WRITE(VIEW(c, shape=(8,)), x, 0), NEG(c)),
        lambda c, x: WRITE(c, VIEW(c, shape=(8,)), 0),
        lambda c, x: WRITE(c, c, 0),
    ],
    ids=[
        "read later",
        "returned",
        "a view is read later",
        "the base is read later",
        "reads a view of it",
        "itself",
    ],
)
def test_an_old_value_with_a_later_reader_is_copied_first(function: Any) -> None:
    assert len(needed(function, CACHE, ROW, owned=(0,))) == 1


def test_a_value_read_for_the_last_time_before_its_update_is_not_copied() -> None:
    assert needed(lambda c, x: (NEG(c), WRITE(c, x, 0)), CACHE, ROW, owned=(0,)) == []


def test_a_chain_of_updates_is_copied_once() -> None:
    def chain(cache: Any, x: Any) -> Any:
        for i in range(4):
            cache = WRITE(cache, x, i)
        return cache

    assert needed(chain, CACHE, ROW) == [(0, 0)]
    assert needed(chain, CACHE, ROW, owned=(0,)) == []

    def forked(cache: Any, x: Any) -> Any:
        return chain(cache, x), NEG(cache)

    assert needed(forked, CACHE, ROW, owned=(0,)) == [(0, 0)]


def test_two_updates_of_one_value_copy_the_first_only() -> None:
    assert needed(lambda c, x: (WRITE(c, x, 0), WRITE(c, x, 1)), CACHE, ROW, owned=(0,)) == [(0, 0)]


def test_a_prepared_value_is_never_updated_in_place() -> None:
    program = stage(lambda w, x: WRITE(NEG(w), x, 0), CACHE, ROW)
    made = program.equations[0].outputs
    assert sorted(copies_needed(program, ())) == []
    assert sorted(copies_needed(program, (), made)) == [(1, 0)]


def test_copies_are_visible_in_the_program_and_say_why() -> None:
    program = stage(lambda c, x: (WRITE(c, x, 0), NEG(c)), CACHE, ROW)
    after, notes = with_copies(program, [])
    assert ops_of(after) == ["copy", "t_write", "t_neg"]
    assert notes == ("t_write operand 0 is read later, or was not donated",)
    assert after.equations[0].source == program.equations[0].source


def test_outputs_share_no_memory_with_arguments_or_each_other() -> None:
    after, notes = with_copies(stage(lambda x: (x, VIEW(x, shape=(2, 4))), CACHE), [])
    assert ops_of(after) == ["t_view", "copy", "copy"]
    assert notes == ("an output would share memory with an argument or a constant",) * 2
    after, notes = with_copies(stage(lambda x: (y := NEG(x), VIEW(y, shape=(2, 4)), y), CACHE), [])
    assert ops_of(after) == ["t_neg", "t_view", "copy", "copy"]
    assert notes == ("an output would share memory with another output",) * 2
    after, notes = with_copies(program := stage(lambda x: SCALE(x, by=2), CACHE), [])
    assert (after, notes) == (program, ())


@given(programs(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_updates_in_place_never_change_what_is_read_later(program: Program, is_owned: bool) -> None:
    owned = list(program.inputs) if is_owned else []
    after, _ = with_copies(program, owned)
    assert copies_needed(after, owned) == {}
    # Execute it on stamps: each storage holds the value last written to it, and every read must find its own.
    storage: dict[Var, Var] = {v: v for v in after.inputs}
    holds: dict[Var, Var] = {v: v for v in after.inputs}
    wanted: dict[Var, Var] = {v: v for v in after.inputs}
    for equation in after.equations:
        for var in equation.input_vars():
            assert holds[storage[var]] is wanted[var]
        updated = {result: operand for operand, result in equation.op.updates}
        for index, var in enumerate(equation.outputs):
            if index in updated:
                base = storage[equation.inputs[updated[index]]]
                assert base not in program.inputs or is_owned
                storage[var], holds[base], wanted[var] = base, var, var
            elif equation.op.views:
                source = equation.inputs[0]
                storage[var], wanted[var] = storage[source], wanted[source]
            else:
                storage[var], holds[var], wanted[var] = var, var, var
    for atom in after.outputs:
        assert holds[storage[atom]] is wanted[atom]
    places = [storage[atom] for atom in after.outputs]
    assert len(set(places)) == len(places)
