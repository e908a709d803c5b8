"""Plain torch operators on the software NPU give what they give on a CPU: values, views, in-place, out=, indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("npu")


def _input() -> torch.Tensor:
    return torch.linspace(-3, 4, 24).view(2, 3, 4)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    x.add_(1).mul_(2)
    x[:, 1].sub_(5)
    x.t_() if x.dim() == 2 else x.transpose_(0, 1)
    return x


def _out(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    torch.add(x, x, out=made)
    torch.mul(x[0], 3, out=made[1])
    return made


def _slices(x: torch.Tensor) -> torch.Tensor:
    x[0, :, 1:3] = 9
    x[1, ::2] = x[0, ::2] * 2
    return x


def _index_put(x: torch.Tensor) -> torch.Tensor:
    x[torch.tensor([1, 0], device=x.device), torch.tensor([2, 2], device=x.device)] = 7
    x.index_put_((torch.tensor([0], device=x.device),), torch.ones(3, 4, device=x.device), accumulate=True)
    return x


def _index_copy(x: torch.Tensor) -> torch.Tensor:
    return x.index_copy(1, torch.tensor([2, 0], device=x.device), torch.zeros(2, 2, 4, device=x.device))


def _scatter(x: torch.Tensor) -> torch.Tensor:
    index = torch.tensor([[[0, 1, 2, 3]], [[3, 2, 1, 0]]], device=x.device)
    return x.scatter(1, index.clamp(max=2), 5.0)


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add_scalar": lambda x: x + 1,
    "mul_by_int_keeps_dtype": lambda x: x.half() * 2,
    "int_times_float": lambda x: x.int() * 1.5,
    "number_minus_tensor": lambda x: 3 - x,
    "zero_dim": lambda x: x.sum() * 2.5,
    "to_float16": lambda x: x.to(torch.float16),
    "to_bfloat16": lambda x: x.to(torch.bfloat16),
    "to_int": lambda x: x.to(torch.int64),
    "transpose_contiguous": lambda x: x.transpose(0, 2).contiguous(),
    "strided_clone": lambda x: x[:, ::2, 1:].clone(),
    "strided_copy": lambda x: torch.zeros(4, 3, 2, device=x.device).copy_(x.transpose(0, 2)),
    "copy_into_strided": lambda x: torch.zeros(2, 6, 4, device=x.device)[:, ::2].copy_(x).clone(),
    "in_place": _in_place,
    "out": _out,
    "slices": _slices,
    "index_put": _index_put,
    "index_copy": _index_copy,
    "scatter": _scatter,
    "gather": lambda x: x.gather(2, torch.tensor([[[0], [1], [2]], [[3], [2], [1]]], device=x.device)),
    "index_select": lambda x: x.index_select(2, torch.tensor([3, 0], device=x.device)),
    "fancy_index": lambda x: x[:, torch.tensor([2, 0, 1], device=x.device)],
    "bool_index": lambda x: x[x > 0],
    "masked_fill": lambda x: x.masked_fill(x < 0, float("-inf")),
    "where_scalar": lambda x: torch.where(x > 0, x, 0.0),
    "nonzero": lambda x: (x > 1).nonzero(),
    "cat": lambda x: torch.cat([x, x * 2], dim=1),
    "stack": lambda x: torch.stack([x, -x]),
    "split": lambda x: torch.cat([part * i for i, part in enumerate(x.split(2, dim=2))]),
    "expand": lambda x: x[:1].expand(5, 3, 4) + 1,
    "repeat": lambda x: x.repeat(2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax_half": lambda x: torch.log_softmax(x.half(), -1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(-1),
    "argmax": lambda x: x.argmax(-1),
    "max_dim": lambda x: x.max(-1).values,
    "topk": lambda x: x.topk(2).indices,
    "sort": lambda x: x.sort(descending=True).values,
    "cumsum": lambda x: x.cumsum(1),
    "matmul": lambda x: x @ x.transpose(1, 2),
    "linear": lambda x: torch.nn.functional.linear(
        x, torch.ones(5, 4, device=x.device), torch.ones(5, device=x.device)
    ),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([1, 0], device=x.device), x[0]),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "silu": lambda x: torch.nn.functional.silu(x),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "pow": lambda x: x.pow(2),
    "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "arange": lambda x: torch.arange(3, 20, 4, device=x.device),
    "full": lambda x: torch.full((2, 3), 7.5, device=x.device),
    "eye": lambda x: torch.eye(3, device=x.device),
    "zeros_like": lambda x: torch.zeros_like(x),
    "tril": lambda x: torch.tril(torch.ones(4, 4, device=x.device)),
    "linspace": lambda x: torch.linspace(0, 1, 5, device=x.device),
    "one_hot": lambda x: torch.nn.functional.one_hot(torch.tensor([0, 2], device=x.device), 4),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "unique": lambda x: (x > 0).long().unique(),
    "isin": lambda x: torch.isin(x.long(), torch.tensor([1, 2], device=x.device)),
    "tensor_from_list": lambda x: torch.tensor([[1, 2], [3, 4]], device=x.device),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(1),
    "addmm": lambda x: torch.addmm(torch.ones(3, device=x.device), x[0], x[1].t()),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(2, 3, 3, device=x.device), x, x.transpose(1, 2), alpha=0.5),
    "div_rounding": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "remainder": lambda x: x % 2,
    "clamp": lambda x: x.clamp(-1, 1),
    "any_all": lambda x: torch.stack([(x > 3).any(), (x > -9).all()]),
    "cos_sin": lambda x: torch.cat([x.cos(), x.sin()], -1),
    "view_dtype": lambda x: x.view(torch.int32),
    "scalar_tensor": lambda x: torch.tensor(3.0, device=x.device) + x,
    "cpu_scalar": lambda x: x * torch.tensor(2.0),
    "squeeze": lambda x: x[:, :1].squeeze(1).unsqueeze(-1),
    "fill_diagonal": lambda x: torch.zeros(3, 3, device=x.device).fill_diagonal_(2),
    "multinomial_of_certain": lambda x: torch.multinomial(torch.tensor([0.0, 1.0, 0.0], device=x.device), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_what_it_gives_on_a_cpu(name: str) -> None:
    expected = CASES[name](_input())
    found = CASES[name](_input().to("npu"))
    assert found.device.type == "npu"
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def test_item_equal_and_tolist_read_the_device() -> None:
    x = torch.arange(4.0, device="npu")
    x.add_(1)
    assert x[2].item() == 3.0
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert bool((x > 0).all())
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)


def test_random_numbers_follow_the_seed_of_the_device() -> None:
    torch.npu.manual_seed(5)
    first, second = torch.randn(8, device="npu"), torch.randn(8, device="npu")
    torch.npu.manual_seed(5)
    again = torch.randn(8, device="npu")
    assert torch.equal(first.cpu(), again.cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    assert float(first.cpu().abs().max()) < 6


def test_autograd_runs_in_threads_of_its_own() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], device="npu", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.cpu().tolist() == [2.0, 4.0, 6.0]


def test_an_operator_without_a_rule_names_its_kernel() -> None:
    x = torch.ones(2, 4, 4, dtype=torch.half, device="npu")
    with pytest.raises(NotImplementedError, match=r"npu::npu_sort_v2.*which launches \w+"):
        torch.ops.npu.npu_sort_v2(x)
