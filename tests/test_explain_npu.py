"""`atbx explain --device npu --chip NAME`: kernels, launches by name, costs by hand, graphs, switches; no torch_npu."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_chat_model import error_of, json_of, text_of
from small_checkpoints import tiny_params

import atbx
from atbx import checkpoints
from atbx.checkpoints.config_metadata import config_to_metadata
from atbx.core.abstract import Abstract
from atbx.core.op import Cost
from atbx.core.program import Equation, Var
from atbx.kernels import ascend
from atbx.kernels.ascend.chips import chip
from atbx.kernels.ascend.report import compute_ms, floor_ms, launched, memory_ms, report
from atbx.kernels.ascend.switches import switches
from atbx.models import llama
from atbx.models.llama import LlamaConfig
from atbx.ops.define import define_op
from atbx.ops.packed import QKV_ROTARY_WRITE
from atbx.ops.rope import Rope

CONFIG = LlamaConfig(
    vocab=160,
    width=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_size=32,
    ff=128,
    rope=Rope(dims=32),
    context=512,
    tied=False,
)
LINEAR, NORM, ADD_NORM = "aten::mm", "npu::npu_rms_norm", "npu::npu_add_rms_norm"
MROPE, PAGES, COPY = "npu::npu_mrope", "npu::npu_scatter_pa_kv_cache", "aten::copy_"
FIA, SWIGLU = "npu::npu_fused_infer_attention_score_v2", "npu::npu_swiglu"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers in bfloat16, every size a multiple of 16."""
    path = tmp_path_factory.mktemp("npu") / "model.msgpack"
    checkpoints.write_tree(
        path,
        tiny_params(CONFIG, torch.bfloat16),
        metadata={"family": "llama", "config": config_to_metadata(CONFIG)},
    )
    return path


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables that the report reads."""
    for name in (
        "TASK_QUEUE_ENABLE",
        "PYTORCH_NPU_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "ASCEND_LAUNCH_BLOCKING",
    ):
        monkeypatch.delenv(name, raising=False)


def explained(capsys: Any, model: Path, *options: object, chip_name: str = "Ascend910B3") -> Any:
    found = json_of(capsys, "explain", model, "--device", "npu", "--chip", chip_name, *options, "--json")
    assert found["device"] == found["prefill"]["device"] == found["decode"]["device"] == "planned"
    return found


def chosen(step: Any) -> int:
    """Launches that find unusable rows and choose the token: compositions, so many as the table counts."""
    return sum(e["launches"] for e in step["equations"] if e["op"] in ("is_unusable", "argmax"))


def layer_launches(step: Any, layer: str) -> list[str]:
    """Operators that a layer launches, in order; each must be known by name."""
    return [name for e in step["equations"] if e["scope"] == layer for name in e["launched"]]


def test_a_decode_layer_on_a2_is_ten_launches_at_one_row(capsys: Any, model: Path) -> None:
    step = explained(capsys, model)["decode"]
    assert layer_launches(step, "layers/1") == [
        LINEAR, MROPE, PAGES, FIA, LINEAR, ADD_NORM, LINEAR, SWIGLU, LINEAR, ADD_NORM,
    ]  # fmt: skip
    assert step["launches_per_layer"] == 10
    assert step["launches_by_layer"] == {"layers/0": 11, "layers/1": 10, "layers/2": 10}
    assert layer_launches(step, "layers/0")[0] == NORM
    assert layer_launches(step, "layers/2")[-1] == "aten::add"


@pytest.mark.parametrize("rows", [2, 8])
def test_it_is_eleven_above_one_row_because_values_are_copied(capsys: Any, model: Path, rows: int) -> None:
    step = explained(capsys, model, "--batch", rows)["decode"]
    assert layer_launches(step, "layers/1") == [
        LINEAR, MROPE, COPY, PAGES, FIA, LINEAR, ADD_NORM, LINEAR, SWIGLU, LINEAR, ADD_NORM,
    ]  # fmt: skip
    assert step["launches_per_layer"] == 11
    assert step["tokens"] == rows


def test_a_decode_layer_on_310p_is_at_most_twelve_launches_at_one_row() -> None:
    config = LlamaConfig(**{**vars(CONFIG), "head_size": 64, "rope": Rope(dims=64)})
    backend = ascend.backend(chip="Ascend310P3")
    generate = atbx.generator(llama.forward, config, device=backend)
    _, decode = generate.explain(llama.abstract(config, torch.float16))
    step = report(decode.variant.lowered, backend)
    names = [
        name
        for placed in step.equations
        if placed.equation.scope == "layers/1" and placed.launches
        for name in placed.launched or ()
    ]
    assert len(names) == step.launches_per_layer <= 12
    assert names[0] == names[-2] == LINEAR
    assert names[-7:] == [
        "npu::npu_incre_flash_attention",
        LINEAR,
        ADD_NORM,
        LINEAR,
        SWIGLU,
        LINEAR,
        ADD_NORM,
    ]
    # Its attention takes a mask, so no launch is updated.
    assert step.graph_updates == 0


def test_heads_that_no_rotary_operator_of_310p_takes_have_a_composition(capsys: Any, model: Path) -> None:
    step = explained(capsys, model, "--dtype", "float16", chip_name="Ascend310P3")["decode"]
    kernels = {e["kernel"] for e in step["equations"] if e["op"] == "qkv_rotary_write"}
    assert kernels == {"composed.rotary+scatter_nd"}


def test_the_totals_of_a_decode_step_are_those_worked_out_by_hand(capsys: Any, model: Path) -> None:
    step = explained(capsys, model)["decode"]
    # Bytes: 2 an element; operands and results once. 256 slots of keys and values are read a layer.
    embedding = 8 + 2 * 128
    qkv = 128 + 256 * 64 * 2 + 512
    write = 2 * 512 + 2 * 16 * 4
    attention = 2 * 256 * 2 * 32 * 2 + 2 * 256
    out, gate_up, down = 256 + 64 * 128 * 2 + 128, 128 + 256 * 64 * 2 + 512, 256 + 128 * 64 * 2 + 128
    layer = qkv + write + attention + out + 640 + gate_up + (512 + 256) + down
    assert layer == 168_960
    tail = 264 + 384 + (128 + 160 * 64 * 2 + 320) + (320 + 1) + (320 + 8)
    assert step["bytes"] == embedding + 384 + 3 * layer + 2 * 640 + 384 + tail == 531_417
    # FLOPs: two a weight and token, four a slot, head and channel, and a few an element of norms and activations.
    flops = 2 * 256 * 64 + 6 * 256 + 4 * 4 * 32 * 256 + 2 * 64 * 128 + 5 * 64 + 2 * 256 * 64 + 7 * 128
    flops += 2 * 64 * 128
    assert flops == 232_128
    assert step["flops"] == 256 + 3 * flops + 2 * 320 + 64 + 256 + 2 * 160 * 64 + 2 * 160 == 718_400
    # An embedding, 11 + 10 + 10, the last norm, logits, and the choice of a token.
    assert step["launches"] == 1 + 31 + 1 + 1 + chosen(step)
    # Every kernel is bound by memory here: 1600 GB/s.
    assert step["floor_ms"] == pytest.approx(531_417 / 1.6e12 * 1e3, rel=1e-12)
    assert step["memory_ms"] == pytest.approx(step["floor_ms"], rel=1e-12)
    assert step["compute_ms"] == pytest.approx(718_400 / 294.9e12 * 1e3, rel=1e-12)


def test_the_floor_of_a_kernel_is_the_longer_of_moving_and_computing() -> None:
    b3 = chip("Ascend910B3")
    cost = Cost(flops=294.9e9, bytes=0.8e9)
    assert memory_ms(cost, b3) == pytest.approx(0.5)
    assert compute_ms(cost, b3) == pytest.approx(1.0)
    assert floor_ms(cost, b3) == pytest.approx(1.0)
    assert floor_ms(Cost(bytes=3.2e9), b3) == pytest.approx(2.0)


def test_a_token_takes_one_replay_one_upload_and_one_wait(capsys: Any, model: Path) -> None:
    step = explained(capsys, model)["decode"]
    counted = ("graph_replays", "graph_updates", "update_ms", "host_syncs", "h2d_copies", "d2h_copies")
    assert [step[name] for name in counted] == [1, 3, None, 1, 1, 2]
    assert step["device_copies"] == 0
    # A block of 64 bytes each: ids, slots, block table, index of the last token, positions of the angles; and a table
    # of cos and sin, 32 bfloat16.
    assert step["upload_bytes"] == 6 * 64


def test_eager_execution_replays_and_updates_nothing(capsys: Any, model: Path) -> None:
    found = explained(capsys, model, "--eager")
    step = found["decode"]
    assert [step[name] for name in ("graph_replays", "graph_updates", "host_syncs")] == [0, 0, 1]
    assert step["launches"] == 34 + chosen(step)
    assert found["execution"] == "eager"
    assert (found["graphs"]["count"], found["graphs"]["streams"]) == (0, 0)


def test_masks_in_place_of_lengths_need_no_update(capsys: Any, model: Path) -> None:
    found = explained(capsys, model, "--lengths", "mask")
    (kernel,) = {e["kernel"] for e in found["decode"]["equations"] if e["op"] == "attention"}
    assert kernel == "npu.fia_v2_masked"
    assert found["decode"]["graph_updates"] == 0
    assert found["graphs"]["streams"] == found["graphs"]["count"]


def test_what_the_host_computes_is_told_apart_and_launches_nothing(capsys: Any, model: Path) -> None:
    step = explained(capsys, model)["decode"]
    host = [e for e in step["equations"] if e["runs"] == "host"]
    assert [e["op"] for e in host] == ["rotary_angles", "add"]
    assert all(e["launches"] == 0 and e["launched"] == [] for e in host)
    # Its cost is not the device's.
    assert step["flops"] == sum(e["flops"] for e in step["equations"] if e["runs"] == "device")


def test_every_equation_says_kernel_reason_refusals_and_evidence(capsys: Any, model: Path) -> None:
    found = explained(capsys, model, "--dtype", "float32")
    table = ascend.backend(chip="Ascend910B3")
    for step in (found["prefill"], found["decode"]):
        for e in step["equations"]:
            if e["runs"] == "device":
                row = table.capability(e["op"], e["kernel"])
                assert e["evidence"] == list(row.evidence)
                assert e["why"]
            assert e["updated"] == e["kernel"].startswith("npu.fia")
    attention = next(e for e in found["decode"]["equations"] if e["op"] == "attention")
    assert attention["kernel"] == "composed.attention"
    assert [(r["kernel"], r["rule"]) for r in attention["refused"]] == [
        ("npu.fia_v2", "dtype"), ("npu.fia_v1", "dtype"), ("npu.ifa_masked", "dtype"), ("npu.pfa_gathered", "chip"),
    ]  # fmt: skip
    assert attention["refused"][0]["reason"] == "takes float16, bfloat16, found torch.float32"
    assert (attention["launches"], attention["launched"]) == (16, None)


def test_the_rule_of_a_limit_and_of_a_version_is_named(capsys: Any, tmp_path: Path) -> None:
    config = LlamaConfig(**{**vars(CONFIG), "vocab": 1000, "head_size": 16, "rope": Rope(dims=16)})
    path = tmp_path / "odd.msgpack"
    checkpoints.write_tree(
        path,
        tiny_params(config, torch.bfloat16),
        metadata={"family": "llama", "config": config_to_metadata(config)},
    )
    found = explained(capsys, path, "--torch-npu", "2.7.1", "--cann", "8.3.RC1")
    assert (found["torch_npu"], found["cann"]) == ("2.7.1", "8.3.RC1")
    rules = {(r["kernel"], r["rule"]) for e in found["decode"]["equations"] for r in e["refused"]}
    assert ("aclnn.mm_nz", "nz_blocks") in rules
    assert ("npu.mrope+scatter_pa", "schema") in rules


def test_kernels_behind_the_chosen_one_are_listed(capsys: Any, model: Path) -> None:
    step = explained(capsys, model)["decode"]
    attention = next(e for e in step["equations"] if e["op"] == "attention")
    behind = {b["kernel"]: b["refused"] for b in attention["behind"]}
    assert behind["npu.fia_v1"] is None
    assert behind["npu.pfa_gathered"].startswith("documented for 310P")


def test_graphs_and_streams_up_to_the_contexts_end(capsys: Any, model: Path) -> None:
    graphs = explained(capsys, model)["graphs"]
    # Prefill of 16 tokens, decoding at extents 256 and 512, each with three attention launches to update; the sampler.
    assert (graphs["count"], graphs["streams"], graphs["most_streams"]) == (4, 3 * 4 + 1, 4)
    assert (graphs["usable"], graphs["fits"]) == (1800, True)
    assert "vllm-ascend, not measured here" in graphs["rule"]


def test_bfloat16_on_310p_stops_with_the_op_the_rules_and_the_place(capsys: Any, model: Path) -> None:
    said = error_of(capsys, "explain", model, "--device", "npu", "--chip", "Ascend310P3")
    assert "no kernel of backend 'npu' applies to embedding" in said
    assert "models/llama.py" in said
    assert "aclnn.embedding refused: bfloat16 does not exist on this chip (Ascend310P3)" in said
    found = explained(capsys, model, "--fallback", "report", chip_name="Ascend310P3")
    embedding = found["decode"]["equations"][0]
    assert (embedding["tier"], embedding["why"]) == (
        "reference",
        "no kernel applies: the reference rule runs",
    )
    assert {r["rule"] for r in embedding["refused"]} == {"chip_dtype"}
    assert found["graphs"] is None


def test_an_op_without_a_kernel_stops_a_function_with_its_line() -> None:
    op = define_op("test_npu_unknown", shape=lambda x: x, reference=lambda x: x * 2)
    jitted = atbx.jit(lambda x: op(x), device=ascend.backend(chip="Ascend910B3"))
    with pytest.raises(
        atbx.errors.FallbackError, match=r"test_npu_unknown.*no kernel is registered"
    ) as caught:
        jitted.explain(torch.zeros(2, dtype=torch.float16))
    assert "test_explain_npu.py" in str(caught.value)


def test_the_text_says_what_the_data_says(capsys: Any, model: Path) -> None:
    step = explained(capsys, model)["decode"]
    said = text_of(capsys, "explain", model, "--device", "npu", "--chip", "Ascend910B3")
    for part in (
        "Ascend910B3 (A2): 294.9 TFLOP/s, 1600 GB/s, 64 GiB",
        "  layers/1: 10 launches\n",
        "rotary_angles      on the host                 no launch",
        "launches npu_mrope, npu_scatter_pa_kv_cache",
        f"  a step: {step['launches']} launches, 10 a layer\n",
        "1 graph replay, 3 length updates before it",
        "1 copy to the device (6 arrays, 384 bytes), 2 back, 1 wait for the device",
        "0.531 MB and 0.72 MFLOP: at least 0.0003 ms for the bytes, 0.0000 ms for the FLOPs",
        "Graphs, up to the context's end: 4, which take 13 streams",
        "Ascend910B3 has 2048 streams, 1800 of them for graphs: all fit at once",
        "not measured here",
        "  TASK_QUEUE_ENABLE not set: ",
        "  PYTORCH_NPU_ALLOC_CONF not set: ",
        "  ASCEND_LAUNCH_BLOCKING not set: ",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("values", "execution", "name", "severity", "says"),
    [
        ({"TASK_QUEUE_ENABLE": "2"}, "graph", "TASK_QUEUE_ENABLE", "refused", "refuses graph capture"),
        ({"TASK_QUEUE_ENABLE": "2"}, "eager", "TASK_QUEUE_ENABLE", "ok", "workspaces"),
        ({"TASK_QUEUE_ENABLE": "0"}, "graph", "TASK_QUEUE_ENABLE", "ok", "3 length updates"),
        ({"TASK_QUEUE_ENABLE": "0"}, "eager", "TASK_QUEUE_ENABLE", "slow", "39 launches"),
        ({"TASK_QUEUE_ENABLE": "3"}, "eager", "TASK_QUEUE_ENABLE", "refused", "0, 1 or 2"),
        (
            {"TASK_QUEUE_ENABLE": "2", "ASCEND_LAUNCH_BLOCKING": "1"},
            "graph",
            "TASK_QUEUE_ENABLE",
            "ok",
            "no effect",
        ),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "graph", "ASCEND_LAUNCH_BLOCKING", "refused", "cannot be captured"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "eager", "ASCEND_LAUNCH_BLOCKING", "slow", "each of 39 launches"),
        ({"ASCEND_LAUNCH_BLOCKING": "0"}, "graph", "ASCEND_LAUNCH_BLOCKING", "ok", "return at once"),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "pin_memory_expandable_segments:True"},
            "graph",
            "PYTORCH_NPU_ALLOC_CONF",
            "refused",
            "refuses graph capture",
        ),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"},
            "graph",
            "PYTORCH_NPU_ALLOC_CONF",
            "refused",
            "excludes max_split_size_mb",
        ),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
            "graph",
            "PYTORCH_NPU_ALLOC_CONF",
            "ok",
            "segments grow",
        ),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"},
            "eager",
            "PYTORCH_NPU_ALLOC_CONF",
            "refused",
            "only one may be",
        ),
    ],
)
def test_what_a_variable_does_to_the_plan(
    values: dict[str, str], execution: str, name: str, severity: str, says: str
) -> None:
    found = {s.name: s for s in switches(values, execution, launches=39, updates=3)}
    assert list(found) == ["TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF", "ASCEND_LAUNCH_BLOCKING"]
    assert found[name].value == values[name]
    assert found[name].severity == severity
    assert says in found[name].effect


def test_the_environment_of_the_process_is_what_is_told(
    capsys: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    found = explained(capsys, model)["environment"]
    assert [(s["name"], s["value"], s["severity"]) for s in found] == [
        ("TASK_QUEUE_ENABLE", "2", "refused"),
        ("PYTORCH_NPU_ALLOC_CONF", None, "ok"),
        ("ASCEND_LAUNCH_BLOCKING", None, "ok"),
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--device", "npu", "--chip", "Ascend920"), "chip: this chip is not in the capability table"),
        (("--device", "npu", "--cann", "8.5.0"), "--cann: "),
        (("--device", "npu:x", "--chip", "Ascend910B3"), "--device: unknown device"),
        (("--chip", "Ascend910B3"), "--chip: belongs to an NPU; expected --device npu, found cpu"),
        (("--lengths", "mask"), "--lengths: belongs to an NPU"),
        (("--eager",), "--eager: belongs to an NPU"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    capsys: Any, model: Path, options: tuple[str, ...], says: str
) -> None:
    assert says in error_of(capsys, "explain", model, *options)


def test_a_machine_without_torch_npu_is_told_to_name_a_chip(
    capsys: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atbx.commands.explain_npu.is_installed", lambda: False)
    said = error_of(capsys, "explain", model, "--device", "npu")
    assert said.startswith("--chip: torch_npu is not installed here, so the chip to plan for must be named")
    assert "Ascend910B3" in said


def test_results_that_stay_on_the_device_are_copied_out_of_the_graph() -> None:
    backend = ascend.backend(chip="Ascend910B3")
    generate = atbx.generator(llama.forward, CONFIG, device=backend)
    prefill, _ = generate.explain(llama.abstract(CONFIG, torch.bfloat16), prompt=16, batch=2)
    found = report(prefill.variant.lowered, backend)
    # Logits leave the step in device memory, by a copy out of the graph's pool.
    assert (found.device_copies, found.readbacks, found.host_syncs) == (1, 0, 0)
    assert found.launches == sum(p.launches for p in found.equations) + 1
    for placed in found.equations:
        assert placed.launched is None or len(placed.launched) == placed.launches


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, (NORM, NORM, MROPE, PAGES)), (3, (COPY, NORM, COPY, NORM, MROPE, COPY, PAGES))],
)
def test_norms_of_queries_and_keys_are_launches_of_their_own(rows: int, expected: tuple[str, ...]) -> None:
    def value(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Var:
        return Var(Abstract(shape, dtype))

    angles = value(rows, 1, 16, dtype=torch.float32)
    index = value(rows, dtype=torch.int64)
    arena = value(4, 256, 2, 32)
    norm = value(32)
    inputs = (value(rows, 1, 8 * 32), norm, norm, angles, angles, arena, arena, index, index, index)
    params = {
        "heads": (4, 2, 2),
        "head_size": 32,
        "eps": 1e-6,
        "style": "half",
        "window": None,
        "extent": 256,
    }
    equation = Equation(QKV_ROTARY_WRITE, inputs, (value(rows, 1, 4, 32), arena, arena), params)
    backend = ascend.backend(chip="Ascend910B3")
    choice = backend.choose(equation, frozenset())
    row = backend.capability("qkv_rotary_write", choice.kernel.name)
    assert choice.kernel.name == "npu.mrope+scatter_pa"
    assert launched(choice, row) == expected
    assert choice.launches == len(expected)


@pytest.mark.parametrize(
    ("name", "milliseconds"), [("Ascend910B3", 8.4), ("Ascend910B4", 16.9), ("Ascend310P3", 66.0)]
)
def test_the_floor_of_a_7b_model_is_the_published_roofline(name: str, milliseconds: float) -> None:
    config = LlamaConfig(
        vocab=32000, width=4096, layers=32, heads=32, kv_heads=32, head_size=128, ff=11008, rope=Rope(dims=128),
        context=4096, tied=False,
    )  # fmt: skip
    backend = ascend.backend(chip=name)
    generate = atbx.generator(llama.forward, config, device=backend)
    _, decode = generate.explain(llama.abstract(config, torch.float16))
    found = report(decode.variant.lowered, backend)
    # The published figure is 13.5 GB of weights over the bandwidth; of the embedding table one row is read.
    assert found.floor_ms == pytest.approx(milliseconds, rel=0.02)
    in_layers = sum(found.launches_by_layer.values())
    assert in_layers == 32 * found.launches_per_layer + 1  # the first layer's norm


def test_the_documentation_lists_the_fields_of_a_step(capsys: Any, model: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "explain.md").read_text(encoding="utf-8")
    found = explained(capsys, model)
    for title, fields in (
        ("### A step", found["decode"]),
        ("### An equation", found["decode"]["equations"][0]),
        ("### The plan", {k: v for k, v in found.items() if k not in ("prefill", "decode")}),
    ):
        table = text.partition(title + "\n")[2].partition("\n#")[0]
        named = {
            name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)
        }
        assert named == set(fields), title
