"""Rows, pairs and warps of the routing kernels."""

from __future__ import annotations

from dataclasses import dataclass

# Up to so many pairs every program of the map counts all of them itself, which saves a launch: four steps of 512. Not
# measured.
FEW = 2048


@dataclass(frozen=True)
class RouteConfig:
    """rows : tokens of a program. num_warps : of a program."""

    rows: int
    num_warps: int


@dataclass(frozen=True)
class MapConfig:
    """pairs : pairs that a program looks at in one step. num_warps : of a program."""

    pairs: int
    num_warps: int


def route(problem, target) -> RouteConfig:
    # A warp to a token of 128 to 512 experts: the choices follow each other, and each is a reduction, which in one warp
    # needs no barrier. Few experts: several tokens to a warp, so that all lanes have work. Not measured.
    block = problem.groups * problem.size
    return RouteConfig(rows=max(1, 256 // block), num_warps=max(1, block // 512))


def token_map(problem, target) -> MapConfig:
    # Each step waits for a load and a scan, so of many pairs a step takes as many as registers hold well: 16 a thread.
    # Not measured.
    return MapConfig(512, 4) if problem.few else MapConfig(4096, 8)
