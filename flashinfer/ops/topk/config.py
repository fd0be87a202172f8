"""Tiles and warps of the top-k kernels: those of all rooms that read long rows, and those of `short`."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer.ops._device import tiles

# Groups of 8, so that 4096 of 131072 are a quarter of them. With groups of 4 bracket takes 27 us, with 8 it takes 16
# (H200).
GROUP = 8
# The largest k for `short`, whose list then fits into its registers.
SHORT_K = 2048
# Elements that a program lists at once, 8 a thread.
SHORT_TILE = 2048
# Elements of a list that stay in registers, 16 a thread. 2048 of 4 x 65536 have 3190, give or take 265, by 256 groups
# of 16; 3900, give or take 430, by 128. With one of more than 4096 they took 45 us, not 20.0; with 16 warps 20.6 (H100,
# when keys were compared one by one).
LIST_TILE = 4096
GROUPS = 256
MEMBERS = 16


@dataclass(frozen=True)
class Config(tiles.Config):
    """short_k : the largest k that `short` is for.

    short_tile, short_warps : elements that a program lists at once, and its warps. groups, members : of a row's sample.

    short_list, short_list_warps : as list_tile and list_warps for the program that searches the list.

    own : programs that list find the bound. share : elements that a program of emit writes at once.

    pdl : this kernel may be launched before those in front of it end.
    """

    short_k: int
    short_tile: int
    short_warps: int
    groups: int
    members: int
    short_list: int
    short_list_warps: int
    own: bool = False
    share: int = 0
    pdl: bool = False


def portable(problem, target) -> Config:
    # Both searches stay in registers, 16 keys a thread: a list for k = 2048 has about 2400 elements, and 65536
    # columns have 8192 groups.
    sizes = vars(tiles.portable(problem, target)) | dict(group=GROUP, group_tile=8192, group_warps=16)
    sizes |= dict(list_tile=4096, list_warps=8)
    return Config(**sizes, short_k=SHORT_K, short_tile=SHORT_TILE, short_warps=8, groups=GROUPS, members=MEMBERS,
                  short_list=LIST_TILE, short_list_warps=8)
