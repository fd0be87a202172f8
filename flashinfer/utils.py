"""Helpers that callers import from upstream's `flashinfer.utils`."""

from __future__ import annotations

from enum import Enum

import torch

from flashinfer._core.checks import BackendSupportedError, as_dtype, require
from flashinfer._core.target import target_of
from flashinfer.ops.attention.problem import alibi_slopes

__all__ = [
    "BackendSupportedError",
    "FP4Tensor",
    "GPUArchitectureError",
    "LibraryError",
    "MaskMode",
    "PosEncodingMode",
    "TensorLayout",
    "canonicalize_torch_dtype",
    "ceil_div",
    "device_support_pdl",
    "get_alibi_slopes",
    "get_compute_capability",
    "get_device_name",
    "get_device_sm_count",
    "get_indptr",
    "get_native_fp4_dtype",
    "get_shuffle_matrix_a_row_indices",
    "get_shuffle_matrix_sf_a_row_indices",
    "get_trtllm_gen_multi_ctas_kv_counter_bytes",
    "is_float8",
    "is_sm100a_supported",
    "is_sm100f_supported",
    "is_sm110a_supported",
    "is_sm120a_supported",
    "is_sm120f_supported",
    "is_sm121a_supported",
    "is_sm12x_supported",
    "is_sm90a_supported",
    "last_positive_power_of_2",
    "next_positive_power_of_2",
    "round_up",
]


class PosEncodingMode(Enum):
    """Numbers of the position encodings that attention applies."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(Enum):
    """Numbers of the masks of attention, as `single_prefill_with_kv_cache_with_jit_module` takes them."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(Enum):
    """Numbers of the orders of tokens and heads."""

    NHD = 0
    HND = 1


class GPUArchitectureError(Exception):
    """Upstream's name for a device that a function does not run on; nothing here raises it."""


class LibraryError(Exception):
    """Upstream's name for a library that is missing or too old; nothing here raises it."""


class FP4Tensor:
    """Packed e2m1 codes with their scale factors, as attention writes a quantised result.

    Parameters
    ----------
    data : torch.Tensor
        uint8 [..., n / 2]: two codes a byte, the first in the low half.
    scale : torch.Tensor
        float8_e4m3fn factors, in the 128x4 layout: the first dimension a multiple of 128, the second of 4.
    scale_start_index : int
        The row of `scale` that belongs to the first row of `data`.
    original_shape : tuple of int, optional
        Of the values: that of `data` with the last dimension doubled, which is the default.

    Raises
    ------
    ValueError
        A dtype, shape or index other than the above.
    """

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        scale_start_index: int = 0,
        original_shape: tuple[int, ...] | None = None,
    ):
        require(data.dtype == torch.uint8, "data", data.dtype, "uint8")
        require(scale.dtype == torch.float8_e4m3fn, "scale", scale.dtype, "float8_e4m3fn")
        tiled = scale.dim() == 2 and scale.shape[0] % 128 == 0 and scale.shape[1] % 4 == 0
        require(tiled, "scale", tuple(scale.shape), "[a multiple of 128, a multiple of 4]")
        rows = data.shape[0]
        fits = 0 <= scale_start_index and scale_start_index + rows <= scale.shape[0]
        require(fits, "scale_start_index", scale_start_index, f"0 to {scale.shape[0] - rows}: {rows} rows of data")
        shape = (*data.shape[:-1], 2 * data.shape[-1])
        given = shape if original_shape is None else tuple(original_shape)
        require(given == shape, "original_shape", given, f"{shape}, twice the last dimension of data")
        self.data = data
        self.scale = scale
        self.scale_start_index = scale_start_index
        self.original_shape = given


