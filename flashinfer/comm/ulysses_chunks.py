"""Chunks of heads on their way through Ulysses' exchanges: packed in front of one, merged behind the other."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, same_device


def kept(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The result, in the tensor that is given for it."""
    if out is None:
        return result
    fits = out.shape == result.shape and out.dtype == result.dtype and out.is_contiguous()
    require(fits, "out", f"{out.dtype} {tuple(out.shape)}", f"{result.dtype} {tuple(result.shape)}, contiguous")
    return out.copy_(result)


@checked
def pack_ulysses_qkv_head_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    world_size: int,
    head_offset: int,
    head_count: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Heads `head_offset` to `head_offset + head_count` of each rank's share, of Q, K and V beside each other.

    Parameters
    ----------
    query, key, value : torch.Tensor
        [B, S_local, H, D], any strides; H a multiple of world_size.
    world_size, head_offset, head_count : int
    out : torch.Tensor, optional
        Receives the result, contiguous.

    Returns
    -------
    torch.Tensor
        [B, S_local, world_size * head_count, 3 D].

    Raises
    ------
    ValueError
        An argument other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.comm.ulysses import pack_ulysses_qkv_head_chunk
    >>> pack_ulysses_qkv_head_chunk(*torch.ones(3, 1, 5, 8, 64), world_size=2, head_offset=0, head_count=1).shape
    torch.Size([1, 5, 2, 192])
    """
    require(query.dim() == 4, "query", tuple(query.shape), "[B, S, H, D]")
    for name, x in (("key", key), ("value", value)):
        same = x.shape == query.shape and x.dtype == query.dtype
        require(same, name, f"{x.dtype} {tuple(x.shape)}", f"{query.dtype} {tuple(query.shape)}, as query")
    same_device(query=query, key=key, value=value)
    heads = query.shape[2]
    require(world_size > 0 and heads % world_size == 0, "world_size", world_size, f"a divisor of {heads}, the heads")
    share = heads // world_size
    _check_band(share, head_offset, head_count)
    parts = [x.unflatten(2, (world_size, share))[:, :, :, head_offset : head_offset + head_count]
             for x in (query, key, value)]  # fmt: skip
    return kept(torch.cat(parts, -1).flatten(2, 3), out)


@checked
def merge_ulysses_output_head_chunk(
    received: torch.Tensor, *, world_size: int, local_heads: int, head_offset: int, out: torch.Tensor
) -> torch.Tensor:
    """Put the heads of one chunk, from all ranks, into those of `out`.

    Parameters
    ----------
    received : torch.Tensor
        [B, S_local, world_size * head_count, D].
    world_size, local_heads : int
        Ranks, and heads of each.
    head_offset : int
        Of each rank's heads, the first that is written; the others stay.
    out : torch.Tensor
        [B, S_local, world_size * local_heads, D] in received's dtype, contiguous.

    Returns
    -------
    torch.Tensor
        out.

    Raises
    ------
    ValueError
        An argument other than the above.
    """
    require(received.dim() == 4, "received", tuple(received.shape), "[B, S, heads, D]")
    heads = received.shape[2]
    require(world_size > 0 and heads % world_size == 0, "world_size", world_size, f"a divisor of {heads}, the heads")
    shape = (*received.shape[:2], world_size * local_heads, received.shape[3])
    fits = tuple(out.shape) == shape and out.dtype == received.dtype and out.is_contiguous()
    require(fits, "out", f"{out.dtype} {tuple(out.shape)}", f"{received.dtype} {shape}, contiguous")
    count = heads // world_size
    _check_band(local_heads, head_offset, count)
    band = out.unflatten(2, (world_size, local_heads))[:, :, :, head_offset : head_offset + count]
    band.copy_(received.unflatten(2, (world_size, count)))
    return out


def _check_band(share: int, offset: int, count: int) -> None:
    require(count > 0, "head_count", count, "at least 1")
    require(0 <= offset <= share - count, "head_offset", offset, f"0 to {share - count}")
