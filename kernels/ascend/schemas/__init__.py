"""Operator schemas of the supported torch_npu releases, and the check of calls against them.

The data files were read from the released wheels by `extract`; nothing here imports torch_npu, so a call can be
checked against a release that is not installed and on a machine without an NPU.
"""

from atbx.kernels.ascend.schemas.binding import check_call, check_keywords, kind_of
from atbx.kernels.ascend.schemas.reader import (
    GraphUpdate,
    OperatorSchema,
    graph_update,
    graph_update_operators,
    has_meta,
    in_versions,
    operators,
    overloads,
    releases,
    schema,
    versions,
)

__all__ = [
    "GraphUpdate",
    "OperatorSchema",
    "check_call",
    "check_keywords",
    "graph_update",
    "graph_update_operators",
    "has_meta",
    "in_versions",
    "kind_of",
    "operators",
    "overloads",
    "releases",
    "schema",
    "versions",
]
