"""Softmax, filters and draws over whole vocabularies, against copy bandwidth and torch."""

from collections.abc import Iterator

import torch

from flashinfer import sampling
from flashinfer.testing.bench import Case, Target, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Decode batches over a large vocabulary on a GPU; a small one on a CPU."""
    on_gpu = device.type == "cuda"
    for rows, columns in ((64, 128256), (1, 128256), (512, 32000)) if on_gpu else ((4, 4000),):
        size = f"{rows}x{columns}"
        goal = (Target("us", 60),) if (rows, columns) == (64, 128256) else ()
        for name, make in (("softmax", _softmax), ("sampling_from_probs", _plain), ("top_p_renorm_probs", _renorm)):
            yield Case(f"{name} {size}", lambda d, make=make, r=rows, c=columns: make(r, c, d))
        for source in ("probs", "logits"):
            yield Case(
                f"top_k_top_p from {source} {size}",
                lambda d, s=source, r=rows, c=columns: _top_k_top_p(s, r, c, d),
                targets=goal,
            )
        yield Case(f"top_p, flat {size}", lambda d, r=rows, c=columns: _top_p(r, c, d))


def _logits(rows, columns, device, spread=3.0):
    return torch.randn(rows, columns, device=device) * spread


def _seeds(device):
    return torch.tensor([1], device=device), torch.tensor([2], device=device)


def _softmax(rows, columns, device) -> Work:
    logits = _logits(rows, columns, device)
    return Work(sampling.softmax, (logits,), bytes=2 * logits.nbytes, peers={"torch": lambda x: x.softmax(-1)})


def _plain(rows, columns, device) -> Work:
    probs, (seed, offset) = _logits(rows, columns, device).softmax(-1), _seeds(device)
    return Work(
        run=lambda probs: sampling.sampling_from_probs(probs, seed=seed, offset=offset),
        inputs=(probs,),
        bytes=probs.nbytes,
        peers={"torch": lambda probs: torch.multinomial(probs, 1)},
    )


def _renorm(rows, columns, device) -> Work:
    probs = _logits(rows, columns, device).softmax(-1)
    peers = {"torch": lambda probs: _torch_top_p(probs, 0.9)}
    return Work(lambda probs: sampling.top_p_renorm_probs(probs, 0.9), (probs,), bytes=2 * probs.nbytes, peers=peers)


def _top_k_top_p(source, rows, columns, device) -> Work:
    x, (seed, offset) = _logits(rows, columns, device), _seeds(device)
    if source == "probs":
        x = x.softmax(-1)
    function = getattr(sampling, f"top_k_top_p_sampling_from_{source}")
    ks, ps = torch.full((rows,), 50, device=device, dtype=torch.int32), torch.full((rows,), 0.9, device=device)

    def torch_draw(x):
        values, tokens = x.topk(50)
        kept = _torch_top_p(values.softmax(-1) if source == "logits" else values / values.sum(-1, keepdim=True), 0.9)
        return tokens.gather(1, torch.multinomial(kept, 1))

    def draw(x):
        return function(x, ks, ps, seed=seed, offset=offset)

    return Work(draw, (x,), bytes=x.nbytes, peers={"torch": torch_draw})


def _top_p(rows, columns, device) -> Work:
    probs, (seed, offset) = _logits(rows, columns, device, 1.0).softmax(-1), _seeds(device)
    return Work(
        run=lambda probs: sampling.top_p_sampling_from_probs(probs, 0.9, seed=seed, offset=offset),
        inputs=(probs,),
        bytes=probs.nbytes,
        peers={"torch": lambda probs: torch.multinomial(_torch_top_p(probs, 0.9), 1)},
    )


def _torch_top_p(probs, p):
    values, order = probs.sort(dim=-1, descending=True)
    values[values.cumsum(-1) - values >= p] = 0
    return torch.zeros_like(probs).scatter(1, order, values / values.sum(-1, keepdim=True))
