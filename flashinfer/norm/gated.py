"""Norms with gates: a normalised branch that joins a residual stream, and heads behind a sigmoid."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, same_device, wants_pdl
from flashinfer._core.custom_op import custom_op
from flashinfer._core.sizes import power_of_two
from flashinfer.norm._rows import ROW_DTYPES, check_rows, check_weights, launch
from flashinfer.ops import norm as room


@checked
def rmsnorm_sigmoid_gate(
    input: torch.Tensor, gate: torch.Tensor, eps: float = 1e-5, *, enable_pdl: bool = True
) -> None:
    """Normalise and gate in place: ``input = input / sqrt(mean(input ** 2) + eps) * sigmoid(gate)``, per row.

    Parameters
    ----------
    input : torch.Tensor
        [rows, head_dim] or [rows, heads, head_dim]; bfloat16, float16 or float32, any strides, any head_dim.
        Overwritten with the result.
    gate : torch.Tensor
        Shape and dtype of `input`, any strides.
    eps : float
        Added to the mean square.
    enable_pdl : bool
        Programmatic dependent launch: the kernel may be launched before those in front of it end, and waits for
        them itself: small launches, where the GPU has it (compute capability 9.0 and above). It has no effect on
        results.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Notes
    -----
    There is no weight. Computed in float32 and rounded once.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467; for the gate, Qiu
    et al., Gated Attention for Large Language Models, 2025, https://arxiv.org/abs/2505.06708

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, gate = torch.full((1, 128), 3.0).bfloat16(), torch.zeros(1, 128).bfloat16()
    >>> flashinfer.rmsnorm_sigmoid_gate(x, gate, 0.0)
    >>> x[0, :2]
    tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    _rmsnorm_sigmoid_gate(input, gate, eps, wants_pdl(enable_pdl))


def supports_rmsnorm_sigmoid_gate(
    dtype: torch.dtype, head_dim: int, device: torch.device | str | None = None
) -> bool:
    """Whether `rmsnorm_sigmoid_gate` takes rows of this dtype and length.

    Parameters
    ----------
    dtype : torch.dtype
        Of the rows.
    head_dim : int
        Their length, in elements.
    device : torch.device or str, optional
        No difference.

    Returns
    -------
    bool

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.supports_rmsnorm_sigmoid_gate(torch.bfloat16, 128)
    True
    """
    return dtype in ROW_DTYPES and isinstance(head_dim, int) and head_dim > 0


@checked
def gated_residual_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    gain_center: float = 0.0,
    out: torch.Tensor | None = None,
    *,
    enable_pdl: bool = True,
) -> torch.Tensor:
    """A normalised branch joins a residual stream: ``alpha * residual + beta * rms(branch * (weight + gain_center))``
    with ``rms(x) = x / sqrt(mean(x ** 2) + eps)``, per row.

    The weight acts before the norm. Everything is float32.

    Parameters
    ----------
    branch : torch.Tensor
        [rows, hidden]; bfloat16, float16 or float32, any strides. hidden up to 32768 on a GPU.
    residual : torch.Tensor
        [rows, hidden], float32, any strides.
    weight : torch.Tensor or None
        [hidden]; bfloat16, float16 or float32. None: the branch is normalised as it is, and `gain_center` is not used.
    alpha, beta : torch.Tensor
        [hidden], float32: the gates of the stream and of the branch.
    eps, enable_pdl
        As in `rmsnorm_sigmoid_gate`.
    gain_center : float
        Added to the weight.
    out : torch.Tensor, optional
        Receives the result; [rows, hidden], float32, any strides. It may be `residual` itself.

    Returns
    -------
    torch.Tensor
        `out`, or a new float32 tensor.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467

    Examples
    --------
    >>> import torch, flashinfer
    >>> branch, residual = torch.full((1, 64), 3.0).bfloat16(), torch.ones(1, 64)
    >>> weight, alpha, beta = torch.ones(64).bfloat16(), torch.full((64,), 2.0), torch.ones(64)
    >>> flashinfer.gated_residual_rmsnorm(branch, residual, weight, alpha, beta, eps=0.0)[0, :2]
    tensor([3., 3.])
    """
    out = torch.empty_like(residual) if out is None else out
    numbers = [eps, gain_center, 0.0, 0.0]
    pdl = wants_pdl(enable_pdl)
    _gated_residual(branch, residual, weight, alpha, 1.0, beta, out, None, None, numbers, pdl)
    return out


