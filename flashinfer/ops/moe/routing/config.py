"""Rows, pairs and warps of the routing kernels."""

from __future__ import annotations

from dataclasses import dataclass

# Up to so many pairs the map is one launch, whose programs count all of them each; beyond, a launch before counts. For
# 512 tokens of DeepSeek-V3, 4096 pairs, the one launch took 14.3 us (H100).
FEW = 2048


@dataclass(frozen=True)
class RouteConfig:
    """rows : tokens of a program. num_warps : of a program."""

    rows: int
    num_warps: int


@dataclass(frozen=True)
class MapConfig:
    """pairs : pairs that a program looks at in one step. programs : at most, where there are many pairs.

    num_warps : of a program.
    """

    pairs: int
    programs: int
    num_warps: int


def route(problem, target) -> RouteConfig:
    # A warp to a token of 128 to 512 experts: the choices follow each other, and each is a reduction, which in one warp
    # needs no barrier. Few experts: several tokens to a warp, so that all lanes have work. Not measured.
    block = problem.groups * problem.size
    return RouteConfig(rows=max(1, 256 // block), num_warps=max(1, block // 512))


def token_map(problem, target) -> MapConfig:
    # A step of few pairs waits for a load and a scan: 256 of them are scanned in 3.3 us, 512 in 3.7, 1024 in 4.9 (one
    # token of DeepSeek-V3, H100).
    if problem.few:
        return MapConfig(256, 0, 4)
    # A step of many compares its pairs with each other, so it is short. Steps follow each other, so there are as many
    # programs as multiprocessors of a chip, about; each reads the counts of all, so there are no more. 4096 tokens of
    # Mixtral take 7 us, of DeepSeek-V3 14; 8 steps in each of 8 and 32 programs took 45 and 40 (H100).
    return MapConfig(128, 128, 8)
