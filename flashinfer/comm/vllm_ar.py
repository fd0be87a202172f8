"""The all-reduce of older vLLM engines, over buffers that ranks share: each call is `allreduce_fusion`."""

from __future__ import annotations

import itertools

import torch

from flashinfer._core.checks import require
from flashinfer.comm._workspaces import AllReduceFusionWorkspace
from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.cuda_ipc import tensor_at
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern
from flashinfer.ops.comm.allreduce_fusion import config
from flashinfer.ops.comm.capability import Capability
from flashinfer.ops.comm.symmetric import SLOTTED, Link, PeerMemory, header

# Handles of `vllm_init_custom_ar`.
_HANDLES: dict[int, AllReduceFusionWorkspace] = {}
_next_handle = itertools.count(1)
# Bytes of the flags and slots of a `vllm_init_custom_ar`: slots of 16 KiB for 8 ranks.
_META_BYTES = 33 << 20


def vllm_meta_size() -> int:
    """Bytes that a buffer of `vllm_init_custom_ar` has to have at least.

    Returns
    -------
    int
        33 MiB.
    """
    return _META_BYTES


def vllm_init_custom_ar(ipc_tensors: list[int], rank_data: torch.Tensor, rank: int, full_nvlink: bool) -> int:
    """Set up an all-reduce over buffers that ranks share.

    Parameters
    ----------
    ipc_tensors : list of int
        The address in this process of each rank's buffer of `vllm_meta_size()` bytes, zero at first:
        `flashinfer.comm.create_shared_buffer`.
    rank_data : torch.Tensor
        On this rank's device. It is not written.
    rank : int
    full_nvlink : bool
        Whether all GPUs are linked. Kernels are the same either way.

    Returns
    -------
    int
        A handle.

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    world = len(ipc_tensors)
    require(0 < world <= 16, "ipc_tensors", f"{world} addresses", "1 to 16")
    require(0 <= rank < world, "rank", rank, f"0 to {world - 1}")
    area = (_META_BYTES - header(world, 0)) // (2 * SLOTTED * world) // 16 * 16
    own = tensor_at(ipc_tensors[rank], _META_BYTES, rank_data.device)
    ws = AllReduceFusionWorkspace(world, rank)
    ws._area = area
    ws.link = Link(None, PeerMemory(own, list(ipc_tensors), "addresses"), area, rank)
    ws.capability, ws._gone = Capability("peer", "addresses"), ""
    handle = next(_next_handle)
    _HANDLES[handle] = ws
    return handle


def _of_handle(fa: int) -> AllReduceFusionWorkspace:
    require(fa in _HANDLES, "fa", fa, "a handle of vllm_init_custom_ar that is not disposed of")
    return _HANDLES[fa]


def vllm_all_reduce(
    fa: int, inp: torch.Tensor, out: torch.Tensor, reg_buffer: int, reg_buffer_sz_bytes: int, num_ctas: int
) -> None:
    """out = the sum of `inp` over ranks, in float32 and rank order. A collective call.

    Parameters
    ----------
    fa : int
        Of `vllm_init_custom_ar`.
    inp, out : torch.Tensor
        Contiguous; bfloat16, float16 or float32.
    reg_buffer, reg_buffer_sz_bytes : int
        A buffer of `vllm_register_buffer`. Rows go straight into the peers' slots, and it is not used.
    num_ctas : int
        1 to 36, as upstream has it. The size decides how many programs run.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        As `allreduce_fusion` raises it.
    """
    ws = _of_handle(fa)
    require(1 <= num_ctas <= 36, "num_ctas", num_ctas, "1 to 36")
    fits = out.shape == inp.shape and out.dtype == inp.dtype and out.is_contiguous() and inp.is_contiguous()
    require(fits, "out", f"{out.dtype} {tuple(out.shape)}", f"{inp.dtype} {tuple(inp.shape)}, contiguous")
    item = inp.element_size()
    most = 1 << 24
    while not ws._fits(most * item, config.chunk(most) * item, True):
        most //= 2
    for given, result in zip(inp.view(-1).split(most), out.view(-1).split(most), strict=True):
        allreduce_fusion(given, ws, AllReduceFusionPattern.kAllReduce, output=result, use_oneshot=True)


def vllm_get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """Bytes and offsets of what a graph has to register: none, for inputs are not shared.

    Parameters
    ----------
    fa : int
        A handle of `vllm_init_custom_ar`.

    Returns
    -------
    (list of int, list of int)
        Two empty lists.

    Raises
    ------
    ValueError
        A handle that is none or was disposed of.
    """
    _of_handle(fa)
    return [], []


def vllm_register_buffer(fa: int, fake_ipc_ptrs: list[int]) -> None:
    """Nothing is registered: inputs are not shared. The handle and the number of addresses are checked.

    Parameters
    ----------
    fa : int
        A handle of `vllm_init_custom_ar`.
    fake_ipc_ptrs : list of int
        An address for each rank.

    Raises
    ------
    ValueError
        A handle that is none or was disposed of, or another number of addresses.
    """
    ws = _of_handle(fa)
    count = len(fake_ipc_ptrs)
    require(count == ws.world_size, "fake_ipc_ptrs", f"{count} addresses", f"{ws.world_size}, one a rank")


def vllm_register_graph_buffers(fa: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
    """Nothing is registered, as `vllm_get_graph_buffer_ipc_meta` says: lists of every rank's must be empty.

    Parameters
    ----------
    fa : int
        A handle of `vllm_init_custom_ar`.
    handles, offsets : list of list of int
        Of every rank: empty.

    Raises
    ------
    ValueError
        A handle that is none or was disposed of, or a list that is not empty.
    """
    _of_handle(fa)
    for name, value in (("handles", handles), ("offsets", offsets)):
        require(not any(value), name, value, "empty lists, as vllm_get_graph_buffer_ipc_meta gives them")


def vllm_dispose(fa: int) -> None:
    """Forget a handle. The buffers are the caller's.

    Parameters
    ----------
    fa : int
        A handle of `vllm_init_custom_ar`.

    Raises
    ------
    ValueError
        A handle that is none or was disposed of.
    """
    _of_handle(fa).destroy()
    del _HANDLES[fa]
