"""`selective_state_update`: the recurrence of Mamba2's layers, token by token, on a pool of states."""

from __future__ import annotations

import torch

from flashinfer._core.checks import check_apart, dtype_name, require, same_device
from flashinfer._core.custom_op import one_op
from flashinfer.mamba._operands import check_each, check_seed, check_tables, is_tied, operands
from flashinfer.ops.recurrent import ssm as room
from flashinfer.ops.recurrent.layouts import dense_rows, whole_rows

__all__ = ["selective_state_update"]

# The last is an older name of "simple".
_ALGORITHMS = ("auto", "simple", "vertical", "horizontal", "async_horizontal")


@one_op(
    written=("state", "state_scale", "out", "intermediate_states_buffer", "intermediate_state_scales"),
    given={"out": lambda its: its["x"].new_empty(its["x"].shape) if its["out"] is None else its["out"]},
    returned=lambda its: its["out"],
)
def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    intermediate_state_scales: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One or several tokens of each sequence: ``h = h * exp(dt * A) + (dt * x) B^T``, ``y = h C + D * x``.

    With z, ``y *= z * sigmoid(z)``. Everything is computed in float32.

    Parameters
    ----------
    state : torch.Tensor
        The pool of states h, [slots, heads, dim, dstate] or [slots, dim, dstate] of one head; contiguous rows.
        float32, bfloat16 or float16; or int16, int8 or float8_e4m3fn with `state_scale`. Updated in place.
    x : torch.Tensor
        [batch, heads, dim] of one token, [batch, tokens, heads, dim], or [tokens, heads, dim] with `cu_seqlens`; and
        [batch, dim] of one token and one head. bfloat16, float16 or float32, any strides.
    dt : torch.Tensor
        Shape of x; any of these dtypes. A value for a head comes repeated, by a stride of 0.
    A : torch.Tensor
        [heads, dim, dstate] or [dim, dstate], float32 or another of these dtypes; a value for a head comes repeated.
    B, C : torch.Tensor
        As x with [groups, dstate] in place of [heads, dim], and [batch, dstate] of one token and one group; dtype of x.
        heads is a multiple of groups.
    D : torch.Tensor, optional
        [heads, dim] or [dim].
    z : torch.Tensor, optional
        Shape and dtype of x.
    dt_bias : torch.Tensor, optional
        [heads, dim] or [dim]; added to dt.
    dt_softplus : bool
        dt becomes ``log(1 + exp(dt))``, after the bias.
    state_batch_indices : torch.Tensor, optional
        int32 or int64 [batch], the slot of each sequence; or [batch, columns], whose first column counts, or with
        `num_accepted_tokens` the column of that number less one. None: sequence i has slot i. This table, that of
        destinations and `num_accepted_tokens` may have more rows than there are sequences.
    pad_slot_id : int
        A sequence whose slot is this one is skipped, as is one with a negative slot or one past the last: no state is
        read or written, and its result is 0. vLLM's is 0, SGLang's -1.
    state_scale : torch.Tensor, optional
        float32 [slots, heads, dim] or [slots, heads, dim, 1]: what the codes of a row of a state are multiplied with.
        Written with the codes: the row's largest magnitude over 32767, 127 or 448, and 1 for a row of zeros.
    out : torch.Tensor, optional
        Receives the result; shape and dtype of x.
    disable_state_update : bool
        The pool is not written.
    intermediate_states_buffer : torch.Tensor, optional
        Receives the state after each token, [buffers, steps, heads, dim, dstate], contiguous; steps no fewer than
        tokens. Its codes, if it has such a dtype, have scales in `intermediate_state_scales`. Not beside
        `dst_state_batch_indices`.
    intermediate_state_indices : torch.Tensor, optional
        int32 or int64 [batch]: the buffer of each sequence; None is its slot. Others' are not written.
    intermediate_state_scales : torch.Tensor, optional
        float32 [buffers, steps, heads, dim], contiguous; written as `state_scale` is.
    rand_seed : torch.Tensor, optional
        int64 of one element. States are then stored as one of their two neighbours in the dtype, the nearer the more
        often, by random numbers of the seed, the slot, the token's number and the element. None rounds to nearest.
    philox_rounds : int
        Rounds of Philox-4x32, 1 or more.
    cache_steps : int
        Tokens of a sequence at most; it has no effect on results.
    algorithm : str
        "auto", "simple", "vertical", "horizontal" or "async_horizontal": upstream's kernels. It has no effect on
        results.
    dst_state_batch_indices : torch.Tensor, optional
        [batch]: the slot where the last state of a sequence is written; or [batch, columns]: the state after token t
        goes to the slot in column t. None: the last state is written where the first was read.
    cu_seqlens : torch.Tensor, optional
        int32 or int64 [batch + 1]: the tokens of sequence i are those from cu_seqlens[i] to cu_seqlens[i + 1].
    num_accepted_tokens : torch.Tensor, optional
        int32 or int64 [batch], 1 or more: speculative decoding, which begins with the state of the last accepted token.
    backend : str
        "auto", "flashinfer" or "cake".

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor like x.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    References
    ----------
    Dao and Gu, Transformers are SSMs, 2024, https://arxiv.org/abs/2405.21060; Salmon et al., Parallel Random Numbers:
    As Easy as 1, 2, 3, 2011

    Examples
    --------
    >>> import torch
    >>> from flashinfer.mamba import selective_state_update
    >>> state = torch.zeros(3, 1, 2, 4)  # slots, heads, dim, dstate
    >>> x, B = torch.ones(1, 1, 2), torch.ones(1, 1, 4)
    >>> decay, slots = torch.zeros(1, 2, 4), torch.tensor([2])
    >>> y = selective_state_update(state, x, torch.ones(1, 1, 2), decay, B, B, None, state_batch_indices=slots)
    >>> y.flatten().tolist(), state[:, 0, 0, 0].tolist()
    ([4.0, 4.0], [0.0, 0.0, 1.0])
    """
    require(algorithm in _ALGORITHMS, "algorithm", repr(algorithm), ", ".join(_ALGORITHMS))
    require(backend in ("auto", "flashinfer", "cake"), "backend", repr(backend), "'auto', 'flashinfer', 'cake'")
    result, tokens, layer, state, state_scale = operands(
        state, x, dt, A, B, C, D, z, dt_bias, state_scale, out, cu_seqlens
    )
    tables = {
        "state_batch_indices": state_batch_indices,
        "dst_state_batch_indices": dst_state_batch_indices,
        "num_accepted_tokens": num_accepted_tokens,
        "intermediate_state_indices": intermediate_state_indices,
    }
    index = check_tables(tables, tokens)
    each, each_scale = intermediate_states_buffer, intermediate_state_scales
    if each is not None:
        allowed = "None beside dst_state_batch_indices, which say where states go"
        require(dst_state_batch_indices is None, "intermediate_states_buffer", "a tensor", allowed)
        check_each(each, each_scale, tokens, state)
    check_seed(rand_seed, philox_rounds)
    written = dict(state=state, state_scale=state_scale, intermediate_states_buffer=each,
                   intermediate_state_scales=each_scale, out=result)  # fmt: skip
    read = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, cu_seqlens=cu_seqlens, rand_seed=rand_seed)
    check_apart(written.items(), (read | tables).items(), in_place=("x", "dt", "z"))
    same_device(**written, **read, **tables)
    if not (tokens.sequences and result.numel()):
        return result.zero_()
    by_token = dst_state_batch_indices is not None and dst_state_batch_indices.dim() == 2
    keeps = "buffer" if each is not None else "pool" if by_token and not disable_state_update else ""
    read, write, accepted, rows = (None if t is None else t.to(index) for t in tables.values())
    # Tables of one entry a sequence are read one after another.
    accepted, rows, offsets = (None if t is None else t.contiguous() for t in (accepted, rows, tokens.offsets))
    offsets = None if offsets is None else offsets.to(index)
    problem = room.Update(
        dim=x.shape[-1],
        dstate=state.shape[3],
        dtype=dtype_name(x.dtype),
        dt_dtype=dtype_name(dt.dtype),
        a_dtype=dtype_name(A.dtype),
        d_dtype="" if D is None else dtype_name(D.dtype),
        bias_dtype="" if dt_bias is None else dtype_name(dt_bias.dtype),
        tied=is_tied(tokens.dt, layer),
        state_dtype=dtype_name(state.dtype),
        each_dtype="" if each is None else dtype_name(each.dtype),
        gated=z is not None,
        softplus=dt_softplus,
        index=dtype_name(index),
        packed=offsets is not None,
        each=keeps,
        final=not disable_state_update and keeps != "pool",
        read=read is not None,
        write=write is not None,
        accepted=accepted is not None,
        rows=rows is not None and keeps == "buffer",
        rounds=0 if rand_seed is None else philox_rounds,
        aligned=whole_rows(state, tokens.B, tokens.C, each),
        single=offsets is None and tokens.x.shape[1] == 1,
        dense=dense_rows(state),
    )
    rows = rows if problem.rows else None
    pool = room.Pool(state, state_scale, each, each_scale, read, write, rows, accepted, pad_slot_id, rand_seed)
    room.update(problem, x.device).run(tokens._replace(offsets=offsets), layer, pool)
    return result
