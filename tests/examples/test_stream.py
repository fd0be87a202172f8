"""The example of a user's variant runs, and is what it says."""

import torch

from examples.stream import __main__ as stream


def test_runs(capsys):
    assert stream.main(["--steps", "40", "--windows", "8", "30", "100", "--device", "cpu"]) < 1e-5
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].split()[0] for line in lines] == ["12", "34", "40"]


def test_each_part_of_the_mask_matters():
    """Without the first tokens, or with another window, the result is another one."""
    q, k, v, out = stream.decode(40, [8], 4, torch.device("cpu"), torch.float32)
    for window, first in ((8, 0), (9, 4), (7, 4), (40, 4)):
        other = stream.plain(q[0], k[0], v[0], stream.seen(40, window, first))
        assert float((out[0] - other).abs().max()) > 1e-3


def test_on_a_device(device):
    assert stream.main(["--steps", "20", "--windows", "8", "--device", device.type]) < 2e-2
