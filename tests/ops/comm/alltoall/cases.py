"""An expert-parallel layer whose expert e multiplies by e + 1: what each rank has, does and should get."""

import torch

from flashinfer.testing.compare import assert_bitwise, assert_close

HIDDEN, TOP_K, PER = 48, 3, 2
INVALID = 99


def inputs(rank, world, tokens, dtype, device="cpu", seed=0):
    """Rows, expert ids (-1, ids beyond, and one twice among them), and weights."""
    g = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(tokens, HIDDEN, generator=g).to(dtype)
    ids = torch.randint(0, world * PER, (tokens, TOP_K), generator=g, dtype=torch.int32)
    ids[torch.rand(tokens, TOP_K, generator=g) < 0.15] = -1
    if tokens > 2:
        ids[1] = ids[1, 0]
        ids[2] = -1
        ids[0, 1] = world * PER
    return x.to(device), ids.to(device), torch.rand(tokens, TOP_K, generator=g).to(device)


def payloads(x, ids, weights):
    """Rows, ids, weights, and a tag of one odd byte."""
    tag = torch.arange(len(x), device=x.device).to(torch.uint8)[:, None].expand(-1, 3).contiguous()
    return [x, ids, weights, tag]


def compute(received, rank):
    """What the experts of `rank` make of the rows that came, in float32; NaN in rows that are none."""
    x, ids, weights = received[:3]
    mine = (ids >= rank * PER) & (ids < (rank + 1) * PER)
    factor = (torch.where(mine, weights, 0) * (ids + 1)).sum(-1, keepdim=True)
    y = x.float() * factor
    return torch.where((ids != INVALID).any(-1, keepdim=True), y, torch.nan)


def check_received(received, rank, everyone):
    """Every row of every rank that has an expert here came once, in order, and the ids of the rest are marked."""
    for source, (x, ids, weights) in enumerate(everyone):
        here = ((ids >= rank * PER) & (ids < (rank + 1) * PER)).any(1)
        count = int(here.sum())
        for got, sent in zip(received, payloads(x, ids, weights), strict=True):
            assert_bitwise(got[source, :count].contiguous(), sent[here].to(got.device))
        assert (received[1][source, count:] == INVALID).all()


def check(out, rank, everyone, world):
    x, ids, weights = everyone[rank]
    known = (ids >= 0) & (ids < world * PER)
    factors = torch.where(known, weights.double() * (ids + 1), 0)
    truth = x.double() * factors.sum(-1, keepdim=True)
    same = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for to in range(world):
        mine = (ids >= to * PER) & (ids < (to + 1) * PER)
        part = x.float() * (torch.where(mine, weights, 0) * (ids + 1)).sum(-1, keepdim=True)
        same += part.to(x.dtype).float()
    assert_close(out, same.to(out.dtype), truth, "the combined rows")
