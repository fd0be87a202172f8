"""Ranks that tune together choose the same: by the sums of their times."""

from __future__ import annotations

from flashinfer.ops.comm.meeting import Ranks

# Seconds that a rank waits for the others' times: they compile candidates at different speeds.
DEADLINE = 600.0

_group, _ranks = None, None


def set_autotune_process_group(group) -> None:
    """Average times over the ranks of a `torch.distributed` group, so that all choose the same; None ends it.

    The ranks have to tune the same operations in the same order, and to begin with equal choices. A rank that does not
    come to an operation within 600 s is a TimeoutError on the others, which names it.

    Parameters
    ----------
    group : ProcessGroup or None
        The ranks that tune together.

    Raises
    ------
    TimeoutError
        Not here: in `AutoTuner.choose_one`, of a rank that does not come.

    Examples
    --------
    >>> from flashinfer.autotuner import set_autotune_process_group
    >>> set_autotune_process_group(None)
    """
    global _group, _ranks
    if _ranks is not None:
        _ranks.close()
    _group, _ranks = group, None


def get_autotune_process_group():
    """The group that `set_autotune_process_group` was given, or None.

    Returns
    -------
    ProcessGroup or None
        None where times are this process's own.

    Examples
    --------
    >>> from flashinfer.autotuner import get_autotune_process_group
    >>> get_autotune_process_group() is None
    True
    """
    return _group


def agreed(times: list[float]) -> list[float]:
    """The sums of all ranks' times; what failed on one has failed."""
    global _ranks
    if _group is None:
        return times
    if _ranks is None:
        _ranks = Ranks(_group)
        _ranks.meet("tuning", DEADLINE)
    # Infinity, for what failed, is no literal.
    everyone = [[float.fromhex(time) for time in row] for row in _ranks.gather([time.hex() for time in times])]
    counts = [len(row) for row in everyone]
    if min(counts) != max(counts):
        raise RuntimeError(f"ranks tune other candidates: from {min(counts)} to {max(counts)} of them")
    return [sum(row) for row in zip(*everyone, strict=True)]
