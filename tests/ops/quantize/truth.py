"""The formats in float64, from their specifications: every value is listed, and the nearest one is looked up.

OCP 8-bit Floating Point Specification 1.0 (e4m3, e5m2) and OCP Microscaling Formats Specification 1.0 (e2m1, e8m0).
Saturation and the codes of NaN are those of PTX's cvt with .satfinite.
"""

import torch

# bits of exponent and mantissa, bias, codes without sign that are finite, the code that NaN gets
FORMATS = {"e4m3": (4, 3, 7, 0x7F, 0x7F), "e5m2": (5, 2, 15, 0x7C, 0x7F), "e2m1": (2, 1, 1, 8, 7)}


def values(name: str) -> torch.Tensor:
    """float64 [number of finite codes without sign], ascending."""
    _, mantissa_bits, bias, count, _ = FORMATS[name]
    found = []
    for code in range(count):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        if exponent == 0:
            found.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            found.append((1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
    return torch.tensor(found, dtype=torch.float64)


def decode(name: str, code: torch.Tensor) -> torch.Tensor:
    """Codes as float64; what is not finite as NaN or infinity."""
    exponent_bits, mantissa_bits, _, count, _ = FORMATS[name]
    sign_bit = exponent_bits + mantissa_bits
    code = code.long()
    table = torch.full((2**sign_bit,), float("nan"), dtype=torch.float64)
    table[:count] = values(name)
    if name == "e5m2":
        table[0x7C] = float("inf")
    magnitude = table[(code & (2**sign_bit - 1)).cpu()].to(code.device)
    return torch.where(code >> sign_bit & 1 == 1, -magnitude, magnitude)


def encode(name: str, x: torch.Tensor) -> torch.Tensor:
    """The uint8 codes of x: nearest, a tie to the even code, beyond the largest the largest."""
    exponent_bits, mantissa_bits, _, count, nan = FORMATS[name]
    table = values(name).to(x.device)
    magnitude = x.double().abs().nan_to_num(nan=0, posinf=float("inf")).clamp(max=float(table[-1]))
    above = torch.searchsorted(table, magnitude).clamp(max=count - 1)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = code | (x.signbit().long() << (exponent_bits + mantissa_bits))
    return torch.where(x.isnan(), nan, code).to(torch.uint8)


def pack(nibbles: torch.Tensor) -> torch.Tensor:
    """Four-bit codes [..., 2 n] as bytes [..., n], the first in the low half."""
    return (nibbles[..., ::2] + 16 * nibbles[..., 1::2].int()).to(torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed % 16, packed // 16), -1).flatten(-2)


# pow on a GPU is not exact, not even of 2; the host's is.
_POWERS = torch.tensor([2.0 ** (code - 127) for code in range(255)], dtype=torch.float64)


def ue8m0(code: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) as float64; NaN for 255."""
    table = torch.cat((_POWERS, torch.full((1,), float("nan"))))
    return table.to(code.device)[code.long()]


def divided(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, rounded once: by a Python number, torch multiplies with the inverse on a GPU."""
    return x / torch.full_like(x, divisor)


def ue8m0_at_least(x: torch.Tensor) -> torch.Tensor:
    """The code of the least power of two that is no less than x >= 0, found by comparing with every one."""
    code = torch.searchsorted(_POWERS.to(x.device), x.double().nan_to_num(nan=0, posinf=float("inf"))).clamp(max=254)
    return torch.where(x.isnan(), 255, code).to(torch.uint8)


def hard_floats(name: str) -> torch.Tensor:
    """float32 of both signs: every value, every midpoint, their neighbours, subnormals, overflow, infinity and NaN."""
    table = values(name)
    step = table[-1] - table[-2]
    table = torch.cat((table, table[-1] + step * torch.tensor([0.25, 0.5, 0.75, 1, 2, 1000], dtype=torch.float64)))
    exact = torch.cat((table, (table[1:] + table[:-1]) / 2)).float()
    infinity = torch.tensor(float("inf"))
    near = torch.cat((exact, exact.nextafter(infinity), exact.nextafter(-infinity), exact * 1.1))
    tiny = torch.tensor([2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 1e38, 3.4028234663852886e38, float("inf")])
    drawn = torch.randn(4096) * torch.logspace(-8, 6, 4096)
    found = torch.cat((near, tiny, drawn))
    return torch.cat((found, -found, torch.tensor([float("nan"), -float("nan")])))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """float64 rounded to float32: one IEEE operation on float32 operands is the float64 operation, rounded."""
    return x.float().double()


def nvfp4(x: torch.Tensor, global_scale: torch.Tensor, peak: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Nibbles [..., n] and e4m3 factors [..., n / 16], each float32 operation of the statement done in float64."""
    blocks = x.double().unflatten(-1, (-1, 16))
    scale, part = rounded(global_scale.double()), rounded(torch.tensor(1 / peak, dtype=torch.float64, device=x.device))
    factor = encode("e4m3", rounded(scale * rounded(blocks.abs().amax(-1) * part)))
    wide = decode("e4m3", factor)
    inverse = rounded(1 / rounded(wide * rounded(1 / scale)))
    inverse = torch.where(wide == 0, 0.0, inverse)
    return encode("e2m1", rounded(blocks * inverse[..., None]).flatten(-2)), factor


def mx(x: torch.Tensor, element: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `element` [..., n] and ue8m0 factors [..., n / 32]."""
    blocks = x.double().unflatten(-1, (-1, 32))
    factor = ue8m0_at_least(divided(blocks.abs().amax(-1), float(values(element)[-1])))
    return encode(element, (blocks / ue8m0(factor)[..., None]).flatten(-2)), factor


def arranged(factors: torch.Tensor, layout: str) -> torch.Tensor:
    """Factors [rows, blocks] as flat bytes: tiles of rows and blocks one after another, padded with zeros."""
    rows, blocks = factors.shape
    if layout == "linear":
        return factors.flatten()
    tall = 128 if layout == "128x4" else 8
    padded = factors.new_zeros(-(-rows // tall) * tall, -(-blocks // 4) * 4)
    padded[:rows, :blocks] = factors
    tiles = [t for band in padded.split(tall) for t in band.split(4, dim=1)]
    if layout == "128x4":  # the four groups of 32 rows side by side
        tiles = [torch.cat(t.split(32), dim=1) for t in tiles]
    return torch.cat([t.flatten() for t in tiles]) if tiles else factors.new_zeros(0)
