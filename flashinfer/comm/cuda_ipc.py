"""Device memory by address: the CUDA run-time library, buffers that processes share, tensors over addresses."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from flashinfer._core.checks import require
from flashinfer.comm._workspaces import own_device
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.symmetric import PeerMemory, allocate, bytes_at


class cudaIpcMemHandle_t(ctypes.Structure):
    """An IPC handle, 128 bytes."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class CudaRTLibrary:
    """The CUDA run-time library that torch has loaded, by ctypes. Every method raises RuntimeError with CUDA's words.

    Parameters
    ----------
    so_file : str, optional
        Its path; by default that of the library in this process. RuntimeError if there is none.
    """

    def __init__(self, so_file: str | None = None):
        path = _loaded("libcudart") if so_file is None else so_file
        if path is None:
            raise RuntimeError("CudaRTLibrary: this process has no libcudart; so_file may name one")
        self.lib = ctypes.CDLL(path)
        self.lib.cudaGetErrorString.restype = ctypes.c_char_p

    def CUDART_CHECK(self, result: int) -> None:
        """Raise unless a call has succeeded.

        Parameters
        ----------
        result : int
            What a function of the library returned; 0 is success.

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        if result:
            raise RuntimeError(f"CUDART error: {self.cudaGetErrorString(result)}")

    def cudaGetErrorString(self, error: int) -> str:
        """CUDA's words for an error.

        Parameters
        ----------
        error : int
            A result of the library; any number has words.

        Returns
        -------
        str
        """
        return self.lib.cudaGetErrorString(ctypes.c_int(error)).decode()

    def cudaSetDevice(self, device: int) -> None:
        """Make a device the current one of this thread.

        Parameters
        ----------
        device : int
            Its number.

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        self.CUDART_CHECK(self.lib.cudaSetDevice(ctypes.c_int(device)))

    def cudaDeviceSynchronize(self) -> None:
        """Wait for all work on the current device.

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        self.CUDART_CHECK(self.lib.cudaDeviceSynchronize())

    def cudaDeviceReset(self) -> None:
        """Destroy everything that this process has on the current device.

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        self.CUDART_CHECK(self.lib.cudaDeviceReset())

    def cudaMalloc(self, size: int) -> ctypes.c_void_p:
        """Allocate on the current device.

        Parameters
        ----------
        size : int
            Bytes.

        Returns
        -------
        ctypes.c_void_p
            The address; `cudaFree` frees it.

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        address = ctypes.c_void_p()
        self.CUDART_CHECK(self.lib.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)))
        return address

    def cudaFree(self, devPtr: ctypes.c_void_p) -> None:
        """Free what `cudaMalloc` gave.

        Parameters
        ----------
        devPtr : ctypes.c_void_p

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        self.CUDART_CHECK(self.lib.cudaFree(devPtr))

    def cudaMemset(self, devPtr: ctypes.c_void_p, value: int, count: int) -> None:
        """Fill memory on the device.

        Parameters
        ----------
        devPtr : ctypes.c_void_p
            Its address.
        value : int
            For every byte; its low 8 bits count.
        count : int
            Bytes.

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        self.CUDART_CHECK(self.lib.cudaMemset(devPtr, ctypes.c_int(value), ctypes.c_size_t(count)))

    def cudaMemcpy(self, dst: ctypes.c_void_p, src: ctypes.c_void_p, count: int) -> None:
        """Copy between any two places: the library finds out which memory they are.

        Parameters
        ----------
        dst, src : ctypes.c_void_p
            Addresses on the host or a device.
        count : int
            Bytes.

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        from_anywhere = ctypes.c_int(4)
        self.CUDART_CHECK(self.lib.cudaMemcpy(dst, src, ctypes.c_size_t(count), from_anywhere))

    def cudaIpcGetMemHandle(self, devPtr: ctypes.c_void_p) -> cudaIpcMemHandle_t:
        """Make a handle by which another process opens memory of this one.

        Parameters
        ----------
        devPtr : ctypes.c_void_p
            What `cudaMalloc` gave.

        Returns
        -------
        cudaIpcMemHandle_t

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        handle = cudaIpcMemHandle_t()
        self.CUDART_CHECK(self.lib.cudaIpcGetMemHandle(ctypes.byref(handle), devPtr))
        return handle

    def cudaIpcOpenMemHandle(self, handle: cudaIpcMemHandle_t) -> ctypes.c_void_p:
        """Open another process's memory.

        Parameters
        ----------
        handle : cudaIpcMemHandle_t
            From `cudaIpcGetMemHandle` there; not of this process.

        Returns
        -------
        ctypes.c_void_p
            Its address here; `cudaIpcCloseMemHandle` closes it.

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        address, lazily = ctypes.c_void_p(), ctypes.c_uint(1)
        self.CUDART_CHECK(self.lib.cudaIpcOpenMemHandle(ctypes.byref(address), handle, lazily))
        return address

    def cudaIpcCloseMemHandle(self, devPtr: ctypes.c_void_p) -> None:
        """Close what `cudaIpcOpenMemHandle` opened.

        Parameters
        ----------
        devPtr : ctypes.c_void_p

        Raises
        ------
        RuntimeError
            With CUDA's words.
        """
        self.CUDART_CHECK(self.lib.cudaIpcCloseMemHandle(devPtr))


