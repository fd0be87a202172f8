"""The weighted sum of experts' rows against copy bandwidth, and against torch."""

from collections.abc import Iterator

import torch

from flashinfer.testing.bench import Case, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Decode to prefill of DeepSeek-V3 and Mixtral on a GPU; a few tokens on a CPU."""
    if device.type == "cuda":
        shapes = [(tokens, 8, 7168) for tokens in (1, 64, 4096)] + [(4096, 2, 4096)]
    else:
        shapes = [(64, 8, 512)]
    for tokens, top_k, hidden in shapes:
        name = f"{tokens} tokens of {top_k} x {hidden}"
        # FlashInfer does this inside its layers.
        yield Case(name, lambda d, s=(tokens, top_k, hidden): _finalize(*s, d), ways=lambda d: {})


def _finalize(tokens, top_k, hidden, device) -> Work:
    pairs = tokens * top_k
    y = torch.randn(pairs, hidden, device=device).bfloat16()
    row = torch.randperm(pairs, device=device).int().view(tokens, top_k)
    weights = torch.rand(tokens, top_k, device=device)
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)

    from flashinfer.fused_moe.routing import finalize

    def run(y, row, weights, out):
        finalize(y, row, weights, out)
        return out

    def by_torch(y, row, weights, out):
        return torch.bmm(weights.bfloat16()[:, None], y[row.flatten()].view(tokens, top_k, hidden), out=out[:, None])

    def check(result):
        truth = (y[row.flatten()].view(tokens, top_k, hidden).float() * weights[..., None]).sum(1)
        torch.testing.assert_close(result.float(), truth, rtol=1e-2, atol=1e-2)

    moved = y.nbytes + out.nbytes
    return Work(run, (y, row, weights, out), bytes=moved, peers={"torch": by_torch}, check=check)
