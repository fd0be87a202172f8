"""Gluon kernels on a CPU, with numpy: their real host path, their source as it is, and adversarial timing.

    with emulate("90a", seed=3):
        flashinfer.single_prefill_with_kv_cache(q, k, v, backend="sm90")  # CPU tensors

docs/rooms/emulator.md says what it sees and what it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from flashinfer._core import launch
from flashinfer._core.target import named, override
from flashinfer.testing.emulator.errors import BarrierError, Deadlock, EmulationError, Hazard, OutOfBounds

__all__ = ["BarrierError", "Deadlock", "EmulationError", "Hazard", "OutOfBounds", "emulate"]


@contextmanager
def emulate(
    arch: str = "90a", *, seed: int = 0, sms: int = 2, fp8_places: int | None = None,
    watch: Callable[[str, str], str | None] | None = None,
) -> Iterator[list[str]]:  # fmt: skip
    """Take every device for a chip of that architecture, and run its Gluon kernels here, on CPU tensors.

    Parameters
    ----------
    arch : str
        "90a" and so on: a name of `flashinfer._core.target`.
    seed : int
        Of the order in which warps run and copies land. 0, 1 and 2 differ most: copies come as late as they can, in
        between, and early.
    sms : int
        Multiprocessors that there are: so many blocks a persistent kernel has.
    fp8_places : int, optional
        Binary places that sums of FP8 products keep, 13 by what is published of Hopper. Without it, float32's.
    watch : callable (operation, place) -> str or None, optional
        Called before each operation that orders others, with its place in the source; what it returns goes wrong there,
        for tests that break a kernel. Of a "wait": "skip" or "phase", the other parity; of an "arrive": "skip" or
        "twice"; of an "expect": "fewer" or "more" bytes; of "fence", "product wait", "copy wait" and "block barrier":
        "skip".

    Yields
    ------
    list of str
        The kernels that it ran, by name. What Triton's interpreter runs, under TRITON_INTERPRET=1, is not among them.

    Raises
    ------
    Hazard, BarrierError, Deadlock, OutOfBounds
        What a kernel does wrong, with its line. All are EmulationErrors.
    EmulationError
        A kernel uses what the emulator does not know.
    """
    from flashinfer.testing.emulator.run import Emulator

    emulator = Emulator(seed, sms, watch, fp8_places)
    before, launch.emulator = launch.emulator, emulator
    try:
        with override(replace(named(arch), sms=sms)):
            yield emulator.launched
    finally:
        launch.emulator = before
