"""The norm of queries and keys of video models, with what stands between it and attention."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, rows_of, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.sizes import power_of_two
from flashinfer.norm._rows import ROW_DTYPES
from flashinfer.ops import rope as room
from flashinfer.ops.rope.frequencies import Axes


@checked
def fused_qk_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float = 1e-6,
    base: float = 10000.0,
    interleave: bool = True,
    factor: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
    attention_factor: float = 1.0,
    is_qk_norm: bool = True,
    output_fp8: bool = False,
    output_quant_scale: float = 1.0,
    v_quant_scale: float = 1.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of queries and keys over all their heads, rotation by frame, height and width, and a copy of values.

    Patch t of a video is at frame ``t // (pph * ppw)``, height ``t // ppw % pph`` and width ``t % ppw``. A head's first
    `num_frame_channels` channels turn with the frame, the next ones with height, the last ones with width; pair i of n
    channels turns by ``base ** (-2 i / n)`` radians a step.

    Parameters
    ----------
    qkv : torch.Tensor
        [batch, ppf * pph * ppw, n], or [tokens, n] with whole videos one after another; n is head_dim times all heads,
        those of queries first, then of keys, then of values. bfloat16, float16 or float32, any strides.
    q_weight, k_weight : torch.Tensor
        [num_heads_q * head_dim] and [num_heads_k * head_dim], or a row for each head; bfloat16, float16 or float32,
        both alike.
    ppf, pph, ppw : int
        Patches of a video along frames, height and width.
    num_frame_channels, num_height_channels, num_width_channels : int
        Even, and head_dim together.
    num_heads_q, num_heads_k, num_heads_v : int
        Heads. The most of them times head_dim, each rounded up to a power of two, is up to 32768 on a GPU.
    head_dim : int
        Even.
    eps : float
        Added to the mean square.
    base : float
        Of the frequencies, above 0.
    interleave : bool
        Whether a pair is two neighbours, or an element of the head's first half and the one head_dim / 2 after it; the
        axes have their share of the pairs, in the same order, in either case.
    factor, low, high : float
        YaRN, if `factor` is not 1: frequencies of an axis' pairs from `high` on are divided by `factor`, those of pairs
        up to `low` are not, and between the two it is a mixture that is linear in the number of the pair.
    attention_factor : float
        Rotated queries and keys are multiplied by it. 1 where `factor` is 1.
    is_qk_norm : bool
        False: rotate only; the weights are not read.
    output_fp8 : bool
        Results in float8_e4m3fn.
    output_quant_scale, v_quant_scale : float
        With `output_fp8`, queries and keys, and values, are multiplied by these.
    q_out, k_out, v_out : torch.Tensor, optional
        Receive the results; contiguous, apart from `qkv`.

    Returns
    -------
    tuple of torch.Tensor
        Queries, keys and values, [batch, ppf * pph * ppw, heads, head_dim] or [tokens, heads, head_dim]; the dtype of
        `qkv` or float8_e4m3fn. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype, number or device other than the above.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467; Su et al.,
    RoFormer, https://arxiv.org/abs/2104.09864; Peng et al., YaRN, 2023, https://arxiv.org/abs/2309.00071; the axes:
    Wan, Open and Advanced Large-Scale Video Generative Models, 2025, https://arxiv.org/abs/2503.20314

    Examples
    --------
    >>> import torch, flashinfer
    >>> qkv, weight = torch.randn(1, 8, 3 * 128).bfloat16(), torch.ones(128).bfloat16()
    >>> q, k, v = flashinfer.fused_qk_rmsnorm_rope(qkv, weight, weight, ppf=2, pph=2, ppw=2, num_frame_channels=32,
    ...     num_height_channels=48, num_width_channels=48, num_heads_q=1, num_heads_k=1, num_heads_v=1, head_dim=128)
    >>> q.shape
    torch.Size([1, 8, 1, 128])
    """
    for name, value in (("base", base), ("factor", factor)):
        require(value > 0, name, value, "more than 0")
    alone = factor != 1 or attention_factor == 1
    require(alone, "attention_factor", attention_factor, "1, where factor is 1")
    channels = num_frame_channels, num_height_channels, num_width_channels
    heads = num_heads_q, num_heads_k, num_heads_v
    _check_sizes((ppf, pph, ppw), channels, heads, head_dim)
    _check_rows(qkv, ppf * pph * ppw, sum(heads) * head_dim)
    dtype = torch.float8_e4m3fn if output_fp8 else qkv.dtype
    outputs = []
    for name, count, out in zip(("q_out", "k_out", "v_out"), heads, (q_out, k_out, v_out)):
        shape = (*qkv.shape[:-1], count, head_dim)
        outputs.append(torch.empty(shape, dtype=dtype, device=qkv.device) if out is None else out)
        require(outputs[-1].shape == shape, name, tuple(outputs[-1].shape), str(shape))
        require(outputs[-1].dtype == dtype, name, outputs[-1].dtype, str(dtype))
        require(outputs[-1].is_contiguous(), name, f"strides {outputs[-1].stride()}", "contiguous")
    weights = (q_weight.reshape(-1), k_weight.reshape(-1)) if is_qk_norm else (None, None)
    if is_qk_norm:
        _check_weights(q_weight, k_weight, heads, head_dim)
    same_device(qkv=qkv, q_weight=weights[0], k_weight=weights[1], q_out=q_out, k_out=k_out, v_out=v_out)
    sizes = [ppf, pph, ppw, *channels]
    q, k, v = outputs
    numbers = [eps, base, factor, low, high, attention_factor, output_quant_scale, v_quant_scale]
    _video(qkv, weights[0], weights[1], q, k, v, sizes, [float(n) for n in numbers], interleave)
    return q, k, v


