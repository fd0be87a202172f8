"""LayerNorms of diffusion transformers: a branch joins the stream, whose norm is modulated by factors of each token."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, is_aligned, present, require, require_fit, rows_of, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.scalars import scales
from flashinfer._core.sizes import power_of_two
from flashinfer.ops import layouts
from flashinfer.ops import norm as room
from flashinfer.ops.formats import FORMATS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@checked
def fused_dit_gate_residual_layernorm_gamma_beta(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: torch.Tensor | None = None,
    input_global_scaling_factor: torch.Tensor | float | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A gated branch joins the stream, whose LayerNorm has a learned factor and shift.

    ``residual_out = residual + input * (gate + gate_bias)``, ``norm_out = layernorm(residual_out) * gamma + beta``.

    Parameters
    ----------
    input, residual : torch.Tensor
        [batch, rows, hidden]; bfloat16, float16 or float32, any strides. hidden up to 32768 on a GPU.
    gate : torch.Tensor
        [batch, rows, hidden] or [batch * rows, hidden], any strides, such as a sixth of one tensor has; or
        [batch, 1, hidden]. The dtype of `input`.
    gamma, beta : torch.Tensor
        [hidden]; float32, or the dtype of `input`, alike.
    gate_bias : torch.Tensor, optional
        float32 [hidden] or [1, hidden].
    epsilon : float
        Added to the variance (the biased one, divided by hidden).
    use_nvfp4, use_mxfp8 : bool
        Quantise the norm, as `nvfp4_quantize` or `mxfp8_quantize` do; at most one. hidden a multiple of 16 or 32.
    global_scaling_factor : torch.Tensor, optional
        One element (float32, float16 or bfloat16) or a number; NVFP4 needs it, as 448 * 6 / (largest magnitude). It
        multiplies block factors.
    input_global_scaling_factor : torch.Tensor, optional
        One element or a number that `input` is multiplied by.
    residual_out : torch.Tensor, optional
        Receives the stream, contiguous, shape and dtype of `input`. It may be `residual` itself.
    norm_out : torch.Tensor, optional
        Receives the norm, contiguous: shape and dtype of `input`; NVFP4: int32 [batch, rows, hidden / 8]; MXFP8: int32
        [batch, rows, hidden / 4].
    sf_out : torch.Tensor, optional
        Receives the factors of NVFP4 or MXFP8: uint8 [batch, padded rows / 128, padded factors / 4, 32, 4, 4], the
        128x4 tiles of each batch entry, contiguous. Padding becomes 0.

    Returns
    -------
    residual_out, norm_out : torch.Tensor
        Those given, or new ones. Float32 maths, rounded once; NVFP4 and MXFP8 are of the norm in the dtype of `input`.

    Raises
    ------
    ValueError
        As `fused_dit_gate_residual_layernorm_scale_shift` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, residual, gate = (torch.randn(1, 3, 64).bfloat16() for _ in range(3))
    >>> gamma, beta = torch.ones(64).bfloat16(), torch.zeros(64).bfloat16()
    >>> stream, normed = flashinfer.fused_dit_gate_residual_layernorm_gamma_beta(x, residual, gate, gamma, beta)[:2]
    >>> stream.shape, normed.shape
    (torch.Size([1, 3, 64]), torch.Size([1, 3, 64]))
    """
    require(gamma.shape == input.shape[2:], "gamma", tuple(gamma.shape), f"{tuple(input.shape[2:])}, a row of input")
    require(beta.shape == gamma.shape, "beta", tuple(beta.shape), f"{tuple(gamma.shape)}, as gamma")
    given = {"input": input, "residual": residual, "gate": gate, "gamma": gamma, "beta": beta, "gate_bias": gate_bias}
    format = _format(use_nvfp4, use_mxfp8, global_scaling_factor)
    return _modulate(given, "gamma", "beta", epsilon, format, (global_scaling_factor, input_global_scaling_factor),
                     (residual_out, norm_out, sf_out))  # fmt: skip


