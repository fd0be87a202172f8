"""Writes a warpgroup's tile: scales and rounds it; 16-bit types pass through shared memory to write whole rows."""

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer.ops._device.sm90.mma import ROWS, halves


@gluon.jit
def make_staging(OUT: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory through which 16-bit results pass, WIDTH columns at a time for each warpgroup. Other dtypes do not
    use it and get the smallest buffer."""
    HIGH: gl.constexpr = ROWS if OUT.primitive_bitwidth < 32 else 8
    WIDE: gl.constexpr = WIDTH if OUT.primitive_bitwidth < 32 else 16
    return gl.allocate_shared_memory(
        OUT, [2, HIGH, WIDE], gl.NVMMASharedLayout.get_default_for([HIGH, WIDE], OUT)
    )  # fmt: skip


@gluon.jit
def by_rows(result, stage):
    """A 16-bit `result` in a layout where a warp's threads have whole rows, by way of shared memory `stage`; another
    dtype unchanged."""
    if result.dtype.primitive_bitwidth < 32:
        WIDTH: gl.constexpr = result.shape[1]
        stage.store(result)
        result = stage.load(gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0]))
    return result


@gluon.jit
def _write_columns(acc, factor, stage, out, bias, row, column, M, N, row_stride, BIAS: gl.constexpr):
    """Scale, add the bias, round, and write the columns of a tile from `column` on.

    float32 needs no shared memory: the accumulator layout already fills whole 32-byte sectors.
    """
    OUT: gl.constexpr = out.dtype.element_ty
    WIDTH: gl.constexpr = acc.shape[1]
    acc *= factor
    if BIAS:
        bias_column = column + gl.arange(0, WIDTH, gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias + bias_column, mask=bias_column < N, other=0.0).to(gl.float32)[None, :]
    result = by_rows(acc.to(OUT), stage)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, result.type.layout))
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, result.type.layout))
    at = out + rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
    gl.store(at, result, mask=(rows < M)[:, None] & (columns < N)[None, :])


@gluon.jit
def write_tile(acc, factor, stage, out, bias, row, column, M, N, row_stride, BIAS: gl.constexpr):
    """_write_columns for a warpgroup's whole tile, as many columns at a time as `stage` holds."""
    if acc.shape[1] > (stage.shape[1] if out.dtype.element_ty.primitive_bitwidth < 32 else 128):
        left, right = halves(acc)
        write_tile(left, factor, stage, out, bias, row, column, M, N, row_stride, BIAS)
        write_tile(right, factor, stage, out, bias, row, column + left.shape[1], M, N, row_stride, BIAS)
    else:
        _write_columns(acc, factor, stage, out, bias, row, column, M, N, row_stride, BIAS)
