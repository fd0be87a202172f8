"""Counters that begin at zero: of the process's room in a capture, shared by what one stream captures for one graph."""

import torch

from tests.core.card_process import card_process


def counters_of_captures(card):
    from flashinfer.ops.attention import counters

    device = torch.device("cuda", 0)
    card.capture, card.known = 1, True
    try:
        # Without a room the graph clears them itself.
        before = [counters.zeros(300, device) for _ in range(2)]
        assert before[0].data_ptr() != before[1].data_ptr() and not before[0].any()
        card.capture = None
        outside = counters.zeros(300, device)
        room, used = counters._rooms[device]
        begin, end = room.data_ptr(), room.data_ptr() + room.nbytes
        assert not used and not begin <= outside.data_ptr() < end and not room.any()
        places = []
        for capture, stream, count in ((1, 7, 300), (1, 7, 200), (1, 8, 300), (2, 7, 300), (1, 7, 4000), (1, 7, 300)):
            card.capture, card.stream = capture, stream
            made = counters.zeros(count, device)
            assert made.shape == (count,) and made.dtype == torch.int32
            assert begin <= made.data_ptr() and made.data_ptr() + made.nbytes <= end
            places.append(made.data_ptr())
        assert places[0] == places[1] and places[4] == places[5] and len({*places}) == 4
        card.capture = 3
        past = counters.zeros(room.numel(), device)
        assert not begin <= past.data_ptr() < end and past.numel() == room.numel()
    finally:
        card.capture, card.known, card.stream = None, False, 7


def test_counters(tmp_path):
    with card_process(tmp_path) as call:
        call(counters_of_captures)
    from flashinfer.ops.attention import counters

    assert counters.zeros(5, torch.device("cpu")).tolist() == [0] * 5
