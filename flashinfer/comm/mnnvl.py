"""Memory of several GPUs, and what the machine can do with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashinfer._core.checks import require
from flashinfer.comm.comm_backend import CommBackend, TorchDistBackend
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.symmetric import allocate, device_attribute


@dataclass
class MnnvlConfig:
    """How a workspace is set up.

    Attributes
    ----------
    comm_backend : CommBackend, optional
        The processes that share it; by default the default process group.
    fabric_page_size, allocation_granularity : int
        Of upstream's allocator; memory here has none, and they change nothing.
    """

    comm_backend: CommBackend | None = None
    fabric_page_size: int = 1 << 29
    allocation_granularity: int = 0


def is_mnnvl_fabric_supported(device_idx: int) -> bool:
    """Whether memory of this GPU can be exported over an NVLink fabric of several nodes, as the driver says."""
    return device_attribute("CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED", device_idx)


def is_multicast_supported(device_idx: int) -> bool:
    """Whether this GPU can write to several at once (NVLink multicast), as the driver says. Nothing here does."""
    return device_attribute("CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED", device_idx)


def all_ranks_agree(comm: CommBackend, local: Any) -> bool:
    """Whether `local` is true on every rank of `comm`. A collective call, with the same answer on every rank."""
    return all(bool(value) for value in comm.allgather(bool(local)))


class McastGPUBuffer:
    """Memory on every rank's GPU that all ranks reach, by addresses of its own for each rank.

    There is no multicast address here, and what asks for one is refused.

    Parameters
    ----------
    buf_size : int
        Bytes on each rank.
    group_size, group_rank : int
        Of the ranks that share it.
    device : torch.device
        This rank's, a CUDA device.
    comm_backend_for_handle_transfer : CommBackend, optional
        The ranks; by default the default process group.

    Raises
    ------
    ValueError
        Ranks other than `group_size` and `group_rank` say.
    RuntimeError
        The GPUs cannot reach each other's memory.
    """

    def __init__(
        self,
        buf_size: int,
        group_size: int,
        group_rank: int,
        device: torch.device,
        comm_backend_for_handle_transfer: CommBackend | None = None,
    ):
        backend = comm_backend_for_handle_transfer
        if backend is None and group_size > 1:
            backend = TorchDistBackend()
        ranks = Ranks(backend=backend)
        require(ranks.size == group_size, "group_size", group_size, f"{ranks.size}, the size of the group")
        require(ranks.rank == group_rank, "group_rank", group_rank, f"{ranks.rank}, the rank in the group")
        device = torch.device(device)
        require(device.type == "cuda" or group_size == 1, "device", device, "a CUDA device")
        self.buf_size, self.group_size, self.group_rank, self.device = buf_size, group_size, group_rank, device
        self._memory = allocate(ranks, buf_size, device)
        self._addresses = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)

    def lamport_initialize(self, rank: int, dtype: torch.dtype) -> None:
        """Fill this rank's memory with negative zeros of a floating `dtype`. `rank` is this rank."""
        require(rank == self.group_rank, "rank", rank, f"{self.group_rank}, this rank")
        require(dtype.is_floating_point, "dtype", dtype, "a floating-point dtype")
        self._memory.own[: self.buf_size // dtype.itemsize * dtype.itemsize].view(dtype).fill_(-0.0)

    def get_unicast_buffer(self, sizes, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """This rank's memory as a tensor, from `storage_offset` elements on."""
        count = torch.Size(sizes).numel()
        end = (storage_offset + count) * dtype.itemsize
        require(end <= self.buf_size, "sizes", tuple(sizes), f"what {self.buf_size} bytes hold")
        return self._memory.own[storage_offset * dtype.itemsize : end].view(dtype).view(torch.Size(sizes))

    def get_unicast_ptr(self, rank: int) -> int:
        """The address in this process of the memory of `rank`."""
        return self._memory.addresses[rank]

    def get_buffer_ptrs_dev(self) -> int:
        """The address on the device of the array of all ranks' addresses."""
        return self._addresses.data_ptr()

    def get_multicast_buffer(self, sizes, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """There is none: RuntimeError."""
        raise RuntimeError("get_multicast_buffer: this memory has no multicast address; use get_unicast_buffer")

    def get_multicast_ptr(self) -> int:
        """There is none: RuntimeError."""
        raise RuntimeError("get_multicast_ptr: this memory has no multicast address; use get_unicast_ptr")


__all__ = [
    "CommBackend",
    "McastGPUBuffer",
    "MnnvlConfig",
    "TorchDistBackend",
    "all_ranks_agree",
    "is_mnnvl_fabric_supported",
    "is_multicast_supported",
]
