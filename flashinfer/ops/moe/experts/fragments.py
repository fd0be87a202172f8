"""MXFP4 weights in the order in which threads hold them as wgmma's first operand.

A tile has 64 rows and 64 elements of each, and 128 threads have 16 bytes of it each, one thread's after another's. A
fragment of wgmma (PTX ISA, wgmma.mma_async, matrix A of 16 bits) gives thread t the rows 16 * (t / 32) + t % 32 / 4
and 8 further, and of each 16 columns those at 2 * (t % 4) and 8 further, two each. Word i of a thread's four has eight
codes, of columns 16 * (i / 2) + 8 * (i % 2) + 2 * (t % 4) + lane:

    code j    0: row, column     1: row + 8, column     2: row, column + 32     3: row + 8, column + 32

and lane 0 or 1 is the half of the word. Bits of codes lie so that few instructions put sign, exponent and mantissa of
two codes at bits 15 and 8 to 6 of two bfloat16 (`WHERE`; `fragments_sm90.py` has the instructions).
"""

from __future__ import annotations

import torch

# Rows, and elements of each, of a tile.
SIDE = 64
# Of each code: the bits, in the code's half of the word, of its mantissa, its two bits of exponent, and its sign. Those
# from 16 on are in the other half.
WHERE = ((6, 7, 8, 15), (10, 11, 12, 19), (0, 1, 2, 9), (4, 5, 14, 13))


def fits(n: int, k: int) -> bool:
    """Whether weights of n rows with k elements are arranged; others stay as they are."""
    return n % SIDE == 0 and k % SIDE == 0 and n * k > 0


def arrange(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [experts, n, k / 2], two codes a byte, the first in the low half: the same shape, in tiles as above."""
    arranged = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device)
    # One expert at a time: a word on its way takes eight bytes for four.
    for expert, to in zip(codes, arranged):
        to.copy_(_arranged(expert))
    return arranged


def _arranged(codes: torch.Tensor) -> torch.Tensor:
    n, half = codes.shape
    # tile of rows, warp, 8 rows, row, tile of columns, 32 columns, 16 columns, 8 columns, thread
    tiles = codes.reshape(n // SIDE, 4, 2, 8, half // 32, 2, 2, 2, 4)
    # tile of rows, tile of columns, warp, row, thread, 16 columns, 8 columns, code: 32 columns, 8 rows
    tiles = tiles.permute(0, 4, 1, 3, 8, 6, 7, 5, 2).flatten(-2).long()
    word = torch.zeros(tiles.shape[:-1], dtype=torch.int64, device=codes.device)
    for (j, lane), (bit, at) in _bits():
        word |= (tiles[..., j] >> (4 * lane + bit) & 1) << at
    word = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
    return word.contiguous().view(torch.uint8).reshape(codes.shape)


def restore(codes: torch.Tensor) -> torch.Tensor:
    """What `arrange` was given, of one expert: uint8 [n, k / 2]."""
    n, half = codes.shape
    word = codes.contiguous().view(torch.int32).long().reshape(n // SIDE, half // 32, 4, 8, 4, 2, 2)
    found = torch.zeros(*word.shape, 4, dtype=torch.uint8, device=codes.device)
    for (j, lane), (bit, at) in _bits():
        found[..., j] |= ((word >> at & 1) << (4 * lane + bit)).to(torch.uint8)
    # tile of rows, tile of columns, warp, row, thread, 16 columns, 8 columns, 32 columns, 8 rows
    return found.unflatten(-1, (2, 2)).permute(0, 2, 8, 3, 1, 7, 5, 6, 4).reshape(codes.shape)


def _bits():
    """((code, lane), (bit of the code, bit of the word)) of the 32 bits of a word."""
    for j, places in enumerate(WHERE):
        for lane in range(2):
            for bit, at in enumerate(places):
                yield (j, lane), (bit, (at + 16 * lane) % 32)
