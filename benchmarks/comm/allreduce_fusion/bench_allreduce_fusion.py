"""The fused all-reduce on one rank: what its launch, exchange and norm take where no link is in the way.

Between GPUs: benchmarks/comm/bench_comm.py.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional

from flashinfer import comm
from flashinfer.comm import AllReduceFusionPattern
from flashinfer.testing.bench import Case, Work


def cases(device: torch.device) -> Iterator[Case]:
    """Decode batches and a prefill chunk on a GPU; those of a small model on a CPU."""
    for shape in ((6, 8192), (128, 8192), (2048, 8192)) if device.type == "cuda" else ((1, 640), (64, 640)):
        name = f"one rank: all-reduce, residual, RMSNorm {shape[0]}x{shape[1]}"
        # A peer that waits for other ranks is not asked.
        yield Case(name, lambda d, shape=shape: _norm(shape, d), ways=lambda d: {})


def _norm(shape, device) -> Work:
    x, residual = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(shape[1], device=device, dtype=torch.bfloat16)
    ws = comm.create_allreduce_fusion_workspace(
        world_size=1, rank=0, max_token_num=shape[0], hidden_dim=shape[1], dtype=x.dtype
    )

    def run(x, residual, weight, out):
        return comm.allreduce_fusion(
            x, ws, AllReduceFusionPattern.kARResidualRMSNorm, residual_in=residual, residual_out=residual,
            rms_gamma=weight, norm_out=out,
        )  # fmt: skip

    return Work(
        run=run,
        inputs=(x, residual, weight, torch.empty_like(x)),
        bytes=4 * x.nbytes + weight.nbytes,
        peers={"torch": lambda x, r, w, out: functional.rms_norm(r.add_(x), w.shape, w, 1e-6)},
    )
