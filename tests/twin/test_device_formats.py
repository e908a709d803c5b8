"""Storage formats of the software NPU: NZ changes the bytes; whole tensors read back, parts as the device reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from atbx.testing.software_npu import SoftwareNpu
from atbx.testing.software_npu.views import from_blocks, raw_view, to_blocks

ND, NZ = 2, 29

pytestmark = pytest.mark.usefixtures("npu")


@pytest.fixture
def _internal_formats() -> Iterator[None]:
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


def _weight(rows: int = 40, columns: int = 30, dtype: torch.dtype = torch.half) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns).remainder(97).to(dtype)


def _cast(x: torch.Tensor, form: int) -> torch.Tensor:
    return torch.ops.npu.npu_format_cast(x, form)


def test_a_cast_is_dropped_while_internal_formats_are_off() -> None:
    import torch_npu

    assert torch_npu.get_npu_format(_cast(_weight().npu(), NZ)) == ND


@pytest.mark.usefixtures("_internal_formats")
def test_the_bytes_of_nz_lie_in_blocks() -> None:
    import torch_npu

    weight = _weight(32, 48)
    cast = _cast(weight.npu(), NZ)
    assert torch_npu.get_npu_format(cast) == NZ
    torch.npu.synchronize()
    raw = raw_view(cast).flatten()
    # the first block: rows 0 to 15 of columns 0 to 15; the second block in memory: rows 16 to 31 of the same columns
    assert torch.equal(raw[:256].view(16, 16), weight[:16, :16])
    assert torch.equal(raw[256:512].view(16, 16), weight[16:, :16])
    assert torch.equal(raw[512:768].view(16, 16), weight[:16, 16:32])


@pytest.mark.usefixtures("_internal_formats")
@pytest.mark.parametrize(("rows", "columns"), [(40, 30), (16, 16), (17, 64)])
def test_a_whole_nz_tensor_reads_back(rows: int, columns: int) -> None:
    weight = _weight(rows, columns)
    cast = _cast(weight.npu(), NZ)
    padded = -(-rows // 16) * 16 * -(-columns // 16) * 16
    assert cast.untyped_storage().nbytes() == 2 * padded
    assert torch.equal(cast.cpu(), weight)
    assert torch.equal(_cast(cast, ND).cpu(), weight)


@pytest.mark.usefixtures("_internal_formats")
def test_a_matmul_takes_an_nz_weight_by_its_own_kernel(npu: SoftwareNpu) -> None:
    weight, x = _weight(), torch.ones(5, 40).half()
    cast = _cast(weight.npu(), NZ)
    npu.reset()
    y = x.npu() @ cast
    assert torch.equal(y.cpu(), x @ weight)
    assert torch.equal(torch.nn.functional.linear(torch.ones(2, 30).half().npu(), cast).cpu(),
                       torch.nn.functional.linear(torch.ones(2, 30).half(), weight))  # fmt: skip
    assert npu.counts().launches["aclnnMatmulWeightNz"] == 2


@pytest.mark.usefixtures("_internal_formats")
def test_a_slice_of_nz_is_not_a_slice_of_the_matrix() -> None:
    weight = _weight(64, 64)
    cast = _cast(weight.npu(), NZ)
    assert not torch.equal((torch.eye(32).half().npu() @ cast[:32]).cpu(), weight[:32])


@pytest.mark.parametrize("dtype", [torch.half, torch.int8])
@pytest.mark.parametrize("shape", [(16, 32), (40, 70), (3, 20, 33)])
def test_blocks_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.arange(torch.Size(shape).numel()).remainder(101).view(shape).to(dtype)
    blocks = to_blocks(x)
    assert blocks.shape[-2:] == (16, 32 if dtype == torch.int8 else 16)
    assert torch.equal(from_blocks(blocks, *shape[-2:]), x)
