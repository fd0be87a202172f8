"""DeepGEMM: FP8 products with a scale for 1 x 128 of rows and 128 x 128 of weights, and scores of an indexer. nvcc
compiles its first calls."""

import peer_deepgemm as peer
import torch

library = peer.deep_gemm


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


def paged_scores(given: dict) -> dict:
    """Its schedule is made before."""
    q, tables, most = given["q"], given["tables"], given["most"]
    # Lengths of each query token: [requests, tokens].
    behind = torch.arange(1 - q.shape[1], 1, dtype=torch.int32, device=q.device)
    lens = given["lens"][:, None] + behind
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    plan = library.get_paged_mqa_logits_metadata(lens, given["cache"].shape[1], sms)
    rest = (given["cache"], given["weights"], lens, tables, plan, most)
    return {"": lambda: library.fp8_fp4_paged_mqa_logits((q, None), *rest)}


def dense_scores(given: dict) -> dict:
    """Its rows begin at the first key that a query sees, which here is the first of all."""
    rest = (given["keys"], given["weights"], given["begin"], given["end"], given["most"])
    return {"": lambda: library.fp8_fp4_mqa_logits((given["q"], None), *rest)}


PROBLEMS = {
    "fp8 blocks": product,
    "fp8 blocks contiguous": contiguous,
    "fp8 blocks masked": masked,
    "mqa logits paged": paged_scores,
    "mqa logits dense": dense_scores,
}
