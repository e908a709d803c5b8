"""Makes the schema data files from torch_npu wheels, without importing torch_npu.

    python -m atbx.kernels.ascend.schemas.extract 2.13.0 ./torch_npu-2.9.0-cp311-...-aarch64.whl

A version is downloaded with pip (aarch64 first: its libraries hold every registration string whole, on x86-64 some
are split), a file is read as it is; several wheels of one version add up. `--check` writes nothing and says how the
wheels differ from the data files. A release whose operators are those of a data file gets no file of its own but a
line in `same_operators.json`: the operators follow the op-plugin release, which several torch versions share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atbx.core.errors import AtbxError
from atbx.kernels.ascend.schemas.graph_handlers import graph_updates
from atbx.kernels.ascend.schemas.registrations import (
    LIBRARIES,
    listed_names,
    meta_functions,
    python_definitions,
    registration_strings,
    unread,
)

DATA_FOLDER = Path(__file__).parent
SAME_OPERATORS = "same_operators.json"
_PLATFORMS = (
    "manylinux_2_28_aarch64",
    "manylinux2014_aarch64",
    "manylinux_2_28_x86_64",
    "manylinux2014_x86_64",
)


@dataclass(frozen=True)
class WheelSchemas:
    """What one wheel says: `operators` as in the data file, `listed` the names that it announces."""

    version: str
    file: str
    sha256: str
    operators: dict[str, dict[str, Any]]
    listed: frozenset[str]
    graph_updates: dict[str, dict[str, Any]]


def read_wheel(path: Path) -> WheelSchemas:
    """Read a torch_npu wheel file.

    Raises AtbxError, naming the file, if it is not a whole zip archive, not a torch_npu wheel, or holds no schema.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            version = _version(path, archive, names)
            files = {name: archive.read(name) for name in names if name.endswith((".py", ".yaml"))}
            libraries = {space: _library(path, archive, file) for space, file in LIBRARIES.items()}
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise AtbxError(
            "the wheel cannot be read: it is damaged or only partly downloaded",
            where=str(path),
            expected="a whole zip archive",
            found=str(error) or type(error).__name__,
            hint="Download it again",
        ) from error
    except OSError as error:
        raise AtbxError(
            "the wheel cannot be opened",
            where=str(path),
            expected="a torch_npu wheel file or a version such as 2.13.0",
            found=error.strerror,
        ) from error

    operators: dict[str, dict[str, Any]] = {}
    for space, data in libraries.items():
        strings = registration_strings(data, space)
        if not strings:
            raise AtbxError(
                f"{LIBRARIES[space]} holds no registration string of {space}::",
                where=str(path),
                expected="strings such as 'npu_rms_norm(Tensor input, ...) -> (Tensor, Tensor)'",
                found=f"none in {len(data)} bytes",
            )
        operators.update(
            {name: {"schema": text, "evidence": "wheel string"} for name, text in strings.items()}
        )
    for name, text in python_definitions(files).items():
        operators.setdefault(name, {"schema": text, "evidence": "wheel python"})
    listed = listed_names(files)
    # On x86-64 the rest of another constant may stand right before a name: only announced names are names.
    operators = {
        name: entry
        for name, entry in operators.items()
        if name.startswith("npu::") or name.split(".")[0] in listed
    }
    with_meta = meta_functions(files)
    for name, entry in operators.items():
        entry["meta"] = name in with_meta
    return WheelSchemas(
        version=version,
        file=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        operators=operators,
        listed=frozenset(listed),
        graph_updates=graph_updates(files),
    )


def _version(path: Path, archive: zipfile.ZipFile, names: list[str]) -> str:
    """The version in the wheel's metadata, without a local part."""
    metadata = [name for name in names if name.endswith(".dist-info/METADATA")]
    text = archive.read(metadata[0]).decode() if metadata else ""
    fields = dict(line.split(": ", 1) for line in text.split("\n\n")[0].splitlines() if ": " in line)
    name = fields.get("Name", "no wheel metadata").replace("-", "_")
    if name != "torch_npu":
        raise AtbxError(
            "not a torch_npu wheel", where=str(path), expected="the package torch_npu", found=name
        )
    if "Version" not in fields:
        raise AtbxError("the wheel states no version", where=str(path), expected="Version: in its METADATA")
    return fields["Version"].split("+")[0]


def _library(path: Path, archive: zipfile.ZipFile, file: str) -> bytes:
    try:
        return archive.read(file)
    except KeyError as error:
        raise AtbxError(
            "the wheel lacks a library", where=str(path), expected=file, found="no such file"
        ) from error


