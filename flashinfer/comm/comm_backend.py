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
    def Get_rank(self) -> int:
        """This process's rank.

        Returns
        -------
        int
        """

    @abstractmethod
    def Get_size(self) -> int:
        """The number of ranks.

        Returns
        -------
        int
        """

    @abstractmethod
    def allgather(self, data: Any) -> list:
        """Give `data` of every rank to every rank. A collective call.

        Parameters
        ----------
        data
            What pickles.

        Returns
        -------
        list
            In rank order.

        Raises
        ------
        Exception
            Up to the implementation; a rank that does not make the call has to end it.
        """

    @abstractmethod
    def bcast(self, data: Any, root: int) -> Any:
        """Give `data` of one rank to every rank. A collective call.

        Parameters
        ----------
        data
            What pickles; of other ranks than `root` it is not read.
        root : int
            A rank of this group.

        Returns
        -------
        object
            The root's.

        Raises
        ------
        Exception
            Up to the implementation; a rank that does not make the call has to end it.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here. A collective call."""

    @abstractmethod
    def Split(self, color: int, key: int) -> CommBackend:
        """Make a backend of the ranks that give the same color. A collective call.

        Parameters
        ----------
        color : int
            Which of the new groups this rank joins.
        key : int
            Ranks of a new group are ordered by key, then by rank.

        Returns
        -------
        CommBackend
            Of this rank's new group.

        Raises
        ------
        Exception
            Up to the implementation; a rank that does not make the call has to end it.
        """


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
        """This process's rank in the group.

        Returns
        -------
        int
        """
        return self._ranks.rank

    def Get_size(self) -> int:
        """The number of ranks of the group.

        Returns
        -------
        int
        """
        return self._ranks.size

    def allgather(self, data: Any) -> list:
        """Give `data` of every rank to every rank. A collective call.

        Parameters
        ----------
        data
            What pickles.

        Returns
        -------
        list
            In rank order.

        Raises
        ------
        TimeoutError
            A rank does not make the call in time.
        """
        return [pickle.loads(each) for each in self._ranks.gather(pickle.dumps(data))]

    def bcast(self, data: Any, root: int) -> Any:
        """Give `data` of one rank to every rank. A collective call.

        Parameters
        ----------
        data, root
            As in `CommBackend.bcast`.

        Returns
        -------
        object
            The root's.

        Raises
        ------
        ValueError
            There is no such rank.
        TimeoutError
            A rank does not make the call in time.
        """
        size = self.Get_size()
        require(0 <= root < size, "root", root, f"0 to {size - 1}, the ranks of the group")
        return pickle.loads(self._ranks.gather(pickle.dumps(data) if self.Get_rank() == root else b"")[root])

    def barrier(self) -> None:
        """Wait until every rank of the group is here; TimeoutError if one does not come in time. A collective call."""
        self._ranks.barrier()

    def Split(self, color: int, key: int) -> TorchDistBackend:
        """Make a backend of the ranks that give the same color. A collective call.

        Parameters
        ----------
        color, key
            As in `CommBackend.Split`.

        Returns
        -------
        TorchDistBackend
            Of this rank's new group.

        Raises
        ------
        TimeoutError
            A rank does not make the call in time.
        """
        everyone = sorted(self.allgather((color, key, self.Get_rank())))
        members = [dist.get_global_rank(self._group, rank) for c, _, rank in everyone if c == color]
        named = f"the ranks {', '.join(map(str, members))}"
        return TorchDistBackend(
            self._ranks.bounded(lambda: dist.new_group(members, use_local_synchronization=True), named)
        )


def ranks_named(backend: CommBackend | None, size: int, rank: int, size_name: str, rank_name: str) -> Ranks:
    """The ranks of a backend, by default of the default group, which are as many as the caller's arguments say."""
    if backend is None and size > 1:
        backend = TorchDistBackend()
    ranks = Ranks(backend=backend)
    require(ranks.size == size, size_name, size, f"{ranks.size}, the size of the group")
    require(ranks.rank == rank, rank_name, rank, f"{ranks.rank}, the rank in the group")
    return ranks
