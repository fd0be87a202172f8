"""Programs and warps of the all-to-all kernels."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops.comm.symmetric import CHANNELS

# Words of a row that a program moves at a time: four 16-byte accesses in each of 256 threads. Not measured.
BLOCK = 4096
# Tokens that the program of a rank places at a time: a call's, if they are so few, or the most that registers hold.
PLACED = 128, 1024
# Bytes of an area of the all-to-all of blocks; what is larger goes in rounds. Not measured.
ROUND = 64 << 10


@dataclass(frozen=True)
class Config:
    """num_warps : warps per program. capability : of the chip, ten times; 0 in the interpreter.

    first, last : the phases of a launch: 0 sends, 1 receives. Both on a GPU; in the interpreter, where ranks run one
        after another, each is a launch.
    """

    num_warps: int
    capability: int
    first: int
    last: int


def portable(problem, target) -> Config:
    # 16 words a thread, and no fewer threads than there are ranks. Not measured.
    return Config(min(max(problem.block // 512, 2), 8), target.capability, 0, 1)


def programs(rows: int, most: int = CHANNELS) -> int:
    """Programs of a call for up to `rows` rows. The same on every rank, whatever it has: they exchange one with one."""
    return max(min(rows, most), 1)


def block(words: int) -> int:
    """Words at a time of rows of `words`."""
    return min(max(1 << (words - 1).bit_length(), 64), BLOCK)
