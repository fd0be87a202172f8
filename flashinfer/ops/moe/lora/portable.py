"""LoRA for routed rows in Triton: a program computes BLOCK columns of one row.

Grid: (rows of out x blocks of columns). Each program loops over its row's pairs in order. For each it loads the token,
the expert, the adapter and the address of the matrix [N, K], then BLOCK rows of the matrix and the row of x, TOGETHER
elements of K at a time.
Warps: all share the columns. Shared memory: the sum over K.
Inputs: x [., K], tables of pairs, addresses of matrices [N, K]. Outputs: out [rows, N].
Method: Chen et al., Punica: Multi-Tenant LoRA Serving, 2023, https://arxiv.org/abs/2310.18547.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher


@triton.jit
def lora_kernel(
    x, table, tokens, experts, adapters, weights, order, begin, offset, out, x_row, out_row, stride, K, N, blocks,
    width, all_tokens, all_experts,
    BY_TOKEN: tl.constexpr, ADDS: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    if begin is None:
        first, last = row, row + 1
    else:
        first, last = tl.load(begin + row), tl.load(begin + row + 1)
    total = tl.zeros([BLOCK], tl.float32)
    any_valid = row < 0
    for i in range(first, last):
        if order is None:
            pair = row
        else:
            pair = tl.load(order + i)
        token, expert = tl.load(tokens + pair), tl.load(experts + pair)
        valid = (token >= 0) & (token < all_tokens) & (expert >= 0) & (expert < all_experts)
        adapter = tl.load(adapters + token, valid, other=-1)
        valid = valid & (adapter >= 0)
        matrix = tl.load(table + expert, valid, other=0).to(tl.pointer_type(x.dtype.element_ty))
        matrix = matrix + adapter * stride + column.to(tl.int64)[:, None] * K
        source = token if BY_TOKEN else pair
        sums = tl.zeros([BLOCK, TOGETHER], tl.float32)
        for start in range(0, K, TOGETHER):
            k = start + tl.arange(0, TOGETHER)
            value = tl.load(x + source * x_row + k, valid & (k < K), other=0).to(tl.float32)
            w = tl.load(matrix + k[None, :], valid & inside[:, None] & (k < K)[None, :], other=0)
            sums += w.to(tl.float32) * value[None, :]
        term = tl.sum(sums, 1)
        if weights is not None:
            term *= tl.load(weights + pair, valid, other=0)
        total += term
        any_valid = any_valid | valid
    at = column.to(tl.int64)
    if offset is not None:
        at += tl.load(offset)
    inside = inside & any_valid & (at >= 0) & (at < width)
    at = out + row * out_row + at
    if ADDS:
        total += tl.load(at, inside, other=0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), inside)


def build(problem, config):
    types = {"x": f"*{problem.dtype}"}
    types |= dict.fromkeys(("table", "tokens", "experts", "adapters"), "*i64")
    types |= {"weights": "*fp32" if problem.weighted else None}
    types |= dict.fromkeys(("order", "begin"), "*i64" if problem.combined else None)
    types |= {"offset": "*i64" if problem.placed else None, "out": f"*{problem.out}"}
    types |= dict.fromkeys(("x_row", "out_row", "stride"), "i64")
    types |= dict.fromkeys(("K", "N", "blocks", "width", "all_tokens", "all_experts"), "i32")
    constants = {
        "BY_TOKEN": problem.by_token,
        "ADDS": problem.adds,
        "TOGETHER": problem.together,
        "BLOCK": config.block,
    }
    return Build(lora_kernel, types, constants, num_warps=config.num_warps)


launch = Launcher("moe_lora", build)


def run(problem, config, x, matrices, pairs, out, offset):
    """`Problem` in `flashinfer/ops/moe/lora/__init__.py` describes the arguments."""
    table, stride, n = matrices
    rows, width = out.shape
    blocks = triton.cdiv(n, config.block)
    tensors = [x, table, *pairs, offset, out]
    launch(
        problem, config, (rows * blocks, 1, 1), *(tensor for tensor in tensors if tensor is not None), x.stride(0),
        out.stride(0), stride, x.shape[1], n, blocks, width, len(pairs.adapters), len(table),
    )  # fmt: skip


IMPLEMENTATION = Implementation(run, (launch,))
