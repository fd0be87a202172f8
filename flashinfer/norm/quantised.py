"""Norms whose result is quantised in the same launch."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, same_device, wants_pdl
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer._core.scalars import scales
from flashinfer.norm._rows import check_rows, check_weights, launch
from flashinfer.ops import layouts
from flashinfer.ops import norm as room

_FP8 = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}
_FP4 = torch.float4_e2m1fn_x2


@replayed
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """RMSNorm to FP8 with one scale: ``out = fp8(rmsnorm(input, weight) / scale)``.

    Parameters
    ----------
    out : torch.Tensor
        Receives the result; shape of `input`, float8_e4m3fn or float8_e5m2, any strides. Rounded to nearest even; what
        is beyond the format's largest value becomes that.
    input : torch.Tensor
        [rows, hidden] or [batch, heads, hidden]; bfloat16, float16 or float32, any strides. hidden up to 32768 on a
        GPU.
    weight : torch.Tensor
        [hidden]; bfloat16, float16 or float32.
    scale : torch.Tensor or float
        What a code of 1 stands for, so the norm is divided by it: a number, or a tensor of one element (float32,
        float16 or bfloat16), read on the device. Results are multiplied by its float32 inverse.
    eps : float
        Added to the mean square.
    enable_pdl : bool, optional
        Programmatic dependent launch: the kernel may be launched before those in front of it end, and waits for
        them itself. None and True: small launches, where the GPU has it (compute capability 9.0 and above). It
        has no effect on results.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Notes
    -----
    float32 maths; the norm is not rounded before it is quantised.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467; OCP 8-bit Floating
    Point Specification 1.0
    """
    _to_fp8(out, input, None, weight, scale, eps, wants_pdl(enable_pdl))


@replayed
def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add, normalise, quantise: ``residual += input``, then ``out = fp8(rmsnorm(residual, weight) / scale)``.

    Parameters
    ----------
    out, input, weight, scale, eps, enable_pdl
        As in `rmsnorm_quant`, as are the errors. `input` is only read.
    residual : torch.Tensor
        Shape and dtype of `input`, any strides. Overwritten with the sum. The norm is that of the float32 sum, before
        it is rounded to the dtype of `residual`.
    """
    _to_fp8(out, input, residual, weight, scale, eps, wants_pdl(enable_pdl))


@checked
def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
) -> None:
    """LayerNorm to FP8 with one scale: ``out = fp8(layernorm(input, gemma, beta) / scale)``.

    Parameters
    ----------
    out, input, scale, eps
        As in `rmsnorm_quant`, as are the errors; `eps` is added to the variance.
    gemma : torch.Tensor
        The factor, [hidden]; bfloat16, float16 or float32. The name is upstream's.
    beta : torch.Tensor
        The shift, [hidden]; dtype of `gemma`.

    Notes
    -----
    float32 maths; the norm is not rounded before it is quantised.

    References
    ----------
    Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450; OCP 8-bit Floating Point
    Specification 1.0

    Examples
    --------
    >>> import torch, flashinfer
    >>> out = torch.empty(2, 64, dtype=torch.float8_e4m3fn)
    >>> flashinfer.layernorm_quant(out, torch.randn(2, 64), torch.ones(64), torch.zeros(64), 0.5)
    """
    form, tensor, number = _fp8_form(out, input, scale)
    _layernorm_quantised(input, gemma, beta, out, tensor, eps, number, form)


