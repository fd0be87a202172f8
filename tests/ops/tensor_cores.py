"""What tensor cores make of products: a model, to judge kernels that multiply on them."""

import torch


def _cut(x, largest):
    """x cut towards zero at 13 binary places below the leading one of `largest`."""
    grid = torch.exp2(largest.abs().clamp(min=2.0**-60).log2().floor() - 13)
    return (x / grid).trunc() * grid


def fp8_product(a, b):
    """a b [m, k] [k, n] in float64, as FP8 tensor cores of Hopper are said to add.

    32 products and the sum so far are aligned to the largest of them, and the sum is kept with 13 binary places (Liu et
    al., DeepSeek-V3 Technical Report, 2024, 3.3.2; Zhang et al., SageAttention2, 2024, 3.2). Long sums lose less than
    by this model.
    """
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for a32, b32 in zip(a.double().split(32, 1), b.double().T.split(32, 1)):
        addends = torch.cat((a32[:, None] * b32[None], total[..., None]), -1)
        total = _cut(addends, addends.abs().amax(-1, keepdim=True)).sum(-1)
        total = _cut(total, total)
    return total
