"""Checks of CANN: the toolkit, the operator package, NNAL, and whether their libraries are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from atbx.doctor.findings import Finding, error, note
from atbx.doctor.installation import ASCEND, KERNEL_FOLDERS, NEEDED_LIBRARIES, Installation, exists, is_folder
from atbx.doctor.matrix import is_newer_than_matrix, ops_go_with
from atbx.doctor.packages import (
    kernels_command,
    nnal_command,
    source_nnal,
    source_toolkit,
    toolkit_command,
)


def check_toolkit(found: Installation, wanted: str | None) -> Iterator[Finding]:
    """The toolkit is there, with a version. wanted: the release that goes with the installed torch_npu."""
    if found.toolkit is None:
        if found.package("torch_npu") is None:
            yield error(
                "toolkit.missing",
                "there is an NPU or its driver, but no CANN toolkit",
                f"/{ASCEND}/ascend-toolkit/latest",
                "device 'npu' cannot be used; the CPU backend works",
                mend=toolkit_command(found, wanted),
            )
        return
    version = found.toolkit.version
    if version is None:
        yield error(
            "toolkit.version",
            "no file of the toolkit tells its version",
            found.shown(found.toolkit.path),
            "the installation is incomplete: kernels and libraries may be missing",
            expected=f"{found.arch}-linux/ascend_toolkit_install.info",
            mend=toolkit_command(found, wanted),
        )
    elif is_newer_than_matrix(version):
        yield note(
            "toolkit.new",
            "this CANN is newer than what this version of atbx knows",
            found.shown(found.toolkit.source or found.toolkit.path),
            "nothing by itself: its pairs are not known here",
            found=str(version),
        )


def check_kernels(found: Installation, family: str | None) -> Iterator[Finding]:
    """The operator package is there, for this chip, and of a release that goes with the toolkit."""
    if found.toolkit is None:
        return
    cann = found.toolkit.version
    opp = found.kernels.path if found.kernels is not None else found.toolkit.path / "opp"
    where = found.shown(opp / "built-in/op_impl/ai_core/tbe/kernel")
    mend = kernels_command(found, family, cann)
    expected = KERNEL_FOLDERS.get(family or "")
    if not found.kernel_chips:
        yield error(
            "kernels.missing",
            "the operator package is not installed",
            where,
            "561003, 561103, 'binary load failed', 'Get kernel failed': no kernel is found for any op",
            expected=f"compiled kernels in {expected}" if expected else "compiled kernels for the chip",
            found="none",
            mend=mend,
        )
    elif family is not None and family not in found.kernel_chips:
        yield error(
            "kernels.other_chip",
            "the operator package is for another chip",
            where,
            "507008, 561003: no kernel is found for any op",
            expected=expected,
            found=", ".join(KERNEL_FOLDERS[other] for other in found.kernel_chips),
            mend=mend,
        )
    kernels = found.kernels.version if found.kernels is not None else None
    if kernels is not None and cann is not None and not ops_go_with(kernels, cann):
        assert found.kernels is not None
        yield error(
            "kernels.version",
            "the operator package and the toolkit are of releases that do not go together",
            found.shown(found.kernels.source or found.kernels.path),
            "561002, 561003: tiling and kernels do not fit each other",
            expected=str(cann),
            found=str(kernels),
            mend=mend,
        )


def check_nnal(found: Installation) -> Iterator[Finding]:
    """NNAL is there, of the toolkit's release, for torch's C++ ABI, and its library is found."""
    if found.toolkit is None or found.package("torch_npu") is None:
        return
    cann = found.toolkit.version
    breaks = "libatb.so cannot be opened: the kernels of torch.ops.atb (cache writes, attention on 310P) are missing"
    if found.nnal is None:
        yield error(
            "nnal.missing",
            "NNAL is not installed",
            f"/{ASCEND}/nnal/atb/latest",
            breaks,
            mend=nnal_command(found, cann),
        )
        return
    version = found.nnal.version
    if version is not None and cann is not None and version != cann:
        yield error(
            "nnal.version",
            "NNAL and the toolkit are of different releases",
            found.shown(found.nnal.source or found.nnal.path),
            "undefined symbols, 'libtbe_adapter.so does not exist', missing operators of torch.ops.atb",
            expected=str(cann),
            found=str(version),
            mend=nnal_command(found, cann),
        )
    abi = found.torch_abi
    if abi is not None and abi not in found.abis:
        yield error(
            "nnal.abi",
            "NNAL has no library for the C++ ABI that torch was built with",
            found.shown(found.nnal.path),
            "undefined symbols when the first kernel of torch.ops.atb is called",
            expected=f"cxx_abi_{abi}/lib/libatb.so",
            found=", ".join(f"cxx_abi_{n}" for n in found.abis) or "none",
            mend=nnal_command(found, cann),
        )
        return
    if found.environ is None:
        return
    home = found.environ.get("ATB_HOME_PATH", "")
    named = Path(home).name
    if abi is not None and named in ("cxx_abi_0", "cxx_abi_1") and named != f"cxx_abi_{abi}":
        yield error(
            "nnal.abi",
            "ATB_HOME_PATH names the other C++ ABI",
            "ATB_HOME_PATH",
            "undefined symbols when the first kernel of torch.ops.atb is called",
            expected=f"cxx_abi_{abi}",
            found=named,
            mend=source_nnal(found),
        )
    elif not home or found.library("libatb.so") is None:
        yield error(
            "nnal.set_env",
            "NNAL is installed, but its set_env.sh was not sourced",
            "ATB_HOME_PATH" if not home else "LD_LIBRARY_PATH",
            breaks,
            mend=source_nnal(found),
        )


def check_libraries(found: Installation) -> Iterator[Finding]:
    """The libraries that torch_npu is linked to are found by the loader, and the compiler's Python modules."""
    if found.toolkit is None or found.environ is None:
        return
    missing = [name for name in NEEDED_LIBRARIES if found.library(name) is None]
    if missing:
        folder = found.toolkit.path
        places = (folder / "lib64", *sorted(folder.glob("*-linux/lib64")))
        here = [name for name in missing if any(exists(place / name) for place in places)]
        if len(here) < len(missing):
            absent = [name for name in missing if name not in here]
            yield error(
                "toolkit.incomplete",
                "libraries that torch_npu is linked to are not in the toolkit",
                found.shown(folder),
                f"import torch_npu fails: {absent[0]}: cannot open shared object file",
                expected=", ".join(absent),
                mend=toolkit_command(found, str(found.toolkit.version) if found.toolkit.version else None),
            )
        else:
            is_sourced = bool(found.environ.get("ASCEND_HOME_PATH"))
            yield error(
                "environment.library_path" if is_sourced else "environment.set_env",
                "the toolkit's libraries are not on LD_LIBRARY_PATH"
                if is_sourced
                else "CANN's set_env.sh was not sourced",
                "LD_LIBRARY_PATH",
                f"import torch_npu fails, and plain `import torch` with it: {missing[0]}: "
                "cannot open shared object file",
                expected=found.shown(folder / "lib64"),
                found=found.environ.get("LD_LIBRARY_PATH") or "unset",
                mend=source_toolkit(found),
            )
        return
    if found.driver is not None and found.library("libascend_hal.so") is None:
        folders = found.driver.path / "lib64/driver"
        yield error(
            "driver.library",
            "the driver's library is not found by the loader",
            "LD_LIBRARY_PATH",
            "libascend_hal.so: cannot open shared object file",
            expected=found.shown(folders),
            mend=f"export LD_LIBRARY_PATH={found.shown(folders)}:$LD_LIBRARY_PATH",
        )
    modules = found.toolkit.path / "python/site-packages"
    listed = [found.below(part) for part in found.environ.get("PYTHONPATH", "").split(":") if part]
    if is_folder(modules / "tbe") and not any(is_folder(folder / "tbe") for folder in listed):
        yield error(
            "environment.pythonpath",
            "the operator compiler's Python modules are not on PYTHONPATH",
            "PYTHONPATH",
            "E40020: failed to import Python module tbe.common; ops that are compiled at run time fail",
            expected=found.shown(modules),
            mend=source_toolkit(found),
        )
