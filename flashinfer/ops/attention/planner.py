"""From ragged lengths to a work list. One planner for every attention: what differs is the source and the tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer._core.launch import Build, Launcher
from flashinfer._core.target import Target
from flashinfer.ops.attention._device.schedule import ITEM_WIDTH, schedule_kernel
from flashinfer.ops.attention.problem import Problem, Table


# What tells the lengths of a batch, in the order of Table.told().
TOLD = ("q_indptr", "q_lens", "kv_indptr", "kv_lens")


# Room for items, at least: 32 KiB.
_FEWEST_ITEMS = 512


@dataclass(frozen=True)
class ScheduleProblem:
    """What the scheduling kernel is compiled for: what tells queries and keys (`Table.form`), fixed pieces, and whether
    first and last requests take turns in the list."""

    q: str
    kv: str
    fixed: bool
    mixed: bool = False


@dataclass(frozen=True)
class ScheduleConfig:
    # One block covers the largest batches that are common; more requests take more rounds.
    block: int = 1024
    lanes: int = 128
    num_warps: int = 4


def build_schedule(p: ScheduleProblem, c: ScheduleConfig) -> Build:
    names = ("batch", "q_stride", "kv_stride", "kv_heads", "group", "tile_rows", "page_size", "window_left", "grain",
             "least", "least_alone", "share", "whole", "abreast", "fixed_chunk")  # fmt: skip
    types = dict(items="*i32:16", counts="*i32", arrivals="*i32")
    types.update({name: "*i32" for name in TOLD} | {name: "i32" for name in names})
    constants = dict(Q=p.q, KV=p.kv, FIXED=p.fixed, MIXED=p.mixed, BLOCK=c.block, LANES=c.lanes)
    # Left alone, ptxas keeps to 80 and puts one of them aside, for programs beside each other that there are not.
    return Build(schedule_kernel, types, constants, num_warps=c.num_warps, maxnreg=128)


schedule_launch = Launcher("schedule", build_schedule)


def schedules(problem: Problem):
    """What may schedule a problem: (launcher, problem, config) of each kernel, for compiling ahead."""
    if problem.page_size:
        forms = ("indptr", "pages"), ("uniform", "padded"), ("indptr", "padded"), ("lens", "pages")
        if problem.rows == 128:
            yield schedule_launch, ScheduleProblem("indptr", "lens", False, mixed=True), ScheduleConfig()
            yield schedule_launch, ScheduleProblem("indptr", "pages", False, mixed=True), ScheduleConfig()
    else:
        forms = ("indptr", "indptr"), ("indptr", "lens")
    for i, (q, kv) in enumerate(forms):
        # Only plans, whose tables are in the first form, ask for pieces of a fixed length.
        for fixed in (False, True) if problem.split and i == 0 else (False,):
            yield schedule_launch, ScheduleProblem(q, kv, fixed), ScheduleConfig()


@dataclass
class Schedule:
    """A work list on the device, and the scratch that its split tiles need.

    Attributes
    ----------
    items : int32 Tensor [max_items, 16], or longer
        See _device/schedule.py.
    counts : int32 Tensor [1]
        Items in use.
    arrivals : int32 Tensor [max_slots, kv_heads]
        Pieces of a split tile that are done, at its first slot: the last of them combines all. Zero between launches.
    partial_out : float32 Tensor [max_slots, kv_heads, block_m, head_dim_vo], optional
    partial_lse : float32 Tensor [max_slots, kv_heads, block_m], optional
    """

    items: torch.Tensor
    counts: torch.Tensor
    arrivals: torch.Tensor
    num_kv_heads: int
    max_items: int
    max_slots: int
    partial_out: torch.Tensor | None = None
    partial_lse: torch.Tensor | None = None


@dataclass(frozen=True)
class Splitting:
    """How keys are divided: into about `share` pieces per KV head over the batch, or every `fixed_chunk` keys.

    `abreast` pieces per KV head give each multiprocessor one. Requests of up to `whole` keys stay so where they are two
    thirds of that.
    """

    share: int = 0
    fixed_chunk: int = 0
    whole: int = 0
    abreast: int = 0


def splitting(problem: Problem, config, target: Target, num_kv_heads: int, fixed_split_size: int | None) -> Splitting:
    if not problem.split:
        return Splitting()
    if fixed_split_size:
        # Whole blocks, so that pieces of paged keys begin where a page does.
        return Splitting(fixed_chunk=-(-fixed_split_size // config.block_n) * config.block_n)
    abreast = -(-target.sms // num_kv_heads)
    return Splitting(-(-target.sms * config.programs_per_sm // num_kv_heads), whole=config.whole, abreast=abreast)


def capacity(problem: Problem, config, limits, how: Splitting) -> tuple[int, int]:
    """The most (items, slots) a batch within `limits` can need."""
    tiles = limits.batch + limits.q_rows * problem.group // config.block_m
    if not problem.split:
        return tiles, 0
    if how.fixed_chunk:
        # Pieces of a request: keys / chunk + 1, for each of its tiles.
        per_request = min(tiles, -(-limits.q_rows * problem.group // config.block_m))
        slots = min(per_request, tiles) * (limits.kv_tokens // how.fixed_chunk + limits.batch)
        if limits.q_rows == limits.batch:
            slots = -(-problem.group // config.block_m) * (limits.kv_tokens // how.fixed_chunk + limits.batch)
        return tiles + slots, slots
    # A split request has at least 1.5 chunks' worth of keys, so rounding to the nearest count adds at most a third.
    slots = how.share + -(-how.share // 3) + 1
    return tiles + slots, slots


def allocate(problem: Problem, config, limits, how: Splitting, num_kv_heads: int, scratch, device) -> Schedule:
    """Buffers for any batch within `limits`, and items for larger ones: batches grow. `scratch(bytes)` gives the uint8
    tensor for partial results."""
    items, slots = capacity(problem, config, limits, how)
    room = max(_FEWEST_ITEMS, 1 << (items - 1).bit_length())
    sizes = (room * ITEM_WIDTH.value, 1, slots * num_kv_heads)
    integers = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    schedule = Schedule(*integers, num_kv_heads, items, slots)
    if slots:
        rows = slots * num_kv_heads * config.block_m
        buffer = scratch(rows * (problem.head_dim_vo + 4) * 4).view(torch.float32)
        schedule.partial_out = buffer[: rows * problem.head_dim_vo]
        # Rounded up to 16 bytes, as the kernel is promised.
        schedule.partial_lse = buffer[-(-rows * problem.head_dim_vo // 4) * 4 :][:rows]
    return schedule


def hold(problem: Problem, config, table: Table, schedule: Schedule, how: Splitting, window_left: int,
         mixed: bool = False) -> Callable:  # fmt: skip
    """A launch that fills `schedule` on the device, for as many requests as `table` has, told as in `table`.

    It takes the addresses of Table.told(), 0 for None.
    """
    fill = schedule_launch.prepare(
        ScheduleProblem(*table.form, bool(how.fixed_chunk), mixed), ScheduleConfig(), schedule.items.device
    )
    arguments = (
        schedule.items, schedule.counts, schedule.arrivals, *table.told(), table.batch_size, table.q_len,
        table.kv_stride, schedule.num_kv_heads, problem.group, config.block_m, max(problem.page_size, 1), window_left,
        config.block_n, config.least_piece, config.least_alone or config.least_piece, how.share, how.whole, how.abreast,
        how.fixed_chunk,
    )  # fmt: skip
    return fill.hold((table.batch_size, 1, 1), arguments, TOLD)


def make(problem: Problem, config, table: Table, schedule: Schedule, how: Splitting, window_left: int,
         mixed: bool = False) -> None:  # fmt: skip
    """Fill `schedule` on the device for the lengths in `table`."""
    hold(problem, config, table, schedule, how, window_left, mixed)(*addresses(table))


def addresses(table: Table) -> list[int]:
    """Of Table.told(), 0 for None."""
    return [0 if tells is None else tells.data_ptr() for tells in table.told()]
