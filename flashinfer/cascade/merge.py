"""Merging of attention states."""

from __future__ import annotations

import torch

from flashinfer._core.checks import dtype_name, is_aligned, require, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer.ops.attention import merge as room

V_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@replayed
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two parts of the keys into attention over both.

    Parameters
    ----------
    v_a, v_b : torch.Tensor
        Attention outputs, shape [seq_len, num_heads, head_dim]; float16, bfloat16 or float32, both alike.
    s_a, s_b : torch.Tensor
        Their log-sum-exps, base 2, shape [seq_len, num_heads]; float32, or another floating type, which is converted.

    Returns
    -------
    v : torch.Tensor
        Shape and dtype of v_a; accumulated in float32.
    s : torch.Tensor
        float32, shape of s_a.

    Raises
    ------
    ValueError
        A shape, dtype or device is other than stated.

    Notes
    -----
    s = -inf marks a state that saw no key: merging it in changes nothing, whatever its v holds; two of them give
    v = 0, s = -inf. Where an s is NaN or +inf, which no attention yields, v and s come out NaN.

    The formula is in Ye et al., FlashInfer, arXiv:2501.01005, section 2.2.

    Examples
    --------
    >>> import torch, flashinfer
    >>> v, s = torch.ones(1, 1, 2), torch.zeros(1, 1)
    >>> merged, lse = flashinfer.merge_state(v, s, 3 * v, s)
    >>> merged, lse
    (tensor([[[2., 2.]]]), tensor([[1.]]))
    """
    s_a, s_b = _as_float32(s_a), _as_float32(s_b)
    _check_state("v_a", v_a, "s_a", s_a)
    _check_state("v_b", v_b, "s_b", s_b)
    _check_alike("v_b", v_b, v_a)
    same_device(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    out, lse = torch.empty_like(v_a, memory_format=torch.contiguous_format), _empty_lse(s_a)
    _merge_pair(v_a, s_a, v_b, s_b, out, lse)
    return out, lse


@replayed
def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Merge a second attention state into the first.

    Parameters
    ----------
    v, v_other : torch.Tensor
        Attention outputs, shape [seq_len, num_heads, head_dim]; float16, bfloat16 or float32, both alike. v is
        overwritten with the merged output.
    s, s_other : torch.Tensor
        Their log-sum-exps, base 2, shape [seq_len, num_heads]. s is float32 and is overwritten; s_other may be of
        another floating type, which is converted.
    mask : torch.Tensor, optional
        bool or uint8, shape [seq_len]: tokens where it is false, or 0, keep their v and s. Read on the device, so that
        a captured CUDA graph obeys its value at replay. None merges every token.

    Raises
    ------
    ValueError
        A shape, dtype or device is other than stated; v or s has elements that share memory.

    Notes
    -----
    Empty states, NaN and +inf are treated as by `merge_state`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> v, s = torch.ones(1, 1, 2), torch.zeros(1, 1)
    >>> flashinfer.merge_state_in_place(v, s, 3 * v, s.clone())
    >>> v, s
    (tensor([[[2., 2.]]]), tensor([[1.]]))
    """
    s_other = _as_float32(s_other)
    _check_state("v", v, "s", s)
    _check_state("v_other", v_other, "s_other", s_other)
    _check_alike("v_other", v_other, v)
    for name, x in (("v", v), ("s", s)):
        if any(stride == 0 and n > 1 for n, stride in zip(x.shape, x.stride())):
            require(False, name, f"strides {x.stride()}", "elements with memory of their own, as it is written")
    if mask is not None:
        require(mask.dtype in (torch.bool, torch.uint8), "mask", mask.dtype, "torch.bool, torch.uint8")
        require(mask.shape == v.shape[:1], "mask", f"shape {tuple(mask.shape)}", f"({v.shape[0]},), one per token of v")
    same_device(v=v, s=s, v_other=v_other, s_other=s_other, mask=mask)
    if mask is not None and mask.dtype == torch.uint8:
        mask = mask.bool()
    _merge_into(v, s, v_other, s_other, mask)


