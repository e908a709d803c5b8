"""What is installed, read from files: nothing is imported and nothing is run.

Everything comes from a root folder, an environment and a lookup of installed packages, so the same code examines this
machine, a container image unpacked somewhere, or a tree that a test made up. Paths of the environment are taken below
the root. File formats: install infos and version files as CANN, its driver and NNAL write them.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from atbx.doctor.versions import Version, parsed

ASCEND = "usr/local/Ascend"
NEEDED_LIBRARIES = (
    *("libhccl.so", "libascendcl.so", "libacl_op_compiler.so"),
    *("libge_runner.so", "libgraph.so"),
)
"""What libtorch_npu.so is linked to."""

CONTROL_DEVICES = ("davinci_manager", "devmm_svm", "hisi_hdc")
"""Device files that every process on an NPU opens, beside /dev/davinciN."""

KERNEL_FOLDERS = {"A2": "ascend910b", "A3": "ascend910_93", "310P": "ascend310p", "910A": "ascend910"}
"""Folder of a chip family's compiled kernels in the operator package."""

PCI_FAMILIES = {"0xd801": "910A", "0xd802": "A2", "0xd803": "A3", "0xd500": "310P"}
"""PCI devices of vendor 0x19e5."""

_TOOLKITS = ("ascend-toolkit/latest", "cann", "latest")
_FEW_KERNELS = 5
"""A folder with fewer operators is what the toolkit itself brings (ops_oam), not the operator package."""


@dataclass(frozen=True)
class Component:
    """Something installed: its folder, its version (None: no file tells), and the file that tells it.

    facts: all `key=value` lines of that file, keys in lower case.
    """

    path: Path
    version: Version | None
    source: Path | None
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Installation:
    """What was found below a root.

    environ:      None where it is not known (another root than this machine's).
    packages:     version of an installed Python package, or None.
    kernels:      the operator package; kernel_chips: families that it holds kernels for.
    abis:         C++ ABIs that NNAL is installed for. torch_abi: the one of torch, None where no file tells.
    devices:      numbers of /dev/davinciN. missing_controls: of `CONTROL_DEVICES`.
    families:     chip families on the PCI bus.
    """

    root: Path
    environ: Mapping[str, str] | None
    packages: Callable[[str], str | None]
    python: Version
    arch: str
    toolkit: Component | None
    kernels: Component | None
    kernel_chips: tuple[str, ...]
    nnal: Component | None
    abis: tuple[int, ...]
    driver: Component | None
    firmware: Component | None
    devices: tuple[int, ...]
    missing_controls: tuple[str, ...]
    families: tuple[str, ...]
    torch_abi: int | None
    is_torch_for_cuda: bool
    has_nvidia: bool
    is_container: bool
    npu_smi: Path | None

    def package(self, name: str) -> Version | None:
        """Version of a Python package, from its metadata."""
        return parsed(self.packages(name))

    def below(self, path: str) -> Path:
        """A path of the examined machine, below the root."""
        return self.root / path.lstrip("/")

    def shown(self, path: Path) -> str:
        """A path as the examined machine has it."""
        try:
            return "/" + str(path.relative_to(self.root)).removeprefix(".")
        except ValueError:
            return str(path)

    def folders_searched(self) -> Iterator[Path]:
        """Where the loader looks for libraries."""
        for part in (self.environ or {}).get("LD_LIBRARY_PATH", "").split(os.pathsep):
            if part:
                yield self.below(part)
        for conf in sorted(self.below("etc/ld.so.conf.d").glob("*.conf")):
            for line in _lines(conf):
                if line.startswith("/"):
                    yield self.below(line)
        for name in ("lib", "lib64", "usr/lib", "usr/lib64", f"usr/lib/{self.arch}-linux-gnu"):
            yield self.below(name)

    def library(self, name: str) -> Path | None:
        """Where the loader finds a library, or None."""
        return next((f / name for f in self.folders_searched() if exists(f / name)), None)


def exists(path: Path) -> bool:
    """Whether something is there; a folder that this user may not enter, or a name too long, counts as nothing."""
    return os.path.exists(path)


def is_folder(path: Path) -> bool:
    """Whether a folder is there, likewise."""
    return os.path.isdir(path)


