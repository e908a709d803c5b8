"""Checks of what pip installs: torch, torch_npu, the pair that they make with CANN, Python, and CANN's own modules."""

from __future__ import annotations

from collections.abc import Iterator

from atbx.doctor.findings import Finding, error, note, warning
from atbx.doctor.installation import Installation
from atbx.doctor.matrix import (
    MODULES,
    Pair,
    cann_for,
    judge,
    release_of,
    torch_npu_for,
    wants_numpy_1,
)
from atbx.doctor.packages import toolkit_command
from atbx.doctor.versions import parse

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
LOWEST_TORCH, BELOW_TORCH = "2.7.1", "2.14"
"""What atbx itself runs on."""


def check_torch(found: Installation) -> Iterator[Finding]:
    """torch is there and is one that atbx runs on."""
    torch = found.package("torch")
    if torch is None:
        yield error(
            "torch.missing",
            "torch is not installed",
            "package torch",
            "nothing of atbx runs but this command",
            mend="pip install 'torch>=2.7.1,<2.14'",
        )
    elif not parse(LOWEST_TORCH) <= torch < parse(BELOW_TORCH):
        yield error(
            "torch.range",
            "atbx does not run on this torch",
            "package torch",
            "models may not compile or give an error of torch's own",
            expected=f"{LOWEST_TORCH} to below {BELOW_TORCH}",
            found=str(torch),
            mend="pip install 'torch>=2.7.1,<2.14'",
        )


def check_torch_npu(found: Installation) -> Iterator[Finding]:
    """torch_npu is there, fits torch, and can be loaded as far as files tell."""
    torch, torch_npu = found.package("torch"), found.package("torch_npu")
    cann = found.toolkit.version if found.toolkit is not None else None
    if torch_npu is None:
        if found.toolkit is not None:
            fitting = torch_npu_for(cann, torch) if cann is not None else None
            pair = f"torch=={parse(fitting).base} torch_npu=={fitting}" if fitting else "torch_npu"
            yield error(
                "torch_npu.missing",
                "CANN is installed, but torch_npu is not",
                "package torch_npu",
                "device 'npu' cannot be used; the CPU backend works",
                mend=f"pip install {pair}",
            )
        return
    if torch is not None and torch.base != torch_npu.base:
        yield error(
            "torch.version",
            "torch and torch_npu are of different releases",
            "package torch",
            "import torch_npu fails with undefined symbols",
            expected=torch_npu.base,
            found=str(torch),
            mend=f"pip install torch=={torch_npu.base}",
        )
    if found.toolkit is None:
        yield from _check_without_cann(found)
    if found.is_torch_for_cuda:
        make = error if found.has_nvidia else note
        yield make(
            "torch.two_accelerators",
            "this torch is built for CUDA" + (" and there is an NVIDIA GPU" if found.has_nvidia else ""),
            "package torch",
            "ERR00007: torch_npu refuses to be imported beside a second accelerator"
            if found.has_nvidia
            else "nothing without an NVIDIA GPU; the package is larger than it has to be",
            expected="the CPU build of torch",
            found=found.packages("torch"),
            mend=f"pip install torch=={torch_npu.base} --index-url https://download.pytorch.org/whl/cpu",
        )


def _check_without_cann(found: Installation) -> Iterator[Finding]:
    torch_npu = found.package("torch_npu")
    assert torch_npu is not None
    wanted = cann_for(torch_npu)
    is_off = found.environ is not None and found.environ.get(AUTOLOAD) == "0"
    make = note if is_off else error
    yield make(
        "torch_npu.without_cann",
        "torch_npu is installed without CANN",
        "package torch_npu",
        "device 'npu' cannot be used; torch and the CPU backend work, since its autoload is off"
        if is_off
        else "plain `import torch` fails in every program (libhccl.so: cannot open shared object file); "
        "atbx itself works on the CPU",
        expected=f"CANN {wanted}" if wanted else "a CANN toolkit",
        found="no toolkit",
        mend=f"export {AUTOLOAD}=0  # or install CANN: " + toolkit_command(found, wanted),
    )


def check_pair(found: Installation) -> Iterator[Finding]:
    """torch_npu and CANN were released for each other, with the post-release that belongs."""
    torch_npu = found.package("torch_npu")
    cann = found.toolkit.version if found.toolkit is not None else None
    if torch_npu is None or cann is None:
        return
    judged = judge(torch_npu, cann)
    where = "package torch_npu"
    fitting = torch_npu_for(cann, found.package("torch"))
    mend = f"pip install torch=={parse(fitting).base} torch_npu=={fitting}" if fitting else None
    facts: dict[str, str | None] = {
        "expected": f"CANN {' or '.join(judged.cann)}" if judged.cann else None,
        "found": f"torch_npu {torch_npu} on CANN {cann}",
    }
    if judged.pair in (Pair.NEW, Pair.UNLISTED):
        yield note(
            "pair.not_known",
            f"this pair is not known here ({judged.pair.value})",
            where,
            "nothing that is known: pairs newer than the table appear with every release",
            **facts,
        )
    elif judged.pair is Pair.ACROSS:
        what = "this pair was not released together, but is documented to run"
        yield note("pair.across", what, where, "nothing that is known", **facts)
    elif judged.pair is Pair.OLD_CANN:
        yield error(
            "pair.old_cann",
            "CANN is older than this torch_npu needs",
            where,
            "undefined symbols at import, missing operators (aclnn... not found), 561003",
            mend=mend,
            **facts,
        )
    elif judged.pair is Pair.OTHER:
        yield warning(
            "pair.other",
            "this torch_npu was released for another CANN",
            where,
            "operators may be missing or take other arguments; the post-release counts",
            mend=mend,
            **facts,
        )


def check_python(found: Installation) -> Iterator[Finding]:
    """Python is one that CANN's guide names."""
    cann = found.toolkit.version if found.toolkit is not None else None
    row = release_of(cann) if cann is not None else None
    if row is None or row.python is None:
        return
    low, high = row.python
    if not parse(low).series <= found.python.series <= parse(high).series:
        yield warning(
            "python.version",
            f"CANN {cann} does not name this Python",
            "python",
            "E40002, E40020: the operator compiler may not import",
            expected=f"{low} to {high}",
            found=str(found.python),
            mend=f"python{high} -m venv NEW  # and install torch and torch_npu there",
        )


def check_modules(found: Installation) -> Iterator[Finding]:
    """The packages that CANN's operator compiler imports."""
    cann = found.toolkit.version if found.toolkit is not None else None
    if found.toolkit is None:
        return
    missing = [name for name in MODULES if found.packages(name) is None]
    fatal = [name for name in missing if MODULES[name]]
    wants_old = cann is not None and wants_numpy_1(cann, found.python)
    pins = ["'numpy>=1.19.2,<2'" if name == "numpy" and wants_old else name for name in missing]
    if missing:
        make = error if fatal else warning
        yield make(
            "modules.missing",
            "Python packages that CANN's installation guide lists are not installed",
            f"packages {', '.join(missing)}",
            "500001, E40020, E40021: the operator compiler cannot be imported"
            if fatal
            else "ops that are compiled at run time may fail",
            mend=f"pip install {' '.join(pins)}",
        )
    numpy = found.package("numpy")
    if wants_old and numpy is not None and numpy >= parse("2.0.0"):
        yield error(
            "modules.numpy",
            f"CANN {cann} needs numpy below 2",
            "package numpy",
            "500001: the operator compiler cannot be imported",
            expected=">=1.19.2,<2",
            found=str(numpy),
            mend="pip install 'numpy>=1.19.2,<2'",
        )
