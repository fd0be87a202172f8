"""Prefill of Mamba2's layers: whole prompts by chunks, of batches or of packed sequences."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import check_indptr, dtype_name, present, require, same_device
from flashinfer.ops.recurrent import ssd as room
from flashinfer.ops.recurrent.layouts import whole_rows

__all__ = ["ssd_combined_fwd"]

_Given = TypeVar("_Given", torch.Tensor, torch.Tensor | None)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INDEX = (torch.int32, torch.int64)
_BACKENDS = ("auto", "cake", "cute", "portable", "reference")


@checked
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
        Shape and dtype of x; receives the result.
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
    require(chunk_size >= 64 and chunk_size % 64 == 0, "chunk_size", chunk_size, "a multiple of 64")
    result = _check_inputs(x, dt, A, B, C, D, z, dt_bias, out)
    heads, (dim, dstate) = x.shape[2], (x.shape[3], B.shape[3])
    tables = {
        "seq_idx": seq_idx, "chunk_indices": chunk_indices, "chunk_offsets": chunk_offsets,
        "seq_chunk_cumsum": seq_chunk_cumsum, "cu_seqlens": cu_seqlens, "state_indices": state_indices,
        "checkpoint_token_indices": checkpoint_token_indices, "checkpoint_state_slots": checkpoint_state_slots,
    }  # fmt: skip
    states = {"initial_states": initial_states, "checkpoint_states": checkpoint_states}
    same_device(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, out=out, **tables, **states)
    n = _check_sequences(tables, x, initial_states, num_seqs, update_seq_chunk_cumsum)
    for name, value in states.items():
        if value is not None:
            count = n if name == "initial_states" and state_indices is None else value.shape[0] if value.dim() else 0
            _like(name, value, (count, heads, dim, dstate), _FLOATS)
    given = [value.dtype for value in states.values() if value is not None]
    dtype = given[0] if given else state_dtype or torch.bfloat16
    fits = state_dtype in (None, dtype) and dtype in _FLOATS
    require(fits, "state_dtype", state_dtype, f"{dtype}, that of the states given" if given else "a float dtype")
    marks = _check_marks(tables, checkpoint_states, n, dtype)
    least, most = (float(value) for value in dt_limit)
    require(least <= most, "dt_limit", f"{(least, most)}", "a lower limit, and an upper one that is no less")

    offsets = cu_seqlens if seq_idx is None else _offsets(tables, n, chunk_size, update_seq_chunk_cumsum)
    final = None
    if state_indices is not None:
        final = present("initial_states", initial_states, "a tensor, with state_indices")
        require(dstate == 1 or final.stride(3) == 1, "initial_states", f"strides {final.stride()}",
                "contiguous rows with state_indices")  # fmt: skip
    elif return_final_states:
        final = torch.empty(n, heads, dim, dstate, dtype=dtype, device=x.device)
    source = _rows(initial_states)
    target = result if result.stride(3) == 1 or dim == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
    index = torch.int64 if torch.int64 in (getattr(t, "dtype", None) for t in (offsets, state_indices)) else torch.int32
    offsets, read = (None if t is None else t.to(index).contiguous() for t in (offsets, state_indices))
    tokens = room.Tokens(_rows(x), dt, _rows(B), _rows(C), _rows(z), offsets)
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
        read=read is not None,
        aligned=whole_rows(tokens.x, *tokens[2:5], target, source, final, marked),
    )
    if n and heads and dim:
        D, dt_bias = (None if t is None else t.contiguous() for t in (D, dt_bias))
        layer = room.Layer(A.contiguous(), D, dt_bias, least, most)
        op = room.prefill(problem, x.device, backend if backend in ("portable", "reference") else "auto")
        op.run(tokens, layer, room.Pool(source, final, read), target, marks)
    else:
        target.zero_()
    if target is not result:
        result.copy_(target)
    return result, final if return_final_states else None


def _like(name: str, value: torch.Tensor | None, shape, dtypes) -> None:
    if value is not None:
        require(tuple(value.shape) == tuple(shape), name, f"shape {tuple(value.shape)}", f"{tuple(shape)}")
        require(value.dtype in dtypes, name, value.dtype, ", ".join(map(str, dtypes)))


def _rows(t: _Given) -> _Given:
    """t with a last stride of 1: itself, or a copy."""
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _check_inputs(x, dt, A, B, C, D, z, dt_bias, out) -> torch.Tensor:
    """The tensor that receives the result."""
    require(x.dim() == 4, "x", f"shape {tuple(x.shape)}", "[batch, tokens, heads, dim]")
    require(x.dtype in _FLOATS, "x", x.dtype, ", ".join(map(str, _FLOATS)))
    batch, length, heads, dim = x.shape
    _like("dt", dt, (batch, length, heads), _FLOATS)
    _like("A", A, (heads,), _FLOATS)
    groups = B.shape[2] if B.dim() == 4 else 0
    fits = groups > 0 and heads % groups == 0 and B.shape[3] > 0
    require(fits, "B", f"shape {tuple(B.shape)}", f"[{batch}, {length}, groups, dstate], groups a divisor of {heads}")
    for name, value in (("B", B), ("C", C)):
        _like(name, value, (batch, length, groups, B.shape[3]), (x.dtype,))
    wide = D is not None and D.dim() == 2
    _like("D", D, (heads, dim) if wide else (heads,), _FLOATS)
    _like("z", z, x.shape, (x.dtype,))
    _like("dt_bias", dt_bias, (heads,), _FLOATS)
    _like("out", out, x.shape, (x.dtype,))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out


def _check_sequences(tables: dict, x, initial_states, num_seqs, update: bool) -> int:
    """How many sequences there are."""
    seq_idx, offsets, slots = (tables[name] for name in ("seq_idx", "cu_seqlens", "state_indices"))
    packed = seq_idx is not None or offsets is not None
    require(offsets is None or seq_idx is None, "cu_seqlens", "a tensor", "None with seq_idx")
    require(not packed or x.shape[0] == 1, "x", f"{x.shape[0]} rows", "1 row with seq_idx or cu_seqlens")
    _like("seq_idx", seq_idx, x.shape[:2], _INDEX)
    for name in ("chunk_indices", "chunk_offsets", "seq_chunk_cumsum"):
        require(tables[name] is None or seq_idx is not None, name, "a tensor", "None without seq_idx")
    segments = tables["chunk_indices"], tables["chunk_offsets"]
    require((segments[0] is None) == (segments[1] is None), "chunk_offsets",
            "None" if segments[1] is None else "a tensor", "given if and only if chunk_indices is")  # fmt: skip
    for name, value in zip(("chunk_indices", "chunk_offsets"), segments):
        _like(name, value, segments[0].shape[:1] if value is not None else (), (torch.int32,))
    for name in ("cu_seqlens", "state_indices", "seq_chunk_cumsum"):
        value = tables[name]
        dtypes = (torch.int32,) if name == "seq_chunk_cumsum" else _INDEX
        _like(name, value, (value.numel(),) if value is not None else (), dtypes)
    counts = {"x": None if packed else x.shape[0], "num_seqs": num_seqs}
    for name in ("cu_seqlens", "seq_chunk_cumsum"):
        counts[name] = None if tables[name] is None else len(tables[name]) - 1
    counts["state_indices"] = None if slots is None else len(slots)
    require(slots is None or initial_states is not None, "initial_states", None, "a pool with state_indices")
    if slots is None and initial_states is not None and initial_states.dim():
        counts["initial_states"] = len(initial_states)
    known = {name: count for name, count in counts.items() if count is not None}
    require(bool(known), "num_seqs", None, "the count of sequences, which nothing else says")
    if offsets is not None and offsets.device.type == "cpu":
        check_indptr("cu_seqlens", offsets.numpy(), x.shape[1], "the tokens of x", sliced=True)
    n = next(iter(known.values()))
    for name, count in known.items():
        require(count == n and n >= 0, name, f"{count} sequences", f"{max(n, 0)}")
    if update:
        for name in ("seq_chunk_cumsum", "chunk_indices"):
            require(tables[name] is not None, name, None, "a tensor with update_seq_chunk_cumsum")
    return n


def _check_marks(tables: dict, states, n: int, dtype) -> room.Marks | None:
    tokens, slots = tables["checkpoint_token_indices"], tables["checkpoint_state_slots"]
    given = {"checkpoint_token_indices": tokens, "checkpoint_state_slots": slots, "checkpoint_states": states}
    if all(value is None for value in given.values()):
        return None
    for name, value in given.items():
        require(value is not None, name, None, "a tensor, as the other two of checkpoints")
    _like("checkpoint_token_indices", tokens, (n,) if tokens.dim() < 2 else (n, tokens[0].numel()), (torch.int32,))
    _like("checkpoint_state_slots", slots, tokens.shape, (torch.int32,))
    require(states.dtype == dtype, "checkpoint_states", states.dtype, f"{dtype}, that of initial_states")
    require(states.is_contiguous(), "checkpoint_states", f"strides {states.stride()}", "contiguous")
    both = [t.reshape(n, -1).contiguous() for t in (tokens, slots)]
    return room.Marks(states, *both) if both[0].numel() else None


def _offsets(tables: dict, n: int, chunk_size: int, update: bool) -> torch.Tensor:
    """The first token of each sequence, and the end of the last; also writes what is wanted of segments."""
    of_tokens = tables["seq_idx"][0].contiguous()
    numbers = torch.arange(n + 1, dtype=of_tokens.dtype, device=of_tokens.device)
    if update and tables["seq_chunk_cumsum"] is not None:
        begins = tables["chunk_indices"].long() * chunk_size + tables["chunk_offsets"]
        of_segments = of_tokens[begins.clamp(0, max(len(of_tokens) - 1, 0))]
        tables["seq_chunk_cumsum"].copy_(torch.searchsorted(of_segments, numbers))
    return torch.searchsorted(of_tokens, numbers, out_int32=True)