def read(
    root: str | Path = "/",
    environ: Mapping[str, str] | None = None,
    packages: Callable[[str], str | None] | None = None,
    *,
    python: str | None = None,
    torch_folder: Path | None = None,
) -> Installation:
    """Read an installation.

    environ: None is not known. packages: None looks in this Python's own metadata. python: as 3.11; None is this one's.
    torch_folder: the package torch; None looks for it where `packages` does.
    """
    base = Path(root)
    env = environ or {}
    arch = platform.machine()
    toolkit = _toolkit(base, env)
    own_opp = toolkit.path / "opp" if toolkit is not None else None
    opp = _first(_of_env(base, env, "ASCEND_OPP_PATH"), own_opp)
    nnal, abis = _nnal(base, env)
    torch_folder = (
        torch_folder if torch_folder is not None else (_torch_folder() if packages is None else None)
    )
    smi = (base / name for name in ("usr/local/bin/npu-smi", "usr/local/sbin/npu-smi", "usr/bin/npu-smi"))
    device_folder = base / "dev"
    return Installation(
        root=base,
        environ=environ,
        packages=packages or _own_package,
        python=parsed(python) or parsed(f"{sys.version_info[0]}.{sys.version_info[1]}"),  # type: ignore[arg-type]
        arch=_arch_of(toolkit) or arch,
        toolkit=toolkit,
        kernels=_kernels(toolkit, opp),
        kernel_chips=_kernel_chips(opp),
        nnal=nnal,
        abis=abis,
        driver=_info(base / ASCEND / "driver", "version.info", ("package_version", "version")),
        firmware=_info(base / ASCEND / "firmware", "version.info", ("version",)),
        devices=tuple(
            sorted(int(p.name[7:]) for p in device_folder.glob("davinci[0-9]*") if p.name[7:].isdigit())
        ),
        missing_controls=tuple(name for name in CONTROL_DEVICES if not exists(device_folder / name)),
        families=_families(base),
        torch_abi=_torch_abi(torch_folder, parsed((packages or _own_package)("torch"))),
        is_torch_for_cuda=_is_for_cuda(torch_folder, (packages or _own_package)("torch")),
        has_nvidia=any(exists(device_folder / n) for n in ("nvidiactl", "nvidia0")),
        is_container=any(exists(base / n) for n in (".dockerenv", "run/.containerenv")),
        npu_smi=next((path for path in smi if exists(path)), None),
    )


def packages_below(root: Path) -> tuple[Callable[[str], str | None], Path | None, str | None]:
    """Packages installed below another root: the lookup, the folder of torch, and the Python version."""
    patterns = (
        "usr/lib/python3*",
        "usr/local/lib/python3*",
        "usr/local/python3*/lib/python3*",
        "opt/*/lib/python3*",
    )
    folders = [
        site
        for pattern in patterns
        for python in sorted(root.glob(pattern))
        for site in (python / "site-packages", python / "dist-packages")
        if is_folder(site)
    ]
    found = {
        _plain(d.metadata["Name"]): d.version
        for d in metadata.distributions(path=[str(f) for f in folders])
        if d.metadata["Name"]
    }
    torch = next((f / "torch" for f in folders if is_folder(f / "torch")), None)
    numbers = [re.fullmatch(r"python(3\.\d+)", f.parent.name) for f in folders]
    python = next((n[1] for n in numbers if n), None)
    return lambda name: found.get(_plain(name)), torch, python


def environment_below(root: Path) -> dict[str, str] | None:
    """The environment that /etc/environment of another root sets; None where it has none."""
    path = root / "etc/environment"
    if not exists(path):
        return None
    pairs = (line.removeprefix("export ").partition("=") for line in _lines(path) if "=" in line)
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _own_package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _facts(path: Path) -> dict[str, str]:
    """`key=value` or `key : value` lines of an info file."""
    found = (re.match(r"([\w -]+?)\s*[=:]\s*(.*)", line) for line in _lines(path))
    return {m[1].strip().lower(): m[2].strip().strip('"') for m in found if m}


def _info(folder: Path, name: str, keys: tuple[str, ...]) -> Component | None:
    """A folder with its version file; None where the folder does not exist."""
    if not is_folder(folder):
        return None
    path = folder / name
    facts = _facts(path)
    version = next((v for v in (parsed(facts.get(key)) for key in keys) if v is not None), None)
    return Component(folder, version, path if facts else None, facts)


def _of_env(base: Path, env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name)
    return base / value.lstrip("/") if value and is_folder(base / value.lstrip("/")) else None


def _first(*paths: Path | None) -> Path | None:
    return next((p for p in paths if p is not None and is_folder(p)), None)


