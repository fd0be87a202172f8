"""The calls of older engines, over tensors of pointers and handles: each of them is `allreduce_fusion`."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from flashinfer._core.arguments import checked, checked_late
from flashinfer._core.checks import require
from flashinfer.comm._patterns import PATTERNS
from flashinfer.comm._workspaces import AllReduceFusionWorkspace, TRTLLMAllReduceFusionWorkspace
from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.comm_backend import CommBackend
from flashinfer.comm.cuda_ipc import tensor_at
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern
from flashinfer.ops import layouts
from flashinfer.ops.comm.symmetric import Link

# The workspace behind a tensor of pointers, by its address; it lives as long as the tensor, which holds it.
_WORKSPACES: weakref.WeakValueDictionary[int, AllReduceFusionWorkspace] = weakref.WeakValueDictionary()


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
        A list of memory handles, which is empty, stands before it: with create_metadata alone. How memory is shared is
        found out either way.

    Returns
    -------
    tuple
        Addresses of three buffers on every rank, which here are one; the tensor to be passed on as `workspace_ptrs`,
        int64; then as said above.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """
    require(create_metadata or not use_symm_dev_mem, "use_symm_dev_mem", True, "False without create_metadata")
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
    metadata = ws.metadata | {"buffer_size": ws.world_size * max_token_num * hidden_dim * dtype.itemsize}
    return (handles, pointers, [], metadata) if use_symm_dev_mem else (handles, pointers, metadata)


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace: list, group=None) -> None:
    """Free what `trtllm_create_ipc_workspace_for_all_reduce_fusion` set up: its first result. `group` is not needed.

    Parameters
    ----------
    workspace : list
        The first result of `trtllm_create_ipc_workspace_for_all_reduce_fusion`.
    group : ProcessGroup, optional
        Not needed.

    Raises
    ------
    ValueError
        Another list.
    """
    named = "the list of trtllm_create_ipc_workspace_for_all_reduce_fusion"
    if not isinstance(workspace, _Handles):
        raise ValueError(f"workspace: got {type(workspace).__name__}; allowed: {named}")
    workspace.workspace.destroy()


def trtllm_destroy_ipc_workspace_for_all_reduce(workspace: list, group=None) -> None:
    """The same as `trtllm_destroy_ipc_workspace_for_all_reduce_fusion`.

    Parameters
    ----------
    workspace, group
        As in `trtllm_destroy_ipc_workspace_for_all_reduce_fusion`.

    Raises
    ------
    ValueError
        Another list.
    """
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace, group)


def trtllm_lamport_initialize(buffer_ptr: int, size: int, dtype: torch.dtype) -> None:
    """Fill `size` elements of a floating `dtype` at an address with negative zeros. No exchange here needs that.

    Parameters
    ----------
    buffer_ptr : int
        The address, of memory on the current device.
    size : int
        Elements.
    dtype : torch.dtype
        A floating-point one.

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    require(dtype.is_floating_point, "dtype", dtype, "a floating-point dtype")
    require(size >= 0, "size", size, "at least 0")
    if size:
        tensor_at(buffer_ptr, size * dtype.itemsize).view(dtype).fill_(-0.0)


def trtllm_lamport_initialize_all(
    buffer_0_ptr: int, buffer_1_ptr: int, buffer_2_ptr: int, size: int, dtype: torch.dtype
) -> None:
    """`trtllm_lamport_initialize` of three buffers.

    Parameters
    ----------
    buffer_0_ptr, buffer_1_ptr, buffer_2_ptr : int
        The addresses.
    size : int
        Elements of each.
    dtype : torch.dtype
        A floating-point one.

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    for address in (buffer_0_ptr, buffer_1_ptr, buffer_2_ptr):
        trtllm_lamport_initialize(address, size, dtype)


@checked
def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Bytes of NVFP4 scales [total_row, total_column] in the layout of 128 x 4 tiles.

    Parameters
    ----------
    total_row, total_column : int
        Rows, and scales of a row: elements / 16.

    Returns
    -------
    int
        Bytes: rows are padded to 128, columns to 4.

    Raises
    ------
    TypeError
        What is no number.

    Examples
    --------
    >>> from flashinfer.comm import compute_fp4_swizzled_layout_sf_size
    >>> compute_fp4_swizzled_layout_sf_size(1, 16)
    2048
    """
    rows, columns = layouts.padded(total_row, total_column, "128x4")
    return rows * columns


@checked_late
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
    allreduce_in : torch.Tensor
        token_num * hidden_dim elements; bfloat16, float16 or float32, contiguous.
    world_size, world_rank, token_num, hidden_dim : int
        They are checked.
    workspace_ptrs : torch.Tensor
        Of `trtllm_create_ipc_workspace_for_all_reduce_fusion`.
    launch_with_pdl, trigger_completion_at_end, fp32_acc : bool
        As in `allreduce_fusion`: they change no result.
    pattern_code : int
        An `AllReduceFusionPattern`, which says what of the following is read and written.
    use_oneshot : bool, optional
        How rows travel; by their size where it is None.
    allreduce_out, residual_in, residual_out, norm_out : torch.Tensor, optional
        As many elements in allreduce_in's dtype. What a pattern does not use is left alone.
    quant_out, scale_out : torch.Tensor, optional
        Codes and scales of patterns that quantise, as in `allreduce_fusion`.
    rms_gamma : torch.Tensor, optional
        [hidden_dim], the norm's weight.
    rms_eps, weight_bias : float, optional
        1e-6 and 0 by default.
    scale_factor, layout_code
        Of patterns that quantise, and to FP4; without effect in others.
    metadata : dict, optional
        Of the same function. The call has as many ranks, no more elements, and float32 if that has.
    block_quant_group_size : int, optional
        Elements of a group, of patterns with FP8 groups.

    Raises
    ------
    ValueError
        An argument other than the above, or as `allreduce_fusion` raises it.
    TimeoutError
        As `allreduce_fusion` raises it.
    """
    ws = _workspace_of(workspace_ptrs, world_size, world_rank)
    require(pattern_code in PATTERNS, "pattern_code", pattern_code, "an AllReduceFusionPattern")
    if metadata is not None:
        _check_metadata(metadata, world_size, token_num * hidden_dim, allreduce_in.dtype)
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


