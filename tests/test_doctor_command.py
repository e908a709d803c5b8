"""`atbx doctor` as a command: exit codes, JSON, another root, without torch, and quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from doctor_trees import NOTHING, Tree, put

from atbx.command_line import main
from atbx.doctor.report import known_chips
from atbx.kernels.ascend.chips import CHIPS


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out


def rooted(root: Path, tree: Tree) -> str:
    """A tree with its Python packages and environment on disk, as a container image has them."""
    tree.write(root)
    for name, version in tree.packages().items():
        info = (
            root / f"usr/local/python3.11.9/lib/python3.11/site-packages/{name}-{version}.dist-info/METADATA"
        )
        put(info, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    put(root / "etc/environment", "".join(f'{k}="{v}"\n' for k, v in tree.environment().items()))
    return str(root)


@pytest.mark.parametrize(
    ("tree", "code", "found"),
    [
        (Tree(), 0, []),
        (NOTHING, 0, [("ascend.none", "note")]),
        (Tree(firmware="6.0.0.1.1"), 1, [("firmware.version", "warning")]),
        (Tree(kernel_family="A3"), 2, [("kernels.other_chip", "error")]),
    ],
)
def test_another_root_is_examined_with_its_own_packages_and_environment(
    tree: Tree, code: int, found: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, out = doctor(capsys, "--root", rooted(tmp_path, tree), "--json")
    data = json.loads(out)
    assert ended == data["exit_code"] == code
    assert [(f["id"], f["severity"]) for f in data["findings"]] == found
    assert data["installed"]["torch"] == "2.9.0+cpu"
    assert data["installed"]["python"] == "3.11"


def test_without_the_other_root_s_environment_it_says_what_was_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = rooted(tmp_path, Tree(sourced=False))
    (tmp_path / "etc/environment").unlink()
    code, out = doctor(capsys, "--root", root, "--json")
    assert code == 0
    assert [f["id"] for f in json.loads(out)["findings"]] == ["environment.not_known"]


def test_text_names_the_finding_its_place_and_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = doctor(capsys, "--root", rooted(tmp_path, Tree(nnal="8.3.RC1")))
    assert code == 2
    assert "error: NNAL and the toolkit are of different releases  [nnal.version]" in out
    assert "  where:    /usr/local/Ascend/nnal/atb/latest/version.info\n" in out
    assert "  expected: 8.5.0\n  found:    8.3.RC1\n" in out
    assert "  mend:     bash Ascend-cann-nnal_8.5.0_linux-aarch64.run --install\n" in out
    assert out.endswith("1 errors, 0 warnings, 0 notes\n")


def test_a_root_that_is_no_folder_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", "/no/such/folder"]) == 2
    assert "--root: is no folder; found /no/such/folder" in capsys.readouterr().err


def test_import_of_another_root_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", str(tmp_path), "--import"]) == 2
    assert "imports on this machine only" in capsys.readouterr().err


def test_the_chips_are_those_of_the_capability_table() -> None:
    assert known_chips() == {name: chip.family for name, chip in CHIPS.items()}


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torch_npu", "numpy"}:
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Blocker())
"""


def test_neither_torch_nor_torch_npu_nor_numpy_is_imported_and_it_is_quick(tmp_path: Path) -> None:
    put(tmp_path / "sitecustomize.py", BLOCKED)
    root = rooted(tmp_path / "root", NOTHING)
    command = [sys.executable, "-m", "atbx.command_line", "doctor", "--root", root, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60, check=False
        )
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["findings"][0]["what"].endswith("the CPU backend works")
    # The best of three, on a machine that others use too; torch alone takes longer to import.
    assert min(seconds) < 1.0


def test_every_other_command_still_imports_torch_first(tmp_path: Path) -> None:
    put(tmp_path / "sitecustomize.py", BLOCKED)
    command = [sys.executable, "-m", "atbx.command_line", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 1
    assert "torch_npu was imported" in done.stderr  # the guard looks for it before torch


def test_importing_in_a_process_of_its_own_tells_the_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    from atbx.commands import doctor as command

    said = (
        "Traceback (most recent call last):\n"
        '  File "<string>", line 1, in <module>\n'
        "ImportError: libhccl.so: cannot open shared object file: No such file or directory\n"
    )
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: failed)
    finding = command.try_import()
    assert (finding.id, finding.severity.word) == ("import.failed", "error")
    assert (
        finding.found == "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
    )
    assert finding.mend == "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
