"""`atbx convert`, `inspect`, `plan`, `explain` and `bench` on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_chat_model import VOCAB, chat_gguf, chat_model, error_of, generator_of, json_of, text_of
from small_checkpoints import assert_same, changed, hf_folder, tiny_params

import atbx
from atbx import bench, checkpoints
from atbx.checkpoints.config_metadata import config_to_metadata
from atbx.commands.output import fold, print_json, size_in_words
from atbx.schedule import Request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted tiny model."""
    return chat_model(tmp_path_factory.mktemp("model"))


def test_convert_writes_what_load_gives(capsys: Any, tmp_path: Path) -> None:
    source, out = chat_gguf(tmp_path / "a.gguf"), tmp_path / "out.msgpack"
    found = json_of(capsys, "convert", source, out, "--json")
    expected = checkpoints.load(source, progress=False)
    nbytes = sum(leaf.nbytes for leaf in atbx.trees.leaves(expected.params))
    assert found == {"path": str(out), "files": [str(out)], "tensors": 21, "bytes": nbytes}
    assert_same(checkpoints.load(out, progress=False).params, expected.params)


def test_convert_casts_and_shards(capsys: Any, tmp_path: Path) -> None:
    source, out = chat_gguf(tmp_path / "a.gguf"), tmp_path / "out.msgpack"
    printed = text_of(capsys, "convert", source, out, "--dtype", "bfloat16", "--shard-size", "30KiB")
    shards = sorted(tmp_path.glob("out-*.msgpack"))
    assert len(shards) > 1
    assert printed == f"{out}: 21 tensors, 70.3 KiB in {len(shards)} files\n"
    assert {leaf.dtype for leaf in atbx.trees.leaves(checkpoints.load(out).params)} == {torch.bfloat16}


def test_convert_refuses_to_overwrite_its_source(capsys: Any, tmp_path: Path) -> None:
    source = chat_gguf(tmp_path / "a.gguf")
    before = source.read_bytes()
    assert error_of(capsys, "convert", source, source).startswith(f"{source}: the destination is the source")
    assert source.read_bytes() == before


