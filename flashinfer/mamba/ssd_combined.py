"""Prefill of Mamba2's layers: whole prompts by chunks, of batches or of packed sequences."""

from __future__ import annotations

from typing import Literal

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import check_apart, dtype_name, present, require, rows_of, same_device
from flashinfer._core.custom_op import one_op
from flashinfer.mamba._operands import check_tensor
from flashinfer.mamba._prompts import (
    FLOATS,
    INDEX,
    check_chunk,
    check_inputs,
    check_marks,
    check_sequences,
    counts_of,
    first_segments,
    offsets_of,
    require_dtype,
)
from flashinfer.ops.recurrent import ssd as room
from flashinfer.ops.recurrent.layouts import whole_rows

__all__ = ["SSDCombined", "ssd_combined_fwd"]

_BACKENDS = ("auto", "cake", "cute", "portable", "reference")


def _out(its: dict) -> torch.Tensor:
    return its["x"].new_empty(its["x"].shape) if its["out"] is None else its["out"]


def _states(its: dict) -> torch.Tensor | None:
    """New states are made for a caller who wants them; in a pool the caller's own are written."""
    if its["state_indices"] is not None or not its["return_final_states"]:
        return None
    known, x = counts_of(its, its["x"], its["initial_states"], its["num_seqs"]), its["x"]
    require(bool(known), "num_seqs", None, "the count of sequences, which nothing else says")
    return x.new_empty(next(iter(known.values())), *x.shape[2:], its["B"].shape[3], dtype=_states_dtype(its))


def _states_dtype(its: dict) -> torch.dtype:
    given = [its[name].dtype for name in ("initial_states", "checkpoint_states") if its[name] is not None]
    return given[0] if given else its["state_dtype"] or torch.bfloat16


def _results(its: dict) -> tuple:
    pool = its["initial_states"] if its["return_final_states"] else None
    return its["out"], pool if its["states"] is None else its["states"]


