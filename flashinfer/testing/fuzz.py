"""Random calls of public functions, from a seed: a call is right, or a ValueError names one of its arguments.

A family is a function of a `Draw` that gives a `Call`: the public function, its arguments by name, and what checks its
result. `run` makes one such call; the seed of its draw is all that reproduces it.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from flashinfer.testing import generate, guard
from flashinfer.testing.compare import assert_close

# Of engines: odd numbers of heads, head dims beside powers of two, a vocabulary and hidden sizes of real models.
HEADS = ((1, 1), (4, 2), (8, 1), (40, 5), (7, 7), (6, 2))
HEAD_DIMS = (16, 64, 80, 112, 128, 160, 256)
PAGE_SIZES = (1, 4, 5, 16, 24, 64)
LENGTHS = (0, 1, 2, 15, 17, 63, 65, 129, 1000, 4097, 33333)
HIDDEN = (1, 8, 33, 64, 129, 1000, 2880, 5120, 7168)
VOCABULARIES = (1, 2, 31, 1000, 32000, 151936)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Call:
    """function(**arguments), and `check(result)`, which raises an AssertionError. `also` names more arguments that an
    error may name: those of a constructor or a plan behind `function`."""

    function: Callable
    arguments: dict
    check: Callable
    also: tuple[str, ...] = ()

    def names(self) -> set[str]:
        """What an error may name."""
        parts = set(self.arguments) | set(self.also)
        return parts | set(inspect.signature(self.function).parameters)


@dataclass
class Draw:
    """The choices of one call: `largest` bounds the elements of a tensor, `halves` are the 16-bit types that run on
    `device`, `backend` is for functions that take one."""

    seed: int
    device: torch.device
    largest: int = 1 << 14
    halves: tuple = HALVES
    backend: str = "auto"
    random: random.Random = field(init=False)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        torch.manual_seed(self.seed)

    def pick(self, *values):
        return self.random.choice(values)

    def chance(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def fitting(self, values, beside: int = 1):
        """One of `values` with which `beside` elements of each stay in bounds; the smallest if none does."""
        fits = [value for value in values if value * beside <= self.largest]
        return self.random.choice(fits or [min(values)])

    def half(self) -> torch.dtype:
        return self.random.choice(self.halves)

    def float(self) -> torch.dtype:
        return self.random.choice((*self.halves, torch.float32))

    def index(self) -> torch.dtype:
        return self.pick(torch.int32, torch.int64)

    def lengths(self, batch: int, most: int) -> list[int]:
        return [self.pick(*(n for n in LENGTHS if n <= most)) for _ in range(batch)]

    def laid(self, x: torch.Tensor) -> torch.Tensor:
        """x, or the same values with gaps between rows; the last dimension stays contiguous."""
        if x.dim() < 2 or not x.numel() or self.chance(0.6):
            return x
        return generate.strided(x, self.integer(0, x.dim() - 2), self.pick(8, 16))

    def ints(self, values, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Integers, sometimes a slice of a larger table."""
        x = torch.tensor(values, dtype=dtype or self.index(), device=self.device)
        if self.chance(0.3):
            pad = torch.full((3,), 1 << 20, dtype=x.dtype, device=self.device)
            x = torch.cat((pad, x.flatten(), pad))[3:-3].view(x.shape)
        return x

    def values(self, *shape: int, dtype: torch.dtype, kinds=("normal", "wide", "ties", "small")) -> torch.Tensor:
        """Random values of one kind: wide ones span decades, ties are few numbers, small ones reach denormals."""
        x, kind = torch.randn(*shape, dtype=torch.float32, device=self.device), self.pick(*kinds)
        if kind == "wide":
            x = x * 30
        elif kind == "ties":
            x = (x * 2).round() / 2
        elif kind == "small":
            x = x * 2.0 ** -self.integer(6, 20)
        return x.to(dtype)

    def tensor(self, *shape: int, dtype: torch.dtype, **options) -> torch.Tensor:
        """`values`, sometimes with gaps."""
        return self.laid(self.values(*shape, dtype=dtype, **options))

    def spoil(self, x: torch.Tensor) -> torch.Tensor:
        """x with NaN or an infinity in one element."""
        if x.numel():
            x.view(-1)[self.integer(0, x.numel() - 1)] = self.pick(float("nan"), float("inf"), float("-inf"))
        return x


def close(out: torch.Tensor, formula: Callable, what: str = "out", terms: float = 0.0) -> None:
    """`out` against formula(torch.float64), bounded by formula(torch.float32) rounded to the dtype of `out`; `terms` as
    in `assert_close`."""
    assert_close(out, formula(torch.float32).to(out.dtype), formula(torch.float64), what, terms=terms)


class Wrong(AssertionError):
    """A call that did neither what it should nor refuse its arguments."""


def names_an_argument(error: ValueError, names: set[str]) -> bool:
    """Whether the text of an error has one of the names as a word."""
    return bool(set(re.findall(r"\w+", str(error))) & names)


def run(family: Callable, draw: Draw) -> str:
    """Make one call and check it; returns 'right' or 'refused'.

    Raises
    ------
    Wrong
        A result beyond the rules of `compare`, memory written beside a tensor, or an error that is not a ValueError or
        names no argument.
    """
    call = family(draw)
    try:
        result = call.function(**call.arguments)
    except ValueError as error:
        if not names_an_argument(error, call.names()):
            raise Wrong(f"{_described(call)}: an error that names no argument: {error}") from error
        return "refused"
    except Exception as error:
        raise Wrong(f"{_described(call)}: {type(error).__name__}: {error}") from error
    try:
        call.check(result)
        guard.check()
    except AssertionError as error:
        raise Wrong(f"{_described(call)}: {error}") from error
    return "right"


def _described(call: Call) -> str:
    name = getattr(call.function, "__name__", repr(call.function))
    return f"{name}({described(call.arguments)})"


def described(arguments: dict) -> str:
    """Arguments as text, tensors by shape, dtype and strides."""

    def text(value):
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type == "meta":
                return f"{str(value.dtype)[6:]}{list(value.shape)} {value.layout} on {value.device}"
            small = value.numel() <= 8 and not value.dtype.is_floating_point
            values = f" {value.tolist()}" if small else ""
            return f"{str(value.dtype)[6:]}{list(value.shape)} {value.stride()}{values}"
        if isinstance(value, (tuple, list)):
            return "(" + ", ".join(map(text, value)) + ")"
        return repr(value)

    return ", ".join(f"{key}={text(value)}" for key, value in arguments.items())