@checked_late
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
    """`flashinfer.comm.allreduce_fusion` with the pattern kMoEReductionARResidualRMSNorm, rows in any shape.

    Parameters
    ----------
    world_size, world_rank, token_num, hidden_dim, workspace_ptrs, launch_with_pdl, rms_gamma
        As in `trtllm_allreduce_fusion`.
    residual_in : torch.Tensor
        token_num * hidden_dim elements, added to the sum.
    rms_eps, weight_bias : float
        Of the norm; weight_bias, 0 by default, is added to rms_gamma.
    scale_factor, layout_code
        Global scale and layout of the scales, with quant_out.
    moe_reduction_device_num_experts : int
        Experts of this rank.
    moe_reduction_scale_input : torch.Tensor
        float32 [experts, token_num]: weights of the experts' rows.
    moe_reduction_active_experts_token_input : torch.Tensor
        [experts, token_num, hidden_dim]: the experts' rows.
    moe_reduction_token_input : torch.Tensor
        token_num * hidden_dim elements: rows that are added without a weight.
    moe_allreduce_out, residual_out, norm_out : torch.Tensor, optional
        Receive the sum, the sum with the residual, and its norm.
    quant_out, scale_out : torch.Tensor, optional
        NVFP4 codes of the norm and their scales.
    backend : str
        "trtllm" or "cake", upstream's two implementations; there is one here.

    Raises
    ------
    ValueError
        An argument other than the above, or as `allreduce_fusion` raises it.
    TimeoutError
        As `allreduce_fusion` raises it.
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


@checked_late
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

    Parameters
    ----------
    allreduce_in : torch.Tensor
        [rows, hidden]: what this rank's experts gave.
    residual_in, norm_weight : torch.Tensor
        [tokens, hidden] and [hidden].
    expanded_idx_to_permuted_idx : torch.Tensor
        int32 [tokens, top_k]: the row of each choice, negative where another rank has it.
    norm_out, residual_out : torch.Tensor, optional
        Receive the norm, and the sum with the residual.
    quant_out, scale_out : torch.Tensor, optional
        NVFP4 codes of the norm without a global scale, and their scales in 128 x 4 tiles.
    workspace_ptrs, launch_with_pdl, world_size, world_rank
        As in `trtllm_allreduce_fusion`.
    eps, weight_bias : float
        Of the norm; weight_bias, 0 by default, is added to norm_weight.
    shared_expert_output : torch.Tensor, optional
        [tokens, hidden], added to the experts' rows.
    expert_scale_factor : torch.Tensor, optional
        [tokens, top_k]: weights of the rows.
    routed_scaling_factor : float, optional
        1 by default; multiplies the experts' rows, and not shared_expert_output.
    backend : str
        "trtllm" or "cake", upstream's two implementations; there is one here.

    Raises
    ------
    ValueError
        An argument other than the above, or as `allreduce_fusion` raises it.
    TimeoutError
        As `allreduce_fusion` raises it.
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


def _check_metadata(metadata: dict, world_size: int, count: int, dtype: torch.dtype) -> None:
    """Refuse a call of `count` elements of a rank that a workspace was not made for."""
    names = ("tp_size", "max_token_num", "hidden_dim", "use_fp32_lamport")
    missing = [name for name in names if name not in metadata]
    require(not missing, "metadata", f"no {', '.join(missing)}", "a dict with " + ", ".join(names))
    ranks, tokens, hidden, wide = (metadata[name] for name in names)
    require(ranks == world_size, "metadata['tp_size']", ranks, f"{world_size}, of the call")
    require(count <= tokens * hidden, "metadata['max_token_num']", tokens, f"rows of {hidden} for {count} elements")
    named = "metadata['use_fp32_lamport']"
    require(wide == (dtype == torch.float32), named, wide, f"{dtype == torch.float32}, for {dtype}")


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
