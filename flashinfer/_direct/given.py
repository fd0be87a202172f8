"""What callers give in several shapes: numbers as tensors of one element, pools without a page axis, sinks by group."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch

from flashinfer._core.checks import number, require, require_tensor
from flashinfer.ops.attention.engine import sinks_of


def whole(name: str, value, least: int | None = None) -> int:
    """An integer, given as one or as an integer tensor of one element. A tensor on a GPU is waited for."""
    if type(value) is not int:
        if isinstance(value, torch.Tensor):
            fits = value.numel() == 1 and not value.is_floating_point() and value.dtype != torch.bool
            require(fits, name, f"{value.dtype} {tuple(value.shape)}", "an integer, or a tensor with one")
            value = value.item()
        require(isinstance(value, Integral) and not isinstance(value, bool), name, repr(value), "an integer")
        value = int(value)
    if least is not None and value < least:
        require(False, name, value, f"at least {least}")
    return value


def most_rows(name: str, value) -> int:
    """An upper bound of the rows of any request; lengths are int32."""
    value = whole(name, value, 0)
    require(value < 1 << 31, name, value, "less than 2^31")
    return value


def check_bound(name: str, value) -> None:
    """Refuse a bound that no kernel needs, where it is below 0. A tensor on a GPU is not waited for."""
    if value is None or type(value) is int and value >= 0 or isinstance(value, torch.Tensor) and value.is_cuda:
        return
    whole(name, value, 0)


def check_caches(k: torch.Tensor, v: torch.Tensor, axes: tuple[int, ...], shape: str) -> None:
    """Refuse k_cache and v_cache that have another number of axes."""
    for name, cache in (("k_cache", k), ("v_cache", v)):
        require(cache.dim() in axes, name, tuple(cache.shape), shape)


def real(name: str, value) -> float:
    """A finite number, given as one or as a tensor of one element. A tensor on a GPU is waited for."""
    value = number(name, value)
    require(isinstance(value, Real) and not isinstance(value, bool), name, repr(value), "a number")
    require(math.isfinite(value), name, value, "a finite number")
    return float(value)


def flag(name: str, value) -> bool:
    """True or False, given as one, as 0 or 1, or as a tensor with one of them."""
    if value is True or value is False:
        return value
    if isinstance(value, torch.Tensor):
        require(value.numel() == 1, name, tuple(value.shape), "True or False")
        value = value.item()
    require(isinstance(value, (bool, Integral)) and value in (0, 1), name, repr(value), "True or False")
    return bool(value)


def scale(name: str, value, device: torch.device):
    """A finite number, or float32 [1] on the compute device; a tensor on the host beside a GPU becomes a number."""
    if type(value) is float and math.isfinite(value):
        return value
    if not isinstance(value, torch.Tensor):
        return real(name, value)
    require(value.numel() == 1, name, tuple(value.shape), "a number, or a tensor of one element")
    require(value.is_floating_point(), name, value.dtype, "a floating-point tensor of one element")
    require(value.device == device or value.device.type == "cpu", name, f"a tensor on {value.device}",
            f"{device}, or the CPU")  # fmt: skip
    if value.device.type == "cpu":
        known = real(name, value)
        if device.type != "cpu":
            return known
    return value.reshape(1).float()


def head_sinks(sinks, heads: int) -> torch.Tensor | None:
    """Sinks [heads], also given as [kv_heads, heads / kv_heads] or in a list of one."""
    sinks = sinks_of(sinks)
    if sinks is None or sinks.dim() == 1:
        return sinks
    require(sinks.numel() == heads, "sinks", tuple(sinks.shape), f"{heads} elements, one for each query head")
    return sinks.reshape(heads)


def with_pages(kv_cache, kv_layout: str):
    """A cache whose pools may lack the page axis: [slots, heads, dim], or [slots, 2, heads, dim] in one tensor."""
    axis = -2 if kv_layout == "HND" else -3
    if isinstance(kv_cache, torch.Tensor):
        return kv_cache.unsqueeze(axis) if kv_cache.dim() == 4 and kv_cache.shape[1] in (1, 2) else kv_cache
    if len(kv_cache) == 2 and kv_cache[0].dim() == kv_cache[1].dim() == 3:
        return kv_cache[0].unsqueeze(axis), kv_cache[1].unsqueeze(axis)
    return kv_cache


def pair(name: str, given) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The latent and the positional part that a caller gives in the place of one tensor."""
    fits = isinstance(given, (tuple, list)) and len(given) == 2
    require(fits, name, f"a {type(given).__name__}", "a tensor, or a pair of tensors")
    for i, t in enumerate(given):
        require_tensor(f"{name}[{i}]", t, optional=i == 1)
    return given[0], given[1]


def as_rows(name: str, given: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """The rows of an output in the axes of its query."""
    if given is None:
        return None
    require_tensor(name, given)
    try:
        return given.view(shape)
    except RuntimeError:
        shown = f"{tuple(given.shape)} of strides {given.stride()}"
        raise ValueError(f"{name}: got {shown}; allowed: {tuple(shape)}, or query's axes, as a view of it") from None


def elements_of_a_row(x: torch.Tensor, name: str) -> int:
    """Elements from row to row of x [rows, heads, dim], for offsets that count elements: rows lie one after another.

    Of one row it is at least the row's own: its stride may be any.
    """
    row = 1 + sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:]))
    fits = x.shape[0] <= 1 or x.stride(0) >= row
    require(fits, name, f"strides {x.stride()}", "rows one after another, for offsets that count elements")
    return max(row, x.stride(0))
