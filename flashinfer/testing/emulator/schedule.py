"""Who runs next: blocks, their partitions of warps, and copies on their way, in an order that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import GeneratorType

from flashinfer.testing.emulator.barriers import Barrier, Clock
from flashinfer.testing.emulator.errors import Deadlock, EmulationError, of_generator, of_traceback
from flashinfer.testing.emulator.shared import Allocation


class Block:
    """A block of threads: its place in the grid and its shared memory."""

    def __init__(self, at: tuple[int, int, int], grid: tuple[int, int, int], num_warps: int):
        self.at, self.grid, self.num_warps = at, grid, num_warps
        self.allocations: list[Allocation] = []
        self.tasks: list[Task] = []


class Copy:
    """Something on its way, which happens when the schedule says so, or when a warp waits for it."""

    def __init__(self, block: Block, what: str, finish: Callable[[], None], after: tuple[Copy, ...] = ()):
        self.block, self.what, self._finish, self._after, self.is_done = block, what, finish, after, False

    def land(self) -> None:
        if not self.is_done:
            for earlier in self._after:
                earlier.land()
            self.is_done = True
            self._finish()


class Task:
    """The warps of a partition, or of a block before it parts."""

    def __init__(self, block: Block, clock: Clock, num_warps: int, name: str, body):
        self.block, self.clock, self.num_warps, self.name = block, clock, num_warps, name
        self.body = body
        # Asynchronous copies by threads that no group has yet, and groups of them; products on their way.
        self.copies: list[Copy] = []
        self.groups: list[list[Copy]] = []
        self.products: list = []
        self.stores: list[Copy] = []
        # Since its last barrier, to global memory.
        self.has_stored = False
        # Waits for a product that takes its time: others run first.
        self.is_slow = False
        self.waits_for: Callable[[], bool] | None = None
        self.waits_at = ""

    def __str__(self) -> str:
        return f"block {self.block.at}, {self.name}"


class Schedule:
    """Runs a launch.

    Seeds differ in whether copies land at once, late, or in between, and in whether one runs on until it has to
    wait or others come between. Every other product takes as long as others have something to do.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._early = (0.0, 0.5, 0.9)[seed % 3]
        self._stays = (0.5, 0.0, 0.9)[(seed + seed // 3) % 3]
        self.tasks: list[Task] = []
        self.copies: list[Copy] = []
        self.running: Task | None = None

    def start(self, task: Task) -> None:
        task.block.tasks.append(task)
        self.tasks.append(task)

    def send(self, copy: Copy) -> Copy:
        self.copies.append(copy)
        return copy

    def is_slow(self) -> bool:
        """Whether a product ends only when no other warp can run."""
        return self._random.random() < 0.5

    def run(self, blocks: Iterator[Task], at_once: int) -> None:
        """Run the blocks' first tasks, and what they start; so many blocks at a time."""
        # A launch that failed leaves some behind.
        self.tasks, self.copies = [], []
        last, is_more = None, True
        while True:
            while is_more and len({id(task.block) for task in self.tasks}) < at_once:
                task = next(blocks, None)
                is_more = task is not None
                if is_more:
                    self.start(task)
            if not self.tasks:
                break
            self.copies = [copy for copy in self.copies if not copy.is_done]
            ready = [task for task in self.tasks if task.waits_for is None or task.waits_for()]
            if self.copies and (not ready or self._random.random() < self._early):
                self._random.choice(self.copies).land()
                continue
            if not ready:
                self._blame()
            if last not in ready or last.is_slow or self._random.random() >= self._stays:
                last = self._random.choice([task for task in ready if not task.is_slow] or ready)
            self._step(last)

    def _step(self, task: Task) -> None:
        self.running, task.waits_for, task.is_slow = task, None, False
        try:
            next(task.body)
        except StopIteration:
            self._end(task)
        except EmulationError as error:
            raise type(error)(f"{task}: {error}") from error
        except Exception as error:
            where = of_traceback(error.__traceback__)
            raise EmulationError(f"{task}: {type(error).__name__}: {error}, at {where}") from error

    def _end(self, task: Task) -> None:
        if any(not product.is_done for product in task.products):
            raise EmulationError(f"{task} ends with products that it did not wait for")
        self.tasks.remove(task)
        task.block.tasks.remove(task)
        if not task.block.tasks:
            for copy in self.copies:
                if copy.block is task.block and not copy.is_done:
                    raise EmulationError(f"block {task.block.at} ends while {copy.what} is on its way")

    def _blame(self) -> None:
        lines = [f"  {task} waits for {task.waits_at}" for task in self.tasks]
        raise Deadlock("\n".join(["nobody can go on, and nothing is on its way:", *lines]))

    def wait(self, is_over: Callable[[], bool], what: Callable[[], str]) -> GeneratorType:
        """Pause until it is over."""
        task = self.running
        while True:
            task.waits_for = is_over
            task.waits_at = _Late(what, task)
            yield
            if is_over():
                return


class _Late:
    """Said only where it is asked for."""

    def __init__(self, what: Callable[[], str], task: Task):
        self._what, self._task = what, task

    def __str__(self) -> str:
        return f"{self._what()} at {of_generator(self._task.body)}"


def wait_for_barrier(schedule: Schedule, barrier: Barrier, parity: int) -> GeneratorType:
    yield from schedule.wait(lambda: barrier.is_over(parity), lambda: f"parity {parity} of {barrier}")
    schedule.running.clock.acquire(barrier.released)
