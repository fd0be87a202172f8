"""Rendezvous of processes with a deadline, for the set-up and the reset of memory.

Values go through the store of the process group, where a wait can have a deadline; the object collectives and barriers
of `torch.distributed` have the group's timeout. Ranks first agree on a session, which is a random name from each rank.
Keys contain the session, so entries of an earlier, failed rendezvous are never read.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import queue
import threading
import time
import uuid
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flashinfer._core.checks import require

# Seconds that a rank waits for the others in a set-up. Ranks load models at different speeds.
SETUP_DEADLINE = 30.0
# Seconds by which the wait for the store exceeds a deadline, so that an error names the late rank and not the store.
_GRACE = 1.0
_STORE = "the store of the process group, which rank 0 hosts unless a launcher does"

_setup_deadline = SETUP_DEADLINE


def set_setup_deadline(seconds: float = SETUP_DEADLINE) -> float:
    """Set how long this process waits for other ranks while a workspace is set up.

    Parameters
    ----------
    seconds : float
        For each wait of a set-up that begins later; 30 by default.

    Returns
    -------
    float
        What it was.

    Raises
    ------
    ValueError
        A number that is not above 0.

    Examples
    --------
    >>> import flashinfer
    >>> before = flashinfer.comm.set_setup_deadline(120)
    >>> flashinfer.comm.set_setup_deadline(before)
    120
    """
    global _setup_deadline
    require(seconds > 0, "seconds", seconds, "more than 0")
    before, _setup_deadline = _setup_deadline, seconds
    return before


class Worker:
    """A thread for calls that may block forever; the caller stops waiting at a deadline."""

    def __init__(self):
        self._calls: queue.SimpleQueue | None = None

    def call(self, function: Callable, seconds: float, late: Callable[[], str]):
        """Return or raise what `function` does; after `seconds` raise TimeoutError with the message `late()`.

        The function gets a `threading.Event`, which is set once the caller has stopped waiting.
        """
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="flashinfer-comm", daemon=True).start()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        answer, done, abandoned = [], threading.Event(), threading.Event()
        self._calls.put((function, device, answer, done, abandoned))
        if not done.wait(seconds):
            abandoned.set()
            # The thread is blocked; the next call starts another.
            self._calls = None
            raise TimeoutError(late())
        value, error = answer
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread."""
        if self._calls is not None:
            self._calls.put(None)
        self._calls = None

    def __del__(self):
        self.close()


def _serve(calls: queue.SimpleQueue) -> None:
    while (call := calls.get()) is not None:
        function, device, answer, done, abandoned = call
        try:
            if device is not None:
                # The current device is per thread.
                torch.cuda.set_device(device)
            answer += [function(abandoned), None]
        except BaseException as error:  # the caller raises it
            answer += [None, error]
        done.set()
        if abandoned.is_set():
            return
        del call, function, answer


def store_of(group):
    """The store of a process group, or None if it has none."""
    try:
        return distributed_c10d._get_process_group_store(group)
    except (KeyError, RuntimeError, ValueError):
        return None


def late(operation: str, rank: int, seconds: float, other: str) -> str:
    """The message of a TimeoutError."""
    return f"{operation}: rank {rank} waited {seconds:g} s for {other}. Every rank has to make the same call"


