"""Decode from Ampere on, in Gluon: the launch of `attend_sm80_kernel`."""

from __future__ import annotations

from functools import partial

from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.attention.decode.config import warps_of_columns
from flashinfer.ops.attention.decode.sm80_kernel import attend_sm80_kernel
from flashinfer.ops.attention.worklist import OF_LENGTHS, implementation
from flashinfer.ops.attention.portable import Bound, parameters
from flashinfer.ops.attention.problem import Problem

# Programs of a dependent launch: as many as were timed, 64 requests of 8 heads (docs/rooms/attention-decode.md).
_MOST_EARLY = 1024
# Bytes of stack a thread may use: 8 of the scheduling kernel, where ptxas lays a value aside with registers to spare,
# and on Triton 3.9 16 of FP8 in tiles of 32 rows.
STACK_BUDGET = 16


def build(p: Problem, c) -> Build:
    """What the portable kernel takes, less what the kernel has no parameter for."""
    types, constants = parameters(p, c)
    names = attend_sm80_kernel.arg_names
    constants = {name: value for name, value in constants.items() if name.partition(".")[0] in names}
    constants.update(WARPS_N=c.num_warps // (c.block_m // 16 * warps_of_columns(p)), STAGES=c.num_stages, PDL=c.pdl)
    types = {name: kind for name, kind in types.items() if name.partition(".")[0] in names}
    constants["work.LISTED"] = not p.requests
    if p.requests:
        types, constants["work.BATCH"] = _of_lengths(types), p.requests
    return Build(attend_sm80_kernel, types, constants, num_warps=c.num_warps, most_early=_MOST_EARLY)


def _of_lengths(types: dict) -> dict:
    """The parameters with lengths and a split policy in the place of the work list."""
    work = {"work.arrivals": types["work.arrivals"], "work.kv_lens": "*i32"}
    work |= {f"work.{name}": "i32" for name in OF_LENGTHS}
    before = list(types)[: list(types).index("work.items")]
    rest = {name: kind for name, kind in types.items() if name not in before and not name.startswith("work.")}
    return {name: types[name] for name in before} | work | rest


attend_sm80 = Launcher("attend_sm80", build)


IMPLEMENTATION = implementation(partial(Bound, attend_sm80), attend_sm80, stack_budget=STACK_BUDGET)
