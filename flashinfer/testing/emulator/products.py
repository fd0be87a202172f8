"""Products of a warpgroup: on their way from where they begin to where they are waited for."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from flashinfer.testing.emulator.barriers import Clock
from flashinfer.testing.emulator.errors import EmulationError, Hazard, here
from flashinfer.testing.emulator.shared import Shared
from flashinfer.testing.emulator.values import Tensor


class Sum(Tensor):
    """An accumulator, which nobody may look at before its product is done."""

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

    def __init__(self, a, b, acc, use_acc: bool, shape):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
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
        found = np.matmul(a, b, dtype=np.float32)
        if self.use_acc:
            found = found + self.acc.a
        self.result._a = found
        self.is_done = True
        self.a = self.b = self.acc = None


def start(a, b, acc, use_acc: bool) -> Product:
    shape = [a.shape[0], b.shape[1]]
    if not isinstance(b, Shared) or a.dtype != b.dtype or a.shape[1] != b.shape[0] or acc.dtype != tl.float32:
        raise EmulationError(f"wgmma of {a.dtype}{a.shape}, {b.dtype}{b.shape} and {acc.dtype}, at {here()}")
    # Not acc.a: a product may be added to one that is on its way.
    if list(acc._a.shape) != shape:
        raise EmulationError(f"wgmma of {a.shape} and {b.shape} to {list(acc._a.shape)}, at {here()}")
    return Product(a, b, acc, use_acc, shape)
