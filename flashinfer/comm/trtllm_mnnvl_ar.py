"""Upstream's functions over an MNNVL workspace: each of them `allreduce_fusion`."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked_late
from flashinfer._core.checks import require
from flashinfer.comm._workspaces import MNNVLAllreduceFusionStrategy, MNNVLAllReduceFusionWorkspace
from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.comm_backend import CommBackend, TorchDistBackend
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern as P
from flashinfer.comm.trtllm_ar import QuantizationSFLayout
from flashinfer.ops import layouts

_AUTO = MNNVLAllreduceFusionStrategy.AUTO
_LAYOUTS = {QuantizationSFLayout.SWIZZLED_128x4: "128x4", QuantizationSFLayout.LINEAR: "linear"}


class MNNVLQuantType:
    """How `trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant` quantises."""

    NONE = 0
    FP8 = 1
    NVFP4 = 2
    DYNAMIC_FP8 = 3


def mpi_barrier() -> None:
    """Wait for every rank of the default process group, if there is one, by the deadline of set-ups."""
    if torch.distributed.is_initialized():
        TorchDistBackend().barrier()


def get_allreduce_mnnvl_workspace(
    mapping: Mapping,
    dtype: torch.dtype,
    comm_backend_for_handle_transfer: CommBackend | None = None,
    buffer_size_in_bytes: int | None = None,
) -> tuple[MNNVLAllReduceFusionWorkspace, torch.Tensor, int]:
    """A workspace, the tensor that older calls name it by, and how many elements fit. A collective call.

    buffer_size_in_bytes is 12 MiB by default.
    """
    nbytes = 12 << 20 if buffer_size_in_bytes is None else buffer_size_in_bytes
    ws = MNNVLAllReduceFusionWorkspace(
        mapping, dtype=dtype, buffer_size_in_bytes=nbytes, comm_backend=comm_backend_for_handle_transfer
    )
    return ws, ws.buffer_flags, nbytes // dtype.itemsize


@checked_late
def trtllm_mnnvl_allreduce(
    input: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    launch_with_pdl: bool,
    output: torch.Tensor | None = None,
    strategy: MNNVLAllreduceFusionStrategy = _AUTO,
) -> torch.Tensor:
    """The sum of `input` [tokens, hidden] over ranks: `allreduce_fusion` with kAllReduce."""
    _check(input, strategy)
    output = torch.empty_like(input) if output is None else output
    return allreduce_fusion(
        input, workspace, P.kAllReduce, launch_with_pdl, output=output, use_oneshot=strategy.one_shot()
    )


@checked_late
def trtllm_mnnvl_fused_allreduce_add_rmsnorm(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    epsilon: float | None = None,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
    strategy: MNNVLAllreduceFusionStrategy = _AUTO,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of sum + residual_in, and that sum: `allreduce_fusion` with kARResidualRMSNorm.

    epsilon is the dtype's machine epsilon by default.
    """
    _check(input, strategy)
    output = torch.empty_like(input) if output is None else output
    residual_out = torch.empty_like(input) if residual_out is None else residual_out
    allreduce_fusion(
        input, workspace, P.kARResidualRMSNorm, launch_with_pdl, residual_out=residual_out, norm_out=output,
        residual_in=residual_in, rms_gamma=gamma, rms_eps=_epsilon(input, epsilon), use_oneshot=strategy.one_shot(),
        weight_bias=weight_bias,
    )  # fmt: skip
    return output, residual_out


