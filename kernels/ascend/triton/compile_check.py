# mypy: ignore-errors
"""Every variant through the real compiler, up to where it would call CANN's `hivmc`, and a table of its UB use.

    python -m atbx.kernels.ascend.triton.compile_check [--write docs/ascend-triton.md] [--chip Ascend910B3]

Needs triton-ascend, ascendnpu-ir and pybind11 in an environment of their own; no NPU and no CANN. A block that is too
large for the unified buffer fails in memory planning here as it would on a device.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from atbx.kernels.ascend.triton.launcher import load_kernel
from atbx.kernels.ascend.triton.variants import DTYPES, UB_BYTES, Variant

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_BITS = {"f16": 16, "bf16": 16, "f32": 32, "i8": 8, "i1": 8, "i16": 16, "i32": 32, "i64": 64}
_BUFFER = re.compile(
    r"hivm\.hir\.pointer_cast\(%c(\d+)_i64\w*\) : memref<([\dx]+)x(\w+), #hivm\.address_space<ub>>"
)
_OVERFLOW = re.compile(r"ub overflow[^\n\"]*")


class Refused(Exception):  # noqa: N818  the compiler's word, and what the table prints
    """The compiler refused a variant; the message is its reason."""


def variants() -> Iterator[Variant]:
    """Representatives of all that dispatch can pick: sizes x groups x styles, then partial rotary, norms and pages."""
    for size in (64, 80, 96, 128, 256):
        for style in ("half", "interleaved"):
            for heads, kv_heads in ((32, 32), (32, 8), (32, 4), (8, 1)):
                yield Variant(heads, kv_heads, size, size, style)
            yield Variant(14, 2, size, size // 2, style)
            yield Variant(32, 8, size, size, style, True, True, 1e-6)
            yield Variant(32, 8, size, size // 2, style, True, True, 1e-6)
            yield Variant(32, 8, size, size, style, page=128)


def linalg_of(variant: Variant, dtype: str, slots: str, chip: str) -> str:
    """The variant lowered by Triton for Ascend, as it is handed to the compiler.

    Raises:
        Refused: the lowering failed.
    """
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("npu", chip, 0)
    backend = AscendBackend(target)
    pointers = {"qkv": dtype, "cos": "fp32", "sin": "fp32", "slots": slots}
    pointers |= dict.fromkeys(("k_arena", "v_arena", "q_out", "q_norm", "k_norm"), dtype)
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | {"tokens": "i32"}
    source = ASTSource(load_kernel(), signature, variant.constants())
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"target": target, **options.__dict__, "hash": "check"}
    module = make_ttir(module, metadata, options)
    try:
        return ttir_to_linalg(module, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        raise Refused(f"triton-adapter-opt ended with {error.returncode}") from error


def ub_bytes(hivm: str) -> int:
    """Highest byte of the unified buffer that a planned module uses.

    Raises:
        Refused: a buffer could not be read, or there is none: its memory was not planned.
    """
    ends = [
        int(offset) + math.prod(map(int, shape.split("x"))) * _BITS[kind] // 8
        for offset, shape, kind in _BUFFER.findall(hivm)
    ]
    buffers = [line for line in hivm.splitlines() if "hivm.hir.pointer_cast" in line]
    if not ends or len(ends) != len(buffers):
        raise Refused(f"{len(ends)} of {len(buffers)} planned buffers could be read in the compiler's output")
    return max(ends)


def compile_variant(variant: Variant, dtype: str, slots: str = "i32", chip: str = "Ascend910B3") -> int:
    """Bytes of the unified buffer that the compiler planned for a variant.

    Raises:
        Refused: the compiler stopped before it would have called hivmc.
    """
    found = importlib.util.find_spec("ascendnpuir")
    if found is None or found.origin is None:
        raise Refused("the package ascendnpu-ir is not installed")
    with tempfile.TemporaryDirectory() as folder:
        source, kept = Path(folder, "kernel.mlir"), Path(folder, "kept")
        source.write_text(linalg_of(variant, dtype, slots, chip))
        ran = subprocess.run(
            [
                str(Path(found.origin).parent / "bin" / "bishengir-compile"),
                str(source),
                f"--target={chip}",
                "--enable-auto-multi-buffer=true",
                "--enable-auto-bind-sub-block=true",
                "--enable-hfusion-compile=true",
                "--enable-hivm-compile=true",
                "--enable-triton-kernel-compile=true",
                f"--save-temps={kept}",
                "-o",
                str(Path(folder, "kernel")),
            ],
            capture_output=True,
            text=True,
        )
        said = ran.stdout + ran.stderr
        planned = kept / "module.hivm.opt.mlir"
        overflow = _OVERFLOW.search(said)
        if overflow or not planned.is_file() or (ran.returncode and "hivmc" not in said):
            raise Refused(overflow.group(0) if overflow else " ".join(said.split())[-300:])
        return ub_bytes(planned.read_text())


def table(chip: str) -> tuple[list[str], int]:
    """Rows of Markdown, and how many variants were refused."""
    rows = [
        "| heads | KV heads | head size | turning | style | norms | block | tiles | UB, FP16 | UB, BF16 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    refused = 0
    for one in variants():
        cells = []
        for dtype in DTYPES.values():
            try:
                used = compile_variant(one, dtype, chip=chip)
                cells.append(f"{used:,} ({100 * used / UB_BYTES:.0f}%)")
            except Refused as reason:
                refused += 1
                cells.append(f"refused: {reason}")
        tiles = f"{one.group(one.heads)}, {one.group(one.kv_heads)}"
        norms, block = "yes" if one.is_q_normed else "no", one.page or "-"
        rows.append(
            f"| {one.heads} | {one.kv_heads} | {one.head_size} | {one.rotary_dim} | {one.style} | {norms} | "
            f"{block} | {tiles} | {' | '.join(cells)} |"
        )
    return rows, refused


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or put it into a document between its markers; 1 if a variant was refused."""
    parser = argparse.ArgumentParser(description="Compile every variant of our Triton kernel for Ascend.")
    parser.add_argument("--write", type=Path, help="a document with the table's two markers")
    parser.add_argument("--chip", default="Ascend910B3")
    options = parser.parse_args(arguments)
    rows, refused = table(options.chip)
    text = "\n".join(rows)
    if options.write is None:
        print(text)
    else:
        before, _, rest = options.write.read_text().partition(BEGIN)
        _, found, after = rest.partition(END)
        if not found:
            parser.error(f"{options.write} has no {BEGIN} ... {END}")
        options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
