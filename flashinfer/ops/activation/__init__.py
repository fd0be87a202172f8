"""Gated activations: the first half of a row through SiLU or GELU, times the second half."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.activation import config

KINDS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class Problem:
    """act(x[:, :hidden]) * x[:, hidden:].

    Attributes
    ----------
    kind : str
        One of KINDS.
    dtype : str
        Of the input and the result.
    block : int
        hidden rounded up to a power of two, at most 1024. hidden itself is a run-time argument.
    aligned : bool
        Both halves of a row, and the result's rows, can be read 16 bytes at a time.
    """

    kind: str
    dtype: str
    block: int = 1024
    aligned: bool = True


def _catalog() -> Iterator[Problem]:
    for kind in KINDS:
        for dtype in ("bf16", "fp16"):
            yield Problem(kind, dtype)
    yield Problem("silu", "fp32", aligned=False)
    yield Problem("gelu_tanh", "bf16", block=64)


act_and_mul = Op(
    "act_and_mul",
    Problem,
    (
        Variant("portable", "flashinfer.ops.activation.portable", config=config.portable),
        Variant("reference", "flashinfer.ops.activation.reference"),
    ),
    _catalog,
)
