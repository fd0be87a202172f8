"""What tensor cores make of products: a model, to judge kernels that multiply on them."""

import torch


def truncated(x, bits):
    """float64 towards zero, to so many bits of fraction."""
    return (x.view(torch.int64) >> (52 - bits) << (52 - bits)).view(torch.float64)


def half_product(a, b, total=0.0):
    """total + a b [m, k] [k, n] of 16-bit floats, in float64, as tensor cores add.

    They add 16 exact products at a time to a float32 accumulator, and truncate it (Fasi, Higham, Mikaitis and Pranesh,
    Numerical behavior of NVIDIA tensor cores, 2021). Each of k / 16 steps takes half an ulp of the sum so far on
    average, all towards zero: sums of 7168 normal products, up to 300, end 2.6e-3 to 3.4e-3 off, where float32's are
    1.5e-4 off. Any kernel on them has this bias; one of K slices has less, for its sums are smaller.
    """
    for a16, b16 in zip(a.double().split(16, 1), b.double().split(16, 0)):
        total = truncated(total + a16 @ b16, 23)
    return total


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


def adds_fp8_in_few_bits(device):
    """Whether it is Hopper, whose FP8 tensor cores `fp8_product` models."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def fp8_dots(a, b, dtype, device):
    """a b [m, k] [k, n] of e4m3 in `dtype`; in float32, as a kernel on `device` adds them: on Hopper by fp8_product."""
    if dtype == torch.float32 and adds_fp8_in_few_bits(device):
        return fp8_product(a, b).to(dtype)
    return a.to(dtype) @ b.to(dtype)


def fp8_dots_error(a, b):
    """What |a b| [m, n] of e4m3 may err by where `fp8_product` adds, whatever the order: 2^-11 of the sum of |terms|.

    A step of 32 products cuts each addend below 2^-13 of the largest, so it errs by some 16 such cuts; the largest of
    32 normal products is about a tenth of the sum of their sizes, and the four steps of 128 products add up.
    """
    return (a.double().abs() @ b.double().abs()) * 2.0**-11
