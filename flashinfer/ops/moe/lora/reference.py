"""Routed rows times low-rank matrices in torch: pair after pair, of matrices at addresses."""

import torch

from flashinfer._core.addresses import tensor_at
from flashinfer._core.implementation import Implementation


def run(problem, config, x, matrices, pairs, out, offset):
    """As the Problem says."""
    (table, stride, n), (tokens, experts, adapters, weights, order, begin) = matrices, pairs
    order = range(len(tokens)) if order is None else order.tolist()
    begin = range(len(out) + 1) if begin is None else begin.tolist()
    offset = 0 if offset is None else int(offset)
    low, high = max(offset, 0), min(offset + n, out.shape[1])
    for row in range(len(out)):
        total, found = torch.zeros(n, dtype=torch.float32, device=x.device), False
        for pair in order[begin[row] : begin[row + 1]]:
            token, expert = int(tokens[pair]), int(experts[pair])
            there = 0 <= token < len(adapters) and 0 <= expert < len(table)
            adapter = int(adapters[token]) if there else -1
            if adapter < 0:
                continue
            found = True
            address = int(table[expert]) + adapter * stride * x.element_size()
            matrix = tensor_at(address, x.dtype, (n, x.shape[1]), x.device)
            term = matrix.float() @ x[token if problem.by_token else pair].float()
            total += term if weights is None else term * weights[pair]
        if found and low < high:
            part, total = out[row, low:high], total[low - offset : high - offset]
            part.copy_(total + part.float() if problem.adds else total)


IMPLEMENTATION = Implementation(run)
