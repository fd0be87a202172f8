"""Adapters of experts against copy bandwidth, and against torch."""

from collections.abc import Iterator

import torch

from flashinfer.testing.bench import Case, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Decode of a layer of 64 experts, 8 of them for each token, with 4 adapters, on a GPU; a few tokens on a CPU."""
    shapes = [(1, 8, 4096, 16), (32, 8, 4096, 16)] if device.type == "cuda" else [(2, 2, 256, 8)]
    for tokens, top_k, hidden, rank in shapes:
        name = f"{tokens} tokens of {top_k} x {hidden}, rank {rank}"
        yield Case(name, lambda d, s=(tokens, top_k, hidden, rank): _adapters(*s, d), ways=lambda d: {})


def _adapters(tokens, top_k, hidden, rank, device) -> Work:
    experts, pairs = 64, tokens * top_k
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    a = torch.randn(4, experts, rank, hidden, device=device).mul(hidden**-0.5).bfloat16()
    b = torch.randn(4, experts, hidden, rank, device=device).mul(rank**-0.5).bfloat16()
    token = torch.arange(pairs, device=device) // top_k
    expert = torch.randint(experts, (pairs,), device=device)
    adapter, weights = torch.randint(4, (tokens,), device=device), torch.rand(pairs, device=device)

    from flashinfer.fused_moe import bgmv_moe

    def run(x, a, b, token, expert, adapter, weights):
        return bgmv_moe(x, [a], [b], token, expert, adapter, weights, experts)

    def by_torch(x, a, b, token, expert, adapter, weights):
        which = adapter[token]
        low = torch.bmm(a[which, expert], x[token, :, None])
        rows = torch.bmm(b[which, expert], low)[..., 0] * weights[:, None].to(x.dtype)
        return rows.view(tokens, top_k, hidden).sum(1)

    def check(result):
        truth = by_torch(*(given.float() if given.is_floating_point() else given for given in inputs)).float()
        torch.testing.assert_close(result.float(), truth, rtol=3e-2, atol=3e-2)

    inputs = (x, a, b, token, expert, adapter, weights)
    moved = 2 * pairs * rank * hidden * a.element_size()
    return Work(run, inputs, bytes=moved, peers={"torch": by_torch}, check=check)
