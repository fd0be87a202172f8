"""Several ranks in one process: their kernels run in the interpreter, phase by phase, through memory that all see."""

from dataclasses import replace

import torch

from flashinfer._core.target import target_of
from flashinfer.ops.comm import capability, meeting, symmetric


def links(world, area, behind=0, device="cpu", deadline=0.5):
    device = torch.device(device)
    memory = symmetric.in_one_process(world, symmetric.header(world, area) + behind, device)
    alone = meeting.Ranks()
    return [symmetric.Link(alone, m, area, rank=rank, deadline=deadline) for rank, m in enumerate(memory)]


class Ranks:
    """Ranks that nobody has to ask."""

    def __init__(self, rank, size):
        self.rank, self.size, self.group, self.whose = rank, size, None, 0

    def meet(self, operation, deadline=0):
        pass

    def gather(self, value):
        return [value] * self.size

    def barrier(self):
        pass


def connector(found):
    """In place of `connect`: each rank gets its own of the links, which are made at the first call."""

    def connect(ranks, area, device, behind=0, deadline=0):
        if not found:
            found.extend(links(ranks.size, area, behind, device))
        return found[ranks.rank], capability.Capability("peer", "one process")

    return connect


class Recorder:
    """In place of an Op: keeps the calls of the ranks, and runs them when all have called."""

    def __init__(self, op):
        self.op, self.calls = op, []

    def __call__(self, problem, device, backend):
        variant = next(v for v in self.op.variants if v.name == backend)
        config = variant.config(problem, target_of(device))
        recorder = self

        class Choice:
            def run(self, *args):
                recorder.calls.append((variant.load(), problem, config, args))

        return Choice()

    def run(self):
        for phase in range(self.calls[0][2].last + 1):
            for module, problem, config, args in self.calls:
                module.run(problem, replace(config, first=phase, last=phase), *args)
        self.calls.clear()


class Sized:
    """A backend that only says how many ranks there are."""

    def __init__(self, size):
        self.size = size

    def Get_size(self):
        return self.size
