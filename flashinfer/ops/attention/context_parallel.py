"""Context parallelism: the keys of a request dealt out to ranks, one after another."""

from __future__ import annotations

import torch


def local_requests(
    tables: torch.Tensor, local_lens: torch.Tensor, global_lens: torch.Tensor, q_len: int, world: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request per query, of the keys of this rank that the query sees.

    Local key c stands at c * world + rank. The queries of a request are its last tokens, so the keys that query t sees
    end where no block of queries has its diagonal; as a request of its own it needs no mask. It costs a read of the
    request's keys for each of its queries.

    Parameters
    ----------
    tables : int32 Tensor [batch, max_pages]
    local_lens, global_lens : int32 Tensor [batch]
        Keys of each request on this rank, and on all.
    q_len : int
        Queries of every request.
    world, rank : int

    Returns
    -------
    tables : int32 Tensor [batch * q_len, max_pages]
    lens : int32 Tensor [batch * q_len]
    """
    position = global_lens[:, None] - q_len + torch.arange(q_len, device=tables.device, dtype=torch.int32)
    seen = torch.div(position - rank, world, rounding_mode="floor") + 1
    lens = torch.minimum(seen.clamp(min=0), local_lens[:, None])
    return tables.repeat_interleave(q_len, 0), lens.flatten().to(torch.int32)
