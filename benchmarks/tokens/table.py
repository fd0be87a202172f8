"""Which rows of which rooms' benchmarks the table of token operations has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flashinfer.testing.bench import load

HERE = Path(__file__).resolve().parent

_SIZES = ("4096x8192", "16384x8192", "8x8192", "1x8192")
_ROPE = ("4096x64x8x128", "16384x32x8x128", "8x32x8x128", "1x32x8x128")
# Rooms in the order of the table, and the rows of their benchmarks on a GPU; of the small ones on a CPU all.
ROWS = {
    "norm": [
        f"{name} {size}"
        for name in ("rmsnorm", "fused_add_rmsnorm", "rmsnorm_quant", "fused_add_rmsnorm_quant", "add_rmsnorm_fp4quant")
        for size in _SIZES
    ],
    "activation": [f"silu_and_mul {size}" for size in ("4096x8192", "8192x14336", "8x14336", "1x8192")],
    "rope": [f"{name} {size}" for name in ("rope", "rope cached, in place") for size in _ROPE]
    + ["mla_rope_quantize_fp8 4096x128"],
    "page": [f"append {batch}, page 16 NHD" for batch in ("4x4096", "16x4096", "128x1", "8x1")],
    "quantize": [f"{name} {size}" for name in ("nvfp4_quantize", "mxfp8_quantize") for size in _SIZES],
    "sampling": [
        f"{name} {size}"
        for size in ("64x128256", "1x128256")
        for name in ("softmax", "sampling_from_probs", "top_k_top_p from probs", "top_k_top_p from logits")
    ],
    "topk": ["top_k 2048 of 4x65536", "top_k 2048 of 64x65536", "top_k 50 of 64x128256"],
}
# What the README quotes.
HEADLINES = (
    "rmsnorm 4096x8192",
    "fused_add_rmsnorm 4096x8192",
    "fused_add_rmsnorm_quant 4096x8192",
    "silu_and_mul 4096x8192",
    "rope 4096x64x8x128",
    "append 4x4096, page 16 NHD",
    "nvfp4_quantize 4096x8192",
    "mxfp8_quantize 4096x8192",
    "fused_add_rmsnorm 8x8192",
    "top_k_top_p from probs 64x128256",
    "top_k 2048 of 4x65536",
)


def selected(device) -> Iterator[tuple]:
    """(room, case) of every row."""
    for room, names in ROWS.items():
        module = load(HERE.parent / room / f"bench_{room}.py")
        found = {case.name: case for case in module["cases"](device)}
        for name in names if device.type == "cuda" else found:
            yield room, found[name]
