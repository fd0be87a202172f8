"""All-to-all over ranks: tokens to the ranks of their experts and back, and blocks of equal size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashinfer._core.dispatch import Op, portable_only
from flashinfer.ops.comm.alltoall import config

MOST_PAYLOADS = 8


@dataclass(frozen=True)
class Dispatch:
    """Send each token, with all its payloads, once to every rank that has one of its experts.

    Attributes
    ----------
    transport : str
        "peer" for peer memory, "collective" for the process group.
    world : int
        Ranks.
    choices : int
        Experts of a token, rounded up to a power of two.
    units : str
        A digit for each payload: log2 of the alignment in bytes of its rows and addresses, 0 to 4.
    block : int
        4-byte words of a payload's row that a program copies at once, a power of two.
    """

    transport: str
    world: int
    choices: int
    units: str
    block: int


@dataclass(frozen=True)
class Combine:
    """Sum each token's rows over the ranks that it was sent to, in float32 and in rank order.

    Attributes
    ----------
    transport, world
        As in Dispatch.
    dtype, out_dtype : str
        Dtypes of the rows and of the sums.
    block : int
        Elements of a row that a program adds at once, a power of two.
    staged : bool
        The rows are copied to peer memory first; else they are there.
    aligned : bool
        16-byte accesses of rows are aligned.
    """

    transport: str
    world: int
    dtype: str
    out_dtype: str
    block: int
    staged: bool = True
    aligned: bool = True


@dataclass(frozen=True)
class Blocks:
    """Plain all-to-all: row [batch, r] of every rank goes to rank r; two tensors in one exchange.

    Attributes
    ----------
    transport, world
        As in Dispatch.
    units : str
        Alignments of the two tensors, as in Dispatch.
    block : int
        4-byte words of a row that a program copies at once, a power of two.
    """

    transport: str
    world: int
    units: str
    block: int


def _needs_peers(problem, target) -> str:
    if problem.transport != "peer":
        return "ranks do not reach each other's memory: the process group carries the rows"
    return ""


def _dispatches() -> Iterator[Dispatch]:
    yield Dispatch("peer", 2, 8, "4422", 4096)
    yield Dispatch("peer", 8, 8, "40", 1024)


def _combines() -> Iterator[Combine]:
    yield Combine("peer", 2, "bf16", "bf16", 4096)
    yield Combine("peer", 8, "fp16", "fp32", 2048, staged=False, aligned=False)


def _blocks() -> Iterator[Blocks]:
    yield Blocks("peer", 4, "43", 256)


moe_dispatch = Op("moe_dispatch", Dispatch, portable_only(__name__, config.portable, refuses=_needs_peers), _dispatches)
moe_combine = Op("moe_combine", Combine, portable_only(__name__, config.portable, refuses=_needs_peers), _combines)
alltoall = Op("alltoall", Blocks, portable_only(__name__, config.portable, refuses=_needs_peers), _blocks)
