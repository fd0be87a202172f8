"""The all-reduce in torch, through the process group: float32 sums in rank order, one rounding of each result."""

import torch

from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer.ops import layouts, narrow
from flashinfer.ops.comm.allreduce_fusion import Norm, Results, Rows


def run(problem, config, link, given: Rows, norm: Norm, out: Results, tokens: int, hidden: int, elements: int) -> None:
    """Add the rows of all ranks. tokens, hidden : of the rows as they travel; elements : of all of them."""
    mine = own_rows(problem, given).to(torch_dtype(problem.dtype))
    y = link.sum(mine.reshape(-1), problem.two_shot)
    if out.sum is not None:
        out.sum.view(-1).copy_(y)
    if norm.weight is None:
        return
    y = y.view(tokens, hidden) + norm.residual.float()
    out.residual.copy_(y)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps) * (norm.weight.float() + norm.bias)
    if out.normed is not None:
        out.normed.copy_(y)
    if problem.number_format:
        _quantize(problem, y, norm.scale, out)


def own_rows(problem, given: Rows) -> torch.Tensor:
    """This rank's contribution: given rows unchanged, else float32."""
    if problem.source == "reduce":
        weighted = (given.experts.float() * given.scales[..., None]).sum(0)
        return given.rows.float() + weighted
    if problem.source == "finalize":
        picked = given.rows[given.index.clamp(min=0).long()].float()
        if given.scales is not None:
            picked = picked * given.scales.float()[..., None]
        picked = torch.where((given.index >= 0)[..., None], picked, 0).sum(1)
        return picked if given.beside is None else picked + given.beside.float()
    return given.rows


def _quantize(problem, y, scale, out: Results) -> None:
    scale = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=y.device)
    fp8 = torch.float8_e4m3fn
    # Callers give them in any shape.
    codes = out.codes.view(torch.uint8).view(len(y), -1) if len(y) else out.codes
    if problem.number_format == "fp8":
        codes.copy_(narrow.to_fp8(y * (1 / scale), fp8).view(torch.uint8))
    elif problem.number_format == "fp8_row":
        narrowed, factors = narrow.quantize_fp8(y, y.shape[-1], fp8)
        codes.copy_(narrowed.view(torch.uint8))
        out.factors.copy_(factors)
    elif problem.number_format == "fp8_group":
        narrowed, factors = group_fp8(y.to(torch_dtype(problem.dtype)).float())
        codes.copy_(narrowed.view(torch.uint8))
        out.factors.copy_(factors)
    else:
        narrowed, factors = narrow.quantize_nvfp4(y, scale)
        codes.copy_(narrowed)
        arranged = layouts.arrange(factors.view(torch.uint8), problem.layout)
        out.factors.view(torch.uint8).view(-1).copy_(arranged)


def group_fp8(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, n] as e4m3, and the ue8m0 scales of groups of 128 columns, four in an int32, the first lowest."""
    groups = y.unflatten(-1, (-1, 128))
    amax = torch.where(groups.isnan().any(-1), torch.nan, groups.abs().amax(-1).clamp(min=1e-10))
    mantissa, exponent = torch.frexp(amax)
    # 448 is 0.875 * 2 ** 9.
    code = (exponent - 9 + (mantissa > 0.875).int() + 127).clamp(0, 254)
    code = torch.where(amax.isinf(), 254, torch.where(amax.isnan(), 255, code)).to(torch.uint8)
    inverse = narrow.from_ue8m0(torch.where(code == 255, code, 254 - code))
    codes = narrow.to_fp8((groups * inverse[..., None]).flatten(-2), torch.float8_e4m3fn)
    padded = torch.nn.functional.pad(code, (0, -code.shape[-1] % 4))
    return codes, padded.contiguous().view(torch.int32)


IMPLEMENTATION = Implementation(run)
