"""What every backend of expert parallelism has, and what its dispatch returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from flashinfer._core.checks import require
from flashinfer.moe_ep.config import BootstrapConfig, MoEEpCommParams


@dataclass(frozen=True)
class MoEEpDispatchResult:
    """What arrived: ep_size * tokens_per_rank rows, in blocks by source rank. They are the workspace's memory, and hold
    until the dispatch after the next combine.

    Attributes
    ----------
    hidden_states : torch.Tensor
        [rows, ...], as they travelled.
    topk_ids : torch.Tensor
        int32 [rows, top_k]: ids among all experts; `invalid_expert_id` in rows that are no token's.
    topk_weights : torch.Tensor or None
        [rows, top_k].
    tokens_per_rank : int
    hidden_states_scale : torch.Tensor or None
        [rows, ...], of quantised rows.
    eplb_gathered_stats : torch.Tensor or None
        int32 [ep_size, eplb_stats_num_experts].
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    tokens_per_rank: int
    hidden_states_scale: torch.Tensor | None = None
    eplb_gathered_stats: torch.Tensor | None = None


class MoEEpCommunication(ABC):
    """What every backend has. Calls alternate, `dispatch` and `combine`, and are the same on every rank.

    Parameters
    ----------
    bootstrap : BootstrapConfig
        The ranks.
    params : MoEEpCommParams
        Sizes and formats, the same on every rank; its num_experts is a multiple of the ranks.

    Raises
    ------
    ValueError
        The ranks do not divide the experts.
    """

    backend_name: ClassVar[str]
    supports_cuda_graph: ClassVar[bool] = True

    def __init__(self, bootstrap: BootstrapConfig, params: MoEEpCommParams):
        self.bootstrap, self.params = bootstrap, params
        self.ep_rank, self.ep_size = bootstrap.rank, bootstrap.world_size
        even = params.num_experts % self.ep_size == 0
        require(even, "num_experts", params.num_experts, f"a multiple of {self.ep_size}, the ranks")
        self.num_local_experts = params.num_experts // self.ep_size

    @classmethod
    @abstractmethod
    def is_platform_supported(cls) -> bool:
        """Whether the backend works on this machine.

        Returns
        -------
        bool
        """

    def is_workload_feasible(self, max_tokens_per_rank: int) -> bool:
        """Whether a step fits.

        Parameters
        ----------
        max_tokens_per_rank : int
            Tokens of the step's busiest rank.

        Returns
        -------
        bool
            Whether they are 0 to those of the params.
        """
        return 0 <= max_tokens_per_rank <= self.params.max_tokens_per_rank

    @abstractmethod
    def dispatch(self, hidden_states, topk_ids, topk_weights=None, **options) -> MoEEpDispatchResult:
        """Send each token to the ranks of its experts. A collective call.

        Parameters
        ----------
        hidden_states : torch.Tensor
            [tokens, hidden_size].
        topk_ids : torch.Tensor
            [tokens, top_k]: ids among all experts.
        topk_weights : torch.Tensor, optional
            [tokens, top_k].
        **options
            The backend's.

        Returns
        -------
        MoEEpDispatchResult

        Raises
        ------
        ValueError
            An argument that the backend does not take.
        """

    @abstractmethod
    def combine(self, expert_output, *, output=None) -> torch.Tensor:
        """Give each token of the last dispatch the sum of its rows. A collective call.

        Parameters
        ----------
        expert_output : torch.Tensor
            [ep_size * tokens_per_rank, hidden_size]: what this rank's experts made of each row, weighted and added.
        output : torch.Tensor, optional
            [tokens, hidden_size], receives the result.

        Returns
        -------
        torch.Tensor
            [tokens, hidden_size].

        Raises
        ------
        ValueError
            An argument that the backend does not take.
        """

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Where experts may write what `combine` takes, which spares a copy; after a dispatch only.

        Parameters
        ----------
        dtype : torch.dtype
            Of the rows.

        Returns
        -------
        torch.Tensor or None
            [ep_size * tokens_per_rank, hidden_size]: the workspace's memory; None if there is no such place.
        """
        return None

    def destroy(self) -> None:
        """Free what the object holds."""
