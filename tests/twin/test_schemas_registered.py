"""The data file of a torch_npu release against what that release registers when it is really imported.

Needs an importable torch_npu: on the software device, or on a machine with CANN.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
import torch

from atbx.kernels.ascend import schemas

# Without CANN or a stand-in for it the import fails on a missing library, which is an ImportError.
torch_npu = pytest.importorskip("torch_npu", exc_type=ImportError)
VERSION = torch_npu.__version__.split("+")[0]
pytestmark = pytest.mark.skipif(VERSION not in schemas.releases(), reason=f"torch_npu {VERSION} was not read")


@pytest.fixture(scope="module")
def registered() -> dict[str, torch._C.FunctionSchema]:
    """Schemas of npu:: and atb:: in the dispatcher, by qualified name; the ATB library is loaded first."""
    torch.ops.load_library(str(Path(torch_npu.__file__).parent / "lib/libop_plugin_atb.so"))
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith(("npu::", "atb::")):
            found[schema.name + (f".{schema.overload_name}" if schema.overload_name else "")] = schema
    return found


def test_the_data_file_names_every_registered_operator_and_no_other(
    registered: dict[str, torch._C.FunctionSchema],
) -> None:
    held = {operator.name for operator in schemas.operators(VERSION)}
    # Only what the release registers itself: other packages (ours too) may add to its namespaces.
    ours = {name for name in registered if name.split("::")[1].startswith("atbx")}
    assert set(registered) - ours == held
    assert len(held) > 300


def test_every_schema_is_the_registered_one(registered: dict[str, torch._C.FunctionSchema]) -> None:
    for operator in schemas.operators(VERSION):
        assert str(operator.parsed) == str(registered[operator.name])


def test_meta_functions_are_those_of_the_dispatcher(registered: dict[str, torch._C.FunctionSchema]) -> None:
    for operator in schemas.operators(VERSION):
        found = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name, "Meta")
        assert operator.meta == found, operator.name


def test_graph_updates_are_those_of_the_handlers() -> None:
    handlers = pytest.importorskip("torch_npu.npu._npugraph_handlers.npugraph_handler")._NPU_GRAPH_OP_HANDLERS
    names = {name.split("::")[1] for name in schemas.graph_update_operators(VERSION)}
    assert names == {name for name in handlers if "." in name}
    for operator in schemas.graph_update_operators(VERSION):
        update = schemas.graph_update(VERSION, operator)
        assert update is not None
        dispatch_name = operator.split("::")[1]
        stated = {key: place for _, place, key in handlers[dispatch_name].get_update_specs(dispatch_name)}
        arguments = schemas.schema(VERSION, update.records).parsed.arguments
        usable = {key: place for key, place in stated.items() if not arguments[place].kwarg_only}
        assert dict(update.positional) == usable
        # A stated place is really that argument of the recorded overload, used or not.
        for key, place in usable.items():
            assert arguments[place].name == key
