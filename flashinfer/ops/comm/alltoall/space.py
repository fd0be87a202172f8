"""The workspace of the MoE all-to-all: received payloads, rows for combine, and the destination of each token."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer.ops.comm.capability import connect
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.symmetric import MOST_RANKS, Link, header

# Each region of a space begins at a multiple of this number of bytes, a cache line.
ALIGNMENT = 128


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Space:
    """`nbytes` of memory on every rank, for the exchange of up to `most` tokens of each rank.

    Dispatch and combine alternate, which makes one buffer enough. A rank that dispatches has combined before, so all
    peers had provided their rows, and had read the previous dispatch. A rank that has received a dispatch knows that
    all peers have combined, so it may overwrite its rows for combine.

    Attributes
    ----------
    link : Link or Collective
    capability : Capability
    counts : Tensor
        int32 [world]: the number of rows received from each rank.
    counts_at : int
        The byte offset of `counts` in every rank's buffer.
    first : int
        The byte offset of the payloads.
    place : Tensor
        int32 [most, world]: for each token of the last dispatch its row on each rank; -1 where it was not sent.
    sent : Tensor
        int32 [world]: the number of rows sent to each rank.
    stats_experts : int
        n of the statistics int32 [world, n] that precede the payloads; 0 for none.
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
        """The byte offset of a view of this space."""
        return view.data_ptr() - self._buffer.data_ptr()

    def arrange(self, rows: list[int], most: int, first: int = 0) -> tuple[list[int], int]:
        """The byte offset of each payload [world, most, bytes of a row], and the offset behind the last one.

        rows : bytes of a row of each payload. first : bytes to skip before the payloads. ValueError if they do not fit.
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
