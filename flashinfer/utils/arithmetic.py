"""Sizes, dtypes and small tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.torch_version import TorchVersion

from flashinfer._core.checks import WrongKind, as_dtype, require
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.attention.problem import alibi_slopes


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
    return power_of_two(x)


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
    if not isinstance(dtype, (str, torch.dtype)):
        raise WrongKind(f"dtype: got {dtype!r}; allowed: a torch.dtype or the name of one")
    return as_dtype(dtype)


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


def calculate_tile_tokens_dim(num_tokens: int, num_experts: int, top_k: int, max_tile_tokens_dim: int = 128) -> int:
    """Rows of a tile of experts' products: a power of two near the rows that an expert has if some have 1.3 x the mean.

    Parameters
    ----------
    num_tokens, num_experts, top_k : int
        Each token goes to `top_k` of the experts.
    max_tile_tokens_dim : int
        The most.

    Returns
    -------
    int
        8 to `max_tile_tokens_dim`.

    Examples
    --------
    >>> from flashinfer.utils import calculate_tile_tokens_dim
    >>> calculate_tile_tokens_dim(1024, 128, 8)
    128
    """
    rows = int(num_tokens * top_k // num_experts * 1.3)
    return min(max(next_positive_power_of_2(rows), 8), max_tile_tokens_dim)


def version_at_least(version: str, base_version: str) -> bool:
    """Whether a version is `base_version` or newer, by the rules of Python's packages: "2.10" is newer than "2.9"."""
    return TorchVersion(version) >= TorchVersion(base_version)


def check_shape_dtype_device(
    x: torch.Tensor,
    expected_shape: Sequence[int] | None,
    expected_dtype: torch.dtype | None,
    expected_device: torch.device | None,
    name: str,
) -> None:
    """Refuse a tensor of another shape, dtype or device than is expected; what is None is not looked at.

    Parameters
    ----------
    x : torch.Tensor
    expected_shape : sequence of int, optional
    expected_dtype : torch.dtype, optional
    expected_device : torch.device, optional
    name : str
        Of the argument, for the error.

    Raises
    ------
    ValueError
        Naming `name`, what it has and what is expected.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.utils import check_shape_dtype_device
    >>> check_shape_dtype_device(torch.ones(2, 3), (2, 3), torch.float32, None, "x")
    """
    if expected_shape is not None:
        require(tuple(x.shape) == tuple(expected_shape), name, tuple(x.shape), str(tuple(expected_shape)))
    require(expected_dtype in (None, x.dtype), name, x.dtype, str(expected_dtype))
    require(expected_device in (None, x.device), name, f"a tensor on {x.device}", str(expected_device))
