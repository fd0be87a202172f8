"""The gated activations against copy bandwidth: two elements are read for each one written."""

from collections.abc import Iterator

import torch
from torch.nn import functional

import flashinfer
from flashinfer.testing.bench import Case, Work

KINDS = {
    "silu_and_mul": functional.silu,
    "gelu_and_mul": functional.gelu,
    "gelu_tanh_and_mul": lambda x: functional.gelu(x, approximate="tanh"),
}


def cases(device: torch.device) -> Iterator[Case]:
    """Large batches and decode batches on a GPU; those of a small model on a CPU."""
    shapes = ((4096, 8192), (8192, 14336), (8, 14336), (1, 8192)) if device.type == "cuda" else ((1, 2048), (512, 2048))
    for name in KINDS:
        for rows, hidden in shapes:
            yield Case(f"{name} {rows}x{hidden}", lambda d, n=name, r=rows, h=hidden: _work(n, r, h, d))


def _work(name, rows, hidden, device) -> Work:
    x = torch.randn(rows, 2 * hidden, device=device, dtype=torch.bfloat16)
    act = KINDS[name]
    return Work(
        run=getattr(flashinfer, name),
        inputs=(x, x.new_empty(rows, hidden)),
        bytes=x.nbytes * 3 // 2,
        peers={"torch": lambda x, out: torch.mul(act(x[:, :hidden]), x[:, hidden:], out=out)},
    )
