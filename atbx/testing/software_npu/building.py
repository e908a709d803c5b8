"""Builds the stand-ins for the CANN libraries, once per torch_npu wheel.

The C++ sources lie in `kernels/ascend/standins`. What they cannot know, the names of about 900 aclnn operators and
the mangled names of ATB's templates, is read from the wheel's libraries and generated. The result goes to a cache
folder named after the wheel's version and the hash of all sources; a folder is made under another name and renamed,
so two processes may build at once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from atbx.core.errors import UnsupportedError

LIBRARIES = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi", "nnopbase", "atb")
"""Libraries that torch_npu opens by these names; all symbols are in libascendcl, which each of them needs."""

# Functions that torch_npu looks up by name, so that no undefined symbol announces them; each only has to succeed.
LOOKED_UP = (
    "aclSetCompileopt", "aclrtGetStreamOverflowSwitch", "aclrtHostRegister", "aclrtHostUnregister",
    "aclrtSetDeviceSatMode", "aclrtSetOpExecuteTimeOut", "aclrtSetOpWaitTimeout", "aclrtSetStreamFailureMode",
    "aclrtSetStreamOverflowSwitch", "aclrtSetStreamAttribute", "aclmdlRIDebugJsonPrint", "aclmdlRIDebugPrint",
    "aclrtCmoAsync",
    "aclrtSubscribeReport", "aclrtUnSubscribeReport", "aclrtProcessReport",
)  # fmt: skip

_PLAIN_C = re.compile(r"^(acl[A-Za-z]|Msprof|rt[A-Z]|Hccl|mstx)\w*$")
_ATB_FUNCTIONS = (
    "FusedAddTopkDiv",
    "MLA",
    "MLAPreprocess",
    "PagedCacheLoad",
    "RingMLA",
    "SelfAttentionPrefixEncoder",
)


def wheel_folder() -> Path:
    """Folder of the installed torch_npu, which is not imported.

    Raises:
        UnsupportedError: torch_npu is not installed.
    """
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError(
            "the software NPU runs the real torch_npu, which is not installed",
            hint="pip install 'atbx[twin]' in an environment of its own: an installed torch_npu breaks a plain "
            "`import torch` where CANN is missing",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def source_folder() -> Path:
    """Folder of the stand-ins' C++ sources."""
    spec = importlib.util.find_spec("atbx.kernels")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "ascend" / "standins"


