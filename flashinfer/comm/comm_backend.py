"""How processes talk while a workspace is set up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist

from flashinfer._core.checks import require


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
        self._group = dist.group.WORLD if group is None else group
        require(dist.get_rank(self._group) >= 0, "group", "a group without this process", "a group that has it")

    def Get_rank(self) -> int:
        return dist.get_rank(self._group)

    def Get_size(self) -> int:
        return dist.get_world_size(self._group)

    def allgather(self, data: Any) -> list:
        """`data` of every rank, in rank order."""
        values = [None] * self.Get_size()
        dist.all_gather_object(values, data, group=self._group)
        return values

    def bcast(self, data: Any, root: int) -> Any:
        """`data` of the rank `root` of this group."""
        values = [data]
        dist.broadcast_object_list(values, src=dist.get_global_rank(self._group, root), group=self._group)
        return values[0]

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> TorchDistBackend:
        """A backend of the ranks that give the same color, ordered by key and then by rank. All ranks call it."""
        everyone = sorted(self.allgather((color, key, self.Get_rank())))
        members = [dist.get_global_rank(self._group, rank) for c, _, rank in everyone if c == color]
        return TorchDistBackend(dist.new_group(members, use_local_synchronization=True))
