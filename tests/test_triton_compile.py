"""Our Triton kernel through the real compiler for Ascend, up to where it would call CANN's hivmc.

Needs triton-ascend, ascendnpu-ir and pybind11 in an environment of their own.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from atbx.kernels.ascend.triton.variants import UB_BYTES, Variant

if (
    importlib.util.find_spec("ascendnpuir") is None
    or importlib.util.find_spec("triton.backends.ascend") is None
):
    pytest.skip("triton-ascend and ascendnpu-ir are not installed", allow_module_level=True)
from atbx.kernels.ascend.triton.compile_check import Refused, compile_variant, ub_bytes, variants

DOCUMENT = Path(__file__).parents[1] / "docs" / "ascend-triton.md"


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("this process interprets Triton; run this file by itself")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "variant",
    [
        Variant(32, 8, 128, 128, "half"),
        Variant(14, 2, 64, 32, "interleaved", page=128),
        Variant(32, 8, 256, 128, "half", True, True, 1e-6),
        Variant(8, 1, 80, 80, "interleaved"),
    ],
)
def test_compiles_within_the_unified_buffer(variant: Variant, dtype: str) -> None:
    assert 0 < compile_variant(variant, dtype) < UB_BYTES


def test_slots_of_64_bits_compile() -> None:
    assert 0 < compile_variant(Variant(32, 8, 128, 128, "half"), "fp16", slots="i64") < UB_BYTES


def test_a_tile_too_large_is_refused_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atbx.kernels.ascend.triton.variants._TILE", 32768)
    with pytest.raises(Refused, match="ub overflow"):
        compile_variant(Variant(128, 128, 256, 256, "half", True, True, 1e-6), "fp16")


def test_the_document_lists_every_variant_and_none_refused() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|") and "%)" in line]
    assert len(rows) == len(list(variants()))
    assert "refused:" not in DOCUMENT.read_text()


def test_interleaved_pairs_of_one_head_alone_crash_the_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    # Why `Variant.group` never makes such a tile; when this passes the compiler, it may.
    one = Variant(8, 1, 128, 128, "interleaved")
    monkeypatch.setattr(Variant, "group", lambda self, heads: min(heads, 8))
    with pytest.raises(Refused, match="triton-adapter-opt ended with"):
        compile_variant(one, "fp16")


def test_use_is_the_end_of_the_highest_buffer() -> None:
    line = "%0 = hivm.hir.pointer_cast(%c512_i64) : memref<8x64xf16, #hivm.address_space<ub>>\n"
    other = "%1 = hivm.hir.pointer_cast(%c0_i64) : memref<64xf32, #hivm.address_space<ub>>\n"
    assert ub_bytes(line + other) == 512 + 8 * 64 * 2
    with pytest.raises(Refused, match="0 of 0"):
        ub_bytes("module {}")
    with pytest.raises(Refused, match="1 of 2"):
        ub_bytes(line + "%1 = hivm.hir.pointer_cast(%x) : memref<?xf32>\n")
