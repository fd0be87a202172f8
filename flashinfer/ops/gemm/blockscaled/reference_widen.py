"""An operand of a block-scaled GEMM as bfloat16, in torch."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops.gemm import operands


def run(problem, config, codes, scale, out):
    """Codes [batch, rows, .] and their flat factors [batch, .] to `out` [batch, rows, K]."""
    if problem.scale:
        rest = problem.scale, problem.layout, problem.width
        pairs = zip(codes, scale, strict=True)
        wide = torch.stack([operands.widen(matrix, problem.encoding, factors, *rest) for matrix, factors in pairs])
    else:
        wide = codes
    if problem.shuffled:
        # Stored row 8 i + j of each 32 is row 4 j + i.
        wide = wide.unflatten(1, (-1, 4, 8)).transpose(2, 3).flatten(1, 3)
    if problem.arranged:
        # Of 128 columns, 32 c + 2 a j + a e + i goes to 8 a j + 8 i + 2 c + e.
        apart = problem.arranged
        wide = wide.unflatten(2, (-1, 4, 16 // apart, 2, apart)).permute(0, 1, 2, 4, 6, 3, 5).flatten(2)
    out.copy_(wide)


IMPLEMENTATION = Implementation(run)
