"""DeepGEMM: FP8 products with a scale for 1 x 128 of rows and 128 x 128 of weights. nvcc compiles its first calls."""

import peer_deepgemm as peer
import torch


def product(given: dict) -> dict:
    """Scales of rows are in its layout before."""
    a, w, of_a, of_w = (given[name] for name in ("a", "w", "of_a", "of_w"))
    of_a, out = _scales(of_a), torch.empty_like(given["out"])
    return {"": lambda: peer.deepgemm_fp8(a, of_a, w, of_w, out)}


def contiguous(given: dict) -> dict:
    a, w, of_a, of_w, index = (given[name] for name in ("a", "w", "of_a", "of_w", "index"))
    of_a, out = _scales(of_a), torch.empty_like(given["out"])
    return {"": lambda: peer.deepgemm_grouped(a, of_a, w, of_w, out, index)}


def masked(given: dict) -> dict:
    a, w, of_a, of_w, held = (given[name] for name in ("a", "w", "of_a", "of_w", "held"))
    of_a, out = _scales(of_a), torch.empty_like(given["out"])
    return {"": lambda: peer.deepgemm_masked(a, of_a, w, of_w, out, held, given["expected"])}


def _scales(of_a: torch.Tensor) -> torch.Tensor:
    return peer.scales_layout(of_a.contiguous(), of_a.shape[-2])


PROBLEMS = {"fp8 blocks": product, "fp8 blocks contiguous": contiguous, "fp8 blocks masked": masked}
