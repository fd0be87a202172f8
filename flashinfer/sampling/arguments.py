"""What the sampling functions have in common: checks of their arguments, and randomness."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer._core.checks import check_values, dtype_name, require, require_fit, same_device
from flashinfer.ops import sampling as room

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)
_MOST = (1 << 31) - 1
# The dtypes that a filter's parameter may have.
_NUMBERS = (*DTYPES, torch.float64, *INDICES, torch.int16, torch.int8, torch.uint8)


class Call:
    """What all functions that draw have in common: checks, randomness and the tensors for the result."""

    no_k = no_p = (None, None)

    def __init__(self, name, x, indices, check_nan, generator, seed, offset):
        self.x = x = as_rows(name, x)
        self.batch = self.rows = len(x)
        if indices is not None:
            require_fit("indices", indices, indices.dim() == 1, "[batch]", *INDICES)
            same_device(**{name: x}, indices=indices)
            check_values("indices", indices, 0, len(x) - 1)
            self.batch = len(indices)
            indices = indices.contiguous()
        self.indices = indices
        if check_nan:
            require(not bool(x.isnan().any()), name, "NaN", "no NaN")
        self.samples = torch.empty(self.batch, dtype=torch.int32 if indices is None else indices.dtype, device=x.device)
        self.valid = torch.empty(self.batch, dtype=torch.bool, device=x.device)
        numbers, seeds, offsets = take_randomness(x.device, self.batch, generator, seed, offset)
        self.operands = numbers, seeds, offsets, indices, self.samples, self.valid

    def k(self, top_k, may_be_impossible, by_row):
        return top_k_of(self.of_outputs("top_k", top_k, by_row), self.batch, may_be_impossible)

    def p(self, top_p, may_be_impossible):
        return top_p_of(self.of_outputs("top_p", top_p, True), self.batch, may_be_impossible)

    def of_outputs(self, name, value, by_row):
        """A filter's parameter as one for each output. As many elements as rows are the rows' own; where there are as
        many outputs, only if `by_row` says so: upstream reads top_k alone and min_p by output, the others by row."""
        if self.indices is None or not isinstance(value, torch.Tensor):
            return value
        if value.shape != (self.rows,) or self.rows == self.batch and not by_row:
            return value
        same_device(indices=self.indices, **{name: value})
        return value[self.indices.long()]

    def result(self, return_valid) -> Any:
        return (self.samples, self.valid) if return_valid else self.samples


def take_randomness(device, batch, generator, seed, offset):
    """[seed, offset] as numbers, and as tensors or None where the numbers hold."""
    require((seed is None) == (offset is None), "offset" if offset is None else "seed", None, "both seed and offset")
    if seed is None:
        options = {} if generator is None else {"generator": generator}
        drawn = torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=device, **options)
        return [0, 0], drawn[:1], drawn[1:]
    kinds = [_kind(seed), _kind(offset)]
    (seed, seeds), (offset, offsets) = _seed("seed", seed, batch, device), _seed("offset", offset, batch, device)
    require(kinds[0] == kinds[1], "offset", kinds[1], f"{kinds[0]}, as seed is")
    return [seed, offset], seeds, offsets


def _kind(value):
    return "a tensor" if isinstance(value, torch.Tensor) else "a number"


def randomness_of(numbers, seeds, offsets):
    """Seed and offset as rooms take them: each a number and a tensor, of which one is None."""
    seed, offset = numbers
    return seed if seeds is None else None, seeds, offset if offsets is None else None, offsets


def _seed(name, value, batch, device):
    if not isinstance(value, torch.Tensor):
        # Numbers of 64 bits, signed or not, are the same 64 bits.
        return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63), None
    require(value.dtype in (torch.int64, torch.uint64), name, value.dtype, "int64")
    require(value.dim() == 1 and len(value) in (1, batch), name, tuple(value.shape), f"a number, [1] or [{batch}]")
    require(value.device == device, name, f"a tensor on {value.device}", str(device))
    return 0, value.view(torch.int64).contiguous()


def _check_each(name: str, value: torch.Tensor, batch: int) -> None:
    """Refuse what upstream refuses: one element for all rows is a number, and not a tensor."""
    require(value.shape == (batch,), name, f"a tensor {tuple(value.shape)}", f"a tensor [{batch}], or a number")


def parameter(name, value, batch, dtype):
    """A filter's parameter as a number and None, or as None and a tensor [batch]."""
    if isinstance(value, torch.Tensor):
        require(value.dtype in _NUMBERS, name, value.dtype, "a floating-point or an integer dtype")
        _check_each(name, value, batch)
        return None, value.to(dtype).contiguous()
    return (None if value is None else float(value)), None


def top_k_of(value, batch, may_be_impossible=False):
    if isinstance(value, torch.Tensor):
        # Numbers of any dtype are integers here, as upstream has it.
        require(value.dtype in _NUMBERS, "top_k", value.dtype, "int32, int64, or a dtype whose values are integers")
        _check_each("top_k", value, batch)
        return None, (value if value.dtype in INDICES else value.to(torch.int32)).contiguous()
    require(may_be_impossible or value >= 1, "top_k", value, "1 or more")
    return max(min(int(value), _MOST), 0), None


def top_p_of(value, batch, may_be_impossible=False):
    scalar, tensor = parameter("top_p", value, batch, torch.float32)
    require(may_be_impossible or scalar is None or scalar > 0, "top_p", scalar, "above 0")
    return scalar, tensor


def ordered_source(source, order):
    """The source and the order of filters, in one word for an op's schema."""
    require(order in ("top_k_first", "joint"), "filter_apply_order", repr(order), "'top_k_first', 'joint'")
    return f"{source} {order}"


def as_values(name, x):
    """Logits or probabilities in a dtype that kernels read: float64 as float32, as upstream rounds it."""
    require(x.dtype in (*DTYPES, torch.float64), name, x.dtype, "float32, bfloat16, float16, float64")
    return x.float() if x.dtype == torch.float64 else x


def as_rows(name, x):
    require(x.dim() == 2, name, tuple(x.shape), "[rows, num_classes]")
    require(0 < x.shape[1] < 1 << 30, name, tuple(x.shape), "1 to 2^30 classes")
    return as_values(name, x)


def place_of(tensor):
    """Where a seed or an offset is, in the words of a Problem."""
    if tensor is None:
        return room.SCALAR
    return room.SHARED if len(tensor) == 1 else room.PER_ROW


def kind_of(scalar, tensor):
    """How a parameter is given, in the words of a Problem."""
    if tensor is not None:
        return dtype_name(tensor.dtype)
    return "" if scalar is None else "scalar"


def given(scalar, tensor):
    return scalar if tensor is None else tensor
