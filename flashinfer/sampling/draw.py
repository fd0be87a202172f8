"""Drawing tokens from rows of probabilities or logits, all of them or those that top-k, top-p or min-p keep."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer._core.literals import FilterApplyOrder
from flashinfer._core.replay import replayed
from flashinfer.sampling._launches import draw, draw_prefix
from flashinfer.sampling.arguments import Call, ordered_source, parameter


@replayed
def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from each row of probabilities.

    Parameters
    ----------
    probs : torch.Tensor
        [rows, num_classes]; float32, bfloat16, float16, or float64, which is rounded to float32; not negative (what
        is, counts as 0). Rows should sum to 1; tokens are drawn in proportion in any case.
    indices : torch.Tensor, optional
        int32 or int64 [batch]: the row that each output is drawn from. By default output i is drawn from row i.
    deterministic : bool
        Results depend on nothing but the arguments in either case.
    generator : torch.Generator, optional
        Where seed and offset come from if they are not given; by default the device's own. It advances.
    check_nan : bool
        Raise ValueError if a row holds NaN. Waits for the device.
    seed, offset : int or torch.Tensor, optional
        Both or neither. A tensor is int64 with one element, or with one for each output. An output that has a seed of
        its own depends on it, its offset and its row's values, and not on its place in the batch: outputs with equal
        seeds and offsets draw equal numbers. Where all share one seed, each draws numbers of its own. A CUDA graph
        reads tensors at each replay.
    return_valid : bool
        Return `valid` as well.

    Returns
    -------
    samples : torch.Tensor
        [batch]; dtype of `indices`, or int32. 0 where there is nothing to draw.
    valid : torch.Tensor
        bool [batch], only with `return_valid`: False where a row holds NaN or inf, or no probability above 0, or where
        a filter's parameter is impossible. Other rows are not affected.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above; NaN, if `check_nan`; a number that is impossible as a filter's
        parameter, unless `return_valid` reports it.

    References
    ----------
    An exponential race: the token with the largest probability / variate wins; the variates are Philox 4x32-10's of
    seed, offset and column (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011).

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.sampling_from_probs(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    tensor([1, 2], dtype=torch.int32)
    """
    call = Call("probs", probs, indices, check_nan, generator, seed, offset)
    draw(call.x, "probs", None, None, *call.operands)
    return call.result(return_valid)


