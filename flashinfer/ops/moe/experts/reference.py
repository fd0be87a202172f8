"""The experts' GEMM in torch: one expert at a time, with weights dequantized to float32."""

import torch
from torch.nn.functional import gelu, silu

from flashinfer._core.implementation import Implementation
from flashinfer.ops import layouts, narrow
from flashinfer.ops.moe.experts import GATED, WIDTH, extents, fragments


def run(problem, config, rows, weights, finish, token_map, out):
    """out[r] = finish(rows of r @ weights of r's expert) for the rows r of the map."""
    n, k = extents(weights.codes, problem.weights, problem.block)
    first, count = token_map.first.tolist(), token_map.count.tolist()
    for expert, (start, rows_of_expert) in enumerate(zip(first, count)):
        if not rows_of_expert:
            continue
        row = slice(start, start + rows_of_expert)
        pair = token_map.row_pair[row].long()
        source = pair // rows.top_k if problem.gather else torch.arange(start, row.stop, device=pair.device)
        x = decode_rows(problem, rows, source, k)
        y = x @ decode_weights(problem, weights, expert, n, k).T
        y = _finish(problem, finish, weights, y, pair, source, expert)
        out[row] = narrow.to_fp8(y, torch.float8_e4m3fn) if problem.out == "fp8" else y.to(out.dtype)


def decode_rows(problem, rows, source, k) -> torch.Tensor:
    """Rows as float32."""
    encoding, codes = problem.rows, rows.codes[source]
    if encoding not in WIDTH:
        return codes.float()
    blocks = -(-k // WIDTH[encoding])
    if problem.row_layout == "linear":
        factors = rows.scale[source][:, :blocks]
    else:
        factors = layouts.restore(rows.scale.flatten().view(torch.uint8), len(rows.codes), blocks, problem.row_layout)
        factors = factors[source]
    return _decode(encoding, codes, factors, k)


def decode_weights(problem, weights, expert: int, n: int, k: int) -> torch.Tensor:
    """An expert's weights as float32 [n, k], rows in the order of the bias: gated ones factor, gate, factor, gate."""
    encoding, codes = problem.weights, weights.codes[expert]
    if problem.fragments:
        codes = fragments.restore(codes)
    stored, logical = weight_rows(problem, n, codes.device)
    if problem.block:
        codes = codes.transpose(0, 1).flatten(1)
    codes = codes[stored]
    if encoding not in WIDTH:
        return codes.float()
    blocks = -(-k // WIDTH[encoding])
    factors = weights.scale[expert]
    if encoding == "fp8_block":
        factors = factors[logical // 128]
    elif problem.weight_layout == "linear":
        factors = factors[stored]
    elif problem.weight_layout == "strips":
        factors = factors.unflatten(1, (n, -1)).transpose(0, 1).flatten(1)[stored]
    else:
        factors = layouts.restore(factors.flatten(), n, blocks, problem.weight_layout)[stored]
    return _decode(encoding, codes, factors, k)


def weight_rows(problem, n: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of the weights for each column of the product: as stored, and before `shuffle_matrix_a`."""
    column = torch.arange(n, device=device)
    row = column
    if problem.act in GATED:
        group = problem.paired or n // 2
        row = column // 2 // group * 2 * group + column % 2 * group + column // 2 % group
    stored = row
    if problem.shuffle:
        eighth = problem.shuffle // 8
        stored = row // problem.shuffle * problem.shuffle + row % eighth * 8 + row % problem.shuffle // eighth
    return stored, row


def _decode(encoding, codes, factors, k) -> torch.Tensor:
    if encoding in ("fp8", "fp8_block", "mxfp8"):
        y = codes.view(torch.float8_e4m3fn).float()
    elif encoding in ("mxint4", "int4"):
        byte = codes.view(torch.uint8).int()
        y = torch.stack(((byte & 15 ^ 8) - 8, (byte >> 4 ^ 8) - 8), -1).flatten(-2).float()
    else:
        y = narrow.from_e2m1(codes.view(torch.uint8))
    if encoding in ("mxfp8", "mxfp4"):
        factors = narrow.from_ue8m0(factors.view(torch.uint8))
    elif encoding == "nvfp4":
        factors = factors.view(torch.float8_e4m3fn)
    return y * factors.float().repeat_interleave(WIDTH[encoding], -1)[:, :k]


def _finish(problem, finish, weights, y, pair, source, expert):
    def value(vector):
        return vector[0 if vector.numel() == 1 else expert].float()

    if problem.scale:
        y = y * value(finish.scale)
    if problem.weighted:
        y = y * finish.weight.flatten()[pair if problem.weighted == "pair" else source, None]
    if problem.channels:
        stored, _ = weight_rows(problem, y.shape[1], y.device)
        y = y * weights.channels[expert][stored]
    if problem.bias:
        stored, _ = weight_rows(problem, y.shape[1], y.device)
        y = y + weights.bias[expert][stored].float()
    if problem.delta:
        delta = finish.delta.flatten(0, 1)[pair].float()
        y = y + (delta.unflatten(1, (2, -1)).mT.flatten(1) if problem.act in GATED else delta)
    if problem.act in GATED:
        y = _gated(problem, finish, y[:, 0::2], y[:, 1::2], expert)
    else:
        y = _plain(problem.act, y, finish.numbers[2] if finish.limit is None else finish.limit[expert])
    if problem.scale_out:
        factor = value(finish.scale_out)
        y = y * (factor / value(finish.scale) if problem.scale_out == "ratio" else factor)
    return y


def _gated(problem, finish, factor, gate, expert):
    given = (finish.alpha, finish.beta, finish.limit)
    alpha, beta, limit = (number if t is None else t[expert] for t, number in zip(given, finish.numbers))
    shape, step = problem.shape.lower(), problem.act == "swiglu_step"
    if "l" in shape or step:
        factor = torch.clamp(factor, -limit, limit)
        gate = gate if step else gate.clamp(max=limit)
    if problem.act in ("situ", "situ_gate"):
        factor = beta * torch.tanh(factor / beta) if problem.act == "situ" else factor
        return alpha * torch.tanh(gate / alpha) * gate.sigmoid() * factor
    if problem.act in ("geglu", "geglu_tanh"):
        gate = gelu(gate, approximate="tanh" if problem.act == "geglu_tanh" else "none")
    else:
        gate = gate * (gate * alpha if "a" in shape else gate).sigmoid()
    if step:
        gate = gate.clamp(max=limit)
    return gate * (factor + beta if "b" in shape else factor)


def _plain(act, y, limit):
    if act == "silu":
        return silu(y)
    if act == "gelu":
        return gelu(y)
    if act == "relu":
        return y.relu()
    if act == "clamped_relu2":
        return (limit * torch.tanh(y.relu() / limit)).square()
    return y.relu().square() if act == "relu2" else y


IMPLEMENTATION = Implementation(run)
