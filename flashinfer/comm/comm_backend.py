"""How processes talk while a workspace is set up."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist

from flashinfer._core.checks import present, require
from flashinfer.ops.comm.meeting import Ranks


class CommBackend(ABC):
    """What setting up a workspace needs of the processes: derive from it to bring one's own (MPI, a rendezvous store).

    Values are Python objects that pickle. Every method but the first two is a collective call. An attribute `_group`, a
    torch process group with the same ranks, is used where a collective has to carry tensors.
    """

    @abstractmethod
    def Get_rank(self) -> int: ...

    @abstractmethod
    def Get_size(self) -> int: ...

    @abstractmethod
    def allgather(self, data: Any) -> list: ...

    @abstractmethod
    def bcast(self, data: Any, root: int) -> Any: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def Split(self, color: int, key: int) -> CommBackend: ...


class TorchDistBackend(CommBackend):
    """A torch.distributed process group.

    Values go through the group's store, and each call ends within `flashinfer.comm.set_setup_deadline`'s seconds, with
    a TimeoutError if a rank does not make it.

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group, if None.

    Raises
    ------
    RuntimeError
        torch.distributed is not initialised.
    ValueError
        This process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        self._group: dist.ProcessGroup = present("group", dist.group.WORLD if group is None else group, "a group")
        self._ranks = Ranks(self._group)

    def Get_rank(self) -> int:
        return self._ranks.rank

    def Get_size(self) -> int:
        return self._ranks.size

    def allgather(self, data: Any) -> list:
        """`data` of every rank, in rank order."""
        return [pickle.loads(each) for each in self._ranks.gather(pickle.dumps(data))]

    def bcast(self, data: Any, root: int) -> Any:
        """`data` of the rank `root` of this group."""
        size = self.Get_size()
        require(0 <= root < size, "root", root, f"0 to {size - 1}, the ranks of the group")
        return pickle.loads(self._ranks.gather(pickle.dumps(data) if self.Get_rank() == root else b"")[root])

    def barrier(self) -> None:
        self._ranks.barrier()

    def Split(self, color: int, key: int) -> TorchDistBackend:
        """A backend of the ranks that give the same color, ordered by key and then by rank. All ranks call it."""
        everyone = sorted(self.allgather((color, key, self.Get_rank())))
        members = [dist.get_global_rank(self._group, rank) for c, _, rank in everyone if c == color]
        named = f"the ranks {', '.join(map(str, members))}"
        return TorchDistBackend(
            self._ranks.bounded(lambda: dist.new_group(members, use_local_synchronization=True), named)
        )
