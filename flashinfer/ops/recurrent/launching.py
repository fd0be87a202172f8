"""Types and values of the arguments that kernels of recurrences share: pointers, and strides by name."""

from __future__ import annotations

import torch

from flashinfer.ops._device.rows import pointer, unit


def pointers(kinds: dict, aligned=()) -> dict:
    """Types of pointers to elements of `kinds`, in order, without those of "" kinds; fp8 is bytes."""
    return {name: pointer(as_bytes(kind), name in aligned) for name, kind in kinds.items() if kind}


def as_bytes(kind: str) -> str:
    return "u8" if kind.startswith("fp8") else kind


def place_types(places: dict, units: dict, units_of: dict | None = None) -> dict:
    """Types of strides, "group.field". Those of a group in `units` are multiples of 16 bytes of that dtype.

    units_of : {group: fields that are such multiples}, where not all of a group's are.
    """
    types = {}
    for group, fields in places.items():
        for field in fields:
            whole = group in units and field in (units_of or {}).get(group, fields)
            types[f"{group}.{field}"] = f"i64:{unit(units[group], True)}" if whole else "i64"
    return types


def size_types(names, **known: int) -> dict:
    """Types of the sizes `of.name`. One known to be a multiple of 16 is declared as such.

    A mask of columns below a declared size is the same for 16 columns, so loads and stores take 16 bytes at a time;
    below any other size, each element has a mask and an access of its own.
    """
    return {f"of.{name}": "i32" if known.get(name, 1) % 16 else "i32:16" for name in names}


def strides(x: torch.Tensor | None, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of some dimensions; 0 of those with one element, and of a tensor that is not there."""
    if x is None:
        return (0,) * len(dims)
    return tuple(x.stride(d) if x.shape[d] > 1 else 0 for d in dims)


def table_strides(x: torch.Tensor | None) -> tuple[int, int]:
    """Strides of a table [sequences] or [sequences, columns]."""
    if x is None:
        return 0, 0
    return x.stride(0), x.stride(1) if x.dim() == 2 else 0


def raw(x: torch.Tensor | None) -> torch.Tensor | None:
    """x as kernels take it: fp8 as bytes."""
    return x.view(torch.uint8) if x is not None and x.element_size() == 1 and x.is_floating_point() else x
