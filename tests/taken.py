"""What a call on a CPU shows of a GPU: a problem that the reference takes has a kernel on every chip.

Without this check a call could pass every test on a CPU and be refused on a card.
"""

from contextlib import contextmanager
from functools import lru_cache

from flashinfer._core.checks import UnsupportedConfig
from flashinfer._core.dispatch import Op
from flashinfer._core.target import GPU_ARCHS, named

# Why a chip may refuse what the reference takes.
KNOWN = (
    "ranks do not reach each other's memory",  # a group of processes without a GPU
    "this chip has no conversion to it",  # FP8 before compute capability 8.9
    "do not fit in registers",  # rows of more than 32768 elements, states of more than 256
    "do not fit in shared memory",
)


@contextmanager
def checked():
    """Inside it, `Op.select` fails where the reference takes a problem for which a chip has no kernel."""
    select = Op.select

    @lru_cache(maxsize=None)
    def without_kernel(op, problem):
        for chip in map(named, GPU_ARCHS):
            try:
                select(op, problem, chip)
            except UnsupportedConfig as error:
                if not any(reason in str(error) for reason in KNOWN):
                    return f"{chip.arch}: {error}"
        return ""

    def select_and_check(op, problem, target, backend="auto"):
        choice = select(op, problem, target, backend)
        if target.is_cpu and choice.variant.name == "reference":
            why = without_kernel(op, problem)
            assert not why, why
        return choice

    Op.select = select_and_check
    try:
        yield
    finally:
        Op.select = select
