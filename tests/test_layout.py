"""The layout's promises: imports run one way, rooms are found once, the import is lazy, names stay ours."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import atbx.ops  # noqa: F401  (registers the ops)
from atbx.core.op import registered_ops
from atbx.torch_guard import AUTOLOAD

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("ops", "kernels", "models", "checkpoints")
MAY_IMPORT = {
    "core": {"core"},
    "ops": {"core", "ops"},
    "kernels": {"core", "ops", "kernels"},
    "models": {"core", "ops", "models"},
    "checkpoints": {"core", "ops", "models", "checkpoints"},
}
# What an extra brings, imported where it is used.
OPTIONAL = {
    "safetensors",
    "gguf",
    "tokenizers",
    "jinja2",
    "transformers",
    "torch_npu",
    "flax",
    "jax",
    "triton",
}


@functools.cache
def modules() -> list[tuple[str, str, Path]]:
    """(room, module name, file) of every module of the package, rooms read where they stand."""
    found = []
    for room in ("core", *ROOMS):
        folder = ROOT / "atbx" / "core" if room == "core" else ROOT / room
        for path in sorted(folder.rglob("*.py")):
            inner = ".".join(path.relative_to(folder).with_suffix("").parts)
            found.append((room, f"atbx.{room}.{inner}".removesuffix(".__init__"), path))
    for path in sorted((ROOT / "atbx").rglob("*.py"), key=str):
        relative = path.relative_to(ROOT / "atbx")
        if relative.parts[0] not in ("core", *ROOMS):
            name = ".".join(("atbx", *relative.with_suffix("").parts))
            found.append(("top", name.removesuffix(".__init__"), path))
    return found


def imports_of(name: str, path: Path) -> list[tuple[str, int, bool]]:
    """(module, line, whether inside a function) of every import of a file."""
    names = {module for _, module, _ in modules()}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(node)
    }
    # What only a type checker sees is never imported.
    unseen = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, node in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module or "") if p)
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.append((inner if inner in names else module, node.lineno, node in inside))
    return found


def test_every_room_is_seen_by_this_test() -> None:
    seen = {room for room, *_ in modules()}
    assert seen == {"core", *ROOMS, "top"}
    assert len(modules()) > 80


def test_imports_run_one_way_between_the_rooms() -> None:
    wrong = []
    for room, name, path in modules():
        if room == "top":
            continue
        for module, line, _ in imports_of(name, path):
            if module == "atbx" or module.startswith("atbx."):
                target = [*module.split("."), ""][1]
                if target not in MAY_IMPORT[room]:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


def test_rooms_are_never_imported_by_their_folder_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for _, name, path in modules()
        for module, line, _ in imports_of(name, path)
        if module.split(".")[0] in ROOMS
    ]
    assert wrong == []


def test_an_import_inside_a_function_is_of_an_optional_dependency() -> None:
    # These decide how torch is imported, or do their work where it cannot be: the guard, the software device and the
    # commands that enter it first, and the doctor.
    late = {"torch_guard.py", "commands/compare.py", "commands/software.py", "commands/doctor.py"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for _, name, path in modules()
        for module, line, is_inside in imports_of(name, path)
        if is_inside
        and module.split(".")[0] not in OPTIONAL
        and not any(path.as_posix().endswith(f"/{name}") for name in late)
        and "testing" not in path.parts
    ]
    assert wrong == []


def test_an_optional_dependency_is_imported_inside_a_function_only() -> None:
    # The source of a Triton kernel is decorated by Triton; `load_kernel` imports it inside a function.
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for _, name, path in modules()
        for module, line, is_inside in imports_of(name, path)
        if not is_inside and module.split(".")[0] in OPTIONAL and path.name != "qkv_rotary_write_kernel.py"
    ]
    assert wrong == []


def test_modules_of_a_room_import_each_other_without_a_circle() -> None:
    names = {name for _, name, _ in modules()}
    needs: dict[str, set[str]] = {}
    for _, name, path in modules():
        found = {m for m, _, is_inside in imports_of(name, path) if not is_inside}
        needs[name] = {
            m if m in names else m.rpartition(".")[0] for m in found if m.startswith("atbx.")
        } & names
    # The lazy face and its type-checking imports name everything.
    needs["atbx"] = set()
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a circle: {' -> '.join([*above[above.index(name) :], name])}"
        if name in done:
            return
        for other in sorted(needs[name] - {name}):
            visit(other, (*above, name))
        done.add(name)

    for name in sorted(needs):
        visit(name, ())


def test_the_core_names_no_op() -> None:
    # Names of one word are words too, and the operators of staged values are Python's.
    real = {name for name in registered_ops() if "_" in name and not name.startswith("t_")}
    assert len(real) > 10
    for room, _, path in modules():
        if room == "core":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            constants = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
            assert not constants & real - {"less_equal", "not_equal"}, path


# --- in a process of their own -------------------------------------------------------------------------------------


def run(code: str, *, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in (AUTOLOAD, "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
    )


def test_a_plain_import_of_a_room_raises_even_from_the_root() -> None:
    code = (
        "import importlib\n"
        f"for room in {ROOMS!r}:\n"
        "    try:\n"
        "        importlib.import_module(room)\n"
        "    except ImportError as error:\n"
        "        print(room, type(error).__name__, 'atbx.' + room in str(error))\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(ROOMS)
    assert all("True" in line for line in lines), done.stdout


def test_importing_atbx_imports_torch_and_no_optional_dependency_and_no_room() -> None:
    done = run("import sys, atbx; print(*sorted(sys.modules))")
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert {"torch", "atbx"} <= imported
    assert {m for m in imported if m.split(".")[0] in OPTIONAL} == set()
    assert {m.split(".")[1] for m in imported if m.startswith("atbx.")} <= {"torch_guard", "core"}


def test_using_atbx_on_tensors_imports_no_optional_dependency() -> None:
    code = (
        "import sys, torch, atbx\n"
        "assert atbx.jit(lambda x: x + x)(torch.ones(2)).tolist() == [2.0, 2.0]\n"
        "atbx.generator, atbx.checkpoints, atbx.models, atbx.ops, atbx.plan_memory\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & OPTIONAL == set()


def test_every_public_name_can_be_had_and_an_unknown_one_is_refused() -> None:
    code = (
        "import atbx\n"
        "for name in atbx.__all__: getattr(atbx, name)\n"
        "print(sorted(atbx.__all__) == dir(atbx))\n"
        "try: atbx.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    done = run(code)
    assert done.stdout.splitlines() == ["True", "module 'atbx' has no attribute 'nothing'"], done.stderr


def install_broken_torch_npu(folder: Path) -> None:
    """A torch_npu as pip leaves it on a machine without CANN: torch's autoload finds it, and it cannot be loaded."""
    package = folder / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"
    )
    info = folder / "torch_npu-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.9.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")


@pytest.mark.parametrize("before", [None, "1"])
def test_atbx_imports_where_torch_alone_does_not_and_restores_the_variable(
    tmp_path: Path, before: str | None
) -> None:
    install_broken_torch_npu(tmp_path)
    environment = {"PYTHONPATH": str(tmp_path)} | ({} if before is None else {AUTOLOAD: before})
    alone = run("import torch", cwd=tmp_path, **environment)
    assert alone.returncode == 1
    assert "libhccl.so" in alone.stderr
    ours = run(f"import atbx, os; print(os.environ.get({AUTOLOAD!r}))", cwd=tmp_path, **environment)
    assert (ours.stdout, ours.returncode) == (f"{before}\n", 0), ours.stderr


def test_torch_that_is_imported_already_is_left_as_it_is(tmp_path: Path) -> None:
    install_broken_torch_npu(tmp_path)
    code = f"import os; os.environ[{AUTOLOAD!r}] = '0'\nimport torch, atbx\nprint(os.environ[{AUTOLOAD!r}])"
    done = run(code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
