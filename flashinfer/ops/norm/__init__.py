"""Normalisation of rows: RMSNorm, LayerNorm, with residual add and in Gemma's form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.norm import config

LONGEST = 32768


@dataclass(frozen=True)
class Problem:
    """A norm over the last dimension.

    Attributes
    ----------
    kind : str
        "rmsnorm", "fused_add_rmsnorm" or "layernorm".
    dtype, weight_dtype : str
        Of the rows, and of the weight (and bias).
    block : int
        The length of a row, rounded up to a power of two. The length itself is a run-time argument.
    gemma : bool
        The weight is stored minus one.
    aligned : bool
        Rows can be read 16 bytes at a time.
    """

    kind: str
    dtype: str
    weight_dtype: str
    block: int
    gemma: bool = False
    aligned: bool = True


def _too_long(problem: Problem, target) -> str:
    return f"rows longer than {LONGEST} do not fit in registers" if problem.block > LONGEST else ""


_VARIANTS = (
    Variant("portable", "flashinfer.ops.norm.portable", _too_long, config.portable),
    Variant("reference", "flashinfer.ops.norm.reference"),
)


def _catalog(kind: str) -> Iterator[Problem]:
    if kind == "layernorm":
        for block in (1024, 4096, 8192, LONGEST):
            yield Problem(kind, "bf16", "fp32", block)
        return
    for dtype in ("bf16", "fp16"):
        for block in (128, 1024, 2048, 4096, 8192):
            yield Problem(kind, dtype, dtype, block)
    for block in (256, 1024, 2048, 4096, 8192):
        yield Problem(kind, "bf16", "bf16", block, gemma=True)
    yield Problem(kind, "bf16", "bf16", LONGEST)
    yield Problem(kind, "fp32", "fp32", 1024, aligned=False)


rmsnorm = Op("rmsnorm", Problem, _VARIANTS, lambda: _catalog("rmsnorm"))
fused_add_rmsnorm = Op("fused_add_rmsnorm", Problem, _VARIANTS, lambda: _catalog("fused_add_rmsnorm"))
layernorm = Op("layernorm", Problem, _VARIANTS, lambda: _catalog("layernorm"))