@checked
def fused_add_rmsnorm_fp8_block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add, normalise, and quantise to FP8 with a scale for each 128 columns of a row.

    ``residual += input``; ``normed_out = rmsnorm(residual, weight)``; then, for each block of 128 columns of the
    rounded `normed_out`, ``scale = max(abs(block)) / 448`` and ``out = fp8(block / scale)``.

    Parameters
    ----------
    out : torch.Tensor
        [rows, hidden], float8_e4m3fn, any strides.
    block_scale : torch.Tensor
        [hidden / 128, rows rounded up to a multiple of 4], float32, contiguous: scales of a block stand together, as
        block-scaled GEMMs read them. ``block_scale.T[:rows]`` is one row of scales for each row. What is past `rows` is
        not written.
    normed_out : torch.Tensor
        [rows, hidden], in the dtype of `input`, any strides. It may be `input` itself.
    input : torch.Tensor
        [rows, hidden]; bfloat16, float16 or float32, any strides. hidden a multiple of 128, up to 32768 on a GPU.
    residual : torch.Tensor
        Shape and dtype of `input`, any strides. Overwritten with the sum. The norm is that of the float32 sum, before
        it is rounded to the dtype of `residual`.
    weight, eps, enable_pdl
        As in `rmsnorm_quant`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Notes
    -----
    A scale is at least 2 ** -126. A block with a NaN has NaN for its scale.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.2, https://arxiv.org/abs/2412.19437
    """
    require(input.dim() == 2, "input", tuple(input.shape), "[rows, hidden]")
    rows, hidden = input.shape
    require(hidden % 128 == 0, "input", tuple(input.shape), "[rows, hidden] with hidden a multiple of 128")
    require(out.dtype == torch.float8_e4m3fn, "out", out.dtype, "float8_e4m3fn")
    pitch = -(-rows // 4) * 4
    fits = block_scale.shape == (hidden // 128, pitch) and block_scale.is_contiguous()
    require(fits, "block_scale", tuple(block_scale.shape), f"[{hidden // 128}, {pitch}], contiguous")
    require(block_scale.dtype == torch.float32, "block_scale", block_scale.dtype, "float32")
    _quantised(
        input, residual, weight, out, None, block_scale, None, normed_out, [eps, 1.0], "fp8_block", "", "",
        pdl=wants_pdl(enable_pdl),
    )  # fmt: skip


@checked
def fused_rmsnorm_silu(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm through SiLU: ``out = silu(rmsnorm(input, weight))`` with ``silu(x) = x / (1 + exp(-x))``.

    Parameters
    ----------
    input : torch.Tensor
        [rows, hidden] or [batch, heads, hidden]; bfloat16, float16 or float32, any strides. hidden up to 32768 on a
        GPU.
    weight : torch.Tensor
        [hidden]; bfloat16, float16 or float32.
    eps : float
        Added to the mean square.
    out : torch.Tensor, optional
        Its dtype is the form of the result: that of `input` (the default), float8_e4m3fn without a scale, both in the
        shape of `input`; or float4_e2m1fn_x2 [..., hidden / 2], NVFP4 without a global scale, for hidden a multiple
        of 16.
    block_scale : torch.Tensor, optional
        For NVFP4, receives the scale of each 16 columns: [..., hidden / 16], float8_e4m3fn, contiguous. It is allocated
        by default. Other forms have none, and it is refused.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        The result; for NVFP4, codes and block scales, as `rmsnorm_fp4quant` gives them. Computed in float32 and rounded
        once; into NVFP4 goes what has been rounded to the dtype of `input`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467; Elfwing et al.,
    Sigmoid-Weighted Linear Units, 2017, https://arxiv.org/abs/1702.03118
    """
    if out is not None and out.dtype == _FP4:
        return _to_fp4(input, None, weight, out, block_scale, None, eps, 16, None, "linear", after="silu")[:2]
    require(block_scale is None, "block_scale", "a tensor", "None, unless out is float4_e2m1fn_x2")
    out = torch.empty_like(input) if out is None else out
    if out.dtype == torch.float8_e4m3fn:
        _quantised(input, None, weight, out, None, None, None, None, [eps, 1.0], "fp8e4nv", "", "silu", pdl=True)
    else:
        _rmsnorm_silu(input, weight, out, eps)
    return out


