"""Types and values of arguments that the recurrent kernels share: pointers, strides by name, and sizes."""

from __future__ import annotations

import torch

from flashinfer.ops._device.rows import pointer, unit


def pointers(kinds: dict, aligned=()) -> dict:
    """Pointer types for {name: dtype} `kinds`, in order; None, for absent ones, of the dtype ""; fp8 is bytes."""
    return {name: pointer(as_bytes(kind), name in aligned) if kind else None for name, kind in kinds.items()}


def as_bytes(kind: str) -> str:
    return "u8" if kind.startswith("fp8") else kind


def place_types(places: dict, units: dict, units_of: dict | None = None) -> dict:
    """Types of strides, named "group.field". Strides of a group in `units` are multiples of 16 bytes of its dtype.

    units_of : {group: the fields that are such multiples}, for groups where not all are.
    """
    types = {}
    for group, fields in places.items():
        for field in fields:
            whole = group in units and field in (units_of or {}).get(group, fields)
            types[f"{group}.{field}"] = f"i64:{unit(units[group], True)}" if whole else "i64"
    return types


def size_types(names, **known: int) -> dict:
    """Types of the sizes `of.name`. A size that is a multiple of 16 is declared so.

    A mask `column < size` is then the same for 16 neighbouring columns, so loads and stores are vectorized. For other
    sizes each element has a mask and an access of its own.
    """
    return {f"of.{name}": "i32" if known.get(name, 1) % 16 else "i32:16" for name in names}


def strides(x: torch.Tensor | None, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of some dimensions; 0 for dimensions of one element, and for None."""
    if x is None:
        return (0,) * len(dims)
    return tuple(x.stride(d) if x.shape[d] > 1 else 0 for d in dims)


def table_strides(x: torch.Tensor | None) -> tuple[int, int]:
    """Strides of a table [sequences] or [sequences, columns]."""
    if x is None:
        return 0, 0
    return x.stride(0), x.stride(1) if x.dim() == 2 else 0


def arguments(tensors, places) -> list:
    """The tensors that are there, fp8 as bytes, then the strides of each place, flat."""
    return [*(raw(x) for x in tensors if x is not None), *(number for place in places for number in place)]


def raw(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, with fp8 viewed as bytes."""
    return x.view(torch.uint8) if x is not None and x.element_size() == 1 and x.is_floating_point() else x
