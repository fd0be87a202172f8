"""Configs of the routing kernels."""

from __future__ import annotations

from dataclasses import dataclass

# Up to this many pairs the token map is one launch, each of whose programs counts all pairs. For more pairs a first
# launch counts. With 4096 pairs (512 tokens of DeepSeek-V3) the one launch took 14.3 us on an H100.
FEW = 2048


@dataclass(frozen=True)
class RouteConfig:
    """rows : tokens of a program. num_warps : warps of a program."""

    rows: int
    num_warps: int


@dataclass(frozen=True)
class MapConfig:
    """pairs : pairs of a program's step. programs : the largest number of programs, where there are many pairs.

    num_warps : warps of a program.
    """

    pairs: int
    programs: int
    num_warps: int


def route(problem, target) -> RouteConfig:
    # One warp for a token with 128 to 512 experts: the choices are sequential reductions, and a reduction within a warp
    # needs no barrier. With fewer experts a warp has several tokens, so that all lanes have work. Not measured.
    block = problem.groups * problem.size
    return RouteConfig(rows=max(1, 256 // block), num_warps=max(1, block // 512))


def token_map(problem, target) -> MapConfig:
    # A step costs the latency of a load and a scan. For one token of DeepSeek-V3 on an H100 the kernel takes 3.3 us
    # with steps of 256 pairs, 3.7 with 512, 4.9 with 1024.
    if problem.few:
        return MapConfig(256, 0, 4)
    # place_kernel compares all pairs of a step with each other, so steps are short. A program's steps are sequential,
    # so there are about as many programs as multiprocessors; each reads the counts of all programs, so there are not
    # more. 4096 tokens of Mixtral take 7 us and of DeepSeek-V3 14; with 8 steps in each of 8 and 32 programs they took
    # 45 and 40 (H100).
    return MapConfig(128, 128, 8)
