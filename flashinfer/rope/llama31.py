"""Rotary position embedding with the frequencies of Llama 3.1."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer._core.replay import replayed
from flashinfer.rope.rotate import rotate_inplace, rotated


@replayed
def apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope` with the frequencies of Llama 3.1, which scales only those that turn slowly.

    Parameters
    ----------
    q, k, indptr, offsets, rotary_dim, interleave, rope_theta
        As in `flashinfer.apply_rope`.
    rope_scale : float
        Frequencies that make fewer than `low_freq_factor` turns in `old_context_len` positions are divided by it.
    low_freq_factor, high_freq_factor : float
        Frequencies with more than `high_freq_factor` turns are kept; between the two, the share of the kept frequency
        in the result grows linearly with the number of turns. The first has to be less than the second.
    old_context_len : int
        The context length that the model was trained with first.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        The rotated q and k, new tensors; computed in float32 and rounded once.

    Raises
    ------
    ValueError
        As in `flashinfer.apply_rope`.

    References
    ----------
    Grattafiori et al., The Llama 3 Herd of Models, 2024, https://arxiv.org/abs/2407.21783, with the `rope_scaling` of
    type "llama3" in the configuration of the published models.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k = torch.ones(3, 1, 64), torch.ones(3, 1, 64)
    >>> indptr, offsets = torch.tensor([0, 3]).int(), torch.tensor([0]).int()
    >>> q_out, k_out = flashinfer.apply_llama31_rope(q, k, indptr, offsets)
    >>> q_out[:2, 0, 0]
    tensor([ 1.0000, -0.3012])
    """
    frequencies = _llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return rotated(q, k, indptr, offsets, rotary_dim, interleave, frequencies)


@replayed
def apply_llama31_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope`, the result written over q and k.

    Parameters
    ----------
    q, k, indptr, offsets, rotary_dim, interleave, rope_theta
        As in `flashinfer.apply_rope`.
    rope_scale, low_freq_factor, high_freq_factor, old_context_len
        As in `apply_llama31_rope`.

    Raises
    ------
    ValueError
        As in `flashinfer.apply_rope`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k = torch.ones(3, 1, 64), torch.ones(3, 1, 64)
    >>> indptr, offsets = torch.tensor([0, 3]).int(), torch.tensor([0]).int()
    >>> flashinfer.apply_llama31_rope_inplace(q, k, indptr, offsets)
    >>> q[:2, 0, 0]
    tensor([ 1.0000, -0.3012])
    """
    frequencies = _llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    rotate_inplace(q, k, indptr, offsets, rotary_dim, interleave, frequencies)


@replayed
def apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_llama31_rope` with the position of each token given.

    Parameters
    ----------
    q, k, rotary_dim, interleave, rope_theta
        As in `flashinfer.apply_rope`.
    pos_ids : torch.Tensor
        [nnz], int32 or int64, any values: the position of each token.
    rope_scale, low_freq_factor, high_freq_factor, old_context_len
        As in `apply_llama31_rope`.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        The rotated q and k, new tensors; computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype, device or value other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k = torch.ones(3, 1, 64), torch.ones(3, 1, 64)
    >>> q_out, k_out = flashinfer.apply_llama31_rope_pos_ids(q, k, torch.tensor([0, 0, 1]).int())
    >>> q_out[:, 0, 0]
    tensor([ 1.0000,  1.0000, -0.3012])
    """
    frequencies = _llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return rotated(q, k, pos_ids, None, rotary_dim, interleave, frequencies)


@replayed
def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope_pos_ids`, the result written over q and k.

    Parameters
    ----------
    q, k, rotary_dim, interleave, rope_theta
        As in `flashinfer.apply_rope`.
    pos_ids : torch.Tensor
        [nnz], int32 or int64, any values: the position of each token.
    rope_scale, low_freq_factor, high_freq_factor, old_context_len
        As in `apply_llama31_rope`.

    Raises
    ------
    ValueError
        A shape, dtype, device or value other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k = torch.ones(3, 1, 64), torch.ones(3, 1, 64)
    >>> flashinfer.apply_llama31_rope_pos_ids_inplace(q, k, torch.tensor([0, 0, 1]).int())
    >>> q[:, 0, 0]
    tensor([ 1.0000,  1.0000, -0.3012])
    """
    frequencies = _llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    rotate_inplace(q, k, pos_ids, None, rotary_dim, interleave, frequencies)


def _llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len) -> list[float]:
    higher = f"more than low_freq_factor = {low_freq_factor}"
    require(high_freq_factor > low_freq_factor, "high_freq_factor", high_freq_factor, higher)
    require(old_context_len > 0, "old_context_len", old_context_len, "more than 0")
    return [rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len]
