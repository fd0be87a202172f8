"""The gated delta rule by chunks of 64 tokens in Triton: two kernels. A sequence's result does not depend on the batch.

Two more kernels split long sequences into segments that run in parallel.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton

from flashinfer._core.checks import torch_dtype
from flashinfer._core.implementation import Implementation
from flashinfer._core.sizes import power_of_two
from flashinfer.ops.recurrent.delta import CHUNK
from flashinfer.ops.recurrent.delta.prepare import launch_prepare
from flashinfer.ops.recurrent.delta.scan import launch_scan
from flashinfer.ops.recurrent.delta.segments import CHAIN_ROWS, launch_chain, launch_map
from flashinfer.ops.recurrent.launching import raw, strides

# Bytes of stack a thread may use: up to 16 on Hopper, more with mma.sync.
STACK_BUDGET = 320


class Workspace(NamedTuple):
    """The first kernel's output: the tensors [places, heads, ..] of workspace.py, and the chunks of a row of tokens."""

    tensors: list[torch.Tensor]
    chunks: int


def prepare(problem, config, tokens, gates, device, scale, launch=None) -> Workspace:
    """Compute the triangular systems of all chunks, with the portable kernel or with `launch` in its place."""
    n, heads = tokens.sequences, tokens.heads
    rows, length, keys = tokens.k.shape[0], tokens.k.shape[1], tokens.k.shape[3]
    chunks = triton.cdiv(length, problem.stride)
    places = rows * chunks if tokens.offsets is None else length // problem.stride + n
    narrow = torch_dtype(config.operand)

    def empty(*shape, dtype=narrow):
        return torch.empty(places, heads, *shape, dtype=dtype, device=device)

    wide = power_of_two(keys, 16)
    tensors = [empty(CHUNK, CHUNK), empty(CHUNK, CHUNK)]
    tensors.append(empty(wide if problem.channels else 4 * CHUNK, dtype=torch.float32))
    tensors += [empty(CHUNK, wide) for _ in range(3 * problem.channels)]
    given = [x for x in (*tokens[:2], *tokens[3:5], gates.a_log, gates.bias, tokens.offsets) if x is not None]
    flat = [s for x in (tokens.q, tokens.k, tokens.gate, tokens.beta) for s in strides(x, (0, 1, 2))]
    groups = [1 if x is None else heads // x.shape[2] for x in (tokens.q, tokens.k, tokens.gate, tokens.beta)]
    groups += [1 if x is None else heads // x.shape[0] for x in (gates.a_log, gates.bias)]
    sizes = (n, length, chunks, heads, keys)
    numbers = scale, gates.lower, gates.sharp, gates.threshold
    launch = launch or partial(_launch_prepare, config)
    launch(problem, places, given, tensors, flat, sizes, groups, numbers)
    return Workspace(tensors, chunks)


def _launch_prepare(config, problem, places, given, made, flat, sizes, groups, numbers) -> None:
    tiles = places * sizes[3]
    programs = min(tiles, config.programs)
    scratch = torch.empty(programs, CHUNK, CHUNK, dtype=torch.float32, device=made[0].device)
    grid = (programs, 1, 1)
    launch_prepare(problem, config, grid, *given, scratch, *made, *flat, *sizes, tiles, *groups, *numbers)


def run(problem, config, tokens, gates, pool, out, scale, marks=None, write=None, segment=0):
    """Process every sequence from its initial state to its last token; operands.py describes the records."""
    workspace, chunks = prepare(problem, config, tokens, gates, out.device, scale)
    n, heads, length = tokens.sequences, tokens.heads, tokens.k.shape[1]
    keys, values = tokens.k.shape[3], tokens.v.shape[3]
    sizes = (n, length, chunks, heads, keys)
    groups = [heads // x.shape[2] for x in tokens[:3]]
    blocks, parts, starts = triton.cdiv(values, config.rows), n + problem.packed, ()
    if problem.segments:
        parts = length // segment + n
        starts = (_states_before(problem, config, tokens, pool, workspace, parts, segment),)
        parts += 1
    tables = (None,) * 3 if marks is None else (marks.out, marks.starts, marks.slots)
    given = [*tokens[:3], write, tokens.offsets, pool.read, pool.source, pool.state, *tables]
    given = [x for x in given if x is not None]
    flat = [s for x in (*tokens[:3], write, out) for s in strides(x, (0, 1, 2))]
    flat += [s for x in (pool.source, pool.state, tables[0]) for s in strides(x, (0, 1, 2, 3))]
    more = (values, pool.null, 1 if marks is None else marks.every, parts - 1, segment)
    grid = (blocks, heads, parts)
    launch_scan(problem, config, grid, *map(raw, given), *workspace, *starts, out, *flat, *sizes, *more, *groups)


def _states_before(problem, config, tokens, pool, workspace, parts: int, segment: int) -> torch.Tensor:
    """The states before segments, float32 [parts, heads, V, K]. Final states of sequences that end with a whole segment
    are written to the pool."""
    heads, keys, values = tokens.heads, tokens.k.shape[3], tokens.v.shape[3]
    maps = torch.empty(parts, heads, keys + values, keys, dtype=torch.float32, device=tokens.k.device)
    starts = torch.empty(parts, heads, values, keys, dtype=torch.float32, device=tokens.k.device)
    grid = (triton.cdiv(keys, config.rows) + triton.cdiv(values, config.rows), heads, parts)
    flat = [s for x in (tokens.k, tokens.v) for s in strides(x, (0, 1, 2))]
    sizes = heads, keys, values, segment
    groups = heads // tokens.k.shape[2], heads // tokens.v.shape[2]
    length, n = tokens.k.shape[1], tokens.sequences
    launch_map(problem, config, grid, tokens.k, tokens.v, tokens.offsets, workspace[0], workspace[2], maps, *flat, n,
               length, *sizes, *groups)  # fmt: skip
    given = [x for x in (tokens.offsets, pool.read, pool.source, pool.state) if x is not None]
    flat = [s for x in (pool.source, pool.state) for s in strides(x, (0, 1, 2, 3))]
    grid = (triton.cdiv(values, CHAIN_ROWS), heads, n)
    launch_chain(problem, config, grid, *map(raw, given), maps, starts, *flat, length, *sizes, pool.null)
    return starts


def kernels(problem, config):
    more = (launch_map, launch_chain) if problem.segments else ()
    return ((launcher, problem, config) for launcher in (launch_prepare, *more, launch_scan))


LAUNCHERS = (launch_prepare, launch_map, launch_chain, launch_scan)
IMPLEMENTATION = Implementation(run, LAUNCHERS, kernels=kernels, compile_together=True, stack_budget=STACK_BUDGET)
