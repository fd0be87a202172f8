"""The memory of one user of the all-to-all: what arrives, what peers fetch, and where each token went."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.ops.comm.capability import connect
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.symmetric import MOST_RANKS, Link, header

# Every part of a space begins at a multiple of so many bytes: a line of L2.
ALIGNMENT = 128


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Space:
    """`nbytes` on every rank, to exchange the tokens of up to `most` a rank.

    Between two dispatches there is one combine. That is what keeps a rank from writing where another still reads: who
    dispatches has combined, so every peer had the rows for it; and who has received a dispatch knows that every peer
    has combined. So nothing is kept twice.

    Attributes
    ----------
    link : Link or Collective
    capability : Capability
    counts : Tensor
        int32 [world]: rows that arrived from each rank.
    counts_at : int
        Where that is in the buffer of every rank.
    first : int
        Where the bytes of the user begin.
    place : Tensor
        int32 [most, world]: the row on each rank that a token of the last dispatch became; -1 where it did not go.
    sent : Tensor
        int32 [world]: rows that went to each rank.
    stats_experts : int
        Experts whose statistics lie at the beginning of the user's bytes, int32 [world, n].
    """

    AREA = 16

    def __init__(self, ranks: Ranks, nbytes: int, most: int, device: torch.device):
        self.ranks, self.nbytes, self.most, self.device = ranks, nbytes, most, device
        self.link, self.capability = connect(ranks, self.AREA, device, behind=ALIGNMENT + nbytes)
        if isinstance(self.link, Link):
            self._buffer, self.counts_at = self.link.memory.own, header(ranks.size, self.AREA)
        else:
            self._buffer = torch.zeros(ALIGNMENT + nbytes, dtype=torch.uint8, device=device)
            self.counts_at = 0
        require(ranks.size <= MOST_RANKS, "ranks", ranks.size, f"at most {MOST_RANKS}")
        self.first, self.stats_experts = self.counts_at + ALIGNMENT, 0
        self.counts: torch.Tensor = self.view(self.counts_at, (ranks.size,), torch.int32)
        self.place = torch.full((most, ranks.size), -1, dtype=torch.int32, device=device)
        self.sent = torch.zeros(ranks.size, dtype=torch.int32, device=device)

    def view(self, at: int, shape, dtype: torch.dtype) -> torch.Tensor:
        """This rank's bytes from `at` on as a tensor."""
        end = at + torch.Size(shape).numel() * dtype.itemsize
        return self._buffer[at:end].view(dtype).view(torch.Size(shape))

    def offset(self, view: torch.Tensor) -> int:
        """Where the bytes of a view of this space begin."""
        return view.data_ptr() - self._buffer.data_ptr()

    def arrange(self, rows: list[int], most: int, first: int = 0) -> tuple[list[int], int]:
        """Where payloads of so many bytes a row begin, [world, most, row] each, and where the rows to combine do.

        first : bytes to leave before them. ValueError if they do not fit.
        """
        places, at = [], self.first + first
        for row in rows:
            places.append(at)
            at = aligned(at + self.ranks.size * most * row)
        self.check_room(at)
        return places, at

    def check_room(self, end: int) -> None:
        require(end - self.first <= self.nbytes, "workspace", f"{self.nbytes} bytes on each rank",
                f"at least {end - self.first} for these payloads")  # fmt: skip

    def close(self) -> None:
        self.counts = self._buffer = None
        self.link.close()