def test_convert_names_a_folder_that_is_not_there(capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "no" / "out.msgpack"
    said = error_of(capsys, "convert", chat_gguf(tmp_path / "a.gguf"), out)
    assert said == f"{out}: the file cannot be written: No such file or directory"


def test_inspect_tells_the_tree_and_what_is_around_it(capsys: Any, model: Path) -> None:
    found = json_of(capsys, "inspect", model, "--json")
    opened = checkpoints.load(model, progress=False)
    paths, leaves, _ = atbx.trees.flatten_with_paths(opened.params)
    assert {
        leaf["path"]: (tuple(leaf["shape"]), leaf["dtype"], leaf["bytes"]) for leaf in found["leaves"]
    } == {path: (tuple(t.shape), "float32", t.nbytes) for path, t in zip(paths, leaves, strict=True)}
    assert (found["form"], found["family"], found["path"]) == ("atbx", "llama", str(model))
    assert (found["tensors"], found["parameters"]) == (21, sum(t.numel() for t in leaves))
    assert found["bytes"] == 4 * found["parameters"]
    assert found["config"]["vocab"] == VOCAB
    assert found["generation"] == {"eos": list(opened.generation.eos)}
    assert found["tokenizer"] == {"vocab_size": VOCAB, "eos": list(opened.text.eos), "chat_template": True}
    assert found["metadata"] == {
        "format": "atbx", "version": 1, "family": "llama", "source": {"name": "chat.gguf", "form": "gguf"},
    }  # fmt: skip


def test_inspect_plans_memory_at_the_sizes_asked_for(capsys: Any, model: Path) -> None:
    config = checkpoints.load(model, progress=False).config
    sizes = ("--batch", 3, "--capacity", 100, "--dtype", "bfloat16")
    found = json_of(capsys, "inspect", model, *sizes, "--json")["memory"]
    needs = atbx.plan_memory(config, 3, 100, torch.bfloat16)
    assert found == {
        "batch": 3, "capacity": 100, "dtype": "bfloat16", "weights": needs.weights, "cache": needs.cache,
        "activation": needs.activation, "total": needs.total,
    }  # fmt: skip
    default = json_of(capsys, "inspect", model, "--json")["memory"]
    assert (default["batch"], default["capacity"], default["dtype"]) == (1, 600, "float32")


def test_inspect_prints_layers_that_are_alike_once(capsys: Any, model: Path) -> None:
    lines = text_of(capsys, "inspect", model).splitlines()
    assert lines[0] == f"{model}: llama model (atbx)"
    assert lines[1] == "21 tensors, 36,000 parameters, 140.6 KiB"
    assert "  layers/0 to layers/1 (2 alike)" in lines
    assert [line.split() for line in lines].count(["q", "[32,", "32]", "float32", "4.0", "KiB"]) == 1
    assert lines[-1].startswith("memory for 1 row of 600 tokens in float32: ")


def test_inspect_shows_gguf_keys_and_long_lists_by_length(capsys: Any, model: Path) -> None:
    found = json_of(capsys, "inspect", model.with_name("chat.gguf"), "--json")
    assert found["form"] == "gguf"
    assert found["metadata"]["llama.context_length"] == 600
    assert found["metadata"]["tokenizer.ggml.tokens"] == f"{VOCAB} values"


def test_inspect_reads_a_hugging_face_folder(capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    found = json_of(capsys, "inspect", hf_folder(tmp_path / "hf"), "--json")
    assert (found["form"], found["tokenizer"], found["tensors"]) == ("safetensors", None, 21)


def test_inspect_shows_a_tree_that_belongs_to_no_model(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "tree.msgpack"
    checkpoints.write_tree(path, {"a": {"0": torch.zeros(2, 3)}, "b": torch.ones(4, dtype=torch.int32)})
    found = json_of(capsys, "inspect", path, "--json")
    assert found["leaves"] == [
        {"path": "a/0", "shape": [2, 3], "dtype": "float32", "bytes": 24},
        {"path": "b", "shape": [4], "dtype": "int32", "bytes": 16},
    ]
    assert (found["family"], found["config"], found["memory"]) == (None, None, None)
    assert text_of(capsys, "inspect", path).startswith(f"{path}: weight tree without a model's configuration")


def test_inspect_of_a_damaged_file_names_the_place(capsys: Any, tmp_path: Path, model: Path) -> None:
    cut = tmp_path / "cut.msgpack"
    cut.write_bytes(model.read_bytes()[:5000])
    assert str(cut) in error_of(capsys, "inspect", cut)


def test_plan_lists_what_the_api_plans_and_then_compiles(capsys: Any, model: Path) -> None:
    generate, params, _ = generator_of(model)
    found = json_of(capsys, "plan", model, "--prompt-lengths", "5,17,300", "--max-new-tokens", 9, "--json")
    planned = generate.plan(params, [Request((5, 17, 300), 9)])
    assert found["variants"] == [entry.name for entry in planned]
    assert found["count"] == len(planned)
    generate(params, [[1] * 5, [1] * 17, [1] * 300], max_new_tokens=9, eos=())
    assert generate.cache_info().variants == found["count"]


def test_plan_divides_prompts_into_requests_and_knows_sampler_stages(capsys: Any, model: Path) -> None:
    generate, params, _ = generator_of(model)
    options = ("--max-new-tokens", 9, "--temperature", 1, "--json")
    found = json_of(capsys, "plan", model, "--prompt-lengths", "5,17,300", "--batch", 2, *options)
    workload = [Request((5, 17), 9, {"temperature": 1.0}), Request((300,), 9, {"temperature": 1.0})]
    assert found["variants"] == [entry.name for entry in generate.plan(params, workload)]
    assert any("values/temperature" in name for name in found["variants"])


def test_plan_tells_memory_that_the_weights_dtype_changes(capsys: Any, model: Path) -> None:
    request = ("plan", model, "--prompt-lengths", "5", "--max-new-tokens", 9, "--json")
    full, half = (json_of(capsys, *request, "--dtype", dtype)["memory"] for dtype in ("float32", "bfloat16"))
    assert full["weights"] == 2 * half["weights"]
    assert full["total"] == full["weights"] + full["cache"] + full["activation"]


def test_plan_prints_a_line_a_variant(capsys: Any, model: Path) -> None:
    found = json_of(capsys, "plan", model, "--prompt-lengths", "5", "-n", 3, "--json")
    lines = text_of(capsys, "plan", model, "--prompt-lengths", "5", "-n", 3).splitlines()
    assert lines[0] == f"{found['count']} variants for 1 request"
    assert lines[1:-1] == [f"  {name}" for name in found["variants"]]
    assert lines[-1].startswith("memory: ")


def test_plan_refuses_what_cannot_fit(capsys: Any, model: Path) -> None:
    said = error_of(capsys, "plan", model, "--prompt-lengths", "5,599", "--max-new-tokens", 9)
    assert "tokens[1]" in said
    assert "600" in said


def test_explain_tells_every_equation_of_the_program(capsys: Any, model: Path) -> None:
    generate, params, _ = generator_of(model)
    steps = generate.explain(params, prompt=7, batch=2)
    found = json_of(capsys, "explain", model, "--prompt", 7, "--batch", 2, "--json")
    for name, step in zip(("prefill", "decode"), steps, strict=True):
        part = found[name]
        assert part["variant"] == step.name
        assert (part["cached"], part["miss"]) == (False, "no variant is cached")
        assert [(e["scope"], e["op"], e["kernel"], e["tier"], e["why"]) for e in part["equations"]] == [
            (c.equation.scope, c.equation.op.name, c.kernel.name, c.kernel.tier, c.why) for c in step.choices
        ]
        assert [e["flops"] for e in part["equations"]] == [c.equation.cost().flops for c in step.choices]
        assert [len(e["refused"]) for e in part["equations"]] == [len(c.refused) for c in step.choices]
        assert part["totals"]["equations"] == len(step.choices)
        assert part["totals"]["flops"] == sum(e["flops"] for e in part["equations"])
        assert part["totals"]["bytes"] == sum(e["bytes"] for e in part["equations"])
        assert sum(part["totals"]["tiers"].values()) == len(step.choices)


def test_explain_prints_layers_that_are_alike_once_with_their_kernels(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep.msgpack"
    config = changed(layers=5)
    checkpoints.write_tree(
        path,
        tiny_params(config),
        metadata={"family": "llama", "config": config_to_metadata(config)},
    )
    printed = text_of(capsys, "explain", path)
    assert printed.count("layers/1 to layers/4 (4 alike, costs of one)") == 2
    assert "layers/3" not in printed
    assert "Prefill: step/ids:i64[1, 16]" in printed
    assert "Decode: step/ids:i64[1, 1]" in printed
    assert printed.count("not cached: no variant is cached") == 2
    assert printed.count("total: ") == 2
    assert "  attend_project" in printed


def test_explain_reads_no_weights(capsys: Any, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("atbx.checkpoints.gguf_reader.view", load)
    assert "Decode: " in text_of(capsys, "explain", model.with_name("chat.gguf"), "--dtype", "bfloat16")


def test_bench_prints_exactly_its_keys(capsys: Any, model: Path) -> None:
    sizes = ("--dtype", "bfloat16", "--batch", 2, "--prompt", 4, "--new", 40, "--repeats", 2, "--threads", 1)
    found = json_of(capsys, "bench", model, *sizes, "--json")
    assert list(found) == [
        "prefill_tokens_per_second", "decode_tokens_per_second", "first_call_seconds", "load_seconds",
        "peak_resident_bytes", "variants",
    ]  # fmt: skip
    assert all(value > 0 for value in found.values())
    assert found["variants"] == 3
    assert found["peak_resident_bytes"] > 50_000_000


def test_bench_prints_a_line_a_number(capsys: Any, model: Path) -> None:
    lines = text_of(capsys, "bench", model, "--prompt", 4, "--new", 40, "--repeats", 1).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "prefill", "decode", "first call", "load", "peak", "variants",
    ]  # fmt: skip


def test_bench_takes_rates_from_medians_of_warm_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds of: load; first call (new=5); warming call (new=1); then one-token and five-token calls in turns.
    spans = iter([3.0, 9.0, 7.0, 2.0, 6.0, 50.0, 60.0, 1.0, 4.0])
    clock = [0.0, False]

    def now() -> float:
        clock[1] = not clock[1]
        if not clock[1]:
            clock[0] += next(spans)
        return clock[0]

    class Stub:
        vocab = 10

        def __init__(self) -> None:
            self.asked: list[Any] = []

        def __call__(self, params: Any, rows: Any, **options: Any) -> None:
            self.asked.append((params, len(rows), len(rows[0]), options))

        def cache_info(self) -> Any:
            return type("Info", (), {"variants": 4})

    monkeypatch.setattr(bench, "perf_counter", now)
    stub = Stub()
    found = bench.measure(lambda: ("weights", stub), batch=2, prompt=8, new=5, repeats=3)  # type: ignore[arg-type, return-value]
    assert found.load_seconds == 3.0
    assert found.first_call_seconds == 9.0
    assert found.prefill_tokens_per_second == 2 * 8 / 2.0  # median of 2, 50, 1
    assert found.decode_tokens_per_second == 2 * 4 / (6.0 - 2.0)  # median of 6, 60, 4
    assert found.variants == 4
    assert [asked[3]["max_new_tokens"] for asked in stub.asked] == [5, 1, 1, 5, 1, 5, 1, 5]
    assert all(asked[:3] == ("weights", 2, 8) and asked[3]["eos"] == () for asked in stub.asked)


def test_bench_refuses_what_cannot_be_measured(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    assert error_of(capsys, "bench", model, "--new", 1) == (
        "new: is too small to be measured; expected 2 or more, found 1"
    )
    assert "tokens[0]" in error_of(capsys, "bench", model, "--prompt", 599, "--new", 9)
    monkeypatch.setattr(bench, "perf_counter", lambda: 1.0)
    said = error_of(capsys, "bench", model, "--prompt", 4, "--new", 3, "--repeats", 1)
    assert said.startswith("new: decoding is too short to be told from prefill; found 3 tokens in 0.0000 s")


def test_a_system_without_peak_memory_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name: x\nVmRSS: 5 kB\n")
    monkeypatch.setattr(bench, "STATUS", str(tmp_path / "status"))
    with pytest.raises(atbx.errors.UnsupportedError, match="VmHWM"):
        bench.peak_resident_bytes()
    (tmp_path / "status").write_text("Name: x\nVmHWM:      5 kB\n")
    assert bench.peak_resident_bytes() == 5 * 1024


def test_neighbours_with_the_same_rows_fold_and_others_do_not() -> None:
    groups = [("", ["e"]), ("l/0", ["a"]), ("l/1", ["b"]), ("l/2", ["b"]), ("l/3", ["b"]), ("l/4", ["a"])]
    assert list(fold(groups)) == [
        ("", 1, ("e",)), ("l/0", 1, ("a",)), ("l/1 to l/3", 3, ("b",)), ("l/4", 1, ("a",)),
    ]  # fmt: skip
    assert list(fold([])) == []


def test_json_has_null_for_numbers_that_json_has_not(capsys: Any) -> None:
    print_json({"a": [float("nan"), 1.5], "b": (float("-inf"), {"c": float("inf")}), "é": True})
    assert capsys.readouterr().out == '{"a": [null, 1.5], "b": [null, {"c": null}], "\\u00e9": true}\n'


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (5 * 2**29, "2.50 GiB")],
)
def test_sizes_read_well(nbytes: int, words: str) -> None:
    assert size_in_words(nbytes) == words
