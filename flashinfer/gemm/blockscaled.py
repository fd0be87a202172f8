"""Products of matrices in NVFP4, MXFP4 and MXFP8, which have a scale factor for 16 or 32 elements."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import require
from flashinfer.compat.queries import answering
from flashinfer.gemm import _operands as given
from flashinfer.gemm._launch import gemm
from flashinfer.ops.gemm import blockscaled as room

_OF_BF16_AND_FP4 = ("cudnn", "cute-dsl", "cute-dsl-native", "blackwell-native", "blackwell-tiled")


@checked
@answering("auto", "cudnn", "cutlass", "trtllm", denied=("cute-dsl", "cutedsl_low_latency", "b12x", "cake"))
def mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    block_size: int = 16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    use_nvfp4: bool = True,
    enable_pdl: bool = True,
) -> torch.Tensor:
    """``alpha * a @ b`` of NVFP4 or MXFP4 matrices, on every chip.

    From compute capability 10.0 on tensor cores take the codes with their factors. Elsewhere both are widened in
    registers, exactly, so that memory holds and moves 4 bits an element all the same.

    Parameters
    ----------
    a : torch.Tensor
        [M, K / 2]; uint8 or float4_e2m1fn_x2, two values in a byte, rows contiguous.
    b : torch.Tensor
        [K / 2, N]; the same, columns contiguous: the transpose of a weight [N, K / 2].
    a_descale : torch.Tensor
        uint8 or float8_e4m3fn: the factors of a in tiles, as `flashinfer.fp4_quantize` gives them; any shape of
        padded M x padded K / block_size bytes.
    b_descale : torch.Tensor
        The factors of b.T in 128x4 tiles, as they are or transposed.
    alpha : torch.Tensor, optional
        A factor of the result, one element (float32, float16 or bfloat16) on either device; or a factor of each row,
        M elements, as of rows that were quantised with a global scale each.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.
    out : torch.Tensor, optional
        [M, N] in `out_dtype`, rows contiguous.
    block_size : int
        Elements to a factor: 16 with `use_nvfp4`, 32 without.
    use_8x4_sf_layout : bool
        The factors of a are in tiles of 8 rows, not 128.
    backend : str
        "cudnn", "cutlass", "cute-dsl", "cutedsl_low_latency", "b12x", "cake" or "auto": one result. "trtllm": the rows
        of the weight and of its factors are shuffled, as by `flashinfer.shuffle_matrix_a` and
        `flashinfer.shuffle_matrix_sf_a` for an epilogue of 128 rows. Or a variant's name.
    use_nvfp4 : bool
        Factors in e4m3 for 16 elements; else in ue8m0 for 32.
    enable_pdl : bool
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

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
    OCP Microscaling Formats (MX) Specification 1.0, 2023; NVIDIA, Pretraining LLMs with NVFP4, 2025,
    https://arxiv.org/abs/2509.25149

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, scale = flashinfer.nvfp4_quantize(torch.full((128, 64), 6.0).bfloat16(), torch.ones(1))
    >>> flashinfer.mm_fp4(codes, codes.T, scale, scale.T, torch.ones(1))[0, 0]  # 64 x 36
    tensor(2304., dtype=torch.bfloat16)
    """
    width = 16 if use_nvfp4 else 32
    require(block_size == width, "block_size", block_size, f"{width} with use_nvfp4={use_nvfp4}")
    a, b = given.fp4("a", a), given.fp4("b", b, transposed=True)
    given.same("b", 2 * b.shape[1], "a", 2 * a.shape[1], "K")
    blocks = given.blocks_of("a", 2 * a.shape[1], width)
    shuffled = _is_shuffled(backend, b)
    a_layout = "8x4" if use_8x4_sf_layout else "128x4"
    a_descale = given.factors("a_descale", a_descale, a.shape[0], blocks, a_layout)
    b_descale = given.factors("b_descale", b_descale, b.shape[0], blocks, "128x4")
    out = given.result(out, (a.shape[0], b.shape[0]), out_dtype, a)
    alpha = given.alpha_of(alpha, a, 1, a.shape[0])
    backend = given.variant_of(
        backend, ("cudnn", "cutlass", "cute-dsl", "cutedsl_low_latency", "b12x", "cake", "trtllm")
    )
    gemm(
        a[None], b[None], a_descale, b_descale, alpha, out[None], "ue4m3" if use_nvfp4 else "ue8m0", a_layout, "128x4",
        width=width, shuffled=shuffled, backend=backend,
    )  # fmt: skip
    return out


@checked
@answering("auto", "cutlass", "cudnn", "trtllm", denied=("cute-dsl", "cutedsl_low_latency", "b12x"))
def mm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """``a @ b`` of MXFP8 matrices: FP8 with a power of two for each 32 elements of K, on every chip.

    Parameters
    ----------
    a : torch.Tensor
        [M, K]; float8_e4m3fn or float8_e5m2, rows contiguous. K a multiple of 32.
    b : torch.Tensor
        [K, N]; the same, columns contiguous: the transpose of a weight [N, K].
    a_descale : torch.Tensor
        uint8, ue8m0. [M, K / 32]: row-major factors. One dimension: the bytes of tiles, as `flashinfer.mxfp8_quantize`
        gives them.
    b_descale : torch.Tensor
        uint8, ue8m0, of b.T. [K / 32, N], the transpose of row-major factors, or the bytes of 128x4 tiles in one
        dimension.
    out, out_dtype
        As in `mm_fp4`.
    use_8x4_sf_layout : bool
        The tiles of a are of 8 rows, not 128. Not for row-major factors.
    backend : str
        "cutlass", "cudnn", "cute-dsl", "cutedsl_low_latency", "b12x" or "auto": one result. "trtllm": the weight and
        its factors, which are in tiles then, whatever their shape, are shuffled as in `mm_fp4`. Or a variant's name.

    Returns
    -------
    torch.Tensor
        [M, N] of out_dtype; products are summed in float32 and rounded once.

    Raises
    ------
    ValueError
        As `mm_fp4` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.ones(128, 128).bfloat16()
    >>> a, a_scale = flashinfer.mxfp8_quantize(x, is_sf_swizzled_layout=True)
    >>> flashinfer.mm_mxfp8(a, a.T, a_scale, a_scale)[0, 0]
    tensor(128., dtype=torch.bfloat16)
    """
    a, b = given.fp8("a", a), given.fp8("b", b, transposed=True)
    given.same("b", b.shape[1], "a", a.shape[1], "K")
    blocks = given.blocks_of("a", a.shape[1], 32)
    shuffled = _is_shuffled(backend, b)
    a_layout, b_layout = "8x4" if use_8x4_sf_layout else "128x4", "128x4"
    if a_descale.dim() == 2:
        require(not use_8x4_sf_layout and not shuffled, "a_descale", tuple(a_descale.shape),
                "one dimension, the bytes of tiles, with use_8x4_sf_layout or backend 'trtllm'")  # fmt: skip
        a_layout = "linear"
        shape = a.shape[0], blocks
        require(a_descale.shape == shape, "a_descale", tuple(a_descale.shape), f"{list(shape)}")
    if b_descale.dim() == 2 and not shuffled:
        b_layout = "linear"
        shape = blocks, b.shape[0]
        require(b_descale.shape == shape, "b_descale", tuple(b_descale.shape), f"{list(shape)}")
        b_descale = b_descale.mT.contiguous()
    a_descale = given.factors("a_descale", a_descale.contiguous(), a.shape[0], blocks, a_layout)
    b_descale = given.factors("b_descale", b_descale, b.shape[0], blocks, b_layout)
    out = given.result(out, (a.shape[0], b.shape[0]), out_dtype, a)
    backend = given.variant_of(backend, ("cutlass", "cudnn", "cute-dsl", "cutedsl_low_latency", "b12x", "trtllm"))
    gemm(
        a[None], b[None], a_descale, b_descale, None, out[None], "ue8m0", a_layout, b_layout,
        width=32, shuffled=shuffled, backend=backend,
    )  # fmt: skip
    return out


@checked
@named(out_dtype="dtype")
@answering("auto", "cudnn", "cutlass")
def bmm_mxfp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``A[i] @ B[i]`` of batches of MXFP8 matrices.

    Parameters
    ----------
    A : torch.Tensor
        [batch, M, K]; float8_e4m3fn or float8_e5m2, rows contiguous. K a multiple of 32.
    B : torch.Tensor
        [batch, K, N]; the same, columns contiguous.
    A_scale, B_scale : torch.Tensor
        uint8, ue8m0, of A and of the transposes of B: for each matrix the bytes of its 128x4 tiles, in any shape.
    dtype : torch.dtype
        Of the result: bfloat16, float16 or float32.
    out : torch.Tensor, optional
        [batch, M, N] in `dtype`, rows contiguous.
    backend : str
        "cudnn", "cutlass" or "auto": one result. Or a variant's name.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor [batch, M, N].

    Raises
    ------
    ValueError
        A shape, dtype, stride or device other than the above.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023

    Examples
    --------
    >>> import torch, flashinfer
    >>> x = torch.ones(2, 128, 128).bfloat16()
    >>> codes, scale = flashinfer.mxfp8_quantize(x, is_sf_swizzled_layout=True)
    >>> flashinfer.bmm_mxfp8(codes, codes.mT, scale, scale, torch.bfloat16).shape
    torch.Size([2, 128, 128])
    """
    A, B = given.fp8("A", A, 3), given.fp8("B", B, 3, transposed=True)
    given.same("B", B.shape[0], "A", A.shape[0], "batch")
    given.same("B", B.shape[2], "A", A.shape[2], "K")
    blocks = given.blocks_of("A", A.shape[2], 32)
    A_scale = given.factors("A_scale", A_scale, A.shape[1], blocks, "128x4", A.shape[0])
    B_scale = given.factors("B_scale", B_scale, B.shape[1], blocks, "128x4", A.shape[0])
    out = given.result(out, (*A.shape[:2], B.shape[1]), dtype, A)
    backend = given.variant_of(backend, ("cudnn", "cutlass"))
    gemm(A, B, A_scale, B_scale, None, out, "ue8m0", "128x4", "128x4", width=32, backend=backend)
    return out


