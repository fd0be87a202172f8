"""Top-k over vocabularies and over the scores of sparse attention, against torch."""

from collections.abc import Iterator

import torch

import flashinfer
from flashinfer.testing.bench import Case, Target, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Scores of decode and prefill, and a vocabulary, on a GPU; short rows on a CPU."""
    on_gpu = device.type == "cuda"
    shapes = ((4, 65536, 2048), (64, 65536, 2048), (2048, 8192, 2048), (64, 128256, 50)) if on_gpu else ((4, 4096, 64),)
    for rows, columns, k in shapes:
        size = f"{k} of {rows}x{columns}"
        goal = (Target("us", 11),) if (rows, columns) == (4, 65536) else ()
        yield Case(f"top_k {size}", lambda d, s=(rows, columns, k): _top_k(*s, False, d), targets=goal)
        yield Case(f"top_k, sorted {size}", lambda d, s=(rows, columns, k): _top_k(*s, True, d))
        yield Case(f"top_k_page_table_transform {size}", lambda d, s=(rows, columns, k): _pages(*s, d))


def _top_k(rows, columns, k, sorted, device) -> Work:
    x = torch.randn(rows, columns, device=device)
    peers = {"torch": lambda x: x.topk(k, sorted=sorted)}
    return Work(lambda x: flashinfer.top_k(x, k, sorted), (x,), bytes=x.nbytes, peers=peers)


def _pages(rows, columns, k, device) -> Work:
    x = torch.randn(rows, columns, device=device)
    table = torch.arange(rows * columns, device=device, dtype=torch.int32).view(rows, columns)
    lengths = torch.full((rows,), columns, device=device, dtype=torch.int32)
    return Work(
        run=lambda x, table, lengths: flashinfer.top_k_page_table_transform(x, table, lengths, k),
        inputs=(x, table, lengths),
        bytes=x.nbytes,
        peers={"torch": lambda x, table, lengths: table.gather(1, x.topk(k, sorted=False).indices)},
    )