def download(version: str, folder: Path) -> Path:
    """Fetch the wheel of a torch_npu version into `folder` with pip; AtbxError with pip's words if it cannot."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--implementation=cp", "--python-version=3.11"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    command += ["--dest", str(folder), f"torch_npu=={version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise AtbxError(
            "pip did not bring the wheel",
            where=f"torch_npu=={version}",
            expected="a wheel for CPython 3.11 on Linux",
            found=(result.stderr.strip().splitlines() or ["no output"])[-1],
        )
    return wheels[0]


def data_file(wheels: list[WheelSchemas]) -> dict[str, Any]:
    """The content of a data file from the wheels of one version; operators that the wheels dispute are refused."""
    operators: dict[str, dict[str, Any]] = {}
    for wheel in wheels:
        for name, entry in wheel.operators.items():
            known = operators.setdefault(name, entry)
            if known != entry:
                raise AtbxError(
                    f"the wheels of {wheel.version} disagree on {name}",
                    where=wheel.file,
                    expected=known["schema"],
                    found=entry["schema"],
                )
    listed = frozenset().union(*(wheel.listed for wheel in wheels))
    return {
        "version": wheels[0].version,
        "wheels": {wheel.file: wheel.sha256 for wheel in wheels},
        "graph_updates": wheels[0].graph_updates,
        "operators": operators,
        "unread": unread(listed, operators),
    }


def as_text(data: dict[str, Any]) -> str:
    """The data file's text: keys sorted, one operator a line, so that two versions compare with a plain diff."""
    lines = []
    for key in sorted(data):
        value = data[key]
        if isinstance(value, dict) and value:
            entries = ",\n".join(
                f"  {json.dumps(name)}: {json.dumps(value[name], sort_keys=True)}" for name in sorted(value)
            )
            lines.append(f" {json.dumps(key)}: {{\n{entries}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str] | None = None) -> int:
    """The command; exit code 1 if `--check` found a difference, 2 if a wheel could not be read."""
    parser = argparse.ArgumentParser(
        prog="python -m atbx.kernels.ascend.schemas.extract", description=__doc__
    )
    parser.add_argument("sources", nargs="+", metavar="WHEEL_OR_VERSION")
    parser.add_argument("--out", type=Path, default=DATA_FOLDER, help="folder of the data files")
    parser.add_argument("--check", action="store_true", help="compare with the data files, write nothing")
    options = parser.parse_args(arguments)
    try:
        versions: dict[str, list[WheelSchemas]] = {}
        for source in options.sources:
            with tempfile.TemporaryDirectory() as folder:
                is_file = source.endswith(".whl") or Path(source).is_file()
                wheel = read_wheel(Path(source) if is_file else download(source, Path(folder)))
            versions.setdefault(wheel.version, []).append(wheel)
        contents = [data_file(wheels) for wheels in versions.values()]
    except AtbxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differing = [_report(data, options.out, options.check) for data in contents]
    return int(any(differing))


def _report(data: dict[str, Any], folder: Path, check: bool) -> bool:
    """Write or compare one release, with a line on what it holds; True if a comparison failed."""
    version = data["version"]
    counts = {space: sum(name.startswith(f"{space}::") for name in data["operators"]) for space in LIBRARIES}
    held = ", ".join(f"{count} of {space}::" for space, count in counts.items())
    print(f"torch_npu {version}: {held}; {len(data['unread'])} listed but not readable", *data["unread"][:8])
    return _compare(data, folder) if check else _write(data, folder)


def _write(data: dict[str, Any], folder: Path) -> bool:
    """A data file, or a line in `same_operators.json` if another release's data file says the same."""
    version, own = data["version"], folder / f"torch_npu-{data['version']}.json"
    known = folder / SAME_OPERATORS
    same = json.loads(known.read_text()) if known.exists() else {}
    for path in sorted(folder.glob("torch_npu-*.json")):
        stored = json.loads(path.read_text())
        if not own.exists() and all(stored[key] == data[key] for key in ("operators", "graph_updates")):
            print(f"  same operators as {stored['version']}")
            same[version] = stored["version"]
            known.write_text(json.dumps(same, indent=1, sort_keys=True) + "\n")
            return False
    own.write_text(as_text(data))
    return False


def _compare(data: dict[str, Any], folder: Path) -> bool:
    """Print each operator on which the stored data and the wheel differ; True if there is one.

    A wheel for x86-64 reads fewer operators: those that it lists without their text are no difference.
    """
    known = folder / SAME_OPERATORS
    same = json.loads(known.read_text()) if known.exists() else {}
    path = folder / f"torch_npu-{same.get(data['version'], data['version'])}.json"
    if not path.exists():
        print(f"  {path.name} does not exist")
        return True
    stored = json.loads(path.read_text())
    excused = {name.split(".")[0] for name in data["unread"]}
    names = sorted({*stored["operators"], *data["operators"]})
    differing = [name for name in names if stored["operators"].get(name) != data["operators"].get(name)]
    differing = [name for name in differing if name in data["operators"] or name.split(".")[0] not in excused]
    for name in differing:
        print(f"  {name}: stored {stored['operators'].get(name)}, wheel {data['operators'].get(name)}")
    if stored["graph_updates"] != data["graph_updates"]:
        print(f"  graph updates: stored {stored['graph_updates']}, wheel {data['graph_updates']}")
    return bool(differing) or stored["graph_updates"] != data["graph_updates"]


if __name__ == "__main__":
    sys.exit(main())
