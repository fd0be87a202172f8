"""A process with a card that is not there, for functions of tests."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def card_process():
    """Gives what calls a function of a test's module in such a process; the function gets the card."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_insert) as process:
        yield lambda function, *args: process.submit(_with_card, function, *args).result()


def _insert():
    os.environ.pop("TRITON_INTERPRET", None)
    global CARD
    from tests.core import card

    CARD = card.insert()


def _with_card(function, *args):
    return function(CARD, *args)