def _check_sizes(patches, channels, heads, head_dim) -> None:
    for name, value in zip(("ppf", "pph", "ppw"), patches):
        require(value >= 1, name, value, "1 or more")
    names = [f"num_{axis}_channels" for axis in ("frame", "height", "width")]
    for name, value in zip(names, channels):
        require(value >= 0 and value % 2 == 0, name, value, "an even number")
    require(sum(channels) == head_dim and head_dim > 0, "head_dim", head_dim, f"{' + '.join(names)} = {sum(channels)}")
    for name, value in zip(("num_heads_q", "num_heads_k", "num_heads_v"), heads):
        require(value >= 1, name, value, "1 or more")


def _check_rows(qkv, patches: int, columns: int) -> None:
    allowed = f"[batch, {patches}, {columns}], or [tokens, {columns}] with a multiple of {patches} tokens"
    fits = qkv.dim() in (2, 3) and qkv.shape[-1] == columns
    fits = fits and (qkv.shape[1] == patches if qkv.dim() == 3 else qkv.shape[0] % patches == 0)
    require_fit("qkv", qkv, fits, allowed, *ROW_DTYPES)


def _check_weights(q_weight, k_weight, heads, head_dim) -> None:
    for name, weight, count in (("q_weight", q_weight, heads[0]), ("k_weight", k_weight, heads[1])):
        require_fit(name, weight, weight.numel() == count * head_dim, f"[{count * head_dim}]", *ROW_DTYPES)
    require(k_weight.dtype == q_weight.dtype, "k_weight", k_weight.dtype, f"{q_weight.dtype}, the dtype of q_weight")


@custom_op("flashinfer::qk_rmsnorm_rope", mutates_args=("q_out", "k_out", "v_out"))
def _video(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, q_out: torch.Tensor,
    k_out: torch.Tensor, v_out: torch.Tensor, sizes: list[int], numbers: list[float], interleave: bool,
) -> None:  # fmt: skip
    if not qkv.numel():
        return
    head_dim = q_out.shape[-1]
    outputs = [out.view(-1, *out.shape[-2:]) for out in (q_out, k_out, v_out)]
    rows = rows_of(qkv.reshape(-1, qkv.shape[-1]))
    weights = [None if weight is None else weight.contiguous() for weight in (q_weight, k_weight)]
    given = [t for t in (rows, *weights, *outputs) if t is not None]
    problem = room.Video(
        dtype=dtype_name(rows.dtype),
        weight_dtype="" if q_weight is None else dtype_name(q_weight.dtype),
        out="fp8e4nv" if q_out.dtype == torch.float8_e4m3fn else "",
        head_dim=head_dim,
        heads=power_of_two(max(out.shape[1] for out in outputs)),
        interleave=interleave,
        aligned=head_dim * q_out.element_size() % 16 == 0 and is_aligned(*given),
    )
    ppf, pph, ppw, *channels = sizes
    eps, base, factor, low, high, length, *scales = numbers
    space = room.Space(ppf, pph, ppw, channels[0] // 2, channels[1] // 2)
    axes = Axes(tuple(channels), base, factor, low, high)
    room.video_rope(problem, rows.device).run(rows, weights, outputs, space, axes, eps, length, scales)
