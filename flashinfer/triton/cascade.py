"""Merging of attention states, by upstream's second names; and of runs of states with lengths of their own."""

from __future__ import annotations

import torch

from flashinfer._core import env
from flashinfer._core.arguments import checked
from flashinfer._core.checks import dtype_name, indptr_values, is_aligned, require, require_fit, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer.cascade.merge import V_DTYPES, merge_state, merge_state_in_place, merge_states
from flashinfer.ops.attention import merge as room

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]


@checked
def variable_length_merge_states(
    v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys into attention over all of them, each token with a number of parts.

    Parameters
    ----------
    v : torch.Tensor
        Attention outputs of all tokens' parts, [states, num_heads, head_dim]; float16, bfloat16 or float32, any
        strides.
    s : torch.Tensor
        Their log-sum-exps, base 2, [states, num_heads]; any floating-point dtype.
    indptr : torch.Tensor
        int32 or int64 [seq_len + 1]: token i has the states ``indptr[i]`` to ``indptr[i + 1]``. It may have none.

    Returns
    -------
    v : torch.Tensor
        [seq_len, num_heads, head_dim], dtype of v; accumulated in float32.
    s : torch.Tensor
        float32 [seq_len, num_heads].

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above; on the CPU, and on a GPU if FLASHINFER_DEBUG=1 (it waits for the
        device), also offsets that decrease or run past the states.

    Notes
    -----
    Empty states, NaN and +inf are treated as by `merge_state`; a token without a state gets v = 0, s = -inf.

    References
    ----------
    Ye et al., FlashInfer, 2025, https://arxiv.org/abs/2501.01005, section 2.2

    Examples
    --------
    >>> import torch
    >>> from flashinfer.triton.cascade import variable_length_merge_states
    >>> v, s = torch.tensor([1.0, 3.0, 5.0]).view(3, 1, 1), torch.zeros(3, 1)
    >>> variable_length_merge_states(v, s, torch.tensor([0, 2, 3]))
    (tensor([[[2.]],
    <BLANKLINE>
            [[5.]]]), tensor([[1.],
            [0.]]))
    """
    s = s.float() if s.dtype.is_floating_point else s
    require(v.dim() == 3 and v.shape[2] > 0, "v", tuple(v.shape), "[states, num_heads, head_dim]")
    require(v.dtype in V_DTYPES, "v", v.dtype, ", ".join(map(str, V_DTYPES)))
    require(s.shape == v.shape[:2], "s", tuple(s.shape), f"{tuple(v.shape[:2])}, as v has")
    require(s.dtype == torch.float32, "s", s.dtype, "a floating-point dtype")
    require_fit("indptr", indptr, indptr.dim() == 1 and len(indptr) >= 1, "[seq_len + 1]", torch.int32, torch.int64)
    same_device(v=v, s=s, indptr=indptr)
    if not indptr.is_cuda or env.DEBUG.is_on():
        indptr_values("indptr", indptr, len(v), "the states of v", sliced=True)
    tokens, heads = len(indptr) - 1, v.shape[1]
    out = torch.empty(tokens, *v.shape[1:], dtype=v.dtype, device=v.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=v.device)
    _merge_runs(v, s, indptr.to(torch.int32).contiguous(), out, lse)
    return out, lse


@custom_op("flashinfer::variable_length_merge_states", mutates_args=("out", "lse"))
def _merge_runs(
    v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    if not lse.numel():
        return
    # Four states a step: most tokens have a few.
    problem = room.StackProblem(dtype_name(v.dtype), v.shape[2], 4, is_aligned(v, out), ragged=True)
    room.merge_stack(problem, v.device).run(v, s, out, lse, indptr)
