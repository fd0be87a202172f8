"""Operands with block scales whose values are known: codes and factors as their specifications say, and float64."""

from dataclasses import dataclass

import torch

from flashinfer.ops import layouts

# OCP Microscaling Formats Specification 1.0, table of E2M1
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Operand:
    """codes : as a call takes them. flat : factors, row-major, [.., rows, blocks]. values : float64 [.., rows, K]."""

    codes: torch.Tensor
    flat: torch.Tensor
    values: torch.Tensor

    def arranged(self, layout: str) -> torch.Tensor:
        """The factors in a layout, flat, a row to a matrix."""
        return layouts.arrange(self.flat.view(torch.uint8), layout)


def codes_of(shape, element, device):
    """Random codes and their float64 values [.., K]."""
    if element == "e2m1":
        nibbles = torch.randint(16, (*shape[:-1], shape[-1]))
        values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
        codes = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8)
        return codes.to(device), values.to(device)
    codes = torch.randn(shape).to(FP8[element]).to(device)
    return codes, codes.double()


def operand(shape, element, factor, width, device) -> Operand:
    """[.., rows, K] of `element` with factors of `width` elements: "ue8m0", or "ue4m3" for 16."""
    codes, values = codes_of(shape, element, device)
    blocks = (*shape[:-1], shape[-1] // width)
    if factor == "ue8m0":
        flat = torch.randint(120, 134, blocks).to(torch.uint8).to(device)
        wide = 2.0 ** (flat.double() - 127)
    else:
        flat = (torch.rand(blocks) * 4 + 0.01).to(torch.float8_e4m3fn).to(device)
        wide = flat.double()
    return Operand(codes, flat, (values.unflatten(-1, (-1, width)) * wide[..., None]).flatten(-2))


def groupwise(shape, element, high, width, device):
    """FP8 codes [.., rows, K], float32 scales [.., row blocks, column blocks], and float64 values."""
    codes, values = codes_of(shape, element, device)
    *batch, rows, columns = shape
    scale = (torch.rand(*batch, -(-rows // high), -(-columns // width)) + 0.5).to(device)
    row, column = (torch.arange(n, device=device) for n in (rows, columns))
    return codes, scale, values * scale.double()[..., row // high, :][..., column // width]


def same_dtype(a, b, dtype):
    """The product of float64 operands [.., M, K] and [.., N, K] as torch has it in `dtype`."""
    return a.to(dtype) @ b.to(dtype).mT
