"""A process with a card that is not there, for functions of tests."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def card_process(base, machine_code=False):
    """Gives what calls a function of a test's module in such a process; the function gets the card.

    Nothing runs the kernels there, so they are PTX that nobody optimised, which takes seven tenths of the time, unless
    `machine_code` is asked for. Their cache is in `base`.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_insert, initargs=(base, machine_code)) as process:
        yield lambda function, *args: process.submit(_with_card, function, *args).result()


def _insert(base, machine_code):
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(base)
    global CARD
    from tests.core import card

    CARD = card.insert()
    if not machine_code:
        _end_with_ptx()


def _end_with_ptx():
    from triton import knobs

    from flashinfer._core import compiler

    def end_with_ptx(backend, stages, *others):
        stages["cubin"] = lambda ptx, metadata: ptx.encode()

    os.environ["DISABLE_LLVM_OPT"] = "1"
    knobs.runtime.add_stages_inspection_hook = end_with_ptx
    compiler._resources = lambda cubin: {"registers": 0, "stack_bytes": 0}


def _with_card(function, *args):
    return function(CARD, *args)
