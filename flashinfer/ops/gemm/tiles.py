"""The portable kernels' config for GEMMs with scaled operands, shared by `blockscaled` and `grouped`."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops.gemm import operands


@dataclass(frozen=True)
class Config:
    """Tile and pipeline of the portable kernel.

    Attributes
    ----------
    compute : str
        The dtype that codes are widened to before the product; "" where the tensor cores take the codes.
    block_m, block_n, block_k : int
        Tokens, rows of the weight, and elements of K in a tile.
    group : int
        Columns of tiles that are computed together, so that operands stay in the L2 cache.
    num_warps, num_stages : int
        Compiler options.
    capability : int
        The compute capability times ten; 0 in the interpreter.
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
    """Config.compute for two formats with scales in the format `scale`."""
    if target.is_cpu:
        # Triton's interpreter multiplies bfloat16 incorrectly.
        return "fp32"
    if scale == "fp32":
        # Tensor cores multiply FP8 from compute capability 8.9 on. float16 represents both FP8 formats exactly.
        return "" if target.capability >= 89 else "fp16"
    mixed = "e2m1" in formats and formats[0] != formats[1]
    # Triton's dot_scaled takes FP8 with FP4 on tcgen05 alone, and bfloat16 with FP4 nowhere.
    if 100 <= target.capability < (120 if mixed else 1000) and formats[0] not in ("bf16", "fp16"):
        return ""
    # bfloat16 has ue8m0's range of exponents, and enough significant bits for any code times its factor.
    return "bf16"


def choose(problem, how: str, target) -> Config:
    """The config for a Problem of `blockscaled` or `grouped`; `how` is Config.compute."""
    promoted = problem.scale == "fp32"
    if target.is_cpu:
        return Config(how, 16, 32, min(problem.width, 128) if promoted else 128, 8, 4, 1, 0)
    small = target.smem < 160 << 10
    native = how == "" and problem.scale in ("ue8m0", "ue4m3")
    packed = 2 if problem.a in ("bf16", "fp16") and not problem.scale else 1
    block_k = min(problem.width, 128) if promoted else 128 // packed
    # 128 tokens where registers hold one accumulator alone. A promoted product has two, and mma.sync keeps widened
    # operands in registers beside the accumulator: both spill with 128.
    largest_m = 128 if native or (not promoted and target.capability >= 90) else 64
    block_m = min(problem.tokens, largest_m)
    if not problem.aligned:
        # Loads element by element keep one address in registers for each element.
        block_m = min(block_m, 32)
    # 128 rows of the weight are one tcgen05 instruction, or two of wgmma.
    block_n = 128 if problem.aligned and not (promoted and how) else 64
    num_warps = 8 if block_m >= (32 if promoted else 64) else 4
    # As many stages as fit. About 18 KiB in flight on each multiprocessor saturate an H100's memory (bandwidth times
    # latency is 3.35 TB/s x 0.7 us / 132).
    size = {"bf16": 2, "fp16": 2, "e2m1": 0.5}
    stage = block_k * (block_n * size.get(problem.b, 1) + block_m * size.get(problem.a, 1))
    widened = 2 * block_k * (block_m + block_n) if how in ("bf16", "fp16") else 0
    available = (90 if small else 144) * 1024 - widened
    num_stages = int(max(2, min(available // stage, 6)))
    return Config(how, block_m, block_n, block_k, 8, num_warps, num_stages, target.capability)


def unit(encoding: str, aligned: bool) -> int:
    """Elements of a format's tensor in 16 bytes (for e2m1, bytes) where rows are aligned, else 1."""
    size = {"bf16": 2, "fp16": 2, "fp32": 4}.get(encoding, 1)
    return 16 // size if aligned else 1


def element(encoding: str, how: str) -> str:
    """The Triton type of a pointer to a format's codes, in a kernel that widens to `how`."""
    if encoding == "e2m1" or (encoding in operands.FP8 and how):
        return "u8"
    return encoding
