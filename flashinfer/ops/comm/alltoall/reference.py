"""The all-to-all in torch, through the process group: every rank gets a block of the same size from every other."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.comm.alltoall import Blocks, Combine, Dispatch


def dispatch(problem: Dispatch, space, experts, payloads, places, most: int, per: int, stats=None) -> None:
    """Send the payloads of tokens to the ranks of their experts: [source rank, most, ...] at byte offset `places[i]`.

    stats : int32 [n] of this rank and int32 [ranks, n] of the space for every rank's, or None.
    """
    tokens, world = len(experts), problem.world
    place = placed(experts, world, per)
    space.place[:tokens] = place
    space.sent.copy_((place >= 0).sum(0))
    rows = [payload.reshape(tokens, -1).view(torch.uint8) if tokens else payload for payload in payloads]
    widths = [payload.shape[1:].numel() * payload.element_size() for payload in payloads]
    nothing = torch.empty(0, sum(widths), dtype=torch.uint8, device=experts.device)
    all_payloads = torch.cat(rows, 1) if tokens else nothing
    send = torch.zeros(world, most, sum(widths), dtype=torch.uint8, device=experts.device)
    # On ranks to which a token is not sent it is written to an extra row, which is cut off.
    with_extra_row = torch.zeros(world, most + 1, sum(widths), dtype=torch.uint8, device=experts.device)
    index = torch.where(place >= 0, place, most).long()
    for rank in range(world):
        with_extra_row[rank, index[:, rank]] = all_payloads
    send.copy_(with_extra_row[:, :most])
    received = space.link.all_to_all(send, "dispatch")
    space.counts.copy_(space.link.all_to_all(space.sent[:, None].clone(), "dispatch")[:, 0])
    if stats is not None:
        mine, everyone = stats
        everyone.copy_(space.link.all_gather(mine, "dispatch"))
    for part, at in zip(received.split(widths, 2), places, strict=True):
        space.view(at, part.shape, torch.uint8).copy_(part)


def placed(experts: torch.Tensor, world: int, per: int) -> torch.Tensor:
    """int32 [tokens, world]: the row of each token on each rank, -1 where it is not sent."""
    ranks = torch.arange(world, device=experts.device)
    hit = ((experts[:, :, None] >= ranks * per) & (experts[:, :, None] < (ranks + 1) * per)).any(1)
    return torch.where(hit, hit.cumsum(0) - 1, -1).int()


def combine(problem: Combine, space, rows, out, at: int, most: int) -> None:
    """Add the rows [source rank, most, hidden] of the ranks that this rank's tokens went to, in rank order."""
    received = space.link.all_to_all(rows, "combine")
    place = space.place[: len(out)]
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for rank in range(problem.world):
        picked = received[rank, place[:, rank].clamp(min=0).long()].float()
        total += torch.where(place[:, rank, None] >= 0, picked, 0)
    out.copy_(total)


def blocks(problem: Blocks, link, given, outs) -> None:
    """Exchange row [i, r] with rank r, of two tensors [rows, world, ...]."""
    for x, out in zip(given, outs, strict=True):
        out.copy_(link.all_to_all(x.transpose(0, 1).contiguous(), "all-to-all").transpose(0, 1))


# One module for three ops, which all are calls of the link's all_to_all.
IMPLEMENTATION = Implementation({Dispatch: dispatch, Combine: combine, Blocks: blocks})
