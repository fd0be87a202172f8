"""Memory of several GPUs, and what the machine can do with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer._core.checks import require
from flashinfer.comm.comm_backend import CommBackend, TorchDistBackend, ranks_named
from flashinfer.comm.mapping import Mapping
from flashinfer.ops.comm.hardware import allocation_granularity, allocation_prop, device_attribute, nvlinks
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.symmetric import PeerMemory, allocate, in_one_process


@dataclass
class MnnvlConfig:
    """How a workspace is set up.

    Attributes
    ----------
    comm_backend : CommBackend, optional
        The processes that share it; by default the default process group.
    allocation_granularity, fabric_page_size : int
        Of upstream's allocator; memory here has none, and they change nothing.
    """

    comm_backend: CommBackend | None = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


def is_mnnvl_fabric_supported(device_idx: int) -> bool:
    """Whether memory of this GPU can be exported over an NVLink fabric of several nodes, as the driver says.

    Parameters
    ----------
    device_idx : int
        The GPU's number.

    Returns
    -------
    bool
        What the driver says; False without one.

    Raises
    ------
    ValueError
        A number of no GPU, where there is one.
    """
    return device_attribute("CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED", device_idx)


def is_multicast_supported(device_idx: int) -> bool:
    """Whether this GPU can write to several at once (NVLink multicast), as the driver says. Nothing here does.

    Parameters
    ----------
    device_idx : int
        The GPU's number.

    Returns
    -------
    bool
        What the driver says; False without one.

    Raises
    ------
    ValueError
        A number of no GPU, where there is one.
    """
    return device_attribute("CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED", device_idx)


def all_ranks_agree(comm: CommBackend, local: Any) -> bool:
    """Whether `local` is true on every rank of `comm`. A collective call.

    Parameters
    ----------
    comm : CommBackend
        The ranks.
    local : bool
        What this rank says.

    Returns
    -------
    bool
        The same on every rank.

    Raises
    ------
    Exception
        What the backend's allgather raises.
    """
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
        ranks = ranks_named(backend, group_size, group_rank, "group_size", "group_rank")
        device = torch.device(device)
        require(device.type == "cuda" or group_size == 1, "device", device, "a CUDA device")
        self.buf_size, self.group_size, self.group_rank, self.device = buf_size, group_size, group_rank, device
        self._memory = allocate(ranks, buf_size, device)
        self._addresses = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)

    def lamport_initialize(self, rank: int, dtype: torch.dtype) -> None:
        """Fill this rank's memory with negative zeros.

        Parameters
        ----------
        rank : int
            This rank.
        dtype : torch.dtype
            A floating-point dtype, of the zeros.

        Raises
        ------
        ValueError
            Another rank or dtype.
        """
        require(rank == self.group_rank, "rank", rank, f"{self.group_rank}, this rank")
        require(dtype.is_floating_point, "dtype", dtype, "a floating-point dtype")
        self._memory.own[: self.buf_size // dtype.itemsize * dtype.itemsize].view(dtype).fill_(-0.0)

    def get_unicast_buffer(self, sizes, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """This rank's memory as a tensor, without a copy.

        Parameters
        ----------
        sizes : sequence of int
            Its shape.
        dtype : torch.dtype
            Of its elements.
        storage_offset : int
            Elements in front of it.

        Returns
        -------
        torch.Tensor
            Contiguous; it is valid while the buffer is.

        Raises
        ------
        ValueError
            The memory is smaller.
        """
        count = torch.Size(sizes).numel()
        end = (storage_offset + count) * dtype.itemsize
        require(end <= self.buf_size, "sizes", tuple(sizes), f"what {self.buf_size} bytes hold")
        return self._memory.own[storage_offset * dtype.itemsize : end].view(dtype).view(torch.Size(sizes))

    def get_unicast_ptr(self, rank: int) -> int:
        """The address in this process of the memory of a rank.

        Parameters
        ----------
        rank : int
            Of the group.

        Returns
        -------
        int

        Raises
        ------
        IndexError
            There is no such rank.
        """
        return self._memory.addresses[rank]

    def get_buffer_ptrs_dev(self) -> int:
        """The address on the device of the array of all ranks' addresses.

        Returns
        -------
        int
        """
        return self._addresses.data_ptr()

    def get_multicast_buffer(self, sizes, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """Raise: there is no multicast address.

        Parameters
        ----------
        sizes, dtype, storage_offset
            As in `get_unicast_buffer`; not read.

        Returns
        -------
        torch.Tensor
            Never.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError("get_multicast_buffer: this memory has no multicast address; use get_unicast_buffer")

    def get_multicast_ptr(self) -> int:
        """Raise RuntimeError: there is no multicast address.

        Returns
        -------
        int
            Never.
        """
        raise RuntimeError("get_multicast_ptr: this memory has no multicast address; use get_unicast_ptr")