@replayed
def sampling_from_logits(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token from the softmax of each row of logits, without computing it.

    Parameters
    ----------
    logits : torch.Tensor
        [rows, num_classes]; float32, bfloat16, float16, or float64, which is rounded to float32. A row with NaN or
        +inf, or of -inf alone, gives 0.
    indices, deterministic, generator, check_nan, seed, offset
        As in `sampling_from_probs`.

    Returns
    -------
    torch.Tensor
        [batch]; dtype of `indices`, or int32.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.sampling_from_logits(torch.tensor([[0.0, 1000.0, 0.0]]))
    tensor([1], dtype=torch.int32)
    """
    call = Call("logits", logits, indices, check_nan, generator, seed, offset)
    draw(call.x, "logits", None, None, *call.operands)
    return call.result(False)


@replayed
def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from the fewest most probable ones whose probabilities sum to `top_p` (nucleus sampling).

    Those that equal the least of them may be drawn, too.

    Parameters
    ----------
    probs, indices, deterministic, generator, check_nan, seed, offset, return_valid
        As in `sampling_from_probs`.
    top_p : torch.Tensor or float
        A number, or a tensor with one for each row of `probs` or, where they are not as many, for each output;
        above 0. From 1 on everything is kept.

    Returns
    -------
    samples, valid : torch.Tensor
        As in `sampling_from_probs`.

    Raises
    ------
    ValueError
        As in `sampling_from_probs`.

    References
    ----------
    Holtzman et al., The Curious Case of Neural Text Degeneration, 2019, https://arxiv.org/abs/1904.09751

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.top_p_sampling_from_probs(torch.tensor([[0.1, 0.7, 0.2]]), 0.5)
    tensor([1], dtype=torch.int32)
    """
    call = Call("probs", probs, indices, check_nan, generator, seed, offset)
    draw_prefix(call.x, "probs", *call.no_k, *call.p(top_p, return_valid), *call.operands)
    return call.result(return_valid)


@replayed
def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from the `top_k` most probable ones.

    Those that equal the least of them may be drawn, too.

    Parameters
    ----------
    probs, indices, deterministic, generator, check_nan, seed, offset, return_valid
        As in `sampling_from_probs`.
    top_k : torch.Tensor or int
        A number, or a tensor with one for each output or, where they are not as many, for each row; 1 or
        more. From num_classes on everything is kept.

    Returns
    -------
    samples, valid : torch.Tensor
        As in `sampling_from_probs`.

    Raises
    ------
    ValueError
        As in `sampling_from_probs`.

    References
    ----------
    Fan, Lewis and Dauphin, Hierarchical Neural Story Generation, 2018, https://arxiv.org/abs/1805.04833

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.top_k_sampling_from_probs(torch.tensor([[0.1, 0.7, 0.2]]), 1)
    tensor([1], dtype=torch.int32)
    """
    call = Call("probs", probs, indices, check_nan, generator, seed, offset)
    draw_prefix(call.x, "probs", *call.k(top_k, return_valid, by_row=False), *call.no_p, *call.operands)
    return call.result(return_valid)


@replayed
def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from those whose probability is at least `min_p` times the row's largest.

    Parameters
    ----------
    probs, indices, deterministic, generator, check_nan, seed, offset, return_valid
        As in `sampling_from_probs`.
    min_p : torch.Tensor or float
        A number, or a tensor with one for each output or, where they are not as many, for each row;
        from 0 to 1.

    Returns
    -------
    samples, valid : torch.Tensor
        As in `sampling_from_probs`.

    Raises
    ------
    ValueError
        As in `sampling_from_probs`.

    References
    ----------
    Nguyen et al., Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs, 2024,
    https://arxiv.org/abs/2407.01082

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.min_p_sampling_from_probs(torch.tensor([[0.1, 0.7, 0.2]]), 0.5)
    tensor([1], dtype=torch.int32)
    """
    call = Call("probs", probs, indices, check_nan, generator, seed, offset)
    scalar, tensor = parameter("min_p", call.of_outputs("min_p", min_p, False), call.batch, torch.float32)
    require(return_valid or scalar is None or 0 <= scalar <= 1, "min_p", scalar, "0 to 1")
    draw(call.x, "probs", scalar, tensor, *call.operands)
    return call.result(return_valid)


@replayed
def top_k_top_p_sampling_from_logits(
    logits: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: FilterApplyOrder = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token from the softmax of each row of logits, filtered by top-k and top-p.

    Parameters
    ----------
    logits : torch.Tensor
        As in `sampling_from_logits`.
    top_k : torch.Tensor or int
        A number, or a tensor with one for each row of `logits` or, where they are not as many, for each output; 1
        or more. From num_classes on everything is kept.
    top_p : torch.Tensor or float
        A number, or a tensor with one for each row of `logits` or, where they are not as many, for each output;
        above 0. From 1 on everything is kept.
    filter_apply_order : str
        "top_k_first": top-p is applied to the `top_k` most probable tokens, their probabilities divided by their sum;
        or "joint": a token has to pass both filters, each applied to the row as it is.
    indices, deterministic, generator, check_nan, seed, offset
        As in `sampling_from_probs`.

    Returns
    -------
    torch.Tensor
        [batch]; dtype of `indices`, or int32.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or number other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.top_k_top_p_sampling_from_logits(torch.tensor([[1.0, 3.0, 2.0]]), 1, 0.9)
    tensor([1], dtype=torch.int32)
    """
    call = Call("logits", logits, indices, check_nan, generator, seed, offset)
    ordered = ordered_source("logits", filter_apply_order)
    draw_prefix(call.x, ordered, *call.k(top_k, False, by_row=True), *call.p(top_p, False), *call.operands)
    return call.result(False)


@replayed
def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    indices: torch.Tensor | None = None,
    filter_apply_order: FilterApplyOrder = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw a token from each row of probabilities, filtered by top-k and top-p.

    Parameters
    ----------
    probs, indices, deterministic, generator, check_nan, seed, offset, return_valid
        As in `sampling_from_probs`.
    top_k : torch.Tensor or int
        A number, or a tensor with one for each row of `probs` or, where they are not as many, for each output; 1
        or more. From num_classes on everything is kept.
    top_p
        As in `top_p_sampling_from_probs`.
    filter_apply_order
        As in `top_k_top_p_sampling_from_logits`.

    Returns
    -------
    samples, valid : torch.Tensor
        As in `sampling_from_probs`.

    Raises
    ------
    ValueError
        As in `sampling_from_probs`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.top_k_top_p_sampling_from_probs(torch.tensor([[0.1, 0.7, 0.2]]), 2, 0.5)
    tensor([1], dtype=torch.int32)
    """
    call = Call("probs", probs, indices, check_nan, generator, seed, offset)
    ordered = ordered_source("probs", filter_apply_order)
    k, p = call.k(top_k, return_valid, by_row=True), call.p(top_p, return_valid)
    draw_prefix(call.x, ordered, *k, *p, *call.operands)
    return call.result(return_valid)
