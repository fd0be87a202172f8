"""The calls of older engines, over tensors of pointers and handles: each of them is `allreduce_fusion`."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.comm._patterns import PATTERNS
from flashinfer.comm._workspaces import AllReduceFusionWorkspace, TRTLLMAllReduceFusionWorkspace
from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.comm_backend import CommBackend
from flashinfer.comm.cuda_ipc import tensor_at
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern
from flashinfer.ops import layouts
from flashinfer.ops.comm.allreduce_fusion import config
from flashinfer.ops.comm.capability import Capability
from flashinfer.ops.comm.symmetric import SLOTTED, Link, PeerMemory, header

# The workspace behind a tensor of pointers, by its address; it lives as long as the tensor, which holds it.
_WORKSPACES: weakref.WeakValueDictionary[int, AllReduceFusionWorkspace] = weakref.WeakValueDictionary()
# Handles of `vllm_init_custom_ar`.
_HANDLES: dict[int, AllReduceFusionWorkspace] = {}
_next_handle = itertools.count(1)
# Bytes of the flags and slots of a `vllm_init_custom_ar`: slots of 16 KiB for 8 ranks.
_META_BYTES = 33 << 20


class _Handles(list):
    """Addresses of each buffer on every rank, and the workspace they belong to."""

    workspace: AllReduceFusionWorkspace


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    create_metadata: bool = False,
    comm_backend: CommBackend | None = None,
    use_symm_dev_mem: bool = False,
) -> tuple:
    """Set up what the `trtllm_` functions exchange rows through. A collective call.

    Parameters
    ----------
    tp_rank, tp_size, max_token_num, hidden_dim, group, comm_backend
        As in `flashinfer.comm.TRTLLMAllReduceFusionWorkspace`.
    use_fp32_lamport : bool
        Rows are float32, and not of 16 bits.
    create_metadata : bool
        A dict with these arguments is the last of the results.
    use_symm_dev_mem : bool
        A list of memory handles, which is empty, stands before it. How memory is shared is found out either way.

    Returns
    -------
    tuple
        Addresses of three buffers on every rank, which here are one; the tensor to be passed on as `workspace_ptrs`,
        int64; then as said above.
    """
    dtype = torch.float32 if use_fp32_lamport else torch.float16
    # The MoE functions always send in one shot.
    ws = TRTLLMAllReduceFusionWorkspace(
        tp_size, tp_rank, max_token_num, hidden_dim, dtype, comm_backend, group, one_shot=True
    )
    addresses = ws.link.memory.addresses if isinstance(ws.link, Link) else [0] * ws.world_size
    handles = _Handles([list(addresses) for _ in range(3)])
    handles.workspace = ws
    pointers = torch.tensor(addresses * 3, dtype=torch.int64, device=ws.link.device)
    setattr(pointers, "workspace", ws)
    _WORKSPACES[pointers.data_ptr()] = ws
    if not create_metadata:
        return handles, pointers
    metadata = {
        "tp_rank": tp_rank, "tp_size": ws.world_size, "max_token_num": max_token_num, "hidden_dim": hidden_dim,
        "use_fp32_lamport": use_fp32_lamport,
        "buffer_size": ws.world_size * max_token_num * hidden_dim * dtype.itemsize,
    }  # fmt: skip
    return (handles, pointers, [], metadata) if use_symm_dev_mem else (handles, pointers, metadata)


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace: list, group=None) -> None:
    """Free what `trtllm_create_ipc_workspace_for_all_reduce_fusion` set up: its first result. `group` is not needed."""
    named = "the list of trtllm_create_ipc_workspace_for_all_reduce_fusion"
    if not isinstance(workspace, _Handles):
        raise ValueError(f"workspace: got {type(workspace).__name__}; allowed: {named}")
    workspace.workspace.destroy()


def trtllm_destroy_ipc_workspace_for_all_reduce(workspace: list, group=None) -> None:
    """The same as `trtllm_destroy_ipc_workspace_for_all_reduce_fusion`."""
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace, group)


def trtllm_lamport_initialize(buffer_ptr: int, size: int, dtype: torch.dtype) -> None:
    """Fill `size` elements of a floating `dtype` at an address with negative zeros. No exchange here needs that."""
    require(dtype.is_floating_point, "dtype", dtype, "a floating-point dtype")
    require(size >= 0, "size", size, "at least 0")
    if size:
        tensor_at(buffer_ptr, size * dtype.itemsize).view(dtype).fill_(-0.0)


def trtllm_lamport_initialize_all(
    buffer_0_ptr: int, buffer_1_ptr: int, buffer_2_ptr: int, size: int, dtype: torch.dtype
) -> None:
    """`trtllm_lamport_initialize` of three buffers."""
    for address in (buffer_0_ptr, buffer_1_ptr, buffer_2_ptr):
        trtllm_lamport_initialize(address, size, dtype)


@checked
def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Bytes of NVFP4 scales [total_row, total_column] in the layout of 128 x 4 tiles.

    Examples
    --------
    >>> from flashinfer.comm import compute_fp4_swizzled_layout_sf_size
    >>> compute_fp4_swizzled_layout_sf_size(1, 16)
    2048
    """
    rows, columns = layouts.padded(total_row, total_column, "128x4")
    return rows * columns


