"""The examples and the README's code run, and what they print is right."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_oracle import attention
from conftest import ROOT, smollm2_gguf

import atbx
from atbx.core import op
from atbx.kernels import cpu

EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))
NEEDS_WEIGHTS = "# needs weights"


@pytest.fixture
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops and kernels that an example defines are gone after its test."""
    backend = cpu.backend()
    monkeypatch.setattr(backend, "table", {name: list(kernels) for name, kernels in backend.table.items()})
    monkeypatch.setattr(op, "_registry", op.registered_ops())


def run(name: str) -> dict[str, Any]:
    """Run an example as a script; returns its globals."""
    return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def plain_own_model(module: dict[str, Any], prompt: list[int], new: int) -> list[int]:
    """Greedy tokens of examples/own_model.py by its formulas, in FP64 and without a cache."""
    config = module["Config"]()
    params = atbx.trees.map_leaves(lambda t: t.double(), module["random_params"](config))
    tokens = list(prompt)
    for _ in range(new):
        x = params["embed"][torch.tensor(tokens)]
        T, M = x.shape
        for p in params["layers"]:
            q, k, v = (y.view(T, config.heads, -1).numpy() for y in (x @ p["qkv"].T).split(M, dim=1))
            a = attention(q, k, v, 0, scale=config.head_size**-0.5, slopes=params["slopes"].numpy())
            x = x + torch.from_numpy(a).reshape(T, M) @ p["out"].T
            x = x + F.gelu(x @ p["up"].T) @ p["down"].T
            x = F.layer_norm(x, (M,), p["norm"], p["bias"], config.eps)
        tokens.append(int((x[-1] @ params["embed"].T).argmax()))
    return tokens[len(prompt) :]


def test_every_example_has_its_test() -> None:
    assert EXAMPLES == ["custom_op.py", "own_model.py"]


def test_the_model_of_ones_own_generates_what_its_formulas_say(capsys: pytest.CaptureFixture[str]) -> None:
    module = run("own_model.py")
    lines = capsys.readouterr().out.splitlines()
    for line, prompt in zip(lines, (b"atbx", b"hello, world"), strict=False):
        assert line == f"{plain_own_model(module, list(prompt), 12)} length"
    assert lines[2] == "38 tokens in 13 steps, padded to 38 (1.00)"
    assert lines[3].startswith("model: 3 variants ")


@pytest.mark.usefixtures("_own_tables")
def test_the_op_of_ones_own_runs_by_rule_and_by_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    module = run("custom_op.py")
    out = capsys.readouterr().out
    first, second = out.split("variant ")[1:]
    assert re.search(r"causal_conv +reference\.causal_conv +reference .*no kernel is registered", first)
    assert re.search(r"causal_conv +torch\.depthwise_conv +fused .*preferred kernel", second)
    assert float(out.split("largest difference ")[1]) < 1e-5

    x, weight, gate = torch.randn(1, 5, 3), torch.randn(3, 2), torch.randn(3, 3)
    expected = x.double().clone()
    for t in range(5):
        for c in range(3):
            taps = [weight[c, i] * x[0, t - 1 + i, c] for i in range(2) if t - 1 + i >= 0]
            expected[0, t, c] += sum(map(float, taps)) * float(torch.sigmoid(x[0, t] @ gate[c]))
    found = atbx.jit(module["layer"])({"conv": weight, "gate": gate}, x)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def python_blocks(path: Path) -> list[str]:
    """The ```python blocks of a Markdown file."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def prepare_weights() -> bool:
    """Put the real GGUF file into the current folder, where the README has it; False where it is not to be had."""
    source = smollm2_gguf()
    if source is None:
        return False
    if not Path(source.name).exists():
        Path(source.name).symlink_to(source)
    return True


def test_blocks_of_python_are_found_in_markdown(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A\n```python\na = 1\n```\n```sh\nls\n```\ntext\n```python\nb = a\n```\n"
    )
    assert python_blocks(tmp_path / "a.md") == ["a = 1\n", "b = a\n"]


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="there is no README.md")
@pytest.mark.usefixtures("_own_tables")
def test_the_code_of_the_readme_runs_in_order_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    blocks = python_blocks(ROOT / "README.md")
    assert blocks
    for number, block in enumerate(blocks):
        if NEEDS_WEIGHTS in block and not prepare_weights():
            continue
        exec(compile(block, f"README.md python block {number}", "exec", dont_inherit=True), namespace)
    said = capsys.readouterr().out
    assert "differs in shape of x: (12, 16) here, (8, 16) in the variant" in said
    if smollm2_gguf() is not None:
        assert "['The capital of France is Paris.'] ['eos']\nThe capital of France is Paris.\n" in said
