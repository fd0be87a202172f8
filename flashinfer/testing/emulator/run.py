"""A launch in the emulator: arguments as the compiled kernel has them, by name, and the blocks of its grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch

from flashinfer._core import compiler
from flashinfer.testing.emulator.barriers import Clock
from flashinfer.testing.emulator.errors import EmulationError
from flashinfer.testing.emulator.language import Language
from flashinfer.testing.emulator.memory import DTYPES, Memory, TensorMap
from flashinfer.testing.emulator.schedule import Block, Schedule, Task
from flashinfer.testing.emulator.translate import Translator
from flashinfer.testing.emulator.values import pointer, scalar


class Emulator:
    """Runs launches, one after another."""

    def __init__(self, seed: int, sms: int, watch: Callable[[str, str], str | None] | None, fp8_places: int | None):
        self._sms = sms
        self.launched: list[str] = []
        self._schedule = Schedule(seed)
        language = Language(self._schedule, watch, fp8_places)
        self._translate = language.translate = Translator(language)

    def __call__(self, build, grid: tuple[int, int, int], args: tuple) -> None:
        """`args` in the order of `Build.types`."""
        self.launched.append(build.kernel.__name__)
        given = {
            name: _argument(name, compiler.promise_of(kind)[0], x)
            for (name, kind), x in zip(build.types.items(), args, strict=True)
        }
        constants = {name: self._translate(value) for name, value in build.constants.items()}
        function = self._translate(build.kernel)
        named = compiler.grouped(given | constants)
        with np.errstate(all="ignore"):
            # Two blocks to a multiprocessor: where there are more, the first ones end before the last ones begin.
            self._schedule.run(self._blocks(build, grid, function, named), 2 * self._sms)

    def _blocks(self, build, grid, function, named) -> Iterator[Task]:
        x, y, z = grid
        for k, j, i in product(range(z), range(y), range(x)):
            block = Block((i, j, k), grid, build.num_warps)
            yield Task(block, Clock(0), build.num_warps, build.kernel.__name__, _body(function, named))


def _body(function, named):
    made = function(**named)
    if hasattr(made, "gi_frame"):
        yield from made


def _argument(name: str, kind: str, x):
    if kind.startswith("tensordesc"):
        return TensorMap(name, kind, x)
    if not kind.startswith("*"):
        return scalar(x, DTYPES[kind])
    element = DTYPES[kind[1:]]
    if x is None:
        return pointer(None, 0, element)
    if not isinstance(x, torch.Tensor):
        raise EmulationError(f"{name}: a bare address {x:#x}; the emulator has to know what is there")
    memory = Memory(name, x)
    return pointer(memory, memory.base, element)
