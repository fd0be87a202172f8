"""Rotary position embedding (RoPE) of queries and keys."""

from __future__ import annotations

import torch

from flashinfer._core import env
from flashinfer._core.checks import dtype_name, indptr_values, is_aligned, require, require_fit, rows_of, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.replay import replayed
from flashinfer.ops import rope as room
from flashinfer.ops.rope.frequencies import Frequencies
from flashinfer.rope._checks import INDEX_DTYPES, check_cache, check_positions, check_rotary_dim, check_within_cache

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@replayed
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys of a ragged batch: token t of request i is at position ``offsets[i] + t - indptr[i]``.

    Pair j of a head turns by ``position / rope_scale * rope_theta ** (-2 * j / rotary_dim)`` radians.

    Parameters
    ----------
    q : torch.Tensor
        [nnz, num_qo_heads, head_dim]; bfloat16, float16 or float32, any strides (a slice of a fused projection too).
    k : torch.Tensor
        [nnz, num_kv_heads, head_dim] in the dtype of q, any strides.
    indptr : torch.Tensor
        [batch_size + 1], int32 or int64: request i is the tokens ``indptr[i]`` to ``indptr[i + 1]``; from 0 to nnz.
    offsets : torch.Tensor
        [batch_size], int32 or int64: the position of each request's first token.
    rotary_dim : int, optional
        Elements of a head that are rotated, from the first on; even, at most head_dim, which it is by default. The
        others are passed on as they are.
    interleave : bool
        False: element j is paired with element ``j + rotary_dim / 2`` (GPT-NeoX). True: elements 2j and 2j + 1 (GPT-J).
    rope_scale : float
        Positions are divided by it.
    rope_theta : float
        The base of the frequencies.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        The rotated q and k, new tensors. Angles are exact at any position; the rotation is computed in float32 and
        rounded once.

    Raises
    ------
    ValueError
        A shape, dtype, device or value other than the above. Values of indptr are checked on the CPU, and on a GPU if
        FLASHINFER_DEBUG=1 (it waits for the device).

    Notes
    -----
    The first call with new frequencies puts a table of them on the device; let it come before a CUDA-graph capture.

    References
    ----------
    Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864; for rope_scale, Chen et al., Extending Context Window
    of Large Language Models via Positional Interpolation, 2023, https://arxiv.org/abs/2306.15595

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k = torch.ones(3, 1, 4), torch.ones(3, 1, 4)
    >>> indptr, offsets = torch.tensor([0, 3]).int(), torch.tensor([0]).int()
    >>> q_out, k_out = flashinfer.apply_rope(q, k, indptr, offsets)
    >>> q_out[:2, 0, 0]
    tensor([ 1.0000, -0.3012])
    """
    return rotated(q, k, indptr, offsets, rotary_dim, interleave, [rope_scale, rope_theta])


@replayed
def apply_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope`, the result written over q and k.

    Parameters
    ----------
    q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta
        As in `apply_rope`.

    Raises
    ------
    ValueError
        As in `apply_rope`.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k = torch.ones(3, 1, 4), torch.ones(3, 1, 4)
    >>> flashinfer.apply_rope_inplace(q, k, torch.tensor([0, 3]).int(), torch.tensor([0]).int())
    >>> q[:2, 0, 0]
    tensor([ 1.0000, -0.3012])
    """
    rotate_inplace(q, k, indptr, offsets, rotary_dim, interleave, [rope_scale, rope_theta])


