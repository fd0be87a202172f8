"""A work list kept from plan to plan: its buffers, and the launch that fills them."""

from __future__ import annotations

from collections.abc import Callable

from flashinfer._core.target import target_of
from flashinfer.ops.attention import planner
from flashinfer.ops.attention._device.schedule import ITEM_WIDTH
from flashinfer.ops.attention.kind import Kind
from flashinfer.ops.attention.problem import Table
from flashinfer.ops.attention.request import Limits


# Numbers of requests whose launches are kept: requests come and go.
_MOST_FILLS = 64


class WorkList:
    """The work list of one kind of batch, cut to the tiles of one config.

    `scratch(bytes)` gives the uint8 tensor for partial results.
    """

    def __init__(self, kind: Kind, config, limits: Limits, scratch):
        fixed, heads = kind.options.fixed_split_size, kind.options.num_kv_heads
        how = planner.splitting(kind.problem, config, target_of(kind.device), heads, fixed if fixed != -1 else None)
        self.schedule = planner.allocate(kind.problem, config, limits, how, heads, scratch, kind.device)
        self._what = kind.problem, config, limits, how
        self._capacity = self.schedule.items.numel() // ITEM_WIDTH.value, self.schedule.max_slots
        self._window_left, self._mixed = kind.options.window_left, kind.options.mixed
        # What fills it, by what the launch is told of a batch.
        self._fills: dict[tuple, Callable] = {}
        self._fill = None

    @property
    def size(self) -> tuple[int, int]:
        """Items and slots that launches go over."""
        return self.schedule.max_items, self.schedule.max_slots

    def fits(self, limits: Limits) -> bool:
        """Whether the buffers suffice for `limits`; then it is cut to them from here on."""
        problem, config, before, how = self._what
        if limits == before:
            return True
        needed = planner.capacity(problem, config, limits, how)
        if any(need > has for need, has in zip(needed, self._capacity, strict=True)):
            return False
        self._what = problem, config, limits, how
        self.schedule.max_items, self.schedule.max_slots = needed
        return True

    def fill(self, table: Table) -> None:
        """Write the work list on the device. Nothing waits for it."""
        batch = table.batch_size
        if not batch:
            return
        told = batch, table.q_len, table.kv_stride, table.form
        self._fill = self._fills.get(told)
        if self._fill is None:
            if len(self._fills) >= _MOST_FILLS:
                self._fills.clear()
            problem, config, _, how = self._what
            self._fill = planner.hold(problem, config, table, self.schedule, how, self._window_left, self._mixed)
            self._fills[told] = self._fill
        self.refill(planner.addresses(table))

    def refill(self, addresses: list[int]) -> None:
        """Write it for as many requests as the last time, told in the same way by tables at other addresses."""
        self._fill(*addresses)
