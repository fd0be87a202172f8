"""Keys and values of multi-head latent attention's prefill, put together and quantised in one pass."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.backends import variants_of
from flashinfer._core.checks import dtype_name, is_aligned, require, require_fit, rows_of, same_device
from flashinfer._core.custom_op import custom_op
from flashinfer._core.sizes import power_of_two
from flashinfer.ops import concat as room

__all__ = ["concat_mla_kv_quant_fp8"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Upstream's implementations of the function; ours answers to each name.
_BACKENDS = ("auto", "specialized", "cake")


@checked
def concat_mla_kv_quant_fp8(
    kv_nope: torch.Tensor,
    k_pe: torch.Tensor,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    *,
    nope_dim: int = 128,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of each head from a fused projection and the part of keys that heads share, in FP8.

    ``key = e4m3([kv_nope[..., :nope_dim] | k_pe])``, ``value = e4m3(kv_nope[..., nope_dim:])``, without a scale.

    Parameters
    ----------
    kv_nope : torch.Tensor
        [num_tokens, num_heads, nope_dim + v_dim]; bfloat16, float16 or float32, any strides.
    k_pe : torch.Tensor
        [num_tokens, rope_dim] or [num_tokens, 1, rope_dim] in the dtype of `kv_nope`, any strides.
    key, value : torch.Tensor, optional
        Receive the results: float8_e4m3fn [num_tokens, num_heads, nope_dim + rope_dim] and [num_tokens, num_heads,
        v_dim], contiguous columns.
    nope_dim : int
        Where `kv_nope` is split.
    backend : str
        "auto"; "specialized" or "cake", upstream's implementations; or a variant's name.

    Returns
    -------
    key, value : torch.Tensor
        Those given, or new ones. Rounded to nearest even; what is too large becomes 448, NaN the code 0x7F.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or backend other than the above.

    References
    ----------
    DeepSeek-AI, DeepSeek-V2, 2024, section 2.1.3, https://arxiv.org/abs/2405.04434; OCP 8-bit Floating Point
    Specification 1.0

    Examples
    --------
    >>> import torch, flashinfer
    >>> key, value = flashinfer.concat_mla_kv_quant_fp8(torch.randn(3, 2, 256), torch.randn(3, 64))
    >>> key.shape, value.shape
    (torch.Size([3, 2, 192]), torch.Size([3, 2, 128]))
    """
    require(kv_nope.dim() == 3, "kv_nope", tuple(kv_nope.shape), "[num_tokens, num_heads, nope_dim + v_dim]")
    tokens, heads, width = kv_nope.shape
    one = k_pe.dim() == 2 or (k_pe.dim() == 3 and k_pe.shape[1] == 1)
    require(one and len(k_pe) == tokens, "k_pe", tuple(k_pe.shape), f"[{tokens}, rope_dim] or [{tokens}, 1, rope_dim]")
    require(0 < nope_dim < width, "nope_dim", nope_dim, f"1 to {width - 1}, so that values are left of {width}")
    rope = k_pe.squeeze(1) if k_pe.dim() == 3 else k_pe
    shapes = (tokens, heads, nope_dim + rope.shape[1]), (tokens, heads, width - nope_dim)
    key, value = (_result(*given, kv_nope.device) for given in zip(("key", "value"), (key, value), shapes))
    # In bytes, for torch.compile has hardly an operation for the narrow dtypes.
    _pack(kv_nope, rope, key.view(torch.uint8), value.view(torch.uint8), backend)
    return key, value


def _result(name, given, shape, device):
    if given is None:
        return torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    require_fit(name, given, given.shape == shape, str(shape), torch.float8_e4m3fn)
    require(given.stride(2) == 1 or shape[2] == 1, name, given.stride(), "contiguous columns")
    return given


@custom_op("flashinfer::pack_mla_kv_fp8", mutates_args=("key", "value"))
def _pack(kv: torch.Tensor, rope: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: str) -> None:
    require(kv.dtype in _DTYPES, "kv_nope", kv.dtype, "bfloat16, float16, float32")
    require(rope.dtype == kv.dtype, "k_pe", rope.dtype, f"{kv.dtype}, the dtype of kv_nope")
    same_device(kv_nope=kv, k_pe=rope, key=key, value=value)
    pinned = () if backend in _BACKENDS else (backend,)
    if pinned:
        variants_of(backend)
    if key.numel() == 0:
        return
    kv, rope = rows_of(kv), rows_of(rope)
    rope_dim, value_dim = rope.shape[1], value.shape[2]
    nope_dim = key.shape[2] - rope_dim
    widths = nope_dim, rope_dim, value_dim
    problem = room.Pack(
        dtype_name(kv.dtype),
        *map(power_of_two, widths),
        aligned=all(n % 16 == 0 for n in widths) and is_aligned(kv, rope, key, value),
    )
    room.pack_mla_kv(problem, kv.device, *pinned).run(kv, rope, key, value)