@checked
def gated_residual_next_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    post_eps: float = 1e-6,
    next_eps: float = 1e-6,
    next_gain_center: float = 0.0,
    residual_out: torch.Tensor | None = None,
    ffn_input: torch.Tensor | None = None,
    *,
    post_weight: torch.Tensor | None = None,
    post_gain_center: float = 0.0,
    enable_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_residual_rmsnorm` and the norm that reads the stream next, in one launch.

    ``residual_out = alpha * residual + beta * rms(branch * (post_weight + post_gain_center))``, then
    ``ffn_input = rms(residual_out) * (next_weight + next_gain_center)``, of which only `ffn_input` is rounded.

    Parameters
    ----------
    branch : torch.Tensor
        [rows, hidden]; bfloat16, float16 or float32, any strides. hidden up to 32768 on a GPU.
    residual : torch.Tensor
        [rows, hidden], float32, any strides.
    next_weight : torch.Tensor
        [hidden]; bfloat16, float16 or float32.
    alpha : torch.Tensor or float
        The gate of the stream: [hidden], float32, or a number.
    beta : torch.Tensor
        The gate of the branch: [hidden], float32.
    post_eps, next_eps : float
        Added to the mean square of the branch, and of the stream.
    next_gain_center : float
        Added to `next_weight`.
    residual_out : torch.Tensor, optional
        Receives the stream; [rows, hidden], float32, any strides. It may be `residual` itself.
    ffn_input : torch.Tensor, optional
        Receives the normalised stream; shape and dtype of `branch`, any strides. It may be `branch` itself.
    post_weight : torch.Tensor, optional
        [hidden], in the dtype of `next_weight`. Without it the branch is normalised as it is, and `post_gain_center` is
        not used.
    post_gain_center : float
        Added to `post_weight`.
    enable_pdl : bool
        Programmatic dependent launch: the kernel may be launched before those in front of it end, and waits for
        them itself: small launches, where the GPU has it (compute capability 9.0 and above). It has no effect on
        results.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        `residual_out` and `ffn_input`, or new tensors of their kind.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> branch, residual, weight = torch.full((1, 64), 3.0).bfloat16(), torch.ones(1, 64), torch.ones(64).bfloat16()
    >>> stream, ffn_input = flashinfer.gated_residual_next_rmsnorm(branch, residual, weight, 2.0, torch.ones(64))
    >>> stream.shape, ffn_input.dtype
    (torch.Size([1, 64]), torch.bfloat16)
    """
    residual_out = torch.empty_like(residual) if residual_out is None else residual_out
    ffn_input = torch.empty_like(branch) if ffn_input is None else ffn_input
    gate, number = (alpha, 1.0) if isinstance(alpha, torch.Tensor) else (None, float(alpha))
    numbers = [post_eps, post_gain_center, next_eps, next_gain_center]
    _gated_residual(
        branch, residual, post_weight, gate, number, beta, residual_out, next_weight, ffn_input, numbers,
        wants_pdl(enable_pdl),
    )  # fmt: skip
    return residual_out, ffn_input


def supports_gated_residual_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
) -> bool:
    """Whether `gated_residual_rmsnorm` takes these tensors; where False, it would raise.

    Parameters
    ----------
    branch, residual, weight, alpha, beta
        As in `gated_residual_rmsnorm`.

    Returns
    -------
    bool

    Examples
    --------
    >>> import torch, flashinfer
    >>> branch, residual = torch.ones(1, 64).bfloat16(), torch.ones(1, 64)
    >>> weight, alpha, beta = torch.ones(64).bfloat16(), torch.ones(64), torch.ones(64)
    >>> flashinfer.supports_gated_residual_rmsnorm(branch, residual, weight, alpha, beta)
    True
    """
    return isinstance(alpha, torch.Tensor) and _accepted(branch, residual, weight, alpha, beta, None)


def supports_gated_residual_next_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    *,
    post_weight: torch.Tensor | None = None,
) -> bool:
    """Whether `gated_residual_next_rmsnorm` takes these tensors; where False, it would raise.

    Parameters
    ----------
    branch, residual, next_weight, alpha, beta, post_weight
        As in `gated_residual_next_rmsnorm`.

    Returns
    -------
    bool

    Examples
    --------
    >>> import torch, flashinfer
    >>> branch, residual, weight = torch.ones(1, 64).bfloat16(), torch.ones(1, 64), torch.ones(64).bfloat16()
    >>> flashinfer.supports_gated_residual_next_rmsnorm(branch, residual, weight, 2.0, torch.ones(64))
    True
    """
    number = isinstance(alpha, (int, float))
    fits = isinstance(next_weight, torch.Tensor) and (number or isinstance(alpha, torch.Tensor))
    return fits and _accepted(branch, residual, post_weight, None if number else alpha, beta, next_weight)


def _accepted(branch, residual, weight, alpha, beta, next_weight) -> bool:
    given = branch, residual, beta, *(x for x in (weight, alpha, next_weight) if x is not None)
    if not all(isinstance(x, torch.Tensor) for x in given):
        return False
    try:
        _check_gated(branch, residual, weight, alpha, beta, next_weight)
    except ValueError:
        return False
    return branch.device.type == "cpu" or branch.shape[1] <= room.LONGEST


def _check_gated(branch, residual, weight, alpha, beta, next_weight) -> None:
    require_fit("branch", branch, branch.dim() == 2, "[rows, hidden]", *ROW_DTYPES)
    require(residual.shape == branch.shape, "residual", tuple(residual.shape), f"{tuple(branch.shape)}, as branch")
    require(residual.dtype == torch.float32, "residual", residual.dtype, "float32")
    hidden = branch.shape[1]
    for name, gate in (("alpha", alpha), ("beta", beta)):
        if gate is not None:
            require_fit(name, gate, gate.shape == (hidden,), f"[{hidden}], a row of branch", torch.float32)
    weights = {"weight" if next_weight is None else "post_weight": weight, "next_weight": next_weight}
    check_weights(branch, **{name: w for name, w in weights.items() if w is not None})
    if weight is not None and next_weight is not None:
        same = weight.dtype == next_weight.dtype
        require(same, "post_weight", weight.dtype, f"{next_weight.dtype}, the dtype of next_weight")
    same_device(branch=branch, residual=residual, alpha=alpha, beta=beta, **weights)


@custom_op("flashinfer::rmsnorm_sigmoid_gate", mutates_args=("input",))
def _rmsnorm_sigmoid_gate(input: torch.Tensor, gate: torch.Tensor, eps: float, pdl: bool) -> None:
    check_rows(input, gate=gate)
    same_device(input=input, gate=gate)
    launch(room.rmsnorm, input, None, input, eps, residual=gate, after="sigmoid_gate", pdl=pdl)


@custom_op("flashinfer::gated_residual_rmsnorm", mutates_args=("out", "next_out"))
def _gated_residual(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: torch.Tensor | None,
    alpha_number: float,
    beta: torch.Tensor,
    out: torch.Tensor,
    next_weight: torch.Tensor | None,
    next_out: torch.Tensor | None,
    numbers: list[float],
    pdl: bool,
) -> None:
    """numbers : eps and gain center of the branch's norm, then of the stream's."""
    _check_gated(branch, residual, weight, alpha, beta, next_weight)
    results = {"out" if next_out is None else "residual_out": (out, torch.float32)}
    if next_out is not None:
        results["ffn_input"] = next_out, branch.dtype
    for name, (tensor, dtype) in results.items():
        require(tensor.shape == branch.shape, name, tuple(tensor.shape), f"{tuple(branch.shape)}, as branch")
        require(tensor.dtype == dtype, name, tensor.dtype, str(dtype))
    same_device(branch=branch, out=out, next_out=next_out)
    if branch.numel() == 0:
        return
    beta = beta.contiguous()
    weight, alpha, next_weight = (t if t is None else t.contiguous() for t in (weight, alpha, next_weight))
    given = [t for t in (branch, residual, weight, alpha, beta, next_weight, out, next_out) if t is not None]
    some_weight = next((w for w in (weight, next_weight) if w is not None), branch)
    problem = room.Gated(
        dtype=dtype_name(branch.dtype),
        weight_dtype=dtype_name(some_weight.dtype),
        block=power_of_two(branch.shape[1]),
        weighted=weight is not None,
        alpha=alpha is not None,
        next=next_weight is not None,
        pdl=pdl,
        aligned=branch.shape[1] * branch.element_size() % 16 == 0 and is_aligned(*given),
    )
    gate = alpha_number if alpha is None else alpha
    following = (next_weight, next_out, *numbers[2:])
    room.gated_residual(problem, branch.device).run(
        branch, residual, weight, gate, beta, out, *numbers[:2], following
    )
