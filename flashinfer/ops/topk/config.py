"""Tiles and warps of the top-k kernels: those shared with sampling (`tiles.py`), and those of a small k
(`short.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops._device import tiles

# Columns of a group. With groups of 8, k = 4096 of 131072 columns is a quarter of the number of groups: bracket takes
# 16 us, with groups of 4 27 us (H200).
GROUP = 8
# The largest k for `short.py`: its list then fits into registers.
SHORT_K = 2048
# Elements that a program lists at once, 8 a thread.
SHORT_TILE = 2048
# Elements of a list that stay in registers, 16 a thread. For k = 2048 of 4 x 65536 the list has 3190 +- 265 elements
# with a sample of 256 groups of 16 columns, and 3900 +- 430 with 128 groups. A list of more than 4096 took 45 us
# instead of 20.0, with 16 warps 20.6 (H100, keys compared one by one).
LIST_TILE = 4096
GROUPS = 256
MEMBERS = 16


@dataclass(frozen=True)
class Config(tiles.Config):
    """short_k : the largest k that `short` is for.

    short_tile, short_warps : elements that a program lists at once, and its warps. groups, members : of a row's sample.

    short_list, short_list_warps : as list_tile and list_warps for the program that searches the list.

    finds_bound : each list program computes the bound. share : elements that an emit program writes at once.

    pdl : this kernel may be launched before the kernels in front of it end.
    """

    short_k: int
    short_tile: int
    short_warps: int
    groups: int
    members: int
    short_list: int
    short_list_warps: int
    finds_bound: bool = False
    share: int = 0
    pdl: bool = False


def portable(problem, target) -> Config:
    # Both searches stay in registers, 16 keys a thread: a list for k = 2048 has about 2400 elements, and 65536
    # columns have 8192 groups.
    sizes = vars(tiles.portable(problem, target)) | dict(group=GROUP, group_tile=8192, group_warps=16)
    sizes |= dict(list_tile=4096, list_warps=8)
    return Config(**sizes, short_k=SHORT_K, short_tile=SHORT_TILE, short_warps=8, groups=GROUPS, members=MEMBERS,
                  short_list=LIST_TILE, short_list_warps=8)