@checked
@answering(*_OF_BF16_AND_FP4)
def prepare_bf16_fp4_weights(
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    *,
    backend: str,
    block_size: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """An NVFP4 weight as `mm_bf16_fp4` takes it: here, checked and as it is.

    Parameters
    ----------
    b : torch.Tensor
        [N, K / 2] uint8, as `flashinfer.nvfp4_quantize` gives it.
    b_descale : torch.Tensor
        Its factors in 128x4 tiles; uint8 or float8_e4m3fn, any shape.
    alpha : torch.Tensor, optional
        One element, as in `mm_fp4`.
    backend : str
        "cudnn", "cute-dsl", "cute-dsl-native", "blackwell-native" or "blackwell-tiled", or a variant's name: the weight
        is the same for all.
    block_size : int
        16.

    Returns
    -------
    b, b_descale, alpha : torch.Tensor
        Views of what was given, and alpha or None.

    Raises
    ------
    ValueError
        A shape, dtype or stride other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((128, 64), 6.0).bfloat16(), torch.ones(1))
    >>> b, b_descale, alpha = flashinfer.prepare_bf16_fp4_weights(codes, factors, torch.ones(1), backend="auto")
    >>> b.shape
    torch.Size([128, 32])
    """
    require(block_size == 16, "block_size", block_size, "16")
    _check_backend(backend)
    b = given.fp4("b", b)
    blocks = given.blocks_of("b", 2 * b.shape[1], 16)
    b_descale = given.factors("b_descale", b_descale, b.shape[0], blocks, "128x4")
    return b, b_descale[0], given.alpha_of(alpha, b)


@checked
@answering(*_OF_BF16_AND_FP4)
def mm_bf16_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    *,
    backend: str,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    block_size: int = 16,
    enable_pdl: bool = True,
) -> torch.Tensor:
    """``alpha * a @ b.T`` of bfloat16 activations and an NVFP4 weight, which is widened in registers.

    Parameters
    ----------
    a : torch.Tensor
        [M, K] bfloat16, rows contiguous.
    b, b_descale, alpha
        What `prepare_bf16_fp4_weights` returned: [N, K / 2], its factors, and one element or None.
    backend : str
        As in `prepare_bf16_fp4_weights`: one result.
    out_dtype : torch.dtype, optional
        bfloat16, float16 or float32; by default that of `out`, or bfloat16.
    out : torch.Tensor, optional
        [M, N], rows contiguous.
    block_size : int
        16.
    enable_pdl : bool
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

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
    >>> codes, factors = flashinfer.nvfp4_quantize(torch.full((128, 64), 6.0).bfloat16(), torch.ones(1))
    >>> weights = flashinfer.prepare_bf16_fp4_weights(codes, factors, torch.ones(1), backend="auto")
    >>> flashinfer.mm_bf16_fp4(torch.ones(2, 64).bfloat16(), *weights, backend="auto")[0, 0]
    tensor(384., dtype=torch.bfloat16)
    """
    given.check_matrix("a", a, 2, (torch.bfloat16,))
    b, b_descale, alpha = prepare_bf16_fp4_weights(b, b_descale, alpha, backend=backend, block_size=block_size)
    given.same("b", 2 * b.shape[1], "a", a.shape[1], "K")
    out = given.result(out, (a.shape[0], b.shape[0]), out_dtype, a)
    backend = given.variant_of(backend, _OF_BF16_AND_FP4)
    gemm(a[None], b[None], None, b_descale[None], alpha, out[None], "ue4m3", "", "128x4", width=16, backend=backend)
    return out


def _is_shuffled(backend: str, b: torch.Tensor) -> bool:
    if backend != "trtllm":
        return False
    require(b.shape[0] % 128 == 0, "b", f"N = {b.shape[0]}", "a multiple of 128 for backend 'trtllm'")
    return True


def _check_backend(backend: str) -> None:
    allowed = (*_OF_BF16_AND_FP4, "auto", *(v.name for v in room.blockscaled.variants))
    require(backend in allowed, "backend", repr(backend), ", ".join(allowed))
