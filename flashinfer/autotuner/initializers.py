"""Tensors to tune with: each function makes one of a shape and a dtype on a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

_DOC = """{what}

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
>>> from flashinfer.autotuner import {name}
>>> {name}((2, 3), torch.float16, torch.device("cpu")).shape
torch.Size([2, 3])
"""


def _initializer(kind: str, what: str, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function autotuner_initializer_`kind`, which gives what `make` does."""

    def initializer(shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return make(shapes, dtype=dtype, device=device)

    name = f"autotuner_initializer_{kind}"
    initializer.__name__ = initializer.__qualname__ = name
    initializer.__doc__ = _DOC.format(what=what, name=name)
    return initializer


def _of_floats(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch makes no random numbers, or ones, of narrow dtypes: they are converted."""
    return lambda shapes, dtype, device: make(shapes, dtype=torch.float32, device=device).to(dtype)


autotuner_initializer_empty = _initializer("empty", "Whatever is in memory.", torch.empty)
autotuner_initializer_zeros = _initializer("zeros", "Zeros.", torch.zeros)
autotuner_initializer_ones = _initializer("ones", "Ones.", _of_floats(torch.ones))
autotuner_initializer_randn = _initializer("randn", "Random numbers of a normal distribution.", _of_floats(torch.randn))
autotuner_initializer_rand = _initializer("rand", "Random numbers from 0 to 1.", _of_floats(torch.rand))
autotuner_initializer_rand_scaled = _initializer(
    "rand_scaled", "Random numbers from -5 to 5.", _of_floats(lambda *size, **kind: torch.rand(*size, **kind) * 10 - 5)
)
