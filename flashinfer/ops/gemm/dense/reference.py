"""Dense GEMM in torch: float32 products and sums, one rounding at the end."""

import torch

from flashinfer._core.implementation import Implementation


def run(problem, config, x):
    b = _in_order(x.b) if problem.b_major == "blocks" else x.b
    y = torch.matmul(x.a.float(), b.float())
    for scale in (x.a_scale, x.b_scale)[: problem.scales]:
        y = y * scale
    x.out.copy_(y if x.bias is None else y + x.bias.float())


def _in_order(blocks):
    """A shuffled B [k / 128, n, 128] as [1, k, n]: within 32 rows, stored row 8 i + j is row 4 j + i of the weight."""
    stored = blocks.view(torch.uint8).unflatten(1, (-1, 4, 8))
    return stored.transpose(2, 3).permute(0, 4, 1, 2, 3).reshape(1, -1, blocks.shape[1]).view(blocks.dtype)


IMPLEMENTATION = Implementation(run)
