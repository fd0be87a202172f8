"""Tensors to tune with: each function makes one of a shape and a dtype on a device."""

from __future__ import annotations

import torch


def autotuner_initializer_empty(shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Whatever is in memory.

    Parameters
    ----------
    shapes : tuple of int
        The tensor's shape.
    dtype : torch.dtype
    device : torch.device

    Returns
    -------
    torch.Tensor

    Examples
    --------
    >>> import torch
    >>> from flashinfer.autotuner import autotuner_initializer_empty
    >>> autotuner_initializer_empty((2, 3), torch.float16, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    return torch.empty(shapes, dtype=dtype, device=device)


def autotuner_initializer_zeros(shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros.

    Parameters
    ----------
    shapes, dtype, device
        As of `autotuner_initializer_empty`.

    Returns
    -------
    torch.Tensor

    Examples
    --------
    >>> import torch
    >>> from flashinfer.autotuner import autotuner_initializer_zeros
    >>> autotuner_initializer_zeros((2,), torch.int32, torch.device("cpu"))
    tensor([0, 0], dtype=torch.int32)
    """
    return torch.zeros(shapes, dtype=dtype, device=device)


def autotuner_initializer_ones(shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Ones.

    Parameters
    ----------
    shapes, dtype, device
        As of `autotuner_initializer_empty`.

    Returns
    -------
    torch.Tensor

    Examples
    --------
    >>> import torch
    >>> from flashinfer.autotuner import autotuner_initializer_ones
    >>> autotuner_initializer_ones((2,), torch.float16, torch.device("cpu"))
    tensor([1., 1.], dtype=torch.float16)
    """
    return _of_floats(torch.ones, shapes, dtype, device)


def autotuner_initializer_randn(shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers of a normal distribution.

    Parameters
    ----------
    shapes, dtype, device
        As of `autotuner_initializer_empty`.

    Returns
    -------
    torch.Tensor

    Examples
    --------
    >>> import torch
    >>> from flashinfer.autotuner import autotuner_initializer_randn
    >>> autotuner_initializer_randn((2, 3), torch.float16, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    return _of_floats(torch.randn, shapes, dtype, device)


def autotuner_initializer_rand(shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers from 0 to 1.

    Parameters
    ----------
    shapes, dtype, device
        As of `autotuner_initializer_empty`.

    Returns
    -------
    torch.Tensor

    Examples
    --------
    >>> import torch
    >>> from flashinfer.autotuner import autotuner_initializer_rand
    >>> autotuner_initializer_rand((2, 3), torch.float16, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    return _of_floats(torch.rand, shapes, dtype, device)


def autotuner_initializer_rand_scaled(
    shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Random numbers from -5 to 5.

    Parameters
    ----------
    shapes, dtype, device
        As of `autotuner_initializer_empty`.

    Returns
    -------
    torch.Tensor

    Examples
    --------
    >>> import torch
    >>> from flashinfer.autotuner import autotuner_initializer_rand_scaled
    >>> autotuner_initializer_rand_scaled((2, 3), torch.float16, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    return (torch.rand(shapes, dtype=torch.float32, device=device) * 10 - 5).to(dtype)


def _of_floats(make, shapes, dtype, device) -> torch.Tensor:
    """torch makes no random numbers, or ones, of narrow dtypes: they are converted."""
    return make(shapes, dtype=torch.float32, device=device).to(dtype)
