"""The experts' GEMM of bfloat16 rows and MXFP4 weights on Hopper, in Gluon, with weights arranged as wgmma fragments.

Weights are wgmma's first operand, from registers; rows are the second, from shared memory. A warpgroup has two tiles of
64 rows of weights. Of gated weights these are the factor's rows and the same rows of the gate, so the activation is in
the epilogue. Weights are stored in the order of `fragments.py`: a thread loads its 16 bytes of each tile and decodes
two codes at a time, and the results are in the registers from which wgmma reads them.

Grid: any number of persistent blocks, over tiles of TILE rows of one expert and strips of its weights.
Warps: GROUPS consumer warpgroups, one producer warp that copies boxes of rows and of weights and their scale factors,
STAGES ahead. Shared memory: the ring of rows, codes and factors, and a staging buffer for output.
Inputs: rows [row of the token map, k] by their map, weights as lines of 128 bytes by theirs, their factors, and tiles
of the token map. Outputs: out [row of the token map, n, or n / 2 if GATED].
Method: OCP Microscaling Formats, 2023; docs/rooms/moe-experts.md derives the arrangement.
"""

import torch

from flashinfer._core.gluon_compat import (
    aggregate, block_barrier, cp_async, cp_async_arrive, gl, gluon, tensordesc, tma_load, warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops._device.sm90.ring import Channel, make_channel
from flashinfer.ops._device.sm90.walk import raster
from flashinfer.ops.moe.experts import GATED, Finish, Rows, Weights, extents
from flashinfer.ops.moe.experts.sm90 import gather, gathered

# Rows, and elements of each row, of a tile of weights.
_SIDE = gl.constexpr(64)
# Bytes of a row of the tensor map of the weights, which sees each tile of 2048 bytes as 16 such lines.
_LINE = gl.constexpr(128)
# Elements of K in a stage: two tiles.
_STEP = gl.constexpr(128)

# PTX that decodes one word. $4 is a word of eight codes. $5 and $7 are the factors of the two rows for the first 32
# columns, $9 and $11 for the next 32, each twice in a register. Results $0 ... $3 are two bfloat16 each.
#
# An e2m1 in the sign, the two lowest exponent bits and the highest mantissa bit of a bfloat16 is the value over 2^126.
# The factors are multiplied by 2^62, so that one fma decodes and scales; the accumulators are multiplied by the other
# 2^64, _REST, at the end. Code times factor is exact in bfloat16 from 2^-68 on, and infinite above 2^65.
DECODE = gl.constexpr("""
{
.reg .b32 moved, none;
mov.b32 none, 0x80008000;
and.b32 $0, $4, 0x81C081C0;
shf.r.wrap.b32 moved, $4, $4, 4;
and.b32 $1, moved, 0x81C081C0;
shl.b32 moved, $4, 6;
and.b32 $2, moved, 0x81C081C0;
shr.u32 moved, $4, 6;
and.b32 moved, moved, 0x01000100;
shl.b32 $3, $4, 2;
lop3.b32 $3, $3, 0x80C080C0, moved, 0xEA;
fma.rn.bf16x2 $0, $0, $5, none;
fma.rn.bf16x2 $1, $1, $7, none;
fma.rn.bf16x2 $2, $2, $9, none;
fma.rn.bf16x2 $3, $3, $11, none;
}
""")
_REST = gl.constexpr(float(1 << 64))


@aggregate
class Ring:
    """The ring in shared memory. A stage has two tiles of rows, [2 * STAGES, TILE, 64]; the codes of a left and a right
    strip for each warpgroup, [2 * GROUPS * STAGES, 32, 128] bytes; and the strips' factors, [2 * STAGES, 64 * GROUPS]
    words of the four factors of 128 elements.

    A strip is 64 rows of weights. Of gated weights the left strips are the factor's and the right ones the gate's.
    """

    rows: gl.shared_memory_descriptor
    codes: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    channel: Channel
    GROUPS: gl.constexpr
    GATED: gl.constexpr


@gluon.jit
def _strips(strip, strips, ring: Ring, PART: gl.constexpr):
    """The first left (PART 0) or right (PART 1) strip of 64 rows in the program's strip of the output."""
    if ring.GATED:
        return strip * ring.GROUPS + PART * (strips // 2)
    else:
        return strip * (2 * ring.GROUPS) + PART * ring.GROUPS


@gluon.jit
def _produce(x_map, w_map, scale, tile_expert, sizes, ring: Ring, RASTER: gl.constexpr):
    """Producer warp: copies rows, codes and factors of each tile."""
    tiles, tiles_n, n, steps = sizes
    TILE: gl.constexpr = ring.rows.shape[1]
    WIDE: gl.constexpr = ring.GROUPS * _SIDE
    LAYOUT: gl.constexpr = gl.BlockedLayout([WIDE // 32], [32], [1], [0])
    SIZE: gl.constexpr = TILE * _STEP * 2 + 2 * ring.GROUPS * _SIDE * _STEP // 2
    strips = n // _SIDE
    lines = steps * (_STEP * _SIDE // 2 // _LINE)
    step = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        tile, strip = raster(work, tiles, tiles_n, RASTER)
        expert = gl.load(tile_expert + tile)
        row = tile * TILE
        left = _strips(strip, strips, ring, 0)
        right = _strips(strip, strips, ring, 1)
        # Strips past the last load other data or zeros; their results are not written.
        left_line = (expert * strips + left) * lines
        right_line = (expert * strips + right) * lines
        within = gl.arange(0, WIDE, LAYOUT)
        factors = scale + expert.to(gl.int64) * steps * n
        for block in range(0, steps):
            stage = ring.channel.acquire(step)
            for part in gl.static_range(2):
                at = _strips(strip, strips, ring, part) * _SIDE
                of_block = factors + block.to(gl.int64) * n
                cp_async(ring.factors.index(stage * 2 + part), of_block + at + within, mask=at + within < n)
            # cp_async_arrive keeps the phase incomplete until each thread's copies have arrived. It leaves the number
            # of expected arrivals as it is: the stage expects one, that of `expect` below.
            cp_async_arrive(ring.channel.full.index(stage))
            block_barrier()
            _, full = ring.channel.expect(step, SIZE)
            for part in gl.static_range(2):
                tma_load(x_map, [row, block * _STEP + part * _SIDE], full, ring.rows.index(stage * 2 + part))
            line = block * (_STEP * _SIDE // 2 // _LINE)
            for group in gl.static_range(ring.GROUPS):
                at = (stage * ring.GROUPS + group) * 2
                tma_load(w_map, [left_line + group * lines + line, 0], full, ring.codes.index(at))
                tma_load(w_map, [right_line + group * lines + line, 0], full, ring.codes.index(at + 1))
            step += 1


@gluon.jit
def _words(codes, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Half of a tile's bytes, each thread's own, as [64, 32] in the layout of the wgmma operand: a byte has the row and
    the column of its first code."""
    bytes = codes.slice(HALF * 16, 16, dim=0).load(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
    # warp, row, thread, 16 columns, 8 columns, 8 rows, column
    bytes = bytes.reshape([4, 8, 4, 2, 2, 2, 2]).permute([0, 5, 1, 3, 4, 2, 6]).reshape([64, 32])
    return gl.convert_layout(bytes, LAYOUT, assert_trivial=True)


@gluon.jit
def _factors(words, BLOCK: gl.constexpr):
    """The factors of the BLOCK-th 32 elements of each row, times 2^62, as two equal bfloat16. `words` has four factors
    in ue8m0, of 128 elements."""
    code = (words.to(gl.uint32, bitcast=True) >> (8 * BLOCK)) & 0xFF
    return gl.minimum(code * 0x00800080 + 0x1F001F00, 0x7F807F80)


@gluon.jit
def _weights(codes, words, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """64 elements of K of 64 rows of weights, decoded, as wgmma's first operand."""
    bytes = _words(codes, HALF, LAYOUT)
    first_half = _factors(words, 2 * HALF)[:, None]
    second_half = _factors(words, 2 * HALF + 1)[:, None]
    first_half, bytes = gl.broadcast(first_half, bytes)
    second_half, bytes = gl.broadcast(second_half, bytes)
    first_half, second_half = gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [bytes, first_half, second_half], dtype=(gl.bfloat16,
        gl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip
    wide = gl.join(first_half, second_half).permute([0, 2, 1]).reshape([64, 64])
    return gl.convert_layout(wide, LAYOUT, assert_trivial=True)


@gluon.jit
def _activated(up, gate, finish, expert):
    """SwiGLU with alpha, beta and limit where they are given: gate * sigmoid(alpha * gate) * (up + beta), clamped."""
    if finish.limit is not None:
        limit = gl.load(finish.limit + expert)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        gate = gl.minimum(gate, limit)
    transposed = gate
    if finish.alpha is not None:
        transposed = gate * gl.load(finish.alpha + expert)
    if finish.beta is not None:
        up += gl.load(finish.beta + expert)
    return gate / (1 + gl.exp(-transposed)) * up


@gluon.jit
def _write(y, stage, out, row, end, column, width, out_row):
    """Write a tile [64 columns, rows], transposed through shared memory so that rows of the result are written
    whole."""
    TILE: gl.constexpr = y.shape[1]
    stage.store(y.to(out.dtype.element_ty).permute([1, 0]))
    transposed = stage.load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    rows = row + gl.arange(0, TILE, gl.SliceLayout(1, transposed.type.layout))
    columns = column + gl.arange(0, _SIDE, gl.SliceLayout(0, transposed.type.layout))
    at = out + rows.to(gl.int64)[:, None] * out_row + columns[None, :]
    gl.store(at, transposed, mask=(rows < end)[:, None] & (columns < width)[None, :])


@gluon.jit
def _bias_of(finish, expert, row, n, LAYOUT: gl.constexpr):
    """The bias [64, 1] of 64 rows of weights, zeros past the last."""
    rows = row + gl.arange(0, _SIDE, gl.SliceLayout(1, LAYOUT))
    return gl.load(finish.bias + expert.to(gl.int64) * n + rows, mask=rows < n, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def _consume(
    WG: gl.constexpr, out, finish, tile_expert, tile_end, sizes, out_row, ring: Ring, staging, RASTER: gl.constexpr
):  # fmt: skip
    """Consumer warpgroup WG: multiplies and writes its left and its right strip of each tile."""
    tiles, tiles_n, n, steps = sizes
    TILE: gl.constexpr = ring.rows.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    strips = n // _SIDE
    stores = staging.index(WG)
    step = 0
    for work in range(gl.program_id(0), tiles * tiles_n, gl.num_programs(0)):
        left = gl.zeros([_SIDE, TILE], gl.float32, SUMS)
        right = gl.zeros([_SIDE, TILE], gl.float32, SUMS)
        for block in range(0, steps):
            stage = ring.channel.wait(step)
            codes = (stage * ring.GROUPS + WG) * 2
            left_factors = ring.factors.index(stage * 2).slice(WG * _SIDE, _SIDE).load(gl.SliceLayout(1, WEIGHTS))
            right_factors = ring.factors.index(stage * 2 + 1).slice(WG * _SIDE, _SIDE).load(gl.SliceLayout(1, WEIGHTS))
            for half in gl.static_range(2):
                rows = ring.rows.index(stage * 2 + half).permute([1, 0])
                a = _weights(ring.codes.index(codes), left_factors, half, WEIGHTS)
                left = warpgroup_mma(a, rows, left, is_async=True)
                if TILE >= 64:
                    # Registers suffice for the operands of two products. With more in flight ptxas waits after each.
                    left, right = warpgroup_mma_wait(1, [left, right])
                b = _weights(ring.codes.index(codes + 1), right_factors, half, WEIGHTS)
                right = warpgroup_mma(b, rows, right, is_async=True)
                if TILE >= 64:
                    left, right = warpgroup_mma_wait(1, [left, right])
            left, right = warpgroup_mma_wait(0, [left, right])
            ring.channel.release(step)
            step += 1
        # The tile's coordinates are computed again here: they would take registers during the loop over K.
        tile, strip = raster(work, tiles, tiles_n, RASTER)
        expert = gl.load(tile_expert + tile)
        end = gl.load(tile_end + tile)
        left_row = (_strips(strip, strips, ring, 0) + WG) * _SIDE
        right_row = (_strips(strip, strips, ring, 1) + WG) * _SIDE
        left *= _REST
        right *= _REST
        if finish.bias is not None:
            left += _bias_of(finish, expert, left_row, n, SUMS)
            right += _bias_of(finish, expert, right_row, n, SUMS)
        if ring.GATED:
            y = _activated(left, right, finish, expert)
            _write(y, stores, out, tile * TILE, end, left_row, n // 2, out_row)
        else:
            _write(left, stores, out, tile * TILE, end, left_row, n, out_row)
            _write(right, stores, out, tile * TILE, end, right_row, n, out_row)


@gluon.jit
def product_fragments_kernel(
    x_map, w_map, scale, out, finish, tile_expert, tile_end, tiles, n, k, out_row,
    TILE: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, RASTER: gl.constexpr,
    REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """x_map is of [row, k], rows in the order of the token map; w_map of lines of 128 bytes of arranged weights."""
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, TILE, _SIDE], x_map.layout)
    codes = gl.allocate_shared_memory(gl.uint8, [STAGES * GROUPS * 2, 32, _LINE], w_map.layout)
    factors = gl.allocate_shared_memory(
        gl.int32, [STAGES * 2, GROUPS * _SIDE], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    OUT: gl.constexpr = out.dtype.element_ty
    staging = gl.allocate_shared_memory(
        OUT, [GROUPS, TILE, _SIDE], gl.NVMMASharedLayout.get_default_for([TILE, _SIDE], OUT)
    )  # fmt: skip
    ring = Ring(rows, codes, factors, make_channel(STAGES, 1, GROUPS), GROUPS, GATED)
    strips = n // _SIDE
    STRIPS_EACH: gl.constexpr = GROUPS if GATED else 2 * GROUPS
    tiles_n = gl.cdiv(strips // 2 if GATED else strips, STRIPS_EACH)
    sizes = (gl.load(tiles), tiles_n, n, k // _STEP)
    RASTER_ARG: gl.constexpr = gl.constexpr(RASTER)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), out, finish, tile_expert, tile_end, sizes, out_row, ring, staging,
                RASTER_ARG)), (_consume, (gl.constexpr(1), out, finish, tile_expert, tile_end, sizes, out_row, ring,
                staging, RASTER_ARG)), (_produce, (x_map, w_map, scale, tile_expert, sizes, ring, RASTER_ARG)),
            ],
            [4, 1],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (gl.constexpr(0), out, finish, tile_expert, tile_end, sizes, out_row, ring, staging,
                RASTER_ARG)), (_produce, (x_map, w_map, scale, tile_expert, sizes, ring, RASTER_ARG)),
            ],
            [1],
            [COPY_REGISTERS],
        )  # fmt: skip


def _boxes(p):
    """The TMA boxes of rows and of weights."""
    return (p.tile, 64), (32, 128)


def _build(p, c) -> Build:
    x_box, w_box = _boxes(p)
    types = {
        "x_map": tensordesc("bf16", x_box),
        "w_map": tensordesc("u8", w_box),
        "scale": "*i32:16",
        "out": f"*{p.out}:16",
        "finish.bias": f"*{p.bias}" if p.bias else None,
        **{f"finish.{name}": "*fp32" if name[0] in p.shape else None for name in ("alpha", "beta", "limit")},
        **dict.fromkeys(("tile_expert", "tile_end", "tiles"), "*i32"),
        "n": "i32:64",
        "k": "i32:128",
        "out_row": "i64:16",
    }
    constants = {name: None for name, kind in types.items() if kind is None} | dict(
        TILE=p.tile, GATED=p.act in GATED, GROUPS=c.groups, STAGES=c.stages, RASTER=c.raster, REGISTERS=c.registers,
        COPY_REGISTERS=c.copy_registers,
    )  # fmt: skip
    types = {name: kind for name, kind in types.items() if kind is not None}
    return Build(product_fragments_kernel, types, constants, num_warps=4, maxnreg=c.maxnreg or None)


product_fragments = Launcher("moe_product_fragments", _build)


def kernels(p, c):
    """(launcher, problem, config) of each kernel that may run for a problem, for compiling ahead."""
    yield product_fragments, p, c
    if p.gather:
        yield gather, p, c


def run(p, c, rows: Rows, weights: Weights, finish: Finish, token_map, out) -> None:
    n, k = extents(weights.codes, p.weights, 0)
    x = gathered(p, c, rows, token_map) if p.gather else rows.codes
    lines = weights.codes.view(torch.uint8).view(-1, 128)
    x_box, w_box = _boxes(p)
    vectors = [t for t in (weights.bias, finish.alpha, finish.beta, finish.limit) if t is not None]
    tiles_of_map = (token_map.tile_expert, token_map.tile_end, token_map.tiles)
    product_fragments(
        p, c, (c.programs * target_of(out.device).sms, 1, 1), TensorMap(x, x_box), TensorMap(lines, w_box),
        weights.scale.view(torch.int32), out, *vectors, *tiles_of_map, n, k, out.stride(0),
    )  # fmt: skip


IMPLEMENTATION = Implementation(run, (product_fragments, gather), kernels=kernels)
