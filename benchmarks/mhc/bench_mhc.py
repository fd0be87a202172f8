"""Hyper-connections of four streams, against copy bandwidth; DeepSeek's hidden size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from flashinfer.mhc import mhc_post, mhc_pre_big_fuse_with_prenorm
from flashinfer.testing.bench import Case, Target, Work

STREAMS = 4


def cases(device: torch.device) -> Iterator[Case]:
    gpu = device.type == "cuda"
    for tokens in (1, 64, 4096) if gpu else (3,):
        hidden = 7168 if gpu else 64
        target = Target("us", 3) if tokens <= 64 else Target("copy", 0.92)
        for name, make in (("post", _post), ("pre", _pre)):
            yield Case(f"mHC {name} {tokens}x{hidden}", partial(make, tokens, hidden), targets=(target,))


def _near(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((got.double() - expected).norm() / expected.norm()).nan_to_num(torch.inf)
    assert error < 4e-3, f"wrong result: errs by {error:.3g} of the norm"


def _post(tokens, hidden, device) -> Work:
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    streams = torch.randn(tokens, STREAMS, hidden, device=device).bfloat16()
    post, comb = torch.rand(tokens, STREAMS, device=device), torch.rand(tokens, STREAMS, STREAMS, device=device)

    def check(out):
        mixed = torch.einsum("tih,tij->tjh", streams.double(), comb.double())
        _near(out, x.double()[:, None] * post.double()[..., None] + mixed)

    return Work(
        mhc_post,
        (x, streams, post, comb),
        bytes=x.nbytes + 2 * streams.nbytes + post.nbytes + comb.nbytes,
        check=check,
        peers={"torch": _post_by_torch},
    )


def _post_by_torch(x, streams, post, comb):
    return torch.baddbmm(x[:, None] * post[..., None].bfloat16(), comb.bfloat16().mT, streams)


def _pre(tokens, hidden, device) -> Work:
    """The sums of squares are its own."""
    streams = torch.randn(tokens, STREAMS, hidden, device=device).bfloat16()
    mix = torch.randn(tokens, 24, device=device) * (STREAMS * hidden) ** 0.5
    scale, base = torch.rand(3, device=device), torch.randn(24, device=device)

    def check(result):
        root = (streams.double().square().flatten(1).mean(1) + 1e-6).sqrt()
        logits = mix.double()[:, :STREAMS] / root[:, None] * scale[0].double() + base[:STREAMS].double()
        pre = logits.sigmoid() + 1e-6
        _near(result[2], torch.einsum("ti,tih->th", pre, streams.double()))

    return Work(
        mhc_pre_big_fuse_with_prenorm,
        (mix, streams, scale, base),
        bytes=streams.nbytes + mix.nbytes + tokens * (hidden * 2 + 20 * 4),
        check=check,
        peers={"torch": partial(_pre_by_torch, torch.tensor([4, 4, 16], device=device))},
    )


def _pre_by_torch(sizes, mix, streams, scale, base):
    """With the epsilons and the 20 Sinkhorn rounds of DeepSeek's layers."""
    eps, wide = 1e-6, streams.float()
    root = (wide.square().flatten(1).mean(1) + eps).rsqrt()
    logits = mix * root[:, None] * scale.repeat_interleave(sizes, output_size=24) + base
    pre, post = logits[:, :STREAMS].sigmoid() + eps, 2 * logits[:, STREAMS : 2 * STREAMS].sigmoid()
    comb = logits[:, 2 * STREAMS :].unflatten(1, (STREAMS, STREAMS)).softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(19):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return post, comb, torch.bmm(pre.bfloat16()[:, None], streams).squeeze(1)
