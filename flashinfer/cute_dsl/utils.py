"""Arranging block scale factors as `flashinfer.fused_moe.cute_dsl` takes them."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.ops import layouts

__all__ = ["convert_sf_to_mma_layout", "is_cute_dsl_available"]


def is_cute_dsl_available() -> bool:
    """Whether Python finds NVIDIA's CuTe DSL, the modules cutlass and cutlass.cute; nothing here uses it.

    Returns
    -------
    bool
        The modules are there; they are not run, but for cutlass itself.

    Examples
    --------
    >>> flashinfer.cute_dsl.is_cute_dsl_available() in (True, False)
    True
    """
    try:
        return find_spec("cutlass.cute") is not None
    except ImportError:  # cutlass is not there, or not whole
        return False


@checked
def convert_sf_to_mma_layout(
    sf: torch.Tensor, m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16
) -> torch.Tensor:
    """Scale factors in 128x4 tiles, seen in six dimensions: the memory stays as it is.

    Parameters
    ----------
    sf : torch.Tensor
        Any dtype and shape, contiguous: the groups' factors one after another, each group's in 128x4 tiles of its own,
        as `flashinfer.block_scale_interleave` and `flashinfer.fp4_quantize` give them.
    m, k : int
        Rows of a group, and elements of a row.
    num_groups : int
        Matrices: the experts of a layer.
    sf_vec_size : int
        Elements that share a factor.

    Returns
    -------
    torch.Tensor
        A view of sf, [32, 4, m / 128, 4, k / (4 * sf_vec_size), num_groups], quotients rounded up: the factor of row r
        and block b is at [r % 32, r % 128 // 32, r // 128, b % 4, b // 4, group].

    Raises
    ------
    ValueError
        Another number of factors, or an sf that is not contiguous.
    """
    for name, value in (("m", m), ("k", k), ("num_groups", num_groups), ("sf_vec_size", sf_vec_size)):
        require(value >= 1, name, value, "1 or more")
    high, wide = layouts.padded(m, -(-k // sf_vec_size), "128x4")
    fits = sf.is_contiguous() and sf.numel() == num_groups * high * wide
    require(fits, "sf", f"{tuple(sf.shape)}, strides {sf.stride()}", f"{num_groups} x {high} x {wide}, contiguous")
    return sf.view(num_groups, high // 128, wide // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
