"""Finalize in torch: choice after choice."""

import torch

from flashinfer._core.implementation import Implementation


def run(problem, config, y, pair_row, weights, out):
    """Write out [tokens, hidden] of y [rows, hidden] and of pair_row and weights (or None) [tokens, top_k]."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for choice in range(pair_row.shape[1]):
        row = pair_row[:, choice].long()
        token = (row >= 0).nonzero()[:, 0]
        term = y[row[token]].float()
        if weights is not None:
            term = term * weights[token, choice, None].float()
        total[token] += term
    out.copy_(total)


IMPLEMENTATION = Implementation(run)
