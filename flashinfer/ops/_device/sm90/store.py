"""How a warpgroup's tile is written: scaled, rounded, 16-bit types through shared memory so that rows are whole."""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops._device.sm90.mma import ROWS, halves


@gluon.jit
def make_staging(OUT: gl.constexpr, WIDTH: gl.constexpr):
    """Where results of 16 bits pass, for each warpgroup, WIDTH columns at a time; next to nothing for others."""
    HIGH: gl.constexpr = ROWS if OUT.primitive_bitwidth < 32 else 8
    WIDE: gl.constexpr = WIDTH if OUT.primitive_bitwidth < 32 else 16
    return gl.allocate_shared_memory(
        OUT, [2, HIGH, WIDE], gl.NVMMASharedLayout.get_default_for([HIGH, WIDE], OUT)
    )  # fmt: skip


@gluon.jit
def by_rows(result, stage):
    """16 bits: in a layout where the threads of a warp have whole rows, through shared memory. Others as they are."""
    if result.dtype.primitive_bitwidth < 32:
        WIDTH: gl.constexpr = result.shape[1]
        stage.store(result)
        result = stage.load(gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0]))
    return result


@gluon.jit
def _write_columns(acc, factor, stage, out, bias, row, column, M, N, row_stride, BIAS: gl.constexpr):
    """Scale, add the bias, round, and write one part of a tile: through shared memory, so that whole rows are written.

    float32 goes as it is: two neighbours in a thread make whole sectors.
    """
    OUT: gl.constexpr = out.dtype.element_ty
    WIDTH: gl.constexpr = acc.shape[1]
    acc *= factor
    if BIAS:
        own = column + gl.arange(0, WIDTH, gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias + own, mask=own < N, other=0.0).to(gl.float32)[None, :]
    result = by_rows(acc.to(OUT), stage)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, result.type.layout))
    cols = column + gl.arange(0, WIDTH, gl.SliceLayout(0, result.type.layout))
    at = out + rows.to(gl.int64)[:, None] * row_stride + cols[None, :]
    gl.store(at, result, mask=(rows < M)[:, None] & (cols < N)[None, :])


@gluon.jit
def write_tile(acc, factor, stage, out, bias, row, column, M, N, row_stride, BIAS: gl.constexpr):
    """_write_columns of a warpgroup's tile: as many columns at a time as `stage` holds."""
    if acc.shape[1] > (stage.shape[1] if out.dtype.element_ty.primitive_bitwidth < 32 else 128):
        left, right = halves(acc)
        write_tile(left, factor, stage, out, bias, row, column, M, N, row_stride, BIAS)
        write_tile(right, factor, stage, out, bias, row, column + left.shape[1], M, N, row_stride, BIAS)
    else:
        _write_columns(acc, factor, stage, out, bias, row, column, M, N, row_stride, BIAS)
