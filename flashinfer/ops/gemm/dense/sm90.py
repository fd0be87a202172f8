"""Dense products on Hopper, in Gluon: what the kernel is compiled for, and how tensors reach it."""

from __future__ import annotations

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops.gemm._device.dense_sm90 import dense_sm90_kernel
from flashinfer.ops.gemm.held import Held, addresses
from flashinfer.ops.gemm.pieces import scratch


def _boxes(p, c) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What one copy brings of A, and of B."""
    columns = c.block_n if c.block_m > 64 else c.block_n // 2
    b = {"k": (1, columns, c.block_k), "n": (1, c.block_k, columns), "blocks": (1, columns // 32, 8, 4, c.block_k)}
    return (1, c.box, c.block_k), b[p.b_major]


def build(p, c) -> Build:
    a_box, b_box = _boxes(p, c)
    types = dict(
        a_map=tensordesc(p.a, a_box), b_map=tensordesc(p.b, b_box), out=f"*{p.out}:16", bias=f"*{p.bias or p.out}",
        a_scale="*fp32", b_scale="*fp32", partial="*fp32:16", arrived="*i32", M="i32", N="i32:4", K="i32",
        batch="i32", pieces="i32", out_entry="i64:4", out_row="i64:4",
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
LAUNCHERS = (dense_sm90,)


_held = Held()


def run(p, c, x) -> None:
    device = x.out.device
    key = p, c, device.index, x.a.shape, x.out.shape, x.a.stride(), x.b.stride(), x.out.stride(), x.pieces
    launch = _held.get(key) or _held.put(key, _hold(p, c, x))
    partial, arrived = _scratch(p, c, x) if p.split else (None, None)
    launch(*addresses(x.a, x.b, x.out, x.bias, x.a_scale, x.b_scale, partial, arrived))


def _tiles(c, x) -> int:
    batch, m, n = x.out.shape
    return batch * -(-m // c.block_m) * -(-n // c.block_n)


def _scratch(p, c, x):
    tiles = _tiles(c, x)
    return scratch(x.out.device, tiles * x.pieces * c.block_m * c.block_n, 2 * tiles)


def _hold(p, c, x):
    """The launch of such tensors, which takes their addresses."""
    device = x.out.device
    batch, m, n = x.out.shape
    a_box, b_box = _boxes(p, c)
    grid = (min(target_of(device).sms, _tiles(c, x) * x.pieces), 1, 1)
    values = (
        TensorMap(x.a, a_box), TensorMap(_by_box(p, x.b), b_box), x.out, None, None, None, None, None, m, n,
        x.a.shape[2], batch, x.pieces, *x.out.stride()[:2],
    )  # fmt: skip
    moving = ("a_map", "b_map", "out", "bias", "a_scale", "b_scale", "partial", "arrived")
    return dense_sm90.prepare(p, c, device).hold(grid, values, moving)


def _by_box(p, b):
    """B as its map has it; shuffled rows in the order of n."""
    if p.b_major == "blocks":
        return b.unflatten(1, (-1, 4, 8)).transpose(2, 3)
    return b.mT if p.b_major == "k" else b
