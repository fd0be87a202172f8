"""Putting the parts of attention's inputs together."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.backends import variants_of
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.sizes import power_of_two
from flashinfer.ops import concat as room

__all__ = ["concat_mla_k"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


@checked
def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default") -> None:
    """Keys of multi-head latent attention: each head's own part, then the part that all heads share, written into k.

    Parameters
    ----------
    k : torch.Tensor
        Receives the keys; [num_tokens, num_heads, nope_dim + rope_dim]; bfloat16, float16, float32, float8_e4m3fn or
        float8_e5m2, any strides. It may not overlap the inputs.
    k_nope : torch.Tensor
        [num_tokens, num_heads, nope_dim] in the dtype of k, any strides (a slice of a fused projection too).
    k_rope : torch.Tensor
        [num_tokens, 1, rope_dim] in the dtype of k, any strides.
    backend : str
        "default", which is "auto", or another name that `flashinfer explain` knows; all give the same result.

    Raises
    ------
    ValueError
        A shape, dtype, device or backend other than the above.

    References
    ----------
    DeepSeek-AI, DeepSeek-V2, 2024, section 2.1.3, https://arxiv.org/abs/2405.04434

    Examples
    --------
    >>> import torch, flashinfer
    >>> k, nope, rope = torch.empty(3, 8, 192), torch.ones(3, 8, 128), torch.zeros(3, 1, 64)
    >>> flashinfer.concat_ops.concat_mla_k(k, nope, rope)
    >>> k.sum().item() == nope.sum().item()
    True
    """
    _concat_mla_k(k, k_nope, k_rope, backend)


@custom_op("flashinfer::concat_mla_k", mutates_args=("k",))
def _concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, backend: str) -> None:
    require(k_nope.dim() == 3, "k_nope", tuple(k_nope.shape), "[num_tokens, num_heads, nope_dim]")
    tokens, heads, nope = k_nope.shape
    one = k_rope.dim() == 3 and k_rope.shape[:2] == (tokens, 1)
    require(one, "k_rope", tuple(k_rope.shape), f"[{tokens}, 1, rope_dim]")
    shape = (tokens, heads, nope + k_rope.shape[2])
    require_fit("k", k, k.shape == shape, f"{shape}, the parts side by side", *_DTYPES)
    for name, part in (("k_nope", k_nope), ("k_rope", k_rope)):
        require(part.dtype == k.dtype, name, part.dtype, f"{k.dtype}, the dtype of k")
    same_device(k=k, k_nope=k_nope, k_rope=k_rope)
    named = {} if backend in ("default", "auto") else {"backend": backend}
    if named:
        variants_of(backend)
    if k.numel() == 0:
        return
    size = k.element_size()
    problem = room.Problem(
        dtype="u8" if size == 1 else dtype_name(k.dtype),
        nope_block=power_of_two(nope),
        rope_block=power_of_two(k_rope.shape[2]),
        aligned=nope * size % 16 == k_rope.shape[2] * size % 16 == 0 and is_aligned(k, k_nope, k_rope),
    )
    room.concat_mla_k(problem, k.device, **named).run(k, k_nope, k_rope)