@replayed
def apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope` with the position of each token given.

    Parameters
    ----------
    q, k, rotary_dim, interleave, rope_scale, rope_theta
        As in `apply_rope`.
    pos_ids : torch.Tensor
        [nnz], int32 or int64, any values: the position of each token.

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
    >>> q, k = torch.ones(3, 1, 4), torch.ones(3, 1, 4)
    >>> q_out, k_out = flashinfer.apply_rope_pos_ids(q, k, torch.tensor([0, 0, 1]).int())
    >>> q_out[:, 0, 0]
    tensor([ 1.0000,  1.0000, -0.3012])
    """
    return rotated(q, k, pos_ids, None, rotary_dim, interleave, [rope_scale, rope_theta])


@replayed
def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope_pos_ids`, the result written over q and k.

    Parameters
    ----------
    q, k, rotary_dim, interleave, rope_scale, rope_theta
        As in `apply_rope`.
    pos_ids : torch.Tensor
        [nnz], int32 or int64, any values: the position of each token.

    Raises
    ------
    ValueError
        A shape, dtype, device or value other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k = torch.ones(3, 1, 4), torch.ones(3, 1, 4)
    >>> flashinfer.apply_rope_pos_ids_inplace(q, k, torch.tensor([0, 0, 1]).int())
    >>> q[:, 0, 0]
    tensor([ 1.0000,  1.0000, -0.3012])
    """
    rotate_inplace(q, k, pos_ids, None, rotary_dim, interleave, [rope_scale, rope_theta])


@replayed
def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by cosines and sines that are given for each position.

    Parameters
    ----------
    positions : torch.Tensor
        [nnz], int32 or int64: the row of the cache for each token.
    query : torch.Tensor
        [nnz, num_qo_heads * head_size], or [nnz, num_qo_heads, head_size]; bfloat16, float16 or float32, any strides.
    key : torch.Tensor
        [nnz, num_kv_heads * head_size], or [nnz, num_kv_heads, head_size], in the dtype of query, any strides.
    head_size : int
        Elements of a head.
    cos_sin_cache : torch.Tensor
        [max_position, rotary_dim], float32: cosines of the rotary_dim / 2 pairs, then their sines. rotary_dim is even
        and at most head_size; elements of a head from there on are passed on as they are.
    is_neox : bool
        True: element j is paired with element ``j + rotary_dim / 2``. False: elements 2j and 2j + 1.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        The rotated query and key, new tensors of the same shapes. Computed in float32 and rounded once.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above; on the CPU, and on a GPU if FLASHINFER_DEBUG=1 (it waits for the
        device), also a position outside the cache. On a GPU without FLASHINFER_DEBUG such a token becomes NaN.

    References
    ----------
    Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, positions = torch.ones(3, 4), torch.ones(3, 4), torch.tensor([0, 0, 1])
    >>> angles = torch.arange(2.0)[:, None] * torch.tensor([1.0, 0.01])
    >>> cache = torch.cat((angles.cos(), angles.sin()), -1)
    >>> q_out, k_out = flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, 4, cache)
    >>> q_out[:, 0]
    tensor([ 1.0000,  1.0000, -0.3012])
    """
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    _rope_cached(query, key, query_out, key_out, positions, head_size, cos_sin_cache, not is_neox)
    return query_out, key_out


@replayed
def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """`apply_rope_with_cos_sin_cache`, the result written over query and key.

    Parameters
    ----------
    positions, query, key, head_size, cos_sin_cache, is_neox
        As in `apply_rope_with_cos_sin_cache`.

    Raises
    ------
    ValueError
        As `apply_rope_with_cos_sin_cache` raises it.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, k, positions = torch.ones(3, 4), torch.ones(3, 4), torch.tensor([0, 0, 1])
    >>> angles = torch.arange(2.0)[:, None] * torch.tensor([1.0, 0.01])
    >>> cache = torch.cat((angles.cos(), angles.sin()), -1)
    >>> flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 4, cache)
    >>> q[:, 0]
    tensor([ 1.0000,  1.0000, -0.3012])
    """
    _rope_cached_inplace(query, key, positions, head_size, cos_sin_cache, not is_neox)


def rotated(q, k, positions, offsets, rotary_dim, interleave, frequencies) -> tuple[torch.Tensor, torch.Tensor]:
    _check_heads("q", "k", q, k)
    q_rope, k_rope = torch.empty_like(q), torch.empty_like(k)
    rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
    _rope(q, k, q_rope, k_rope, positions, offsets, rotary_dim, interleave, [float(f) for f in frequencies])
    return q_rope, k_rope


def rotate_inplace(q, k, positions, offsets, rotary_dim, interleave, frequencies) -> None:
    _check_heads("q", "k", q, k)
    rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
    _rope_inplace(q, k, positions, offsets, rotary_dim, interleave, [float(f) for f in frequencies])


@custom_op("flashinfer::apply_rope", mutates_args=("q_rope", "k_rope"))
def _rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor | None,
    rotary_dim: int,
    interleave: bool,
    frequencies: list[float],
) -> None:
    _run((q, k), (q_rope, k_rope), positions, offsets, rotary_dim, interleave, frequencies)


@custom_op("flashinfer::apply_rope_inplace", mutates_args=("q", "k"))
def _rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor | None,
    rotary_dim: int,
    interleave: bool,
    frequencies: list[float],
) -> None:
    _run((q, k), (q, k), positions, offsets, rotary_dim, interleave, frequencies)


@custom_op("flashinfer::apply_rope_with_cos_sin_cache", mutates_args=("query_out", "key_out"))
def _rope_cached(
    query: torch.Tensor,
    key: torch.Tensor,
    query_out: torch.Tensor,
    key_out: torch.Tensor,
    positions: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    interleave: bool,
) -> None:
    q, k = _heads("query", query, head_size), _heads("key", key, head_size)
    outs = _heads("query", query_out, head_size), _heads("key", key_out, head_size)
    _run_cached((q, k), outs, positions, cos_sin_cache, interleave)


