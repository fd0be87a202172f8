"""Scores of an indexer that chooses keys for sparse attention, and upstream's schedule of their computation."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer._core.target import target_of
from flashinfer.paged_mqa import fp8_paged_mqa_logits

__all__ = ["compute_paged_mqa_logits_schedule", "fp8_paged_mqa_logits"]


def compute_paged_mqa_logits_schedule(
    seq_lens: torch.Tensor,
    device: torch.device | str | None = None,
    *,
    next_n: int = 1,
    variant: str = "fp8",
    use_gpu_kernel: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A tensor to pass as the schedule_meta of `fp8_paged_mqa_logits`, which divides its work without one.

    Upstream computes it anew whenever lengths change; here it holds zeros and no information.

    Parameters
    ----------
    seq_lens : int32 Tensor [batch]
        Not read.
    device : torch.device, optional
        Of the result; default that of `seq_lens`, or the current CUDA device if it is on the CPU and there is one.
    next_n : int
        Queries per request, at least 1.
    variant : str
        "fp8"; "fp4" is refused, as there is no kernel for it.
    use_gpu_kernel : bool
        Changes nothing: no kernel is needed.
    out : int32 Tensor [multiprocessors + 1, 2], optional
        Returned as it is.

    Returns
    -------
    int32 Tensor [multiprocessors + 1, 2]

    Raises
    ------
    ValueError
        An argument out of its range, by name.
    """
    require(seq_lens.dim() == 1, "seq_lens", tuple(seq_lens.shape), "[batch]")
    require(next_n >= 1, "next_n", next_n, "at least 1")
    require(variant == "fp8", "variant", repr(variant), "'fp8'")
    if device is None:
        there = seq_lens.is_cuda or not torch.cuda.is_available()
        device = seq_lens.device if there else torch.device("cuda", torch.cuda.current_device())
    device = torch.device(device)
    shape = (target_of(device).sms + 1, 2)
    if out is not None:
        require(out.shape == shape and out.dtype == torch.int32, "out", f"{out.dtype} {tuple(out.shape)}",
                f"int32 {shape}")  # fmt: skip
        return out
    return torch.zeros(shape, dtype=torch.int32, device=device)
