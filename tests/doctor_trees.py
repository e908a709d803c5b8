"""Made-up installations: file trees as CANN, its driver and NNAL leave them, from a small description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atbx.doctor.installation import CONTROL_DEVICES, KERNEL_FOLDERS, NEEDED_LIBRARIES, read
from atbx.doctor.report import Report, examine

ASCEND = "usr/local/Ascend"
MODULES = (
    *("decorator", "attrs", "psutil", "scipy", "sympy", "cffi", "protobuf", "pyyaml", "absl-py", "requests"),
    *("pathlib2", "cython"),
)


@dataclass(frozen=True)
class Tree:
    """An installation to make up; as it stands, everything is there and fits."""

    cann: str | None = "8.5.0"
    kernels: str | None = "8.5.0"
    kernel_family: str | None = "A2"
    nnal: str | None = "8.5.0"
    abis: tuple[int, ...] = (0, 1)
    driver: str | None = "25.5.1"
    firmware: str | None = "7.8.0.6.201"
    devices: tuple[int, ...] = (0, 1)
    controls: tuple[str, ...] = CONTROL_DEVICES
    pci: str | None = "0xd802"
    torch: str | None = "2.9.0+cpu"
    torch_npu: str | None = "2.9.0"
    numpy: str | None = "1.26.4"
    without: tuple[str, ...] = ()
    python: str = "3.11"
    sourced: bool = True
    sourced_nnal: bool = True
    environ: Mapping[str, str | None] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    torch_abi: int | None = None
    libraries: tuple[str, ...] = NEEDED_LIBRARIES

    def but(self, **changes: Any) -> Tree:
        """The same but for some parts."""
        return replace(self, **changes)

    def write(self, root: Path) -> Path:
        """Write the files; returns the root."""
        self._write_toolkit(root)
        self._write_driver(root)
        if self.nnal is not None:
            folder = root / ASCEND / "nnal/atb/latest"
            put(folder / "version.info", f"    Ascend-cann-atb : {self.nnal}\n    Platform : aarch64\n")
            for abi in self.abis:
                put(folder / f"atb/cxx_abi_{abi}/lib/libatb.so")
            put(root / ASCEND / "nnal/atb/set_env.sh")
        if self.pci is not None:
            put(root / "sys/bus/pci/devices/0000:01:00.0/vendor", "0x19e5\n")
            put(root / "sys/bus/pci/devices/0000:01:00.0/device", self.pci + "\n")
        for path in self.files:
            put(root / path)
        return root

    def _write_toolkit(self, root: Path) -> None:
        if self.cann is None:
            return
        folder = root / ASCEND / "ascend-toolkit/latest"
        info = folder / "aarch64-linux/ascend_toolkit_install.info"
        put(
            info,
            f"package_name=Ascend-cann-toolkit\nversion={self.cann}\ninnerversion=V100R001C23\narch=aarch64\n",
        )
        put(folder.parent / "set_env.sh")
        for name in self.libraries:
            put(folder / "lib64" / name)
        put(folder / "python/site-packages/tbe/__init__.py")
        kernels = folder / "opp/built-in/op_impl/ai_core/tbe/kernel"
        # What the toolkit itself brings.
        put(kernels / "ascend910b/ops_oam/oam.o")
        if self.kernels is not None:
            put(folder / "aarch64-linux/ascend_ops_install.info", f"version={self.kernels}\narch=aarch64\n")
        if self.kernel_family is not None:
            for op in ("add", "mat_mul_v2", "rms_norm", "swi_glu", "gather_v2", "softmax_v2"):
                put(kernels / KERNEL_FOLDERS[self.kernel_family] / op / "kernel.o")

    def _write_driver(self, root: Path) -> None:
        if self.driver is not None:
            facts = f"Version={self.driver}\nascendhal_version=7.35.23\ncompatible_version_fw=[7.0.0,8.9.9]\n"
            put(root / ASCEND / "driver/version.info", facts + f"package_version={self.driver}\n")
            put(root / ASCEND / "driver/lib64/driver/libascend_hal.so")
            put(root / "usr/local/bin/npu-smi")
        if self.firmware is not None:
            put(root / ASCEND / "firmware/version.info", f"Version={self.firmware}\nfirmware_version=1.0\n")
        for number in self.devices:
            put(root / f"dev/davinci{number}")
        for name in self.controls:
            put(root / "dev" / name)

    def environment(self) -> dict[str, str]:
        """What the set_env.sh scripts export, and what the description adds or (None) takes away."""
        toolkit, atb = f"/{ASCEND}/ascend-toolkit/latest", f"/{ASCEND}/nnal/atb/latest/atb/cxx_abi_1"
        found: dict[str, str] = {}
        paths = [f"/{ASCEND}/driver/lib64/driver"]
        if self.sourced and self.cann is not None:
            found |= {"ASCEND_HOME_PATH": toolkit, "ASCEND_TOOLKIT_HOME": toolkit}
            found |= {"ASCEND_OPP_PATH": f"{toolkit}/opp", "PYTHONPATH": f"{toolkit}/python/site-packages"}
            paths.insert(0, f"{toolkit}/lib64")
        if self.sourced_nnal and self.nnal is not None:
            found["ATB_HOME_PATH"] = atb
            paths.insert(0, f"{atb}/lib")
        found["LD_LIBRARY_PATH"] = ":".join(paths)
        for name, value in self.environ.items():
            if value is None:
                found.pop(name, None)
            else:
                found[name] = value
        return found

    def packages(self) -> dict[str, str]:
        """Versions of the installed Python packages."""
        named = {"torch": self.torch, "torch_npu": self.torch_npu, "numpy": self.numpy}
        found = {name: version for name, version in named.items() if version is not None}
        return found | {name: "1.0" for name in MODULES if name not in self.without}

    def examine(self, root: Path, chip: str | None = None) -> Report:
        """Write it and examine it."""
        self.write(root)
        torch = root / "torch"
        if self.torch_abi is not None:
            text = f'set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI={self.torch_abi}")\n'
            put(torch / "share/cmake/Torch/TorchConfig.cmake", text)
        found = read(root, self.environment(), self.packages().get, python=self.python, torch_folder=torch)
        return examine(found, chip)


def put(path: Path, text: str = "") -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


NOTHING = Tree(
    cann=None,
    kernels=None,
    kernel_family=None,
    nnal=None,
    driver=None,
    firmware=None,
    devices=(),
    controls=(),
    pci=None,
    torch_npu=None,
)
"""A machine that never saw Ascend."""
