"""What `allreduce_fusion` exchanges rows through, under the names of upstream's two implementations."""

from __future__ import annotations

from enum import Enum

import torch

from flashinfer._core.checks import present, require
from flashinfer.comm.comm_backend import CommBackend
from flashinfer.comm.mapping import Mapping
from flashinfer.ops.comm.allreduce_fusion import config
from flashinfer.ops.comm.capability import connect
from flashinfer.ops.comm.meeting import Ranks
from flashinfer.ops.comm.symmetric import Link

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class MNNVLAllreduceFusionStrategy(Enum):
    """How rows travel: to all ranks at once, by way of the rank that adds them, or as the size decides."""

    ONESHOT = 0
    TWOSHOT = 1
    AUTO = 99

    @staticmethod
    def select_strategy(
        tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype
    ) -> MNNVLAllreduceFusionStrategy:
        """What the size decides."""
        small = num_tokens * hidden_dim * dtype.itemsize <= config.one_shot_bytes(tp_size)
        return MNNVLAllreduceFusionStrategy.ONESHOT if small else MNNVLAllreduceFusionStrategy.TWOSHOT

    def one_shot(self) -> bool | None:
        """As `use_oneshot` of `allreduce_fusion` has it."""
        return None if self is MNNVLAllreduceFusionStrategy.AUTO else self is MNNVLAllreduceFusionStrategy.ONESHOT


class AllReduceFusionWorkspace:
    """What `allreduce_fusion` exchanges rows through: memory that all ranks reach, or the process group.

    The base of the classes that open one; `create_allreduce_fusion_workspace` makes them.

    One workspace serves calls of one stream at a time, in the same order on every rank; streams that overlap take one
    each. A captured CUDA graph uses the workspace's memory, and may be replayed between eager calls.

    Parameters
    ----------
    world_size, rank : int

    Attributes
    ----------
    backend : str
        Upstream's name, "trtllm" or "mnnvl".
    world_size, rank, tp_size : int
    capability : Capability
        How ranks exchange, and why.
    deadline : float
        Seconds that a rank waits for another, 10 at first; may be set. A captured graph keeps what it had.
    metadata : dict
        "use_fp32_lamport": whether it was made for float32, which SGLang compares with what it sends. Of "trtllm" also
        "tp_size", "tp_rank", "max_token_num" and "hidden_dim".
    mc_ptr : int
        Not 0 where rows go through memory that ranks share, for callers that ask so whether to use the workspace: this
        rank's address, for multicast is not used.
    uc_ptr_local, uc_ptrs_dev : int
        Addresses of this rank's memory, and on the device of the array of all ranks'; 0 where none is shared.
    """

    backend = "trtllm"

    def __init__(self, world_size: int, rank: int):
        require(world_size > 0, "world_size", world_size, "at least 1")
        require(0 <= rank < world_size, "rank", rank, f"0 to {world_size - 1}")
        self.world_size, self.rank, self.tp_size = world_size, rank, world_size
        self.metadata: dict[str, int] = {}
        # Why it cannot be used, if it cannot.
        self._gone = "not opened"

    def _open(self, ranks: Ranks, nbytes: int, row: int, device: torch.device, one_shot: bool) -> None:
        small = nbytes if one_shot else min(nbytes, config.one_shot_bytes(ranks.size))
        self._area = max(config.area(small, row, ranks.size, True), config.area(nbytes, row, ranks.size, False))
        self._most = nbytes
        self.link, self.capability = connect(ranks, self._area, device)
        self._gone = ""

    @property
    def uc_ptr_local(self) -> int:
        """The address of this rank's memory; 0 where none is shared."""
        own = self.link.memory.own if isinstance(self.link, Link) else None
        return 0 if own is None else own.data_ptr()

    @property
    def uc_ptrs_dev(self) -> int:
        """The address on the device of the array of all ranks' addresses; 0 where no memory is shared."""
        return self.link.peers.data_ptr() if isinstance(self.link, Link) and self.uc_ptr_local else 0

    @property
    def mc_ptr(self) -> int:
        """`uc_ptr_local`: multicast is not used."""
        return self.uc_ptr_local

    @property
    def deadline(self) -> float:
        """Seconds that a rank waits for another; may be set, to more than 0."""
        return self.link.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        require(seconds > 0, "deadline", seconds, "more than 0 seconds")
        self.link.deadline = seconds

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: bool | None = None,
    ) -> bool:
        """Whether rows of every rank fit.

        Parameters
        ----------
        tp_size : int
            Ranks; another number than the workspace's does not fit.
        num_tokens, hidden_dim : int
            Rows of a rank, and their length.
        dtype : torch.dtype
            Of their elements.
        use_oneshot : bool, optional
            Whether rows go to all ranks at once; None leaves it to their size.

        Returns
        -------
        bool
        """
        if tp_size != self.world_size:
            return False
        nbytes = num_tokens * hidden_dim * dtype.itemsize
        one_shot = nbytes <= config.one_shot_bytes(tp_size) if use_oneshot is None else use_oneshot
        return self._fits(nbytes, hidden_dim * dtype.itemsize, one_shot)

    def _fits(self, nbytes: int, row: int, one_shot: bool) -> bool:
        if self.link.transport == "collective":
            return nbytes <= self._most
        return config.needed_area(nbytes, row, self.world_size, one_shot) <= self._area

    def check(self, wait: bool = True) -> None:
        """Raise what went wrong in a call of this rank. Every later call does so at its start, without waiting.

        Parameters
        ----------
        wait : bool
            For the kernels of this rank, which end by the deadline; nothing is waited for inside a graph capture.

        Raises
        ------
        TimeoutError
            A rank did not come within the deadline: it names this rank, the other, the operation and the exchange.
        ValueError
            A rank came with other sizes, or the workspace is destroyed or given up.
        """
        require(not self._gone, "workspace", f"one that is {self._gone}", "one that is not")
        if wait:
            self.link.settle()
        self.link.check()

    def reset(self) -> None:
        """Make the workspace usable after an error. A collective call: every rank makes it."""
        self.link.reset()

    def explain(self) -> str:
        """How ranks exchange, and why not through each other's memory where they do not.

        Returns
        -------
        str
        """
        c = self.capability
        return f"{c.transport} ({c.means})" + (f": {c.reason}" if c.reason else "")

    def checkpoint_prepare(self) -> None:
        """Give up the memory that is shared, so that the process can be checkpointed. What graphs were captured with is
        gone. It raises what went wrong in an earlier call, as `check` does."""
        self.check()
        self._gone = "given up by checkpoint_prepare"
        self.link.close()

    def checkpoint_restore(self, comm_backend: CommBackend | None = None) -> None:
        """Allocate again after `checkpoint_prepare`. A collective call.

        Parameters
        ----------
        comm_backend : CommBackend, optional
            The ranks; None: those of before.

        Raises
        ------
        ValueError
            The workspace is in use, or destroyed; other ranks than before.
        TimeoutError
            A rank did not come within the deadline of set-ups.
        """
        require(bool(self._gone), "workspace", "one in use", "one that checkpoint_prepare has given up")
        require(self._gone != "destroyed", "workspace", "one that is destroyed", "one that is given up")
        old = self.link
        ranks = old.ranks if comm_backend is None else None
        if ranks is None:
            ranks = ranks_of(None, comm_backend, self.world_size, self.rank)
        self.link, self.capability = connect(ranks, self._area, old.device, deadline=old.deadline)
        self._gone = ""

    def destroy(self) -> None:
        """Free the memory. Ranks that still exchange through it must be done.

        It raises what went wrong in an earlier call and nothing has raised yet; the memory is freed then, too.
        """
        if self._gone == "destroyed":
            return
        gone, self._gone = self._gone, "destroyed"
        try:
            if not gone:
                self.link.settle()
                if not self.link.reported:
                    self.link.check()
        finally:
            self.link.close()


class TRTLLMAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """A workspace of the ranks of a group. A collective constructor.

    Parameters
    ----------
    tp_size, tp_rank : int
        Of the group; they are checked against it.
    max_token_num, hidden_dim : int
        The most rows, and their length: any shape with as many elements fits.
    dtype : torch.dtype
        bfloat16, float16 or float32; other dtypes fit by their bytes.
    comm_backend : CommBackend, optional
        In place of `group`.
    group : ProcessGroup, optional
        The default group, if neither is given and there is more than one rank.
    one_shot : bool
        Make room for rows of any size to go to all ranks at once; else for small rows only.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """

    def __init__(
        self,
        tp_size: int | None,
        tp_rank: int | None,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype = torch.float16,
        comm_backend: CommBackend | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        one_shot: bool = False,
    ):
        row, ranks = _sizes(max_token_num, hidden_dim, dtype), ranks_of(group, comm_backend, tp_size, tp_rank)
        super().__init__(ranks.size, ranks.rank)
        self._open(ranks, max_token_num * row, row, own_device(), one_shot)
        self.metadata |= {
            "tp_rank": ranks.rank, "tp_size": ranks.size, "max_token_num": max_token_num, "hidden_dim": hidden_dim,
            "use_fp32_lamport": dtype == torch.float32,
        }  # fmt: skip


class MNNVLAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """A workspace of the ranks of a mapping. A collective constructor.

    Parameters
    ----------
    mapping : Mapping
        Its tp_size and tp_rank are the ranks.
    max_num_tokens, hidden_dim, dtype : int, int and torch.dtype, optional
        The most rows, their length and dtype.
    buffer_size_in_bytes : int, optional
        In their place: bytes of all rows together, as `get_required_buffer_size_bytes` says.
    comm_backend : CommBackend, optional
        The ranks; by default `group`, or the default process group.
    group : ProcessGroup, optional
        The ranks, in place of `comm_backend`.
    one_shot : bool
        Make room for rows of any size to go to all ranks at once; always so with `buffer_size_in_bytes`.

    Raises
    ------
    ValueError
        An argument other than the above.
    TimeoutError
        A rank did not come within the deadline of set-ups.
    """

    backend = "mnnvl"

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int | None = None,
        hidden_dim: int | None = None,
        dtype: torch.dtype | None = None,
        buffer_size_in_bytes: int | None = None,
        comm_backend: CommBackend | None = None,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        one_shot: bool = False,
    ):
        if buffer_size_in_bytes is None:
            tokens = present("max_token_num", max_num_tokens, "an int of at least 1")
            row = _sizes(tokens, hidden_dim, dtype)
            nbytes = tokens * row
        else:
            whole = isinstance(buffer_size_in_bytes, int) and buffer_size_in_bytes > 0
            require(whole, "buffer_size_in_bytes", buffer_size_in_bytes, "an int of at least 1")
            nbytes, row, one_shot = buffer_size_in_bytes, _sizes(1, hidden_dim or 1, dtype or torch.float32), True
        ranks = ranks_of(group, comm_backend, mapping.tp_size, mapping.tp_rank)
        super().__init__(ranks.size, ranks.rank)
        self._open(ranks, nbytes, row, own_device(), one_shot)
        self.buffer_size_bytes = nbytes
        # By this tensor older calls name the workspace.
        self.buffer_flags = torch.zeros(9, dtype=torch.uint32, device=self.link.device)
        setattr(self.buffer_flags, "workspace", self)
        self.metadata["use_fp32_lamport"] = dtype == torch.float32

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        strategy: MNNVLAllreduceFusionStrategy | bool | None = MNNVLAllreduceFusionStrategy.AUTO,
    ) -> bool:
        """Whether rows of every rank fit.

        Parameters
        ----------
        tp_size, num_tokens, hidden_dim, dtype
            As in `AllReduceFusionWorkspace.is_buffer_size_sufficient`.
        strategy : MNNVLAllreduceFusionStrategy, bool or None
            How rows travel; True is one shot, None and AUTO leave it to their size.

        Returns
        -------
        bool
        """
        one_shot = strategy.one_shot() if isinstance(strategy, MNNVLAllreduceFusionStrategy) else strategy
        return super().is_buffer_size_sufficient(tp_size, num_tokens, hidden_dim, dtype, one_shot)

    @staticmethod
    def get_required_buffer_size_bytes(
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
    ) -> int:
        """Bytes of rows [num_tokens, hidden_dim], to be given as `buffer_size_in_bytes`: the same for any strategy.

        Parameters
        ----------
        tp_size : int
            Ranks, 1 or more; the size does not depend on it.
        num_tokens, hidden_dim : int
            Rows of a rank, and their length.
        dtype : torch.dtype
            bfloat16, float16 or float32.
        strategy : MNNVLAllreduceFusionStrategy
            The size does not depend on it.

        Returns
        -------
        int

        Raises
        ------
        ValueError
            An argument other than the above.
        """
        require(isinstance(strategy, MNNVLAllreduceFusionStrategy), "strategy", strategy,
                "an MNNVLAllreduceFusionStrategy")  # fmt: skip
        require(tp_size > 0, "tp_size", tp_size, "at least 1")
        return num_tokens * _sizes(max(num_tokens, 1), hidden_dim, dtype)


def _sizes(tokens, hidden, dtype) -> int:
    """Bytes of a row."""
    for name, value in (("max_token_num", tokens), ("hidden_dim", hidden)):
        require(isinstance(value, int) and value > 0, name, value, "an int of at least 1")
    require(dtype in DTYPES, "dtype", dtype, "bfloat16, float16, float32")
    return hidden * dtype.itemsize


def own_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def ranks_of(group, comm_backend, world_size: int | None, rank: int | None) -> Ranks:
    """The ranks that a caller means, which must be as many as it says, and this one where it says."""
    if group is None and comm_backend is None and world_size != 1 and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    ranks = Ranks(group, comm_backend)
    named = "of the group" if group is not None or comm_backend is not None else "without a group"
    require(world_size in (None, ranks.size), "world_size", world_size, f"{ranks.size}, the size {named}")
    require(rank in (None, ranks.rank), "rank", rank, f"{ranks.rank}, the rank {named}")
    return ranks
