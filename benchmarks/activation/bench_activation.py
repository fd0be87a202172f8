"""The gated activations against copy bandwidth: two elements are read for each one written."""

from collections.abc import Iterator

import torch
from torch.nn import functional

import flashinfer
from flashinfer.testing.bench import Case, Target, Work

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
            goal = Target("us", 2.5) if rows <= 8 else Target("copy", 0.97)
            yield Case(
                f"{name} {rows}x{hidden}", lambda d, n=name, r=rows, h=hidden: _work(n, r, h, d), targets=(goal,)
            )
    for batch, rows, hidden in ((32, 256, 2048), (32, 8, 2048)) if device.type == "cuda" else ((2, 8, 256),):
        name = f"silu_and_mul_scaled_nvfp4_experts_quantize {batch}x{rows}x{hidden}"
        yield Case(name, lambda d, b=batch, r=rows, h=hidden: _experts(b, r, h, d))


def _work(name, rows, hidden, device) -> Work:
    x = torch.randn(rows, 2 * hidden, device=device, dtype=torch.bfloat16)
    act = KINDS[name]
    return Work(
        run=getattr(flashinfer, name),
        inputs=(x, x.new_empty(rows, hidden)),
        bytes=x.nbytes * 3 // 2,
        peers={"torch": lambda x, out: torch.mul(act(x[:, :hidden]), x[:, hidden:], out=out)},
    )


def _experts(batch, rows, hidden, device) -> Work:
    a = torch.randn(batch, rows, 2 * hidden, device=device, dtype=torch.bfloat16)
    mask = torch.full((batch,), rows, device=device, dtype=torch.int32)
    return Work(
        run=flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize,
        inputs=(a, mask, torch.ones(1, device=device)),
        bytes=a.nbytes + batch * rows * hidden * 9 // 16,
    )
