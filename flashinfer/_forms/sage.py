"""Operands that SageAttention quantised (Zhang et al., 2024): scales of blocks of tokens, and of V's channels."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require

_TYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def widened(query, key, value, scales: tuple, sizes: tuple, indptrs: tuple, dtype: torch.dtype):
    """q, k and v as `dtype`, times their scales; those without a scale are converted.

    Parameters
    ----------
    scales : tuple
        Of q, k, p and v. q's and k's [heads, blocks], float32: request i begins in block indptr[i] div size + i, and
        every `size` tokens share a scale. v's [heads, head_dim], or blocks as k's. There is none of p: probabilities
        are not quantised.
    sizes : tuple of int
        Tokens of a block, of each; of v 0 for a scale of each channel.
    indptrs : tuple of Tensor
        Offsets of the queries and of the keys of each request.
    """
    require(len(scales) == 4 and len(sizes) == 4, "sage_attn_sfs", f"{len(scales)} and {len(sizes)} entries", "four")
    require(scales[2] is None, "sage_attn_sfs", "a scale of p", "None: probabilities are not quantised")
    indptrs, rows = (indptrs[0], indptrs[1], None, indptrs[1]), []
    for i, x in ((0, query), (1, key), (3, value)):
        if scales[i] is None:
            rows.append(x.to(dtype))
            continue
        name = f"sage_attn_sfs[{i}]"
        require(x.dtype in _TYPES, name, f"a scale of {x.dtype}", "one of int8 or float8")
        if i == 3 and not sizes[i]:
            fits = scales[i].numel() == x.shape[1] * x.shape[2]
            require(fits, name, tuple(scales[i].shape), f"{tuple(x.shape[1:])}: heads, head_dim")
            factors = scales[i].reshape(x.shape[1:]).float()
        else:
            require(sizes[i] >= 1, f"num_elts_per_sage_attn_blk[{i}]", sizes[i], "at least 1, with a scale")
            factors = _of_blocks(name, x, scales[i], sizes[i], indptrs[i])
        rows.append((x.float() * factors).to(dtype))
    return rows


def _of_blocks(name: str, x: torch.Tensor, scale: torch.Tensor, size: int, indptr: torch.Tensor) -> torch.Tensor:
    """The factor of each row, [rows, heads, 1]."""
    tokens, heads = x.shape[:2]
    least = -(-tokens // size)
    fits = scale.dim() == 2 and scale.shape[0] == heads and scale.shape[1] >= least
    require(fits, name, tuple(scale.shape), f"[{heads}, at least {least}]: heads, blocks")
    indptr = indptr.long()
    row = torch.arange(tokens, dtype=torch.int64, device=x.device)
    request = torch.searchsorted(indptr, row, right=True).sub_(1).clamp_(0, max(indptr.shape[0] - 2, 0))
    begin = indptr[request]
    block = torch.div(begin, size, rounding_mode="floor") + request
    block += torch.div(row - begin, size, rounding_mode="floor")
    return scale.t()[block.clamp_(0, scale.shape[1] - 1)][..., None].float()
