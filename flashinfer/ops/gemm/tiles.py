"""Tiles of products with scaled operands: what `blockscaled` and `grouped` choose alike."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops.gemm import operands


@dataclass(frozen=True)
class Config:
    """How a product is tiled.

    Attributes
    ----------
    compute : str
        What codes are widened to before they are multiplied; "" where the tensor cores take them as they are.
    block_m, block_n, block_k : int
        Tokens, rows of the weight, and elements of K of a tile.
    group : int
        Columns of tiles that follow each other.
    num_warps, num_stages : int
    capability : int
        Of the chip, ten times; 0 in the interpreter.
    """

    compute: str
    block_m: int
    block_n: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int
    capability: int


def compute(scale: str, formats: tuple[str, str], target) -> str:
    """What the codes of two formats with such scales are widened to: "" for nothing."""
    if target.is_cpu:
        # In the interpreter, which multiplies bfloat16 wrongly.
        return "fp32"
    if scale == "fp32":
        # From compute capability 8.9 on tensor cores multiply FP8. float16 holds both FP8 formats exactly.
        return "" if target.capability >= 89 else "fp16"
    mixed = "e2m1" in formats and formats[0] != formats[1]
    # Triton multiplies FP8 with FP4 as it is on tcgen05 alone, and bfloat16 nowhere.
    if 100 <= target.capability < (120 if mixed else 1000) and formats[0] not in ("bf16", "fp16"):
        return ""
    # bfloat16 has the exponents of ue8m0, and all significant bits of any code times its factor.
    return "bf16"


def choose(problem, how: str, target) -> Config:
    """The tile of a Problem of `blockscaled` or `grouped`."""
    promoted = problem.scale == "fp32"
    if target.is_cpu:
        return Config(how, 16, 32, min(problem.width, 128) if promoted else 128, 8, 4, 1, 0)
    small = target.smem < 160 << 10
    native = how == "" and problem.scale in ("ue8m0", "ue4m3")
    wide = 2 if problem.a in ("bf16", "fp16") and not problem.scale else 1
    block_k = min(problem.width, 128) if promoted else 128 // wide
    # 128 tokens where one set of sums is all that a thread holds; a promoted product has two, and what is widened for
    # mma.sync is held in registers beside them (they spill, by ptxas).
    most = 128 if native or (not promoted and target.capability >= 90) else 64
    block_m = min(problem.tokens, most)
    if not problem.aligned:
        # Element by element, loads hold an address each.
        block_m = min(block_m, 32)
    # 128 rows of the weight are what one multiplication of tcgen05 takes, and two of wgmma.
    block_n = 128 if problem.aligned and not (promoted and how) else 64
    num_warps = 8 if block_m >= (32 if promoted else 64) else 4
    # As many stages as fit: 16 KiB and more in flight on a multiprocessor keep memory busy (bandwidth times latency
    # is 3.35 TB/s x 0.7 us / 132 = 18 KiB on an H100).
    size = {"bf16": 2, "fp16": 2, "e2m1": 0.5}
    stage = block_k * (block_n * size.get(problem.b, 1) + block_m * size.get(problem.a, 1))
    widened = 2 * block_k * (block_m + block_n) if how in ("bf16", "fp16") else 0
    room = (90 if small else 144) * 1024 - widened
    num_stages = int(max(2, min(room // stage, 6)))
    return Config(how, block_m, block_n, block_k, 8, num_warps, num_stages, target.capability)


def unit(encoding: str, aligned: bool) -> int:
    """Elements of a dtype, or bytes of e2m1, in 16 bytes where rows are aligned."""
    size = {"bf16": 2, "fp16": 2, "fp32": 4}.get(encoding, 1)
    return 16 // size if aligned else 1


def element(encoding: str, how: str) -> str:
    """The type that the codes of a format have in memory, as kernels see them that widen to `how`."""
    if encoding == "e2m1" or (encoding in operands.FP8 and how):
        return "u8"
    return encoding
