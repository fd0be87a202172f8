"""All-reduce over the ranks of a group, with what models do with the sum in the same launch."""

from __future__ import annotations

from typing import Literal

import torch

from flashinfer._core.arguments import checked_late
from flashinfer._core.checks import check_spans, dtype_name, is_aligned, present, require, same_device
from flashinfer._core.sizes import power_of_two
from flashinfer.comm._patterns import PATTERNS, Pattern, check_results, given_rows
from flashinfer.comm._workspaces import (
    DTYPES as _DTYPES,
    AllReduceFusionWorkspace,
    MNNVLAllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    ranks_of,
)
from flashinfer.comm.comm_backend import CommBackend
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern
from flashinfer.ops.comm.allreduce_fusion import Norm, Problem, Results, Rows, config
from flashinfer.ops.comm.allreduce_fusion import allreduce_fusion as op
from flashinfer.ops.comm.spoil import spoiled

# What upstream calls its implementations; ours is one.
_BACKENDS = ("auto", "trtllm", "mnnvl")


def create_allreduce_fusion_workspace(
    backend: Literal["auto", "trtllm", "mnnvl"] = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: CommBackend | None = None,
    force_oneshot_support: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    top_k: int | None = None,
    rms_eps: float | None = None,
    weight_bias: float | None = None,
    routed_scaling_factor: float | None = None,
    include_shared_expert: bool | None = None,
    add_residual: bool | None = None,
    write_residual_output: bool | None = None,
    apply_rms_norm: bool | None = None,
    output_dtype: torch.dtype | None = None,
    dynamic_fp8: bool | None = None,
    write_norm_output: bool | None = None,
    config: object | None = None,
    use_fp32_lamport: bool = False,
) -> AllReduceFusionWorkspace:
    """Set up what `allreduce_fusion` exchanges rows through. A collective call of all ranks of the group.

    The current CUDA device's memory is shared with the other ranks where a probe finds that it can be, by symmetric
    memory or CUDA IPC; otherwise, and on CPUs, the process group carries the rows.

    Parameters
    ----------
    backend : str
        "auto", "trtllm" or "mnnvl": upstream's implementations. There is one here; the name is reported.
    world_size, rank : int
        Of the group; they are checked against it. With neither `group` nor `comm_backend`, the default group is meant,
        and must have this size and rank; a world_size of 1 needs none.
    max_token_num, hidden_dim : int
        The most rows, and their length: any shape with as many elements fits, in rows of 32 KiB or of `hidden_dim`.
    dtype : torch.dtype
        bfloat16, float16 or float32; other dtypes fit by their bytes.
    gpus_per_node : int, optional
        Ranks of one node. Reaching memory is probed and not derived from it, so it changes nothing.
    comm_backend : CommBackend, optional
        In place of `group`.
    force_oneshot_support : bool
        Make room to send any size in one shot.
    group : ProcessGroup, optional
    top_k, rms_eps, weight_bias, routed_scaling_factor, include_shared_expert, add_residual, write_residual_output, \
apply_rms_norm, output_dtype, dynamic_fp8, write_norm_output, config
        What upstream specialises a backend of its own for. Only None: here each call says what it needs.
    use_fp32_lamport : bool
        The format of upstream's flags; rows of any dtype go through any workspace, so it changes nothing.

    Returns
    -------
    AllReduceFusionWorkspace

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    only_none = {
        "top_k": top_k, "rms_eps": rms_eps, "weight_bias": weight_bias, "routed_scaling_factor": routed_scaling_factor,
        "include_shared_expert": include_shared_expert, "add_residual": add_residual,
        "write_residual_output": write_residual_output, "apply_rms_norm": apply_rms_norm,
        "output_dtype": output_dtype, "dynamic_fp8": dynamic_fp8, "write_norm_output": write_norm_output,
        "config": config,
    }  # fmt: skip
    for name, value in only_none.items():
        require(value is None, name, value, "None: allreduce_fusion says it with each call")
    require(backend in _BACKENDS, "backend", repr(backend), ", ".join(_BACKENDS))
    if backend == "mnnvl":
        ranks = ranks_of(group, comm_backend, world_size, rank)
        mapping = Mapping(world_size=ranks.size, rank=ranks.rank, tp_size=ranks.size)
        return MNNVLAllReduceFusionWorkspace(
            mapping, max_token_num, hidden_dim, dtype, None, comm_backend, group=group, one_shot=force_oneshot_support
        )
    sizes = {"max_token_num": max_token_num, "hidden_dim": hidden_dim}
    tokens, hidden = (present(name, value, "an int of at least 1") for name, value in sizes.items())
    dtype = present("dtype", dtype, "bfloat16, float16, float32")
    return TRTLLMAllReduceFusionWorkspace(
        world_size, rank, tokens, hidden, dtype, comm_backend, group, one_shot=force_oneshot_support
    )


@checked_late
def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> torch.Tensor:
    """Add the rows of all ranks, and in the same launch add a residual, normalise and quantise, as `pattern` says.

    ``sum = input of rank 0 + input of rank 1 + ...``, in float32 and in this order, so that every rank holds the same
    bits; ``residual_out = sum + residual_in``; ``norm = residual_out / sqrt(mean(residual_out ** 2) + rms_eps) *
    (rms_gamma + weight_bias)`` of the unrounded values. Rows are rounded to their dtype once for each trip between
    ranks.

    Parameters
    ----------
    input : torch.Tensor
        This rank's rows, [tokens, hidden], bfloat16, float16 or float32, contiguous, as all tensors here are; of
        kAllReduce any shape. hidden is at most 16384 on a GPU. Every rank has the same shape and makes the same call.
        Of kMoEReduction..., only its shape and dtype count. Of kMoEFinalize..., the experts' rows
        [permuted rows, hidden].
    workspace : AllReduceFusionWorkspace
    pattern : int
        An AllReduceFusionPattern.
    launch_with_pdl, trigger_completion_at_end : bool
        Programmatic dependent launch. They have no effect on results, and none on the launch yet.
    output : torch.Tensor, optional
        Receives the sum, in the shape of `input` ([tokens, hidden] of kMoEFinalize...). It may be `input` itself, or
        `residual_out` or `norm_out` may; not `residual_in`. Allocated for kAllReduce; otherwise it is written only if
        given.
    residual_out, norm_out : torch.Tensor, optional
        Receive residual_out, which may be `residual_in` itself, and norm; [tokens, hidden]. Allocated where the pattern
        has them. A pattern that does not write norm does so if it is given.
    quant_out, scale_out : torch.Tensor
        Receive codes and scales. FP8Quant: float8_e4m3fn [tokens, hidden] of norm / scale_factor; scale_out is left.
        DynamicFP8Quant: float8_e4m3fn, and a float32 scale for each row, [tokens, 1]: its largest magnitude / 448.
        PerTokenGroupFP8PackedQuant: float8_e4m3fn of the rounded norm, and for each 128 columns the least power of two
        with largest magnitude / scale <= 448, its exponent's byte (ue8m0), those of four groups in an int32,
        [tokens, ceil(hidden / 512)] with any strides. FP4Quant: NVFP4, two codes in a byte of [tokens, hidden / 2], and
        e4m3 block scales in the bytes and the layout of `layout_code`; padding becomes 0. Other dtypes of the same
        bytes are taken. kMoEReduction... and kMoEFinalize... take them, too: in FP4, and FP8 for the FP8Quant pattern.
    residual_in, rms_gamma : torch.Tensor
        [tokens, hidden] in the dtype of `input`, and [hidden].
    rms_eps, weight_bias : float
        Added to the mean square, and to rms_gamma (1 of Gemma's norm; None is 0). Of kAllReduce they have no effect.
    scale_factor : torch.Tensor or float, optional
        A float32 tensor of one element, or a number; 1 by default. It divides before FP8Quant, and multiplies before
        FP4Quant (448 * 6 / the largest magnitude uses the whole range). Where nothing is quantised it has no effect.
    layout_code : int, optional
        Of FP4 scales: 0 128x4 tiles (the default), 1 8x4 tiles, 2 row-major. Other patterns take it without effect, as
        vLLM names it with every pattern.
    use_oneshot : bool, optional
        Send rows to all ranks at once, or (False) by way of the rank that adds them; by default the size decides.
    fp32_acc : bool
        Sums are float32 either way.
    moe_reduction_device_num_experts, moe_reduction_scale_input, moe_reduction_active_experts_token_input, \
moe_reduction_token_input : int and torch.Tensor
        Of kMoEReduction...: this rank's rows are token_input [tokens, hidden] + the sum over its experts of scale_input
        (float32 [experts, tokens]) times active_experts_token_input ([experts, tokens, hidden]).
    expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output : torch.Tensor
        Of kMoEFinalize...: this rank's row is the sum over choices of expert_scale_factor [tokens, top_k] (1 if None)
        times the row of `input` that the index, int32 [tokens, top_k], names, nothing where it is negative; plus
        shared_expert_output [tokens, hidden], if given. An index of no row is refused on CPUs, and not looked for on
        GPUs.
    block_quant_group_size : int, optional
        Of PerTokenGroupFP8PackedQuant: 128; without effect in others.
    moe_finalize_backend : str
        Upstream's implementation; there is one here, and it has no effect.

    Returns
    -------
    torch.Tensor
        The sum of kAllReduce; else norm where the pattern writes it, and quant_out where it does not.

    Raises
    ------
    ValueError
        An argument other than the above, or one that the pattern does not use; rows that the workspace has no room
        for. In a later call, that a rank came with other sizes.
    TimeoutError
        A rank did not come within the deadline: in this call on CPUs; on GPUs it is known when the kernel has run, to
        `workspace.check()` and to the next call. The results of the call that failed are NaN, quantised ones 0xFF.
        `workspace.reset()` on every rank makes it usable again.

    References
    ----------
    Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005 (one shot, and
    reduce-scatter with all-gather); Zhang and Sennrich, Root Mean Square Layer Normalization, 2019,
    https://arxiv.org/abs/1910.07467
    """
    require(isinstance(workspace, AllReduceFusionWorkspace), "workspace", type(workspace).__name__,
            "one that create_allreduce_fusion_workspace made")  # fmt: skip
    require(pattern in PATTERNS, "pattern", pattern, "an AllReduceFusionPattern")
    workspace.check(wait=False)
    kind = PATTERNS[pattern]
    moe = (
        moe_reduction_device_num_experts, moe_reduction_scale_input, moe_reduction_active_experts_token_input,
        moe_reduction_token_input, expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output,
    )  # fmt: skip
    require(input.dtype in _DTYPES, "input", input.dtype, "bfloat16, float16, float32")
    rows, tokens = given_rows(kind, input, moe)
    norm = _norm(kind, input, tokens, residual_in, rms_gamma, rms_eps, weight_bias, scale_factor)
    outs = (output, residual_out, norm_out, quant_out, scale_out)
    results, fmt, layout = check_results(kind, input, tokens, outs, layout_code, block_quant_group_size)
    read, written = _named(rows, norm), _named_results(results)
    same_device(**read, **written)
    # Of experts' rows a token reads those of others.
    check_spans(written.items(), read.items(), apart=("input",) if kind.source == "finalize" else ())
    if output is not None and residual_in is not None and output.numel():
        # The sum is written before the residual is read.
        same = output.data_ptr() == residual_in.data_ptr()
        require(not same, "output", "the memory of residual_in", "memory of its own")
    norm = norm._replace(scale=scale_factor if fmt else None)
    _run(workspace, kind, input, tokens, rows, norm, results, (fmt, layout), use_oneshot)
    return present("output", results.sum if not kind.norm else results.normed if kind.normed else results.codes)


def _named(rows: Rows, norm: Norm) -> dict:
    """The tensors that a call reads, by the names of its arguments."""
    return {
        "input": rows.rows,
        "moe_reduction_active_experts_token_input": rows.experts,
        "expert_scale_factor": rows.scales,
        "expanded_idx_to_permuted_idx": rows.index,
        "shared_expert_output": rows.beside,
        "residual_in": norm.residual,
        "rms_gamma": norm.weight,
    }


def _named_results(results: Results) -> dict:
    return {
        "output": results.sum,
        "residual_out": results.residual,
        "norm_out": results.normed,
        "quant_out": results.codes,
        "scale_out": results.factors,
    }


def _norm(kind: Pattern, input, tokens, residual, weight, eps, bias, scale) -> Norm:
    if not kind.norm:
        for name, value in (("residual_in", residual), ("rms_gamma", weight)):
            require(value is None, name, "a tensor", "None, for the pattern has no norm")
        return Norm()
    hidden = input.shape[-1]
    for name, tensor, shape in (("residual_in", residual, (tokens, hidden)), ("rms_gamma", weight, (hidden,))):
        require(tensor is not None, name, None, f"a tensor {shape}")
        fits = tuple(tensor.shape) == shape and tensor.is_contiguous()
        require(fits, name, tuple(tensor.shape), f"{shape}, contiguous")
    require(residual.dtype == input.dtype, "residual_in", residual.dtype, f"{input.dtype}, the dtype of input")
    require(weight.dtype in _DTYPES, "rms_gamma", weight.dtype, "bfloat16, float16, float32")
    if isinstance(scale, torch.Tensor):
        require(scale.numel() == 1 and scale.dtype == torch.float32, "scale_factor",
                f"{scale.dtype} {tuple(scale.shape)}", "float32, one element")  # fmt: skip
        same_device(input=input, scale_factor=scale)
    return Norm(residual, weight, _number("rms_eps", eps), 0.0 if bias is None else _number("weight_bias", bias))


def _number(name: str, value) -> float:
    if isinstance(value, torch.Tensor):
        require(value.numel() == 1, name, f"a tensor {tuple(value.shape)}", "a number")
    return float(value)


def _run(workspace, kind: Pattern, input, tokens: int, rows: Rows, norm: Norm, results: Results, fmt, use_oneshot):
    if kind.norm:
        hidden, elements = input.shape[-1], tokens * input.shape[-1]
    else:
        # Without a norm rows have no meaning: the elements are cut into chunks.
        elements = input.numel()
        hidden = config.chunk(elements)
        tokens = -(-elements // hidden)
    if elements == 0:
        return
    item, world = input.element_size(), workspace.world_size
    nbytes = elements * item
    one_shot = nbytes <= config.one_shot_bytes(world) if use_oneshot is None else bool(use_oneshot)
    room = workspace._fits(nbytes, hidden * item, one_shot)
    hint = "; one shot needs force_oneshot_support for so many" if one_shot else ""
    require(room, "input", f"{nbytes} bytes", f"what the workspace was made for{hint}")
    scale, (named, layout) = norm.scale, fmt
    given = [t for t in (rows.rows, rows.experts, rows.beside, norm.residual, norm.weight) if t is not None]
    written = [t for t in (results.sum, results.residual, results.normed, results.codes) if t is not None]
    problem = Problem(
        transport=workspace.link.transport,
        world=world,
        dtype=dtype_name(input.dtype),
        # A word of scales stands for 512 columns.
        block=power_of_two(hidden, 512 if named == "fp8_group" else 128),
        two_shot=not one_shot,
        source=kind.source,
        scale_dtype=dtype_name(rows.scales.dtype) if kind.source == "finalize" and rows.scales is not None else "",
        beside=rows.beside is not None,
        weight_dtype=dtype_name(norm.weight.dtype) if kind.norm and norm.weight is not None else "",
        number_format=named,
        layout=layout,
        scale="tensor" if isinstance(scale, torch.Tensor) else "" if scale in (None, 1) else "number",
        sum=results.sum is not None,
        normed=results.normed is not None,
        aligned=hidden * item % 16 == 0 and nbytes % 16 == 0 and is_aligned(*(t.view(-1) for t in given + written)),
    )
    # The transport decides, and not the device: where peers are out of reach, the torch implementation is the only one.
    backend = "portable" if problem.transport == "peer" else "reference"
    choice = op(problem, input.device, backend)
    with spoiled(*results):
        choice.run(workspace.link, rows, norm, results, tokens, hidden, elements)


__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "MNNVLAllReduceFusionWorkspace",
    "TRTLLMAllReduceFusionWorkspace",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
]
