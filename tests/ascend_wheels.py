"""Small torch_npu wheels for tests: zip files with the parts that the schema reader looks at, written by hand."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

NPU = b"npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"
NPU_OUT = b"npu_rms_norm.out(Tensor input, *, Tensor(a!) out) -> Tensor(a!)"
ATB = b"_npu_reshape_and_cache_siso(Tensor key, Tensor(a!) key_cache, Tensor slot_indices) -> ()"

PARTS: dict[str, bytes] = {
    "torch_npu-9.9.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: torch_npu\nVersion: 9.9.0\n\nText: more\n",
    # Around the schemas: another message with an arrow, a class of the library's own, a string without a name.
    "torch_npu/lib/libtorch_npu.so": b"\0\x7fELF\0".join(
        [
            b"",
            NPU,
            NPU_OUT,
            b"f (%d) -> %s",
            b"wrap(Tensor t, __torch__.torch.classes.c10d.Group g) -> ()",
            b"({int}) -> None",
        ]
    )
    + b"\0",
    "torch_npu/lib/libop_plugin_atb.so": b"\0" + ATB + b"\0",
    "torch_npu/csrc/aten/npu_native_functions.yaml": b"backend: NPU\nsupported:\n  - func: abs(x\ncustom:\n"
    b"  - func: npu_rms_norm(Tensor self\n- func: npu_rms_norm.out(Tensor self\n",
    "torch_npu/op_plugin/atb/_atb_ops.py": b"API_LIST = ['_npu_reshape_and_cache_siso']\n",
    "torch_npu/op_plugin/meta/_meta_registrations.py": b"""
m = Library("npu", "IMPL", "Meta")
cpu = Library("npu", "IMPL", "CPU")
@impl(m, "npu_rms_norm")
def one(x): ...
@impl(cpu, "npu_rms_norm.out")
def two(x): ...
""",
    "torch_npu/npu/graphs.py": b"""
lib = torch.library.Library("npu", "FRAGMENT")
lib.define("scope_begin(str? scope_name=None) -> ()")
@torch.library.register_fake("npu::scope_begin")
def fake(): ...
""",
    "torch_npu/dynamo/later.py": b'lib = Library("npu", "FRAGMENT")\nlib.define("on_demand(int a) -> ()")\n',
}


def write_wheel(path: Path, changed: Mapping[str, bytes | None] | None = None) -> Path:
    """A wheel with `PARTS`, some of them replaced (by None: left out)."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (PARTS | dict(changed or {})).items():
            if content is not None:
                archive.writestr(name, content)
    return path
