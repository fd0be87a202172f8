"""A Gluon kernel with everything the Hopper kernels build on, small enough to compile in a test."""

from dataclasses import dataclass

from flashinfer._core.gluon_compat import (
    block_barrier, fence_async_shared, gl, gluon, mbarrier, tensordesc, tma_load, tma_store, tma_store_wait,
    warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait,
)  # fmt: skip
from flashinfer._core.launch import Build, Launcher


@dataclass(frozen=True)
class Problem:
    dtype: str = "bf16"


@dataclass(frozen=True)
class Config:
    rows: int = 64
    columns: int = 64
    depth: int = 128


@gluon.jit
def load_role(a, b, a_tile, b_tile, ready, bytes: gl.constexpr):
    mbarrier.expect(ready, bytes)
    tma_load(a, [0, 0], ready, a_tile)
    tma_load(b, [0, 0], ready, b_tile)


@gluon.jit
def math_role(c, a_tile, b_tile, c_tile, ready, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    mbarrier.wait(ready, 0)
    total = warpgroup_mma_init(gl.zeros([ROWS, COLUMNS], gl.float32, layout))
    total = warpgroup_mma(a_tile, b_tile.permute([1, 0]), total, is_async=True)
    total = warpgroup_mma_wait(0, [total])
    c_tile.store(total.to(c.dtype))
    fence_async_shared()
    block_barrier()
    tma_store(c, [0, 0], c_tile)
    tma_store_wait(0)


@gluon.jit
def product_kernel(a, b, c, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr):
    """c = a @ b^T for one tile: a loading warp, a computing warpgroup, and a store by the copy engine."""
    a_tile = gl.allocate_shared_memory(a.dtype, [ROWS, DEPTH], a.layout)
    b_tile = gl.allocate_shared_memory(b.dtype, [COLUMNS, DEPTH], b.layout)
    c_tile = gl.allocate_shared_memory(c.dtype, [ROWS, COLUMNS], c.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (math_role, (c, a_tile, b_tile, c_tile, ready, ROWS, COLUMNS)),
            (load_role, (a, b, a_tile, b_tile, ready, (ROWS + COLUMNS) * DEPTH * 2)),
        ],
        [1],
        [24],
    )
    mbarrier.invalidate(ready)


def build(problem, config):
    a, b = (config.rows, config.depth), (config.columns, config.depth)
    shapes = {"a": a, "b": b, "c": (config.rows, config.columns)}
    types = {name: tensordesc(problem.dtype, shape) for name, shape in shapes.items()}
    return Build(
        product_kernel, types, {"ROWS": config.rows, "COLUMNS": config.columns, "DEPTH": config.depth}, num_stages=1
    )


product = Launcher("product", build)
