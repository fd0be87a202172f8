"""Launch configurations of the exchanges over PCIe: pure functions of a call's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from flashinfer._core import env
from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.ops.comm.allreduce_fusion import config
from flashinfer.ops.comm.symmetric import SLOTTED

PACK_BYTES = 16
MOST_BLOCKS = SLOTTED
WORLD_SIZES = 2, 4, 8
_THREADS = 128


class PcieIpcVariant(IntEnum):
    """How rows travel: to all ranks at once, or by way of the rank that adds them."""

    UNSTAGED = 0
    STAGED = 1


@dataclass(frozen=True)
class PcieIpcLaunchConfig:
    """The launch of a collective.

    Attributes
    ----------
    blocks, threads : int
        Programs, and threads of each.
    variant : PcieIpcVariant
        How rows travel.
    """

    blocks: int
    threads: int
    variant: PcieIpcVariant


@checked
def get_pcie_ipc_launch_config(
    world_size: int, numel: int, elem_size: int, max_blocks: int = MOST_BLOCKS
) -> PcieIpcLaunchConfig | None:
    """The launch of an all-reduce, the same on every rank; None for a call that is not taken.

    Parameters
    ----------
    world_size : int
        2, 4 or 8.
    numel, elem_size : int
        Elements, and bytes of one: 2. Together a multiple of 16 bytes, with 16 for each rank.
    max_blocks : int
        The most programs: 1 to 128.

    Returns
    -------
    PcieIpcLaunchConfig or None

    Raises
    ------
    ValueError
        max_blocks out of its range.

    Examples
    --------
    >>> from flashinfer.comm import get_pcie_ipc_launch_config
    >>> get_pcie_ipc_launch_config(2, 8192, 2)
    PcieIpcLaunchConfig(blocks=8, threads=128, variant=<PcieIpcVariant.UNSTAGED: 0>)
    """
    require(1 <= max_blocks <= MOST_BLOCKS, "max_blocks", max_blocks, f"1 to {MOST_BLOCKS}")
    if not _taken(world_size, numel * elem_size, elem_size):
        return None
    small = numel * elem_size <= config.one_shot_bytes(world_size)
    programs = config.programs(-(-numel // config.chunk(numel)))
    variant = PcieIpcVariant.UNSTAGED if small else PcieIpcVariant.STAGED
    return PcieIpcLaunchConfig(min(programs, max_blocks), _THREADS, variant)


@checked
def get_pcie_ipc_all_gather_launch_config(
    world_size: int,
    shard_numel: int,
    max_blocks: int = MOST_BLOCKS,
    element_size: int = 2,
    ordered_4plus4: bool = False,
) -> PcieIpcLaunchConfig | None:
    """The launch of an all-gather or reduce-scatter of `shard_numel` elements a rank; None for what is not taken.

    Parameters
    ----------
    world_size, max_blocks
        As in `get_pcie_ipc_launch_config`.
    shard_numel, element_size : int
        Elements of a rank, and bytes of one: 2. Together a multiple of 16 bytes.
    ordered_4plus4 : bool
        Of upstream's copies between two halves of 8 GPUs; ranks are alike here, and it changes nothing.

    Returns
    -------
    PcieIpcLaunchConfig or None
        None for sizes other than the above.

    Raises
    ------
    ValueError
        max_blocks out of its range.

    Examples
    --------
    >>> from flashinfer.comm.pcie_ipc_tuning import get_pcie_ipc_all_gather_launch_config
    >>> get_pcie_ipc_all_gather_launch_config(2, 8192).threads
    128
    """
    require(1 <= max_blocks <= MOST_BLOCKS, "max_blocks", max_blocks, f"1 to {MOST_BLOCKS}")
    nbytes = shard_numel * element_size
    if not _taken(world_size, nbytes * world_size, element_size) or nbytes % PACK_BYTES:
        return None
    programs = config.programs(-(-shard_numel // config.CHUNKS[0]))
    return PcieIpcLaunchConfig(min(programs, max_blocks), _THREADS, PcieIpcVariant.UNSTAGED)


# A reduce-scatter that leaves as much on a rank moves the same blocks, the other way.
get_pcie_ipc_reduce_scatter_launch_config = get_pcie_ipc_all_gather_launch_config


def _taken(world_size: int, nbytes: int, elem_size: int) -> bool:
    packs, rest = divmod(nbytes, PACK_BYTES)
    return world_size in WORLD_SIZES and elem_size == 2 and not rest and packs >= world_size


def default_cache_path(world_size: int) -> str:
    """The file that upstream keeps measured launches in. Launches here are functions of sizes, and nothing is kept.

    Parameters
    ----------
    world_size : int
        Ranks, at least 1.

    Returns
    -------
    str
        A path under FLASHINFER_WORKSPACE_BASE.

    Raises
    ------
    ValueError
        No rank.

    Examples
    --------
    >>> from flashinfer.comm import pcie_ipc_default_cache_path
    >>> pcie_ipc_default_cache_path(2).rpartition("/")[2]
    'pcie_ipc_all_reduce_ws2.json'
    """
    require(world_size >= 1, "world_size", world_size, "at least 1")
    base = Path(env.WORKSPACE_BASE.get()).expanduser()
    return f"{base}/.cache/flashinfer/autotune/pcie_ipc_all_reduce_ws{world_size}.json"
