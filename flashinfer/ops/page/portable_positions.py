"""The request of each appended token, and its position, in Triton: one token a thread.

Grid: tokens / ROWS. Warps: each has tokens of its own. Shared memory: none.
Inputs: append_indptr int32 [batch + 1], seq_lens int32 [batch]. Outputs: batch_indices, positions int32 [tokens].
Method: a binary search of append_indptr for each token.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pdl import begin
from flashinfer.ops._device.ragged import request_of


@triton.jit
def positions_kernel(
    append_indptr, seq_lens, batch_indices, positions, tokens, batch, ROWS: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin(PDL)
    request = request_of(append_indptr, batch, token)
    inside = (token >= tl.load(append_indptr)) & (token < tokens) & (request < batch)
    length = tl.load(seq_lens + request, inside, other=0)
    end = tl.load(append_indptr + request + 1, inside, other=0)
    tl.store(batch_indices + token, tl.where(inside, request, -1), token < tokens)
    tl.store(positions + token, tl.where(inside, token + length - end, 0), token < tokens)


def build(problem, config):
    types = dict.fromkeys(("append_indptr", "seq_lens", "batch_indices", "positions"), "*i32")
    types |= {"tokens": "i32", "batch": "i32"}
    return Build(positions_kernel, types, {"ROWS": config.rows, "PDL": config.pdl}, num_warps=config.num_warps)


launch = Launcher("page_positions", build)


def run(problem, config, append_indptr, seq_lens, batch_indices, positions):
    """A request's new tokens are its last ones; tokens past the last request are padding."""
    grid = (triton.cdiv(len(positions), config.rows), 1, 1)
    tensors = append_indptr, seq_lens, batch_indices, positions
    launch(problem, config, grid, *tensors, len(positions), len(seq_lens))


IMPLEMENTATION = Implementation(run, (launch,))
