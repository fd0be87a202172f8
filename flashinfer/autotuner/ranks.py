"""Ranks that tune together choose the same: by the sums of their times."""

from __future__ import annotations

import torch

_group = None


def set_autotune_process_group(group) -> None:
    """Average times over the ranks of a `torch.distributed` group, so that all choose the same; None ends it.

    The ranks have to tune the same operations in the same order, and to begin with equal choices.
    """
    global _group
    _group = group


def get_autotune_process_group():
    """The group that `set_autotune_process_group` was given, or None."""
    return _group


def agreed(times: list[float], device: torch.device) -> list[float]:
    """The sums of all ranks' times; what failed on one has failed."""
    if _group is None:
        return times
    from torch import distributed

    on = device if distributed.get_backend(_group) == "nccl" else torch.device("cpu")
    counts = torch.tensor([len(times), -len(times)], dtype=torch.int64, device=on)
    distributed.all_reduce(counts, distributed.ReduceOp.MIN, group=_group)
    if counts[0] != -counts[1]:
        raise RuntimeError(f"ranks tune other candidates: from {int(counts[0])} to {-int(counts[1])} of them")
    summed = torch.tensor(times, dtype=torch.float64, device=on)
    distributed.all_reduce(summed, group=_group)
    return summed.tolist()