@custom_op("flashinfer::apply_rope_with_cos_sin_cache_inplace", mutates_args=("query", "key"))
def _rope_cached_inplace(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    interleave: bool,
) -> None:
    heads = _heads("query", query, head_size), _heads("key", key, head_size)
    _run_cached(heads, heads, positions, cos_sin_cache, interleave)


def _heads(name: str, tensor: torch.Tensor, head_size: int) -> torch.Tensor:
    """[nnz, heads, head_size], as a view."""
    require(head_size > 0, "head_size", head_size, "1 or more")
    shape = tuple(tensor.shape)
    whole = (len(shape) == 3 and shape[-1] == head_size) or (len(shape) == 2 and shape[-1] % head_size == 0)
    require(whole, name, shape, f"[nnz, heads * {head_size}] or [nnz, heads, {head_size}]")
    return tensor if len(shape) == 3 else tensor.unflatten(-1, (-1, head_size) if shape[-1] else (0, head_size))


def _run_cached(inputs, outs, positions, cos_sin_cache, interleave) -> None:
    _check_heads("query", "key", *inputs)
    rotary_dim = check_cache(cos_sin_cache, inputs[0])
    check_positions("positions", positions, inputs[0])
    check_within_cache("positions", positions, cos_sin_cache)
    cache = rows_of(cos_sin_cache)
    _rotate(inputs, outs, positions, None, rotary_dim, interleave, cache)


def _run(inputs, outs, positions, offsets, rotary_dim, interleave, frequencies) -> None:
    _check_heads("q", "k", *inputs)
    q = inputs[0]
    check_rotary_dim("rotary_dim", rotary_dim, q.shape[-1])
    scale, theta = frequencies[:2]
    require(scale > 0, "rope_scale", scale, "more than 0")
    require(theta > 0, "rope_theta", theta, "more than 0")
    if offsets is None:
        check_positions("pos_ids", positions, q)
    else:
        _check_ragged(positions, offsets, q)
        positions, offsets = positions.to(torch.int32), offsets.to(torch.int32).contiguous()
    _rotate(inputs, outs, positions, offsets, rotary_dim, interleave, Frequencies(rotary_dim, *frequencies))


def _rotate(inputs, outs, positions, offsets, rotary_dim, interleave, source) -> None:
    (q, k), (q_out, k_out) = inputs, outs
    if q.numel() + k.numel() == 0:
        return
    head_dim = q.shape[-1]
    cached = isinstance(source, torch.Tensor)
    positions = positions.contiguous()
    read = (q, k, source) if cached else (q, k)
    problem = room.Problem(
        dtype=dtype_name(q.dtype),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        interleave=interleave,
        ragged=offsets is not None,
        position_dtype=dtype_name(positions.dtype),
        cached=cached,
        inplace=q_out is q,
        aligned=head_dim * q.element_size() % 16 == 0 and is_aligned(*read, *outs),
    )
    room.rope(problem, q.device).run(q, k, q_out, k_out, positions, offsets, source)


def _check_heads(q_name: str, k_name: str, q: torch.Tensor, k: torch.Tensor) -> None:
    require_fit(q_name, q, q.dim() == 3, "[nnz, heads, head_dim]", *_DTYPES)
    alike = k.dim() == 3 and k.shape[0] == q.shape[0] and k.shape[2] == q.shape[2]
    require(alike, k_name, tuple(k.shape), f"{tuple(q.shape)}, as {q_name} has it, or other heads")
    require(k.dtype == q.dtype, k_name, k.dtype, f"{q.dtype}, the dtype of {q_name}")
    same_device(**{q_name: q, k_name: k})


def _check_ragged(indptr: torch.Tensor, offsets: torch.Tensor, q: torch.Tensor) -> None:
    tokens, batch = q.shape[0], offsets.shape[0] if offsets.dim() == 1 else -1
    require(batch >= 0, "offsets", tuple(offsets.shape), "[batch_size]")
    require(indptr.shape == (batch + 1,), "indptr", tuple(indptr.shape), f"[{batch + 1}], one more than offsets")
    require(batch > 0 or tokens == 0, "offsets", "no request", f"the requests of {tokens} tokens")
    for name, tensor in (("indptr", indptr), ("offsets", offsets)):
        require(tensor.dtype in INDEX_DTYPES, name, tensor.dtype, "int32, int64")
    same_device(q=q, indptr=indptr, offsets=offsets)
    if not indptr.is_cuda or env.DEBUG.is_on():
        last = indptr_values("indptr", indptr)[-1]
        require(last == tokens, "indptr", f"{last} last", f"{tokens}, the tokens")
