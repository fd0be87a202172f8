"""Block-scaled FP8 GEMM on Hopper: builds and launches the kernel of `sm90_kernel.py`."""

from __future__ import annotations

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops.gemm.blockscaled.sm90_kernel import blockscaled_sm90_kernel
from flashinfer.ops.gemm.hopper import boxes, is_wide, may_enlarge, enlarged
from flashinfer.ops.gemm.slices import slices_of, scratch


def build(p, c) -> Build:
    a_box, b_box = boxes(c)
    step = "i64:4" if p.out == "fp32" else "i64:8"
    types = {
        "a_map": tensordesc(p.a, a_box),
        "b_map": tensordesc(p.b, b_box),
        "out.rows": f"*{p.out}:16",
        "out.entry": step,
        "out.row": step,
        "a_scale.at": "*fp32",
        **dict.fromkeys(("a_scale.entry", "a_scale.row", "a_scale.k"), "i64"),
        "b_scale.at": "*fp32",
        **dict.fromkeys(("b_scale.entry", "b_scale.column", "b_scale.k"), "i64"),
        "alpha": "*fp32",
        "partial": "*fp32:16",
        "arrived": "*i32",
        "M": "i32",
        "N": "i32:8",
        **dict.fromkeys(("K", "batch", "slices"), "i32"),
    }
    constants = dict(
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, STAGES=c.stages, UNROLL=c.unroll, BOX=c.box, GROUP=c.group,
        REGISTERS=c.registers, COPY_REGISTERS=c.copy_registers, ROW_BLOCK=p.rows, ALPHA=bool(p.alpha),
    )  # fmt: skip
    return Build(blockscaled_sm90_kernel, types, constants, num_warps=4)


blockscaled_sm90 = Launcher("blockscaled_sm90", build)


def kernels(p, c):
    """(launcher, problem, config) of each kernel that may run for a problem, for compiling ahead."""
    yield blockscaled_sm90, p, c
    if may_enlarge(p, c):
        yield blockscaled_sm90, p, enlarged(c)


def run(p, c, a, b, a_scale, b_scale, alpha, out, slices: int = 0) -> None:
    """slices : the number of K slices; 0 for the number that `slices_of` estimates as fastest."""
    batch, m, n = out.shape
    device, sms = out.device, target_of(out.device).sms
    rows = batch * -(-m // c.block_m)
    if may_enlarge(p, c) and is_wide(rows, n, sms):
        c, slices = enlarged(c), 1
    tiles = rows * -(-n // c.block_n)
    # For few rows, half of the multiprocessors read B as fast as all do: more slices would cost more than they gain.
    workers = sms if c.block_m == 128 else sms // 2
    slices = slices or slices_of(tiles, -(-a.shape[2] // (128 * c.unroll)), workers, end=24.0 / c.unroll)
    partial = arrived = None
    if slices > 1:
        partial, arrived = scratch(device, tiles * slices * c.block_m * c.block_n, 2 * tiles)
    a_box, b_box = boxes(c)
    blockscaled_sm90(
        p, c, (min(sms, tiles * slices), 1, 1), TensorMap(a, a_box), TensorMap(b, b_box), out, *out.stride()[:2],
        a_scale, *a_scale.stride(), b_scale, *b_scale.stride(), alpha, partial, arrived, m, n, a.shape[2], batch,
        slices,
    )  # fmt: skip


IMPLEMENTATION = Implementation(run, (blockscaled_sm90,), kernels=kernels)