@replayed
def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over any number of parts of the keys into attention over all of them.

    Parameters
    ----------
    v : torch.Tensor
        Attention outputs, shape [seq_len, num_states, num_heads, head_dim]; float16, bfloat16 or float32. Any strides:
        outputs written one after another as [num_states, seq_len, ...] can be given transposed.
    s : torch.Tensor
        Their log-sum-exps, base 2, shape [seq_len, num_states, num_heads]; float32, or another floating type, which is
        converted.

    Returns
    -------
    v : torch.Tensor
        Shape [seq_len, num_heads, head_dim], dtype of v; accumulated in float32.
    s : torch.Tensor
        float32, shape [seq_len, num_heads].

    Raises
    ------
    ValueError
        A shape, dtype or device is other than stated.

    Notes
    -----
    Empty states, NaN and +inf are treated as by `merge_state`; num_states = 0 gives v = 0, s = -inf.

    Examples
    --------
    >>> import torch, flashinfer
    >>> v, s = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1), torch.zeros(1, 2, 1)
    >>> flashinfer.merge_states(v, s)
    (tensor([[[2.]]]), tensor([[1.]]))
    """
    s = _as_float32(s)
    _check_state("v", v, "s", s, "[seq_len, num_states, num_heads, head_dim]")
    same_device(v=v, s=s)
    seq_len, _, num_heads, head_dim = v.shape
    out = torch.empty(seq_len, num_heads, head_dim, dtype=v.dtype, device=v.device)
    lse = torch.empty(seq_len, num_heads, dtype=torch.float32, device=v.device)
    _merge_stack(v, s, out, lse)
    return out, lse


def _as_float32(s):
    """Log-sum-exps as kernels read them. What is of no floating type is left to the checks."""
    return s.float() if s.dtype in (torch.float16, torch.bfloat16, torch.float64) else s


def _check_state(v_name, v, s_name, s, dims="[seq_len, num_heads, head_dim]"):
    rank = dims.count(",") + 1
    fits = v.dim() == rank and s.shape == v.shape[:-1] and v.shape[-1] > 0 and v.shape[0] * v.shape[-2] < 2**31
    if fits and v.dtype in V_DTYPES and s.dtype == torch.float32:
        return
    # Something is wrong: the first of these that fails says what.
    require(v.dim() == rank, v_name, f"shape {tuple(v.shape)}", dims)
    require(v.shape[-1] > 0, v_name, f"shape {tuple(v.shape)}", f"{dims} with head_dim >= 1")
    require(v.dtype in V_DTYPES, v_name, v.dtype, ", ".join(map(str, V_DTYPES)))
    require(s.shape == v.shape[:-1], s_name, f"shape {tuple(s.shape)}", f"{tuple(v.shape[:-1])}, as {v_name} has")
    require(s.dtype == torch.float32, s_name, s.dtype, "torch.float32")
    rows = v.shape[0] * v.shape[-2]
    require(rows < 2**31, v_name, f"{rows} heads of tokens", "fewer than 2**31")


def _check_alike(name, x, first):
    if x.shape == first.shape and x.dtype == first.dtype:
        return
    require(x.shape == first.shape, name, f"shape {tuple(x.shape)}", f"{tuple(first.shape)}, as the first state has")
    require(x.dtype == first.dtype, name, x.dtype, f"{first.dtype}, as the first state has")


def _empty_lse(s):
    return torch.empty_like(s, memory_format=torch.contiguous_format)


def _run_pair(v_a, s_a, v_b, s_b, mask, out, lse):
    problem = room.PairProblem(dtype_name(v_a.dtype), v_a.shape[-1], mask is not None, is_aligned(v_a, v_b, out))
    room.merge_pair(problem, v_a.device).run(v_a, s_a, v_b, s_b, mask, out, lse)


@custom_op("flashinfer::merge_state", mutates_args=("out", "lse"))
def _merge_pair(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    _run_pair(v_a, s_a, v_b, s_b, None, out, lse)


@custom_op("flashinfer::merge_state_in_place", mutates_args=("v", "s"))
def _merge_into(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None
) -> None:
    _run_pair(v, s, v_other, s_other, mask, v, s)


@custom_op("flashinfer::merge_states", mutates_args=("out", "lse"))
def _merge_stack(v: torch.Tensor, s: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    states = room.states_class(v.shape[1])
    problem = room.StackProblem(dtype_name(v.dtype), v.shape[-1], states, is_aligned(v, out))
    room.merge_stack(problem, v.device).run(v, s, out, lse)