def trtllm_allreduce_fusion(
    allreduce_in: torch.Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: torch.Tensor | None,
    residual_in: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    rms_gamma: torch.Tensor | None,
    rms_eps: float | None,
    scale_factor: torch.Tensor | float | None,
    layout_code: int | None,
    metadata: dict | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """`flashinfer.comm.allreduce_fusion`, with rows [token_num, hidden_dim] in any shape and results that are given.

    Parameters
    ----------
    workspace_ptrs : torch.Tensor
        Of `trtllm_create_ipc_workspace_for_all_reduce_fusion`.
    world_size, world_rank, token_num, hidden_dim : int
        They are checked.
    metadata : dict, optional
        Of the same function; the call is checked against it.
    rms_eps, weight_bias : float, optional
        1e-6 and 0 by default.
    scale_factor, layout_code
        Of patterns that quantise, and to FP4; without effect in others.

    Raises
    ------
    ValueError
        An argument other than the above, or as `allreduce_fusion` raises it.
    TimeoutError
        As `allreduce_fusion` raises it.
    """
    ws = _workspace_of(workspace_ptrs, world_size, world_rank)
    require(pattern_code in PATTERNS, "pattern_code", pattern_code, "an AllReduceFusionPattern")
    for name, value in (metadata or {}).items():
        bound = {"tp_size": world_size == value, "max_token_num": token_num <= value, "hidden_dim": hidden_dim == value}
        got = {"tp_size": world_size, "max_token_num": token_num, "hidden_dim": hidden_dim}.get(name)
        require(bound.get(name, True), f"metadata[{name!r}]", value, f"what fits {got}, of the call")
    kind = PATTERNS[pattern_code]
    shape = (token_num, hidden_dim)
    require(allreduce_in.numel() == token_num * hidden_dim, "allreduce_in", tuple(allreduce_in.shape), f"{shape}")
    rows: dict[str, Any] = {
        "input": allreduce_in, "output": allreduce_out, "residual_in": residual_in, "residual_out": residual_out,
        "norm_out": norm_out,
    }  # fmt: skip
    rows = {name: None if x is None else x.view(shape) for name, x in rows.items()}
    if not kind.norm:
        require(allreduce_out is not None, "allreduce_out", None, "a tensor, for the pattern writes it")
        # What a pattern without a norm does not use is passed along by callers of this function.
        rows |= {"residual_in": None, "residual_out": None, "norm_out": None}
        rms_gamma = None
    if not kind.number_format:
        quant_out = scale_out = None
    allreduce_fusion(
        workspace=ws, pattern=pattern_code, launch_with_pdl=launch_with_pdl,
        trigger_completion_at_end=trigger_completion_at_end, quant_out=quant_out,
        scale_out=None if kind.number_format == "fp8" else scale_out, rms_gamma=rms_gamma,
        rms_eps=1e-6 if rms_eps is None else rms_eps, scale_factor=scale_factor if kind.number_format else None,
        layout_code=layout_code if kind.number_format == "nvfp4" else None, use_oneshot=use_oneshot, fp32_acc=fp32_acc,
        block_quant_group_size=block_quant_group_size if kind.number_format == "fp8_group" else None,
        weight_bias=weight_bias or 0.0 if kind.norm else 0.0, **rows,
    )  # fmt: skip


def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    residual_in: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    scale_factor: float,
    moe_reduction_device_num_experts: int,
    moe_reduction_scale_input: torch.Tensor,
    moe_reduction_active_experts_token_input: torch.Tensor,
    moe_reduction_token_input: torch.Tensor,
    layout_code: int | None,
    moe_allreduce_out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """`flashinfer.comm.allreduce_fusion` with the pattern kMoEReductionARResidualRMSNorm.

    Parameters are those of `trtllm_allreduce_fusion` and of that pattern. `backend` is "trtllm" or "cake", upstream's
    two implementations; there is one here.
    """
    ws = _workspace_of(workspace_ptrs, world_size, world_rank)
    require(backend in ("trtllm", "cake"), "backend", repr(backend), "'trtllm', 'cake'")
    shape = (token_num, hidden_dim)
    tokens = moe_reduction_token_input.view(shape)
    quantised = quant_out is not None
    allreduce_fusion(
        tokens, ws, AllReduceFusionPattern.kMoEReductionARResidualRMSNorm, launch_with_pdl,
        output=_as(moe_allreduce_out, shape), residual_out=_as(residual_out, shape), norm_out=_as(norm_out, shape),
        quant_out=quant_out, scale_out=scale_out if quantised else None, residual_in=residual_in.view(shape),
        rms_gamma=rms_gamma, rms_eps=rms_eps, scale_factor=scale_factor if quantised else None,
        layout_code=layout_code if quantised else None, use_oneshot=True,
        moe_reduction_device_num_experts=moe_reduction_device_num_experts,
        moe_reduction_scale_input=moe_reduction_scale_input,
        moe_reduction_active_experts_token_input=moe_reduction_active_experts_token_input,
        moe_reduction_token_input=tokens, weight_bias=weight_bias or 0.0,
    )  # fmt: skip


def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: torch.Tensor,
    residual_in: torch.Tensor,
    norm_weight: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    norm_out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    world_rank: int,
    world_size: int,
    eps: float,
    shared_expert_output: torch.Tensor | None,
    expert_scale_factor: torch.Tensor | None,
    routed_scaling_factor: float | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """`flashinfer.comm.allreduce_fusion` with the pattern kMoEFinalizeARResidualRMSNorm.

    Parameters are those of that pattern. routed_scaling_factor, 1 by default, multiplies the experts' rows, and not
    shared_expert_output. quant_out is NVFP4 with scales in 128 x 4 tiles and no global scale. `backend` is "trtllm" or
    "cake", upstream's two implementations; there is one here.
    """
    ws = _workspace_of(workspace_ptrs, world_size, world_rank)
    require(backend in ("trtllm", "cake"), "backend", repr(backend), "'trtllm', 'cake'")
    if routed_scaling_factor not in (None, 1, 1.0):
        if expert_scale_factor is None:
            shape = expanded_idx_to_permuted_idx.shape
            expert_scale_factor = torch.ones(shape, dtype=torch.float32, device=allreduce_in.device)
        expert_scale_factor = expert_scale_factor.float() * routed_scaling_factor
    allreduce_fusion(
        allreduce_in, ws, AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm, launch_with_pdl,
        residual_out=residual_out, norm_out=norm_out, quant_out=quant_out,
        scale_out=scale_out if quant_out is not None else None, residual_in=residual_in, rms_gamma=norm_weight,
        rms_eps=eps, use_oneshot=True, expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        expert_scale_factor=expert_scale_factor, shared_expert_output=shared_expert_output,
        weight_bias=weight_bias or 0.0,
    )  # fmt: skip


def _as(x: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor | None:
    return None if x is None else x.view(shape)


def _workspace_of(pointers: torch.Tensor, world_size: int, world_rank: int) -> AllReduceFusionWorkspace:
    ws = _WORKSPACES.get(pointers.data_ptr())
    named = "a tensor of trtllm_create_ipc_workspace_for_all_reduce_fusion"
    if ws is None:
        raise ValueError(f"workspace_ptrs: got a tensor of another origin; allowed: {named}")
    require(world_size == ws.world_size, "world_size", world_size, f"{ws.world_size}, of the workspace")
    require(world_rank == ws.rank, "world_rank", world_rank, f"{ws.rank}, of the workspace")
    return ws


def vllm_meta_size() -> int:
    """Bytes that a buffer of `vllm_init_custom_ar` has to have at least."""
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
    """Bytes and offsets of what a graph has to register: none, for inputs are not shared."""
    _of_handle(fa)
    return [], []


def vllm_register_buffer(fa: int, fake_ipc_ptrs: list[int]) -> None:
    """Nothing is registered: inputs are not shared. The handle and the number of addresses are checked."""
    ws = _of_handle(fa)
    count = len(fake_ipc_ptrs)
    require(count == ws.world_size, "fake_ipc_ptrs", f"{count} addresses", f"{ws.world_size}, one a rank")


def vllm_register_graph_buffers(fa: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
    """Nothing is registered, as `vllm_get_graph_buffer_ipc_meta` says: lists of every rank's must be empty."""
    _of_handle(fa)
    for name, value in (("handles", handles), ("offsets", offsets)):
        require(not any(value), name, value, "empty lists, as vllm_get_graph_buffer_ipc_meta gives them")


def vllm_dispose(fa: int) -> None:
    """Forget a handle. The buffers are the caller's."""
    _of_handle(fa).destroy()
    del _HANDLES[fa]
