"""From ragged lengths to a work list. One kernel makes that of every attention: what differs is the source and the
tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer._core.replay import recording
from flashinfer.ops.attention._device.schedule import ITEM_WIDTH, schedule_kernel
from flashinfer.ops.attention.counters import zeros
from flashinfer.ops.attention.problem import REQUESTS, Problem
from flashinfer.ops.attention.split import Limits, SplitPolicy, capacity, divides
from flashinfer.ops.attention.tables import Table

# The tensors that hold the lengths of a batch, in the order of Table.lengths().
LENGTHS = ("q_indptr", "q_lens", "kv_indptr", "kv_lens")
# What a kernel without a work list reads of a batch, beside its lengths, and of how keys are split.
OF_LENGTHS = ("batch", "q_len", "kv_stride", "least", "least_alone", "share", "whole", "abreast")
# Room for work items, at least: 32 KiB.
_FEWEST_ITEMS = 512
# Numbers of requests whose launches are kept: requests come and go.
_MOST_FILLS = 64
# Lists of equal requests, by all that they depend on. None is dropped: captured graphs read them. The most that are
# kept, and the most items of one: 64 MiB in all.
_equal: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
_MOST_EQUAL, _MOST_EQUAL_ITEMS = 256, 4096


@dataclass(frozen=True)
class ScheduleProblem:
    """What the scheduling kernel is compiled for: where lengths of queries and keys are (`Table.encoding`), splits of a
    fixed length, and whether first and last requests take turns in the list."""

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
    types.update({name: "*i32" for name in LENGTHS} | {name: "i32" for name in names})
    constants = dict(Q=p.q, KV=p.kv, FIXED=p.fixed, MIXED=p.mixed, BLOCK=c.block, LANES=c.lanes)
    # Without maxnreg ptxas caps at 80 for an occupancy that one block needs not, and spills.
    return Build(schedule_kernel, types, constants, num_warps=c.num_warps, maxnreg=128)


schedule_launch = Launcher("schedule", build_schedule)


def schedules(problem: Problem):
    """What may schedule a problem: (launcher, problem, config) of each kernel, for compiling ahead."""
    if problem.page_size:
        encodings = ("indptr", "pages"), ("uniform", "padded"), ("indptr", "padded"), ("lens", "pages")
        if problem.rows == 128:
            yield schedule_launch, ScheduleProblem("indptr", "lens", False, mixed=True), ScheduleConfig()
            yield schedule_launch, ScheduleProblem("indptr", "pages", False, mixed=True), ScheduleConfig()
    else:
        encodings = ("indptr", "indptr"), ("indptr", "lens")
    for i, (q, kv) in enumerate(encodings):
        # Only plans, whose tables have the first encoding, ask for splits of a fixed length.
        for fixed in (False, True) if problem.split and i == 0 else (False,):
            yield schedule_launch, ScheduleProblem(q, kv, fixed), ScheduleConfig()


def latent_schedules(problem):
    """`schedules` of latent attention."""
    for encoding in (("uniform", "padded"),) if problem.sparse else (("indptr", "lens"), ("uniform", "padded")):
        yield schedule_launch, ScheduleProblem(*encoding, False), ScheduleConfig()


def implementation(bind: Callable, *launchers: Launcher, kernels: Callable | None = None, stack_budget: int = 0
                   ) -> Implementation:  # fmt: skip
    """What a GPU variant of attention offers.

    Parameters
    ----------
    bind : callable (problem, config, device)
        Gives an object whose `hold(x)`, with the Inputs x, is a launch ready to be repeated.
    launchers : Launcher
        Its kernels, without the one that makes work lists.
    kernels : callable (problem, config), optional
        As of Implementation. By default the launcher, and what may schedule the problem.
    stack_budget : int
    """

    def run(p, c, x) -> None:
        bind(p, c, x.out.device).hold(x)(*x.addresses())

    def attend_and_schedule(p, c):
        yield launchers[0], p, c
        yield from schedules(p)

    return Implementation(
        run, (*launchers, schedule_launch), kernels=kernels or attend_and_schedule, bind=bind, stack_budget=stack_budget
    )


class WorkList:
    """A work list on the device, cut to the tiles of one config; what its split tiles need; and what fills it.

    Parameters
    ----------
    problem, config
        Of the kernel that reads it.
    policy : SplitPolicy
        As `SplitPolicy.of` gives it.
    limits : Limits
        Bounds of the batches that it is made for. There is room for larger ones: batches grow.
    num_kv_heads : int
    scratch : callable (bytes) -> uint8 Tensor
        Where partial results go.
    device : torch.device
    window_left : int
    mixed : bool
        Whether first and last requests take turns.
    reads_lengths : bool
        Whether the kernel makes the items of small batches itself (decode/sm80_items.py).
    counts_arrivals : bool
        Whether the kernel needs `arrivals`, which the launch that fills the list sets to zero.

    Attributes
    ----------
    items : int32 Tensor [max_items * 16], or longer
        See _device/schedule.py. Of equal requests, a list that all work lists share.
    counts : int32 Tensor [1]
        Items in use.
    arrivals : int32 Tensor [max_slots * kv_heads]
        Splits of a tile that are done, at its first slot: the last of them combines all. Of many splits, those of each
        group at its first slot, and groups at the tile's second (_device/combine.py). Zero between launches.
    partial_out : float32 Tensor [max_slots * kv_heads * block_m * head_dim_vo], optional
    partial_lse : float32 Tensor [max_slots * kv_heads * block_m], optional
    max_items, max_slots : int
        What launches go over; no slots where no request of the batch is divided.
    requests : int
        Problem.requests of the kernel that takes the batch of the last `fill`: 0 for one that reads the list.
    """

    def __init__(
        self, problem, config, policy: SplitPolicy, limits: Limits, num_kv_heads: int, scratch, device: torch.device,
        window_left: int = -1, mixed: bool = False, reads_lengths: bool = False, counts_arrivals: bool = True,
    ):  # fmt: skip
        self._problem, self._config, self._policy, self._limits = problem, config, policy, limits
        self._window_left, self._mixed, self._counts_arrivals = window_left, mixed, counts_arrivals
        self.num_kv_heads = num_kv_heads
        items, slots = self._needed(limits)
        self._cut_to(limits, items, slots)
        room = max(_FEWEST_ITEMS, 1 << (items - 1).bit_length())
        sizes = (room * ITEM_WIDTH.value, 1, slots * num_kv_heads)
        integers = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        self.items, self.counts, self.arrivals = integers.split(sizes)
        self._own = self.items, self.counts
        self.requests, self._reads_lengths = 0, reads_lengths and not policy.fixed
        if self._reads_lengths:
            # No launch writes the zeros that the kernel leaves behind.
            self.arrivals = zeros(sizes[2], device)
        self.partial_out = self.partial_lse = None
        if slots:
            rows = slots * num_kv_heads * config.block_m
            buffer = scratch(rows * (problem.head_dim_vo + 4) * 4).view(torch.float32)
            self.partial_out = buffer[: rows * problem.head_dim_vo]
            # Rounded up to 16 bytes, as the kernel is promised.
            self.partial_lse = buffer[-(-rows * problem.head_dim_vo // 4) * 4 :][:rows]
        self._capacity = room, slots
        # What fills it, by what the launch depends on in a table.
        self._fills: dict[tuple, Callable] = {}
        # Launches the kernel for lengths at other addresses (`Table.addresses`), as many as at the last `fill`.
        self.refill: Callable[..., None] = _nothing

    def _needed(self, limits: Limits) -> tuple[int, int]:
        return capacity(self._policy, self._problem.group, self._config.block_m, limits)

    def _cut_to(self, limits: Limits, items: int, slots: int) -> None:
        self._limits, self.max_items = limits, items
        self.max_slots = slots if divides(self._policy, self._problem.group, self._config.block_m, limits) else 0

    @property
    def size(self) -> tuple[int, int]:
        """Items and slots that launches go over."""
        return self.max_items, self.max_slots

    def fits(self, limits: Limits) -> bool:
        """Whether the buffers suffice for `limits`; then the list is cut to them from here on."""
        if limits == self._limits:
            return True
        needed = self._needed(limits)
        if any(need > has for need, has in zip(needed, self._capacity, strict=True)):
            return False
        self._cut_to(limits, *needed)
        return True

    def fill(self, table: Table) -> None:
        """Write the work list on the device. Nothing waits for it."""
        batch = table.batch_size
        if not batch:
            return
        self.requests = self._requests(table)
        if self.requests:
            return
        equal = self._equal_list(table)
        self.items, self.counts = equal or self._own
        if equal:
            self.refill = _nothing
            return
        key = batch, table.q_len, table.kv_stride, table.encoding
        launch = self._fills.get(key)
        if launch is None:
            if len(self._fills) >= _MOST_FILLS:
                self._fills.clear()
            launch = self._fills[key] = self._launch(table)
        self.refill = launch
        launch(*table.addresses())
        recorded = recording()
        if recorded is not None:
            recorded.add_kept(launch, list(table.lengths()))

    def _equal_list(self, table: Table) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The items, and their number, of requests of which the host knows that they are equal."""
        if not table.each_kv or self.max_items > _MOST_EQUAL_ITEMS or (self.max_slots and self._counts_arrivals):
            return None
        device = self.items.device
        key = device, table.encoding, self._mixed, table.each_kv, *self._sizes(table)
        found = _equal.get(key)
        if found is None and len(_equal) < _MOST_EQUAL:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            self.items = self._own[0].new_empty(self.max_items * ITEM_WIDTH.value)
            self.counts = self._own[1].new_empty(1)
            self._launch(table)(*table.addresses())
            if device.type == "cuda":
                # So that work on any stream finds it.
                torch.cuda.current_stream(device).synchronize()
            found = _equal[key] = self.items, self.counts
        return found

    def _requests(self, table: Table) -> int:
        if not self._reads_lengths or table.encoding != ("uniform", "padded") or table.batch_size > REQUESTS[-1]:
            return 0
        return min(most for most in REQUESTS if most >= table.batch_size)

    def arguments(self, table: Table) -> dict:
        """The record `work` of a kernel."""
        if not self.requests:
            return {"work.items": self.items, "work.counts": self.counts, "work.arrivals": self.arrivals}
        policy = self._policy
        values = (
            table.batch_size, table.q_len, table.kv_stride, policy.least_split,
            policy.least_alone or policy.least_split, policy.share, policy.whole, policy.abreast,
        )  # fmt: skip
        named = {f"work.{name}": value for name, value in zip(OF_LENGTHS, values, strict=True)}
        return {"work.arrivals": self.arrivals, "work.kv_lens": table.kv_lens, **named}

    @property
    def cut(self) -> tuple[Limits, int, int]:
        """What it is cut to: limits, and the items and slots that launches go over."""
        return self._limits, self.max_items, self.max_slots

    @cut.setter
    def cut(self, cut: tuple[Limits, int, int]) -> None:
        self._limits, self.max_items, self.max_slots = cut

    def _sizes(self, table: Table) -> tuple[int, ...]:
        """What the list depends on beside lengths."""
        problem, config, policy = self._problem, self._config, self._policy
        return (
            table.batch_size, table.q_len, table.kv_stride, self.num_kv_heads, problem.group, config.block_m,
            max(problem.page_size, 1), self._window_left, config.block_n, policy.least_split,
            policy.least_alone or policy.least_split, policy.share, policy.whole, policy.abreast, policy.fixed,
        )  # fmt: skip

    def _launch(self, table: Table) -> Callable[..., None]:
        """The launch for as many requests as `table` has, of lengths that lie as its do. It takes their addresses."""
        kernel = schedule_launch.prepare(
            ScheduleProblem(*table.encoding, bool(self._policy.fixed), self._mixed), ScheduleConfig(), self.items.device
        )
        arguments = self.items, self.counts, self.arrivals, *table.lengths(), *self._sizes(table)
        return kernel.hold((table.batch_size, 1, 1), arguments, LENGTHS)


def _nothing(*addresses: int) -> None:
    """What an empty batch launches."""
