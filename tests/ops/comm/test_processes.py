"""Ranks as processes: every pattern of the all-reduce and every number_format of the all-to-all, through gloo."""

import pytest

from tests.ops.comm import processes


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_everything(tmp_path, world):
    said = processes.run(world, "tests.ops.comm.ranks:everything", tmp_path)
    assert said == [["collective (gloo): tensors are on the CPU", "collective"]] * world
