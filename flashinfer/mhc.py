"""Hyper-connections of DeepSeek-V4's kind: a residual of four streams, mixed before and after each layer."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, rows_of, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.ops import mhc as room

__all__ = ["mhc_post", "mhc_pre_big_fuse", "mhc_pre_big_fuse_with_prenorm"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The most blocks in a grid's second dimension.
_MOST_TOKENS = 65535
# The most Sinkhorn normalisations: with more the kernel would take milliseconds.
_MOST_REPEATS = 1000


@checked
def mhc_post(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """The residual after a layer: ``out[j] = x * post[j] + sum_i residual[i] * comb[i, j]``, of each token.

    Parameters
    ----------
    x : torch.Tensor
        The layer's output, [..., hidden]; bfloat16, float16 or float32.
    residual : torch.Tensor
        [..., 4, hidden], dtype of x.
    post_layer_mix : torch.Tensor
        [..., 4] or [..., 4, 1]; float32, bfloat16 or float16.
    comb_res_mix : torch.Tensor
        [..., 4, 4], from the old stream i to the new stream j; dtype of `post_layer_mix`.

    Returns
    -------
    torch.Tensor
        [..., 4, hidden] in the dtype of x. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Xie et al., mHC: Manifold-Constrained Hyper-Connections, 2025, https://arxiv.org/abs/2512.24880

    Examples
    --------
    >>> import torch
    >>> from flashinfer.mhc import mhc_post
    >>> x, residual = torch.ones(2, 8), torch.ones(2, 4, 8)
    >>> mhc_post(x, residual, torch.ones(2, 4), torch.eye(4).expand(2, 4, 4))[0, :, 0].tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    outer, hidden = _check_residual(residual)
    require(tuple(x.shape) == (*outer, hidden), "x", tuple(x.shape), f"{(*outer, hidden)}, as residual has")
    require(x.dtype == residual.dtype, "x", x.dtype, f"{residual.dtype}, as residual")
    mixes = (*outer, 4), (*outer, 4, 1)
    require(tuple(post_layer_mix.shape) in mixes, "post_layer_mix", tuple(post_layer_mix.shape), f"{mixes[0]}")
    square = (*outer, 4, 4)
    require(tuple(comb_res_mix.shape) == square, "comb_res_mix", tuple(comb_res_mix.shape), f"{square}")
    require(post_layer_mix.dtype in _DTYPES, "post_layer_mix", post_layer_mix.dtype, "float32, bfloat16, float16")
    same = comb_res_mix.dtype == post_layer_mix.dtype
    require(same, "comb_res_mix", comb_res_mix.dtype, f"{post_layer_mix.dtype}, as post_layer_mix")
    same_device(x=x, residual=residual, post_layer_mix=post_layer_mix, comb_res_mix=comb_res_mix)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    if out.numel():
        rows = rows_of(x.reshape(-1, hidden)), _streams(residual), out.view(-1, 4, hidden)
        post, comb = post_layer_mix.reshape(-1, 4).contiguous(), comb_res_mix.reshape(-1, 4, 4).contiguous()
        _post(*rows[:2], post, comb, rows[2])
    return out


