"""How much this package logs."""

from __future__ import annotations

import logging

from flashinfer._core.checks import require
from flashinfer._core.env import logger

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def set_log_level(lvl_str: str) -> None:
    """Log messages of this package from a level on, on the logger "flashinfer".

    Parameters
    ----------
    lvl_str : str
        "trace", "debug", "info", "warn", "error" or "critical".

    Raises
    ------
    ValueError
        Another name.

    Examples
    --------
    >>> from flashinfer.utils import set_log_level
    >>> set_log_level("warn")
    """
    require(lvl_str in _LEVELS, "lvl_str", repr(lvl_str), ", ".join(_LEVELS))
    logger.setLevel(_LEVELS[lvl_str])
