"""The older interface of the MoE all-to-all: prepared once, then one call for each tensor, then a combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashinfer._core.checks import require
from flashinfer.comm._exchange import combine_in, dispatch_in, ranks_of_experts, sanitize_in
from flashinfer.comm._workspaces import own_device
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import MnnvlConfig
from flashinfer.ops.comm.alltoall.space import Space, aligned
from flashinfer.ops.comm.meeting import Ranks


class _Workspace:
    """The ranks of one mapping and their space, which is allocated at its first use and grows to what is asked."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.space: Space | None = None
        # Bytes that the calls since the last preparation have taken, and the tokens of the last of them.
        self.taken, self.tokens = 0, 0
        self._outgrown: list[Space] = []

    def take(self, most: int, nbytes: int) -> Space:
        """A space for `most` tokens a rank with room for `nbytes` behind what is taken. Every rank asks the same."""
        if self.space is None or self.space.most < most or self.space.nbytes < self.taken + nbytes:
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            require(not capturing, "workspace", "no room for this call inside a graph capture",
                    "a call of this size before the capture")  # fmt: skip
            old, need = self.space, self.taken + nbytes
            self.space = Space(self.ranks, need, max(most, old.most if old else 0), own_device())
            if old is not None:
                self.space.place[: old.most] = old.place
                self.space.counts.copy_(old.counts)
                self.space.sent.copy_(old.sent)
                # A captured graph may still use it.
                self._outgrown.append(old)
                # After the barrier peers write their counts into the new space.
                if self.space.device.type == "cuda":
                    torch.cuda.synchronize(self.space.device)
                self.ranks.barrier()
        self.space.link.check()
        return self.space


@dataclass
class MoEAlltoallInfo:
    """Where the tokens of one preparation go and come from. The first seven fields are upstream's, int32 tensors.

    Attributes
    ----------
    local_gather_indices : torch.Tensor
        The row of each received one among [ep_size * max_token_count_per_rank]; -1 for none.
    send_rank_count_cumsum, recv_rank_count_cumsum : torch.Tensor
        [ep_size], rows to and from each rank, summed up.
    send_rank_local_indices : torch.Tensor
        [tokens, ep_size], the row on each rank that a token becomes; -1 where it does not go.
    recv_rank_local_indices : torch.Tensor
        As local_gather_indices.
    backward_recv_rank_local_indices : torch.Tensor
        As send_rank_local_indices.
    local_token_allocation_count : int
        Rows of a received tensor.
    experts : torch.Tensor, optional
        The ids that were prepared. Without them, tokens go where send_rank_local_indices says, as if each rank had one
        expert.
    expert_count, most : int
        Experts, and the most tokens of a rank, as given.
    """

    local_gather_indices: torch.Tensor
    send_rank_count_cumsum: torch.Tensor
    send_rank_local_indices: torch.Tensor
    recv_rank_count_cumsum: torch.Tensor
    recv_rank_local_indices: torch.Tensor
    backward_recv_rank_local_indices: torch.Tensor
    local_token_allocation_count: int
    experts: Any = None
    expert_count: int = 0
    most: int = 0

    def __post_init__(self):
        self.derived = self.experts is None
        if self.derived:
            way = self.send_rank_local_indices
            fits = way.dim() == 2
            require(fits, "send_rank_local_indices", tuple(way.shape), "[tokens, ep_size]")
            ranks = torch.arange(way.shape[1], dtype=torch.int32, device=way.device)
            self.experts, self.expert_count = torch.where(way >= 0, ranks, -1).contiguous(), way.shape[1]
            self.most = self.local_token_allocation_count // way.shape[1]


