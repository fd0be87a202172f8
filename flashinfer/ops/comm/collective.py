"""Exchanges through the process group, for ranks without access to each other's memory: gloo on CPUs, NCCL on GPUs.

Before a collective, CPU ranks rendezvous in the group's store: each stores the number and the sizes of its call, and
waits for those of the others. An error therefore names a rank that is late at the deadline, or one with other sizes,
before anything is sent, and the group stays usable. A rank that is lost inside a collective leaves the group unusable.

On GPUs a call through NCCL blocks its stream and not the host, so it has no deadline of its own. The set-up, which
makes the communicator, and `settle` wait on the host until the deadline. An NCCL kernel that was abandoned stays on its
stream until the process group's own timeout, and work behind it does not run.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from flashinfer._core.checks import require
from flashinfer.ops.comm import symmetric
from flashinfer.ops.comm.meeting import Clock, Ranks

_GAVE_UP = "gave up"
# torch 2.13 renames the function.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collective:
    """The transport of the collective variants. Every rank makes the same calls in the same order.

    Attributes
    ----------
    rank, world : int
    deadline : float
        Seconds that ranks on CPUs wait for each other.
    reason : str
        Why ranks do not exchange through peer memory.
    reported : bool
        Whether every failure since the last reset has been raised. Always true: a call that fails raises.
    """

    transport = "collective"
    reported = True

    def __init__(self, ranks: Ranks, device: torch.device, reason: str = "", deadline: float = 0):
        require(ranks.size == 1 or ranks.group is not None, "group", None, "a process group, for " + reason)
        self.ranks, self.rank, self.world = ranks, ranks.rank, ranks.size
        self.device, self.reason = device, reason
        self.deadline = deadline or symmetric.DEADLINE
        self._epoch, self._failure = 0, None
        # The last NCCL work that was submitted, and its operation.
        self._pending = None, ""
        self._store = None
        # A group without NCCL copies GPU tensors through the host.
        many = device.type == "cuda" and self.world > 1
        self.staged = many and "nccl" not in str(dist.get_backend_config(ranks.group))
        if self.world > 1 and (device.type != "cuda" or self.staged):
            require(ranks.store is not None, "group", ranks.group, "a process group with a store")
            self._store = ranks.store
            if not ranks.session:
                ranks.meet("set-up")
            self._key = f"flashinfer-comm/{ranks.session}/calls"
            ranks.in_store(lambda gone: self._mark("0|", gone), "set-up", ranks.deadline)
            ranks.barrier()
        elif self.world > 1:
            ranks.bounded(self._connect, "the other ranks, in NCCL")

    def check(self) -> None:
        """Raise the failure of an earlier call again, until `reset`."""
        if self._failure is not None:
            raise type(self._failure)(f"{self._failure}")

    def all_gather(self, x: torch.Tensor, operation: str) -> torch.Tensor:
        """[world, *shape]: `x` of every rank."""
        if self.world == 1:
            return x[None]
        send = self._outgoing(x)
        received = torch.empty(self.world * send.numel(), dtype=torch.uint8, device=send.device)
        self._call(operation, send.numel(), lambda: _all_gather(
            received, send, group=self.ranks.group, async_op=True))  # fmt: skip
        return received.to(x.device).view(x.dtype).view(self.world, *x.shape)

    def all_to_all(self, x: torch.Tensor, operation: str) -> torch.Tensor:
        """x [world, ...] has this rank's data for each rank; the result, of that shape, each rank's data for this
        one."""
        if self.world == 1:
            return x
        send = self._outgoing(x)
        received = torch.empty_like(send)
        self._call(operation, send.numel(), lambda: dist.all_to_all_single(
            received, send, group=self.ranks.group, async_op=True))  # fmt: skip
        return received.to(x.device).view(x.dtype).view(x.shape)

    def sum(self, x: torch.Tensor, two_shot: bool) -> torch.Tensor:
        """The float32 sum over ranks of x [n], added in rank order; with `two_shot` rounded to the dtype of x."""
        if not two_shot:
            return _in_order(self.all_gather(x, "all-reduce"))
        each = -(-x.numel() // self.world)
        padded = torch.nn.functional.pad(x, (0, each * self.world - x.numel()))
        mine = _in_order(self.all_to_all(padded.view(self.world, each), "all-reduce")).to(x.dtype)
        return self.all_gather(mine, "all-reduce").view(-1)[: x.numel()].float()

    def reset(self) -> None:
        """Forget a failure, on every rank: a collective call."""
        # The last rank to time out may do so one deadline after the first.
        self.ranks.meet("reset", symmetric.RESET * self.deadline)
        self._epoch = max(self.ranks.gather(self._epoch))
        if self._store is not None:
            words = f"{self._epoch}|"
            self.ranks.in_store(lambda gone: self._mark(words, gone), "reset", self.ranks.deadline)
        self.ranks.barrier()
        self._failure = None

    def settle(self) -> None:
        """Wait for pending NCCL work until the deadline. Inside a graph capture it returns at once.

        Raises
        ------
        TimeoutError
            The work is not complete. The process group cannot be used any more, and the outputs are undefined.
        """
        work, operation = self._pending
        if work is None or self._is_capturing():
            return
        clock = Clock(self.deadline)
        while not work.is_completed():
            if clock.is_over():
                self._pending = None, ""
                others = ", ".join(str(rank) for rank in range(self.world) if rank != self.rank)
                other = f"{'rank' if self.world == 2 else 'one of the ranks'} {others}"
                why = "with another process group, for what NCCL was given is still under way"
                self._failure = TimeoutError(f"{self._late(operation, other)} {why}")
                raise self._failure
            clock.pause()
        self._pending = None, ""

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _connect(self) -> None:
        """The first NCCL collective, which makes the communicator and blocks the host until all ranks have come."""
        mine = torch.zeros(1, dtype=torch.uint8, device=self.device)
        everyone = torch.empty(self.world, dtype=torch.uint8, device=self.device)
        _all_gather(everyone, mine, group=self.ranks.group)
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Does nothing: a Collective owns no memory."""

    def _outgoing(self, x: torch.Tensor) -> torch.Tensor:
        # As bytes, because gloo supports few dtypes.
        flat = x.contiguous().view(-1).view(torch.uint8)
        return flat.cpu() if self.staged else flat

    def _call(self, operation: str, nbytes: int, collective) -> None:
        self.check()
        self._epoch += 1
        if self._store is None:
            work = collective()
            work.wait()
            self._pending = (None, "") if self._is_capturing() else (work, operation)
            return
        try:
            what = f"{operation} of {nbytes} bytes"
            self.ranks.in_store(lambda gone: self._meet(operation, what, gone), operation, self.deadline)
            self._finish(operation, collective)
        except (TimeoutError, ValueError) as failure:
            self._failure = failure
            raise

    def _meet(self, operation: str, what: str, gone) -> None:
        """Store the number and sizes of this call, and wait for those of all ranks."""
        self._mark(f"{self._epoch}|{what}", gone)
        clock = Clock(self.deadline)
        for other in range(self.world):
            while (theirs := self._marked(other))[0] < self._epoch:
                if clock.is_over() or gone.is_set():
                    self._mark(f"{self._epoch}|{_GAVE_UP}", gone)
                    raise TimeoutError(self._late(operation, f"rank {other}"))
                clock.pause()
            if theirs == (self._epoch, _GAVE_UP):
                self._mark(f"{self._epoch}|{_GAVE_UP}", gone)
                gave_up = "; that rank had waited for another and gave up"
                raise TimeoutError(self._late(operation, f"rank {other}") + gave_up)
            if theirs[0] == self._epoch and theirs[1] != what:
                raise ValueError(
                    f"{operation}: rank {self.rank} came to exchange {self._epoch} with {what}, and rank {other} with "
                    f"{theirs[1]}; allowed: the same call on every rank. reset() makes the workspace usable again"
                )

    def _finish(self, operation: str, collective) -> None:
        try:
            collective().wait(datetime.timedelta(seconds=self.deadline))
        except RuntimeError as error:
            absent = self.ranks.in_store(self._absent, operation, self.deadline)
            named = ", ".join(map(str, absent))
            other = f"rank {named}" if len(absent) == 1 else f"one of the ranks {named}" if absent else "the group"
            raise TimeoutError(
                f"{self._late(operation, other)} with another process group, for this one has failed: {error}"
            ) from error

    def _absent(self, gone) -> list[int]:
        """The ranks that do not report within the deadline that they abandoned this exchange too."""
        self._mark(f"{self._epoch}|{_GAVE_UP}", gone)
        clock = Clock(self.deadline)
        while True:
            absent = [r for r in range(self.world) if self._marked(r) != (self._epoch, _GAVE_UP)]
            if not absent or clock.is_over() or gone.is_set():
                return absent
            clock.pause()

    def _late(self, operation: str, other: str) -> str:
        return (
            f"{operation}: rank {self.rank} waited {self.deadline:g} s for {other} in exchange {self._epoch}. "
            "reset() on every rank makes the workspace usable again"
        )

    def _mark(self, words: str, gone) -> None:
        if not gone.is_set():
            self._store.set(f"{self._key}/{self.rank}", words)

    def _marked(self, rank: int) -> tuple[int, str]:
        epoch, _, words = self._store.get(f"{self._key}/{rank}").decode().partition("|")
        return int(epoch), words


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """The float32 sum of parts [world, ...] in rank order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total
