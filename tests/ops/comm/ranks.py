"""What each rank does where one start of processes serves several tests: they take longer to start than to run."""

from tests.ops.comm.allreduce_fusion.ranks import every_pattern
from tests.ops.comm.alltoall.ranks import layers


def everything(rank, world, device):
    every_pattern(rank, world, device)
    layers(rank, world, device)
