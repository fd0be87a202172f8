"""Dense GEMM in Triton, out = A B * scales + bias: a program computes one tile of the result, or one K slice of it.

Grid: (tiles of the result, K slices, batch). Warps: all share a tile. Shared memory: operand tiles of Triton's software
pipeline.
Inputs: a [batch, m, k], b [batch, k, n] in any strides, bias [n], a_scale and b_scale float32 [1].
Outputs: out [batch, m, n]; with K slices partial float32 [tiles, slices, BLOCK_M, BLOCK_N], added by the last slice's
program.
Method: split K by atomic counters (`flashinfer/ops/gemm/slices.py`).
"""

import torch
import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.formats import from_fp8
from flashinfer.ops._device.rows import multiple, pointer, unit
from flashinfer.ops.gemm.slices import scratch


@triton.jit
def _offsets(outer, inner, outer_stride, inner_stride, ALONG: tl.constexpr, UNIT: tl.constexpr):
    """int64 offsets of elements (outer, inner). ALONG names the index with stride 1: 0 outer, 1 inner, -1 neither. UNIT
    divides the other stride."""
    if ALONG == 0:
        return outer.to(tl.int64)[:, None] + inner.to(tl.int64)[None, :] * multiple(inner_stride, UNIT)
    elif ALONG == 1:
        return outer.to(tl.int64)[:, None] * multiple(outer_stride, UNIT) + inner.to(tl.int64)[None, :]
    return outer.to(tl.int64)[:, None] * outer_stride + inner.to(tl.int64)[None, :] * inner_stride


@triton.jit
def _operand(x, FP8: tl.constexpr, CAPABILITY: tl.constexpr):
    """An operand of tl.dot: x unchanged, or, where FP8 names the format of the bytes x, as float16, which is exact."""
    if FP8 != "":
        x = from_fp8(x, FP8, CAPABILITY).to(tl.float16)
    return x


@triton.jit
def add_slices(acc, partial, arrived, slot, index, slices):
    """Store a K slice's sums. The program that stores the last of a tile's slices gets (True, the sum of all slices in
    order), the others (False, acc).

    `slot` is the tile's index in `partial` [slots, slices, rows, columns] and in `arrived` [slots], the counters, which
    are 0 before and after.
    """
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    at = partial + slot.to(tl.int64) * slices * (M * N)
    at += tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(at + index * (M * N), acc)
    # The barrier orders the stores of all threads before the atomic of one thread. The atomic releases them, and
    # acquires what the atomics of the other slices released.
    tl.debug_barrier()
    last = tl.atomic_add(arrived + slot, 1, sem="acq_rel") == slices - 1
    if last:
        tl.store(arrived + slot, 0)
        acc = tl.zeros([M, N], tl.float32)
        for i in range(slices):
            acc += tl.load(at + i * (M * N))
    return last, acc


@triton.jit
def _products(
    a, b, entry, M, N, K, begin, end, first_row, first_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CAPABILITY: tl.constexpr,
):  # fmt: skip
    """The sums of a tile of batch entry `entry` over blocks `begin` to `end` of K."""
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    K = multiple(K, a.UNIT if a.ALONG == 1 else 1)
    M = multiple(M, a.UNIT if a.ALONG == 0 else 1)
    N = multiple(N, b.UNIT if b.ALONG == 1 else 1)
    at_a = a.rows + entry * multiple(a.entry, a.UNIT)
    at_a += _offsets(rows, begin * BLOCK_K + ks, a.row, a.k, a.ALONG, a.UNIT)
    a_step = BLOCK_K * (1 if a.ALONG == 1 else multiple(a.k, a.UNIT))
    at_b = b.columns + entry * multiple(b.entry, b.UNIT)
    if b.BLOCKS:
        # shuffle_matrix_a: row 4 j + i of each 32 rows is stored as row 8 i + j.
        stored = columns // 32 * 32 + columns % 4 * 8 + columns % 32 // 4
        at_b += begin.to(tl.int64) * multiple(b.k, b.UNIT) + ks[:, None] + stored[None, :] * BLOCK_K
        b_step = multiple(b.k, b.UNIT)
    else:
        at_b += _offsets(begin * BLOCK_K + ks, columns, b.k, b.column, b.ALONG, b.UNIT)
        b_step = BLOCK_K * (1 if b.ALONG == 0 else multiple(b.k, b.UNIT))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(begin, end):
        left = K - block * BLOCK_K
        x = tl.load(at_a, (rows < M)[:, None] & (ks < left)[None, :], other=0.0)
        y = tl.load(at_b, (ks < left)[:, None] & (columns < N)[None, :], other=0.0)
        acc = tl.dot(_operand(x, a.FP8, CAPABILITY), _operand(y, b.FP8, CAPABILITY), acc)
        at_a += a_step
        at_b += b_step
    return acc


