"""Operator schemas of the torch_npu releases: what the data files say, how they are read, how they are asked."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from refusals import cases, check

from atbx.core.errors import OptionError
from atbx.kernels.ascend import schemas
from atbx.kernels.ascend.schemas import compare, reader

ROOT = Path(__file__).resolve().parent.parent
SETS = ("2.7.1", "2.9.0", "2.10.0", "2.12.0", "2.13.0")


def default_of(version: str, operator: str, argument: str) -> object:
    arguments = schemas.schema(version, operator).parsed.arguments
    return next(a.default_value for a in arguments if a.name == argument)


def names_of(version: str, operator: str) -> list[str]:
    return [a.name for a in schemas.schema(version, operator).parsed.arguments]


@pytest.mark.parametrize("version", SETS)
def test_every_schema_parses_and_is_filed_under_its_own_name(version: str) -> None:
    for operator in schemas.operators(version):
        parsed = torch._C.parse_schema(operator.text)
        overload = f".{parsed.overload_name}" if parsed.overload_name else ""
        assert parsed.name + overload == operator.name
        assert operator.evidence in ("wheel string", "wheel python")
        assert operator.name.split("::")[0] in ("npu", "atb")


@pytest.mark.parametrize(
    ("version", "npu", "atb", "meta"),
    [
        ("2.7.1", 310, 34, 128),
        ("2.9.0", 332, 34, 152),
        ("2.10.0", 403, 34, 232),
        ("2.12.0", 421, 37, 256),
        ("2.13.0", 425, 37, 261),
    ],
)
def test_sets_are_complete(version: str, npu: int, atb: int, meta: int) -> None:
    """Counts of the wheels for aarch64; those of 2.13.0 are what the real torch_npu registers (tests/twin)."""
    names = [operator.name for operator in schemas.operators(version)]
    assert sum(name.startswith("npu::") for name in names) == npu
    assert sum(name.startswith("atb::") for name in names) == atb
    assert sum(operator.meta for operator in schemas.operators(version)) == meta


def test_releases_fall_into_five_sets_by_op_plugin_and_not_by_torch() -> None:
    assert schemas.versions() == SETS
    assert len(schemas.releases()) == 31
    expected = {"2.7.1": "2.7.1", "2.7.1.post2": "2.9.0", "2.7.1.post4": "2.10.0", "2.7.1.post8": "2.12.0"}
    expected |= {"2.7.1.post11": "2.13.0", "2.8.0": "2.7.1", "2.9.1": "2.10.0", "2.10.0.post7": "2.13.0"}
    assert {release: schemas.releases()[release] for release in expected} == expected
    contents = [{(o.name, o.text) for o in schemas.operators(version)} for version in SETS]
    assert all(a != b for a, b in pairwise(contents))


def test_a_release_without_a_file_answers_like_its_set() -> None:
    assert names_of("2.9.0.post6", "npu::npu_mrope") == names_of("2.12.0", "npu::npu_mrope")
    assert schemas.schema("2.9.0.post6", "npu::npu_mrope").version == "2.9.0.post6"


def test_data_files_stay_small() -> None:
    for path in (ROOT / "kernels/ascend/schemas").glob("*.json"):
        assert path.stat().st_size < 400_000, path


# What differs between the releases, each by name.


def test_scatter_pa_kv_cache_has_cache_mode_from_the_set_of_2_10() -> None:
    operator = "npu::npu_scatter_pa_kv_cache"
    assert ["cache_mode" in names_of(version, operator) for version in SETS] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert default_of("2.13.0", operator, "cache_mode") == "PA_NZ"


def test_apply_rotary_pos_emb_changes_its_default_layout_after_2_10_0() -> None:
    found = [default_of(version, "npu::npu_apply_rotary_pos_emb", "layout") for version in SETS]
    assert found == ["BSH", "BSH", "BSH", "BSND", "BSND"]


@pytest.mark.parametrize("operator", ["npu::npu_add_rms_norm_v2", "npu::npu_qkv_rms_norm_rope_cache"])
def test_fused_norms_appear_with_the_set_of_2_10(operator: str) -> None:
    assert schemas.in_versions(operator) == ("2.10.0", "2.12.0", "2.13.0")
    check(
        lambda: schemas.schema("2.7.1", operator),
        OptionError,
        rf"torch_npu 2\.7\.1 has no operator {operator}.*2\.10\.0",
    )


def test_a_schema_word_for_word() -> None:
    assert schemas.schema("2.13.0", "atb::_npu_reshape_and_cache").text == (
        "atb::_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_indices) -> ()"
    )
    assert schemas.schema("2.7.1", "npu::npu_mrope").text == (
        "npu::npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, "
        "int[]? mrope_section=None, str? rotary_mode='half') -> (Tensor, Tensor)"
    )


def test_positional_arguments_are_only_ever_appended() -> None:
    """What lets one positional call serve several releases; a future set that breaks it has to be looked at."""
    for name in compare.operators_of_inference():
        exact = name if "." in name else f"{name}.default"
        held = [
            [a.name for a in schemas.schema(version, exact).parsed.arguments if not a.kwarg_only]
            for version in SETS
            if version in schemas.in_versions(exact)
        ]
        for older, newer in pairwise(held):
            shared = min(len(older), len(newer))
            assert older[:shared] == newer[:shared], name


def test_registered_names_say_input_where_documents_say_self() -> None:
    for version in SETS:
        for operator in schemas.operators(version):
            if operator.name.startswith("npu::"):
                assert "self" not in [a.name for a in operator.parsed.arguments], operator.name


# Overloads, meta functions, graph updates.


def test_a_name_without_overload_is_the_default_one_or_else_any() -> None:
    assert [o.name for o in reader.overloads("2.13.0", "npu::npu_fused_infer_attention_score_v2")] == [
        "npu::npu_fused_infer_attention_score_v2",
        "npu::npu_fused_infer_attention_score_v2.out",
    ]
    assert [o.name for o in reader.overloads("2.13.0", "atb::_npu_paged_attention_v2")] == [
        "atb::_npu_paged_attention_v2.out"
    ]
    assert len(reader.overloads("2.13.0", "npu::npu_mrope.default")) == 1
    assert schemas.in_versions("npu::npu_mrope.out") == ()


def test_meta_functions() -> None:
    assert schemas.has_meta("2.13.0", "npu::npu_fused_infer_attention_score")
    assert not schemas.has_meta("2.13.0", "atb::_npu_paged_attention")
    assert not schemas.has_meta("2.9.0", "npu::npu_gemma_rms_norm")
    assert schemas.has_meta("2.10.0", "npu::npu_gemma_rms_norm")


def test_paged_attention_updates_context_lens_by_position() -> None:
    update = schemas.graph_update("2.13.0", "atb::_npu_paged_attention")
    assert update is not None
    assert dict(update.positional) == {"context_lens": 7}
    assert names_of("2.13.0", "atb::_npu_paged_attention")[7] == "context_lens"
    assert update.keys == {"context_lens", "workspace"}


@pytest.mark.parametrize("version", ["2.9.0", "2.10.0", "2.12.0", "2.13.0"])
def test_fia_is_recorded_as_out_and_updated_by_keyword(version: str) -> None:
    """The positions that its handlers state lie beyond its three positional arguments."""
    update = schemas.graph_update(version, "npu::npu_fused_infer_attention_score_v2")
    assert update is not None
    assert update.records == "npu::npu_fused_infer_attention_score_v2.out"
    assert dict(update.positional) == {}
    assert {"actual_seq_qlen", "actual_seq_kvlen", "block_table"} <= update.keys
    assert "actual_seq_lengths_kv" not in update.keys


def test_what_no_graph_can_update() -> None:
    assert schemas.graph_update("2.7.1", "npu::npu_fused_infer_attention_score_v2") is None
    assert schemas.graph_update("2.7.1", "atb::_npu_paged_attention") is None
    assert schemas.graph_update("2.13.0", "npu::npu_incre_flash_attention") is None
    assert schemas.graph_update("2.13.0", "npu::npu_prompt_flash_attention") is None
    assert schemas.graph_update_operators("2.7.1") == (
        "npu::npu_fused_infer_attention_score.default",
        "npu::npu_fused_infer_attention_score.out",
    )


# Asked for something that is not there.


@cases(
    (
        "a release that was not read",
        lambda: schemas.schema("2.6.0", "npu::npu_rms_norm"),
        OptionError,
        r"no operator schemas are held.*2\.7\.1.*found 2\.6\.0",
    ),
    (
        "an operator in no release",
        lambda: schemas.schema("2.13.0", "npu::npu_rmsnorm"),
        OptionError,
        "no operator npu::npu_rmsnorm; expected an operator of npu:: or atb::",
    ),
    (
        "a document without the marks",
        lambda: compare.with_computed_part("# Title\n", "page.md"),
        OptionError,
        "page.md: the document has no place for the computed part.*found 0 and 0",
    ),
)
def test_unknown_things_are_named(call, kind, pattern) -> None:
    check(call, kind, pattern)


# The document.


def test_the_document_says_what_the_data_files_say() -> None:
    text = (ROOT / "docs/ascend-schemas.md").read_text()
    assert compare.with_computed_part(text, "docs/ascend-schemas.md") == text


def test_changes_are_told_argument_by_argument() -> None:
    assert compare.changes("npu::npu_mrope", "2.9.0", "2.10.0") == ["new `*, str? cache_mode='default'`"]
    assert compare.changes("npu::npu_apply_rotary_pos_emb", "2.10.0", "2.12.0") == [
        "`str layout='BSH'` is now `str layout='BSND'`"
    ]
    assert compare.changes("npu::npu_rms_norm", "2.7.1", "2.13.0") == []


def test_the_command_prints_an_operator_with_its_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["npu::npu_mrope"]) == 0
    out = capsys.readouterr().out
    assert out.count("npu::npu_mrope(") == 2
    assert out.startswith("2.7.1, 2.9.0:\n")
    assert compare.main(["npu::npu_nothing"]) == 2
    assert "no release has this operator" in capsys.readouterr().err
