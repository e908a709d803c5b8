"""Which operators a captured NPUGraph can be given new values for, read from the wheel's Python files.

`torch.npu.graph(g, auto_dispatch_capture=True)` records the operators that have a handler; `g.update` then writes new
values into the recorded call and runs it again. A value finds its place in two ways: as a keyword of the recorded
call, or as a positional argument whose index the handler states. Keywords need no list. What is read here is which
operators are recorded, as which overload, and the positional places. The form of that code changed with the
releases, so each form is recognised by its syntax; nothing of it is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from atbx.kernels.ascend.schemas.registrations import syntax_tree

_GRAPHS = "torch_npu/npu/graphs.py"
_HANDLERS = "torch_npu/npu/_npugraph_handlers/"


def graph_updates(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Recorded operators by dispatch name (`npu_x.default`, `npu_x.out`).

    Each has `records` (the overload that goes into the graph) and `positions` (update key to argument index).
    files: the wheel's text files by path.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(files):
        if path.startswith(_HANDLERS) and path.endswith(".py"):
            for node in ast.walk(syntax_tree(path, files[path])):
                if isinstance(node, ast.ClassDef) and (names := _registered_names(node)):
                    _add(found, names, node)
    if not found and _GRAPHS in files:
        _add_from_branches(found, syntax_tree(_GRAPHS, files[_GRAPHS]))
    return {name: found[name] for name in sorted(found) if "." in name}


def _registered_names(handler: ast.ClassDef) -> list[str]:
    """Names given to the decorator `register_npu_graph_handler`."""
    for decorator in handler.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(
            "register_npu_graph_handler"
        ):
            value = ast.literal_eval(decorator.args[0])
            return [value] if isinstance(value, str) else list(value)
    return []


def _add(found: dict[str, dict[str, Any]], names: list[str], handler: ast.ClassDef) -> None:
    """A handler class: 2.13 states `UPDATE_SPECS`, 2.10 `_OP_ARG_SPECS` or assignments in `update_args`."""
    tables = {
        target.id: ast.literal_eval(node.value)
        for node in handler.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("UPDATE_SPECS", "_OP_ARG_SPECS")
    }
    assigned = dict(_assigned_positions(handler))
    swap = _swapped_to(handler)
    for name in names:
        positions = dict(assigned)
        for place, index, key in tables.get("UPDATE_SPECS", {}).get(name, []):
            if place == "arg":
                positions[key] = index
        if name in tables.get("_OP_ARG_SPECS", {}):
            index, key = tables["_OP_ARG_SPECS"][name]
            positions[key] = index
        found[name] = {"records": swap or name, "positions": positions}


def _add_from_branches(found: dict[str, dict[str, Any]], tree: ast.Module) -> None:
    """2.7 and 2.9: branches on `func.__name__` in `graphs.py` instead of handlers."""
    positions: dict[str, dict[str, int]] = {}
    for branch in ast.walk(tree):
        if not isinstance(branch, ast.If) or not (names := _names_compared(branch.test)):
            continue
        if pair := _position_and_key(branch.body):
            positions.update({name: {pair[1]: pair[0]} for name in names})
        elif any("graph_task_group_begin" in ast.unparse(statement) for statement in branch.body):
            swap = _swapped_to(ast.Module(body=branch.body, type_ignores=[]))
            found.update({name: {"records": swap or name} for name in names})
    for entry in found.values():
        entry["positions"] = positions.get(entry["records"], {})


def _names_compared(test: ast.expr) -> list[str]:
    """The operators of `x.__name__ == "a"` or `x.__name__ in ["a", "b"]`."""
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Attribute)
        and test.left.attr == "__name__"
    ):
        value = ast.literal_eval(test.comparators[0])
        return [value] if isinstance(value, str) else list(value)
    return []


def _position_and_key(body: list[ast.stmt]) -> tuple[int, str] | None:
    """The pair of `position, key = 6, "actual_seq_lengths_kv"`."""
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).strip("()") == "position, key":
            position, key = ast.literal_eval(node.value)
            return position, key
    return None


def _assigned_positions(node: ast.AST) -> Iterator[tuple[str, int]]:
    """The pairs of `record.args[6] = update_input["actual_seq_lengths_kv"]`."""
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript):
            target, key = statement.targets[0], statement.value.slice
            if (
                isinstance(target, ast.Subscript)
                and isinstance(target.slice, ast.Constant)
                and isinstance(target.value, ast.Attribute)
                and target.value.attr == "args"
                and isinstance(key, ast.Constant)
            ):
                yield str(key.value), int(target.slice.value)  # type: ignore[arg-type]


def _swapped_to(node: ast.AST) -> str | None:
    """The overload of `func_out = torch_npu.npu_x.out`, which is captured in place of `npu_x.default`."""
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "func_out":
            return ast.unparse(statement.value).removeprefix("torch_npu.")
    return None
