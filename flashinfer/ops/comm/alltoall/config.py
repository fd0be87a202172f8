"""Programs and warps of the all-to-all kernels."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer._core.sizes import power_of_two
from flashinfer.ops.comm.symmetric import CHANNELS

# Words of a row that a program copies at once: four 16-byte accesses in each of 256 threads. Not measured.
BLOCK = 4096
# Tokens that a place_kernel program handles at once: 128 if the call has no more, else 1024, which registers hold.
PLACED = 128, 1024
# Bytes of an area of the plain all-to-all. Larger rows are exchanged in rounds. Not measured.
ROUND = 64 << 10


@dataclass(frozen=True)
class Config:
    """num_warps : warps of a program. capability : the compute capability times ten; 0 in the interpreter.

    first, last : the first and the last phase of a launch: 0 sends, 1 receives. A GPU launch has both. In the
        interpreter ranks run one after another, so each phase is a launch.
    """

    num_warps: int
    capability: int
    first: int
    last: int


def portable(problem, target) -> Config:
    # 16 words a thread, and no fewer threads than there are ranks. Not measured.
    return Config(min(max(problem.block // 512, 2), 8), target.capability, 0, 1)


def programs(rows: int, most: int = CHANNELS) -> int:
    """Programs of a call with up to `rows` rows, a number that is the same on all ranks: program n of a rank exchanges
    with program n of the others."""
    return max(min(rows, most), 1)


def block(words: int) -> int:
    """The block of rows of `words` words."""
    return min(power_of_two(words, 64), BLOCK)
