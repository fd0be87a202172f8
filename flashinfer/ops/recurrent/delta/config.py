"""Configs of the delta rule's kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashinfer._core.sizes import power_of_two


@dataclass(frozen=True)
class Config:
    """rows : rows of the state (values) of a program. num_warps : warps of a program.

    capability : the compute capability times ten, which decides how fp8 is converted; 0 where no state is fp8.
    pdl : dependent launch.
    """

    rows: int
    num_warps: int
    capability: int = 0
    pdl: bool = False


def capability_for(target, *dtypes: str) -> int:
    return target.capability if any(dtype.startswith("fp8") for dtype in dtypes) else 0


def step(problem, target) -> Config:
    key, value = power_of_two(problem.key_dim, 16), power_of_two(problem.value_dim, 16)
    capability = capability_for(target, problem.source_dtype, problem.state_dtype)
    if problem.tokens:
        # A program has keys and sums of all tokens beside 16 rows of the state. Trees of 64 tokens spill up to 384
        # bytes a thread with 16 warps (sm_120a; at most 56 elsewhere), and 560 with 8.
        return Config(16, 16 if problem.tokens * key > 4096 else 8, capability)
    if problem.norm:
        # The norm is over all values of a head, so one program has the whole state, which takes 64 registers a thread.
        return Config(value, max(4, key * value // 2048), capability, target.pdl)
    if problem.layout == "v":
        # Rows of a tile are contiguous in memory: 32 of them are whole sectors in every dtype.
        return Config(max(8, min(value, 4096 // key)), 4, capability, target.pdl)
    # One warp, so that sums over keys and their copies need no barrier. The state takes 32 registers a thread.
    return Config(max(4, min(value, 1024 // key)), 1, capability, target.pdl)


def with_many(problem, config: Config) -> Config | None:
    """The config of a step with many programs: twice the rows; None where there is none.

    A row's instructions are the same, and so are its bits.
    """
    if problem.tokens or problem.norm or config.num_warps > 1 or config.capability or config.rows < 8:
        return None
    if not problem.aligned or problem.layout != "k" or 2 * config.rows > problem.value_dim:
        return None
    return replace(config, rows=2 * config.rows)


def layer(problem, target) -> Config:
    # The norm is over all values of a head, so one program has the whole state, which takes 64 registers a thread.
    # Where no dimension is contiguous each element has its own address. With four times the warps K 64 spills nothing
    # instead of 3 KiB; K 128 still spills 2 KiB.
    key = power_of_two(problem.dim, 16)
    warps = key * key // 2048 if problem.layout else key * key // 512
    return Config(key, min(max(4, warps), 16), capability_for(target, problem.state_dtype))


def commit(problem, target) -> Config:
    # One warp, as in steps: 48 layers of 16 x 16 / 32 heads take 1160 us, and 1435 with 32 rows and 4 warps (H100).
    key, value = power_of_two(problem.key_dim, 16), power_of_two(problem.value_dim, 16)
    return Config(max(4, min(value, 1024 // key)), 1, capability_for(target, problem.state_dtype))


@dataclass(frozen=True)
class ChunkConfig:
    """rows : rows of the state (values) of a scan program. stages : chunks in its pipeline.

    operand : dtype of the products' operands, "bf16", or "fp32" as tf32 for fp16, whose range a state may exceed.
    prepare_warps, scan_warps : warps of a program of the two kernels. capability : as in Config.
    programs : the most programs of the first kernel; each has 16 KiB of scratch, which in total stays in L2.
    """

    rows: int
    operand: str
    prepare_warps: int
    scan_warps: int
    stages: int
    programs: int = 1024
    capability: int = 0


def chunks(problem, target) -> ChunkConfig:
    # Results must not depend on the batch, so the config does not. 32 values of a state of 128 keys take 32 registers a
    # thread with 4 warps, and a head of 128 values gives 4 programs. Not measured.
    capability = capability_for(target, problem.source_dtype, problem.state_dtype, problem.marks_dtype)
    # float32 operands take twice the shared memory: 16 values fit the chip with the least.
    rows = min(32 if problem.dtype == "bf16" else 16, power_of_two(problem.value_dim, 16))
    if problem.dtype == "bf16" and target.capability == 90:
        # Keys and queries without aligned 16-byte copies are not pipelined, and the corrections reuse their shared
        # memory. 64 rows give both the same layout (docs/rooms/recurrent.md, "Descriptors").
        whole = problem.channels or problem.aligned and problem.key_dim % 16 == 0
        rows = min(32 if whole else 64, power_of_two(problem.key_dim, 16))
    # A pipeline of two chunks is 104 KiB in bf16; chips with less shared memory, and float32 operands, have one.
    stages = 2 if problem.dtype == "bf16" and target.smem > 200 * 1024 else 1
    # Triton's interpreter multiplies bfloat16 incorrectly.
    operand = "bf16" if problem.dtype == "bf16" and not target.is_cpu else "fp32"
    # By ptxas on Hopper: the first kernel spills at most 16 bytes with 8 warps, up to 1200 with 4. The scan spills none
    # with 4 warps, except with checkpoints.
    return ChunkConfig(
        rows, operand, 8, 8 if problem.marks_dtype or problem.dtype == "fp32" else 4, stages, capability=capability
    )


@dataclass(frozen=True)
class Sm90ChunkConfig:
    """stages : chunks in shared memory. copy_registers : registers of a thread of the producer warp.

    parts : consumer warpgroups of a scan program, 64 values each.
    operand, prepare_warps, programs, capability : as in ChunkConfig.
    """

    stages: int
    copy_registers: int
    operand: str = "bf16"
    prepare_warps: int = 8
    programs: int = 1024
    capability: int = 0
    parts: int = 1


def chunks_sm90(problem, target) -> Sm90ChunkConfig:
    capability = capability_for(target, problem.source_dtype, problem.state_dtype, problem.marks_dtype)
    # A chunk takes 57 KiB with one decay a head, and 73 KiB with decays of channels.
    return Sm90ChunkConfig(3, 24, capability=capability)


def paired_scan(problem, config: Sm90ChunkConfig) -> Sm90ChunkConfig | None:
    """The config of a scan whose programs have 128 values of a head; None where there is none.

    Both warpgroups read the tiles of keys and queries, of which two chunks then fit. A warpgroup's instructions are
    those of a program alone, and so are its bits.
    """
    if not problem.channels or problem.value_dim % 128:
        return None
    return replace(config, stages=2, parts=2)


def refuses_chunks_sm90(problem, target) -> str:
    """Why the Hopper kernel does not take the problem; "" if it does."""
    if target.capability != 90:
        return f"wgmma is compute capability 9.0's, and this is {target.arch}"
    if (problem.dtype, problem.out_dtype) != ("bf16", "bf16"):
        return f"{problem.dtype} to {problem.out_dtype}: it takes bf16, since a state may leave float16's range"
    if problem.key_dim != 128:
        return f"keys of {problem.key_dim}: it takes 128"
    if problem.value_dim % 64:
        return f"values of {problem.value_dim}: it takes multiples of 64"
    if not problem.aligned:
        return "rows that are not aligned to 16 bytes"
    if problem.stride != 64:
        return "states on the way at other places than multiples of 64 tokens"
    if problem.write_dtype:
        return "a write gate"
    if problem.segments:
        return "segments of sequences"
    return ""
