"""Work items that programs make of lengths: by themselves, against what a list of them has to be."""

import random
from dataclasses import dataclass

import pytest
import torch

from flashinfer._core.gluon_compat import gl, gluon
from flashinfer._core.launch import Build, Launcher
from flashinfer.ops.attention.decode.sm80_items import item_of_lengths
from flashinfer.ops.attention.split import Limits, SplitKnobs, SplitPolicy, capacity
from flashinfer.ops.attention.worklist import OF_LENGTHS
from flashinfer.testing.emulator import emulate

FIELDS = "items q_row q_len kv_base kv_len tile_row kv_begin kv_end slot first_slot splits".split()
NONE = -777


@gluon.jit
def items_kernel(out, work, window_left, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, GRAIN: gl.constexpr):
    item = gl.program_id(0)
    q_row, q_len, kv_base, kv_len, tile_row, kv_begin, kv_end, slot, first_slot, splits, items = item_of_lengths(
        item, work, window_left, GROUP, BLOCK_M, GRAIN
    )
    at = out + item * 11
    gl.store(at, items)
    if item < items:
        gl.store(at + 1, q_row)
        gl.store(at + 2, q_len)
        gl.store(at + 3, kv_base)
        gl.store(at + 4, kv_len)
        gl.store(at + 5, tile_row)
        gl.store(at + 6, kv_begin)
        gl.store(at + 7, kv_end)
        gl.store(at + 8, slot)
        gl.store(at + 9, first_slot)
        gl.store(at + 10, splits)


@dataclass(frozen=True)
class Cut:
    most: int
    group: int
    rows: int
    grain: int


def build(cut, warps) -> Build:
    types = dict(out="*i32") | {"work.kv_lens": "*i32"} | {f"work.{name}": "i32" for name in OF_LENGTHS}
    constants = {"work.BATCH": cut.most, "GROUP": cut.group, "BLOCK_M": cut.rows, "GRAIN": cut.grain}
    return Build(items_kernel, types | dict(window_left="i32"), constants, num_warps=warps)


launch = Launcher("items", build)


def items_of(lens, cut, q_len, policy, window, stride):
    """The records of a batch by their fields, of as many programs as it may have."""
    most, slots = capacity(policy, cut.group, cut.rows, Limits(len(lens), len(lens) * q_len, sum(lens)))
    out = torch.full((most, len(FIELDS)), NONE, dtype=torch.int32)
    numbers = (len(lens), q_len, stride, policy.least_split, policy.least_alone, policy.share, policy.whole,
               policy.abreast)  # fmt: skip
    with emulate("90a"):
        # What lies behind the lengths is nobody's.
        launch(cut, 4, (most, 1, 1), out, torch.tensor([*lens, 99999], dtype=torch.int32), *numbers, window)
    assert (out[:, 0] == out[0, 0]).all() and out[0, 0] <= most and (out[out[0, 0] :, 1:] == NONE).all()
    return [dict(zip(FIELDS, row)) for row in out[: out[0, 0]].tolist()], slots


@pytest.mark.parametrize("seed", range(4))
def test_items(seed):
    """Tiles have all keys that they see, each once and in order; slots of divided tiles are side by side."""
    draw = random.Random(seed)
    for turn in range(6):
        batch, q_len, grain = draw.choice((1, 2, 33, 64)), draw.choice((1, 1, 3)), draw.choice((32, 64))
        cut = Cut(1 if batch == 1 else 64, draw.choice((1, 3, 7, 12)), draw.choice((16, 32)), grain)
        knobs = SplitKnobs(least_split=256, least_alone=128, whole=draw.choice((0, 1024)))
        policy = SplitPolicy.of(knobs, draw.choice((1, 4, 20, 132)), draw.choice((1, 2, 8)), grain, None)
        window = draw.choice((-1, -1, 0, 40, 2**31 - 1))
        sizes = 0, 1, 128, 129, 256, 257, 1024, 1025, grain, grain + 1, draw.randrange(5000)
        lens, stride = [draw.choice(sizes) for _ in range(batch)], draw.choice((1, 777))
        if not turn:
            # Several tiles of several splits each.
            q_len, cut, lens = 3, Cut(64, 12, 16, grain), [4000, 7, 3000]
            policy = SplitPolicy.of(knobs, 132, 1, grain, None)
        items, slots = items_of(lens, cut, q_len, policy, window, stride)
        tiles, taken, found = -(-q_len * cut.group // cut.rows), [], 0
        for i, count in enumerate(lens):
            first = max(count - q_len - window, 0) if window >= 0 else 0
            for tile in range(tiles):
                place = dict(q_row=i * q_len, tile_row=tile * cut.rows)
                mine = [x for x in items if place.items() <= x.items()]
                found += len(mine)
                assert mine[0]["kv_begin"] <= first < mine[0]["kv_begin"] + grain
                assert all(a["kv_end"] == b["kv_begin"] for a, b in zip(mine, mine[1:])) and mine[-1]["kv_end"] == count
                same = dict(q_len=q_len, kv_base=i * stride, kv_len=count, splits=len(mine))
                assert all(same.items() <= x.items() for x in mine)
                places = [x["slot"] for x in mine]
                if len(mine) == 1:
                    assert places == [-1]
                    continue
                assert places == [*range(places[0], places[0] + len(mine))]
                assert all(x["first_slot"] == places[0] for x in mine)
                taken += places
        assert found == len(items) and sorted(taken) == [*range(len(taken))] and len(taken) <= slots