@checked
def rmsnorm_fp4quant(
    input: torch.Tensor,
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm to FP4 with block scales: NVFP4 or MXFP4 of ``y = rmsnorm(input, weight)``, in one launch.

    Codes and block scales have the bits that `nvfp4_quantize` or `mxfp4_quantize` gives for ``rmsnorm(input, weight)``.

    Parameters
    ----------
    input : torch.Tensor
        [rows, hidden] or [batch, heads, hidden]; bfloat16, float16 or float32, any strides. hidden a multiple of
        `block_size`, up to 32768 on a GPU.
    weight : torch.Tensor
        [hidden]; bfloat16, float16 or float32.
    y_fp4 : torch.Tensor, optional
        Receives the codes; [..., hidden / 2], float4_e2m1fn_x2 or uint8: two e2m1 a byte, the first in the low half.
    block_scale : torch.Tensor, optional
        Receives the block scales, float8_e4m3fn for NVFP4 and uint8 for MXFP4 (uint8 for both), contiguous. Linear:
        [..., hidden / block_size]. Swizzled: as many elements as rows, padded to a multiple of 128, times blocks of a
        row, padded to a multiple of 4; padding becomes 0.
    global_scale : torch.Tensor, optional
        NVFP4: a tensor of one element (float32, float16 or bfloat16), or a number, g; block scales are multiplied by
        it, so that ``y`` is about ``code * block_scale / g``. With ``448 * 6 / max(abs(y))`` they use the whole range
        of e4m3. The default is 1. Upstream's docstring says that the norm is divided by it; its kernels multiply.
    eps : float
        Added to the mean square.
    block_size : int
        16 for NVFP4, 32 for MXFP4.
    scale_format : str, optional
        "e4m3" with blocks of 16 and "ue8m0" with blocks of 32, which are the defaults.
    is_sf_swizzled_layout : bool
        Block scales in tiles of 128 rows and 4 blocks, `[row tile][block tile][32][4][4]`, as tensor cores read them.
    enable_pdl : bool, optional
        Programmatic dependent launch: the kernel may be launched before those in front of it end, and waits for
        them itself. None and True: small launches, where the GPU has it (compute capability 9.0 and above). It
        has no effect on results.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        `y_fp4` and `block_scale`, or new tensors; a new swizzled block_scale has one dimension.

    Raises
    ------
    ValueError
        A shape, dtype, device or value other than the above.

    Notes
    -----
    NVFP4: the scale s of a block is ``e4m3(g * max(abs(y)) / 6)``, a code ``e2m1(y * g / s)``, and zero where s is 0.
    MXFP4: the scale is the least power of two with ``max(abs(y)) / scale <= 6``. float32 maths; the norm is rounded to
    the dtype of `input` before it is quantised.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467; OCP Microscaling
    Formats Specification 1.0; NVIDIA, PTX ISA, block scaling of mma (NVFP4 and the tiles of scale factors)
    """
    layout = "128x4" if is_sf_swizzled_layout else "linear"
    return _to_fp4(
        input, None, weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, layout,
        pdl=wants_pdl(enable_pdl),
    )[:2]  # fmt: skip


@checked
def add_rmsnorm_fp4quant(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    y_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Add, normalise, quantise to FP4: ``residual += input``, then `rmsnorm_fp4quant` of the sum.

    Parameters
    ----------
    input, weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, enable_pdl
        As in `rmsnorm_fp4quant`, as are the errors. `input` is only read.
    residual : torch.Tensor
        Shape and dtype of `input`, any strides. Overwritten with the sum. The norm is that of the float32 sum, before
        it is rounded to the dtype of `residual`.
    is_sf_swizzled_layout : bool
        As in `rmsnorm_fp4quant`.
    output_both_sf_layouts : bool
        Write block scales in both layouts: `block_scale` is swizzled then, whatever `is_sf_swizzled_layout`.
    block_scale_unswizzled : torch.Tensor, optional
        Receives the linear block scales, if both layouts are written. Refused otherwise.
    y_out : torch.Tensor, optional
        Receives the norm as well, rounded; shape and dtype of `input`, any strides. The codes do not change by it.

    Returns
    -------
    (torch.Tensor, torch.Tensor) or (torch.Tensor, torch.Tensor, torch.Tensor)
        Codes, block scales, and with `output_both_sf_layouts` the linear block scales.
    """
    layout = "both" if output_both_sf_layouts else "128x4" if is_sf_swizzled_layout else "linear"
    both = layout == "both" or block_scale_unswizzled is None
    require(both, "block_scale_unswizzled", "a tensor", "None, unless output_both_sf_layouts")
    results = _to_fp4(
        input, residual, weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, layout,
        linear_scale=block_scale_unswizzled, normed=y_out, pdl=wants_pdl(enable_pdl),
    )  # fmt: skip
    return results if layout == "both" else results[:2]


@custom_op("flashinfer::layernorm_quantised", mutates_args=("out",))
def _layernorm_quantised(
    input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None,
    eps: float, number: float, form: str,
) -> None:  # fmt: skip
    check_rows(input)
    check_weights(input, gemma=gemma, beta=beta)
    require(beta.dtype == gemma.dtype, "beta", beta.dtype, f"{gemma.dtype}, the dtype of gemma")
    require(out.shape == input.shape, "out", tuple(out.shape), f"{tuple(input.shape)}, the shape of input")
    same_device(input=input, gemma=gemma, beta=beta, out=out, scale=scale)
    how = "tensor" if scale is not None else "" if number == 1 else "number"
    given = room.Quantised(number if scale is None else scale)
    launch(room.layernorm, input, gemma, out, eps, bias=beta, quantised=given, form=form, scale=how)


def _fp8_form(out, input, scale) -> tuple[str, torch.Tensor | None, float]:
    """The form of the result, and the scale as a tensor or a number."""
    require(out.dtype in _FP8, "out", out.dtype, "float8_e4m3fn, float8_e5m2")
    tensor, number = (scale, 1.0) if isinstance(scale, torch.Tensor) else (None, float(scale))
    require(number > 0, "scale", scale, "more than 0")
    tensor = None if tensor is None else scales("scale", tensor, input.device)
    return _FP8[out.dtype], tensor, number


def _to_fp8(out, input, residual, weight, scale, eps, pdl) -> None:
    form, tensor, number = _fp8_form(out, input, scale)
    _quantised(input, residual, weight, out, tensor, None, None, None, [eps, number], form, "", "", pdl=pdl)


def _to_fp4(
    input, residual, weight, codes, block_scale, global_scale, eps, block_size, scale_format, layout, /,
    *, after="", linear_scale=None, normed=None, pdl=True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    formats = {16: ("e4m3", "nvfp4"), 32: ("ue8m0", "mxfp4")}
    require(block_size in formats, "block_size", block_size, "16, 32")
    kind, form = formats[block_size]
    named = scale_format in (None, kind)
    require(named, "scale_format", repr(scale_format), f"{kind!r} with blocks of {block_size}")
    shape = input.shape
    require(len(shape) in (2, 3), "input", tuple(shape), "[rows, hidden] or [batch, heads, hidden]")
    fits = shape[-1] % block_size == 0
    require(fits, "input", tuple(shape), f"rows of a multiple of {block_size}, the block size")
    require(form == "nvfp4" or global_scale is None, "global_scale", "a tensor", "None with blocks of 32")
    if global_scale is not None:
        global_scale = scales("global_scale", global_scale, input.device)
    if codes is None:
        codes = input.new_empty((*shape[:-1], shape[-1] // 2), dtype=_FP4)
    scale_dtype = torch.float8_e4m3fn if form == "nvfp4" else torch.uint8
    linear = (*shape[:-1], shape[-1] // block_size)
    if block_scale is None:
        size = linear if layout == "linear" else (_padded(linear),)
        block_scale = input.new_empty(size, dtype=scale_dtype)
    if layout == "both" and linear_scale is None:
        linear_scale = input.new_empty(linear, dtype=scale_dtype)
    for name, tensor, allowed in (("y_fp4", codes, _FP4), ("block_scale", block_scale, scale_dtype),
                                  ("block_scale_unswizzled", linear_scale, scale_dtype)):  # fmt: skip
        fits = tensor is None or tensor.dtype in (allowed, torch.uint8)
        require(fits, name, tensor is not None and tensor.dtype, f"{allowed}, uint8")
    # In bytes, for torch.compile has hardly an operation for the narrow dtypes.
    out, *factors = (t if t is None else t.view(torch.uint8) for t in (codes, block_scale, linear_scale))
    _quantised(input, residual, weight, out, global_scale, *factors, normed, [eps, 1.0], form, layout, after, pdl=pdl)
    return codes, block_scale, linear_scale


def _padded(linear) -> int:
    """Elements of swizzled block scales whose linear shape is `linear`."""
    high, wide = layouts.padded(torch.Size(linear[:-1]).numel(), linear[-1], "128x4")
    return high * wide


@custom_op("flashinfer::rmsnorm_silu", mutates_args=("out",))
def _rmsnorm_silu(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    check_rows(input, out=out)
    check_weights(input, weight=weight)
    same_device(input=input, weight=weight, out=out)
    launch(room.rmsnorm, input, weight, out, eps, after="silu")


@custom_op(
    "flashinfer::rmsnorm_quantised",
    mutates_args=("residual", "out", "block_scale", "linear_scale", "normed"),
)
def _quantised(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    block_scale: torch.Tensor | None,
    linear_scale: torch.Tensor | None,
    normed: torch.Tensor | None,
    numbers: list[float],
    form: str,
    layout: str,
    after: str,
    *,
    pdl: bool,
) -> None:
    """numbers : eps, and the scale of the tensor where `scale` is None."""
    beside = {"residual": residual, "y_out" if layout else "normed_out": normed}
    check_rows(input, **{name: tensor for name, tensor in beside.items() if tensor is not None})
    check_weights(input, weight=weight)
    same_device(input=input, weight=weight, out=out, scale=scale, block_scale=block_scale, **beside)
    same_device(input=input, block_scale_unswizzled=linear_scale)
    shape = input.shape
    codes = (*shape[:-1], shape[-1] // 2) if layout else tuple(shape)
    require(out.shape == codes, "y_fp4" if layout else "out", tuple(out.shape), str(codes))
    if layout:
        linear = (*shape[:-1], shape[-1] // (16 if form == "nvfp4" else 32))
        _check_block_scale("block_scale", block_scale, linear, layout == "linear")
        if layout == "both":
            _check_block_scale("block_scale_unswizzled", linear_scale, linear, True)
    eps, number = numbers
    how = "tensor" if scale is not None else "" if number == 1 else "number"
    given = room.Quantised(number if scale is None else scale, block_scale, linear_scale, normed)
    op = room.rmsnorm if residual is None else room.fused_add_rmsnorm
    fields = {"form": form, "scale": how, "layout": layout, "normed": normed is not None, "pdl": pdl}
    if layout not in ("", "linear"):
        # The padding of tiled block scales is written too: a row has four blocks at least.
        fields["least"] = 64 if form == "nvfp4" else 128
    launch(op, input, weight, out, eps, residual=residual, after=after, quantised=given, **fields)


def _check_block_scale(name, tensor, linear, as_linear: bool) -> None:
    if as_linear:
        fits, allowed = tensor.shape == linear, f"{linear}"
    else:
        size = _padded(linear)
        fits, allowed = tensor.numel() == size, f"{size} elements, rows padded to 128 and blocks to 4"
    require(fits and tensor.is_contiguous(), name, tuple(tensor.shape), f"{allowed}, contiguous")