class MnnvlMoe:
    """Prepare, send tensor by tensor, combine. Use `flashinfer.comm.MoeAlltoAll` where all tensors are there at once.

    Workspaces belong to a mapping: the ranks are those of its tp_group in the MnnvlConfig's comm_backend (or the
    default process group), which must be as many, whatever the mapping says of experts. Memory is allocated when the
    first call says how much, a collective call, outside of CUDA graphs. Received tensors have
    ep_size * max_token_count_per_rank rows, in blocks by source rank; a row that no token became is undefined, and its
    ids are `slot_count`.
    """

    _workspaces: dict[tuple, _Workspace] = {}

    @staticmethod
    def get_moe_workspaces(mapping: Mapping, config: MnnvlConfig | None = None) -> torch.Tensor:
        """The workspace for `mnnvl_moe_alltoallv` and its combine: a tensor that stands for it. A collective call.

        Parameters
        ----------
        mapping : Mapping
            Its tp_rank and tp_size are the ranks.
        config : MnnvlConfig, optional
            Its comm_backend is the ranks; by default the default process group.

        Returns
        -------
        torch.Tensor
            uint64 [tp_size, 1] on the CPU, for the functions below.

        Raises
        ------
        ValueError
            Ranks other than the mapping's.
        """
        backend = None if config is None else config.comm_backend
        key = (mapping, id(getattr(backend, "_group", backend)))
        if key not in MnnvlMoe._workspaces:
            ranks = ranks_of_experts(backend, mapping.tp_rank, mapping.tp_size)
            MnnvlMoe._workspaces[key] = _Workspace(ranks)
        tensor = torch.zeros(mapping.tp_size, 1, dtype=torch.uint64, device="cpu")
        setattr(tensor, "moe", MnnvlMoe._workspaces[key])
        return tensor

    @staticmethod
    def get_moe_prepare_workspace(mapping: Mapping, config: MnnvlConfig | None = None) -> torch.Tensor:
        """The workspace for `mnnvl_moe_alltoallv_prepare_without_allgather`: the same one.

        Parameters
        ----------
        mapping, config
            As in `get_moe_workspaces`.

        Returns
        -------
        torch.Tensor
            uint64 [tp_size, 1] on the CPU, for the functions below.

        Raises
        ------
        ValueError
            Ranks other than the mapping's.
        """
        return MnnvlMoe.get_moe_workspaces(mapping, config)

    @staticmethod
    def compute_target_rank_id(token_selected_experts: torch.Tensor, expert_count: int, ep_size: int) -> torch.Tensor:
        """The rank of each expert id: ``id // (expert_count / ep_size)``.

        Parameters
        ----------
        token_selected_experts : torch.Tensor
            Ids, of any integer dtype and shape.
        expert_count, ep_size : int
            Experts, a multiple of the ranks.

        Returns
        -------
        torch.Tensor
            Dtype and shape of the ids.

        Raises
        ------
        ValueError
            ep_size does not divide expert_count.
        """
        require(expert_count % ep_size == 0, "expert_count", expert_count, f"a multiple of ep_size, {ep_size}")
        return torch.div(token_selected_experts, expert_count // ep_size, rounding_mode="floor")

    @staticmethod
    def mnnvl_moe_alltoallv_prepare_without_allgather(
        expert_ids: torch.Tensor,
        scales: torch.Tensor | None,
        expert_statics: torch.Tensor | None,
        workspace: torch.Tensor,
        max_token_count_per_rank: int,
        ep_rank: int,
        ep_size: int,
        expert_count: int,
        slot_count: int,
        top_k: int,
    ) -> tuple[MoEAlltoallInfo, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Send each token's expert ids and scales to the ranks of its experts, and remember the way.

        Parameters
        ----------
        expert_ids : torch.Tensor
            int32 [tokens, top_k]; ids outside 0 to slot_count - 1 go nowhere.
        scales : torch.Tensor, optional
            float32 [tokens, top_k].
        expert_statics : torch.Tensor, optional
            int32 [n] of this rank, gathered from all.
        workspace : torch.Tensor
            Of `get_moe_prepare_workspace`.
        max_token_count_per_rank, ep_rank, ep_size, top_k : int
        expert_count : int
            Experts. It has no effect: ids are those of slots.
        slot_count : int
            Slots that experts are in, which are divided among ranks.

        Returns
        -------
        (MoEAlltoallInfo, torch.Tensor, torch.Tensor or None, torch.Tensor or None)
            The way; ids and scales of received rows [ep_size * max_token_count_per_rank, top_k]; statistics
            [ep_size, n].

        Raises
        ------
        ValueError
            An argument other than the above.
        TimeoutError
            An earlier call waited in vain for a rank.
        """
        moe = _workspace_of(workspace, ep_rank, ep_size)
        most, tokens = max_token_count_per_rank, len(expert_ids)
        payloads = [expert_ids.contiguous()]
        if scales is not None:
            require(scales.shape == expert_ids.shape, "scales", tuple(scales.shape), str(tuple(expert_ids.shape)))
            payloads.append(scales.contiguous())
        if expert_statics is not None:
            require(expert_statics.dim() == 1, "expert_statics", tuple(expert_statics.shape), "[n]")
        moe.taken = 0
        statics = None if expert_statics is None else _gathered(moe, most, expert_statics, ep_size)
        space, received = _sent(moe, payloads[0], payloads, most, slot_count)
        sanitize_in(space, received[0], slot_count)
        kept = [t.reshape(ep_size * most, top_k).clone() for t in received]
        info = _info(space, tokens, most, payloads[0], slot_count)
        return info, kept[0], kept[1] if scales is not None else None, statics

    @staticmethod
    def mnnvl_moe_alltoallv_prepare(
        gathered_target_rank_ids: torch.Tensor,
        real_rank_token_count_cumsum: torch.Tensor | None,
        gathered_expert_ids: torch.Tensor,
        gathered_scales: torch.Tensor | None,
        max_token_count_per_rank: int,
        expert_count: int,
        top_k: int,
        ep_rank: int,
        ep_size: int,
    ) -> tuple[MoEAlltoallInfo, torch.Tensor, torch.Tensor | None]:
        """The same from ids that all ranks have of each other: nothing is sent.

        Parameters
        ----------
        gathered_target_rank_ids : torch.Tensor
            int32 [ep_size * max_token_count_per_rank, top_k]: `compute_target_rank_id` of the ids.
        real_rank_token_count_cumsum : torch.Tensor, optional
            int32 [ep_size]: tokens of each rank, summed up; then rows are packed rank by rank. By default every rank
            has max_token_count_per_rank.
        gathered_expert_ids, gathered_scales : torch.Tensor
            int32 and float32, in the shape of the ranks' ids.
        max_token_count_per_rank, expert_count, top_k, ep_rank, ep_size : int

        Returns
        -------
        (MoEAlltoallInfo, torch.Tensor, torch.Tensor or None)
            The way; ids and scales of the rows to be received; ids of rows that are none are `expert_count`.

        Raises
        ------
        ValueError
            Shapes that differ, or other than [rows, top_k].
        """
        most = max_token_count_per_rank
        shape = tuple(gathered_expert_ids.shape)
        for name, tensor in (
            ("gathered_target_rank_ids", gathered_target_rank_ids), ("gathered_scales", gathered_scales),
        ):
            if tensor is not None:
                require(tuple(tensor.shape) == shape, name, tuple(tensor.shape), str(shape))
        require(len(shape) == 2 and shape[1] == top_k, "gathered_expert_ids", shape, f"[rows, {top_k}]")
        device = gathered_expert_ids.device
        ends = torch.arange(1, ep_size + 1, device=device) * most
        ends = ends if real_rank_token_count_cumsum is None else real_rank_token_count_cumsum.to(device).long()
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        row = torch.arange(shape[0], device=device)
        source = torch.bucketize(row, ends, right=True)
        real = source < ep_size
        source = source.clamp(max=ep_size - 1)
        valid = (gathered_expert_ids >= 0) & (gathered_expert_ids < expert_count)
        to_me = ((gathered_target_rank_ids == ep_rank) & valid).any(1) & real
        # A row's place among those of its source: how many before it come here, too.
        before = torch.cat((starts.new_zeros(1), to_me.cumsum(0)))
        place = source * most + before[:-1] - before[starts][source]
        ids = torch.full((ep_size * most, top_k), expert_count, dtype=torch.int32, device=device)
        beyond = torch.where(to_me, place, ep_size * most)
        ids = torch.cat((ids, ids[:1])).index_copy_(0, beyond, gathered_expert_ids.int())[:-1]
        scales = None
        if gathered_scales is not None:
            scales = gathered_scales.new_zeros(ep_size * most + 1, top_k)
            scales = scales.index_copy_(0, beyond, gathered_scales)[:-1]
        local = torch.where((source == ep_rank) & real, row - starts[ep_rank], most)
        mine = torch.full((most + 1, top_k), -1, dtype=torch.int32, device=device)
        mine = mine.index_copy_(0, local, gathered_expert_ids.int())[:most].contiguous()
        per = expert_count // ep_size
        from flashinfer.ops.comm.alltoall.reference import placed

        way = placed(mine, ep_size, per)
        received = torch.zeros(ep_size, dtype=torch.long, device=device).index_add_(0, source, to_me.long())
        info = _made(way, (way >= 0).sum(0), received, most, ep_size, mine, expert_count)
        return info, ids, scales

    @staticmethod
    def mnnvl_moe_alltoallv(
        x: torch.Tensor, alltoall_info: MoEAlltoallInfo, workspace: torch.Tensor, ep_rank: int, ep_size: int
    ) -> torch.Tensor:
        """Send rows the way that was prepared. A collective call.

        Parameters
        ----------
        x : torch.Tensor
            [tokens, n] of any dtype.
        alltoall_info : MoEAlltoallInfo
            Of the preparation.
        workspace : torch.Tensor
            Of `get_moe_workspaces`.
        ep_rank, ep_size : int
            The workspace's.

        Returns
        -------
        torch.Tensor
            [ep_size * max_token_count_per_rank, n], a new tensor.

        Raises
        ------
        ValueError
            An argument other than the above.
        TimeoutError
            An earlier call waited in vain for a rank.
        """
        moe, info = _workspace_of(workspace, ep_rank, ep_size), alltoall_info
        require(x.dim() == 2, "x", tuple(x.shape), "[tokens, n]")
        ids = info.experts[: len(x)]
        fits = len(x) <= len(info.experts)
        require(fits, "x", tuple(x.shape), f"[at most {len(info.experts)}, n], the tokens that were prepared")
        _, received = _sent(moe, ids, [x.contiguous()], info.most, info.expert_count)
        return received[0].reshape(ep_size * info.most, -1).clone()

    @staticmethod
    def mnnvl_moe_alltoallv_combine(
        x: torch.Tensor,
        alltoall_info: MoEAlltoallInfo,
        workspace: torch.Tensor,
        ep_rank: int,
        ep_size: int,
        top_k: int,
        token_count: int,
    ) -> torch.Tensor:
        """Give each of this rank's tokens the sum of its rows of x, in float32 and rank order. A collective call.

        Parameters
        ----------
        x : torch.Tensor
            [ep_size * max_token_count_per_rank, hidden], bfloat16, float16 or float32: what experts made of the rows.
        alltoall_info, workspace, ep_rank, ep_size
            As in `mnnvl_moe_alltoallv`.
        top_k : int
            As prepared.
        token_count : int
            Tokens of this rank, at most those that were sent.

        Returns
        -------
        torch.Tensor
            [token_count, hidden] in the dtype of x.

        Raises
        ------
        ValueError
            An argument other than the above.
        TimeoutError
            An earlier call waited in vain for a rank.
        """
        moe, info = _workspace_of(workspace, ep_rank, ep_size), alltoall_info
        fits = x.dim() == 2 and len(x) == ep_size * info.most
        require(fits, "x", tuple(x.shape), f"[{ep_size * info.most}, hidden]")
        as_prepared = info.derived or top_k == info.experts.shape[1]
        require(as_prepared, "top_k", top_k, f"{info.experts.shape[1]}, as prepared")
        require(token_count <= moe.tokens, "token_count", token_count, f"at most {moe.tokens}, the tokens sent")
        space = moe.take(info.most, aligned(x.nbytes))
        payload = x.contiguous().view(ep_size, info.most, -1)
        result = combine_in(space, payload, token_count, info.most, space.first + moe.taken, False)
        # After a combine every rank has read what came before it.
        moe.taken = 0
        return result


def _workspace_of(workspace: torch.Tensor, ep_rank: int, ep_size: int) -> _Workspace:
    moe = getattr(workspace, "moe", None)
    if moe is None:
        raise ValueError("workspace: got a tensor of another origin; allowed: one of MnnvlMoe.get_moe_workspaces")
    require(ep_size == moe.ranks.size, "ep_size", ep_size, f"{moe.ranks.size}, the ranks of the workspace")
    require(ep_rank == moe.ranks.rank, "ep_rank", ep_rank, f"{moe.ranks.rank}, the rank of the workspace")
    return moe


def _bytes(payloads: list[torch.Tensor], world: int, most: int) -> int:
    """Bytes of a space that these payloads take, parts aligned."""
    return sum(aligned(world * most * p.shape[1:].numel() * p.element_size()) for p in payloads)


def _info(space: Space, tokens: int, most: int, experts: torch.Tensor, expert_count: int) -> MoEAlltoallInfo:
    way = space.place[:tokens].clone()
    return _made(way, space.sent, space.counts, most, space.ranks.size, experts, expert_count)


def _made(way, sent, received, most: int, world: int, experts, expert_count: int) -> MoEAlltoallInfo:
    row = torch.arange(most, device=way.device)
    there = row < received[:, None]
    came = torch.where(there, torch.arange(world * most, device=way.device).view(world, most), -1).int().view(-1)
    ends = (sent.cumsum(0).int(), received.cumsum(0).int())
    return MoEAlltoallInfo(came, ends[0], way, ends[1], came, way, world * most, experts, expert_count, most)


def _sent(moe: _Workspace, experts, payloads, most: int, expert_count: int) -> tuple[Space, list[torch.Tensor]]:
    """Dispatch into bytes of the space that no call since the last preparation has taken."""
    space = moe.take(most, _bytes(payloads, moe.ranks.size, most))
    received, end = dispatch_in(space, experts, payloads, most, experts.shape[1], expert_count, first=moe.taken)
    moe.taken, moe.tokens = end - space.first, len(experts)
    return space, received


def _gathered(moe: _Workspace, most: int, statics: torch.Tensor, world: int) -> torch.Tensor:
    """`statics` of every rank: [world, n]. It goes as a token that every rank has an expert of."""
    everyone = torch.arange(world, dtype=torch.int32, device=statics.device)[None]
    moe.take(most, 0)
    _, received = _sent(moe, everyone, [statics.contiguous()[None]], 1, world)
    return received[0][:, 0].clone()
