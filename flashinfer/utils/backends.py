"""Which of upstream's backends serves a call, as its own functions answer."""

from __future__ import annotations

import torch

from flashinfer.utils.devices import get_compute_capability, is_sm90a_supported
from flashinfer.utils.modes import PosEncodingMode

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_fa3_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """Whether upstream's Hopper kernels take a problem of attention. Here its names refuse nothing.

    Parameters
    ----------
    pos_encoding_mode : int
        A number of `PosEncodingMode`.
    use_fp16_qk_reductions, use_custom_mask : bool
    dtype_q, dtype_kv : torch.dtype
        Of queries, and of keys and values; uint8 is NVFP4.

    Returns
    -------
    bool
        False with a mask, a position encoding or float16 sums, and for FP8 or FP4 caches of other queries than FP8.
    """
    plain = pos_encoding_mode == PosEncodingMode.NONE.value and not use_fp16_qk_reductions and not use_custom_mask
    return plain and dtype_kv != torch.uint8 and (dtype_kv not in _FP8 or dtype_q in _FP8)


def is_fa3_prefill_head_dim_supported(head_dim_qk: int, head_dim_vo: int) -> bool:
    """Whether upstream's Hopper prefill takes these head dimensions: 64, 128 and 256, or 192 with 128."""
    return (head_dim_qk, head_dim_vo) in ((64, 64), (128, 128), (256, 256), (192, 128))


def is_cutlass_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """Whether upstream's CUTLASS kernels take a problem of attention.

    Parameters
    ----------
    pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv
        As in `is_fa3_backend_supported`.

    Returns
    -------
    bool
        False with a mask, a position encoding, float16 sums or FP8.
    """
    plain = pos_encoding_mode == PosEncodingMode.NONE.value and not use_fp16_qk_reductions and not use_custom_mask
    return plain and dtype_q not in _FP8 and dtype_kv not in _FP8


def determine_attention_backend(
    device: torch.device,
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    *,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
) -> str:
    """The name that upstream's "auto" has for a problem of attention.

    Parameters
    ----------
    device : torch.device
    pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv
        As in `is_fa3_backend_supported`.
    head_dim_qk, head_dim_vo : int, optional
        Both: "fa3" is for those only that its prefill takes.

    Returns
    -------
    str
        "fa3" on Hopper, where it takes the problem; "fa2".
    """
    problem = pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv
    hopper = is_sm90a_supported(device) and is_fa3_backend_supported(*problem)
    if head_dim_qk is not None and head_dim_vo is not None:
        hopper = hopper and is_fa3_prefill_head_dim_supported(head_dim_qk, head_dim_vo)
    return "fa3" if hopper else "fa2"


def determine_gemm_backend(device: torch.device) -> str:
    """The name that upstream has for its segmented products on a CUDA device: "sm90" on Hopper, "sm80" elsewhere."""
    return "sm90" if get_compute_capability(device)[0] == 9 else "sm80"
