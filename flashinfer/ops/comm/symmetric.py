"""Memory that every rank of a group can write, and the state of exchanges through it: flags, epochs and deadlines.

All ranks have buffers of the same layout. A buffer begins with flags: one line for each channel, which has a flag from
each rank. Two slots follow, each with an area for every channel and source rank. The rest belongs to the user. The
protocol is that of `flashinfer/ops/comm/_device/exchange.py`.

An example with 2 ranks and areas of 64 bytes: flags take 256 * 128 = 32768 bytes. The area of channel 3 from rank 1 in
slot 1 begins at 32768 + ((1 * 128 + 3) * 2 + 1) * 64 = 49600. The user's bytes begin at 32768 + 2 * 128 * 2 * 64 =
65536.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from flashinfer._core import driver
from flashinfer._core.driver import asked
from flashinfer.ops.comm.meeting import Ranks

# Bytes of a channel's flags: a cache line, with 8 bytes for each of 16 ranks.
LINE = 128
MOST_RANKS = LINE // 8
# The most programs of a kernel. Not all have to be resident: a program waits only for those of its own number, and
# ranks start programs in the same order.
CHANNELS = 256
# Channels that have slots: about one for each multiprocessor of an H100 or H200, as a power of two.
SLOTTED = 128
# The most threads of a program. `state` has one failure mark for each, behind the channels' epochs.
MOST_LANES = 1024

# Seconds that a wait may take.
DEADLINE = 10.0
# The deadline of a reset, in deadlines of a wait.
RESET = 3

OPERATIONS = ("all-reduce", "dispatch", "combine", "all-to-all", "probe")


class PeerMemory:
    """`nbytes` of memory on every rank, initially zero, mapped into this process.

    Attributes
    ----------
    own : Tensor
        This rank's memory, uint8 [nbytes].
    addresses : list of int
        The address of every rank's memory in this process.
    means : str
        How it is shared: "symmetric memory", "CUDA IPC", or "one process".
    """

    def __init__(self, own: torch.Tensor, addresses: list[int], means: str, release=None):
        self.own: Any = own
        self.addresses, self.means = addresses, means
        self._release = release

    def close(self) -> None:
        """Free the memory. Peers must not use it any more."""
        release, self._release, self.own = self._release, None, None
        if release is not None:
            release()


def in_one_process(world: int, nbytes: int, device: torch.device) -> list[PeerMemory]:
    """The memories of `world` ranks in this process, to run ranks one after another or on streams of one device."""
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(world)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    return [PeerMemory(buffer, addresses, "one process", buffers.clear) for buffer in buffers]


def allocate(ranks: Ranks, nbytes: int, device: torch.device) -> PeerMemory:
    """Allocate memory on every rank's GPU that all ranks can access. A collective call.

    Raises
    ------
    RuntimeError
        On all ranks, if it fails on one; the message has that rank's error.
    TimeoutError
        A rank did not come.
    """
    if ranks.size == 1:
        return in_one_process(1, nbytes, device)[0]
    index = torch.cuda.current_device() if device.index is None else device.index
    whole = str(torch.cuda.get_device_properties(index).uuid)
    devices = ranks.gather(whole)
    tries = [_by_ipc]
    # Symmetric memory needs distinct devices; processes that share a device use CUDA IPC.
    if ranks.group is not None and len(set(devices)) == ranks.size:
        tries.insert(0, _by_symmetric_memory)
    words = []
    for attempt in tries:
        memory, error = None, ""
        try:
            memory = attempt(ranks, nbytes, torch.device("cuda", index))
        except TimeoutError:
            raise
        except Exception as refusal:  # raised below on all ranks
            error = f"rank {ranks.rank}: {type(refusal).__name__}: {refusal}"
        errors = [e for e in ranks.gather(error) if e]
        if not errors:
            torch.cuda.synchronize(index)
            ranks.barrier()
            return memory
        if memory is not None:
            memory.close()
        words += errors
    raise RuntimeError(f"no memory that all {ranks.size} ranks reach: {'; '.join(words)}")


def _by_symmetric_memory(ranks: Ranks, nbytes: int, device: torch.device) -> PeerMemory:
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    own.zero_()
    handle = ranks.bounded(lambda: symmetric.rendezvous(own, ranks.group), "the other ranks")
    bases = [int(address) for address in handle.buffer_ptrs]
    # A tensor may begin at an offset into its allocation; the offset is the same on all ranks.
    offset = own.data_ptr() - bases[ranks.rank]
    keep = [handle]
    return PeerMemory(own, [base + offset for base in bases], "symmetric memory", keep.clear)


def _by_ipc(ranks: Ranks, nbytes: int, device: torch.device) -> PeerMemory:
    cuda = driver.bindings()
    with torch.cuda.device(device), contextlib.ExitStack() as undo:
        torch.cuda.current_stream().synchronize()
        own, base, handle, error = None, 0, b"", ""
        try:
            base = int(asked("cuMemAlloc", *cuda.cuMemAlloc(nbytes)))
            undo.callback(cuda.cuMemFree, base)
            own = bytes_at(base, nbytes, device)
            own.zero_()
            handle = bytes(asked("cuIpcGetMemHandle", *cuda.cuIpcGetMemHandle(base)).reserved)
        except RuntimeError as refusal:
            # Not raised here: the other ranks wait for this rank's handle.
            error = str(refusal)
        handles, errors = zip(*ranks.gather((handle, error)), strict=True)
        if any(errors):
            raise RuntimeError("; ".join(f"rank {rank}: {words}" for rank, words in enumerate(errors) if words))
        addresses = [base] * ranks.size
        for rank, words in enumerate(handles):
            if rank != ranks.rank:
                other = cuda.CUipcMemHandle()
                other.reserved = words
                flags = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
                addresses[rank] = int(asked("cuIpcOpenMemHandle", *cuda.cuIpcOpenMemHandle(other, flags)))
                undo.callback(cuda.cuIpcCloseMemHandle, addresses[rank])
        return PeerMemory(own, addresses, "CUDA IPC", undo.pop_all().close)


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor [nbytes] over device memory that torch did not allocate."""
    return torch.as_tensor(_Bytes(address, nbytes), device=device)


