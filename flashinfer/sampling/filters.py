"""Softmax, and rows of which only the values that top-k or top-p keep are left."""

from __future__ import annotations

from numbers import Real

import torch

from flashinfer._core.checks import WrongKind, dtype_name, is_aligned, require, rows_of, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer.ops import sampling as room
from flashinfer.sampling.arguments import as_rows, given, kind_of, parameter, top_k_of, top_p_of


@replayed
def softmax(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Probabilities of logits, ``exp(logits / temperature) / sum(exp(logits / temperature))`` per row.

    Parameters
    ----------
    logits : torch.Tensor
        [batch, num_classes]; float32, bfloat16, float16, or float64, which is rounded to float32. -inf is a
        probability of 0.
    temperature : torch.Tensor or float, optional
        A number, or a floating-point tensor [batch] with one for each row; above 0, or 0, which does not mean the
        largest logit: it is upstream's word for no preference, and gives all logits but -inf equal probabilities. A row
        whose temperature in a tensor is negative or NaN is NaN.
    enable_pdl : bool, optional
        Programmatic dependent launch. It has no effect on results, and none on the launch yet.

    Returns
    -------
    torch.Tensor
        float32 [batch, num_classes]. Rows with NaN or +inf, and rows of -inf alone, are NaN.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above, or a number that is no temperature; a TypeError as well where
        `temperature` is neither a number nor a tensor.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.softmax(torch.tensor([[0.0, 0.0]]), temperature=0.5)
    tensor([[0.5000, 0.5000]])
    """
    logits = as_rows("logits", logits)
    if isinstance(temperature, bool) or not isinstance(temperature, Real | torch.Tensor | None):
        raise WrongKind(f"temperature: got {temperature!r}; allowed: a number, or a tensor")
    if isinstance(temperature, torch.Tensor):
        shape = tuple(temperature.shape)
        require(shape == (len(logits),), "temperature", shape, f"[{len(logits)}], one for each row")
        require(temperature.is_floating_point(), "temperature", temperature.dtype, "a floating-point dtype")
    scalar, tensor = parameter("temperature", temperature, len(logits), torch.float32)
    require(scalar is None or scalar >= 0, "temperature", scalar, "0 or more")
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _softmax(logits, scalar, tensor, out)
    return out


@replayed
def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:
    """Keep the fewest largest probabilities of each row that sum to `top_p`, divide them by their sum, zero the others.

    Parameters
    ----------
    probs : torch.Tensor
        [batch, num_classes]; float32, bfloat16, float16, or float64, which is rounded to float32; not negative (what
        is, counts as 0).
    top_p : torch.Tensor or float
        Above 0; a number, or a tensor [batch] with one for each row. From 1 on everything is kept. Probabilities that
        equal the least that is kept are kept, too.
    is_deterministic : bool
        Results depend on nothing but the arguments in either case.

    Returns
    -------
    torch.Tensor
        float32 [batch, num_classes]. Rows with NaN or inf are NaN; rows without a probability above 0, or with an
        impossible `top_p`, are 0.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above, or a number that is impossible as `top_p`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.top_p_renorm_probs(torch.tensor([[0.25, 0.5, 0.25]]), 0.4)
    tensor([[0., 1., 0.]])
    """
    probs = as_rows("probs", probs).float()
    out = torch.empty_like(probs, memory_format=torch.contiguous_format)
    _write_prefix(probs, False, None, None, *top_p_of(top_p, len(probs)), out)
    return out


@replayed
def top_k_renorm_probs(
    probs: torch.Tensor, top_k: torch.Tensor | int, is_deterministic: bool = False
) -> torch.Tensor:
    """Keep the `top_k` largest probabilities of each row, divide them by their sum, and zero the others.

    Probabilities that equal the least of them are kept, too.

    Parameters
    ----------
    probs, is_deterministic
        As in `top_p_renorm_probs`.
    top_k : torch.Tensor or int
        A number or a tensor [batch], 1 or more.

    Returns
    -------
    torch.Tensor
        [batch, num_classes]; dtype of `probs`, or float32 of float64. Rows with NaN or inf are NaN; rows without a
        probability above 0, or with an impossible `top_k`, are 0.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above, or a number that is impossible as `top_k`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.top_k_renorm_probs(torch.tensor([[0.125, 0.5, 0.375, 0.0]]), 1)
    tensor([[0., 1., 0., 0.]])
    """
    probs = as_rows("probs", probs)
    out = torch.empty_like(probs, memory_format=torch.contiguous_format)
    _write_prefix(probs, False, *top_k_of(top_k, len(probs)), None, None, out)
    return out


@replayed
def top_k_mask_logits(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Keep the `top_k` largest logits of each row and set the others to -inf.

    Parameters
    ----------
    logits : torch.Tensor
        [batch, num_classes]; float32, bfloat16, float16, or float64, which is rounded to float32. NaN counts as the
        largest.
    top_k : torch.Tensor or int
        1 or more; a number, or a tensor [batch] with one for each row. Logits that equal the least of them are kept,
        too. Rows with an impossible one are -inf.

    Returns
    -------
    torch.Tensor
        [batch, num_classes]; dtype of `logits`, or float32 of float64.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above, or a number that is impossible as `top_k`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.top_k_mask_logits(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    tensor([[-inf, 3., 2.]])
    """
    logits = as_rows("logits", logits)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_prefix(logits, True, *top_k_of(top_k, len(logits)), None, None, out)
    return out


@custom_op("flashinfer::softmax", mutates_args=("out",))
def _softmax(
    logits: torch.Tensor, temperature: float | None, temperatures: torch.Tensor | None, out: torch.Tensor
) -> None:
    same_device(logits=logits, temperature=temperatures)
    if logits.numel():
        logits = rows_of(logits)
        kind = kind_of(temperature, temperatures)
        problem = room.Softmax(dtype_name(logits.dtype), kind, is_aligned(logits, out))
        room.softmax(problem, logits.device).run(logits, given(temperature, temperatures), out)


@custom_op("flashinfer::write_prefix", mutates_args=("out",))
def _write_prefix(
    x: torch.Tensor, logits: bool, top_k: int | None, top_ks: torch.Tensor | None, top_p: float | None,
    top_ps: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    same_device(x=x, top_k=top_ks, top_p=top_ps)
    if not x.numel():
        return
    x = rows_of(x)
    kinds = kind_of(top_k, top_ks), kind_of(top_p, top_ps)
    use, source = ("mask", "scores") if logits else ("renorm", "probs")
    problem = room.Prefix(use, source, dtype_name(x.dtype), *kinds, aligned=is_aligned(x, out))
    nothing = None, None, None, None
    room.prefix(problem, x.device).run(x, given(top_k, top_ks), given(top_p, top_ps), nothing, None, out, None)
