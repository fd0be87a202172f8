"""Tiles, stages and warps of the experts' products."""

from __future__ import annotations

from dataclasses import dataclass

_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp8": 8, "fp8_block": 8, "mxfp8": 8}
_FP8 = ("fp8", "fp8_block")
# Rows of the Hopper kernel's tiles: two warpgroups' wgmma.
SM90_TILE = 128
# Rows that experts have on average from which on that kernel pays. H100, whole layers: with 1024 (Mixtral) bfloat16
# gains 14 %, FP8 30 %; with 256 (Qwen3-30B) bfloat16 nothing, FP8 25 %; with 128 bfloat16 loses 5 (Mixtral) and 40 %
# (DeepSeek-V3, a share of 256), FP8 gains 8 and loses 20 %.
_FULL = {"bf16": 512, "fp16": 512, "fp8": 192, "fp8_block": 192}


@dataclass(frozen=True)
class Config:
    """tile_n, tile_k : rows of the weights, and elements of each, that a program multiplies at once.

    group : tiles of rows that share a strip of weights in L2. swap : the weights are the first operand of the product.
    compute : dtype of the operands. capability : of the chip, ten times.
    """

    tile_n: int
    tile_k: int
    group: int
    swap: bool
    compute: str
    capability: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Sm90Config:
    """How the Hopper kernel is cut: tiles of 128 rows and 256 columns of weights.

    block_k : elements of K of a stage. stages : of the ring. group : tiles of rows that share a strip of weights in L2.
    registers, copy_registers : of a thread of the warpgroups that multiply, and of the warps that fill stages.
    gather_rows, gather_words : of a program that puts rows in order, in words of 4 bytes.
    """

    block_k: int
    stages: int
    group: int
    registers: int
    copy_registers: int
    gather_rows: int
    gather_words: int


@dataclass(frozen=True)
class Fragments:
    """How the Hopper kernel of arranged MXFP4 weights is cut.

    groups : warpgroups of a program, with 128 rows of weights each. stages : of 128 elements of K. programs : on a
    multiprocessor. raster : tiles of rows that share a strip of weights in L2. registers, copy_registers : of a thread
    of the second warpgroup, and of the warp that fills stages. maxnreg : of a thread when the kernel begins, 0 for
    ptxas's choice.
    gather_rows, gather_words : of a program that puts rows in order, in words of 4 bytes.
    """

    groups: int
    stages: int
    programs: int
    raster: int
    registers: int
    copy_registers: int
    maxnreg: int
    gather_rows: int = 4
    gather_words: int = 1024


@dataclass(frozen=True)
class Quantize:
    """rows, columns : of a program. capability : of the chip, ten times."""

    rows: int
    columns: int
    capability: int
    num_warps: int


def compute_dtype(problem, capability: int) -> str:
    """The dtype that both operands have exactly."""
    if capability == 0:
        # Triton 3.6's interpreter multiplies bfloat16 wrongly.
        return "fp32"
    if problem.rows in _FP8 and problem.weights in _FP8:
        # e4m3 is exact in float16, for chips without its product.
        return "fp8e4nv" if capability >= 89 else "fp16"
    if problem.rows in ("fp16", "fp32"):
        return problem.rows
    # An element times its scale factor has at most 8 bits of mantissa, but with bfloat16 factors.
    return "bf16"


def product(problem, target) -> Config:
    capability = target.capability
    compute = compute_dtype(problem, capability)
    few_rows = problem.tile < 64
    # wgmma and tcgen05 have at least 64 rows, which few tokens do not fill: the weights' rows do.
    swap = few_rows and capability in (90, 100, 103)
    bits_x, bits_w = _BITS.get(problem.rows, 4), _BITS.get(problem.weights, 4)
    decoded = problem.weights not in _FP8 and bits_w < 16
    if few_rows:
        # Bound by memory: whole lines of each row of the weights a step, and several programs on a multiprocessor,
        # whose loads overlap. H100: bfloat16 in steps of 64 elements is 6 % slower, in strips of 128 rows 0 to 1 %;
        # FP8 in strips of 64 rows 5 %, with a stage more 2 %.
        # More rows of 4-bit integers, or of arranged codes, decoded, spill.
        integers = problem.weights in ("mxint4", "int4")
        narrow = problem.experts == "few" or bits_w == 16 or integers or problem.fragments
        tile_n = 64 if narrow else 128
        # Arranged codes and rows that are decoded, too, spill in steps of 128.
        tile_k = 64 if problem.fragments and bits_x < 16 else 128
        num_warps = 4
        budget = target.smem // (2 if bits_w == 16 else 4)
    else:
        # 128 x 256 of float32 sums are 128 registers in each of 256 threads; H100: 15 % faster than 128 x 128, and
        # 64 x 256 17 % faster than 64 x 128. e4m3 products are summed twice, in steps and whole, for which there are no
        # registers; 64 x 128 of them in 4 warps are 4 % faster than in 8.
        wgmma = capability in (90, 100, 103)
        # Before Ada, e4m3 is decoded in registers, too.
        tile_n = 64 if bits_w == 8 and compute == "fp16" else 128
        if wgmma and compute == "bf16" and not decoded:
            tile_n = 256
        # A step is no less than the elements of a scale factor.
        tile_k = 128 if compute == "fp8e4nv" or problem.weights == "int4" else 64
        num_warps = 4 if wgmma and compute == "fp8e4nv" and problem.tile == 64 else 8
        budget = target.smem - (1 << 10)
    if compute == "fp32":
        tile_n, tile_k = 64, 32 if bits_w >= 16 else 128
    # What is decoded is kept a second time, in the operands' dtype.
    second = (problem.tile + tile_n) * tile_k * 2 if decoded and not few_rows else 0
    stage = (problem.tile * bits_x + tile_n * bits_w) * tile_k // 8
    # wgmma reads a stage while the others are filled; mma.sync has its operands in registers by then.
    buffers = (budget - second) // stage + (0 if swap or capability in (90, 100, 103) else 1)
    num_stages = max(3 if few_rows else 2, min(4, buffers)) if target.smem else 2
    return Config(tile_n, tile_k, 8, swap, compute, capability, num_warps, num_stages)


