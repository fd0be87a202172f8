"""Lengths of requests from their page tables in Triton: one request a thread.

Grid: batch / ROWS. Warps: each has requests of its own. Shared memory: none.
Inputs: kv_indptr int32 [batch + 1], kv_last_page_len int32 [batch]. Outputs: out int32 [batch].
Method: (pages - 1) * page_size + last page length; 0 without pages.
"""

import triton
import triton.language as tl

from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops._device.pdl import begin


@triton.jit
def seq_lens_kernel(
    kv_indptr, kv_last_page_len, out, page_size, batch, ROWS: tl.constexpr, PDL: tl.constexpr
):
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = request < batch
    begin(PDL)
    pages = tl.load(kv_indptr + request + 1, inside, other=0) - tl.load(kv_indptr + request, inside, other=0)
    last = tl.load(kv_last_page_len + request, inside, other=0)
    tl.store(out + request, tl.where(pages > 0, (pages - 1) * page_size + last, 0), inside)


def build(problem, config):
    types = dict.fromkeys(("kv_indptr", "kv_last_page_len", "out"), f"*{problem.dtype}")
    types |= {"page_size": "i32", "batch": "i32"}
    return Build(seq_lens_kernel, types, {"ROWS": config.rows, "PDL": config.pdl}, num_warps=config.num_warps)


launch = Launcher("page_seq_lens", build)


def run(problem, config, kv_indptr, kv_last_page_len, out, page_size):
    """All pages of a request are full but the last."""
    grid = (triton.cdiv(len(out), config.rows), 1, 1)
    launch(problem, config, grid, kv_indptr, kv_last_page_len, out, page_size, len(out))


IMPLEMENTATION = Implementation(run, (launch,))
