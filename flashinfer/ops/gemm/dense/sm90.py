"""Dense GEMM on Hopper: builds and launches the kernel of `sm90_kernel.py`."""

from __future__ import annotations

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops.gemm.dense.sm90_kernel import dense_sm90_kernel
from flashinfer.ops.gemm.slices import scratch


def _boxes(p, c) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The TMA boxes of A and of B."""
    columns = c.block_n if c.block_m > 64 else c.block_n // 2
    b = {"k": (1, columns, c.block_k), "n": (1, c.block_k, columns), "blocks": (1, columns // 32, 8, 4, c.block_k)}
    return (1, c.box, c.block_k), b[p.b_major]


def build(p, c) -> Build:
    a_box, b_box = _boxes(p, c)
    types = dict(
        a_map=tensordesc(p.a, a_box), b_map=tensordesc(p.b, b_box), out=f"*{p.out}:16", bias=f"*{p.bias or p.out}",
        a_scale="*fp32", b_scale="*fp32", partial="*fp32:16", arrived="*i32", M="i32", N="i32:4", K="i32",
        batch="i32", slices="i32", out_entry="i64:4", out_row="i64:4",
    )  # fmt: skip
    constants = dict(
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, STAGES=c.stages, BOX=c.box, GROUP=c.group,
        REGISTERS=c.registers, COPY_REGISTERS=c.copy_registers, B_MAJOR=p.b_major, SPLIT=p.split,
        SCALES=p.scales, BIAS=bool(p.bias),
    )  # fmt: skip
    if p.out != "fp32":
        types.update(N="i32:8", out_entry="i64:8", out_row="i64:8")
    return Build(dense_sm90_kernel, types, constants, num_warps=4)


dense_sm90 = Launcher("dense_sm90", build)


def run(p, c, x) -> None:
    device, (batch, m, n) = x.out.device, x.out.shape
    tiles = batch * -(-m // c.block_m) * -(-n // c.block_n)
    partial = arrived = None
    if p.split:
        partial, arrived = scratch(device, tiles * x.slices * c.block_m * c.block_n, 2 * tiles)
    a_box, b_box = _boxes(p, c)
    grid = (min(target_of(device).sms, tiles * x.slices), 1, 1)
    dense_sm90(
        p, c, grid, TensorMap(x.a, a_box), TensorMap(_by_box(p, x.b), b_box), x.out, x.bias, x.a_scale, x.b_scale,
        partial, arrived, m, n, x.a.shape[2], batch, x.slices, *x.out.stride()[:2],
    )  # fmt: skip


def _by_box(p, b):
    """The view of B that its tensor map describes; the view of a shuffled B has rows in the order of n."""
    if p.b_major == "blocks":
        return b.unflatten(1, (-1, 4, 8)).transpose(2, 3)
    return b.mT if p.b_major == "k" else b


IMPLEMENTATION = Implementation(run, (dense_sm90,))