class Ranks:
    """The processes of a set-up: those of a process group, or of an object with CommBackend's methods.

    Attributes
    ----------
    rank, size : int
    group : ProcessGroup or None
        None where only a backend object is given.
    session : str
        The name of the current rendezvous, the same on every rank; '' before the first.
    whose : int
        Which processes they are: the identity of the group, else of the backend object, which this object holds.
    """

    def __init__(self, group=None, backend=None):
        group = getattr(backend, "_group", None) if group is None else group
        self.group, self._backend = group, backend
        self.whose = id(backend if group is None else group)
        if group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            require(self.rank >= 0, "group", "a group without this process", "a group that has it")
        elif backend is not None:
            self.rank, self.size = backend.Get_rank(), backend.Get_size()
        else:
            self.rank, self.size = 0, 1
        self.store = store_of(group) if group is not None and self.size > 1 else None
        self.session, self._operation, self._deadline, self._turn = "", "set-up", 0.0, 0
        self._worker = Worker()

    @property
    def deadline(self) -> float:
        """The longest wait, in seconds, in the current rendezvous."""
        return self._deadline or _setup_deadline

    def meet(self, operation: str, deadline: float = 0) -> None:
        """Begin a rendezvous of all ranks. Later calls of this object belong to it; each waits up to `deadline`
        seconds.

        Raises
        ------
        TimeoutError
            A rank did not come, or the store does not answer. It names this rank, the other and the operation.
        """
        self._operation, self._deadline, self._turn = operation, deadline, 0
        if self.store is not None:
            self.session = ""
            self.session = self.in_store(self._agree, operation, self.deadline)

    def gather(self, value) -> list:
        """The `value` of every rank, a Python literal, in rank order. Raises TimeoutError as `meet` does."""
        if self.size == 1:
            return [value]
        if self.store is None:
            return self.bounded(lambda: self._ask(value), "the other ranks")
        if not self.session:
            self.meet(self._operation, self._deadline)
        self._turn += 1
        return self.in_store(lambda gone: self._exchange(repr(value), gone), self._operation, self.deadline)

    def barrier(self) -> None:
        if self.size > 1:
            self.gather(None)

    def bounded(self, function: Callable, other: str):
        """Return `function()`, a call into another library that waits for `other`; TimeoutError at the deadline."""
        seconds = self.deadline
        words = late(self._operation, self.rank, seconds, other)
        return self._worker.call(lambda _: function(), seconds, lambda: words)

    def close(self) -> None:
        self._worker.close()

    def _ask(self, value) -> list:
        if self._backend is not None:
            return list(self._backend.allgather(value))
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def in_store(self, function: Callable, operation: str, seconds: float):
        """Return `function(gone)`, which uses the store; TimeoutError if the store does not answer or is lost.

        `function` itself raises when a rank is late. `gone` is set once the caller has stopped waiting.
        """
        try:
            return self._worker.call(
                function, seconds + _GRACE, lambda: late(operation, self.rank, seconds, _STORE)
            )
        except RuntimeError as error:
            # A store whose host process has ended refuses calls.
            words = str(error).partition("\n")[0]
            raise TimeoutError(f"{operation}: rank {self.rank} has lost {_STORE}: {words}") from error

    def _agree(self, gone: threading.Event) -> str:
        """Agree on a session: each rank stores a random name and the names it has seen, until all have seen the
        same."""
        mine, said, clock = uuid.uuid4().hex, None, Clock(self.deadline)
        keys = [f"flashinfer-comm/{rank}" for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        while True:
            entries = [_load(self.store, key) for key in keys]
            entries[self.rank] = mine, ()
            seen = [None if entry is None else entry[0] for entry in entries]
            if seen != said:
                said = seen
                self.store.set(keys[self.rank], repr((mine, seen)))
            if None not in seen and all(entries[rank][1] == seen for rank in others):
                return hashlib.sha256("".join(seen).encode()).hexdigest()[:32]
            if clock.is_over() or gone.is_set():
                # A rank that has not seen this one is absent. If all have, one of them still waits for another.
                absent = [r for r in others if entries[r] is None or mine not in entries[r][1]]
                absent = absent or [r for r in others if entries[r][1] != seen]
                raise TimeoutError(late(self._operation, self.rank, self.deadline, f"rank {absent[0]}"))
            clock.pause()

    def _exchange(self, value: str, gone: threading.Event) -> list:
        clock, turn = Clock(self.deadline), self._turn
        self.store.set(self._key(turn, self.rank), value)
        if turn > 2:
            # All ranks have come to the last turn, so all have read the one before it: its key can go.
            # A file store cannot delete keys.
            with contextlib.suppress(NotImplementedError):
                self.store.delete_key(self._key(turn - 2, self.rank))
        values = []
        for rank in range(self.size):
            key = self._key(turn, rank)
            while not self.store.check([key]):
                if clock.is_over() or gone.is_set():
                    self.session = ""
                    raise TimeoutError(late(self._operation, self.rank, self.deadline, f"rank {rank}"))
                clock.pause()
            values.append(ast.literal_eval(self.store.get(key).decode()))
        return values

    def _key(self, turn: int, rank: int) -> str:
        return f"flashinfer-comm/{self.session}/{turn}/{rank}"


class Clock:
    """A deadline, and pauses between polls that double up to 5 ms."""

    def __init__(self, seconds: float):
        self._end, self._pause = time.monotonic() + seconds, 1e-4

    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def pause(self) -> None:
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, 5e-3)


def _load(store, key: str):
    return ast.literal_eval(store.get(key).decode()) if store.check([key]) else None
