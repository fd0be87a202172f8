"""Gated delta rule over whole prompts."""

from __future__ import annotations

from typing import Literal

import torch

from flashinfer._core.checks import require
from flashinfer._core.custom_op import one_op
from flashinfer._core.literals import OwnBackend
from flashinfer._delta import (
    INPUTS,
    output_like,
    require_offsets,
    require_shape,
    require_tokens,
    scale_or_unset,
    variant_for,
)
from flashinfer._delta_prefill import check_states, marks_of, run_chunks
from flashinfer.ops.recurrent.delta.operands import Gates, Pool, Tokens

__all__ = ["chunk_gated_delta_rule"]

# Tokens of a segment: 16 chunks, so that 8192 tokens of 8 heads are 512 programs. Not measured.
SEGMENT = 1024


def _heads(its: dict) -> int:
    return max(its["q"].shape[1], its["v"].shape[1])


def _output(its: dict) -> torch.Tensor:
    shape = its["q"].shape[0], _heads(its), its["v"].shape[2]
    return its["q"].new_empty(shape) if its["output"] is None else its["output"]


def _output_state(its: dict) -> torch.Tensor | None:
    """New states are made for a caller who wants them; in a pool the caller's own are written."""
    if its["output_state"] is not None or its["state_indices"] is not None or not its["output_final_state"]:
        return its["output_state"]
    shape = len(its["cu_seqlens"]) - 1, _heads(its), its["v"].shape[2], its["q"].shape[2]
    return its["q"].new_empty(shape, dtype=torch.float32)


