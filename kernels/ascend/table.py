"""The whole capability table: every row, in the order in which dispatch prefers them."""

from __future__ import annotations

from atbx.kernels.ascend import attention, cache_write, gated, linear, lookup, norms, sampling, stock
from atbx.kernels.ascend.attention import LENGTHS, MASKED, fused_infer_rows
from atbx.kernels.ascend.capability import Capability

FORMS = ("update", "mask")
"""How attention is told lengths in a graph: host lists, updated before a replay; or a mask that is uploaded."""


def rows(lengths: str = "update") -> tuple[Capability, ...]:
    """Every row; FIA with lengths in the form asked for."""
    fused = fused_infer_rows(LENGTHS, "") if lengths == "update" else fused_infer_rows(MASKED, "_masked")
    return (
        *linear.ROWS,
        *lookup.ROWS,
        *norms.ROWS,
        *cache_write.ROWS,
        *fused,
        *attention.ROWS,
        *gated.ROWS,
        *sampling.ROWS,
        *stock.ROWS,
    )
