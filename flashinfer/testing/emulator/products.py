"""Products of a warpgroup: on their way from where they begin to where they are waited for."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from flashinfer.testing.emulator.barriers import Clock
from flashinfer.testing.emulator.errors import EmulationError, Hazard, here
from flashinfer.testing.emulator.shared import Shared
from flashinfer.testing.emulator.values import Tensor


class Sum(Tensor):
    """The accumulator of a product in flight: reading it before the product is done is an error."""

    __slots__ = ("product",)

    def __init__(self, product: Product, dtype, layout, shape):
        super().__init__(None, dtype, layout)
        self.product = product
        self._a = np.broadcast_to(np.float32(np.nan), shape)

    @property
    def a(self):
        if not self.product.is_done:
            raise Hazard(f"the sum of {self.product.where} is used before it was waited for, at {here()}")
        return self._a


class Product:
    """One wgmma: it reads its operands at any time from its start until it is waited for."""

    def __init__(self, a, b, acc, use_acc: bool, shape, fp8_places: int | None):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self._places = fp8_places if a.dtype.primitive_bitwidth == 8 else None
        self.where, self.is_done = here(), False
        for operand in (a, b):
            if isinstance(operand, Shared):
                operand.begin_reading("multiplied")
        self.result = Sum(self, acc.dtype, acc.layout, shape)

    def finish(self, clock: Clock) -> None:
        a, b = (x.values() if isinstance(x, Shared) else x.a for x in (self.a, self.b))
        for operand in (self.a, self.b):
            if isinstance(operand, Shared):
                operand.end_reading(clock)
        if self._places is not None:
            self.result._a = _short_sums(a, b, self.acc.a if self.use_acc else np.float32(0), self._places)
        else:
            found = np.matmul(a, b, dtype=np.float32)
            self.result._a = found + self.acc.a if self.use_acc else found
        self.is_done = True
        self.a = self.b = self.acc = None


def start(a, b, acc, use_acc: bool, fp8_places: int | None) -> Product:
    shape = [a.shape[0], b.shape[1]]
    if not isinstance(b, Shared) or a.dtype != b.dtype or a.shape[1] != b.shape[0] or acc.dtype != tl.float32:
        raise EmulationError(f"wgmma of {a.dtype}{a.shape}, {b.dtype}{b.shape} and {acc.dtype}, at {here()}")
    # Not acc.a: a product may be added to one that is on its way.
    if list(acc._a.shape) != shape:
        raise EmulationError(f"wgmma of {a.shape} and {b.shape} to {list(acc._a.shape)}, at {here()}")
    return Product(a, b, acc, use_acc, shape, fp8_places)


def _short_sums(a: np.ndarray, b: np.ndarray, acc: np.ndarray, places: int) -> np.ndarray:
    """a b + acc as Hopper's tensor cores add FP8 by what is published: 32 products and the sum so far are aligned to
    the largest of them and cut to so many binary places, and so is their sum (DeepSeek-V3 Technical Report, 2024,
    3.3.2)."""
    total = np.broadcast_to(acc, (a.shape[0], b.shape[1])).astype(np.float64)
    for k in range(0, a.shape[1], 32):
        parts = a[:, None, k : k + 32].astype(np.float64) * b.T[None, :, k : k + 32]
        addends = np.concatenate((parts, total[..., None]), -1)
        total = _cut(addends, np.abs(addends).max(-1, keepdims=True), places).sum(-1)
        total = _cut(total, np.abs(total), places)
    return total.astype(np.float32)


def _cut(x: np.ndarray, largest: np.ndarray, places: int) -> np.ndarray:
    grid = np.exp2(np.floor(np.log2(np.maximum(largest, 2.0**-60))) - places)
    return np.trunc(x / grid) * grid
