"""MXFP4 weights in the register order of wgmma's first operand.

A tile has 64 rows of 64 elements. Each of 128 threads has 16 bytes of it; thread 0's come first. The fragment of a
16-bit matrix A of wgmma (PTX ISA, wgmma.mma_async) gives thread t two rows, 16 * (t / 32) + t % 32 / 4 and 8 further,
and in every 16 columns four: two from 2 * (t % 4) on, and two from 8 further on.

A thread's 16 bytes are four words. Word i has eight codes, four in each half. With column = 16 * (i / 2) + 8 * (i % 2)
+ 2 * (t % 4) + half, they are

    code    0: row, column     1: row + 8, column     2: row, column + 32     3: row + 8, column + 32

An example: thread 37 is in warp 1, its rows are 16 + 1 = 17 and 25, and word 2 begins at column 16 + 2 * 1 = 18. The
low half of word 2 has the codes (17, 18), (25, 18), (17, 50) and (25, 50); the high half those of columns 19 and 51.

The bits of a code are spread over its half so that few instructions move the sign to bit 15 and the exponent and
mantissa to bits 8 to 6 of a bfloat16, for both halves at once (`WHERE`; `sm90_fragments.py` has the instructions).
"""

from __future__ import annotations

import torch

# Rows of a tile, and elements of each row.
SIDE = 64
# For codes 0 to 3: the positions of the code's bits 0 to 3 (mantissa, two bits of exponent, sign) in its half of the
# word. A position of 16 or more is in the other half: bit 19 of the low half is bit 3 of the high half, and that of
# the high half is bit 3 of the low half.
WHERE = ((6, 7, 8, 15), (10, 11, 12, 19), (0, 1, 2, 9), (4, 5, 14, 13))


def fits(n: int, k: int) -> bool:
    """Whether weights of n rows with k elements can be arranged."""
    return n % SIDE == 0 and k % SIDE == 0 and n * k > 0


def arrange(codes: torch.Tensor) -> torch.Tensor:
    """Arrange codes, uint8 [experts, n, k / 2] with the first of two codes in the low half; the result has that
    shape."""
    arranged = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device)
    # One expert at a time: the int64 words of `_arranged` take twice the memory.
    for expert, to in zip(codes, arranged):
        to.copy_(_arranged(expert))
    return arranged


def _arranged(codes: torch.Tensor) -> torch.Tensor:
    """`arrange` for one expert."""
    n, half = codes.shape
    # tile of rows, warp, 8 rows, row, tile of columns, 32 columns, 16 columns, 8 columns, thread
    tiles = codes.reshape(n // SIDE, 4, 2, 8, half // 32, 2, 2, 2, 4)
    # tile of rows, tile of columns, warp, row, thread, 16 columns, 8 columns, code: 32 columns, 8 rows
    tiles = tiles.permute(0, 4, 1, 3, 8, 6, 7, 5, 2).flatten(-2).long()
    word = torch.zeros(tiles.shape[:-1], dtype=torch.int64, device=codes.device)
    for (j, half_of_word), (bit, at) in _bits():
        word |= (tiles[..., j] >> (4 * half_of_word + bit) & 1) << at
    word = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
    return word.contiguous().view(torch.uint8).reshape(codes.shape)


def restore(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `arrange` for one expert: uint8 [n, k / 2]."""
    n, half = codes.shape
    word = codes.contiguous().view(torch.int32).long().reshape(n // SIDE, half // 32, 4, 8, 4, 2, 2)
    found = torch.zeros(*word.shape, 4, dtype=torch.uint8, device=codes.device)
    for (j, half_of_word), (bit, at) in _bits():
        found[..., j] |= ((word >> at & 1) << (4 * half_of_word + bit)).to(torch.uint8)
    # tile of rows, tile of columns, warp, row, thread, 16 columns, 8 columns, 32 columns, 8 rows
    return found.unflatten(-1, (2, 2)).permute(0, 2, 8, 3, 1, 7, 5, 6, 4).reshape(codes.shape)


def _bits():
    """((code, half), (bit of the code, bit of the word)) for the 32 bits of a word."""
    for j, places in enumerate(WHERE):
        for half_of_word in range(2):
            for bit, at in enumerate(places):
                yield (j, half_of_word), (bit, (at + 16 * half_of_word) % 32)
