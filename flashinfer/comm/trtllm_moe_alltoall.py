"""All-to-all of mixture-of-experts layers: tokens go to the ranks of their experts, and their results come back."""

from __future__ import annotations

import weakref

import torch

from flashinfer._core.arguments import checked_late
from flashinfer._core.checks import OutOfTurn, present, require
from flashinfer.comm._exchange import (
    allocate,
    check_mapping,
    dispatch_in,
    gathered_stats,
    only,
    ranks_of_experts,
    sanitize_in,
    shared,
)
from flashinfer.comm._moe_a2a import (
    check_stats,
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
    moe_a2a_sanitize_expert_ids,
    moe_a2a_wrap_payload_tensor_in_workspace,
)
from flashinfer.comm.comm_backend import CommBackend
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import MnnvlConfig
from flashinfer.ops.comm.alltoall.space import Space
from flashinfer.tllm_enums import SfLayout


class MoeAlltoAll:
    """Tokens to the ranks of their experts and back. A collective constructor.

    Parameters
    ----------
    mapping : Mapping
        Its moe_ep_rank and moe_ep_size are checked against the ranks.
    max_num_tokens, top_k, num_experts : int
        The most tokens of a rank, experts of a token, and experts on all ranks.
    workspace_size_per_rank : int, optional
        Bytes; by default enough for rows of `hidden_size` in bfloat16, with ids and scales, both ways.
    hidden_size : int, optional
        Needed without workspace_size_per_rank.
    mnnvl_config : MnnvlConfig, optional
        Its comm_backend is the ranks; by default the default process group, if it has moe_ep_size ranks.
    eplb_stats_num_experts : int
        Experts whose statistics a dispatch gathers from all ranks.
    enable_rank_mask
        Only False.
    backend : str
        "trtllm".

    Notes
    -----
    Objects of the same ranks, workspace size, max_num_tokens and eplb_stats_num_experts have one workspace, so layers
    take turns: calls alternate, `dispatch`, then `combine` of the same object; a dispatch of another one in between
    takes the combine's place. Waits end after `deadline` seconds (10; it may be set), and the call after that raises
    TimeoutError with the rank that was waited for; `reset()` on every rank makes it usable again.
    """

    @classmethod
    def get_workspace(
        cls,
        workspace_size_per_rank: int,
        ep_rank: int,
        ep_size: int,
        max_num_tokens: int,
        mapping: Mapping,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> dict:
        """Allocate a workspace on every rank of the default process group. A collective call.

        Parameters
        ----------
        workspace_size_per_rank : int
            Bytes on each rank.
        ep_rank, ep_size : int
            This rank and the number of ranks; the mapping's and the group's.
        max_num_tokens : int
            The most tokens of a rank.
        mapping : Mapping
            Checked against ep_rank and ep_size.
        eplb_stats_num_experts : int
            Experts whose statistics a dispatch gathers; 0 for none.
        backend : str
            "trtllm".

        Returns
        -------
        dict
            "workspace" and "metainfo" for the functions of this module, and the arguments.

        Raises
        ------
        ValueError
            An argument other than the above.
        TimeoutError
            A rank did not come within the deadline of set-ups.
        """
        check_stats(eplb_stats_num_experts)
        only("backend", backend, "trtllm")
        check_mapping(mapping, ep_rank, ep_size)
        ranks = ranks_of_experts(None, ep_rank, ep_size)
        return allocate(ranks, workspace_size_per_rank, max_num_tokens, eplb_stats_num_experts)

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> int:
        """Bytes on each rank for rows in bfloat16, ids (int32) and scales (float32), and for the rows back.

        Parameters
        ----------
        ep_size, top_k, max_num_tokens, hidden_size : int
            Ranks, experts of a token, the most tokens of a rank, elements of a row.
        extra_payload_bytes_per_token : int
            Bytes of what else travels with a token.
        eplb_stats_num_experts, backend
            As in `get_workspace`.

        Returns
        -------
        int

        Raises
        ------
        ValueError
            As `moe_a2a_get_workspace_size_per_rank`.
        """
        payload = hidden_size * 2 + top_k * 8 + extra_payload_bytes_per_token
        return moe_a2a_get_workspace_size_per_rank(
            ep_size, max_num_tokens, payload, hidden_size * 2, eplb_stats_num_experts, backend=backend
        )

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ):
        check_stats(eplb_stats_num_experts)
        only("enable_rank_mask", enable_rank_mask, False)
        only("backend", backend, "trtllm")
        for name, count in (("top_k", top_k), ("num_experts", num_experts)):
            require(isinstance(count, int) and count > 0, name, count, "an int of at least 1")
        self.ep_size, self.ep_rank = mapping.moe_ep_size, mapping.moe_ep_rank
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        require(num_experts % self.ep_size == 0, "num_experts", num_experts, f"a multiple of {self.ep_size}")
        if workspace_size_per_rank is None:
            hidden_size = present("hidden_size", hidden_size, "a number, without workspace_size_per_rank")
            workspace_size_per_rank = self.get_moe_workspace_size_per_rank(
                self.ep_size, top_k, max_num_tokens, hidden_size, 0, eplb_stats_num_experts
            )
        self.workspace_size_per_rank = workspace_size_per_rank
        comm_backend = None if mnnvl_config is None else mnnvl_config.comm_backend
        ranks = ranks_of_experts(comm_backend, self.ep_rank, self.ep_size)
        self._shared = shared(ranks, workspace_size_per_rank, max_num_tokens, eplb_stats_num_experts)
        self._shared.layers.add(self)
        self._has_stats = False

    def _memory(self) -> tuple[Space, torch.Tensor, torch.Tensor]:
        if self._shared.memory is None or self not in self._shared.layers:
            raise RuntimeError("MoeAlltoAll: its memory is given up; checkpoint_restore gets it again")
        return self._shared.memory

    @property
    def _space(self) -> Space:
        return self._memory()[0]

    @property
    def workspace(self) -> torch.Tensor:
        """uint8 [ep_size, bytes]: what the functions of this module take. RuntimeError while the memory is given up."""
        return self._memory()[1]

    @property
    def metainfo(self) -> torch.Tensor:
        """int64 on the CPU: what the functions of this module take with `workspace`."""
        return self._memory()[2]

    @property
    def capability(self):
        """How ranks exchange, and why."""
        return self._space.capability

    @property
    def opened(self) -> tuple[int, int, int] | None:
        """Tokens, runtime maximum and the byte offset of rows to combine of the dispatch that waits for its combine."""
        opened = self._shared.opened
        return opened[1:] if opened is not None and opened[0]() is self else None

    @property
    def deadline(self) -> float:
        """Seconds that a rank waits for another."""
        return self._space.link.deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        require(seconds > 0, "deadline", seconds, "more than 0 seconds")
        self._space.link.deadline = seconds

    @property
    def eplb_gathered_stats(self) -> torch.Tensor | None:
        """int32 [ep_size, eplb_stats_num_experts]: every rank's of the last dispatch; None if that had none. The
        workspace's memory, which the next dispatch writes."""
        return gathered_stats(self._space) if self._has_stats else None

    def check(self, wait: bool = True) -> None:
        """Raise what went wrong in a call of this rank.

        Parameters
        ----------
        wait : bool
            For the kernels of this rank, which end by the deadline; nothing is waited for inside a graph capture.

        Raises
        ------
        TimeoutError
            A rank did not come within the deadline.
        ValueError
            A rank came with other sizes.
        """
        if wait:
            self._space.link.settle()
        self._space.link.check()

    def reset(self) -> None:
        """Make it usable after an error; a dispatch without a combine is forgotten. A collective call."""
        self._shared.opened = None
        self._space.link.reset()

    def checkpoint_prepare(self) -> None:
        """Give up the memory that is shared, so that the process can be checkpointed. No dispatch may be open.

        It raises what went wrong in an earlier call, as `check` does. Once for all objects of a workspace is enough.
        """
        if self._shared.memory is None:
            return
        self._check_closed()
        self.check()
        self._shared.close()

    def checkpoint_restore(self, comm_backend: CommBackend) -> None:
        """Allocate again after `checkpoint_prepare`. A collective call; once for all objects of a workspace is enough.

        Parameters
        ----------
        comm_backend : CommBackend
            The ranks, as many as before.

        Raises
        ------
        ValueError
            Other ranks than the mapping's.
        TimeoutError
            A rank did not come within the deadline of set-ups.
        """
        self._shared.layers.add(self)
        if self._shared.memory is None:
            self._shared.open(ranks_of_experts(comm_backend, self.ep_rank, self.ep_size))

    def destroy(self) -> None:
        """Free the memory, if no other object has the workspace. Peers must be done with it.

        It raises what went wrong in an earlier call and nothing has raised yet; the memory is freed then, too.
        """
        layers, memory = self._shared.layers, self._shared.memory
        if self not in layers:
            return
        layers.remove(self)
        if self.opened is not None:
            self._shared.opened = None
        try:
            if memory is not None:
                link = memory[0].link
                link.settle()
                if not link.reported:
                    link.check()
        finally:
            if not layers:
                self._shared.close()

    def _check_closed(self) -> None:
        if self.opened is not None:
            raise OutOfTurn("MoeAlltoAll: a dispatch waits for its combine")

    @checked_late
    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Send each token's payloads to the ranks of its experts, as `moe_a2a_dispatch`. A collective call.

        Parameters
        ----------
        token_selected_experts, input_payloads, runtime_max_tokens_per_rank, active_rank_mask
            As in `moe_a2a_dispatch`.
        invalid_token_expert_id : int, optional
            The id of rows that no token became; needs expert_id_payload_index.
        expert_id_payload_index : int, optional
            Which payload, int32 [tokens, top_k], gets that id. Not read without one.
        eplb_local_stats : torch.Tensor, optional
            int32 [eplb_stats_num_experts] of this rank; `eplb_gathered_stats` has every rank's then.

        Returns
        -------
        list of torch.Tensor
            [ep_size, runtime_max_tokens_per_rank, ...] of each payload, by source rank: the workspace's memory, which a
            later dispatch writes.

        Raises
        ------
        ValueError
            An argument other than the above.
        RuntimeError
            This object's dispatch before has had no combine.
        TimeoutError
            An earlier call waited in vain for a rank.
        """
        only("active_rank_mask", active_rank_mask, None)
        space = self._space
        self._check_closed()
        named = invalid_token_expert_id is None or expert_id_payload_index is not None
        require(named, "expert_id_payload_index", expert_id_payload_index, "given with invalid_token_expert_id")
        space.link.check()
        most = runtime_max_tokens_per_rank
        received, at = dispatch_in(
            space, token_selected_experts, input_payloads, most, self.top_k, self.num_experts,
            local_stats=eplb_local_stats,
        )  # fmt: skip
        self._has_stats = eplb_local_stats is not None
        self._shared.opened = weakref.ref(self), len(token_selected_experts), most, at
        if invalid_token_expert_id is not None:
            index = present("expert_id_payload_index", expert_id_payload_index)
            sanitize_in(space, received[index], invalid_token_expert_id)
        return received

    @checked_late
    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: torch.Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: SfLayout = SfLayout.layout_linear,
        output: torch.Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Give each token of the last dispatch the sum of its rows, as `moe_a2a_combine`. A collective call.

        Parameters
        ----------
        payload, output, output_dtype, output_scales, output_scalar_scale, sf_layout, use_low_precision
            As in `moe_a2a_combine`.
        active_rank_mask
            Only None.
        runtime_max_tokens_per_rank : int
            The dispatch's.
        payload_in_workspace : bool
            Whether payload is `get_combine_payload_tensor_in_workspace`, which spares a copy.

        Returns
        -------
        torch.Tensor
            [tokens, hidden_size]: `output`, or a new tensor.

        Raises
        ------
        ValueError
            An argument other than the above.
        RuntimeError
            No dispatch of this object waits for a combine, or another one with the workspace has dispatched since.
        TimeoutError
            An earlier call waited in vain for a rank.
        """
        opened = self.opened
        if opened is None:
            raise OutOfTurn("MoeAlltoAll: a combine comes after a dispatch, the last one with the workspace")
        tokens, most, at = opened
        only("runtime_max_tokens_per_rank", runtime_max_tokens_per_rank, most)
        result = moe_a2a_combine(
            payload, tokens, self.workspace, self.metainfo, most, self.ep_rank, self.ep_size, self.top_k,
            at - self._space.counts_at, payload_in_workspace, output_dtype, output_scales, output_scalar_scale,
            sf_layout, output, use_low_precision=use_low_precision, active_rank_mask=active_rank_mask,
        )  # fmt: skip
        self._shared.opened = None
        return result

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Where the rows of the open dispatch are combined from: experts that write there spare `combine` a copy.

        Parameters
        ----------
        runtime_max_tokens_per_rank : int
            The dispatch's.
        hidden_size : int
            Elements of a row.
        dtype : torch.dtype
            Of the rows.

        Returns
        -------
        torch.Tensor
            [ep_size, runtime_max_tokens_per_rank, hidden_size]: the workspace's memory.

        Raises
        ------
        ValueError
            Another maximum than the dispatch's, or too few bytes.
        RuntimeError
            No dispatch of this object waits for a combine, or another one with the workspace has dispatched since.
        """
        opened = self.opened
        if opened is None:
            raise OutOfTurn("MoeAlltoAll: the place of rows to combine is known after a dispatch")
        _, most, at = opened
        only("runtime_max_tokens_per_rank", runtime_max_tokens_per_rank, most)
        shape = (self.ep_size, most, hidden_size)
        self._space.check_room(at + torch.Size(shape).numel() * dtype.itemsize)
        return self._space.view(at, shape, dtype)


__all__ = [
    "MoeAlltoAll",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
]