class _Bytes:
    """Device memory that torch did not allocate."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class Link:
    """The transport of exchanging kernels: peer memory with flags. Calls are on one stream, in the same order on every
    rank.

    Parameters
    ----------
    ranks : Ranks
    memory : PeerMemory
        At least `header(world, area)` bytes.
    area : int
        The most bytes that one source sends to one channel in one exchange; a multiple of 16.
    rank : int, optional
        This link's rank if `memory` is that of one process; by default the rank of `ranks`.

    Attributes
    ----------
    peers : Tensor
        int64 [world] on the device: the addresses.
    state : Tensor
        int32 on the device: the epoch of each channel, then the failure marks.
    lost : Tensor
        int32 [4] in pinned host memory, written by kernels: the result of `wait` plus one, the operation, the epoch.
    deadline : float
        The longest wait in seconds. It may be set at any time; a captured graph keeps its value.
    reported : bool
        Whether `check` has raised since the last reset.
    """

    transport = "peer"

    def __init__(
        self, ranks: Ranks | None, memory: PeerMemory, area: int, rank: int | None = None, deadline: float = 0
    ):
        self.ranks, self.memory, self.area = ranks, memory, area
        self.rank, self.world = ranks.rank if rank is None else rank, len(memory.addresses)
        self.deadline = deadline or DEADLINE
        self.device = memory.own.device
        self.peers = torch.tensor(memory.addresses, dtype=torch.int64, device=self.device)
        self.state = torch.zeros(CHANNELS + MOST_LANES, dtype=torch.int32, device=self.device)
        self.lost = torch.zeros(4, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")
        self._words = self.lost.numpy()
        self.reported = False

    @property
    def arguments(self) -> tuple:
        """Arguments of every exchanging kernel: peers, state, lost, rank, area, limit in nanoseconds."""
        # As an address: the launcher refuses host tensors, but kernels can write pinned host memory.
        lost = self.lost.data_ptr() if self.device.type == "cuda" else self.lost
        return self.peers, self.state, lost, self.rank, self.area, int(self.deadline * 1e9)

    def check(self) -> None:
        """Raise a recorded failure: TimeoutError for a rank that did not arrive, ValueError for one with other sizes.

        It does not wait for running kernels; `settle` does.
        """
        code, operation, epoch, _ = self._words.tolist()
        if not code:
            return
        name, late = OPERATIONS[operation], code - 1
        self.reported = True
        if late >= self.world:
            raise ValueError(
                f"{name}: rank {late - self.world} came to exchange {epoch} with other sizes than rank {self.rank}; "
                "allowed: the same call on every rank. reset() makes the workspace usable again"
            )
        raise TimeoutError(
            f"{name}: rank {self.rank} waited {self.deadline:g} s for rank {late} in exchange {epoch}. "
            "reset() on every rank makes the workspace usable again"
        )

    def reset(self) -> None:
        """Forget a failure, on every rank: a collective call, which also waits for the device."""
        self._synchronize()
        # The last rank to time out may do so one deadline after the first.
        self.ranks.meet("reset", RESET * self.deadline)
        self.ranks.barrier()
        self.memory.own[: LINE * CHANNELS].zero_()
        self.state.zero_()
        self.lost.zero_()
        self._synchronize()
        self.ranks.barrier()
        self.reported = False

    def close(self) -> None:
        """Free the memory once this rank's kernels have ended."""
        if self.memory.own is not None:
            self._synchronize()
        self.memory.close()

    def settle(self) -> None:
        """Wait for this rank's kernels, which end by the deadline. Inside a graph capture it returns at once."""
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def header(world: int, area: int) -> int:
    """Bytes of the flags and the two slots with areas of `area` bytes."""
    return LINE * CHANNELS + 2 * SLOTTED * world * area
