"""Prefill by chunks on Hopper: builds and launches its kernels."""

from __future__ import annotations

import math

from flashinfer._core.gluon_compat import tensordesc
from flashinfer._core.implementation import Implementation
from flashinfer._core.launch import Build, Launcher, TensorMap
from flashinfer._core.target import target_of
from flashinfer.ops.recurrent.delta import CHUNK, sm90_prepare, sm90_prepare_channels
from flashinfer.ops.recurrent.delta.chunks import prepare
from flashinfer.ops.recurrent.delta.config import Sm90ChunkConfig, paired_scan
from flashinfer.ops.recurrent.delta.prepare import launch_prepare
from flashinfer.ops.recurrent.delta.sm90_scan import scan_sm90_kernel
from flashinfer.ops.recurrent.delta.workspace import STATE
from flashinfer.ops.recurrent.launching import place_types, pointers, raw, size_types, strides


def _boxes(problem) -> dict[str, tuple[int, ...]]:
    """The TMA box of each tensor map: of rows of the workspace, or of tokens of a head."""
    lead = (1,) if problem.channels else (1, 1)
    boxes = dict(k_map=(*lead, CHUNK, problem.key_dim), q_map=(*lead, CHUNK, CHUNK))
    boxes |= dict(last_map=boxes["k_map"], v_map=(1, 1, CHUNK, CHUNK))
    boxes |= dict(a_map=(1, CHUNK, CHUNK), p_map=(1, CHUNK, CHUNK))
    return boxes | dict(out_map=(1, 1, CHUNK, CHUNK))


def _build_scan(problem, config) -> Build:
    maps = {name: tensordesc("bf16", box) for name, box in _boxes(problem).items()}
    mark, table = problem.marks_dtype, problem.index
    kinds = {"factors": "fp32", "offsets": table if problem.packed else "", "read": table if problem.read else ""}
    kinds |= {"source": problem.source_dtype, "state": problem.state_dtype, "marks": mark}
    kinds |= {"mark_starts": table if mark else "", "mark_slots": table if problem.mark_slots else ""}
    kinds |= {"out": problem.out_dtype}
    types = maps | pointers(kinds, {"factors", "out"})
    places = {"out_by": ("row", "token", "head")} | dict.fromkeys(("source_by", "state_by", "marks_by"), STATE)
    types |= place_types(places, {"out_by": problem.out_dtype})
    types |= size_types(("sequences", "tokens", "chunks", "heads", "null", "every", "k_group", "q_group", "v_group"))
    constants = {"CHANNELS": problem.channels, "FIRST_MARK": problem.first_mark, "SOURCE": problem.source_dtype}
    constants |= {"STATE": problem.state_dtype, "MARKS": mark, "STAGES": config.stages}
    constants |= {"PARTS": config.parts, "CAPABILITY": config.capability, "COPY_REGISTERS": config.copy_registers}
    return Build(scan_sm90_kernel, types, constants, num_warps=4)


launch_scan_sm90 = Launcher("delta_scan_sm90", _build_scan)


def _preparing(problem):
    """The module of the first kernel; None for the portable one, if channels have decays without a lower bound."""
    if problem.channels:
        return sm90_prepare_channels if problem.bounded and problem.gate else None
    return sm90_prepare


def run(problem, config, tokens, gates, pool, out, scale, marks=None, write=None, segment=0):
    """Process every sequence from its initial state to its last token; operands.py describes the records."""
    preparing = _preparing(problem)
    work = prepare(problem, config, tokens, gates, out.device, scale, preparing and preparing.launch)
    scan(problem, config, tokens, work, pool, out, marks)


def scan(problem, config, tokens, work, pool, out, marks=None) -> None:
    """Launch the second kernel; `work` is the first kernel's workspace."""
    heads, values = tokens.heads, out.shape[3]
    sizes = tokens.sequences, tokens.k.shape[1], work.chunks, heads
    solved, scores, factors, *rows = work.tensors
    q, k, v = (x.transpose(1, 2) for x in tokens[:3])
    k_rows, q_rows, last_rows = (x.flatten(0, 1) for x in rows) if problem.channels else (k, q, k)
    mapped = k_rows, q_rows, last_rows, v, solved.flatten(0, 1), scores.flatten(0, 1), out.transpose(1, 2)
    maps = [TensorMap(x, box) for x, box in zip(mapped, _boxes(problem).values(), strict=True)]
    tables = (None,) * 3 if marks is None else (marks.out, marks.starts, marks.slots)
    given = [factors, tokens.offsets, pool.read, pool.source, pool.state, *tables, out]
    flat = [*strides(out, (0, 1, 2)), *(s for x in (pool.source, pool.state, tables[0]) for s in strides(x, range(4)))]
    every = 1 if marks is None else marks.every
    groups = [heads // x.shape[2] for x in (tokens.k, tokens.q, tokens.v)]
    programs = values // CHUNK, heads, tokens.sequences
    config = fitting(problem, config, math.prod(programs), out.device)
    grid = (values // (CHUNK * config.parts), heads, tokens.sequences + problem.packed)
    given = [raw(x) for x in given if x is not None]
    launch_scan_sm90(problem, config, grid, *maps, *given, *flat, *sizes, pool.null, every, *groups)


def fitting(problem, config, programs: int, device) -> Sm90ChunkConfig:
    """The config of the scan: with more programs than multiprocessors two of a head share one, and its tiles."""
    paired = paired_scan(problem, config)
    return paired if paired is not None and programs > target_of(device).sms else config


def kernels(problem, config):
    preparing = _preparing(problem)
    if preparing is None:
        yield launch_prepare, problem, config
    else:
        yield from ((preparing.LAUNCHER, problem, its) for its in preparing.CONFIGS)
    yield launch_scan_sm90, problem, config
    paired = paired_scan(problem, config)
    if paired is not None:
        yield launch_scan_sm90, problem, paired


# Bytes of stack a thread may use. With Triton 3.9 the scan with checkpoints spills 40 bytes of addresses, and the first
# kernel with a decay for each channel 32. Triton 3.6 spills none.
STACK_BUDGET = 40
LAUNCHERS = (launch_prepare, sm90_prepare.LAUNCHER, sm90_prepare_channels.LAUNCHER, launch_scan_sm90)
IMPLEMENTATION = Implementation(run, LAUNCHERS, kernels=kernels, compile_together=True, stack_budget=STACK_BUDGET)