def get_shuffle_matrix_a_row_indices(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """The order in which TensorRT-LLM's generated kernels want the rows of a weight.

    Within each block of rows, 32 if `epilogue_tile_m` is a multiple of 128 and else 16, row r goes to
    8 (r mod (block / 8)) + r div (block / 8).

    Parameters
    ----------
    input_tensor : torch.Tensor
        [rows, .]; rows a multiple of the block.
    epilogue_tile_m : int
        Rows that the kernel's epilogue treats at once.

    Returns
    -------
    torch.Tensor
        int64 [rows], on the CPU: row i of the shuffled weight is this row of `input_tensor`.

    Raises
    ------
    ValueError
        A shape other than the above.
    """
    require(input_tensor.dim() == 2, "input_tensor", tuple(input_tensor.shape), "two dimensions")
    block = 32 if epilogue_tile_m % 128 == 0 else 16
    rows = input_tensor.shape[0]
    require(rows % block == 0, "input_tensor", tuple(input_tensor.shape), f"a multiple of {block} rows")
    # [8, block / 8] read by columns: of the destinations 0, 1, 2, ... the sources.
    order = torch.arange(block, dtype=torch.int64, device="cpu").view(8, block // 8).T.flatten()
    return (torch.arange(0, rows, block, dtype=torch.int64, device="cpu")[:, None] + order).flatten()


def get_shuffle_matrix_sf_a_row_indices(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """The order of the rows of a weight's scale factors: that of the weight's rows.

    Parameters
    ----------
    input_tensor : torch.Tensor
        [rows, factors]; rows a multiple of 128, factors one of 4.
    epilogue_tile_m : int
        As in `get_shuffle_matrix_a_row_indices`.
    num_elts_per_sf : int
        Elements to a factor, 16 or 32. It does not change the order of rows.

    Returns
    -------
    torch.Tensor
        int64 [rows], on the CPU.

    Raises
    ------
    ValueError
        A shape or number other than the above.
    """
    require(num_elts_per_sf in (16, 32), "num_elts_per_sf", num_elts_per_sf, "16, 32")
    shape = tuple(input_tensor.shape)
    require(len(shape) == 2 and shape[0] % 128 == 0 and shape[1] % 4 == 0, "input_tensor", shape,
            "[a multiple of 128, a multiple of 4]")  # fmt: skip
    return get_shuffle_matrix_a_row_indices(input_tensor, epilogue_tile_m)


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """Major and minor compute capability of a CUDA device.

    Raises
    ------
    ValueError
        The device is none.
    """
    return divmod(_target(device).capability, 10)


def get_device_sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device.

    Raises
    ------
    ValueError
        The device is none.
    """
    return _target(device).sms


def _target(device):
    device = torch.device(device)
    require(device.type == "cuda", "device", device, "a CUDA device")
    return target_of(device)


def device_support_pdl(device: torch.device) -> bool:
    """Whether a device has programmatic dependent launch: CUDA devices from compute capability 9.0 on."""
    device = torch.device(device)
    return device.type == "cuda" and target_of(device).capability >= 90


def _capability(device: torch.device) -> int:
    device = torch.device(device)
    return target_of(device).capability if device.type == "cuda" else 0


def is_sm90a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 9.x."""
    return _capability(device) // 10 == 9


def is_sm100a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 10.x."""
    return _capability(device) // 10 == 10


def is_sm100f_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 10.x."""
    return is_sm100a_supported(device)


def is_sm110a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 11.x."""
    return _capability(device) // 10 == 11


def is_sm120a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 12.0."""
    return _capability(device) == 120


def is_sm121a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 12.1."""
    return _capability(device) == 121


def is_sm12x_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 12.x."""
    return _capability(device) // 10 == 12


def is_sm120f_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 12.x."""
    return is_sm12x_supported(device)


def get_device_name(device: torch.device) -> str:
    """The name of a CUDA device."""
    return torch.cuda.get_device_name(device)


def get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    """Bytes of a `multi_ctas_kv_counter_buffer`: an int32 for each request and head, or each multiprocessor if more.

    The attention functions here accept such a buffer and do not use it.

    Parameters
    ----------
    batch_size, num_qo_heads, sm_count : int
        1 or more; 0 requests are 1.

    Returns
    -------
    int
        A multiple of 16.

    Raises
    ------
    ValueError
        A negative number.
    """
    for name, value in (("batch_size", batch_size), ("num_qo_heads", num_qo_heads), ("sm_count", sm_count)):
        require(value >= 0, name, value, "0 or more")
    counters = max(batch_size * num_qo_heads, sm_count, 1)
    return -(-4 * counters // 16) * 16


def next_positive_power_of_2(x: int) -> int:
    """The smallest power of two that is at least x and at least 1.

    Parameters
    ----------
    x : int
        Any.

    Returns
    -------
    int
        1, 2, 4, ...

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.next_positive_power_of_2(5), flashinfer.next_positive_power_of_2(0)
    (8, 1)
    """
    return 1 if x < 1 else 1 << (x - 1).bit_length()


def last_positive_power_of_2(x: int) -> int:
    """The largest power of two that is at most x, which is 1 or more.

    Parameters
    ----------
    x : int

    Returns
    -------
    int
        1, 2, 4, ...

    Raises
    ------
    ValueError
        x is below 1.

    Examples
    --------
    >>> from flashinfer.utils import last_positive_power_of_2
    >>> last_positive_power_of_2(5), last_positive_power_of_2(8)
    (4, 8)
    """
    require(x >= 1, "x", x, "1 or more")
    return 1 << (x.bit_length() - 1)


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up: ``ceil_div(9, 4)`` is 3."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """The least multiple of y that is at least x: ``round_up(9, 4)`` is 12."""
    return ceil_div(x, y) * y


def is_float8(x: torch.Tensor) -> bool:
    """Whether a tensor is in float8_e4m3fn or float8_e5m2."""
    return x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def get_native_fp4_dtype() -> torch.dtype:
    """The dtype of two packed e2m1 codes: torch's, or uint8 where torch has none."""
    return getattr(torch, "float4_e2m1fn_x2", torch.uint8)


def get_indptr(x: torch.Tensor) -> torch.Tensor:
    """Offsets of segments of given lengths.

    Parameters
    ----------
    x : torch.Tensor
        [n], integers: the lengths.

    Returns
    -------
    torch.Tensor
        int64 [n + 1], from 0, on the device of x.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.utils import get_indptr
    >>> get_indptr(torch.tensor([2, 0, 3]))
    tensor([0, 2, 2, 5])
    """
    return torch.nn.functional.pad(x.to(torch.int64).cumsum(0), (1, 0))


def get_alibi_slopes(n_heads: int, device: torch.device | None = None) -> torch.Tensor:
    """Slopes of ALiBi's linear biases (Press et al., Train Short, Test Long, 2021), one for each head.

    Parameters
    ----------
    n_heads : int
        Query heads, 1 or more.
    device : torch.device, optional
        Of the result; torch's default by default.

    Returns
    -------
    torch.Tensor
        float32 [n_heads].

    Examples
    --------
    >>> from flashinfer.utils import get_alibi_slopes
    >>> get_alibi_slopes(2)
    tensor([0.0625, 0.0039])
    """
    require(n_heads >= 1, "n_heads", n_heads, "1 or more")
    return torch.tensor(alibi_slopes(n_heads), dtype=torch.float32, device=device)


def canonicalize_torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, or the one of a name.

    Parameters
    ----------
    dtype : torch.dtype or str
        "bfloat16" stands for torch.bfloat16.

    Returns
    -------
    torch.dtype

    Raises
    ------
    ValueError
        It is neither, or a name that is no dtype's.

    Examples
    --------
    >>> from flashinfer.utils import canonicalize_torch_dtype
    >>> canonicalize_torch_dtype("bfloat16")
    torch.bfloat16
    """
    require(isinstance(dtype, (str, torch.dtype)), "dtype", dtype, "a torch.dtype or the name of one")
    return as_dtype(dtype)
