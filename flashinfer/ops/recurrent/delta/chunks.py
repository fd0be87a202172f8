"""The gated delta rule by chunks of 64 tokens in Triton: two kernels, whose results depend on nothing in the batch."""

import torch
import triton

from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer.ops.recurrent.delta import CHUNK
from flashinfer.ops.recurrent.delta.config import power_of_two
from flashinfer.ops.recurrent.delta.prepare import launch_prepare
from flashinfer.ops.recurrent.delta.scan import launch_scan
from flashinfer.ops.recurrent.launching import raw, strides

# Bytes of stack a thread may use: up to 16 on Hopper, more where products are mma of older chips.
STACK_BUDGET = 320


def run(problem, config, tokens, gates, pool, out, scale, marks=None, write=None):
    """Every sequence from its state to its last token; see operands.py for what is read and written."""
    device, n, heads = out.device, tokens.sequences, tokens.heads
    rows, length, keys, values = tokens.k.shape[0], tokens.k.shape[1], tokens.k.shape[3], tokens.v.shape[3]
    chunks = triton.cdiv(length, problem.stride)
    places = rows * chunks if tokens.offsets is None else length // problem.stride + n
    narrow = torch_dtype(config.operand)

    def empty(*shape, dtype=narrow):
        return torch.empty(places, heads, *shape, dtype=dtype, device=device)

    wide = power_of_two(keys)
    workspace = [empty(CHUNK, CHUNK), empty(CHUNK, CHUNK)]
    workspace.append(empty(wide if problem.channels else 3 * CHUNK, dtype=torch.float32))
    workspace += [empty(CHUNK, wide) for _ in range(3 * problem.channels)]
    group = {name: 1 if x is None else heads // x.shape[2] for name, x in zip("qkvgb", tokens[:5], strict=True)}
    rate = [1 if x is None else heads // x.shape[0] for x in (gates.a_log, gates.bias)]
    sizes = (n, length, chunks, heads, keys)
    tiles = places * heads
    programs = min(tiles, config.programs)
    scratch = torch.empty(programs, CHUNK, CHUNK, dtype=torch.float32, device=device)
    given = [x for x in (*tokens[:2], *tokens[3:5], gates.a_log, gates.bias, tokens.offsets) if x is not None]
    flat = [s for x in (tokens.q, tokens.k, tokens.gate, tokens.beta) for s in strides(x, (0, 1, 2))]
    grouped = (group["q"], group["k"], group["g"], group["b"], *rate)
    numbers = scale, gates.lower, gates.sharp, gates.threshold
    grid = (programs, 1, 1)
    launch_prepare(problem, config, grid, *given, scratch, *workspace, *flat, *sizes, tiles, *grouped, *numbers)

    tables = (None,) * 3 if marks is None else (marks.out, marks.starts, marks.slots)
    given = [*tokens[:3], write, tokens.offsets, pool.read, pool.source, pool.state, *tables]
    given = [x for x in given if x is not None]
    flat = [s for x in (*tokens[:3], write, out) for s in strides(x, (0, 1, 2))]
    flat += [s for x in (pool.source, pool.state, tables[0]) for s in strides(x, (0, 1, 2, 3))]
    more = (values, pool.null, 1 if marks is None else marks.every, group["q"], group["k"], group["v"])
    grid = (triton.cdiv(values, config.rows), heads, n + problem.packed)
    launch_scan(problem, config, grid, *map(raw, given), *workspace, out, *flat, *sizes, *more, scale)


IMPLEMENTATION = Implementation(run, (launch_prepare, launch_scan), compile_together=True, stack_budget=STACK_BUDGET)
