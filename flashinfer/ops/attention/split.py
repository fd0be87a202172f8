"""How keys are divided among work items: one policy, and the most work items that it makes of a batch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

# Splits of a tile that are combined in one level (_device/combine.py).
#
# One program reads them, at 8 rows of 128 columns 16 splits in about 0.9 us. 96 splits are 6 rounds, 5.3 us; in two
# levels, 16 splits and then 6 groups, they are 2 rounds, and 1.5 us for a fence, an atomic, a write and a read more:
# 3.3 us. 256 splits, a long request of one KV head on 132 multiprocessors, are 14 and 3.3 us. These are predictions; an
# H100 takes 42.6 us instead of 56.9 for 131072 keys: see docs/rooms/attention-decode.md.
FEW = 96
# A policy that may make more splits of a tile has kernels for two levels. Below, few requests are so long, and the code
# costs the others: 1 x 2048 with 2 KV heads takes 11.8 us with it and 11.4 without (H100, cold L2).
ONE_LEVEL = 192


class Limits(NamedTuple):
    """Host-side upper bounds of a batch, from shapes alone: what buffers and grids are sized by.

    Attributes
    ----------
    batch : int
        Requests.
    q_rows : int
        Query rows in all; -1 where only the call will show.
    kv_tokens : int
        Keys in all; -1 where only the call will show.
    longest_q : int
        Query rows of a request; 0 where only q_rows bounds them.
    each_kv : int
        Keys of every request, where all have as many, and as many query rows; 0 where they may differ.
    """

    batch: int
    q_rows: int
    kv_tokens: int
    longest_q: int = 0
    each_kv: int = 0

    @property
    def known(self) -> bool:
        return self.q_rows >= 0 and self.kv_tokens >= 0


@dataclass(frozen=True, kw_only=True)
class SplitKnobs:
    """What a kernel's config states of splits: the config of every attention kernel has these fields.

    Attributes
    ----------
    programs_per_sm : int
        Work items that should be in flight on one multiprocessor: what keys are split for.
    least_split : int
        Keys that a split should have at least, however idle the chip.
    least_alone : int
        The same where each split has a multiprocessor for itself; 0 for no other.
    whole : int
        Requests of up to so many keys are not split where they keep two thirds of the chip busy
        (_device/schedule.py); 0 for none.
    """

    programs_per_sm: int = 1
    least_split: int = 0
    least_alone: int = 0
    whole: int = 0


@dataclass(frozen=True, kw_only=True)
class SplitPolicy(SplitKnobs):
    """How the keys of requests are divided into splits, each of which is a work item of every tile of its request.

    To a config's knobs `of` adds what the chip, the KV heads and the plan ask for; by default every request stays
    whole.

    Attributes
    ----------
    share : int
        Work items per KV head that fill the chip: the keys of all tiles over it are the length of a split.
    abreast : int
        Work items per KV head that give each multiprocessor one.
    fixed : int
        Keys of every split but a request's last, whatever else is in the batch; 0 for splits by `share`.
    """

    share: int = 0
    abreast: int = 0
    fixed: int = 0

    @classmethod
    def of(cls, knobs: SplitKnobs, sms: int, kv_heads: int, grain: int, fixed_split_size: int | None) -> SplitPolicy:
        """The policy of a chip of `sms` multiprocessors. Splits are multiples of `grain` keys, a step of the kernel.

        With 132 multiprocessors, 2 programs on each and 8 KV heads, share is 33 and abreast 17; a fixed_split_size of
        100 keys in steps of 64 is 128.
        """
        stated = {field.name: getattr(knobs, field.name) for field in fields(SplitKnobs)}
        if fixed_split_size:
            # Whole steps, so that splits of paged keys begin where a page does.
            return cls(**stated, fixed=-(-fixed_split_size // grain) * grain)
        return cls(**stated, share=-(-sms * knobs.programs_per_sm // kv_heads), abreast=-(-sms // kv_heads))

    @property
    def by_share(self) -> int:
        """The most splits by `share` of all divided tiles, and so of one: see `capacity`."""
        return self.share + -(-self.share // 3) + 1 if self.share else 0

    @property
    def many(self) -> bool:
        """Whether kernels combine more than FEW splits of a tile in two levels."""
        return bool(self.fixed) or self.by_share > ONE_LEVEL


def capacity(policy: SplitPolicy, group: int, tile_rows: int, limits: Limits) -> tuple[int, int]:
    """The most work items, and the most of them that are splits of a divided tile, of a batch within `limits`.

    By `share`, a split has at least total / share keys, the total counted over all tiles. A request is divided if it
    has one and a half splits or more, and rounding its keys to the nearest count of splits adds at most a third. By
    `fixed`, a request of n keys has at most n / fixed + 1 splits for each of its tiles; no request has more tiles than
    the longest, and no tile more splits than all keys make.
    """
    rows = limits.q_rows * group
    tiles = limits.batch + rows // tile_rows
    if policy.fixed:
        longest = rows if not limits.longest_q else min(rows, limits.longest_q * group)
        by_request = -(-longest // tile_rows) * (limits.kv_tokens // policy.fixed + limits.batch)
        by_tile = tiles * -(-limits.kv_tokens // policy.fixed)
        slots = min(by_request, by_tile)
        return tiles + slots, slots
    if not policy.share:
        return tiles, 0
    return tiles + policy.by_share, policy.by_share


def divides(policy: SplitPolicy, group: int, tile_rows: int, limits: Limits) -> bool:
    """Whether a request of a batch within `limits` may be divided.

    A request is if it has one and a half splits or more, and a split by `share` has at least total / share keys. So
    equal requests are not where their tiles are more than two thirds of `share`.
    """
    if not limits.each_kv or policy.fixed or not limits.batch:
        return bool(policy.share or policy.fixed)
    tiles = limits.batch * -(-limits.q_rows // limits.batch * group // tile_rows)
    return 0 < 3 * tiles <= 2 * policy.share
