"""Candidates before and while they are timed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashinfer._core.env import logger
from flashinfer.autotuner import measure

# Whether a thread is timing a candidate.
_measuring = threading.local()


def is_in_profile_measurement() -> bool:
    """Whether this thread is timing a candidate: a runner may then allocate as it does for every tactic.

    Returns
    -------
    bool

    Examples
    --------
    >>> from flashinfer.autotuner import is_in_profile_measurement
    >>> is_in_profile_measurement()
    False
    """
    return getattr(_measuring, "now", False)


@contextmanager
def measuring() -> Iterator[None]:
    """This thread is timing a candidate."""
    before, _measuring.now = is_in_profile_measurement(), True
    try:
        yield
    finally:
        _measuring.now = before


def results_of(runner, tactic, inputs, kwargs) -> list[torch.Tensor] | None:
    """Copies of what a runner computes, by which others are judged; None if it cannot."""
    try:
        return measure.copied(runner(list(inputs), tactic=tactic, **kwargs))
    except Exception as error:  # it is measured as every candidate is, and left out then
        logger.warning("%s cannot run its fallback: %s: %s", type(runner).__name__, type(error).__name__, error)
        return None


def why_unprepared(runner, inputs, tactics, profile, kwargs) -> str:
    """Have a runner do what it does once before its tactics are measured; why that failed, or ''."""
    try:
        ready = getattr(runner, "precompile_tactics", lambda *args, **kwargs: False)
        if not ready(list(inputs), tactics, profile, **kwargs) and _takes(runner.forward, "do_preparation"):
            runner(list(inputs), tactic=-1, do_preparation=True, **kwargs)
    except Exception as error:  # a runner that cannot prepare itself has no candidates
        return f"{type(error).__name__}: {error}"
    return ""


def _takes(function, name: str) -> bool:
    return name in inspect.signature(function).parameters
