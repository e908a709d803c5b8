"""Which calls our Triton kernel serves, what is said of the others, and the shape checks; no Triton needed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from atbx.core.errors import DTypeError, ShapeError, UnsupportedError
from atbx.kernels.ascend.triton import Variant, launch, refuses, register

GOOD = {
    "family": "A2",
    "dtype": torch.bfloat16,
    "heads": 32,
    "kv_heads": 8,
    "head_size": 128,
    "rotary_dim": 128,
    "style": "half",
}


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 4, 8, 32])
def test_the_models_sizes_are_served(size: int, kv_heads: int) -> None:
    call = GOOD | {"head_size": size, "rotary_dim": size, "kv_heads": kv_heads}
    assert refuses(**call) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"family": "310P"}, "targets A2 and A3, not 310P"),
        ({"dtype": torch.float32}, "takes float16 and bfloat16"),
        ({"head_size": 72, "rotary_dim": 72}, "head size 72"),
        ({"head_size": 512}, "head size 512"),
        ({"rotary_dim": 130}, "130 of 128 channels"),
        ({"rotary_dim": 63}, "63 of 128 channels"),
        ({"kv_heads": 5}, "no multiple of 5"),
        ({"style": "thirds"}, "'thirds'"),
        ({"layout": "NZ"}, "'NZ'"),
    ],
)
def test_others_are_refused_by_name(change: dict, said: str) -> None:
    found = refuses(**(GOOD | change))
    assert found is not None
    assert said in found


def test_tiles_of_heads() -> None:
    # 1024 channels a tile: 8 heads of 128, 4 of 256; a head of 80 counts as 128.
    assert Variant(32, 8, 128, 128, "half").items == 4 + 1
    assert Variant(32, 8, 256, 256, "half").items == 8 + 2
    assert Variant(14, 2, 64, 64, "half").items == 1 + 1
    assert Variant(12, 1, 80, 80, "half").items == 2 + 1
    assert Variant(12, 1, 80, 80, "half").group(1) == 1
    # Interleaved pairs: never one head alone, and half the tile where they are short of a power of two.
    assert Variant(8, 1, 128, 128, "interleaved").group(1) == 2
    assert Variant(8, 8, 128, 128, "interleaved").group(8) == 8
    assert Variant(8, 8, 80, 80, "interleaved").group(8) == 4


def _meta(**change: torch.Tensor | None) -> dict:
    tensors = {
        "qkv": torch.empty(3, 4 * 64, dtype=torch.float16, device="meta"),
        "cos": torch.empty(3, 32, device="meta"),
        "sin": torch.empty(3, 32, device="meta"),
        "slots": torch.empty(3, dtype=torch.int32, device="meta"),
        "k_arena": torch.empty(2, 8, 1, 64, dtype=torch.float16, device="meta"),
        "v_arena": torch.empty(2, 8, 1, 64, dtype=torch.float16, device="meta"),
        "q_out": torch.empty(3, 2, 64, dtype=torch.float16, device="meta"),
    }
    return tensors | change


SIZES = {"heads": 2, "kv_heads": 1, "head_size": 64, "rotary_dim": 64}


def test_the_operator_writes_its_arenas_and_runs_on_meta() -> None:
    operator = register()
    assert register() is operator
    written = [
        a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    assert written == ["k_arena", "v_arena", "q_out"]
    assert operator(**_meta(), **SIZES) is None


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"cos": torch.empty(3, 32, dtype=torch.float16, device="meta")}, DTypeError, "cos"),
        ({"sin": torch.empty(3, 16, device="meta")}, ShapeError, "sin"),
        ({"slots": torch.empty(3, dtype=torch.int16, device="meta")}, DTypeError, "slots"),
        ({"slots": torch.empty(4, dtype=torch.int32, device="meta")}, ShapeError, "slots"),
        ({"v_arena": torch.empty(2, 8, 1, 64, device="meta")}, DTypeError, "v_arena"),
        ({"v_arena": torch.empty(2, 8, 2, 64, dtype=torch.float16, device="meta")[:, :, :1]}, ShapeError, "v_arena"),
        ({"q_out": torch.empty(3, 2, 32, dtype=torch.float16, device="meta")}, ShapeError, "q_out"),
        ({"q_norm": torch.empty(32, dtype=torch.float16, device="meta")}, ShapeError, "q_norm"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        register()(**_meta(**change), **SIZES)


def test_without_triton_the_package_imports_and_a_launch_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import atbx.kernels.ascend.triton as room\n"
        "from atbx.core.errors import UnsupportedError\n"
        "try:\n    room.load_kernel()\n"
        "except UnsupportedError as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "triton-ascend" in ran.stdout
    assert "atbx[triton]" in ran.stdout


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed here")
def test_a_launch_without_triton_is_refused() -> None:
    tensors = {name: torch.zeros_like(value, device="cpu") for name, value in _meta().items()}
    with pytest.raises(UnsupportedError, match="triton-ascend"):
        launch(**tensors, **SIZES)
