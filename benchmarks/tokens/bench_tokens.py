"""What an engine runs per token: rows of several rooms' benchmarks, each stated in its room, in one table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from table import HEADLINES, selected

from flashinfer.testing.bench import Case, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Prefill and decode batches on a GPU; those of a small model on a CPU."""
    for room, case in selected(device):
        make = partial(_beside_a_copy, case.make)
        yield replace(case, make=make, group=room, headline=case.name in HEADLINES)


def _beside_a_copy(make, device: torch.device) -> Work:
    """The work of a row, and where bandwidth counts a copy of as many bytes: the ceiling is that of a far larger one,
    in which launch and last wave do not show.
    """
    work = make(device)
    if work.bytes < 1 << 26:
        return work
    source = torch.empty(work.bytes // 2, dtype=torch.uint8, device=device)
    copy = Work(lambda source, target: target.copy_(source), (source, torch.empty_like(source)))
    return replace(work, peers=work.peers | {"copy of its bytes": copy})