@checked
def fused_dit_gate_residual_layernorm_scale_shift(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: torch.Tensor | None = None,
    input_global_scaling_factor: torch.Tensor | float | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A gated branch joins the stream, whose LayerNorm has a factor and a shift of each token.

    ``residual_out = residual + input * (gate + gate_bias)``, ``norm_out = layernorm(residual_out) * (1 + scale +
    scale_bias) + shift + shift_bias``.

    Parameters
    ----------
    input, residual, epsilon, use_nvfp4, use_mxfp8, global_scaling_factor, input_global_scaling_factor, residual_out
        As in `fused_dit_gate_residual_layernorm_gamma_beta`.
    norm_out, sf_out
        As in `fused_dit_gate_residual_layernorm_gamma_beta`.
    gate, scale, shift : torch.Tensor
        [batch, rows, hidden] or [batch * rows, hidden], any strides, such as a sixth of one tensor has; or
        [batch, 1, hidden]. The dtype of `input`.
    gate_bias, scale_bias, shift_bias : torch.Tensor, optional
        float32 [hidden] or [1, hidden].

    Returns
    -------
    residual_out, norm_out : torch.Tensor
        Those given, or new ones. Float32 maths, rounded once; NVFP4 and MXFP8 are of the norm in the dtype of `input`.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or combination other than the above.

    References
    ----------
    Peebles and Xie, Scalable Diffusion Models with Transformers, 2022, https://arxiv.org/abs/2212.09748

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, gate, scale, shift = torch.randn(4, 1, 3, 64).bfloat16()
    >>> stream, norm = flashinfer.fused_dit_gate_residual_layernorm_scale_shift(x, x, gate, scale, shift)
    >>> stream.shape, norm.dtype
    (torch.Size([1, 3, 64]), torch.bfloat16)
    """
    given = {"input": input, "residual": residual, "gate": gate, "scale": scale, "shift": shift}
    given |= {"gate_bias": gate_bias, "scale_bias": scale_bias, "shift_bias": shift_bias}
    format = _format(use_nvfp4, use_mxfp8, global_scaling_factor)
    return _modulate(given, "scale", "shift", epsilon, format, (global_scaling_factor, input_global_scaling_factor),
                     (residual_out, norm_out, sf_out))  # fmt: skip


@checked
def fused_dit_residual_layernorm_scale_shift(
    input: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: torch.Tensor | None = None,
    input_global_scaling_factor: torch.Tensor | float | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A branch joins the stream, whose LayerNorm has a factor and a shift of each token.

    ``residual_out = residual + input``, or `input` alone; ``norm_out = layernorm(residual_out) * (1 + scale +
    scale_bias) + shift + shift_bias``.

    Parameters
    ----------
    input : torch.Tensor
        [batch, rows, hidden]; bfloat16, float16 or float32, any strides. hidden up to 32768 on a GPU.
    scale, shift : torch.Tensor
        [batch, rows, hidden] or [batch * rows, hidden], any strides, such as a sixth of one tensor has; or
        [batch, 1, hidden]. The dtype of `input`.
    residual : torch.Tensor, optional
        The stream, in the shape and dtype of `input`; without it `input` is the stream.
    scale_bias, shift_bias : torch.Tensor, optional
        float32 [hidden] or [1, hidden].
    epsilon, use_nvfp4, use_mxfp8, global_scaling_factor, input_global_scaling_factor, residual_out, norm_out, sf_out
        As in `fused_dit_gate_residual_layernorm_gamma_beta`.

    Returns
    -------
    residual_out, norm_out : torch.Tensor
        Those given, or new ones. Float32 maths, rounded once; NVFP4 and MXFP8 are of the norm in the dtype of `input`.

    Raises
    ------
    ValueError
        As `fused_dit_gate_residual_layernorm_scale_shift` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, scale, shift = (torch.randn(1, n, 64).bfloat16() for n in (3, 1, 1))
    >>> stream, normed = flashinfer.fused_dit_residual_layernorm_scale_shift(x, scale, shift)[:2]
    >>> normed.shape
    torch.Size([1, 3, 64])
    """
    given = {"input": input, "residual": residual, "scale": scale, "shift": shift}
    given |= {"scale_bias": scale_bias, "shift_bias": shift_bias}
    format = _format(use_nvfp4, use_mxfp8, global_scaling_factor)
    return _modulate(given, "scale", "shift", epsilon, format, (global_scaling_factor, input_global_scaling_factor),
                     (residual_out, norm_out, sf_out))  # fmt: skip


def _format(use_nvfp4, use_mxfp8, global_scale) -> str:
    require(not (use_nvfp4 and use_mxfp8), "use_mxfp8", use_mxfp8, "False, with use_nvfp4")
    needed = not use_nvfp4 or global_scale is not None
    require(needed, "global_scaling_factor", None, "a number, or a tensor of one element, with use_nvfp4")
    return "nvfp4" if use_nvfp4 else "mxfp8" if use_mxfp8 else ""


def _modulate(given, factor, shift, epsilon, format, scaling, results) -> tuple[torch.Tensor, torch.Tensor]:
    """given : tensors by their names, of which `factor` and `shift` name two. results : what the caller gave."""
    x = given["input"]
    require_fit("input", x, x.dim() == 3, "[batch, rows, hidden]", *_DTYPES)
    batch, rows, hidden = x.shape
    fits = hidden > 0 and (not format or hidden % FORMATS[format].width == 0)
    require(fits, "input", tuple(x.shape), f"rows of a multiple of {FORMATS[format].width if format else 1}")
    residual = given.get("residual")
    if residual is not None:
        require(residual.shape == x.shape, "residual", tuple(residual.shape), f"{tuple(x.shape)}, as input")
        require(residual.dtype == x.dtype, "residual", residual.dtype, f"{x.dtype}, the dtype of input")
    biases = {n: _bias(n, given.get(n), hidden) for n in ("gate_bias", f"{factor}_bias", f"{shift}_bias")}
    of_rows = {name: _of_rows(name, given.get(name), x, name == "gate") for name in ("gate", factor, shift)}
    dtypes = present(factor, of_rows[factor]).dtype, present(shift, of_rows[shift]).dtype
    require(dtypes[0] == dtypes[1], shift, dtypes[1], f"{dtypes[0]}, the dtype of {factor}")
    names = ("global_scaling_factor", "input_global_scaling_factor")
    scaling = [None if s is None else scales(n, s, x.device) for n, s in zip(names, scaling)]
    shapes = {"residual_out": (x.shape, x.dtype), "norm_out": (x.shape, x.dtype)}
    if format:
        width = FORMATS[format].width
        words = hidden // (8 if format == "nvfp4" else 4)
        high, wide = layouts.padded(rows, hidden // width, "128x4")
        shapes["norm_out"] = (batch, rows, words), torch.int32
        shapes["sf_out"] = (batch, high // 128, wide // 4, 32, 4, 4), torch.uint8
    else:
        require(results[2] is None, "sf_out", "a tensor", "None, without use_nvfp4 and use_mxfp8")
    stream, out, *factors = (_result(n, r, *shapes[n], x.device) for n, r in zip(shapes, results))
    factors = factors[0] if format else None
    of_tokens = [x, residual, of_rows["gate"], of_rows[factor], of_rows[shift]]
    scaling = [scaling[0] if format == "nvfp4" else None, scaling[1]]
    _run(of_tokens, list(biases.values()), scaling, stream, out, factors, epsilon, factor == "scale", format)
    return stream, out


def _bias(name, bias, hidden):
    if bias is None:
        return None
    require_fit(name, bias, bias.shape in ((hidden,), (1, hidden)), f"[{hidden}] or [1, {hidden}]", torch.float32)
    return bias.reshape(hidden).contiguous()


def _of_rows(name, x, input, is_gate):
    """What each token has of its own, or all have, as [batch, rows, hidden] with contiguous columns."""
    if x is None:
        return None
    batch, rows, hidden = input.shape
    alike = x.dtype == input.dtype or (x.dim() == 1 and x.dtype == torch.float32)
    require(alike, name, x.dtype, f"{input.dtype}, the dtype of input")
    if x.shape == (batch * rows, hidden):
        x = x.unflatten(0, (batch, rows))
    fits = x.shape in ((batch, rows, hidden), (batch, 1, hidden)) or (x.shape == (hidden,) and not is_gate)
    allowed = f"[{batch}, {rows}, {hidden}], [{batch * rows}, {hidden}], [{batch}, 1, {hidden}]"
    allowed += "" if is_gate else f", [{hidden}]"
    require(fits, name, tuple(x.shape), allowed)
    return rows_of(x).expand(batch, rows, hidden)


def _result(name, given, shape, dtype, device):
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    require(given.shape == shape, name, tuple(given.shape), str(tuple(shape)))
    require(given.dtype == dtype, name, given.dtype, str(dtype))
    require(given.device == device, name, f"a tensor on {given.device}", f"{device}, where input is")
    require(given.is_contiguous(), name, given.stride(), "contiguous")
    return given


@custom_op("flashinfer::modulated_layernorm", mutates_args=("stream", "out", "factors"))
def _run(
    of_tokens: list[torch.Tensor | None],
    biases: list[torch.Tensor | None],
    scaling: list[torch.Tensor | None],
    stream: torch.Tensor,
    out: torch.Tensor,
    factors: torch.Tensor | None,
    epsilon: float,
    one: bool,
    format: str,
) -> None:
    """of_tokens : input, residual, gate, factor, shift. biases : of the last three. scaling : of codes, of input."""
    x, residual, gate, factor, shift = of_tokens
    x, factor, shift = present("input", x), present("scale", factor), present("shift", shift)
    gate_bias, factor_bias, shift_bias = biases
    global_scale, input_scale = scaling
    same_device(input=x, residual=residual, gate=gate, gate_bias=gate_bias, scale=factor, scale_bias=factor_bias,
                shift=shift, shift_bias=shift_bias)  # fmt: skip
    if x.numel() == 0:
        if factors is not None:
            factors.zero_()
        return
    batch, _, hidden = x.shape
    x, residual = rows_of(x), rows_of(residual)
    tensors = x, residual, gate, gate_bias, factor, factor_bias, shift, shift_bias
    least = 4 * FORMATS[format].width if format else 1
    problem = room.Modulated(
        dtype=dtype_name(x.dtype),
        factor_dtype=dtype_name(factor.dtype),
        block=power_of_two(hidden, least),
        residual=residual is not None,
        gate=gate is not None,
        gate_bias=gate_bias is not None,
        factor_bias=factor_bias is not None,
        shift_bias=shift_bias is not None,
        input_scale=input_scale is not None,
        one=one,
        format=format,
        aligned=hidden % 16 == 0 and is_aligned(stream, out, *(t for t in tensors if t is not None)),
    )
    codes = out.view(torch.uint8) if format else out
    factors = None if factors is None else factors.view(batch, -1)
    given = room.Modulation(*tensors, input_scale, stream, codes, factors, global_scale)
    room.modulated_layernorm(problem, x.device).run(given, epsilon)
