"""Names of the packages to install, as their vendor calls them, for the commands that findings give."""

from __future__ import annotations

from atbx.doctor.installation import Installation, exists
from atbx.doctor.versions import Version, parse

_CHIP_TYPES = {"A2": "910b", "A3": "A3", "310P": "310p", "910A": "910"}
_RENAMED_FROM = parse("8.5.0")
"""From here on the operator package is called ops, before it kernels."""


def toolkit_command(found: Installation, cann: str | None) -> str:
    """Installs the toolkit of a release."""
    return f"bash Ascend-cann-toolkit_{cann or 'VERSION'}_linux-{found.arch}.run --install"


def nnal_command(found: Installation, cann: Version | None) -> str:
    """Installs NNAL of a release."""
    return f"bash Ascend-cann-nnal_{cann or 'VERSION'}_linux-{found.arch}.run --install"


def kernels_command(found: Installation, family: str | None, cann: Version | None) -> str:
    """Installs the operator package for a chip family."""
    chip = _CHIP_TYPES.get(family or "", "CHIP")
    if cann is not None and cann < _RENAMED_FROM:
        name = "Atlas-A3-cann-kernels" if family == "A3" else f"Ascend-cann-kernels-{chip}"
    else:
        name = f"Ascend-cann-{chip}-ops"
    return f"bash {name}_{cann or 'VERSION'}_linux-{found.arch}.run --install"


def driver_command(found: Installation, family: str | None, version: str | None) -> str:
    """Installs the driver; it is the host's, also for containers."""
    chip = _CHIP_TYPES.get(family or "", "CHIP")
    return f"bash Ascend-hdk-{chip}-npu-driver_{version or 'VERSION'}_linux-{found.arch}.run --upgrade"


def source_toolkit(found: Installation) -> str:
    """Puts the toolkit's folders into the environment."""
    assert found.toolkit is not None
    inside = found.toolkit.path / "set_env.sh"
    script = inside if exists(inside) else found.toolkit.path.parent / "set_env.sh"
    return f"source {found.shown(script)}"


def source_nnal(found: Installation) -> str:
    """Puts NNAL's folders into the environment, for the C++ ABI of torch."""
    assert found.nnal is not None
    inside = found.nnal.path.parent / "set_env.sh"
    script = inside if exists(inside) else found.nnal.path.parent.parent / "set_env.sh"
    abi = "" if found.torch_abi is None else f" --cxx_abi={found.torch_abi}"
    return f"source {found.shown(script)}{abi}"
