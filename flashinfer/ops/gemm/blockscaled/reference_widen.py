"""An operand of a block-scaled GEMM as bfloat16, in torch."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.gemm import operands


def run(problem, config, codes, scale, out):
    """Codes [batch, rows, .] and their flat factors [batch, .] to `out` [batch, rows, K]."""
    rest = problem.scale, problem.layout, problem.width
    pairs = zip(codes, scale, strict=True)
    wide = torch.stack([operands.widen(matrix, problem.encoding, factors, *rest) for matrix, factors in pairs])
    if problem.shuffled:
        # Stored row 8 i + j of each 32 is row 4 j + i.
        wide = wide.unflatten(1, (-1, 4, 8)).transpose(2, 3).flatten(1, 3)
    out.copy_(wide)


IMPLEMENTATION = Implementation(run)