@one_op(
    written=("output", "output_state", "state_checkpoints"),
    given={"output": _output, "output_state": _output_state},
    returned=lambda its: (its["output"], its["output_state"]) if its["output_final_state"] else its["output"],
)
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
    state_indices: torch.Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: OwnBackend | Literal["flashinfer", "cake_gdn", "cudnn"] = "auto",
    max_seqlen: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences through a gated delta rule, in chunks of 64 tokens.

    Per head and token: ``S = g S; S += beta (v - S k) k^T; out = scale S q``. The bits of a sequence depend neither on
    what else is in the batch, nor, with states in float32, on where the prompt is cut at a multiple of 64 tokens, or
    with `use_cp` at one of `_cp_chunk_len`.

    Parameters
    ----------
    q, k : torch.Tensor
        [tokens, query heads or key heads, K]; bfloat16, float16 or float32, any strides. K up to 128 on a GPU.
    v : torch.Tensor
        [tokens, value heads, V] of that dtype. The largest count of heads is that of the states; it is a multiple of
        the others, and keys have as many heads as queries or values.
    g : torch.Tensor, optional
        [tokens, heads], the decay, not its logarithm; any floating dtype. 1 if not given. Decays below exp(-64) are
        taken for that.
    beta : torch.Tensor, optional
        [tokens, heads]; 1 if not given.
    scale : float, optional
        Of the output; 1 / sqrt(K) if not given or 0.
    initial_state : torch.Tensor, optional
        [sequences, heads, V, K], or a pool [slots, heads, V, K] with `state_indices`; float32, bfloat16, float16,
        float8_e4m3fn or float8_e5m2, any strides. Zero if not given.
    output_final_state : bool
        Whether to return the final states.
    cu_seqlens : torch.Tensor
        [sequences + 1], int32 or int64: sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1]. Tokens of no
        sequence have output 0.
    use_qk_l2norm_in_kernel : bool
        q and k are divided by sqrt(sum of squares + 1e-6) first.
    output : torch.Tensor, optional
        [tokens, heads, V]; receives the result.
    output_state : torch.Tensor, optional
        Receives the final states; it may be `initial_state`. Required with `output_final_state` and `state_indices`.
    state_checkpoints : torch.Tensor, optional
        [checkpoints, heads, V, K], any dtype of states: the states after every `checkpoint_every_n_tokens` tokens,
        those of sequence i from row checkpoint_cu_starts[i] on, as many as go into its length.
    checkpoint_cu_starts : torch.Tensor, optional
        [sequences + 1], int32 or int64.
    checkpoint_every_n_tokens : int
        A multiple of 64; 0: no checkpoints.
    use_cp : bool or "auto"
        Whether sequences go in segments of `_cp_chunk_len` tokens, all at once: for twice the operations, one long
        prompt of few heads fills a GPU. "auto" does not, so that bits stay as said above.
    state_indices : torch.Tensor, optional
        [sequences], int32 or int64: the slot of each sequence in the pools; they differ. A negative one is padding:
        nothing is read or written, and the output is 0.
    _cp_chunk_len : int, optional
        Tokens of a segment, a multiple of 64; 1024 if not given.
    backend : str
        "auto", "flashinfer", "cake_gdn", "cudnn" (all of which are ours), "portable" or "reference".
    max_seqlen : int, optional
        No sequence is longer; it is not needed here.

    Returns
    -------
    torch.Tensor or (torch.Tensor, torch.Tensor)
        [tokens, heads, V] in the dtype of q; with `output_final_state` also the final states, in float32 if
        `output_state` was not given.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    References
    ----------
    Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, https://arxiv.org/abs/2412.06464
    Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, https://arxiv.org/abs/2406.06484
    Martin and Cundy, Parallelizing Linear Recurrent Neural Nets Over Sequence Length, 2018,
    https://arxiv.org/abs/1709.04057

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, v = torch.randn(3, 100, 2, 64).unbind(0)
    >>> out, state = flashinfer.chunk_gated_delta_rule(
    ...     q, k, v, cu_seqlens=torch.tensor([0, 30, 100]), output_final_state=True, use_qk_l2norm_in_kernel=True)
    >>> out.shape, state.shape
    (torch.Size([100, 2, 64]), torch.Size([2, 2, 64, 64]))
    """
    heads = require_tokens(q, k, v, "tokens, heads, head_dim")
    require_offsets(cu_seqlens)
    require(use_cp in ("auto", True, False), "use_cp", repr(use_cp), '"auto", True or False')
    require(_cp_chunk_len is None or _cp_chunk_len > 0 and _cp_chunk_len % 64 == 0, "_cp_chunk_len", _cp_chunk_len,
            "None or a multiple of 64")  # fmt: skip
    count, key_dim, value_dim = q.shape[0], q.shape[2], v.shape[2]
    require(max_seqlen is None or 0 <= max_seqlen <= count, "max_seqlen", max_seqlen, f"None, or 0 to {count}")
    for name, x in (("g", g), ("beta", beta)):
        require_shape(name, x, count, heads, dtypes=INPUTS)
    tokens = Tokens(q[None], k[None], v[None], *(None if x is None else x[None] for x in (g, beta)), offsets=cu_seqlens)
    n = tokens.sequences
    if output_state is None and output_final_state:
        require(state_indices is None, "output_state", None, "the pool, where there are state_indices")
        shape = n, heads, value_dim, key_dim
        output_state = torch.empty(shape, dtype=torch.float32, device=q.device)
    pool = Pool(initial_state, output_state, state_indices)
    check_states(tokens, pool, ("initial_state", "output_state", "state_indices"))
    marks = marks_of(tokens, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, smallest=64)
    out = output_like(output, (count, heads, value_dim), q.dtype, q.device)
    run_chunks(tokens, Gates(), pool, out[None], scale_or_unset(scale, key_dim), gate="linear", beta="value",
               normalize=use_qk_l2norm_in_kernel, backend=variant_for(backend, "flashinfer", "cake_gdn", "cudnn"),
               marks=marks, segment=(_cp_chunk_len or SEGMENT) if use_cp is True else 0)  # fmt: skip
    return out if output_state is None or not output_final_state else (out, output_state)
