"""Writes what differs between the torch_npu releases, computed from the data files.

python -m atbx.kernels.ascend.schemas.compare                               # print the tables
python -m atbx.kernels.ascend.schemas.compare --write docs/ascend-schemas.md  # replace them in the document
python -m atbx.kernels.ascend.schemas.compare npu::npu_mrope                # the schemas of one operator
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch

from atbx.core.errors import AtbxError, OptionError
from atbx.kernels.ascend.schemas import reader

BEGIN = "<!-- computed by: python -m atbx.kernels.ascend.schemas.compare -->"
END = "<!-- end of the computed part -->"

_NPU = """
    npu_fused_infer_attention_score npu_fused_infer_attention_score.out
    npu_fused_infer_attention_score_v2 npu_fused_infer_attention_score_v2.out
    _npu_fused_infer_attention_score_get_max_workspace _npu_fused_infer_attention_score_v2_get_max_workspace
    npu_prompt_flash_attention npu_incre_flash_attention npu_fusion_attention
    npu_rms_norm npu_add_rms_norm npu_add_rms_norm_v2 npu_gemma_rms_norm npu_layer_norm_eval
    npu_rotary_mul npu_apply_rotary_pos_emb npu_mrope npu_interleave_rope
    npu_qkv_rms_norm_rope_cache npu_kv_rmsnorm_rope_cache
    npu_scatter_pa_kv_cache npu_gather_pa_kv_cache npu_gather_pa_kv_cache_functional
    npu_scatter_nd_update_ scatter_update_
    npu_swiglu npu_geglu npu_clipped_swiglu npu_gelu fast_gelu npu_ffn npu_linear
    npu_format_cast npu_format_cast_ get_npu_format npu_top_k_top_p
    npu_quantize npu_dynamic_quant npu_trans_quant_param npu_quant_matmul npu_weight_quant_batchmatmul
    npu_rms_norm_quant npu_add_rms_norm_quant npu_add_rms_norm_dynamic_quant npu_swiglu_quant npu_dequant_swiglu_quant
    npu_grouped_matmul npu_moe_gating_top_k npu_moe_gating_top_k_softmax npu_moe_init_routing_v2
    npu_moe_finalize_routing npu_mm_all_reduce_base
"""
INFERENCE = tuple(f"npu::{name}" for name in _NPU.split())
"""The npu:: operators that inference of language models uses; of atb:: all are."""


def document() -> str:
    """The computed part of the document, markdown."""
    parts = [
        _releases_table(),
        _presence_table(),
        _changes_list(),
        _meta_lists(),
        _updates_table(),
    ]
    return f"{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}\n"


def with_computed_part(text: str, where: str) -> str:
    """The document with its computed part replaced; OptionError if it lacks the two marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise OptionError(
            "the document has no place for the computed part",
            where=where,
            expected=f"one line {BEGIN} and one line {END}",
            found=f"{text.count(BEGIN)} and {text.count(END)}",
        )
    before, _, rest = text.partition(BEGIN)
    return before + document() + rest.partition(END)[2].removeprefix("\n")


def changes(operator: str, before: str, after: str) -> list[str]:
    """What changed for the arguments and results of one operator (with overload) between two releases."""
    old, new = (_arguments(reader.schema(version, operator).parsed) for version in (before, after))
    found = [f"`{name}` is gone" for name in old if name not in new]
    for name, told in new.items():
        if name not in old:
            found.append(f"new `{told}`" + _place(list(new), name, list(old)))
        elif told != old[name]:
            found.append(f"`{old[name]}` is now `{told}`")
    kept_old, kept_new = [n for n in old if n in new], [n for n in new if n in old]
    if kept_old != kept_new:
        found.append("order of arguments changed")
    results = [
        ", ".join(
            reader.type_as_written(value.real_type)
            for value in reader.schema(version, operator).parsed.returns
        )
        for version in (before, after)
    ]
    if results[0] != results[1]:
        found.append(f"returns ({results[1]}) instead of ({results[0]})")
    return found


def _arguments(schema: torch._C.FunctionSchema) -> dict[str, str]:
    """Each argument as written in the schema, by name; `*` before those by keyword only."""
    told = {}
    for argument in schema.arguments:
        text = f"{reader.type_as_written(argument.real_type)} {argument.name}"
        if argument.has_default_value():
            text += f"={argument.default_value!r}"
        told[argument.name] = ("*, " if argument.kwarg_only else "") + text
    return told


def _place(names: list[str], name: str, old: list[str]) -> str:
    """Where a new argument stands, if a positional call would notice: before one that was there already."""
    later = [other for other in names[names.index(name) + 1 :] if other in old]
    return f" before `{later[0]}`" if later else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (list(head), *map(list, rows))]
    lines.insert(1, "|" + "---|" * (lines[0].count("|") - 1))
    return "\n".join(lines)


def _releases_table() -> str:
    rows = []
    for version in reader.versions():
        names = [operator.name for operator in reader.operators(version)]
        others = [
            release for release, data in reader.releases().items() if data == version and release != version
        ]
        counts = [str(sum(name.startswith(space) for name in names)) for space in ("npu::", "atb::")]
        meta = str(sum(operator.meta for operator in reader.operators(version)))
        rows.append([f"**{version}**", ", ".join(others) or "-", *counts, meta])
    head = ("set", "other releases with exactly these operators", "npu::", "atb::", "with meta function")
    return "## Releases\n\n" + _table(head, rows)


