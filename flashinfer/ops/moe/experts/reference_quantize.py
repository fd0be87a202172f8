"""Quantizes rows to codes and scale factors in torch: all rows, or those of a token map."""

import torch

from flashinfer._core.implementation import Implementation
from flashinfer.ops import narrow
from flashinfer.ops.moe.experts import WIDTH


def run(problem, config, x, global_scale, token_map, codes, factors, row_scales=None):
    """Rows of x, all or those of the map, as codes and scale factors; with a scale of each row, float32 [rows]."""
    live = torch.arange(len(x), device=x.device)
    expert = torch.zeros_like(live)
    if problem.tile:
        live = torch.nonzero(token_map.row_pair[: int(token_map.first[-1])] >= 0)[:, 0]
        expert = token_map.tile_expert[live // problem.tile].long()
    y = x[live].float()
    row_scale = torch.ones(len(y), 1, dtype=torch.float32, device=x.device)
    if problem.scaled:
        row_scale = global_scale.flatten()[expert if global_scale.numel() > 1 else 0].float().reshape(-1, 1)
    if problem.row_scale:
        row_scale = row_scale * y.abs().amax(1, keepdim=True)
        row_scales[live] = row_scale[:, 0]
        row_scale = torch.where(row_scale == 0, 0, 1 / row_scale)
    if problem.encoding == "fp8":
        codes[live] = narrow.to_fp8(y * row_scale, torch.float8_e4m3fn).view(codes.dtype)
        return
    padded = torch.nn.functional.pad(y, (0, -y.shape[1] % WIDTH[problem.encoding]))
    if problem.encoding == "fp8_block":
        converted, factor = narrow.quantize_fp8(padded, 128, torch.float8_e4m3fn)
    elif problem.encoding == "mxfp8":
        converted, factor = narrow.quantize_mxfp8(padded)
    else:
        converted, factor = narrow.quantize_nvfp4(padded, row_scale)
    codes.view(torch.uint8)[live] = converted.view(torch.uint8)[:, : codes.shape[1]]
    if problem.encoding == "fp8_block":
        factors[live] = factor
    else:
        factors.view(torch.uint8)[live] = factor.view(torch.uint8)


IMPLEMENTATION = Implementation(run)