def is_full(encoding: str, pairs: int, experts: int) -> bool:
    """Whether tiles of 128 rows are worth their padding."""
    return pairs >= _FULL.get(encoding, 0) * experts


def refuses_sm90(problem, target) -> str:
    """Why the Hopper kernel does not take the problem; '' if it does."""
    p = problem
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if p.rows != p.weights or p.rows not in ("bf16", "fp16", "fp8", "fp8_block"):
        return f"rows {p.rows} and weights {p.weights}: it takes bf16, fp16, fp8 and fp8_block for both"
    if p.out not in ("bf16", "fp16", "fp8"):
        return f"a result in {p.out}"
    if p.tile != SM90_TILE:
        return f"tiles of {p.tile} rows: it has {SM90_TILE}"
    if not p.full:
        return "experts of few rows: much of its tiles would be padding"
    if p.paired or p.shuffle or p.block:
        return "weights in groups, shuffled or in blocks: it copies boxes of rows"
    if p.act not in ("", "swiglu") or p.shape:
        return f"activation {p.act!r} with {p.shape!r}: it has swiglu"
    if p.bias or p.weighted or p.channels or p.scale_out == "ratio":
        return "biases, factors of rows or of columns, or ratios"
    if not p.aligned:
        return "operands that cannot be copied in boxes"
    return "" if p.whole else "scale factors of a gate that begin within a tile"


def sm90(problem, target) -> Sm90Config:
    fp8 = problem.rows in _FP8
    # 128 bytes of K: the widest swizzle. 4 stages of 48 KiB beside staged results. Registers: what none of the roles
    # goes beyond; FP8 has one more, which brings scale factors. Rows are put in order at 2.0 to 2.4 TB/s on an H100.
    return Sm90Config(
        block_k=128 if fp8 else 64,
        stages=4,
        group=16,
        registers=224 if fp8 else 240,
        copy_registers=56 if fp8 else 32,
        gather_rows=4,
        gather_words=1024,
    )


def refuses_fragments(problem, target) -> str:
    """Why the Hopper kernel of arranged weights does not take the problem; '' if it does."""
    p = problem
    if not p.fragments:
        return "weights that are not arranged as the operand of wgmma"
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if p.rows != "bf16" or p.out not in ("bf16", "fp16"):
        return f"rows in {p.rows} and a result in {p.out}: it has bf16, and bf16 or fp16"
    if p.weight_layout != "strips":
        return f"scale factors in {p.weight_layout!r}: it has strips"
    if p.act not in ("", "swiglu") or not set(p.shape) <= set("abl"):
        return f"activation {p.act!r} with {p.shape!r}: it has swiglu with tensors"
    if p.scale or p.scale_out or p.channels or p.weighted:
        return "factors of the product or of rows"
    if not p.aligned:
        return "operands that cannot be copied in boxes"
    return "" if p.whole else "halves of gated weights that are not whole tiles"


def fragments(problem, target) -> Fragments:
    # Both products of gpt-oss-120b, H200, us; of a program: warpgroups x programs on a multiprocessor.
    #   tokens, tile   1x3   1x2   1x4   2x1   2x2
    #        8,  16    135   145   139   146   157
    #       64,  16    481   508   506   519   492
    #      512,  32    614   648         652   637
    #     4096,  64         2037        2088
    #     4096, 128                     1868
    # Few rows wait for memory: small programs, whose loads and decoding overlap. With many a decoded weight meets all
    # rows of the tile.
    if problem.tile <= 32:
        return Fragments(groups=1, stages=4, programs=3, raster=8, registers=0, copy_registers=32, maxnreg=80)
    if problem.tile == 64:
        return Fragments(groups=1, stages=3, programs=2, raster=8, registers=0, copy_registers=32, maxnreg=128)
    return Fragments(groups=2, stages=3, programs=1, raster=8, registers=216, copy_registers=32, maxnreg=0)


def quantize(problem, target) -> Quantize:
    # 16 elements a thread; rows between products are short. Where a program reads a row twice it has more of it.
    rows, columns = (2, 1024) if problem.row_scale else (8, 256)
    return Quantize(rows=rows, columns=columns, capability=target.capability, num_warps=4)