def operators_of_inference() -> list[str]:
    """What the tables cover: `INFERENCE` and every `atb::` operator of any set."""
    atb = {operator.name for version in reader.versions() for operator in reader.operators(version)}
    return [*INFERENCE, *sorted(name for name in atb if name.startswith("atb::"))]


def _has(version: str, name: str) -> bool:
    """Whether the release has this overload (a name without overload is the default one)."""
    return version in reader.in_versions(name if "." in name else f"{name}.default")


def _exact(name: str) -> str:
    return name if "." in name else f"{name}.default"


def _presence_table() -> str:
    rows = []
    for name in operators_of_inference():
        cells, last = [], None
        for version in reader.versions():
            if not _has(version, name):
                cells.append("-")
            elif last is None:
                cells.append("yes")
            else:
                cells.append("changed" if changes(_exact(name), last, version) else "same")
            last = version if _has(version, name) else last
        if cells[0] == "-" or set(cells[1:]) != {"same"}:
            rows.append([f"`{name}`", *cells])
    everywhere = len(operators_of_inference()) - len(rows)
    return (
        "## Operators of inference that are not the same everywhere\n\n"
        f"{everywhere} of {len(operators_of_inference())} are in every set with one schema; the others:\n\n"
        + _table(("operator", *reader.versions()), rows)
    )


def _changes_list() -> str:
    lines = []
    for name in operators_of_inference():
        present = [version for version in reader.versions() if _has(version, name)]
        for before, after in pairwise(present):
            if found := changes(_exact(name), before, after):
                lines.append(f"- `{name}`, {before} to {after}: " + "; ".join(found))
    return "## What changed\n\n" + "\n".join(lines)


def _meta_lists() -> str:
    newest = reader.versions()[-1]
    without = [operator.name for operator in reader.operators(newest) if not operator.meta]
    interesting = [name for name in operators_of_inference() if _has(newest, name)]
    lacking = ", ".join(f"`{name}`" for name in interesting if name in without)
    having = ", ".join(f"`{name}`" for name in interesting if name not in without)
    later = [
        f"`{name}` (from {next(v for v in reader.versions() if _has(v, name) and reader.has_meta(v, _exact(name)))})"
        for name in interesting
        if name not in without
        and any(_has(v, name) and not reader.has_meta(v, _exact(name)) for v in reader.versions())
    ]
    return (
        f"## Meta functions in {newest}\n\n"
        f"With: {having}.\n\n"
        f"Without (tracing through them needs a shape function of our own): {lacking}.\n\n"
        f"With, but not in every older set that has the operator: {', '.join(later) or 'none'}.\n\n"
        f"Of all {len(reader.operators(newest))} operators {len(without)} have none; the field `meta` of the data "
        "files says it for each."
    )


def _updates_table() -> str:
    sets: dict[tuple[str, ...], list[str]] = {}
    for version in reader.versions():
        for name in reader.graph_update_operators(version):
            update = reader.graph_update(version, name)
            if update is None:
                continue
            positional = ", ".join(f"`{key}` (argument {place})" for key, place in update.positional.items())
            lists = ", ".join(
                f"`{key}`" for key in update.keywords if _is_host_list(version, update.records, key)
            )
            row = (f"`{name}`", f"`{update.records}`", positional or "-", lists or "-")
            sets.setdefault(row, []).append(version)
    head = (
        "captured call",
        "recorded as",
        "keys for positional arguments",
        "keyword-only lists of numbers",
        "sets",
    )
    rows = ([*row, ", ".join(found)] for row, found in sorted(sets.items()))
    return "## What `NPUGraph.update` can change\n\n" + _table(head, rows)


def _is_host_list(version: str, operator: str, argument: str) -> bool:
    """Whether an argument is a list of numbers, such as lengths: what is fixed in a captured launch."""
    arguments = reader.schema(version, operator).parsed.arguments
    types = {a.name: reader.type_as_written(a.real_type) for a in arguments}
    return types[argument].removesuffix("?") in ("int[]", "SymInt[]")


def main(arguments: list[str] | None = None) -> int:
    """The command; exit code 2 for an unknown operator or a document without the marks."""
    parser = argparse.ArgumentParser(
        prog="python -m atbx.kernels.ascend.schemas.compare", description=__doc__
    )
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="print the schemas of these instead")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the computed part of a document")
    options = parser.parse_args(arguments)
    try:
        for operator in options.operators:
            _print_schemas(operator)
        if options.write is not None:
            options.write.write_text(with_computed_part(options.write.read_text(), str(options.write)))
        elif not options.operators:
            print(document(), end="")
    except AtbxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _print_schemas(operator: str) -> None:
    """Each schema of an operator once, with the sets that have it; OptionError if none has."""
    held = reader.in_versions(operator)
    if not held:
        raise OptionError(
            "no release has this operator", expected="such as npu::npu_rms_norm", found=operator
        )
    texts: dict[str, list[str]] = {}
    for version in held:
        for overload in reader.overloads(version, operator):
            texts.setdefault(overload.text, []).append(version)
    for text, sets in texts.items():
        print(f"{', '.join(sets)}:\n  {text}")


if __name__ == "__main__":
    sys.exit(main())