def _toolkit(base: Path, env: Mapping[str, str]) -> Component | None:
    """The toolkit that the environment names, else one at the usual places; the newest of several."""
    ascend = base / ASCEND
    usual = [ascend / name for name in _TOOLKITS]
    versioned = [p for p in (*ascend.glob("cann-*"), *ascend.glob("ascend-toolkit/[0-9]*")) if is_folder(p)]
    numbered = [(v, p) for p in versioned if (v := parsed(p.name.removeprefix("cann-"))) is not None]
    homes = [h / "Ascend" for h in (base / "root", *base.glob("home/*"))]
    candidates = [
        _of_env(base, env, "ASCEND_HOME_PATH"),
        _of_env(base, env, "ASCEND_TOOLKIT_HOME"),
        *usual,
        *(p for _, p in sorted(numbered, key=lambda pair: pair[0], reverse=True)),
        *(home / name for home in homes for name in _TOOLKITS),
    ]
    folder = _first(*candidates)
    if folder is None:
        return None
    infos = sorted(folder.glob("*-linux/ascend_toolkit_install.info"))
    for path, keys in (
        *((info, ("version",)) for info in infos),
        (folder / "version.cfg", ("toolkit_running_version", "version")),
        *((p, ("version_dir",)) for p in sorted(folder.glob("*/version.info"))),
    ):
        facts = _facts(path)
        for key in keys:
            # version.cfg writes [7.7.0.1.238:8.1.RC1]: the second is the one that names the release.
            version = parsed(facts.get(key, "").strip("[]").split(":")[-1])
            if version is not None:
                return Component(folder, version, path, facts)
    return Component(folder, None, None)


def _arch_of(toolkit: Component | None) -> str | None:
    found = sorted(toolkit.path.glob("*-linux")) if toolkit is not None else []
    return found[0].name.removesuffix("-linux") if found else None


def _kernels(toolkit: Component | None, opp: Path | None) -> Component | None:
    """The operator package, where a file of its own tells its version."""
    if toolkit is None:
        return None
    names = ("*-linux/ascend_ops_install.info", "*-linux/ascend_*kernels*_install.info")
    for path in (p for name in names for p in sorted(toolkit.path.glob(name))):
        facts = _facts(path)
        return Component(opp or toolkit.path, parsed(facts.get("version")), path, facts)
    for path in (toolkit.path / "opp_kernel/version.info", toolkit.path / "opp/version.info"):
        facts = _facts(path)
        if facts:
            return Component(opp or toolkit.path, parsed(facts.get("version_dir")), path, facts)
    return None


def _kernel_chips(opp: Path | None) -> tuple[str, ...]:
    if opp is None:
        return ()
    kernels = opp / "built-in/op_impl/ai_core/tbe/kernel"
    found = []
    for family, name in KERNEL_FOLDERS.items():
        folder = kernels / name
        if len([p for p in folder.glob("*") if p.name != "ops_oam"]) >= _FEW_KERNELS:
            found.append(family)
    return tuple(found)


def _nnal(base: Path, env: Mapping[str, str]) -> tuple[Component | None, tuple[int, ...]]:
    """NNAL's ATB: the folder that holds cxx_abi_0 and cxx_abi_1, its version, and the ABIs with a library."""
    named = _of_env(base, env, "ATB_HOME_PATH")
    homes = [named.parent if named is not None else None, base / ASCEND / "nnal/atb/latest/atb"]
    homes += sorted((base / ASCEND / "nnal/atb").glob("[0-9]*/atb"), reverse=True)
    folder = _first(*homes)
    if folder is None:
        return None, ()
    abis = tuple(n for n in (0, 1) if exists(folder / f"cxx_abi_{n}/lib/libatb.so"))
    path = folder.parent / "version.info"
    facts = _facts(path)
    keys = ("ascend-cann-atb", "ascend-cann-atb version", "version_dir", "version")
    version = next((v for v in (parsed(facts.get(key)) for key in keys) if v is not None), None)
    return Component(folder, version, path if facts else None, facts), abis


def _families(base: Path) -> tuple[str, ...]:
    """Chip families of Huawei accelerators on the PCI bus."""
    found = set()
    for vendor in base.glob("sys/bus/pci/devices/*/vendor"):
        if _lines(vendor)[:1] == ["0x19e5"]:
            device = _lines(vendor.parent / "device")[:1]
            if device and device[0] in PCI_FAMILIES:
                found.add(PCI_FAMILIES[device[0]])
    return tuple(sorted(found))


def _torch_folder() -> Path | None:
    """The package torch of this Python, without importing it."""
    return next((Path(p) / "torch" for p in sys.path if p and exists(Path(p) / "torch/version.py")), None)


def _torch_abi(folder: Path | None, version: Version | None) -> int | None:
    """The C++ ABI of torch: its CMake file tells it where there are two; from 2.7 on all wheels are built with 1."""
    if folder is not None:
        found = re.search(
            r"_GLIBCXX_USE_CXX11_ABI=(\d)", "\n".join(_lines(folder / "share/cmake/Torch/TorchConfig.cmake"))
        )
        if found:
            return int(found[1])
    return 1 if version is not None and version.series >= (2, 7) else None


def _is_for_cuda(folder: Path | None, version: str | None) -> bool:
    if version is not None and "+cu" in version:
        return True
    if folder is None:
        return False
    return any(re.match(r"cuda\b.*=\s*['\"]\d", line) for line in _lines(folder / "version.py"))