@checked
def mhc_pre_big_fuse(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    k: int,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    num_splits: int = 1,
    block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mixes of a token and the layer's input, from the product of its streams with the mixing weights.

    With the logits ``l = dot_mix / sqrt(sqrsum / k + rms_eps) * mhc_scale + mhc_base``, whose scale is `mhc_scale[0]`
    for the first 4, `mhc_scale[1]` for the next 4 and `mhc_scale[2]` for the last 16::

        pre = sigmoid(l[0:4]) + mhc_pre_eps
        post = mhc_post_mult_value * sigmoid(l[4:8])
        comb = l[8:24] as [4, 4]: softmax of rows, plus mhc_sinkhorn_eps, then sinkhorn_repeat normalisations of
            columns with sinkhorn_repeat - 1 of rows between them; a sum is increased by mhc_sinkhorn_eps first
        layer_input = sum_i pre[i] * residual[i]

    Parameters
    ----------
    dot_mix : torch.Tensor
        float32 [..., 24], or [num_splits, ..., 24]: parts that are summed.
    sqrsum : torch.Tensor
        float32 [...], or [num_splits, ...]: sums of squares of the streams' elements.
    residual : torch.Tensor
        [..., 4, hidden]; bfloat16, float16 or float32.
    mhc_scale : torch.Tensor
        float32 [3].
    mhc_base : torch.Tensor
        float32 [24].
    k : int
        Elements that sqrsum is of: 4 * hidden.
    rms_eps, mhc_pre_eps, mhc_sinkhorn_eps : float
        Above 0.
    mhc_post_mult_value : float
        A factor of post.
    sinkhorn_repeat : int
        1 to 1000.
    num_splits : int
        1, 2, 4, 8 or 16.
    block_size : int
        Threads of upstream's kernel. It has no effect here.

    Returns
    -------
    post : torch.Tensor
        float32 [..., 4, 1].
    comb : torch.Tensor
        float32 [..., 4, 4].
    layer_input : torch.Tensor
        [..., hidden] in the dtype of residual.

    Raises
    ------
    ValueError
        A shape, dtype, device or number other than the above.

    References
    ----------
    Xie et al., mHC: Manifold-Constrained Hyper-Connections, 2025, https://arxiv.org/abs/2512.24880

    Examples
    --------
    >>> import torch
    >>> from flashinfer.mhc import mhc_pre_big_fuse
    >>> residual = torch.ones(2, 4, 8)
    >>> zeros = torch.zeros(2, 24)
    >>> post, comb, x = mhc_pre_big_fuse(zeros, torch.full((2,), 32.0), residual, torch.ones(3), torch.zeros(24), 32)
    >>> round(float(post[0, 0, 0]), 3), round(float(comb[0, 0, 0]), 3), round(float(x[0, 0]), 3)
    (0.5, 0.25, 2.0)
    """
    require(num_splits in (1, 2, 4, 8, 16), "num_splits", num_splits, "1, 2, 4, 8, 16")
    outer, _ = _check_residual(residual)
    lead = (num_splits,) if num_splits > 1 else ()
    for name, value, shape in (("dot_mix", dot_mix, (*lead, *outer, 24)), ("sqrsum", sqrsum, (*lead, *outer))):
        require_fit(name, value, tuple(value.shape) == shape, f"{shape}", torch.float32)
    require(k >= 1, "k", k, "1 or more")
    numbers = (k, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat)
    return _run_pre(dot_mix, sqrsum, residual, mhc_scale, mhc_base, numbers, num_splits)


@checked
def mhc_pre_big_fuse_with_prenorm(
    dot_mix: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mhc_pre_big_fuse` that computes sqrsum itself, from all elements of a token's streams.

    Parameters
    ----------
    dot_mix : torch.Tensor
        float32 [..., 24] or [1, ..., 24].
    residual : torch.Tensor
        [..., 4, hidden].
    mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, block_size
        As in `mhc_pre_big_fuse`.

    Returns
    -------
    post, comb, layer_input : torch.Tensor
        As in `mhc_pre_big_fuse`.

    Raises
    ------
    ValueError
        As `mhc_pre_big_fuse` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> mix, residual = torch.randn(2, 24), torch.randn(2, 4, 64).bfloat16()
    >>> post, comb, x = flashinfer.mhc.mhc_pre_big_fuse_with_prenorm(mix, residual, torch.ones(3), torch.zeros(24))
    >>> x.shape
    torch.Size([2, 64])
    """
    outer, hidden = _check_residual(residual)
    shapes = (*outer, 24), (1, *outer, 24)
    require_fit("dot_mix", dot_mix, tuple(dot_mix.shape) in shapes, f"{shapes[0]}", torch.float32)
    numbers = (4 * hidden, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat)
    return _run_pre(dot_mix, None, residual, mhc_scale, mhc_base, numbers, 1)


def _check_residual(residual: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Outer shape and hidden size."""
    fits = residual.dim() >= 3 and residual.shape[-2] == 4
    require_fit("residual", residual, fits, "[..., 4, hidden]", *_DTYPES)
    tokens = residual[..., 0, 0].numel() if residual.shape[-1] else 0
    require(tokens < 1 << 31, "residual", tuple(residual.shape), "fewer than 2^31 tokens")
    return tuple(residual.shape[:-2]), residual.shape[-1]


def _streams(residual: torch.Tensor) -> torch.Tensor:
    """[tokens, 4, hidden] with contiguous rows; a copy only where strides forbid a view."""
    return rows_of(residual.reshape(-1, 4, residual.shape[-1]))


def _run_pre(dot_mix, sqrsum, residual, scale, base, numbers, splits):
    for name, value, size in (("mhc_scale", scale, 3), ("mhc_base", base, 24)):
        require_fit(name, value, tuple(value.shape) == (size,), f"[{size}]", torch.float32)
    names = ("k", "rms_eps", "mhc_pre_eps", "mhc_sinkhorn_eps")
    for name, value in zip(names[1:], numbers[1:4], strict=True):
        require(value > 0, name, value, "above 0")
    require(1 <= numbers[5] <= _MOST_REPEATS, "sinkhorn_repeat", numbers[5], f"1 ... {_MOST_REPEATS}")
    device = same_device(dot_mix=dot_mix, sqrsum=sqrsum, residual=residual, mhc_scale=scale, mhc_base=base)
    outer, hidden = residual.shape[:-2], residual.shape[-1]
    post = torch.empty(*outer, 4, 1, dtype=torch.float32, device=device)
    comb = torch.empty(*outer, 4, 4, dtype=torch.float32, device=device)
    layer_input = torch.empty(*outer, hidden, dtype=residual.dtype, device=device)
    if layer_input.numel():
        sums = None if sqrsum is None else sqrsum.reshape(splits, -1).contiguous()
        given = dot_mix.reshape(splits, -1, 24), scale, base
        mix, scale, base = (x.contiguous() for x in given)
        results = post.view(-1, 4), comb.view(-1, 16), layer_input.view(-1, hidden)
        _pre(mix, sums, _streams(residual), scale, base, *results, [float(n) for n in numbers[:5]], numbers[5])
    return post, comb, layer_input


def _aligned(hidden: int, *tensors: torch.Tensor) -> bool:
    return hidden * tensors[0].element_size() % 16 == 0 and is_aligned(*tensors)


@custom_op("flashinfer::mhc_pre", mutates_args=("post", "comb", "layer_input"))
def _pre(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor | None,
    residual: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    layer_input: torch.Tensor,
    numbers: list[float],
    repeat: int,
) -> None:
    problem = room.Pre(
        dtype=dtype_name(residual.dtype),
        splits=len(dot_mix),
        prenorm=sqrsum is None,
        aligned=_aligned(residual.shape[2], residual, layer_input),
    )
    given = (dot_mix, sqrsum, residual, scale, base, (*numbers, repeat), post, comb, layer_input)
    room.pre(problem, residual.device).run(*given)


@custom_op("flashinfer::mhc_post", mutates_args=("out",))
def _post(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor
) -> None:
    problem = room.Post(
        dtype=dtype_name(x.dtype),
        mix_dtype=dtype_name(post.dtype),
        aligned=_aligned(x.shape[1], x, residual, out),
    )
    choice = room.post(problem, x.device)
    for start in range(0, len(x), _MOST_TOKENS):
        part = slice(start, start + _MOST_TOKENS)
        choice.run(x[part], residual[part], post[part], comb[part], out[part])
