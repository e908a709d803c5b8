"""`atbx doctor` on made-up installations: what it finds, how bad, and the command that mends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor_trees import NOTHING, Tree, put

from atbx.doctor.installation import NEEDED_LIBRARIES, read

GOOD = Tree()
OLD = Tree(cann="8.1.RC1", kernels="8.1.RC1", nnal="8.1.RC1", torch="2.5.1", torch_npu="2.5.1")
TOOLKIT = "/usr/local/Ascend/ascend-toolkit"
SOURCE = f"source {TOOLKIT}/set_env.sh"
SOURCE_ATB = "source /usr/local/Ascend/nnal/atb/set_env.sh --cxx_abi=1"
KERNELS_A2 = "bash Ascend-cann-910b-ops_8.5.0_linux-aarch64.run --install"
PIP = "pip install 'numpy>=1.19.2,<2'"

# name: tree, {finding: severity}, {finding: start of the command that mends it}
CASES: dict[str, tuple[Tree, dict[str, str], dict[str, str]]] = {
    "everything fits": (GOOD, {}, {}),
    "nothing of Ascend": (
        NOTHING,
        {"ascend.none": "note"},
        {"ascend.none": "atbx selftest --device npu --software"},
    ),
    "nothing at all": (
        NOTHING.but(torch=None),
        {"torch.missing": "error", "ascend.none": "note"},
        {"torch.missing": "pip install 'torch>=2.7.1,<2.14'"},
    ),
    "torch_npu without CANN": (
        NOTHING.but(torch="2.13.0", torch_npu="2.13.0"),
        {"torch_npu.without_cann": "error"},
        {"torch_npu.without_cann": "export TORCH_DEVICE_BACKEND_AUTOLOAD=0"},
    ),
    "torch_npu without CANN, autoload off": (
        NOTHING.but(torch="2.13.0", torch_npu="2.13.0", environ={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        {"torch_npu.without_cann": "note"},
        {},
    ),
    "set_env.sh not sourced": (
        GOOD.but(sourced=False),
        {"environment.set_env": "error"},
        {"environment.set_env": SOURCE},
    ),
    "libhccl.so not on the path": (
        GOOD.but(environ={"LD_LIBRARY_PATH": "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1/lib"}),
        {"environment.library_path": "error"},
        {"environment.library_path": SOURCE},
    ),
    "a toolkit without HCCL": (
        GOOD.but(libraries=tuple(name for name in NEEDED_LIBRARIES if name != "libhccl.so")),
        {"toolkit.incomplete": "error"},
        {"toolkit.incomplete": "bash Ascend-cann-toolkit_8.5.0_linux-aarch64.run --install"},
    ),
    "PYTHONPATH was replaced": (
        GOOD.but(environ={"PYTHONPATH": "/home/me"}),
        {"environment.pythonpath": "error"},
        {"environment.pythonpath": SOURCE},
    ),
    "no operator package": (
        GOOD.but(kernels=None, kernel_family=None),
        {"kernels.missing": "error"},
        {"kernels.missing": KERNELS_A2},
    ),
    "operator package of another chip": (
        GOOD.but(kernel_family="310P"),
        {"kernels.other_chip": "error"},
        {"kernels.other_chip": KERNELS_A2},
    ),
    "operator package of another chip, before 8.5": (
        OLD.but(torch="2.7.1", pci="0xd803"),
        {"kernels.other_chip": "error", "torch.version": "error"},
        {
            "kernels.other_chip": "bash Atlas-A3-cann-kernels_8.1.RC1_linux-aarch64.run --install",
            "torch.version": "pip install torch==2.5.1",
        },
    ),
    "operator package of another release": (
        GOOD.but(kernels="8.3.RC1"),
        {"kernels.version": "error"},
        {"kernels.version": KERNELS_A2},
    ),
    "NNAL missing": (
        GOOD.but(nnal=None),
        {"nnal.missing": "error"},
        {"nnal.missing": "bash Ascend-cann-nnal_8.5.0_linux-aarch64.run --install"},
    ),
    "NNAL of another release": (
        GOOD.but(nnal="8.3.RC1"),
        {"nnal.version": "error"},
        {"nnal.version": "bash Ascend-cann-nnal_8.5.0_linux-aarch64.run --install"},
    ),
    "NNAL not sourced": (
        GOOD.but(sourced_nnal=False),
        {"nnal.set_env": "error"},
        {"nnal.set_env": SOURCE_ATB},
    ),
    "NNAL sourced for the other C++ ABI": (
        GOOD.but(environ={"ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_0"}),
        {"nnal.abi": "error"},
        {"nnal.abi": SOURCE_ATB},
    ),
    "NNAL without torch's C++ ABI": (
        GOOD.but(abis=(1,), torch_abi=0),
        {"nnal.abi": "error"},
        {"nnal.abi": "bash Ascend-cann-nnal_8.5.0_linux-aarch64.run --install"},
    ),
    "numpy 2 on an older CANN": (GOOD.but(numpy="2.1.0"), {"modules.numpy": "error"}, {"modules.numpy": PIP}),
    "modules that the compiler imports at once": (
        GOOD.but(without=("decorator", "attrs"), numpy=None),
        {"modules.missing": "error"},
        {"modules.missing": "pip install 'numpy>=1.19.2,<2' decorator attrs"},
    ),
    "modules that only some ops need": (
        GOOD.but(without=("scipy", "absl-py")),
        {"modules.missing": "warning"},
        {"modules.missing": "pip install scipy absl-py"},
    ),
    "torch of another release": (
        GOOD.but(torch="2.8.0"),
        {"torch.version": "error"},
        {"torch.version": "pip install torch==2.9.0"},
    ),
    "CUDA and NPU": (
        GOOD.but(torch="2.9.0+cu126", files=("dev/nvidia0",)),
        {"torch.two_accelerators": "error"},
        {"torch.two_accelerators": "pip install torch==2.9.0 --index-url"},
    ),
    "torch for CUDA without a GPU": (
        GOOD.but(torch="2.9.0+cu126"),
        {"torch.two_accelerators": "note"},
        {},
    ),
    "torch_npu missing": (
        GOOD.but(torch_npu=None),
        {"torch_npu.missing": "error"},
        {"torch_npu.missing": "pip install torch==2.9.0 torch_npu==2.9.0"},
    ),
    "the wrong post-release": (
        GOOD.but(torch_npu="2.9.0.post6"),
        {"pair.old_cann": "error"},
        {"pair.old_cann": "pip install torch==2.9.0 torch_npu=="},
    ),
    "a post-release of an earlier CANN": (
        GOOD.but(torch="2.8.0", torch_npu="2.8.0"),
        {"pair.other": "warning"},
        {"pair.other": "pip install torch==2.8.0 torch_npu==2.8.0.post2"},
    ),
    "a pair that is documented across releases": (
        OLD.but(torch="2.7.1", torch_npu="2.7.1"),
        {"pair.across": "note"},
        {},
    ),
    "a pair newer than the table": (
        GOOD.but(cann="9.3.0", kernels="9.3.0", nnal="9.3.0", torch="2.13.0", torch_npu="2.13.0"),
        {"pair.not_known": "note", "toolkit.new": "note"},
        {},
    ),
    "a new torch_npu on an old CANN": (
        OLD.but(torch="2.13.0", torch_npu="2.13.0"),
        {"pair.old_cann": "error"},
        {"pair.old_cann": "pip install torch=="},
    ),
    "the driver is too old": (
        GOOD.but(driver="24.1.RC3"),
        {"driver.old": "error"},
        {"driver.old": "bash Ascend-hdk-910b-npu-driver_25.0.RC1_linux-aarch64.run --upgrade"},
    ),
    "firmware that the driver does not name": (
        GOOD.but(firmware="6.4.12.1.241"),
        {"firmware.version": "warning"},
        {"firmware.version": "bash Ascend-hdk-CHIP-npu-firmware"},
    ),
    "a container without devices": (
        GOOD.but(devices=(), controls=(), files=(".dockerenv",), pci=None),
        {"devices.container": "error"},
        {"devices.container": "docker run --device /dev/davinci0"},
    ),
    "a container without the driver's files": (
        GOOD.but(driver=None, firmware=None, files=(".dockerenv",)),
        {"driver.missing": "error"},
        {"driver.missing": "docker run --device /dev/davinci0"},
    ),
    "a container without the control devices": (
        GOOD.but(controls=("davinci_manager",), files=(".dockerenv",)),
        {"devices.control": "error"},
        {"devices.control": "docker run"},
    ),
    "a driver that was not loaded": (
        GOOD.but(devices=(), controls=()),
        {"devices.missing": "error"},
        {"devices.missing": "bash Ascend-hdk-910b-npu-driver_"},
    ),
    "a machine to build on": (
        GOOD.but(devices=(), controls=(), driver=None, firmware=None, pci=None),
        {"devices.none": "warning"},
        {"devices.none": "atbx selftest --device npu --software"},
    ),
    "a driver alone": (
        NOTHING.but(driver="25.5.1", devices=(0,), controls=GOOD.controls),
        {"toolkit.missing": "error"},
        {"toolkit.missing": "bash Ascend-cann-toolkit_VERSION_linux-"},
    ),
    "310P": (
        GOOD.but(pci="0xd500", kernel_family="310P"),
        {"chip.bfloat16": "note"},
        {"chip.bfloat16": "atbx generate MODEL --device npu --dtype float16"},
    ),
    "Python that CANN does not name": (
        GOOD.but(python="3.14"),
        {"python.version": "warning"},
        {"python.version": "python3.13 -m venv"},
    ),
    "a toolkit folder that was removed": (
        GOOD.but(environ={"ASCEND_OPP_PATH": "/opt/gone/opp"}),
        {"environment.no_folder": "error", "environment.other_opp": "absent"},
        {"environment.no_folder": SOURCE},
    ),
    "two toolkits": (
        GOOD.but(environ={"ASCEND_TOOLKIT_HOME": "/opt/other"}, files=("opt/other/set_env.sh",)),
        {"environment.two_toolkits": "warning"},
        {"environment.two_toolkits": SOURCE},
    ),
    "launches that wait": (
        GOOD.but(environ={"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "0"}),
        {"environment.blocking": "warning", "environment.task_queue": "note"},
        {"environment.blocking": "unset ASCEND_LAUNCH_BLOCKING"},
    ),
    "variables that mean nothing": (
        GOOD.but(
            environ={
                "TASK_QUEUE_ENABLE": "yes",
                "PYTORCH_NPU_ALLOC_CONF": "expandable_segment:True",
                "HCCL_DETERMINISTIC": "1",
                "ASCEND_RT_VISIBLE_DEVICES": "0,7",
            }
        ),
        {
            "environment.task_queue": "warning",
            "environment.allocator": "error",
            "environment.deterministic": "warning",
            "environment.visible_devices": "error",
        },
        {
            "environment.allocator": "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
            "environment.visible_devices": "export ASCEND_RT_VISIBLE_DEVICES=0,1",
            "environment.deterministic": "export HCCL_DETERMINISTIC=true",
        },
    ),
    "devices in the wrong order": (
        GOOD.but(environ={"ASCEND_RT_VISIBLE_DEVICES": "1,0"}),
        {"environment.visible_devices": "error"},
        {"environment.visible_devices": "export ASCEND_RT_VISIBLE_DEVICES=0,1"},
    ),
}
CODES = {"note": 0, "warning": 1, "error": 2}


@pytest.mark.parametrize("name", CASES)
def test_an_installation(name: str, tmp_path: Path) -> None:
    tree, expected, mends = CASES[name]
    report = tree.examine(tmp_path)
    expected = {id: severity for id, severity in expected.items() if severity != "absent"}
    assert {f.id: f.severity.word for f in report.findings} == expected
    assert report.exit_code == max((CODES[s] for s in expected.values()), default=0)
    by_id = {f.id: f for f in report.findings}
    for id, command in mends.items():
        assert (by_id[id].mend or "").startswith(command)
    data = json.loads(json.dumps(report.as_data()))
    assert [f["id"] for f in data["findings"]] == [f.id for f in report.findings]
    assert all(f["what"] and f["where"] and f["breaks"] for f in data["findings"])
    assert all(f["mend"] for f in data["findings"] if f["severity"] != "note")
    text = "\n".join(report.lines())
    assert all(f"[{id}]" in text for id in expected)
    # No path of the folder that the tree was made up in.
    assert str(tmp_path) not in text


def test_versions_are_read_from_the_files(tmp_path: Path) -> None:
    found = GOOD.examine(tmp_path).installed
    assert found == {
        "driver": "25.5.1 in /usr/local/Ascend/driver",
        "firmware": "7.8.0.6.201 in /usr/local/Ascend/firmware",
        "toolkit": "8.5.0 in /usr/local/Ascend/ascend-toolkit/latest",
        "kernels": "8.5.0 in /usr/local/Ascend/ascend-toolkit/latest/opp",
        "nnal": "8.5.0 in /usr/local/Ascend/nnal/atb/latest/atb",
        "torch": "2.9.0+cpu",
        "torch_npu": "2.9.0",
        "python": "3.11",
    }


def test_old_cann_needs_numpy_1_but_new_does_not(tmp_path: Path) -> None:
    new = GOOD.but(
        cann="9.0.0", kernels="9.0.0", nnal="9.0.0", torch="2.10.0", torch_npu="2.10.0", numpy="2.4.0"
    )
    assert new.examine(tmp_path / "new").findings == ()
    newer_python = GOOD.but(numpy="2.2.0", python="3.13")
    assert newer_python.examine(tmp_path / "python").findings == ()


def test_a_named_chip_chooses_the_kernels_that_are_expected(tmp_path: Path) -> None:
    report = GOOD.but(pci=None).examine(tmp_path, "Ascend310P3")
    assert [f.id for f in report.findings] == ["kernels.other_chip", "chip.bfloat16"]
    assert report.findings[0].expected == "ascend310p"
    assert report.findings[0].found == "ascend910b"


def test_a_chip_that_the_table_lacks_is_an_error(tmp_path: Path) -> None:
    found = GOOD.examine(tmp_path, "Ascend999").findings
    assert [(f.id, f.found) for f in found] == [("chip.unknown", "Ascend999")]
    assert "Ascend910B3" in (found[0].expected or "")


def test_the_inner_version_is_not_taken_for_the_release(tmp_path: Path) -> None:
    info = "usr/local/Ascend/ascend-toolkit/latest/runtime/version.info"
    tree = GOOD.but(kernels=None)
    tree.write(tmp_path)
    (tmp_path / "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info").unlink()
    path = tmp_path / info
    path.parent.mkdir()
    path.write_text("Version=7.7.0.1.238\nversion_dir=8.1.RC1\ntimestamp=20250414\n")
    toolkit = read(tmp_path, {}, {}.get).toolkit
    assert toolkit is not None
    assert str(toolkit.version) == "8.1.RC1"


def test_a_folder_that_cannot_be_looked_into_counts_as_not_there(tmp_path: Path) -> None:
    # A name that the file system refuses fails as a folder does that this user may not enter.
    report = GOOD.but(environ={"ASCEND_OPP_PATH": "/" + "x" * 5000}).examine(tmp_path)
    assert [f.id for f in report.findings] == ["environment.no_folder"]


def test_links_that_turn_in_a_circle_end_the_search(tmp_path: Path) -> None:
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt/circle").symlink_to(tmp_path / "opt/circle")
    report = GOOD.but(environ={"ASCEND_TOOLKIT_HOME": "/opt/circle"}).examine(tmp_path)
    assert [f.id for f in report.findings] == ["environment.no_folder", "environment.two_toolkits"]


def test_a_toolkit_beside_the_usual_place_is_found_by_its_version(tmp_path: Path) -> None:
    for version in ("8.5.0", "9.0.0"):
        put(
            tmp_path / f"usr/local/Ascend/cann-{version}/x86_64-linux/ascend_toolkit_install.info",
            f"version={version}\n",
        )
    found = read(tmp_path, {}, {}.get)
    assert found.toolkit is not None
    assert (str(found.toolkit.version), found.arch) == ("9.0.0", "x86_64")