def compiler() -> str:
    """Path of the C++ compiler: $CXX, c++, g++ or clang++.

    Raises:
        UnsupportedError: there is none.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise UnsupportedError(
        "the software NPU compiles stand-ins for the CANN libraries and found no C++ compiler",
        expected="c++, g++ or clang++ on PATH, or the environment variable CXX",
        hint="apt-get install g++ (or your system's package), then run again",
    )


def standin_folder() -> Path:
    """Folder with the compiled stand-ins for the installed wheel; built if it is not there.

    Raises:
        UnsupportedError: torch_npu or the compiler is missing, or the compiler refuses the sources.
    """
    wheel = wheel_folder()
    version = importlib.metadata.version("torch_npu")
    sources = sorted([*source_folder().glob("*.cpp"), *source_folder().glob("*.h")])
    digest = hashlib.sha256(version.encode())
    for path in [*sources, Path(__file__)]:
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atbx" / "software_npu"
    folder = cache / f"{version}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as work:
        _build(Path(work) / "made", wheel, [path for path in sources if path.suffix == ".cpp"])
        try:
            os.rename(Path(work) / "made", folder)
        except OSError:  # another process was first; its folder is as good
            if not folder.is_dir():
                raise
    return folder


def _build(folder: Path, wheel: Path, sources: list[Path]) -> None:
    folder.mkdir()
    cxx = compiler()
    generated = folder / "generated.cpp"
    generated.write_text(_generated(wheel, "\n".join(path.read_text() for path in sources)))
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-w", f"-I{source_folder()}"]
    place = ["-Wl,-rpath,$ORIGIN"]
    _compile(
        [cxx, *flags, "-o", str(folder / "libascendcl.so"), *map(str, sources), str(generated),
         "-Wl,-soname,libascendcl.so", "-ldl"]
    )  # fmt: skip
    empty = folder / "empty.cpp"
    for name in LIBRARIES:
        empty.write_text(f"int standin_{name};\n")
        _compile(
            [cxx, *flags, "-o", str(folder / f"lib{name}.so"), str(empty), f"-Wl,-soname,lib{name}.so", *place,
             "-Wl,--no-as-needed", f"-L{folder}", "-lascendcl"]
        )  # fmt: skip


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnsupportedError(
            f"{command[0]} refused the stand-ins for the CANN libraries",
            found=done.stderr.strip()[-2000:],
        )


def _undefined(library: Path) -> set[str]:
    """Symbols that a shared library takes from elsewhere."""
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UnsupportedError(
            "nm (binutils) could not read the wheel's library", found=f"{library}: {done.stderr}"
        )
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line.split()}


def _generated(wheel: Path, written: str) -> str:
    """C++ for the names that only the wheel knows; `written` is the text of the sources, whose functions are kept."""
    libraries = [*wheel.glob("_C*.so"), *(wheel / "lib").glob("*.so")]
    texts = b"".join(
        (wheel / "lib" / name).read_bytes() for name in ("libtorch_npu.so", "libop_plugin_atb.so")
    )
    operators = {name.decode() for name in re.findall(rb"\b(aclnn[A-Z]\w+)", texts)}
    operators |= {"aclRfft1D", "aclStft"}
    # "...GetMaxWorkspaceSize" is a workspace call of its kernel, not a kernel.
    sizes = sorted(name for name in operators if name.endswith("GetMaxWorkspaceSize"))
    defined = set(re.findall(r"\b(acl\w+)\(", written)) | set(re.findall(r"RECORD\((\w+)\)", written))
    kernels = sorted({name.removesuffix("GetWorkspaceSize") for name in operators} - set(sizes) - defined)
    needed = set().union(*map(_undefined, libraries))
    plain = {name for name in needed if _PLAIN_C.match(name)} | set(LOOKED_UP)
    plain -= set(kernels) | {f"{name}GetWorkspaceSize" for name in kernels}
    records = {
        f"acl{verb}{name}"
        for verb in ("Create", "Destroy")
        for name in re.findall(r"RECORD\((\w+)\)", written)
    }
    lines = [
        '#include "device.h"',
        "namespace standin { int create_atb_operation(const char*, void**); int destroy_atb_operation(void*);",
        "int create_atb_context(void**); int destroy_atb_context(void*); }",
        "using namespace standin;",
        "#define ACLNN(NAME) int NAME##GetWorkspaceSize(...) { return refuse(#NAME); } \\",
        "    int NAME(void*, uint64_t, void*, void* stream) { return launch(#NAME, stream); }",
        'extern "C" {',
        *(f"ACLNN({name})" for name in kernels),
        *(
            f'int {name}(...) {{ return refuse("{name.removesuffix("GetMaxWorkspaceSize")}"); }}'
            for name in sizes
        ),
        *(
            f'int Atb{name}GetWorkspaceSize(...) {{ return refuse("Atb{name}"); }}\n'
            f'int Atb{name}(void*, uint64_t, void*, void* stream) {{ return launch("Atb{name}", stream); }}'
            for name in _ATB_FUNCTIONS
        ),
        *(f"long {name}() {{ return 0; }}" for name in sorted(plain - defined - records)),
    ]
    for symbol in sorted(name for name in needed if name.startswith("_ZN3atb")):
        if kind := re.search(r"CreateOperation.*?infer\d+([A-Za-z]+)Param", symbol):
            body = f'const void*, void** made) {{ return create_atb_operation("atb::{kind[1]}", made); }}'
        elif "CreateContext" in symbol:
            body = "void** made) { return create_atb_context(made); }"
        elif "DestroyContext" in symbol:
            body = "void* made) { return destroy_atb_context(made); }"
        elif "DestroyOperation" in symbol:
            body = "void* made) { return destroy_atb_operation(made); }"
        else:
            body = ") { return 0; }"
        lines.append(f"long {symbol}({body}")
    return "\n".join([*lines, "}", ""])