class MnnvlMemory:
    """Memory on every rank of a mapping's tensor-parallel group, which all of them reach. A collective constructor.

    Each rank's memory has an address of its own in this process, as `addresses` says; there is no stride from one
    rank's to the next. Where ranks do not reach each other's memory (CPUs), each has its own alone.

    Parameters
    ----------
    mapping : Mapping
        Its tp_rank and tp_size are the ranks, of the backend that `set_comm_from_config` set, or of the default process
        group.
    size : int
        Bytes on each rank; the same on all.

    Attributes
    ----------
    ptr : int
        The address of this rank's memory.
    rank_stride : int
        0: see above.
    addresses : list of int
        Of every rank's memory, as this rank's kernels reach it; of this rank's alone on CPUs.
    segment_size : int

    Raises
    ------
    ValueError
        Ranks that ask for other sizes, or a group that has not got the mapping's ranks.
    TimeoutError
        A rank did not come within the deadline of set-ups.

    Examples
    --------
    >>> memory = flashinfer.comm.mnnvl.MnnvlMemory(flashinfer.comm.Mapping(), 1024)
    >>> memory.as_torch_strided_tensor(torch.float32).shape
    torch.Size([1, 256])
    """

    initialized: bool = False
    comm: CommBackend | None = None
    config: MnnvlConfig | None = None
    dev_id: int | None = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29
    current_rank_stride: int = 0
    allocated_map: dict[int, PeerMemory] = {}

    def __init__(self, mapping: Mapping, size: int):
        self.mapping, self.segment_size = mapping, size
        self.ptr, self.rank_stride = MnnvlMemory.open_mnnvl_memory(mapping, size)
        self.addresses = MnnvlMemory.allocated_map[self.ptr].addresses

    def __del__(self):
        if not sys.is_finalizing() and hasattr(self, "ptr"):
            MnnvlMemory.close_mnnvl_memory(self.ptr)

    @property
    def mapped(self) -> bool:
        """Whether the memory is there: until `close_mnnvl_memory`."""
        return self.ptr in MnnvlMemory.allocated_map

    def as_torch_strided_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's memory as [ranks, elements]: every row is this rank's, for peers' is not mapped into a tensor."""
        require(self.mapped, "memory", "one that is closed", "one that is open")
        own = MnnvlMemory.allocated_map[self.ptr].own
        count = self.segment_size // dtype.itemsize
        return own[: count * dtype.itemsize].view(dtype)[None].expand(self.mapping.tp_size, -1)

    @staticmethod
    def initialize() -> None:
        """Make the current device's context, where there is a GPU."""
        if torch.cuda.is_available():
            torch.cuda.init()
        MnnvlMemory.initialized = True

    @staticmethod
    def set_comm_from_config(mapping: Mapping, config: MnnvlConfig | None = None) -> None:
        """Take the backend of `config`, split into the mapping's tensor-parallel groups. A collective call."""
        MnnvlMemory.config = MnnvlConfig() if config is None else config
        backend = MnnvlMemory.config.comm_backend
        if backend is None and mapping.world_size > 1:
            backend = TorchDistBackend()
        if backend is not None and backend.Get_size() != mapping.tp_size:
            backend = backend.Split(mapping.pp_rank * mapping.cp_size + mapping.cp_rank, mapping.tp_rank)
        MnnvlMemory.comm = backend

    @staticmethod
    def get_comm(mapping: Mapping) -> CommBackend | None:
        """The backend of the mapping's tensor-parallel group; None for one rank without a process group."""
        if MnnvlMemory.comm is None:
            MnnvlMemory.set_comm_from_config(mapping)
        return MnnvlMemory.comm

    @staticmethod
    def get_allocation_prop(dev_id: int):
        """The driver's CUmemAllocationProp of memory on GPU `dev_id` that can be exported. RuntimeError without one."""
        return allocation_prop(dev_id)

    @staticmethod
    def get_allocation_granularity(dev_id: int) -> int:
        """Bytes that such an allocation is a multiple of, as the driver recommends. RuntimeError without a GPU."""
        if MnnvlMemory.allocation_granularity == 0:
            MnnvlMemory.allocation_granularity = allocation_granularity(dev_id)
        return MnnvlMemory.allocation_granularity

    @staticmethod
    def new_mnnvl_memory_address(mapping: Mapping, size: int) -> None:
        """Note what `size` bytes take in pages of `fabric_page_size`. No addresses are reserved: each allocation brings
        its own."""
        require(size > 0, "size", size, "at least 1")
        pages = -(-size // MnnvlMemory.fabric_page_size)
        MnnvlMemory.current_rank_stride = pages * MnnvlMemory.fabric_page_size

    @staticmethod
    def open_mnnvl_memory(mapping: Mapping, size: int) -> tuple[int, int]:
        """Allocate `size` bytes on every rank: (the address of this rank's, 0). A collective call."""
        require(isinstance(size, int) and size > 0, "size", size, "an int of at least 1")
        ranks = Ranks(backend=MnnvlMemory.get_comm(mapping))
        require(ranks.size == mapping.tp_size, "mapping.tp_size", mapping.tp_size, f"{ranks.size}, as in the group")
        sizes = ranks.gather(size)
        require(len(set(sizes)) == 1, "size", sizes, "the same on every rank")
        if torch.cuda.is_available():
            MnnvlMemory.dev_id = torch.cuda.current_device()
            memory = allocate(ranks, size, torch.device("cuda", MnnvlMemory.dev_id))
        else:
            memory = in_one_process(1, size, torch.device("cpu"))[0]
        ptr = memory.addresses[ranks.rank if len(memory.addresses) > 1 else 0]
        MnnvlMemory.allocated_map[ptr] = memory
        return ptr, 0

    @staticmethod
    def close_mnnvl_memory(ptr: int) -> None:
        """Free this rank's memory at `ptr`, and the way to its peers'. They must be done with it. Once is enough."""
        memory = MnnvlMemory.allocated_map.pop(ptr, None)
        if memory is not None:
            memory.close()

    @staticmethod
    def support_nvlink(need_all_up: bool = True) -> bool:
        """Whether the current GPU has NVLinks, and all (or any) of them are up, as the driver's library says."""
        if not torch.cuda.is_available():
            return False
        links = nvlinks(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        return bool(links) and (all(links) if need_all_up else any(links))

    @staticmethod
    def supports_mnnvl() -> bool:
        """Whether ranks' GPUs are expected to reach each other: all NVLinks of the current one are up.

        Nothing here depends on it; `flashinfer.comm.probe` tries.
        """
        return MnnvlMemory.support_nvlink(True)


__all__ = [
    "CommBackend",
    "McastGPUBuffer",
    "MnnvlConfig",
    "MnnvlMemory",
    "TorchDistBackend",
    "all_ranks_agree",
    "is_mnnvl_fabric_supported",
    "is_multicast_supported",
]