def _loaded(name: str) -> str | None:
    """The path of a library of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith(name):
            return path
    return None


# What `create_shared_buffer` allocated, by the addresses.
_SHARED: dict[tuple[int, ...], tuple[PeerMemory, Ranks]] = {}


def create_shared_buffer(size_in_bytes: int, group: torch.distributed.ProcessGroup | None = None) -> list[int]:
    """Allocate `size_in_bytes`, zero at first, on every rank's GPU. A collective call.

    Parameters
    ----------
    size_in_bytes : int
    group : ProcessGroup, optional
        The default group, if None; one rank needs none.

    Returns
    -------
    list of int
        The address of every rank's, as this process reaches it; they need not be evenly spaced.

    Raises
    ------
    RuntimeError
        The ranks do not reach each other's memory, as on CPUs.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """
    require(size_in_bytes > 0, "size_in_bytes", size_in_bytes, "at least 1")
    if group is None and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    ranks, device = Ranks(group), own_device()
    if device.type != "cuda" and ranks.size > 1:
        raise RuntimeError("create_shared_buffer: ranks on CPUs do not reach each other's memory")
    memory = allocate(ranks, size_in_bytes, device)
    _SHARED[tuple(memory.addresses)] = memory, ranks
    return list(memory.addresses)


def free_shared_buffer(pointers: list[int], group: torch.distributed.ProcessGroup | None = None) -> None:
    """Free what `create_shared_buffer` gave, once every rank is here. A collective call.

    Parameters
    ----------
    pointers : list of int
        What `create_shared_buffer` gave.
    group : ProcessGroup, optional
        That of `create_shared_buffer`, which kept it: not read.

    Raises
    ------
    ValueError
        Addresses that `create_shared_buffer` did not give, or that are freed.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """
    found = _SHARED.pop(tuple(pointers), None)
    if found is None:
        raise ValueError(f"pointers: got {pointers}; allowed: what create_shared_buffer gave and nothing has freed")
    memory, ranks = found
    if memory.own is not None and memory.own.is_cuda:
        torch.cuda.synchronize(memory.own.device)
    if ranks.size > 1:
        ranks.meet("free_shared_buffer")
        ranks.barrier()
    memory.close()


def tensor_at(address: int, nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """The bytes at an address, of a GPU or, where there is none, of the host."""
    device = own_device() if device is None else device
    if device.type == "cuda":
        return bytes_at(address, nbytes, device)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def pack_strided_memory(
    ptr: int, segment_size: int, segment_stride: int, num_segments: int, dtype: torch.dtype, dev_id: int
) -> torch.Tensor:
    """Memory at an address as [num_segments, segment_size / itemsize].

    Parameters
    ----------
    ptr : int
        On GPU `dev_id`, or of the host where there is no GPU.
    segment_size, segment_stride : int
        Bytes of a segment, and from one to the next: whole elements.
    num_segments : int
    dtype : torch.dtype
    dev_id : int

    Returns
    -------
    torch.Tensor
        [segments, elements of a segment], the memory itself.

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    item = dtype.itemsize
    whole = segment_size % item == 0 and segment_stride % item == 0
    require(whole, "segment_size", (segment_size, segment_stride), f"multiples of {item}, with segment_stride")
    require(num_segments > 0, "num_segments", num_segments, "at least 1")
    require(segment_size > 0, "segment_size", segment_size, f"at least {item}")
    device = torch.device("cuda", dev_id) if torch.cuda.is_available() else torch.device("cpu")
    whole = tensor_at(ptr, segment_stride * (num_segments - 1) + segment_size, device).view(dtype)
    return whole.as_strided((num_segments, segment_size // item), (segment_stride // item, 1))
