"""Operator schemas as a torch_npu wheel holds them: registration strings in its libraries and its Python files.

A schema that C++ registers is a string constant in the shared library, so it can be read from the file without
loading it: the text `name(arguments) -> returns` between two NUL bytes. On x86-64 the compiler stores some shorter
constants in 16-byte pieces inside the code, where they cannot be found again; on aarch64 all stay whole. What a
wheel lists by name and does not hold as a whole string is therefore told apart (`unread`) and never guessed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping

import torch

from atbx.core.errors import AtbxError

LIBRARIES = {"npu": "torch_npu/lib/libtorch_npu.so", "atb": "torch_npu/lib/libop_plugin_atb.so"}
"""The library that registers each namespace, by its path in the wheel."""

_YAML = (
    "torch_npu/csrc/aten/npu_native_functions.yaml",
    "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml",
)
_ATB_NAMES = "torch_npu/op_plugin/atb/_atb_ops.py"
# Loaded on demand only (torch.compile backends): what they define is not there after `import torch_npu`.
_ON_DEMAND = ("torch_npu/dynamo/", "torch_npu/_inductor/", "torch_npu/testing/", "torch_npu/contrib/")

_ARROW = b") -> "
_REGISTRATION = re.compile(r"(?:(?P<namespace>\w+)::)?(?P<name>[A-Za-z_]\w*(?:\.\w+)?)\(.*\) -> .+")
# A class that only its own library defines (process groups): neither parsed nor of use outside it.
_CUSTOM_CLASS = "__torch__."


def qualified(schema: torch._C.FunctionSchema) -> str:
    """The operator's name with namespace, and with its overload if it has one: `npu::npu_mrope`, `atb::op.out`."""
    return schema.name + (f".{schema.overload_name}" if schema.overload_name else "")


def registration_strings(library: bytes, namespace: str) -> dict[str, str]:
    """Schemas registered under `namespace`, by qualified name, from the bytes of a shared library.

    Only whole NUL-terminated strings that torch's own schema parser accepts are taken; a string that names another
    namespace, or an argument of a class of the library's own, is left out.
    """
    found = {}
    for text in _strings_around(library, _ARROW):
        match = _REGISTRATION.fullmatch(text)
        if match is None or match["namespace"] not in (None, namespace) or _CUSTOM_CLASS in text:
            continue
        schema = _parsed(text if match["namespace"] else f"{namespace}::{text}")
        if schema is not None:
            found[qualified(schema)] = text if match["namespace"] is None else text[len(namespace) + 2 :]
    return found


def _strings_around(data: bytes, needle: bytes) -> Iterator[str]:
    """Every printable string between two NUL bytes that holds `needle`, once."""
    position = data.find(needle)
    while position >= 0:
        start = data.rfind(b"\0", 0, position) + 1
        end = data.find(b"\0", position)
        end = len(data) if end < 0 else end
        run = data[start:end]
        if run.isascii() and (text := run.decode("ascii")).isprintable():
            yield text
        position = data.find(needle, end)


def _parsed(text: str) -> torch._C.FunctionSchema | None:
    try:
        return torch._C.parse_schema(text)
    except RuntimeError:  # not a schema: a message that happens to hold an arrow
        return None


def listed_names(files: Mapping[str, bytes]) -> set[str]:
    """Operators that the wheel's own lists announce: overloads from the yaml files, bare names from the ATB list.

    files: the wheel's text files by path. Names are qualified; `atb::` names carry no overload.
    """
    names = set()
    for path in _YAML:
        section = ""
        for line in files.get(path, b"").decode().splitlines():
            if heading := re.match(r"([a-z_]+):", line):
                section = heading[1]
            elif section == "custom" and (entry := re.match(r"(?:- |  )func: ['\"]?([\w.]+)\(", line)):
                names.add(f"npu::{entry[1]}")
    if _ATB_NAMES in files:
        for node in ast.walk(syntax_tree(_ATB_NAMES, files[_ATB_NAMES])):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                names.update(f"atb::{name}" for name in _strings(node.value))
    return names


def unread(names: Iterable[str], schemas: Mapping[str, object]) -> list[str]:
    """The listed names that `schemas` lacks; an `atb::` name is met by any of its overloads."""
    bases = {name.split(".")[0] for name in schemas}
    return sorted(
        name for name in names if name not in schemas and not (name.startswith("atb::") and name in bases)
    )


def python_definitions(files: Mapping[str, bytes]) -> dict[str, str]:
    """Schemas that the wheel's Python files define through `torch.library.Library(...).define`, by qualified name."""
    found = {}
    for tree in _imported_trees(files):
        namespaces = {name: arguments[0] for name, arguments in _library_variables(tree).items()}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "define"
                and isinstance(node.func.value, ast.Name)
                and namespaces.get(node.func.value.id) in LIBRARIES
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                text = str(node.args[0].value)
                schema = _parsed(f"{namespaces[node.func.value.id]}::{text}")
                if schema is not None:
                    found[qualified(schema)] = text
    return found


def meta_functions(files: Mapping[str, bytes]) -> set[str]:
    """Qualified names of the operators that the wheel's Python files give a meta (shape) function.

    Read from the decorators `@impl(library_of_dispatch_key_Meta, name)` and `@torch.library.register_fake(name)`.
    """
    found = set()
    for tree in _imported_trees(files):
        namespaces = {
            name: arguments[0]
            for name, arguments in _library_variables(tree).items()
            if arguments[2:3] == ["Meta"]
        }
        for node in ast.walk(tree):
            for call in getattr(node, "decorator_list", []):
                if not isinstance(call, ast.Call):
                    continue
                text = [str(value) for value in _strings(ast.List(elts=call.args))]
                if ast.unparse(call.func).endswith("register_fake") and text:
                    found.add(text[0])
                elif (
                    ast.unparse(call.func).split(".")[-1] == "impl"
                    and isinstance(call.args[0], ast.Name)
                    and call.args[0].id in namespaces
                ):
                    found.add(f"{namespaces[call.args[0].id]}::{text[0]}")
    return {name.removesuffix(".default") for name in found if name.split("::")[0] in LIBRARIES}


def syntax_tree(path: str, content: bytes) -> ast.Module:
    """A Python file of the wheel as its syntax tree; AtbxError with its path if this Python cannot parse it."""
    try:
        return ast.parse(content, filename=path)
    except (SyntaxError, ValueError) as error:
        raise AtbxError(
            "a Python file of the wheel does not parse",
            where=path,
            expected=f"the syntax of Python {sys.version_info.major}.{sys.version_info.minor}",
            found=str(error),
        ) from error


def _imported_trees(files: Mapping[str, bytes]) -> Iterator[ast.Module]:
    """The syntax trees of those Python files that `import torch_npu` runs and that mention a library."""
    for path, content in sorted(files.items()):
        imported = path.startswith("torch_npu/") and not path.startswith(_ON_DEMAND)
        if imported and path.endswith(".py") and (b"Library(" in content or b"register_fake" in content):
            yield syntax_tree(path, content)


def _library_variables(tree: ast.Module) -> dict[str, list[str]]:
    """Variables bound to `Library("namespace", "kind", "key")`, with those arguments."""
    return {
        target.id: _strings(ast.List(elts=node.value.args))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).split(".")[-1] == "Library"
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _strings(node: ast.List) -> list[str]:
    return [
        item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)
    ]
