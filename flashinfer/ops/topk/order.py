"""The results of a sorted top-k, put in order.

Grid: one program for BLOCK of a row's k. Warps: all share a block. Shared memory: exchanges of tl.sort.
Inputs: values and indices [rows, k], in the order of the indices. Outputs: the same, largest value first.
Method: bitonic sorts of blocks; where a row has several, a binary search of each other block counts what precedes an
element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.find_prefix import start
from flashinfer.ops._device.prefix import key_of


@triton.jit
def store_at(packed, place, ok, value, index, out_value, out_index, at, LAST: tl.constexpr):
    """Store the elements behind packed numbers at their places."""
    taken = (packed & 0x7FFFFFFF).to(tl.int32)
    if not LAST:
        taken = 0x7FFFFFFF - taken
    tl.store(out_value + at + place, tl.load(value + at + taken, ok), ok)
    tl.store(out_index + at + place, tl.load(index + at + taken, ok), ok)


@triton.jit
def sort_kernel(
    value, index, packed, out_value, out_index, k, blocks,
    LAST: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sorts BLOCK of a row's k. WHOLE : that is the row. Else the block's packed numbers are stored.

    A packed number is the key of a value and, below it, its place in the row: all differ, and with LAST later places
    are larger.
    """
    row = tl.program_id(0) // blocks
    at = row.to(tl.int64) * k
    within = tl.arange(0, BLOCK)
    taken = tl.program_id(0) % blocks * BLOCK + within
    key = key_of(tl.load(value + at + taken, taken < k, other=0).to(tl.float32))
    place = taken if LAST else 0x7FFFFFFF - taken
    number = (key.to(tl.int64) << 32) | place.to(tl.int64)
    # Less than the number of any value, -inf included.
    number = tl.sort(tl.where(taken < k, number, -0x7FFFFFFFFFFFFFFF), descending=True)
    if WHOLE:
        store_at(number, within, within < k, value, index, out_value, out_index, at, LAST)
    else:
        tl.store(packed + tl.program_id(0).to(tl.int64) * BLOCK + within, number)


@triton.jit
def merge_kernel(
    value, index, packed, out_value, out_index, k, blocks, LAST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Place the elements of a sorted block among all of the row."""
    row, mine = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    within = tl.arange(0, BLOCK)
    packed += row.to(tl.int64) * blocks * BLOCK
    number = tl.load(packed + mine * BLOCK + within)
    before = within
    for other in range(blocks):
        if other != mine:
            # How many numbers of the other block, largest first, are above each of mine.
            above = tl.zeros([BLOCK], tl.int32)
            step = BLOCK
            while step > 0:
                at = other * BLOCK + above + step - 1
                ok = above + step <= BLOCK
                above += tl.where(ok & (tl.load(packed + at, ok, other=0) > number), step, 0)
                step //= 2
            before += above
    ok = mine * BLOCK + within < k
    store_at(number, before, ok, value, index, out_value, out_index, row.to(tl.int64) * k, LAST)


@dataclass(frozen=True)
class Problem:
    """dtype : of the values. last : of equal values the one with the largest index comes first."""

    dtype: str
    last: bool


@dataclass(frozen=True)
class Config:
    """block : elements of a program, a power of two. num_warps."""

    block: int
    num_warps: int


def config_of(rows: int, k: int) -> Config:
    """Blocks by measurement on an H200; docs/rooms/topk.md has the figures."""
    if k <= 64:
        return SMALLEST
    if k <= 512 or (k <= 2048 and rows * k >= 1 << 18):
        return SMALL
    return MEDIUM if k <= 2048 else LARGE


SMALLEST, SMALL, MEDIUM, LARGE = Config(64, 1), Config(256, 4), Config(1024, 8), Config(2048, 16)


def _build(kernel, problem, config, packed: bool, **constants) -> Build:
    values = f"*{problem.dtype}"
    types = {"value": values, "index": "*i64", "packed": "*i64" if packed else None}
    types |= {"out_value": values, "out_index": "*i64", "k": "i32", "blocks": "i32"}
    return Build(kernel, types, {"LAST": problem.last, "BLOCK": config.block, **constants}, config.num_warps)


launch_sort = Launcher("top_k_sort", lambda p, c: _build(sort_kernel, p, c, False, WHOLE=True))
launch_blocks = Launcher("top_k_sort_blocks", lambda p, c: _build(sort_kernel, p, c, True, WHOLE=False))
launch_merge = Launcher("top_k_merge", lambda p, c: _build(merge_kernel, p, c, True))
LAUNCHERS = (launch_sort, launch_blocks, launch_merge)


def kernels(problem: Problem):
    """(launcher, problem, config) of every kernel."""
    for config in (SMALLEST, SMALL, MEDIUM):
        yield launch_sort, problem, config
    for launcher in (launch_blocks, launch_merge):
        for config in (SMALL, MEDIUM, LARGE):
            yield launcher, problem, config


def run(problem: Problem, value, index, out_value, out_index, config: Config | None = None) -> None:
    """Write `value` and `index` [rows, k] largest first; by default with the config for their sizes."""
    rows, k = value.shape
    config = config or config_of(rows, k)
    blocks = triton.cdiv(k, config.block)
    grid = (rows * blocks, 1, 1)
    if blocks == 1:
        start(launch_sort, problem, config, grid, value, index, out_value, out_index, k, blocks)
        return
    packed = torch.empty(rows * blocks * config.block, dtype=torch.int64, device=value.device)
    for launcher in (launch_blocks, launch_merge):
        start(launcher, problem, config, grid, value, index, packed, out_value, out_index, k, blocks)