@one_op(
    written=("out", "initial_states", "checkpoint_states", "seq_chunk_cumsum", "states"),
    given={"out": _out, "states": _states},
    returned=_results,
    made=lambda result: {"states": result[1]},
)
def ssd_combined_fwd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    seq_chunk_cumsum: torch.Tensor | None = None,
    update_seq_chunk_cumsum: bool = False,
    checkpoint_token_indices: torch.Tensor | None = None,
    checkpoint_state_slots: torch.Tensor | None = None,
    checkpoint_states: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_final_states: bool = True,
    num_seqs: int | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    chunk_size: int = 128,
    backend: Literal["auto", "cake", "cute", "portable", "reference"] = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All tokens of prompts: ``h = h * exp(dt * A) + (dt * x) B^T``, ``y = h C + D * x``; with z, ``y *= silu(z)``.

    Chunks begin at multiples of `chunk_size` of their own sequence. So a sequence's result has the same bits whatever
    else is in the batch, and with float32 states also if its prompt comes in parts cut at multiples of `chunk_size`.

    Parameters
    ----------
    x : torch.Tensor
        [batch, tokens, heads, dim]; bfloat16, float16 or float32, any strides.
    dt : torch.Tensor
        [batch, tokens, heads]; any of these dtypes.
    A : torch.Tensor
        [heads]. A decay exp(dt A) below exp(-64) is taken for that on a GPU.
    B, C : torch.Tensor
        [batch, tokens, groups, dstate]; dtype of x. heads is a multiple of groups; dstate up to 256 on a GPU.
    D : torch.Tensor, optional
        [heads] or [heads, dim].
    z : torch.Tensor, optional
        Shape and dtype of x.
    dt_bias : torch.Tensor, optional
        [heads]; added to dt.
    dt_softplus : bool
        dt becomes ``log(1 + exp(dt))``, after the bias.
    dt_limit : (float, float)
        dt is then limited to this range, both ends included.
    initial_states : torch.Tensor, optional
        [sequences, heads, dim, dstate]; float32, bfloat16 or float16. Zero if not given. With `state_indices` a pool
        [slots, heads, dim, dstate] with contiguous rows, updated in place.
    seq_idx : torch.Tensor, optional
        [1, tokens], int32 or int64: the sequence of each token, in ascending order. Tokens of a number below 0, or not
        below the count of sequences, belong to none: their result is 0. A sequence may have no tokens.
    chunk_indices, chunk_offsets : torch.Tensor, optional
        int32 [segments], with `seq_idx`: where packed tokens are cut at every multiple of `chunk_size` of the row and
        at every sequence, segment i begins at token chunk_indices[i] * chunk_size + chunk_offsets[i]. Results do not
        depend on them; `seq_chunk_cumsum` is filled from them.
    seq_chunk_cumsum : torch.Tensor, optional
        int32 [sequences + 1]: the first of these segments of each sequence. It says how many sequences there are.
    update_seq_chunk_cumsum : bool
        Whether `seq_chunk_cumsum` is written.
    checkpoint_token_indices : torch.Tensor, optional
        int32 [sequences], or ours [sequences, checkpoints]: a state is wanted before this token, or after the last
        one; counted from the beginning of the row, of packed and other sequences. Negative: none.
    checkpoint_state_slots : torch.Tensor, optional
        int32 of that shape: the row of `checkpoint_states` for it; negative or past the last: none.
    checkpoint_states : torch.Tensor, optional
        [any, heads, dim, dstate] in the dtype of the states; contiguous. Receives them.
    out : torch.Tensor, optional
        Shape and dtype of x; receives the result. It has no memory of the inputs.
    return_final_states : bool
        Whether states after the last token are wanted.
    num_seqs : int, optional
        How many sequences `seq_idx` counts, where nothing else says it.
    cu_seqlens : torch.Tensor, optional
        Ours, in place of `seq_idx`: int32 or int64 [sequences + 1]; sequence i is the tokens cu_seqlens[i] to
        cu_seqlens[i + 1].
    state_indices : torch.Tensor, optional
        Ours: int32 or int64 [sequences], the slot of each sequence in `initial_states`. They differ, but for negative
        ones and those past the last, which are padding: nothing is read or written, and the result is 0.
    state_dtype : torch.dtype, optional
        Ours: of the states that are returned, where neither `initial_states` nor `checkpoint_states` says it.
    chunk_size : int
        Ours: a multiple of 64.
    backend : str
        Ours: "auto", "cake", "cute" (all of which are the same), "portable" or "reference".

    Returns
    -------
    (torch.Tensor, torch.Tensor or None)
        `out`, or a new tensor like x; and the states after the last tokens, [sequences, heads, dim, dstate] in the
        dtype of `initial_states`, else of `checkpoint_states`, else `state_dtype`, else bfloat16. With `state_indices`
        the pool.

    Raises
    ------
    ValueError
        A shape, dtype, device or combination other than the above.

    References
    ----------
    Dao and Gu, Transformers are SSMs, 2024, https://arxiv.org/abs/2405.21060

    Examples
    --------
    >>> import torch
    >>> from flashinfer.mamba import ssd_combined_fwd
    >>> x, B, dt = torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1)
    >>> y, states = ssd_combined_fwd(x, dt, torch.zeros(1), B, B)
    >>> y[0, :, 0, 0].tolist(), states.shape
    ([4.0, 8.0, 12.0], torch.Size([1, 1, 2, 4]))
    """
    require(backend in _BACKENDS, "backend", repr(backend), ", ".join(_BACKENDS))
    check_chunk(chunk_size)
    result = check_inputs(x, dt, A, B, C, D, z, dt_bias, out)
    heads, (dim, dstate) = x.shape[2], (x.shape[3], B.shape[3])
    tables = {
        "seq_idx": seq_idx, "chunk_indices": chunk_indices, "chunk_offsets": chunk_offsets,
        "seq_chunk_cumsum": seq_chunk_cumsum, "cu_seqlens": cu_seqlens, "state_indices": state_indices,
        "checkpoint_token_indices": checkpoint_token_indices, "checkpoint_state_slots": checkpoint_state_slots,
    }  # fmt: skip
    states = {"initial_states": initial_states, "checkpoint_states": checkpoint_states}
    same_device(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, out=out, **tables, **states)
    n = check_sequences(tables, x, initial_states, num_seqs, update_seq_chunk_cumsum)
    for name, value in states.items():
        if value is not None:
            count = n if name == "initial_states" and state_indices is None else value.shape[0] if value.dim() else 0
            check_tensor(name, value, (count, heads, dim, dstate), FLOATS)
    given = any(value is not None for value in states.values())
    dtype = _states_dtype(states | {"state_dtype": state_dtype})
    fits = state_dtype in (None, dtype) and dtype in FLOATS
    require(fits, "state_dtype", state_dtype, f"{dtype}, that of the states given" if given else "a float dtype")
    marks = check_marks(tables, checkpoint_states, n, dtype)
    read = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, **tables)
    pool = initial_states if state_indices is not None else None
    read |= {} if pool is not None else dict(initial_states=initial_states)
    # States on the way may go to other slots of the pool.
    for of_states in (("initial_states", pool), ("checkpoint_states", checkpoint_states)):
        check_apart((("out", result), of_states), read.items(), in_place=())
    least, most = (float(value) for value in dt_limit)
    require(least <= most, "dt_limit", f"{(least, most)}", "a lower limit, and an upper one that is no less")

    offsets = cu_seqlens if seq_idx is None else offsets_of(tables, n, chunk_size, update_seq_chunk_cumsum)
    final = None
    if state_indices is not None:
        final = present("initial_states", initial_states, "a tensor, with state_indices")
        require(dstate == 1 or final.stride(3) == 1, "initial_states", f"strides {final.stride()}",
                "contiguous rows with state_indices")  # fmt: skip
    elif return_final_states:
        final = torch.empty(n, heads, dim, dstate, dtype=dtype, device=x.device)
    source = rows_of(initial_states)
    target = result if result.stride(3) == 1 or dim == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
    index = torch.int64 if torch.int64 in (getattr(t, "dtype", None) for t in (offsets, state_indices)) else torch.int32
    offsets, slots = (None if t is None else t.to(index).contiguous() for t in (offsets, state_indices))
    tokens = room.Tokens(rows_of(x), dt, rows_of(B), rows_of(C), rows_of(z), offsets)
    marked = None if marks is None else checkpoint_states
    problem = room.Prefill(
        dim=dim,
        dstate=dstate,
        dtype=dtype_name(x.dtype),
        dt_dtype=dtype_name(dt.dtype),
        a_dtype=dtype_name(A.dtype),
        d_dtype="" if D is None else dtype_name(D.dtype),
        bias_dtype="" if dt_bias is None else dtype_name(dt_bias.dtype),
        chunk=chunk_size,
        source_dtype="" if source is None else dtype_name(source.dtype),
        state_dtype="" if final is None else dtype_name(final.dtype),
        marks_dtype="" if marked is None else dtype_name(marked.dtype),
        wide_d=D is not None and D.dim() == 2,
        gated=z is not None,
        softplus=bool(dt_softplus),
        index=dtype_name(index),
        packed=offsets is not None,
        read=slots is not None,
        aligned=whole_rows(tokens.x, *tokens[2:5], target, source, final, marked),
    )
    if n and heads and dim:
        D, dt_bias = (None if t is None else t.contiguous() for t in (D, dt_bias))
        layer = room.Layer(A.contiguous(), D, dt_bias, least, most)
        op = room.prefill(problem, x.device, backend if backend in ("portable", "reference") else "auto")
        op.run(tokens, layer, room.Pool(source, final, slots), target, marks)
    else:
        target.zero_()
    if target is not result:
        result.copy_(target)
    return result, final if return_final_states else None


class SSDCombined:
    """`ssd_combined_fwd` of a layer whose sizes and dtypes are fixed, by upstream's class.

    Parameters
    ----------
    chunk_size : int
        A multiple of 64.
    nheads, headdim, dstate, ngroups : int
        Of the layer.
    io_dtype, state_dtype : torch.dtype
        Of x, B, C and z, and of states: bfloat16, float16 or float32.
    has_d, d_has_hdim, has_initial_states, has_varlen, has_z : bool
        Which of D, D [heads, dim], initial_states, seq_idx and z the calls have.
    seq_idx_dtype : torch.dtype
        int32 or int64.
    backend : str
        "cute" or "cake", whose results differ by the layout of `out`.

    Raises
    ------
    ValueError
        An argument other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.mamba import SSDCombined
    >>> layer = SSDCombined(128, nheads=2, headdim=4, dstate=8, ngroups=1, has_d=False)
    >>> x, B, dt = (torch.ones(*shape).bfloat16() for shape in ((1, 256, 2, 4), (1, 256, 1, 8), (1, 256, 2)))
    >>> out, states = layer.run(x, dt, -torch.ones(2), B, B)
    >>> out.shape, states.shape, states.dtype
    (torch.Size([1, 256, 2, 4]), torch.Size([1, 2, 4, 8]), torch.bfloat16)
    """

    @checked
    def __init__(
        self,
        chunk_size: int,
        nheads: int,
        headdim: int,
        dstate: int,
        ngroups: int,
        io_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.bfloat16,
        has_d: bool = True,
        d_has_hdim: bool = False,
        has_initial_states: bool = False,
        has_varlen: bool = False,
        has_z: bool = False,
        seq_idx_dtype: torch.dtype = torch.int64,
        backend: str = "cute",
    ):
        require(backend in ("cute", "cake"), "backend", repr(backend), "'cute', 'cake'")
        check_chunk(chunk_size)
        for name, size in (("nheads", nheads), ("headdim", headdim), ("dstate", dstate), ("ngroups", ngroups)):
            require(size > 0, name, size, "1 or more")
        require(nheads % ngroups == 0, "ngroups", ngroups, f"a divisor of {nheads}, the heads")
        for name, dtype, allowed in (("io_dtype", io_dtype, FLOATS), ("state_dtype", state_dtype, FLOATS),
                                     ("seq_idx_dtype", seq_idx_dtype, INDEX)):  # fmt: skip
            require(dtype in allowed, name, dtype, ", ".join(map(str, allowed)))
        self.chunk_size, self.nheads, self.headdim = chunk_size, nheads, headdim
        self.dstate, self.ngroups = dstate, ngroups
        self._io_dtype, self._state_dtype, self._seq_idx_dtype = io_dtype, state_dtype, seq_idx_dtype
        self._wide_d, self._backend = d_has_hdim, backend
        self._has = {"D": has_d, "z": has_z, "initial_states": has_initial_states, "seq_idx": has_varlen}

    @checked
    def run(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        initial_states: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        chunk_offsets: torch.Tensor | None = None,
        seq_chunk_cumsum: torch.Tensor | None = None,
        update_seq_chunk_cumsum: bool = False,
        checkpoint_token_indices: torch.Tensor | None = None,
        checkpoint_state_slots: torch.Tensor | None = None,
        checkpoint_states: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_final_states: bool = True,
        num_seqs: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All tokens of prompts, as `ssd_combined_fwd` takes them.

        Parameters
        ----------
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, seq_idx, chunk_indices, chunk_offsets
            As in `ssd_combined_fwd`, in the sizes and dtypes of the layer; given where the layer has them.
        seq_chunk_cumsum, update_seq_chunk_cumsum, checkpoint_token_indices, checkpoint_state_slots, checkpoint_states
            As in `ssd_combined_fwd`.
        out : torch.Tensor, optional
            Receives the result; contiguous. Of "cute" [batch, heads, dim, chunks, chunk_size], of "cake" as x.
        return_final_states, num_seqs
            As in `ssd_combined_fwd`.

        Returns
        -------
        (torch.Tensor, torch.Tensor or None)
            [batch, tokens, heads, dim], a view of `out` if there is one; and the states after the last tokens.

        Raises
        ------
        ValueError
            Other sizes, dtypes or tensors than the layer's, and as `ssd_combined_fwd` raises it.
        """
        for name, value in (("D", D), ("z", z), ("initial_states", initial_states), ("seq_idx", seq_idx)):
            got, allowed = "None" if value is None else "a tensor", "a tensor" if self._has[name] else "None"
            require((value is not None) == self._has[name], name, got, f"{allowed}, as the layer was made")
        fits = x.dim() == 4 and x.shape[2:] == (self.nheads, self.headdim) and x.dtype == self._io_dtype
        allowed = f"{self._io_dtype} [batch, tokens, {self.nheads}, {self.headdim}]"
        require(fits, "x", f"{x.dtype} {tuple(x.shape)}", allowed)
        fits = B.dim() == 4 and B.shape[2:] == (self.ngroups, self.dstate)
        require(fits, "B", f"shape {tuple(B.shape)}", f"[batch, tokens, {self.ngroups}, {self.dstate}]")
        if D is not None:
            require(D.dim() == 1 + self._wide_d, "D", f"{D.dim()} axes", f"{1 + self._wide_d}")
        require_dtype("initial_states", initial_states, self._state_dtype)
        require_dtype("seq_idx", seq_idx, self._seq_idx_dtype)
        rows = out
        if out is not None and self._backend == "cute":
            batch, tokens = x.shape[:2]
            shape = batch, self.nheads, self.headdim, tokens // self.chunk_size, self.chunk_size
            fits = tokens % self.chunk_size == 0 and tuple(out.shape) == shape and out.is_contiguous()
            require(fits, "out", f"shape {tuple(out.shape)}", f"{shape} of whole chunks, contiguous")
            rows = out.flatten(3).permute(0, 3, 1, 2)
        return ssd_combined_fwd(
            x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, seq_idx, chunk_indices, chunk_offsets,
            seq_chunk_cumsum, update_seq_chunk_cumsum, checkpoint_token_indices, checkpoint_state_slots,
            checkpoint_states, rows, return_final_states, num_seqs, state_dtype=self._state_dtype,
            chunk_size=self.chunk_size,
        )  # fmt: skip

    @checked
    def compute_seq_chunk_cumsum(
        self,
        seq_idx: torch.Tensor,
        chunk_indices: torch.Tensor,
        chunk_offsets: torch.Tensor,
        chunk_size: int,
        num_seqs: int,
        seq_chunk_cumsum: torch.Tensor | None = None,
        tile_state: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The first segment of each packed sequence, as `run` takes it.

        Parameters
        ----------
        seq_idx, chunk_indices, chunk_offsets, chunk_size
            As in `ssd_combined_fwd`.
        num_seqs : int
        seq_chunk_cumsum : torch.Tensor, optional
            int32 [num_seqs + 1]; receives the result.
        tile_state : torch.Tensor, optional
            Upstream's scratch; left alone.

        Returns
        -------
        torch.Tensor
            `seq_chunk_cumsum`, or a new tensor.

        Raises
        ------
        ValueError
            A shape, dtype, device or number other than the above.
        """
        require(num_seqs >= 0, "num_seqs", num_seqs, "at least 0")
        check_chunk(chunk_size)
        same_device(seq_idx=seq_idx, chunk_indices=chunk_indices, chunk_offsets=chunk_offsets,
                    seq_chunk_cumsum=seq_chunk_cumsum)  # fmt: skip
        require(seq_idx.dim() == 2, "seq_idx", f"shape {tuple(seq_idx.shape)}", "[1, tokens]")
        check_tensor("seq_idx", seq_idx, (1, seq_idx.shape[1]), INDEX)
        check_tensor("chunk_indices", chunk_indices, (chunk_indices.numel(),), (torch.int32,))
        check_tensor("chunk_offsets", chunk_offsets, chunk_indices.shape, (torch.int32,))
        of_tokens = seq_idx[0].contiguous()
        there = len(of_tokens) > 0 or not len(chunk_indices)
        require(there, "seq_idx", "no tokens", "tokens, where there are segments")
        if seq_chunk_cumsum is None:
            seq_chunk_cumsum = torch.empty(num_seqs + 1, dtype=torch.int32, device=seq_idx.device)
        check_tensor("seq_chunk_cumsum", seq_chunk_cumsum, (num_seqs + 1,), (torch.int32,))
        numbers = torch.arange(num_seqs + 1, dtype=of_tokens.dtype, device=of_tokens.device)
        return seq_chunk_cumsum.copy_(first_segments(of_tokens, numbers, chunk_indices, chunk_offsets, chunk_size))

    @staticmethod
    @checked
    def tile_state_size(num_seqs: int) -> int:
        """Bytes of the scratch of `compute_seq_chunk_cumsum`: none is needed.

        Parameters
        ----------
        num_seqs : int

        Returns
        -------
        int
            0.

        Raises
        ------
        ValueError
            No count.
        """
        require(num_seqs >= 0, "num_seqs", num_seqs, "at least 0")
        return 0
