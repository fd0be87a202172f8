"""Dispatch and combine of one expert-parallel group."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch

from flashinfer._core.arguments import checked_late
from flashinfer._core.checks import OutOfTurn, require
from flashinfer.comm.comm_backend import TorchDistBackend
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import MnnvlConfig
from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank
from flashinfer.moe_ep import formats
from flashinfer.moe_ep.backend import MoEEpCommunication, MoEEpDispatchResult
from flashinfer.moe_ep.config import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig


class NVLinkOneSidedAlltoAll(MoEEpCommunication):
    """Tokens go straight into the memory of the ranks of their experts; results are fetched. A collective constructor.

    It is `flashinfer.comm.MoeAlltoAll` with rows, scales, ids and weights in one dispatch. Where ranks do not reach
    each other's memory, and on CPUs, the process group carries the same.

    Parameters
    ----------
    bootstrap : BootstrapConfig
    params : MoEEpCommParams
    config : NVLinkOneSidedConfig, optional

    Raises
    ------
    ValueError
        Experts that the ranks do not divide, a group of other ranks than the bootstrap's, or an option of `config` that
        is not offered.
    TimeoutError
        A rank did not come within the deadline of set-ups.

    Notes
    -----
    Objects of the same ranks and sizes have one workspace and take turns, each with a dispatch and its combine. Waits
    end after `alltoall.deadline` seconds, and `check` says what went wrong. A dispatch without max_tokens_per_rank has
    results of one shape, for CUDA graphs and low latency; with it, results are as large as the busiest rank needs, for
    throughput.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, create_communication
    >>> params = MoEEpCommParams(num_experts=4, top_k=1, max_tokens_per_rank=8, hidden_size=64)
    >>> ep = create_communication(BootstrapConfig(1, 0), params, "nvlink_one_sided")
    >>> got = ep.dispatch(torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[3], [0]]))
    >>> ep.combine(2 * got.hidden_states)[:, 0]
    tensor([2., 2.], dtype=torch.bfloat16)
    """

    backend_name: ClassVar[str] = "nvlink_one_sided"

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: NVLinkOneSidedConfig | None = None
    ):
        super().__init__(bootstrap, params)
        self.config = NVLinkOneSidedConfig() if config is None else config
        require(not self.config.enable_rank_mask, "enable_rank_mask", True, "False")
        extra = self.config.extra_payload_bytes_per_token
        require(extra >= 0, "extra_payload_bytes_per_token", extra, "at least 0")
        backend = self.config.comm_backend
        if backend is None and (self.ep_size > 1 or bootstrap.process_group is not None):
            backend = TorchDistBackend(bootstrap.process_group)
        mapping = Mapping(
            world_size=self.ep_size, rank=self.ep_rank, gpus_per_node=self.ep_size, tp_size=self.ep_size,
            moe_ep_size=self.ep_size,
        )  # fmt: skip
        # Ids are int32 and weights up to float32.
        sent = params.dispatch_bytes_per_token + params.top_k * 8 + extra
        back = params.hidden_size * params.token_dtype.itemsize
        stats = self.config.eplb_stats_num_experts
        size = moe_a2a_get_workspace_size_per_rank(self.ep_size, params.max_tokens_per_rank, sent, back, stats)
        with _on(bootstrap.device):
            self._alltoall: MoeAlltoAll | None = MoeAlltoAll(
                mapping, params.max_tokens_per_rank, params.top_k, params.num_experts, size,
                mnnvl_config=MnnvlConfig(comm_backend=backend), eplb_stats_num_experts=stats,
            )  # fmt: skip

    @classmethod
    def is_platform_supported(cls) -> bool:
        """True: ranks that do not reach each other's memory go through the process group.

        Returns
        -------
        bool
        """
        return True

    @property
    def alltoall(self) -> MoeAlltoAll:
        """What moves the tokens: its deadline, checks and checkpoints."""
        if self._alltoall is None:
            raise RuntimeError("NVLinkOneSidedAlltoAll: it is destroyed")
        return self._alltoall

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
        RuntimeError
            The object is destroyed.
        """
        self.alltoall.check(wait)

    @checked_late
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
        global_scale: torch.Tensor | float | None = None,
    ) -> MoEEpDispatchResult:
        """Send each token to every rank that has an expert of it, once to each. A collective call.

        Parameters
        ----------
        hidden_states : torch.Tensor
            [tokens, hidden_size] in the dtype of the params, which are quantised if the params have a format for that;
            or any other rows [tokens, ...], which travel as they are: codes, or rows of another layer that shares these
            buffers.
        topk_ids : torch.Tensor
            int32 or int64 [tokens, top_k]; an id outside 0 to num_experts - 1 goes nowhere.
        topk_weights : torch.Tensor, optional
            [tokens, top_k], for the experts.
        hidden_states_scale : torch.Tensor, optional
            [tokens, ...], scales of rows that are codes.
        max_tokens_per_rank : int, optional
            The most tokens of any rank in this call, the same on every rank; by default that of the params.
        eplb_local_stats : torch.Tensor, optional
            int32 [eplb_stats_num_experts] of this rank.
        active_rank_mask
            Only None: all ranks take part.
        global_scale : torch.Tensor or float, optional
            For rows that are quantised here, float32, the same on every rank: NVFP4 multiplies by it, as
            `flashinfer.nvfp4_quantize` says; FP8PerTensor divides by it.

        Returns
        -------
        MoEEpDispatchResult

        Raises
        ------
        ValueError
            An argument other than the above.
        RuntimeError
            The dispatch before has had no combine, or the object is destroyed.
        TimeoutError
            A rank did not come within the deadline.
        """
        require(active_rank_mask is None, "active_rank_mask", "a mask", "None")
        if self.alltoall.opened is not None:
            raise OutOfTurn("NVLinkOneSidedAlltoAll: a dispatch waits for its combine")
        params = self.params
        most = params.max_tokens_per_rank if max_tokens_per_rank is None else max_tokens_per_rank
        limit = params.max_tokens_per_rank
        require(0 < most <= limit, "max_tokens_per_rank", most, f"1 to {limit}")
        integer = topk_ids.dtype in (torch.int32, torch.int64)
        require(integer, "topk_ids", topk_ids.dtype, "int32, int64")
        shape = (len(hidden_states), params.top_k)
        require(tuple(topk_ids.shape) == shape, "topk_ids", tuple(topk_ids.shape), f"{shape}")
        if topk_weights is not None:
            require(tuple(topk_weights.shape) == shape, "topk_weights", tuple(topk_weights.shape), f"{shape}")
            fits = topk_weights.element_size() <= 4
            require(fits, "topk_weights", topk_weights.dtype, "a dtype of at most 4 bytes")
        rows, scale = self._rows(hidden_states, hidden_states_scale, global_scale)
        ids = _narrow_ids(topk_ids, params.num_experts)
        payloads = {"rows": rows, "scale": scale, "ids": ids, "weights": topk_weights}
        payloads = {name: x.contiguous() for name, x in payloads.items() if x is not None}
        received = self.alltoall.dispatch(
            payloads["ids"], list(payloads.values()), most, params.invalid_expert_id, list(payloads).index("ids"),
            eplb_local_stats,
        )  # fmt: skip
        got = {name: x.flatten(0, 1) for name, x in zip(payloads, received, strict=True)}
        return MoEEpDispatchResult(
            got["rows"], got["ids"], got.get("weights"), most, got.get("scale"), self.alltoall.eplb_gathered_stats
        )

    def _rows(self, x: torch.Tensor, scale: torch.Tensor | None, global_scale):
        """Rows and scales as they travel."""
        params = self.params
        name = None if params.dispatch_format is None else params.dispatch_format.name
        plain = x.dim() == 2 and x.shape[1] == params.hidden_size and x.dtype == params.token_dtype and scale is None
        if plain and name not in (None, "BF16", "FP16"):
            return formats.quantise(name, x, global_scale)
        require(global_scale is None, "global_scale", global_scale, "None, for nothing is quantised")
        return x.to(formats.FORMATS[name].code_dtype) if plain and name is not None else x, scale

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """Where experts may write what `combine` takes, which spares a copy; after a dispatch only.

        Parameters
        ----------
        dtype : torch.dtype
            Of the rows.

        Returns
        -------
        torch.Tensor
            [ep_size * tokens_per_rank, hidden_size]: the workspace's memory.

        Raises
        ------
        RuntimeError
            No dispatch waits for a combine, or the object is destroyed.
        ValueError
            Too few bytes for rows of that dtype.
        """
        most = self._most()
        return self.alltoall.get_combine_payload_tensor_in_workspace(most, self.params.hidden_size, dtype).flatten(0, 1)

    @checked_late
    def combine(
        self,
        expert_output: torch.Tensor,
        *,
        output: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Give each token of the last dispatch the sum of its rows, in float32 and rank order. A collective call.

        Parameters
        ----------
        expert_output : torch.Tensor
            [ep_size * tokens_per_rank, hidden] or [ep_size, tokens_per_rank, hidden], bfloat16, float16 or float32: for
            each received row what this rank's experts made of it, weighted and added. hidden is hidden_size, or less
            of a layer that shares these buffers.
        output : torch.Tensor, optional
            [tokens, hidden], receives the result; its dtype is the result's.
        active_rank_mask
            Only None.

        Returns
        -------
        torch.Tensor
            [tokens, hidden] in the dtype of `expert_output`, or `output`.

        Raises
        ------
        ValueError, RuntimeError, TimeoutError
            As `dispatch` raises them.
        """
        require(active_rank_mask is None, "active_rank_mask", "a mask", "None")
        most, hidden = self._most(), expert_output.shape[-1] if expert_output.dim() > 1 else 0
        shapes = (self.ep_size * most, hidden), (self.ep_size, most, hidden)
        fits = tuple(expert_output.shape) in shapes and expert_output.is_contiguous()
        fits = fits and 0 < hidden <= self.params.hidden_size
        allowed = f"[{shapes[0][0]}, hidden] or [{self.ep_size}, {most}, hidden], contiguous, hidden up to "
        require(fits, "expert_output", tuple(expert_output.shape), f"{allowed}{self.params.hidden_size}")
        payload = expert_output.view(shapes[1])
        narrow = expert_output.element_size() <= self.params.token_dtype.itemsize
        require(narrow, "expert_output", expert_output.dtype, f"{self.params.token_dtype}, or as wide")
        place = self.alltoall.get_combine_payload_tensor_in_workspace(most, hidden, expert_output.dtype)
        in_place = place.data_ptr() == expert_output.data_ptr()
        low = self.config.use_low_precision_combine
        return self.alltoall.combine(
            payload, most, payload_in_workspace=in_place, output=output, use_low_precision=low
        )  # fmt: skip

    def _most(self) -> int:
        opened = self.alltoall.opened
        if opened is None:
            raise OutOfTurn("NVLinkOneSidedAlltoAll: a combine comes after a dispatch")
        return opened[1]

    def destroy(self) -> None:
        """Free the memory; once is enough. It raises what went wrong in an earlier call and nothing has raised yet."""
        alltoall, self._alltoall = self._alltoall, None
        if alltoall is not None:
            alltoall.destroy()


def _narrow_ids(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Ids as int32; what does not fit is no expert's either way."""
    return ids if ids.dtype == torch.int32 else torch.where((ids >= 0) & (ids < experts), ids, -1).int()


def _on(device: int | None):
    return contextlib.nullcontext() if device is None or not torch.cuda.is_available() else torch.cuda.device(device)


_BACKENDS: dict[str, type[MoEEpCommunication]] = {NVLinkOneSidedAlltoAll.backend_name: NVLinkOneSidedAlltoAll}


def available_communication_backends() -> list[str]:
    """The names that `create_communication` takes here.

    Returns
    -------
    list of str
        Sorted; empty where none works.

    Examples
    --------
    >>> import flashinfer
    >>> isinstance(flashinfer.moe_ep.available_communication_backends(), list)
    True
    """
    return sorted(name for name, kind in _BACKENDS.items() if kind.is_platform_supported())


def create_communication(
    bootstrap: BootstrapConfig, params: MoEEpCommParams, backend: str | NVLinkOneSidedConfig, **options
) -> MoEEpCommunication:
    """Make the communication of an expert-parallel group. A collective call.

    Parameters
    ----------
    bootstrap : BootstrapConfig
    params : MoEEpCommParams
    backend : str or NVLinkOneSidedConfig
        "nvlink_one_sided", or its config.
    **options
        `config`, with a name.

    Returns
    -------
    MoEEpCommunication

    Raises
    ------
    ValueError
        A backend or option other than the above, and as `NVLinkOneSidedAlltoAll` raises it.
    """
    name = getattr(backend, "backend_name", backend)
    known = isinstance(name, str) and name in _BACKENDS
    require(known, "backend", repr(name), ", ".join(map(repr, _BACKENDS)))
    unknown = [option for option in options if option != "config" or not isinstance(backend, str)]
    require(not unknown, "options", ", ".join(unknown), "config, with a backend's name")
    if not isinstance(backend, str):
        options = {"config": backend}
    return _BACKENDS[str(name)](bootstrap, params, **options)