@triton.jit
def _write(
    acc, out, entry, bias, a_scale, b_scale, M, N, first_row, first_column, SCALES: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Scale a tile of batch entry `entry`, add the bias, round and store."""
    if SCALES > 0:
        acc *= tl.load(a_scale)
    if SCALES > 1:
        acc *= tl.load(b_scale)
    rows = first_row + tl.arange(0, acc.shape[0])
    columns = first_column + tl.arange(0, acc.shape[1])
    N = multiple(N, out.UNIT)
    if BIAS:
        acc += tl.load(bias + columns, columns < N, other=0).to(tl.float32)[None, :]
    ALONG: tl.constexpr = 1 if out.UNIT > 1 else -1
    to = out.rows + entry * multiple(out.entry, out.UNIT)
    to += _offsets(rows, columns, out.row, out.column, ALONG, out.UNIT)
    tl.store(to, acc.to(out.rows.dtype.element_ty), (rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def dense_kernel(
    a, b, out, bias, a_scale, b_scale, partial, arrived, M, N, K, slices,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    CAPABILITY: tl.constexpr, SPLIT: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, slices, batch). With SPLIT, `partial` has room for each slice's sums; `arrived` has counters, 0."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    index = tl.program_id(1)
    entry = tl.program_id(2)
    strip = GROUP * tiles_n
    first = tile // strip * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    first_row = (first + tile % strip % height) * BLOCK_M
    first_column = tile % strip // height * BLOCK_N
    steps = tl.cdiv(K, BLOCK_K)
    begin = index * steps // slices
    end = (index + 1) * steps // slices

    wide = entry.to(tl.int64)
    acc = _products(
        a, b, wide, M, N, K, begin, end, first_row, first_column, BLOCK_M, BLOCK_N, BLOCK_K, CAPABILITY
    )  # fmt: skip
    last = True
    if SPLIT:
        last, acc = add_slices(acc, partial, arrived, entry * tiles_m * tiles_n + tile, index, slices)
    if last:
        _write(acc, out, wide, bias, a_scale, b_scale, M, N, first_row, first_column, SCALES, BIAS)


def _by_bytes(p, c) -> bool:
    """Whether FP8 is read as bytes and multiplied as float16: before compute capability 8.9, and for two different
    formats, which tl.dot does not take."""
    return p.a.startswith("fp8") and (c.capability < 89 or p.a != p.b)


def build(p, c) -> Build:
    by_bytes = _by_bytes(p, c)
    a, b = ("u8", "u8") if by_bytes else (p.a, p.b)
    types = {
        "a.rows": pointer(a, bool(p.a_major)),
        **dict.fromkeys(("a.entry", "a.row", "a.k"), "i64"),
        "b.columns": pointer(b, bool(p.b_major)),
        **dict.fromkeys(("b.entry", "b.k", "b.column"), "i64"),
        "out.rows": pointer(p.out, bool(p.out_major)),
        **dict.fromkeys(("out.entry", "out.row", "out.column"), "i64"),
        "bias": f"*{p.bias or p.out}",
        "a_scale": "*fp32",
        "b_scale": "*fp32",
        "partial": "*fp32:16",
        "arrived": "*i32",
        **dict.fromkeys(("M", "N", "K", "slices"), "i32"),
    }
    constants = {
        "a.ALONG": {"m": 0, "k": 1, "": -1}[p.a_major],
        "a.UNIT": unit(p.a, bool(p.a_major)),
        "a.FP8": p.a if by_bytes else "",
        "b.ALONG": {"k": 0, "n": 1, "": -1, "blocks": -1}[p.b_major],
        "b.UNIT": unit(p.b, bool(p.b_major)),
        "b.FP8": p.b if by_bytes else "",
        "b.BLOCKS": p.b_major == "blocks",
        "out.UNIT": unit(p.out, bool(p.out_major)),
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "GROUP": c.group,
        "CAPABILITY": c.capability,
        "SPLIT": p.split,
        "SCALES": p.scales,
        "BIAS": bool(p.bias),
    }
    return Build(dense_kernel, types, constants, num_warps=c.num_warps, num_stages=c.stages)


launch = Launcher("dense_gemm", build)


def run(p, c, x) -> None:
    batch, m, n = x.out.shape
    tiles = -(-m // c.block_m) * -(-n // c.block_n)
    partial = arrived = None
    if p.split:
        partial, arrived = scratch(x.out.device, batch * tiles * x.slices * c.block_m * c.block_n, batch * tiles)
    a, b = (t.view(torch.uint8) for t in (x.a, x.b)) if _by_bytes(p, c) else (x.a, x.b)
    b_strides = (0, b.stride(0), b.stride(1)) if p.b_major == "blocks" else b.stride()
    launch(
        p, c, (tiles, x.slices, batch), a, *a.stride(), b, *b_strides, x.out, *x.out.stride(), x.bias, x.a_scale,
        x.b_scale, partial, arrived, m, n, a.shape[2], x.slices,
    )  # fmt: skip


IMPLEMENTATION = Implementation(run, (launch,))
