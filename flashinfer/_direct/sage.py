"""Operands that SageAttention quantised (Zhang et al., 2024): scales of blocks of tokens, and of V's channels."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require, require_tensor
from flashinfer._direct.given import whole
from flashinfer.ops.narrow import to_fp8

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
    both = scales[0] is not None and scales[1] is not None
    require(not both or query.dtype == key.dtype, "key", key.dtype, f"{query.dtype}, as query")
    indptrs, rows = (indptrs[0], indptrs[1], None, indptrs[1]), []
    for i, x in ((0, query), (1, key), (3, value)):
        if scales[i] is None:
            rows.append(x.to(dtype))
            continue
        name, size = f"sage_attn_sfs[{i}]", whole(f"num_elts_per_sage_attn_blk[{i}]", sizes[i])
        require_tensor(name, scales[i])
        require(scales[i].device == x.device, name, f"a tensor on {scales[i].device}", str(x.device))
        types = _TYPES[1:] if i == 3 else _TYPES
        require(x.dtype in types, name, f"a scale of {x.dtype}", f"one of {', '.join(map(str, types))}")
        if i == 3 and not size:
            fits = scales[i].numel() == x.shape[1] * x.shape[2]
            require(fits, name, tuple(scales[i].shape), f"{tuple(x.shape[1:])}: heads, head_dim")
            factors = scales[i].reshape(x.shape[1:]).float()
        else:
            require(size >= 1, f"num_elts_per_sage_attn_blk[{i}]", size, "at least 1, with a scale")
            factors = _of_blocks(name, x, scales[i], size, indptrs[i])
        rows.append((x.float() * factors).to(dtype))
    return rows


def _of_blocks(name: str, x: torch.Tensor, scale: torch.Tensor, size: int, indptr: torch.Tensor) -> torch.Tensor:
    """The factor of each row, [rows, heads, 1]."""
    tokens, heads = x.shape[:2]
    least = -(-tokens // size)
    fits = scale.dim() == 2 and scale.shape[0] == heads and scale.shape[1] >= least
    require(fits, name, tuple(scale.shape), f"[{heads}, at least {least}]: heads, blocks")
    return scale.t()[_block_of(x, size, indptr).clamp_(0, scale.shape[1] - 1)][..., None].float()


def _block_of(x: torch.Tensor, size: int, indptr: torch.Tensor) -> torch.Tensor:
    """The block of each row of x [rows, ...]: request i begins in block indptr[i] div size + i."""
    indptr = indptr.long()
    row = torch.arange(x.shape[0], dtype=torch.int64, device=x.device)
    request = torch.searchsorted(indptr, row, right=True).sub_(1).clamp_(0, max(indptr.shape[0] - 2, 0))
    begin = indptr[request]
    block = torch.div(begin, size, rounding_mode="floor") + request
    return block + torch.div(row - begin, size, rounding_mode="floor")


@checked
def trtllm_sage_attention_quantize(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_block_size: int = 1,
    k_block_size: int = 16,
    qk_quant_dtype: torch.dtype = torch.int8,
    cum_seq_lens_q: torch.Tensor | None = None,
    cum_seq_lens_kv: torch.Tensor | None = None,
    smooth_k: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Operands of `trtllm_ragged_attention_deepseek` as SageAttention quantises them (Zhang et al., 2024).

    A block of q or k has the scale of its largest magnitude, and so has a channel of v over all tokens. Nothing waits
    for the device.

    Parameters
    ----------
    query : Tensor [tokens, num_qo_heads, head_dim]
        bf16 or fp16, as the next two.
    key, value : Tensor [kv_tokens, num_kv_heads, head_dim]
    q_block_size, k_block_size : int
        Tokens of a block, within a request; 1, 4 or 16.
    qk_quant_dtype : torch.dtype
        int8 or float8_e4m3fn, of q and k; v becomes float8_e4m3fn.
    cum_seq_lens_q, cum_seq_lens_kv : int32 Tensor [batch + 1], optional
        First query, and first key, of each request. Default: one request; the second as the first.
    smooth_k : bool
        Subtract the mean of k over all tokens from k, which moves the logits of a query by one number.

    Returns
    -------
    q, k, v : Tensor, quantised
    q_scale, k_scale : float32 Tensor [heads, ceil(tokens / block) + batch - 1]
        Request i begins in block cum_seq_lens[i] div block + i; blocks of none have 0.
    v_scale : float32 Tensor [num_kv_heads, head_dim]
    k_mean : float32 Tensor [num_kv_heads, head_dim], with smooth_k

    Raises
    ------
    ValueError
        A shape, dtype or size other than the above.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.prefill import trtllm_sage_attention_quantize
    >>> x = torch.ones(20, 2, 64).half()
    >>> q, k, v, q_scale, k_scale, v_scale = trtllm_sage_attention_quantize(x, x, x)
    >>> q.dtype, q_scale.shape, k_scale.shape, v_scale.shape
    (torch.int8, torch.Size([2, 20]), torch.Size([2, 2]), torch.Size([2, 64]))
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(x.dim() == 3, name, tuple(x.shape), "[tokens, heads, head_dim]")
        require(x.dtype in (torch.bfloat16, torch.float16), name, x.dtype, "bfloat16, float16")
    require(key.shape == value.shape, "value", tuple(value.shape), f"{tuple(key.shape)}, as key")
    known = qk_quant_dtype in (torch.int8, torch.float8_e4m3fn)
    require(known, "qk_quant_dtype", qk_quant_dtype, "int8, float8_e4m3fn")
    device = query.device
    if cum_seq_lens_q is None:
        counts = query.shape[0], key.shape[0]
        indptrs = [torch.arange(2, dtype=torch.int32, device=device) * count for count in counts]
    else:
        indptrs = [cum_seq_lens_q, cum_seq_lens_q if cum_seq_lens_kv is None else cum_seq_lens_kv]
    k_mean, rows = None, key.float()
    if smooth_k:
        k_mean = rows.mean(0)
        rows = rows - k_mean
    results = []
    for name, x, size, indptr in (("q_block_size", query.float(), q_block_size, indptrs[0]),
                                  ("k_block_size", rows, k_block_size, indptrs[1])):  # fmt: skip
        require(size in (1, 4, 16), name, size, "1, 4, 16")
        block, blocks = _block_of(x, size, indptr), -(-x.shape[0] // size) + indptr.shape[0] - 2
        most = torch.zeros((max(blocks, 0), x.shape[1]), dtype=torch.float32, device=device)
        most.scatter_reduce_(0, block[:, None].expand(x.shape[:2]), x.abs().amax(-1), "amax")
        results.append(_codes(x, most / _largest(qk_quant_dtype), block, qk_quant_dtype))
    v = value.float()
    most = v.abs().amax(0) if v.shape[0] else torch.zeros(v.shape[1:], dtype=torch.float32, device=device)
    v_scale = most / _largest(torch.float8_e4m3fn)
    v = to_fp8(v / torch.where(v_scale == 0, 1, v_scale), torch.float8_e4m3fn)
    (q, q_scale), (k, k_scale) = results
    made = q, k, v, q_scale, k_scale, v_scale
    return made if k_mean is None else (*made, k_mean)


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else 448.0


def _codes(x, scale: torch.Tensor, block: torch.Tensor, dtype: torch.dtype):
    """Codes of x [rows, heads, dim] under the scales [blocks, heads] of its rows' blocks, and scales by head."""
    of_row = scale[block][..., None]
    quotient = x / torch.where(of_row == 0, 1, of_row)
    codes = quotient.round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else to_fp8(quotient, dtype)
    return codes, scale.t().contiguous()
