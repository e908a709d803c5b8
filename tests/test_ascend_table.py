"""The capability table: an answer for every op and chip, calls that bind, and the launches of a decode layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import atbx
from atbx.core.abstract import Abstract
from atbx.core.errors import FallbackError, OptionError, UnsupportedError
from atbx.core.jit import Explanation
from atbx.core.op import registered_ops
from atbx.kernels import ascend
from atbx.kernels.ascend import schemas
from atbx.kernels.ascend.capability import EVIDENCE, operators_of
from atbx.kernels.ascend.chips import CHIPS, FAMILIES
from atbx.kernels.ascend.expansion import EXPANDED
from atbx.kernels.ascend.table import rows
from atbx.memory import AbstractBinding, abstract_cache, abstract_step
from atbx.models import llama
from atbx.ops.rope import Rope

ROWS = rows()
OPS = sorted(
    name for name, op in registered_ops().items() if op.shape.__module__.startswith(("atbx.", "ops."))
)

CONFIG = llama.LlamaConfig(
    vocab=512,
    width=256,
    layers=3,
    heads=4,
    kv_heads=2,
    head_size=64,
    ff=512,
    context=512,
    rope=Rope(dims=64),
)


def explain(chip: str, dtype: torch.dtype, batch: int = 1, tokens: int = 1, **options: str) -> Explanation:
    """The step of a small Llama, planned for a chip."""
    compiled = atbx.jit(
        llama.forward, static=("config",), donate=("cache",), device=ascend.backend(chip, **options)
    )
    cache = abstract_cache(CONFIG.cache_spec, 4, 256, dtype, 256)
    index = Abstract((batch,), torch.int64)
    cache = replace(cache, rows=index, lengths=index)
    binding = AbstractBinding(llama.abstract(CONFIG, dtype))
    return compiled.explain(binding, abstract_step(batch, tokens), cache, CONFIG)


def launches(step: Explanation, scope: str) -> list[tuple[str, int]]:
    """(kernel, launches) of the equations of a layer that launch anything."""
    found = [(c.kernel.name, c.launches) for c in step.choices if c.equation.scope == scope and c.launches]
    return [f for f in found if f[0] != "aclnn.rotary_angles"]  # once a step, on the host


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_has_a_row_for_every_chip(op: str, family: str) -> None:
    if op in EXPANDED:
        assert not [row for row in ROWS if row.op == op]
        return
    assert [row for row in ROWS if row.op == op and family in row.families], op


def test_rows_are_whole() -> None:
    assert not [k for k, n in Counter((row.op, row.kernel) for row in ROWS).items() if n > 1]
    for row in ROWS:
        assert row.evidence, row.kernel
        assert set(row.evidence) <= set(EVIDENCE), row.kernel
        assert "hardware" not in row.evidence, "nothing here was run on hardware"
        assert set(row.families) <= set(FAMILIES)
        assert row.operators
        for operator in row.calls:
            base = operator.partition("::")[2].partition(".")[0]
            assert any(o.partition("::")[2].startswith(base) for o in row.operators), (row.kernel, operator)


CALLS = sorted({(op, names) for row in ROWS for op, names in row.calls.items()})


@pytest.mark.parametrize(("operator", "names"), CALLS, ids=lambda x: x if isinstance(x, str) else "")
def test_every_call_binds_to_the_newest_release(operator: str, names: tuple[str, ...]) -> None:
    assert schemas.check_keywords(operator, names, schemas.versions()[-1]) == []


@pytest.mark.parametrize("release", sorted(schemas.releases()))
def test_a_release_whose_operator_lacks_an_argument_gets_another_row(release: str) -> None:
    plan = explain("Ascend910B3", torch.bfloat16, torch_npu=release)
    for choice in plan.choices:
        row = next(r for r in ROWS if (r.op, r.kernel) == (choice.equation.op.name, choice.kernel.name))
        for operator, names in row.calls.items():
            assert schemas.check_keywords(operator, names, operators_of(release)) == []


def test_an_older_release_is_told_apart_by_its_operators() -> None:
    old = explain("Ascend910B3", torch.bfloat16, torch_npu="2.9.0")
    writes = [c for c in old.choices if c.equation.op.name == "qkv_rotary_write"]
    assert {c.kernel.name for c in writes} == {"npu.rotary_mul+scatter_nd"}
    assert any("cache_mode" in r.reason for r in writes[0].refused)


def test_launches_of_a_decode_layer_on_a2() -> None:
    one = explain("Ascend910B3", torch.bfloat16)
    assert launches(one, "layers/1") == [
        ("aclnn.mm_nz", 1),
        ("npu.mrope+scatter_pa", 2),
        ("npu.fia_v2", 1),
        ("aclnn.mm_nz", 1),
        ("npu.add_rms_norm", 1),
        ("aclnn.mm_nz", 1),
        ("npu.swiglu", 1),
        ("aclnn.mm_nz", 1),
        ("npu.add_rms_norm", 1),
    ]
    assert sum(n for _, n in launches(one, "layers/1")) == 10
    assert sum(n for _, n in launches(explain("Ascend910B3", torch.bfloat16, batch=4), "layers/1")) == 11


def test_launches_of_a_decode_layer_on_310p() -> None:
    found = launches(explain("Ascend310P3", torch.float16), "layers/1")
    assert sum(n for _, n in found) == 11, found


def test_bfloat16_is_refused_where_the_chip_has_none() -> None:
    for chip in ("Ascend310P3", "Ascend910A"):
        with pytest.raises(FallbackError, match="bfloat16 does not exist on this chip"):
            explain(chip, torch.bfloat16)


@pytest.mark.parametrize("chip", sorted(CHIPS))
@pytest.mark.parametrize("tokens", [1, 16])
def test_a_model_in_float16_is_served_on_every_chip(chip: str, tokens: int) -> None:
    step = explain(chip, torch.float16, batch=2, tokens=tokens)
    assert not [c for c in step.choices if c.is_fallback]


def test_an_unknown_chip_or_option_is_named() -> None:
    with pytest.raises(UnsupportedError, match="Ascend999"):
        ascend.backend("Ascend999")
    with pytest.raises(OptionError, match="lengths"):
        ascend.backend("Ascend910B3", lengths="guess")
    with pytest.raises(UnsupportedError, match="device"):
        atbx.jit(llama.forward, static=("config",), device="npu:x")


def test_an_npu_without_torch_npu_says_what_to_do() -> None:
    pytest.importorskip("torch")
    if ascend.installed_version() is not None:
        pytest.skip("torch_npu is installed here")
    with pytest.raises(UnsupportedError, match=r"needs torch_npu"):
        atbx.jit(llama.forward, static=("config",), device="npu")


def test_mask_form_needs_no_length_from_the_host() -> None:
    step = explain("Ascend910B3", torch.bfloat16, lengths="mask")
    (attention,) = {c.kernel.name for c in step.choices if c.equation.op.name == "attention"}
    assert attention == "npu.fia_v2_masked"


@pytest.mark.parametrize("width", [360, 256])
def test_weights_that_do_not_divide_into_nz_blocks_stay_plain(width: int) -> None:
    config = replace(CONFIG, ff=width)
    generate = atbx.generator(llama.forward, config, device=ascend.backend("Ascend910B3"))
    _, decode = generate.explain(llama.abstract(config, torch.bfloat16))
    found = {c.equation.operands[1].shape: c for c in decode.choices if c.equation.op.name == "linear"}
    down = found[(256, width)]
    assert down.kernel.name == ("aclnn.mm_nz" if width % 16 == 0 else "aclnn.mm")
    if width % 16:
        assert "360 is no multiple" in down.refused[0].reason