@checked_late
def trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    epsilon: float | None = None,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    output_scale: torch.Tensor | float | None = None,
    layout_code: int = QuantizationSFLayout.SWIZZLED_128x4,
    quant_type: int = MNNVLQuantType.NONE,
    launch_with_pdl: bool = False,
    strategy: MNNVLAllreduceFusionStrategy = _AUTO,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """The same, with the norm quantised: (quant_out, scale_out, residual_out, output).

    Parameters
    ----------
    output : torch.Tensor, optional
        Receives the norm, too.
    quant_out, scale_out : torch.Tensor, optional
        As `allreduce_fusion` has them; scale_out is not written for MNNVLQuantType.FP8, and None is returned.
    output_scale : torch.Tensor or float, optional
        `scale_factor` of `allreduce_fusion`, 1 by default; of no effect for DYNAMIC_FP8.
    layout_code : int
        Of NVFP4: SWIZZLED_128x4 or LINEAR.
    quant_type : int
        FP8, NVFP4 or DYNAMIC_FP8 of MNNVLQuantType.

    Raises
    ------
    ValueError
        An argument other than the above, and as `allreduce_fusion` raises it.
    """
    _check(input, strategy)
    patterns = {
        MNNVLQuantType.FP8: (P.kARResidualRMSNormFP8Quant, P.kARResidualRMSNormOutFP8Quant),
        MNNVLQuantType.NVFP4: (P.kARResidualRMSNormFP4Quant, P.kARResidualRMSNormOutFP4Quant),
        MNNVLQuantType.DYNAMIC_FP8: (P.kARResidualRMSNormDynamicFP8Quant, P.kARResidualRMSNormOutDynamicFP8Quant),
    }.get(quant_type)
    if patterns is None:
        raise ValueError(f"quant_type: got {quant_type}; allowed: FP8, NVFP4 or DYNAMIC_FP8 of MNNVLQuantType")
    fp4, (tokens, hidden) = quant_type == MNNVLQuantType.NVFP4, input.shape
    require(not fp4 or layout_code in _LAYOUTS, "layout_code", layout_code, "SWIZZLED_128x4, LINEAR")
    if quant_out is None:
        shape, dtype = ((tokens, hidden // 2), torch.uint8) if fp4 else ((tokens, hidden), torch.float8_e4m3fn)
        quant_out = torch.empty(shape, dtype=dtype, device=input.device)
    if quant_type == MNNVLQuantType.FP8:
        scale_out = None
    elif scale_out is None:
        shape, dtype = (tokens, 1), torch.float32
        if fp4:
            shape, dtype = layouts.padded(tokens, hidden // 16, _LAYOUTS[layout_code]), torch.float8_e4m3fn
        scale_out = torch.empty(shape, dtype=dtype, device=input.device)
    residual_out = torch.empty_like(input) if residual_out is None else residual_out
    if quant_type == MNNVLQuantType.DYNAMIC_FP8:
        output_scale = None
    elif isinstance(output_scale, torch.Tensor):
        output_scale = output_scale.to(device=input.device, dtype=torch.float32)
    allreduce_fusion(
        input, workspace, patterns[output is not None], launch_with_pdl, residual_out=residual_out, norm_out=output,
        quant_out=quant_out, scale_out=scale_out, residual_in=residual_in, rms_gamma=gamma,
        rms_eps=_epsilon(input, epsilon), scale_factor=output_scale, layout_code=layout_code if fp4 else None,
        use_oneshot=strategy.one_shot(), weight_bias=weight_bias,
    )  # fmt: skip
    return quant_out, scale_out, residual_out, output


def trtllm_mnnvl_all_reduce(
    inp: torch.Tensor,
    multicast_buffer_ptr: int,
    buffer_ptrs_dev: int,
    buffer_M: int,
    buffer_flags_mnnvl: torch.Tensor,
    nranks: int,
    rank: int,
    wait_for_results: bool,
    launch_with_pdl: bool,
    out: torch.Tensor | None = None,
) -> None:
    """`trtllm_mnnvl_allreduce` with an older signature: the workspace is that of `buffer_flags_mnnvl`.

    The pointers and buffer_M are the workspace's own and are not needed. wait_for_results must be True and `out` given:
    a sum is not left for a later call.
    """
    ws = _workspace_of(buffer_flags_mnnvl, nranks, rank)
    require(wait_for_results, "wait_for_results", wait_for_results, "True")
    require(out is not None, "out", None, "a tensor")
    trtllm_mnnvl_allreduce(inp, ws, launch_with_pdl, out)


def trtllm_mnnvl_fused_allreduce_rmsnorm(
    prenorm_output: torch.Tensor,
    normed_output: torch.Tensor,
    shard_input: torch.Tensor,
    multicast_buffer_ptr: int,
    buffer_ptrs_dev: int,
    unicast_ptr: int,
    buffer_M: int,
    buffer_flags_mnnvl: torch.Tensor,
    nranks: int,
    rank: int,
    gamma: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor,
    launch_with_pdl: bool,
) -> None:
    """`trtllm_mnnvl_fused_allreduce_add_rmsnorm` with an older signature, as `trtllm_mnnvl_all_reduce`.

    prenorm_output receives sum + residual, normed_output the norm.
    """
    ws = _workspace_of(buffer_flags_mnnvl, nranks, rank)
    trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        shard_input, residual, gamma, ws, epsilon, normed_output, prenorm_output, launch_with_pdl
    )


def _check(input: torch.Tensor, strategy) -> None:
    require(input.dim() == 2, "input", tuple(input.shape), "[tokens, hidden]")
    require(isinstance(strategy, MNNVLAllreduceFusionStrategy), "strategy", strategy, "an MNNVLAllreduceFusionStrategy")


def _epsilon(input: torch.Tensor, epsilon: float | None) -> float:
    return torch.finfo(input.dtype).eps if epsilon is None else epsilon


def _workspace_of(flags: torch.Tensor, ranks: int, rank: int) -> MNNVLAllReduceFusionWorkspace:
    ws = getattr(flags, "workspace", None)
    if ws is None:
        raise ValueError("buffer_flags_mnnvl: got a tensor of another origin; allowed: buffer_flags of a workspace")
    require(ranks == ws.world_size, "nranks", ranks, f"{ws.world_size}, of the workspace")
    require(rank == ws.rank, "rank", rank, f"{ws.rank}, of the workspace")
    return ws


__all__ = [
    "MNNVLAllReduceFusionWorkspace",
    "MNNVLAllreduceFusionStrategy",
    "MNNVLQuantType",
    "get_allreduce_mnnvl_workspace",
    "mpi_barrier",
    "trtllm_mnnvl_all_reduce",
    "trtllm_mnnvl_allreduce",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant",
    "trtllm_mnnvl_fused_allreduce_rmsnorm",
]
