"""Configs of the experts' GEMM, and which problems its Hopper kernels take."""

from __future__ import annotations

from dataclasses import dataclass

_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp8": 8, "fp8_block": 8, "mxfp8": 8}
_FP8 = ("fp8", "fp8_block")
# Rows of the Hopper kernel's tiles: 64 for each of two warpgroups.
SM90_TILE = 128
# Average rows of an expert from which on the Hopper kernel is faster. Whole layers on an H100: with 1024 rows (Mixtral)
# bfloat16 gains 14 % and FP8 30 %; with 256 (Qwen3-30B) bfloat16 gains nothing and FP8 25 %; with 128 bfloat16 loses 5
# % (Mixtral) and 40 % (DeepSeek-V3, one rank's share of 256 experts), and FP8 gains 8 % and loses 20 %.
_FULL = {"bf16": 512, "fp16": 512, "fp8": 192, "fp8_block": 192}


@dataclass(frozen=True)
class Config:
    """tile_n, tile_k : rows of the weights, and elements of K, in a tile.

    group : tiles of rows that use one strip of weights while it is in L2. swap : the weights are the first operand of
    tl.dot. compute : dtype of tl.dot's operands. capability : the compute capability times ten.
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
    """The Hopper kernel, with tiles of 128 rows and 256 columns of weights.

    block_k : elements of K in a stage. stages : stages of the ring. group : tiles of rows that use one strip of weights
    while it is in L2. registers, copy_registers : registers of a thread in the consumer warpgroups and in the producer
    warps. gather_rows, gather_words : rows, and words of 4 bytes of each, of a gather_kernel program.
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
    """The Hopper kernel for arranged MXFP4 weights.

    groups : consumer warpgroups of a program, with 128 rows of weights each. stages : stages of the ring, of 128
    elements of K. programs : resident programs of a multiprocessor. raster : tiles of rows that use one strip of
    weights while it is in L2. registers, copy_registers : registers of a thread in the second warpgroup and in the
    producer warp. maxnreg : registers of a thread at launch, 0 for ptxas's choice. gather_rows, gather_words : rows,
    and words of 4 bytes of each, of a gather_kernel program.
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
    """rows, columns : the tile of a program. capability : the compute capability times ten."""

    rows: int
    columns: int
    capability: int
    num_warps: int


def compute_dtype(problem, capability: int) -> str:
    """A dtype for tl.dot that represents both operands exactly."""
    if capability == 0:
        # Triton 3.6's interpreter multiplies bfloat16 incorrectly.
        return "fp32"
    if problem.rows in _FP8 and problem.weights in _FP8:
        # Chips without FP8 products use float16, which represents e4m3 exactly.
        return "fp8e4nv" if capability >= 89 else "fp16"
    if problem.rows in ("fp16", "fp32"):
        return problem.rows
    # An element times its scale factor has at most 8 significant bits, except mxint4's, which bfloat16 rounds once.
    # int4 is multiplied without its factor.
    return "bf16"


def product(problem, target) -> Config:
    capability = target.capability
    compute = compute_dtype(problem, capability)
    few_rows = problem.tile < 64
    # The first operand of wgmma and tcgen05 has at least 64 rows: few tokens do not fill them, weights do.
    swap = few_rows and capability in (90, 100, 103)
    bits_x, bits_w = _BITS.get(problem.rows, 4), _BITS.get(problem.weights, 4)
    decoded = problem.weights not in _FP8 and bits_w < 16
    if few_rows:
        # Bound by memory: a step loads whole cache lines of each row of the weights, and several programs on a
        # multiprocessor overlap their loads. On an H100 bfloat16 is 6 % slower with a tile_k of 64, and 0 to 1 % with a
        # tile_n of 128; FP8 is 5 % slower with a tile_n of 64, and 2 % with one more stage.
        # A tile_n of 128 spills with 4-bit integers and with arranged codes, which are decoded in registers.
        integers = problem.weights in ("mxint4", "int4")
        narrow = problem.experts == "few" or bits_w == 16 or integers or problem.fragments
        tile_n = 64 if narrow else 128
        # A tile_k of 128 spills where both arranged codes and rows are decoded.
        tile_k = 64 if problem.fragments and bits_x < 16 else 128
        num_warps = 4
        budget = target.smem // (2 if bits_w == 16 else 4)
    else:
        # A float32 accumulator of 128 x 256 takes 128 registers of each of 256 threads. On an H100 it is 15 % faster
        # than 128 x 128, and 64 x 256 is 17 % faster than 64 x 128. e4m3 needs a second accumulator for promotion, for
        # which 256 columns leave no registers; 64 x 128 of e4m3 is 4 % faster with 4 warps than with 8.
        wgmma = capability in (90, 100, 103)
        # Before compute capability 8.9 e4m3 is decoded in registers, which takes more of them.
        tile_n = 64 if bits_w == 8 and compute == "fp16" else 128
        if wgmma and compute == "bf16" and not decoded:
            tile_n = 256
        # int4 needs a second accumulator, too, and decodes in registers: 128 x 128 spills.
        if problem.weights == "int4" and problem.tile == 128:
            tile_n = 64
        # A tile_k covers the elements of one scale factor of int4.
        tile_k = 128 if compute == "fp8e4nv" or problem.weights == "int4" else 64
        num_warps = 4 if wgmma and compute == "fp8e4nv" and problem.tile == 64 else 8
        budget = target.smem - (1 << 10)
    if compute == "fp32":
        tile_n, tile_k = 64, 32 if bits_w >= 16 else 128
    # Decoded operands are stored in shared memory a second time, as 16 bits.
    second = (problem.tile + tile_n) * tile_k * 2 if decoded and not few_rows else 0
    stage = (problem.tile * bits_x + tile_n * bits_w) * tile_k // 8
    # wgmma reads its stage while the others are filled. mma.sync has loaded its stage into registers, which frees one
    # more.
    buffers = (budget - second) // stage + (0 if swap or capability in (90, 100, 103) else 1)
    # With four stages arranged codes spill 64 bytes on these chips, with three they take 221 registers.
    most = 3 if problem.fragments and capability in (86, 89) else 4
    num_stages = max(3 if few_rows else 2, min(most, buffers)) if target.smem else 2
    return Config(tile_n, tile_k, 8, swap, compute, capability, num_warps, num_stages)


def is_full(encoding: str, pairs: int, experts: int) -> bool:
    """Whether experts have enough rows on average for tiles of 128 rows."""
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
    if p.bias or p.delta or p.weighted or p.channels or p.scale_out == "ratio":
        return "biases, factors of rows or of columns, or ratios"
    if not p.aligned:
        return "operands that cannot be copied in boxes"
    return "" if p.whole else "scale factors of a gate that begin within a tile"


def sm90(problem, target) -> Sm90Config:
    fp8 = problem.rows in _FP8
    # 128 bytes of K are the widest swizzle. Shared memory holds 4 stages of 48 KiB beside the staging buffer. No role
    # needs more registers; FP8 has one more role, the scale warp. gather_kernel reaches 2.0 to 2.4 TB/s on an H100.
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
    if p.scale or p.scale_out or p.channels or p.weighted or p.delta:
        return "factors of the product or of rows, or what is added to a pair's"
    if not p.aligned:
        return "operands that cannot be copied in boxes"
    return "" if p.whole else "halves of gated weights that are not whole tiles"


def fragments(problem, target) -> Fragments:
    # Both GEMMs of gpt-oss-120b on an H200 in us. Columns: warpgroups of a program x programs on a multiprocessor.
    #   tokens, tile   1x3   1x2   1x4   2x1   2x2
    #        8,  16    135   145   139   146   157
    #       64,  16    481   508   506   519   492
    #      512,  32    614   648         652   637
    #     4096,  64         2037        2088
    #     4096, 128                     1868
    # Few rows are bound by memory: small programs overlap loads and decoding. With many rows a large tile decodes each
    # weight fewer times.
    if problem.tile <= 32:
        return Fragments(groups=1, stages=4, programs=3, raster=8, registers=0, copy_registers=32, maxnreg=80)
    if problem.tile == 64:
        return Fragments(groups=1, stages=3, programs=2, raster=8, registers=0, copy_registers=32, maxnreg=128)
    return Fragments(groups=2, stages=3, programs=1, raster=8, registers=216, copy_registers=32, maxnreg=0)


def quantize(problem, target) -> Quantize:
    # 16 elements a thread: rows between the two GEMMs are short. A program that reads its rows twice has fewer, and
    # more columns of each.
    rows, columns = (2, 1024) if problem.row_scale else (8, 256)
    return Quantize(rows=rows, columns=columns, capability=target.capability, num_warps=4)
