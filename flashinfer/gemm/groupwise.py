"""Products of FP8 matrices with float32 scales for blocks, as DeepSeek-V3 has them."""

from __future__ import annotations

from typing import Literal

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, is_aligned, present, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.literals import Backend, ScaleMajorMode
from flashinfer._core.replay import replayed
from flashinfer.compat.queries import answering
from flashinfer.gemm import _operands as given
from flashinfer.gemm._launch import gemm
from flashinfer.ops.gemm import blockscaled as room


@replayed
@answering("cutlass", "trtllm", denied=("cutile",))
def gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: ScaleMajorMode | None = None,
    mma_sm: int = 1,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Backend | Literal["trtllm"] = "cutlass",
) -> torch.Tensor:
    """``a @ b.T`` of FP8 matrices with a float32 scale for each block: of a, rows and elements of K; of b, the same.

    The sum over the elements of a scale is multiplied with the two scales in float32, and added up in float32.

    Parameters
    ----------
    a : torch.Tensor
        [M, K]; float8_e4m3fn or float8_e5m2, rows contiguous.
    b : torch.Tensor
        [N, K]; the same.
    a_scale, b_scale : torch.Tensor
        float32, what codes are multiplied with. With (gm, gn, gk) the granularity, [ceil(M / gm), ceil(K / gk)] and
        [ceil(N / gn), ceil(K / gk)] for `scale_major_mode` "K", the transposed shapes for "MN"; any strides. For
        backend "trtllm" either shape; if both are the same, memory is MN-major of a and K-major of b.
    scale_major_mode : str, optional
        "MN" or "K"; None for backend "trtllm".
    mma_sm : int
        1 or 2: how many multiprocessors share an instruction upstream. It has no effect on results.
    scale_granularity_mnk : tuple of int
        Rows of a, rows of b, and elements of K to a scale. The last is a power of two, 32 or more.
    out : torch.Tensor, optional
        [M, N], rows contiguous.
    out_dtype : torch.dtype, optional
        bfloat16, float16 or float32; by default bfloat16. Not read where `out` is given.
    backend : str
        "cutlass" or "trtllm", whose scales differ as above, or a variant's name.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [M, N].

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3, https://arxiv.org/abs/2412.19437

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.ones(128, 128).to(torch.float8_e4m3fn)
    >>> flashinfer.gemm.gemm_fp8_nt_groupwise(a, b, torch.ones(1, 3), torch.ones(1, 1), "MN")[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    a, b = given.fp8("a", a), given.fp8("b", b)
    given.same("b", b.shape[1], "a", a.shape[1], "K")
    require(mma_sm in (1, 2), "mma_sm", mma_sm, "1, 2")
    rows, columns, width = granularity(scale_granularity_mnk)
    blocks, a_rows, b_rows = -(-a.shape[1] // width), -(-a.shape[0] // rows), -(-b.shape[0] // columns)
    if backend == "trtllm":
        require(scale_major_mode is None, "scale_major_mode", scale_major_mode, "None for backend 'trtllm'")
        a_major, b_major = _major_of(a_scale, a_rows, blocks, "MN"), _major_of(b_scale, b_rows, blocks, "K")
    else:
        a_major = b_major = present("scale_major_mode", scale_major_mode, "'MN', 'K'")
        require(a_major in ("MN", "K"), "scale_major_mode", scale_major_mode, "'MN', 'K'")
    a_scale = given.scales("a_scale", a_scale, a_rows, blocks, a_major)
    b_scale = given.scales("b_scale", b_scale, b_rows, blocks, b_major)
    out = given.result(out, (a.shape[0], b.shape[0]), out_dtype if out is None else None, a)
    _groupwise(a, b, a_scale, b_scale, out, (rows, columns, width), given.variant_of(backend, ("cutlass", "trtllm")))
    return out


@checked
@answering()
def gemm_fp8_nt_blockscaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: ScaleMajorMode | None = "MN",
    mma_sm: int = 1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`gemm_fp8_nt_groupwise` with a granularity of (128, 128, 128): a scale for 128 rows of either operand.

    Parameters
    ----------
    a, b, a_scale, b_scale, scale_major_mode, mma_sm, out, out_dtype
        As in `gemm_fp8_nt_groupwise`.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [M, N].

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> a, b = torch.ones(3, 128).to(torch.float8_e4m3fn), torch.ones(128, 128).to(torch.float8_e4m3fn)
    >>> flashinfer.gemm.gemm_fp8_nt_blockscaled(a, b, torch.ones(1, 1), torch.ones(1, 1), "MN")[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    return gemm_fp8_nt_groupwise(
        a, b, a_scale, b_scale, scale_major_mode, mma_sm, (128, 128, 128), out, out_dtype, "cutlass"
    )


@checked
@answering()
def fp8_blockscale_gemm_sm90(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``input @ weight.T`` in FP8, with scales for 1 x 128 of the input and 1 x 128 or 128 x 128 of the weight.

    A bfloat16 operand is quantised first, the input by rows and the weight by blocks of 128 x 128: a block's scale is
    its largest magnitude over 448, and its codes e4m3(x * (1 / scale)), to nearest even. On every chip, not only the
    one in the name.

    Parameters
    ----------
    input : torch.Tensor
        [M, K]; bfloat16, or float8_e4m3fn with an `input_scale`. Rows contiguous.
    weight : torch.Tensor
        [N, K]; float8_e4m3fn with a `weight_scale`, or, if the input is bfloat16 too, bfloat16. Rows contiguous.
    input_scale : torch.Tensor, optional
        float32 [M, ceil(K / 128)], any strides, of an FP8 input; None for bfloat16.
    weight_scale : torch.Tensor, optional
        float32 [N, ceil(K / 128)] or [ceil(N / 128), ceil(K / 128)], any strides, of an FP8 weight; None for bfloat16.
    out : torch.Tensor, optional
        [M, N], rows contiguous.
    out_dtype : torch.dtype, optional
        bfloat16, float16 or float32; by default that of `out`, or bfloat16.

    Returns
    -------
    torch.Tensor
        [M, N] of out_dtype.

    Raises
    ------
    ValueError
        As `gemm_fp8_nt_groupwise` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.gemm.fp8_blockscale_gemm_sm90(torch.ones(2, 128).bfloat16(), torch.ones(32, 128).bfloat16())[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    dtypes = torch.bfloat16, torch.float8_e4m3fn
    given.check_matrix("input", input, 2, dtypes)
    given.check_matrix("weight", weight, 2, dtypes if input.dtype == torch.bfloat16 else dtypes[1:])
    given.same("weight", weight.shape[1], "input", input.shape[1], "K")
    for name, x, scale in (("input_scale", input, input_scale), ("weight_scale", weight, weight_scale)):
        quantised = x.dtype != torch.bfloat16
        found = "None" if scale is None else "a tensor"
        require(quantised == (scale is not None), name, found, "a tensor" if quantised else "None, of bfloat16")
    same_device(input=input, weight=weight, input_scale=input_scale, weight_scale=weight_scale, out=out)
    (M, K), N = input.shape, weight.shape[0]
    blocks, columns = -(-K // 128), 128
    if input_scale is not None:
        input_scale = given.scales("input_scale", input_scale, M, blocks)
    if weight_scale is not None:
        columns = 1 if weight_scale.shape[:1] == (N,) and N > 1 else 128
        weight_scale = given.scales("weight_scale", weight_scale, -(-N // columns), blocks)
    out = given.result(out, (M, N), out_dtype, input)
    if input_scale is None:
        input, input_scale = _quantize(input, 1)
    if weight_scale is None:
        weight, weight_scale = _quantize(weight, 128)
    _groupwise(input, weight, input_scale, weight_scale, out, (1, columns, 128), "auto")
    return out


def granularity(mnk: tuple[int, int, int]) -> tuple[int, int, int]:
    """Rows of a, rows of b, and elements of K to a scale, checked."""
    name, allowed = "scale_granularity_mnk", "three positive numbers, the last a power of two, 32 or more"
    require(len(mnk) == 3 and all(isinstance(n, int) and n > 0 for n in mnk), name, mnk, allowed)
    require(mnk[2] >= 32 and mnk[2] & (mnk[2] - 1) == 0, name, mnk, allowed)
    return mnk[0], mnk[1], mnk[2]


def _major_of(scale: torch.Tensor, rows: int, blocks: int, memory: str) -> str:
    """Which of the two shapes TensorRT-LLM's scales have; where they are equal, the one with that memory has it."""
    if rows != blocks:
        return "MN" if tuple(scale.shape) == (blocks, rows) else "K"
    row_major = scale.dim() != 2 or scale.stride(1) == 1
    return memory if row_major else {"K": "MN", "MN": "K"}[memory]


def _quantize(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and float32 scales of blocks of `rows` x 128."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(-(-x.shape[0] // rows), -(-x.shape[1] // 128), dtype=torch.float32, device=x.device)
    _quantize_blocks(x, codes, scale, rows)
    return codes, scale


@custom_op("flashinfer::gemm_quantize", mutates_args=("codes", "scale"))
def _quantize_blocks(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, rows: int) -> None:
    if x.numel():
        aligned = is_aligned(x) and x.shape[1] % 16 == 0
        room.quantize_blocks(room.Quantize(dtype_name(x.dtype), rows, aligned), x.device).run(x, codes, scale)


def _groupwise(a, b, a_scale, b_scale, out, granularity: tuple[int, int, int], backend: str) -> None:
    rows, columns, width = granularity
    gemm(
        a[None], b[None], a_scale[None], b_scale[None], None, out[None], "fp32", "", "",
        width=width, rows=rows, columns=columns, backend=backend,
    )  # fmt: skip
