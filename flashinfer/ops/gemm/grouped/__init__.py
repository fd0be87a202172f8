"""Grouped GEMM: the rows of each group times that group's weight, with scales or without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, Variant
from flashinfer.ops.gemm import hopper
from flashinfer.ops.gemm.grouped import config


@dataclass(frozen=True)
class Problem:
    """out[r] = alpha * a[r] @ b[w].T with dequantized operands, for each row r of a group with the weight w.

    Arguments of every variant's `run(problem, config, a, b, a_scale, b_scale, alpha, out, groups, weights)`:

    - a [M, .], or [groups, M, .] if `kind` is "counts"; b [weights, N, .], or [weights, K, N] if `columns_first`.
      out [M, N] or [groups, M, N]. Rows contiguous, the other strides any; e2m1 is uint8, two elements a byte.
    - groups: its meaning is `kind`'s. weights: the number of each group's weight, or None for the group's own number.
    - a_scale, b_scale: None without scales. With "fp32" float32 with any strides, [.., ceil(M / rows), ceil(K /
    width)],
      batched as a is, and [weights, ceil(N / columns), ceil(K / width)]. Else uint8 factors, flat in 128x4 tiles: a's
      together, or [groups, .] if `kind` is "counts"; b's [weights, .].
    - alpha: float32 [1] or [groups], or None.

    Rows in no group, and those of a weight that does not exist, are not written.

    Attributes
    ----------
    kind : str
        "offsets": group g has rows groups[g] to groups[g + 1] - 1. "lengths": group g has groups[g] rows, after those
        of group g - 1. "counts": group g has the first groups[g] rows of batch entry g. "indices": row r is in group
        groups[r].
    index : str
        Dtype of `groups`: "i32" or "i64".
    a, b : str
        Number formats: "bf16", "fp16", "fp8e4nv", "fp8e5" or "e2m1".
    scale : str
        Format of the scales: "" for none, "fp32", or factors in "ue8m0" or "ue4m3".
    width : int
        Elements of K that share a scale.
    out : str
        Dtype of the result: "bf16", "fp16" or "fp32".
    tokens : int
        Average rows of a group, rounded up to 16, 32, 64 or 128; 256 for more.
    rows, columns : int
        Rows of a, and of b, that share a scale of "fp32".
    alpha : str
        "" for none, "one", or "groups": one for each group.
    weights : str
        Dtype of `weights`, "" where there are none.
    padded : bool
        The factors of each group's rows begin a new 128x4 tile: those of group g are at row
        (groups[g] + 127 g) // 128 * 128.
    columns_first : bool
        b[w] is [K, N].
    aligned : bool
        Rows of a and b can be read, and those of out written, 16 bytes at a time, factors 4 at a time; their lengths
        are multiples of that too, and N of 8.
    whole : bool
        K is a multiple of 128.
    """

    kind: str
    a: str
    b: str
    scale: str
    width: int
    out: str
    tokens: int
    index: str = "i32"
    rows: int = 1
    columns: int = 1
    alpha: str = ""
    weights: str = ""
    padded: bool = False
    columns_first: bool = False
    aligned: bool = True
    whole: bool = True


def _catalog() -> Iterator[Problem]:
    groupwise = dict(scale="fp32", width=128, columns=128)
    yield Problem("indices", "fp8e4nv", "fp8e4nv", out="bf16", tokens=256, **groupwise)
    yield Problem("offsets", "fp8e4nv", "fp8e4nv", out="bf16", tokens=256, **groupwise)
    yield Problem("counts", "fp8e5", "fp8e5", out="fp16", tokens=64, **groupwise)
    yield Problem("counts", "fp8e4nv", "fp8e5", out="fp32", tokens=32, rows=128, aligned=False, **groupwise)
    yield Problem("offsets", "fp8e4nv", "e2m1", "ue8m0", 32, "bf16", 64, padded=True)
    yield Problem("offsets", "e2m1", "e2m1", "ue4m3", 16, "bf16", 128, alpha="groups", padded=True)
    yield Problem("counts", "e2m1", "e2m1", "ue4m3", 16, "bf16", 64, alpha="groups")
    yield Problem("lengths", "fp16", "fp16", "", 1, "fp16", 256, "i64", weights="i64", columns_first=True, whole=False)
    yield Problem("lengths", "fp8e4nv", "fp8e4nv", "", 1, "bf16", 64, "i64", columns_first=True)


grouped = Op(
    "gemm_grouped",
    Problem,
    (
        Variant("sm90", "flashinfer.ops.gemm.grouped.sm90", hopper.refuses_grouped, hopper.sm90_grouped),
        Variant("portable", "flashinfer.ops.gemm.grouped.portable", config=config.portable),
        Variant("reference", "flashinfer.ops.gemm.grouped.reference"),
    ),
    _catalog,
)
